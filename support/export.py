"""The Hugging Face Hub: downloads, and trained models in its format.

    from model import LanguageModel

    model = LanguageModel.from_pretrained('pretrained/lm')    # a folder, or OWNER/NAME on the Hub
    model.save_pretrained('my_model')
    model.push_to_hub('OWNER/NAME')                           # after `hf auth login`

A saved model is a folder of three files: model.safetensors, its weights; config.json, which
rebuilds it; README.md, its model card. sample.py and play_sokoban.py write the same with --export.
Loading runs no code of the folder.
"""

import inspect
import os
import pathlib
import zlib
from typing import Self

from configurator import UserError, first_line

import huggingface_hub
import torch
from huggingface_hub.errors import EntryNotFoundError, HTTPError

from support.files import (
    Path,
    read_json,
    read_tensors,
    remove_temporary,
    write_json,
    write_tensors,
    write_text,
)
from support.ranks import print0
from support.run_folder import BEST, CONFIG, WEIGHTS, load_last, restoring

CARD = 'README.md'
PAPER = 'https://arxiv.org/abs/2609.12531'
# Exceptions that huggingface_hub and `datasets` raise; RuntimeError comes from hf-xet, which
# transfers files.
HUB_ERRORS = (OSError, ValueError, RuntimeError, HTTPError, EntryNotFoundError)
MODEL_CARD = """---
{{ card_data }}
---

# Parallel Experts: {{ name }}

A {{ kind }} model of {{ parameters }} parameters.

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
from {{ module }} import {{ name }}

model = {{ name }}.from_pretrained('FOLDER')
```

## Sizes

| | |
| --- | --- |
{% for name, value in sizes.items() %}| {{ name }} | {{ value }} |
{% endfor %}"""


# ---- downloads ----


def call_hub(function: str, repo: str, *names: str, **options: object) -> object:
    """Return huggingface_hub.FUNCTION(repo, *names, **options), which tries again by itself if the
    network fails. Raises UserError if the call fails for good."""
    try:
        return getattr(huggingface_hub, function)(repo, *names, **options)
    except HUB_ERRORS as error:
        raise UserError(
            f'cannot download {" of ".join([*names, repo])}: {first_line(error)}: the same command '
            'continues; or check the name, the revision and, for a private repository, '
            '`hf auth login`'
        ) from None


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


def load_weights(model: torch.nn.Module, weights: dict, path: Path) -> None:
    """Load all weights of a model. Raises UserError, naming the file `path` and the weight, if one
    is missing, has another shape or is not finite."""
    with restoring(path):
        for name, x in weights.items():
            if not x.isfinite().all():
                raise ValueError(f'{name} holds NaN or infinity')
        model.load_state_dict(weights)


def checksum(model: torch.nn.Module) -> int:
    """Return the CRC-32 of all weights, rounded to bfloat16: so a model has that of its export in
    bfloat16."""
    crc = 0
    for x in model.state_dict().values():
        rounded = x.to('cpu', torch.bfloat16).contiguous().view(-1)
        crc = zlib.crc32(rounded.view(torch.int16).numpy(), crc)
    return crc


def export_in(folder: Path) -> pathlib.Path:
    """Return the folder of an export: `folder` itself, or the best model of a run."""
    path = pathlib.Path(folder)
    return path if (path / WEIGHTS).exists() else path / BEST


def read_metadata(folder: pathlib.Path) -> dict:
    """Return the entries of an export's config.json. Raises UserError if it cannot be read."""
    metadata = read_json(folder / CONFIG)
    if not metadata:
        reason = 'cannot be read: missing or damaged? Name the folder of a run or of an export'
        raise UserError(f'{folder / CONFIG}: {reason}')
    return metadata


def sizes_in(folder: Path) -> dict:
    """Return the settings that the model of an export, or the best model of a run, is built with.
    Raises UserError if the folder holds neither."""
    metadata = read_metadata(export_in(folder))
    return {**metadata, **metadata.get('model', {})}


def initialize_from(model: torch.nn.Module, folder: Path) -> None:
    """Initialize a model from an export or from the best model of a run. Every weight whose name
    and shape the model has is taken. Print which weights of the model and of the folder were not.
    Raises UserError if the folder cannot be read or no weight fits."""
    path = export_in(folder) / WEIGHTS
    weights, initial = read_tensors(path), model.state_dict()
    fits = [k for k, x in initial.items() if k in weights and weights[k].shape == x.shape]
    # A tied weight, which has several names, is taken under the first, unless all are equal.
    place = {name: initial[name].data_ptr() or name for name in fits}  # an empty weight has none
    first = {place[name]: name for name in reversed(fits)}
    fits = [name for name in fits if torch.equal(weights[name], weights[first[place[name]]])]
    if not any(initial[name].dim() for name in fits):  # a scalar fits anywhere
        raise UserError(f'{path}: no weight has a name and shape of this model')
    load_weights(model, {**initial, **{name: weights[name] for name in fits}}, path)
    print0(f'{path}: took {len(fits)} of {len(initial)} weights')
    for label, tensors in (('initialized from scratch', initial), ('not taken', weights)):
        rest = [f'{name} {list(x.shape)}' for name, x in tensors.items() if name not in fits]
        if rest:
            print0(f'{label}: {", ".join(rest)}')


