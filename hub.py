"""The Hugging Face Hub: downloads that survive a bad network, and trained models in its format.

    from model import LanguageModel

    model = LanguageModel.from_pretrained('pretrained/lm')    # a folder, or OWNER/NAME on the Hub
    model.save_pretrained('my_model')
    model.push_to_hub('OWNER/NAME')                           # after `hf auth login`

A saved model is a folder of three files: model.safetensors, its weights; config.json, which
rebuilds it; README.md, its model card. sample.py and play_sokoban.py write the same with --export.
Loading runs no code of the folder.
"""

import errno
import functools
import itertools
import json
import os
import shlex
import time
from collections.abc import Callable
from typing import Self

from configurator import Mistake, fail, first_line, read_script, write_json, write_text

import common
from common import CONFIG, WEIGHTS, Path

try:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HTTPError, LocalEntryNotFoundError
except ImportError:
    fail('huggingface_hub is not installed: pip install huggingface_hub')

CARD = 'README.md'
PAPER = 'https://arxiv.org/abs/2609.12531'
ROOT = os.path.dirname(os.path.abspath(__file__))
# Exceptions that huggingface_hub and `datasets` raise; RuntimeError comes from hf-xet, which
# transfers files.
HUB_ERRORS = (OSError, ValueError, RuntimeError, HTTPError, EntryNotFoundError)
# The exceptions among them that mean a failed connection. LocalEntryNotFoundError: there is neither
# a connection nor a copy in the cache.
NETWORK_ERRORS = (
    ConnectionError,
    TimeoutError,
    RuntimeError,
    HTTPError,
    LocalEntryNotFoundError,
)
# Parts of the messages of errors, of whatever type, that come from the disk of this machine.
DISK_ERRORS = [
    os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
]
HUB_TRIES = 5  # per download; the pauses between them add up to 15 s
MODEL_CARD = """---
{{ card_data }}
---

# {{ title }}

{{ summary }}

It was trained with Parallel Experts, a codebase around the question of
[Temporal Recurrence Favors Fewer Layers]({{ paper_url }}): how many layers does a model need if it
carries its state from one step to the next?

Score: {{ score or 'not recorded' }}

Trained for {{ step if step is not none else 'an unrecorded number of' }} updates by:

```
{{ command or 'not recorded' }}
```

## Use

In the folder of the code, with FOLDER a copy of these files, or their name on the Hub:

```python
{{ usage }}
```

## Sizes

| | |
| --- | --- |
{% for name, value in sizes.items() %}| {{ name }} | {{ value }} |
{% endfor %}"""


# ---- downloads ----


def is_disk_error(error: Exception) -> bool:
    """Return whether a download failed because a file cannot be written on this machine."""
    return any(message in str(error) for message in DISK_ERRORS)


def is_network_error(error: Exception) -> bool:
    """Return whether a download that failed with `error` may succeed if it is tried again."""
    if huggingface_hub.constants.HF_HUB_OFFLINE or is_disk_error(error):
        return False
    if (response := getattr(error, 'response', None)) is not None:
        return response.status_code in (408, 429) or response.status_code >= 500
    return isinstance(error, NETWORK_ERRORS)


def wait_to_retry(error: Exception, failures: int) -> None:
    """Print a network error and sleep: 1 s after the first failure in a row, twice as long after
    each further one, at most 60 s."""
    seconds = min(60, 2 ** (failures - 1))
    print(f'network error: {first_line(error)}: next try in {seconds} s', flush=True)
    time.sleep(seconds)


def retry(call: Callable[[], object], tries: int) -> object:
    """Return call(). If the network fails, try again, up to `tries` times in all. Raises the last
    network error, or at once any other error."""
    for failures in itertools.count(1):
        try:
            return call()
        except HUB_ERRORS as error:
            if failures == tries or not is_network_error(error):
                raise
            wait_to_retry(error, failures)


def call_hub(function: str, repo: str, *names: str, **options: object) -> object:
    """Return huggingface_hub.FUNCTION(repo, *names, **options), called up to HUB_TRIES times if the
    network fails. Raises Mistake if the call fails for good."""
    call = functools.partial(getattr(huggingface_hub, function), repo, *names, **options)
    try:
        return retry(call, HUB_TRIES)
    except HUB_ERRORS as error:
        file = ' of '.join([*names, repo])
        if is_disk_error(error):
            advice = ''  # the reason is enough
        elif huggingface_hub.constants.HF_HUB_OFFLINE:
            advice = ': unset HF_HUB_OFFLINE to download it'
        elif is_network_error(error):
            advice = ': run the same command again to continue'
        else:
            advice = ': check the name, the revision and, for a private repository, `hf auth login`'
        raise Mistake(f'cannot download {file}: {first_line(error)}{advice}') from None


