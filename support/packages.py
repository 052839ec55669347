"""Optional packages: imported where they are needed, with one line if they are missing."""

import importlib
import importlib.metadata
import importlib.util
import re
import types

from support.script import UserError

# The oldest versions that work, as in pyproject.toml. tiktoken 0.10 reads '<|endoftext|>' in a text
# as a document boundary, 0.11 cannot read GPT-2's files from a folder, and 0.12 takes minutes for a
# run of a million letters; datasets 5.0.0 resumes at the start of a data set.
NEEDED = {'tiktoken': '0.13', 'datasets': '5.0.1', 'pyarrow': '24'}


def need(package: str, otherwise: str = '') -> types.ModuleType:
    """Import an optional package and return it. Raises UserError if it is missing or too old.
    otherwise: what to do without it, for the message."""
    advice = f"pip install -U '{package}>={NEEDED[package]}'{otherwise}"
    try:
        module = importlib.import_module(package)
        version = importlib.metadata.version(package)
    except ImportError:
        raise UserError(f'{package} is needed: {advice}') from None
    found, least = (
        tuple(map(int, re.findall(r'\d+', text)[:3])) for text in (version, NEEDED[package])
    )
    if found < least:
        raise UserError(f'{package} {version} is too old: {advice}')
    return module


def need_packages(**wanted: bool) -> None:
    """Raise UserError if a package with a true value is not installed:
    need_packages(wandb=True)."""
    for name in [name for name, is_wanted in wanted.items() if is_wanted]:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec else []
        # A folder without __init__.py can be imported, too: wandb makes one named wandb.
        if spec is None or spec.origin is None or not places:
            other = f' ({(places or [spec.origin])[0]} is something else)' if spec else ''
            is_tracker = name in ('tensorboard', 'wandb')
            without = f'--{name}=False' if is_tracker else '--env=torch'
            advice = f'pip install {name}, or do without ({without})'
            raise UserError(f'{name} is asked for but not installed{other}: {advice}')