def start_export(folder: Path, kind: str, *derived: str) -> pathlib.Path:
    """Prepare a folder, new or with an earlier export of this kind, for an export, and return its
    path. A new folder gets a CONFIG that marks it but describes no model yet. What was made from
    the earlier export is removed. Raises UserError if the folder holds anything else.

    kind: a key that only the CONFIG of this kind has; derived: patterns of files made from an
    export."""
    path = pathlib.Path(folder)
    old = {file for pattern in derived for file in path.glob(pattern) if file.is_file()}
    found = set(path.glob('[!.]*'))  # no hidden files
    others = {file.name for file in found - old} - {CONFIG, WEIGHTS, CARD}
    is_foreign = found and (others or kind not in read_json(path / CONFIG))
    if is_foreign or path.is_file():
        raise UserError(f'{path}: holds files that no such export wrote: choose another folder')
    path.mkdir(parents=True, exist_ok=True)
    remove_temporary(path)
    for file in old:
        file.unlink()
    if not found:
        write_json({kind: None}, path / CONFIG)
    return path


class PublishedModel(
    huggingface_hub.PyTorchModelHubMixin,
    license='mit',
    paper_url=PAPER,
    model_card_template=MODEL_CARD,
    tags=['recurrence', 'parallel-experts'],
):
    """A base class with the mixin's `from_pretrained` and `push_to_hub`. `save_pretrained` is ours,
    because the mixin's keeps an old model card and would replace the files of strangers, not
    atomically; `load_trained` is for the folders of runs, and names a damaged file.

    A subclass defines KIND, a key that only its config.json has; `build(metadata)`, which returns a
    model for the entries of a config.json; and `entries()`, which returns the entries that rebuild
    the model: 'recurrent' and the sizes, as entries or together as 'model'."""

    KIND: str
    DERIVED = ('eval_*',)  # files made from a saved model, removed when another is saved
    metadata: dict = {}  # the entries of config.json with which the model was loaded
    loaded: int | None = None  # the checksum of the weights that `metadata` describes

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        device: str = 'cpu',
        config: object = None,  # of the mixin, unused: rebuild() reads the file
        **download: object,
    ) -> Self:
        """Return the model of a folder or of a repository of the Hub: what the mixin's
        from_pretrained calls. download: options of huggingface_hub.snapshot_download. Raises
        TypeError for an option that it does not have."""
        options = {**download, 'allow_patterns': [CONFIG, WEIGHTS]}
        inspect.signature(huggingface_hub.snapshot_download).bind(model_id, **options)
        folder = model_id
        if not os.path.isdir(folder):
            folder = huggingface_hub.snapshot_download(folder, **options)
        return cls.load_export(folder, device)

    @classmethod
    def load_export(cls, folder: Path, device: str = 'cpu') -> Self:
        """Return the model of an export, in fp32 and in evaluation mode. Raises UserError, which
        names the file, if one is missing or damaged, or if the model is of another class."""
        path = pathlib.Path(folder)
        with restoring(path / CONFIG):
            model = cls.rebuild(read_metadata(path))
        return model.restore(read_tensors(path / WEIGHTS), path / WEIGHTS, device)

    @classmethod
    def load_trained(cls, folder: Path, which: str = 'best', device: str = 'cpu') -> Self:
        """Return the model of a run, or of an export. which: of a run the 'best' model, if it has
        one, or the 'last' checkpoint. Raises UserError."""
        export = export_in(folder)
        if (export / WEIGHTS).exists() and (which == 'best' or export == pathlib.Path(folder)):
            return cls.load_export(export, device)
        saved, path = load_last(folder)
        with restoring(path):
            settings = {'settings': saved['config'], 'command': saved['metadata']['command']}
            model = cls.rebuild({**saved['entries'], 'step': saved['step'], **settings})
            return model.restore(saved['model'], path, device)

    @classmethod
    def rebuild(cls, metadata: dict) -> Self:
        """Return the model that the entries of a config.json describe, with initial weights. Raises
        KeyError, TypeError or ValueError if they describe none of this class."""
        try:
            model = cls.build(metadata)
        except UserError as error:  # not in what the user has typed: the caller names the file
            raise ValueError(error) from None
        if not isinstance(model, cls):
            raise ValueError(f'a {type(model).__name__}, not a {cls.__name__}')
        model.metadata = metadata
        return model

    def restore(self, weights: dict, path: Path, device: str) -> Self:
        """Load the weights that `metadata` describes; return the model, in evaluation mode."""
        load_weights(self, weights, path)
        self.loaded = checksum(self)
        return self.to(device).eval()

    def describe(self, metadata: dict) -> dict:
        """Return the fields of the model card (MODEL_CARD); metadata: the entries of
        config.json."""
        entries = self.entries()
        return {
            'name': type(self).__name__,
            'module': type(self).__module__,
            'kind': 'recurrent' if entries['recurrent'] else 'non-recurrent',
            'parameters': f'{sum(p.numel() for p in self.parameters()):,}',
            'sizes': entries.get('model', entries),
            **{name: metadata.get(name) for name in ('score', 'step', 'command')},
        }

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

        config: further entries of config.json, such as 'step', 'command' and 'score'. A model whose
        weights are still those that were loaded keeps the entries that it was loaded with. Raises
        UserError if the folder holds other files.
        """
        is_as_loaded = self.loaded is not None and self.loaded == checksum(self)
        kept = self.metadata if is_as_loaded else {}
        metadata = kept | self.entries() | (config or {})
        folder = start_export(save_directory, self.KIND, *self.DERIVED)
        # Copies, because a tied parameter stands in the file under each of its names. The weights
        # come first: if the disk is full, an earlier model is still complete. (A kill between this
        # line and the CONFIG leaves them with the description of the earlier model.)
        weights = {name: x.clone() for name, x in self.state_dict().items()}
        write_tensors(weights, folder / WEIGHTS)
        write_json(metadata, folder / CONFIG)
        card = self.generate_model_card(**self.describe(metadata))
        write_text(str(card), folder / CARD)
        if not push_to_hub:
            return None
        repo_id = repo_id or os.path.basename(os.path.normpath(save_directory))
        return self.push_to_hub(repo_id, config=config, **options)
