"""The Hugging Face Hub: downloads, and trained models in its format.

    >>> from model import LanguageModel

    >>> model = LanguageModel.from_pretrained('pretrained/lm')  # or 'OWNER/NAME' on the Hub
    >>> model.save_pretrained('my_model', config=model.metadata)  # with its score and its command
    >>> model.push_to_hub('OWNER/NAME', config=model.metadata)  # after `hf auth login`

A saved model is a folder of three files: model.safetensors, its weights; config.json, which
rebuilds it; README.md, its model card. sample.py and play_sokoban.py write the same with --export.
Loading runs no code of the folder.
"""

import inspect
import os
import pathlib
import re
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from support.script import UserError, first_line, print0, warn

import huggingface_hub
import torch
from huggingface_hub.errors import EntryNotFoundError, HTTPError

from support.files import (
    Path,
    plain,
    read_json,
    read_tensors,
    replacing,
    write_json,
    write_tensors,
)
from support.run_folder import (
    CAUSES,
    CONFIG,
    WEIGHTS,
    export_in,
    load_last,
    read_metadata,
    restoring,
)

CARD = 'README.md'
PAPER = 'https://arxiv.org/abs/2609.12531'
# Exceptions that huggingface_hub and `datasets` raise; RuntimeError comes from hf-xet, which
# transfers files.
HUB_ERRORS = (OSError, ValueError, RuntimeError, HTTPError, EntryNotFoundError)
MODEL_CARD = """---
{{ card_data }}
---

# Parallel Experts: {{ name }}

A {{ 'recurrent' if metadata.recurrent else 'non-recurrent' }} model of {{ parameters }} parameters.

It was trained with Parallel Experts, a codebase around the question of
[Temporal Recurrence Favors Fewer Layers]({{ paper_url }}): how many layers does a model need if it
carries its state from one step to the next?

Score: {{ metadata.score or 'not recorded' }}

Trained for {{ metadata.step | default('an unrecorded number of') }} updates by:

```
{{ metadata.command }}
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

# The bias of the router's keys, which changed nothing. Older models have it.
OLD_BIAS = re.compile(r'\.router_k_bias$|routers\.\d+\.k_bias$')


def without_old_bias(weights: dict, model: torch.nn.Module) -> dict:
    """Return the weights without an OLD_BIAS that the model does not have."""
    names = model.state_dict()
    return {k: x for k, x in weights.items() if k in names or not OLD_BIAS.search(k)}


def load_weights(model: torch.nn.Module, weights: dict, path: Path) -> None:
    """Load all weights of a model. Raises UserError, naming the file `path` and the weight, if one
    is missing, has another shape or is not finite, or if two differ that the model has as one
    parameter."""
    with restoring(path):
        for name, x in weights.items():
            if not x.isfinite().all():
                raise ValueError(f'{name} holds NaN or infinity')
        model.load_state_dict(without_old_bias(weights, model))
        for name, x in model.state_dict().items():
            if not torch.equal(x, weights[name].to(x)):
                text = 'is one parameter with another weight of the model, but not in the file'
                raise ValueError(f'{name} {text}')


def weights_checksum(model: torch.nn.Module) -> int:
    """Return a checksum of the weights of a model, whatever its device."""
    checksum = 0
    for x in model.state_dict().values():
        checksum = zlib.crc32(x.cpu().contiguous().flatten().view(torch.uint8).numpy(), checksum)
    return checksum


def refuse_unknown_sizes(model: torch.nn.Module, entries: dict, path: Path) -> None:
    """Raise UserError, naming the file `path`, if a saved model with these entries has a size that
    the code of this model does not know, for example that of an edit which has been undone. Its
    weights may fit all the same, but they were trained in another function."""
    for name, value in entries.get('model', {}).items():
        if name not in model.entries()['model']:
            reason = f'was trained with {name} = {value!r}, which this code does not have'
            raise UserError(f'{path}: {reason}: use the code of that run')


def initialize_from(model: torch.nn.Module, folder: Path) -> int:
    """Initialize a model from an export or from the best model of a run, and return a checksum of
    the file of weights. Every weight whose name and shape the model has is taken. Print which
    weights of the model and of the folder were not. Raises UserError if the folder cannot be read,
    no weight fits, or it has a size that this code does not know."""
    path = export_in(folder) / WEIGHTS
    refuse_unknown_sizes(model, read_metadata(path.parent), path)
    weights, initial = without_old_bias(read_tensors(path), model), model.state_dict()
    fits = [k for k, x in initial.items() if k in weights and weights[k].shape == x.shape]
    # A tied weight, which has several names, is taken under the first, unless all are equal.
    place = {name: initial[name].data_ptr() or name for name in fits}  # an empty weight has none
    first = {place[name]: name for name in reversed(fits)}
    fits = [name for name in fits if torch.equal(weights[name], weights[first[place[name]]])]
    if not any(initial[name].dim() for name in fits):  # a scalar fits anywhere
        raise UserError(f'{path}: {CAUSES} (no weight has a name and shape of this model)')
    load_weights(model, {**initial, **{name: weights[name] for name in fits}}, path)
    print0(f'{path}: took {len(fits)} of {len(initial)} weights')
    for label, tensors in (('initialized from scratch', initial), ('not taken', weights)):
        rest = [f'{name} {list(x.shape)}' for name, x in tensors.items() if name not in fits]
        if rest:
            print0(f'{label}: {", ".join(rest)}')
    return zlib.crc32(path.read_bytes())


class PublishedModel(
    huggingface_hub.PyTorchModelHubMixin,
    license='mit',
    paper_url=PAPER,
    model_card_template=MODEL_CARD,
    tags=['recurrence', 'parallel-experts'],
):
    """A model with `save_pretrained`, `from_pretrained` and `push_to_hub` of huggingface_hub.

    A subclass defines `build(metadata)`, which returns a model with initial weights for the entries
    of a config.json, and `entries()`, which returns the entries that rebuild the model: 'recurrent'
    and in 'model' the sizes."""

    # The entries of config.json with which the model was loaded; of one that was built, none.
    metadata: Mapping = MappingProxyType({})

    @classmethod
    def from_pretrained(cls, name: Path, *, device: str = 'cpu', **options: object) -> Self:
        """Return the model in a folder, or in the repository `name` of the Hub, in fp32 and in
        evaluation mode. options: of huggingface_hub.snapshot_download, such as revision. Raises
        UserError, which names the file, if one is missing or damaged.

        (The mixin's names no file, leaves a weight that is missing as it was initialized, and
        prints.)"""
        inspect.signature(huggingface_hub.snapshot_download).bind(name, **options)  # or TypeError
        folder = os.path.expanduser(name)
        if not os.path.isdir(folder):
            options['allow_patterns'] = [CONFIG, WEIGHTS]
            try:
                folder = call_hub('snapshot_download', str(name), **options)
            except UserError as error:
                raise UserError(f'{name}: no such folder; {error}') from None
        return cls.load_trained(folder, device=device)

    @classmethod
    def load_trained(cls, folder: Path, which: str = 'best', device: str = 'cpu') -> Self:
        """Return the model of a run, or of an export, in fp32 and in evaluation mode. which: of a
        run the 'best' model, if it has one, or the 'last' checkpoint. Raises UserError, which names
        the file, if one is missing or damaged, or if the model is of another class."""
        folder = pathlib.Path(folder).expanduser()
        export = export_in(folder)
        has_export = (export / WEIGHTS).exists() or (export / CONFIG).exists()
        if has_export and (which == 'best' or export == folder):
            described_in, path = export / CONFIG, export / WEIGHTS
            metadata, weights = read_metadata(export), read_tensors(path)
        else:
            saved, path = load_last(folder)
            if which == 'best':
                warn(f'{folder}: has no best model: using {path.name}, of update {saved["step"]}')
            described_in = path
            with restoring(path):
                weights = saved['model']
                settings = {'settings': saved['config'], 'command': saved['metadata']['command']}
                metadata = {**saved['entries'], 'step': saved['step'], **settings}
        with restoring(described_in):
            model = cls.build(metadata)
            if not isinstance(model, cls):
                raise TypeError(f'a {type(model).__name__}, not a {cls.__name__}')
        load_weights(model, weights, path)
        model.metadata = metadata
        return model.to(device).eval()

    def save_pretrained(
        self,
        save_directory: Path,
        *,
        config: Mapping | None = None,
        model_card_kwargs: dict | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: object,
    ) -> str | None:
        """Write model.safetensors, config.json and README.md into a folder, in place of an earlier
        export; with push_to_hub=True, push them to the Hub as well.

        config: further entries of config.json, such as 'step', 'command' and 'score', or those of
        the export from which the model was loaded, `model.metadata`. Raises UserError if the folder
        holds anything but an export."""
        folder = pathlib.Path(save_directory).expanduser()
        entries = self.entries()
        found = {path.name for path in folder.glob('[!.]*')}  # no hidden files
        others = found - {CONFIG, WEIGHTS, CARD}
        kind = {'recurrent', 'tokenizer'}  # agents have no tokenizer
        if found and kind & read_json(folder / CONFIG).keys() != kind & entries.keys():
            others = found
        if others:
            reason = f'holds {min(others)}, which no such export wrote'
            raise UserError(f'{folder}: {reason}: choose another folder')
        # the model's own sizes come last, because `config` may be that of another model
        known = {name: x for name, x in entries.items() if x is not None}
        metadata = plain(entries | (config or {}) | known)
        # A command may name a file whose name is not UTF-8.
        command = str(metadata.get('command', 'not recorded')).encode(errors='backslashreplace')
        card = {
            'name': type(self).__name__,
            'module': type(self).__module__,
            'parameters': f'{sum(p.numel() for p in self.parameters()):,}',
            'sizes': entries['model'],
            'metadata': {**metadata, 'command': command.decode()},
            **(model_card_kwargs or {}),
        }
        with replacing(folder, WEIGHTS, CARD, CONFIG) as new:
            super().save_pretrained(new, config=metadata, model_card_kwargs=card)
        if not push_to_hub:
            return None
        options['model_card_kwargs'] = model_card_kwargs
        return self.push_to_hub(repo_id or folder.resolve().name, config=config, **options)

    def _save_pretrained(self, save_directory: pathlib.Path) -> None:
        """Write the weights, for the mixin's save_pretrained. A tied parameter stands in the file
        under each of its names, so that any model can take it."""
        weights = {name: x.clone() for name, x in self.state_dict().items()}
        write_tensors(weights, save_directory / WEIGHTS)