def pin_revision(
    meta: dict, folder: Path, repo: str, repo_type: str = 'dataset', revision: str = 'main'
) -> str:
    """Return the commit of a repository on the Hub from which this folder is downloaded.

    That is meta['revision'] or, the first time, the commit to which `revision` points now. The
    commit is then written to meta and to the folder's meta.json, for later downloads."""
    if not meta.get('revision'):
        found = call_hub('repo_info', repo, revision=revision, repo_type=repo_type)
        meta['revision'] = found.sha
        write_json(meta, os.path.join(folder, 'meta.json'))
    return meta['revision']


# ---- trained models ----


def read_text(path: str) -> str:
    """Return a file's text. Raises CheckpointError if it cannot be opened."""
    try:
        with open(path, encoding='utf-8') as file:
            return file.read()
    except OSError as error:
        raise common.CheckpointError(f'{path}: cannot be read: {error.strerror}') from None


def training_command(script: str, settings: dict) -> str:
    """Return the command line that trains with these settings. It names those that differ from the
    script's defaults, but not the output folder, nor those that do not change what is trained. A
    copied trainer that is not in this folder, or cannot be parsed, gets all of them."""
    script = os.path.basename(script)
    try:
        defaults, _, _ = read_script(os.path.join(ROOT, script))
    except (OSError, SyntaxError, ValueError):
        defaults = dict.fromkeys(settings)
    left_out = """out_dir resume overwrite eval_only log_interval plot tensorboard wandb
        wandb_project device threads""".split()
    flags = [
        f'--{name}={settings[name]}'
        for name, default in defaults.items()
        if name in settings and name not in left_out and settings[name] != default
    ]
    return shlex.join(['python', script, *flags])


class PublishedModel(
    huggingface_hub.PyTorchModelHubMixin,
    license='mit',
    paper_url=PAPER,
    model_card_template=MODEL_CARD,
    tags=['recurrence', 'parallel-experts'],
):
    """A base class with `from_pretrained`, `save_pretrained` and `push_to_hub`.

    A subclass defines KIND, a key that only its config.json has; `build(about)`, which returns a
    model, possibly on the device 'meta', for the entries of a config.json; `entries()`, which
    returns the entries that rebuild the model; and `describe(about)`, which returns the fields of
    its model card."""

    KIND: str
    DERIVED: tuple[str, ...] = ()  # files made from a saved model, removed when another is saved
    about: dict = {}  # the entries of config.json with which the model was loaded

    @classmethod
    def from_pretrained(cls, name: Path, *, device: str = 'cpu', **options: object) -> Self:
        """Return the model that a folder or a repository of the Hub holds, in fp32 and in
        evaluation mode. `options`, such as revision, go to huggingface_hub.snapshot_download.

        Raises CheckpointError, which names the file, if one is missing or damaged, if the weights
        do not fit, or if the model is of another class; Mistake if a download fails.
        """
        folder = str(name)
        if not os.path.isdir(folder):
            patterns = [CONFIG, WEIGHTS]
            try:
                folder = call_hub('snapshot_download', folder, allow_patterns=patterns, **options)
            except Mistake as error:
                raise Mistake(f'{folder}: no such folder, and {error}') from None
        path = os.path.join(folder, CONFIG)
        with common.restoring(path, 'the model'):
            about = json.loads(read_text(path))
            model = cls.build(about)
            if not isinstance(model, cls):
                raise ValueError(f'a {type(model).__name__}, not a {cls.__name__}')
        path = os.path.join(folder, WEIGHTS)
        weights = common.read_tensors(path, device)
        weights = {name: tensor.float() for name, tensor in weights.items()}
        common.load_weights(model, weights, path, assign=next(model.parameters()).is_meta)
        model.about = about
        return model.to(device).eval()

    def model_card(self, about: dict) -> huggingface_hub.ModelCard:
        """Return the model card for the entries of a config.json."""
        return self.generate_model_card(**self.describe(about))

    def save_pretrained(
        self,
        save_directory: Path,
        *,
        config: dict | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: object,
    ) -> str | None:
        """Write model.safetensors, config.json and README.md into a folder, in place of an earlier
        model of this kind; with push_to_hub=True, push them to the Hub as well.

        config: further entries of config.json, such as 'tokenizer', 'step' and 'command', added to
        those with which the model was loaded. Raises CheckpointError if the folder holds other
        files.
        """
        about = self.about | self.entries() | (config or {})
        folder = common.start_export(save_directory, self.KIND, CARD, *self.DERIVED)
        # The weights first: if the disk is full, an earlier model is still complete. (A kill
        # between this line and the CONFIG leaves them with the description of the earlier model.)
        common.write_tensors(self.state_dict(), folder / WEIGHTS)
        for name in self.DERIVED:
            (folder / name).unlink(missing_ok=True)
        write_json(about, folder / CONFIG)
        write_text(str(self.model_card(about)), folder / CARD)
        if not push_to_hub:
            return None
        repo_id = repo_id or os.path.basename(os.path.normpath(save_directory))
        return self.push_to_hub(repo_id, config=config, **options)
