"""
A trained language model as plain files that other programs read: model.safetensors, its weights, and config.json, its sizes and tokenizer.

$ python export.py --out_dir=out/demo --to=out/demo_model
$ python sample.py --out_dir=out/demo_model --prompt="The state of the Union"
"""

import json
import os

from configurator import (
    configure,
    fail,
    first_line,
    run_script,
    write_atomic,
    write_json,
)  # before torch: how threads wait, what ctrl-C does

import torch

from checkpoint import (
    BEST,
    LAST,
    CheckpointError,
    SizeError,
    check_model,
    last_words,
    load_run,
    load_weights,
    need_packages,
    restoring,
)

from data_fineweb import VOCAB
from model import LanguageModel, ModelConfig, build_model

# -----------------------------------------------------------------------------
# fmt: off
out_dir = 'out/lm'             # a folder that train_lm.py wrote
which = 'best'                 # 'best' (lowest validation loss) or 'last'; the last one also where there is no best
to = ''                        # the folder to write; what it holds of an earlier export is replaced
dtype = 'float32'              # of the weights: 'float32', as trained, or 'bfloat16', half the size
# fmt: on
# -----------------------------------------------------------------------------

WEIGHTS, CONFIG = 'model.safetensors', 'config.json'


def make_model(about: dict, recurrent: bool, tokenizer: str, **on: str) -> LanguageModel:
    """A model of these sizes on the device 'meta': checked before any memory is taken. ValueError, TypeError: not a model's description."""
    if tokenizer not in VOCAB or type(recurrent) is not bool:
        raise ValueError('unknown tokenizer, or recurrent is not true or false')
    config = ModelConfig(**about | on)
    check_model(lambda config: build_model(config, recurrent), config)
    with torch.device('meta'):
        return build_model(config, recurrent)


def load_trained(folder: str, which: str) -> tuple[LanguageModel, dict]:
    """train_lm.py's best or last checkpoint -> its model, in fp32, and all that it holds. CheckpointError, SizeError."""
    file = BEST if which == 'best' and os.path.exists(os.path.join(folder, BEST)) else None
    saved, where = load_run(
        folder, 'train_lm.py', ('model', 'model_config', 'recurrent'), (), {}, file
    )
    with restoring(where, 'model_config'):
        model = make_model(
            saved['model_config'], saved['recurrent'], saved['config']['tokenizer'], path='fast'
        )
    load_weights(model, saved['model'], where, assign=True)
    return model, saved


def is_export(folder: str) -> bool:
    """Whether config.json there is one that write_model wrote."""
    try:
        with open(os.path.join(folder, CONFIG), encoding='utf-8') as file:
            about = json.load(file)
        return isinstance(about, dict) and about.keys() >= {'recurrent', 'tokenizer', 'model'}
    except (OSError, ValueError, RecursionError):
        return False


def write_model(saved: dict, folder: str, dtype: torch.dtype) -> None:
    """config.json comes last: until then it says that the folder is an export's, but describes no model. OSError."""
    from safetensors.torch import save

    os.makedirs(folder, exist_ok=True)
    write_json({'recurrent': None, 'tokenizer': None, 'model': None}, os.path.join(folder, CONFIG))
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in saved['model'].items()}
    write_atomic(os.path.join(folder, WEIGHTS), lambda file: file.write(save(weights)))
    sizes = {
        name: value for name, value in saved['model_config'].items() if name != 'path'
    }  # how it runs is no size
    write_json(
        {
            'recurrent': saved['recurrent'],
            'tokenizer': saved['config']['tokenizer'],
            'model': sizes,
            'step': saved.get('step'),
            'best_val_loss': saved.get('best'),
        },
        os.path.join(folder, CONFIG),
    )


def read_model(folder: str) -> tuple[LanguageModel, str]:
    """What write_model wrote -> the model, in fp32, and its tokenizer's name. CheckpointError says what is wrong."""
    need_packages(safetensors=True)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where = os.path.join(folder, CONFIG)
    try:
        with open(where, encoding='utf-8') as file:
            about = json.load(file)
        model = make_model(about['model'], about['recurrent'], about['tokenizer'])
    except SizeError as error:
        raise CheckpointError(f'{where}: {error}') from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f'{where}: not the description of an exported model ({first_line(error)})'
        ) from None
    where = os.path.join(folder, WEIGHTS)
    try:
        weights = {name: tensor.float() for name, tensor in load_file(where).items()}
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(
            f'{where}: not the weights that {CONFIG} describes ({first_line(error)})'
        ) from None
    load_weights(model, weights, where, assign=True)
    return model, about['tokenizer']


def main() -> None:
    configure(globals(), quiet=True)
    if which not in ('best', 'last') or dtype not in ('float32', 'bfloat16'):
        fail(
            f"which = {which!r}, dtype = {dtype!r}: expected 'best' or 'last', and 'float32' or 'bfloat16'"
        )
    if not to or os.path.abspath(to) == os.path.abspath(out_dir):
        fail(f'to = {to!r}: name a folder for the model, other than out_dir')
    if os.path.exists(os.path.join(to, LAST)) or os.path.exists(os.path.join(to, 'log.jsonl')):
        fail(f'to = {to!r}: holds a training run: name another folder')
    there = [name for name in (CONFIG, WEIGHTS) if os.path.lexists(os.path.join(to, name))]
    if there and not is_export(to):
        fail(
            f'to = {to!r}: holds {there[0]}, which no export of ours wrote: name another folder, or move it away yourself'
        )
    need_packages(safetensors=True)
    try:
        write_model(load_trained(out_dir, which)[1], to, getattr(torch, dtype))
        model, _ = read_model(to)  # what was written can be read
    except ValueError as error:  # CheckpointError, SizeError
        fail(error)
    print(
        f'{to}: {WEIGHTS} ({os.path.getsize(os.path.join(to, WEIGHTS)) / 1e6:.1f} MB), {CONFIG}; {model.num_params()["total"]:,} parameters'
    )


if __name__ == '__main__':
    run_script(main, last_words=last_words('the model needs more than there is'))
