"""The record of the code that a run was trained with."""

import ast
import os
import pathlib
import subprocess
import sys
from itertools import accumulate

from support.compiling import source_hash
from support.files import Path

PROJECT = pathlib.Path(__file__).resolve().parent.parent
_loaded_sources: dict[pathlib.Path, bytes] = {}


def modules_of(script: Path) -> list[pathlib.Path]:
    """Return the file of a script, then those of all modules of its folder and of the project that
    it imports, directly or not, as their import statements say."""
    found = [pathlib.Path(script).resolve()]
    folders = [found[0].parent, PROJECT]  # in the order in which Python searches them
    for file in found:  # which grows
        for node in ast.walk(ast.parse(file.read_bytes())):
            names, places = [], folders
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f'{node.module or ""}.{alias.name}'.strip('.') for alias in node.names]
                places = [file.parents[node.level - 1]] if node.level else folders
            for name in names:
                for stem in accumulate(name.split('.'), '{}/{}'.format):  # of a.b: a, a/b
                    ends = f'{stem}/__init__.py', f'{stem}.py'
                    paths = [place / end for place in places for end in ends]
                    path = next((path for path in paths if path.is_file()), file)
                    found += [path] if path not in found else []
    return found


def source_of(path: pathlib.Path) -> bytes:
    """Return the source of a module. Of one that is loaded, return what stood in its file when it
    was first asked for: a notebook that runs a trainer again after an edit runs the old module."""
    loaded = {getattr(module, '__file__', None) for module in list(sys.modules.values())}
    source = path.read_bytes()
    return _loaded_sources.setdefault(path, source) if str(path) in loaded else source


def commit_of(files: list[Path]) -> str:
    """Return the git commit of the project's folder, with '-dirty' if one of these files has
    changed since or is not in it; 'unknown' if git does not keep the project's files."""
    # GIT_DIR and the like, of a hook for example, name another repository.
    env = {name: x for name, x in os.environ.items() if not name.startswith('GIT_')}
    git = ['git', '--no-optional-locks', '-C', PROJECT]
    options = {'capture_output': True, 'text': True, 'env': env}
    try:
        subprocess.run([*git, 'ls-files', '--error-unmatch', __file__], check=True, **options)
        name = subprocess.run([*git, 'rev-parse', '--short=12', 'HEAD'], check=True, **options)
        changed = subprocess.run([*git, 'status', '--porcelain', '--ignored', *files], **options)
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'
    is_dirty = changed.stdout or changed.returncode  # git fails for a file outside
    return name.stdout.strip() + ('-dirty' if is_dirty else '')


def script_checksum(script: Path) -> str:
    """Return a checksum of a script alone. Comments, docstrings and layout do not change it."""
    return source_hash([pathlib.Path(script).read_bytes()])


def code_record(script: Path) -> dict[str, str]:
    """Return what config.json tells about the code of a script, which need not run: a checksum of
    its file and of all modules of the project that it imports, one of its file alone, the folder of
    the modules, and their commit."""
    files = modules_of(script)
    return {
        'checksum': source_hash([files[0].read_bytes(), *map(source_of, files[1:])]),
        'script_checksum': script_checksum(script),
        'folder': str(PROJECT),
        'commit': commit_of(files),
    }
