"""
Text from a model that train_lm.py trained, streamed token by token in constant memory; and the
model as plain files that other programs read: model.safetensors, its weights, and config.json, its
sizes and tokenizer.

$ python sample.py --out_dir=out/demo --prompt="The state of the Union"
$ python sample.py --out_dir=out/demo --prompt=FILE:prompt.txt --max_new_tokens=-1   # until ctrl-C
$ python sample.py --out_dir=out/demo --export=out/demo_model
$ python sample.py --out_dir=out/demo_model --prompt="The state of the Union"
"""

import codecs
import json
import math
import os

from configurator import configure, fail, run_script  # before torch: how threads wait
from configurator import first_line, write_atomic, write_json

import torch

import checkpoint
from checkpoint import BEST, LAST, CheckpointError, SizeError
from data_fineweb import VOCAB, Tokenizer, get_tokenizer
from decode import Decoder
from model import LanguageModel, ModelConfig, build_model

# -----------------------------------------------------------------------------
# fmt: off
out_dir = 'out/lm'             # a folder that train_lm.py wrote, or an export
which = 'best'                 # 'best' (lowest validation loss), if there is one, or 'last'
prompt = ''                    # text to continue; FILE:name reads a file; '' starts a document
max_new_tokens = 500           # tokens to write; -1: until ctrl-C
temperature = 0.8              # 1: the model's own distribution; lower is safer; 0: the likeliest
top_k = 200                    # keep only the likeliest tokens; 0: all
num_samples = 1                # texts to write, one after the other
seed = 1337                    # of the draws
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda'
dtype = 'auto'                 # of products: 'float32', 'bfloat16'; 'auto': bfloat16 if it is fast;
                               # with `export` of the weights, 'auto': float32
export = ''                    # a folder to write the model into, instead of text; what it holds of
                               # an earlier export is replaced
# fmt: on
# -----------------------------------------------------------------------------

RANGES = {
    'which': ['best', 'last'],
    'max_new_tokens': (-1, math.inf),
    'temperature': (0, math.inf),
    'top_k': (0, math.inf),
    'num_samples': (1, math.inf),
    'dtype': ['auto', 'float32', 'bfloat16'],
}
WEIGHTS, CONFIG = 'model.safetensors', 'config.json'


def make_model(about: dict, recurrent: bool, tokenizer: str, **on: str) -> LanguageModel:
    """A model of these sizes on the device 'meta': checked before any memory is taken. ValueError,
    TypeError: not a model's description."""
    if tokenizer not in VOCAB or type(recurrent) is not bool:
        raise ValueError('unknown tokenizer, or recurrent is not true or false')
    config = ModelConfig(**about | on)
    checkpoint.check_model(lambda config: build_model(config, recurrent), config)
    with torch.device('meta'):
        return build_model(config, recurrent)


def load_trained(folder: str, which: str) -> tuple[LanguageModel, dict]:
    """train_lm.py's best or last checkpoint -> its model, in fp32, and all that it holds.
    CheckpointError."""
    file = BEST if which == 'best' and os.path.exists(os.path.join(folder, BEST)) else None
    needed = ('model', 'model_config', 'recurrent')
    saved, where = checkpoint.load_run(folder, 'train_lm.py', needed, (), {}, file)
    arch = saved['config'].get('arch', 'experts')
    if arch != 'experts':
        raise CheckpointError(f'{where}: arch = {arch!r}: a baseline is not sampled or exported')
    with checkpoint.restoring(where, 'model_config'):
        tokenizer = saved['config']['tokenizer']
        model = make_model(saved['model_config'], saved['recurrent'], tokenizer, path='fast')
    checkpoint.load_weights(model, saved['model'], where, assign=True)
    return model, saved


# ---- the model as files ----


def check_target(folder: str) -> None:
    """Ends the script where an export would replace what is no export of ours."""
    if os.path.abspath(folder) == os.path.abspath(out_dir):
        fail(f'export = {folder!r}: name a folder for the model, other than out_dir')
    if any(os.path.exists(os.path.join(folder, name)) for name in (LAST, 'log.jsonl')):
        fail(f'export = {folder!r}: holds a training run: name another folder')
    there = [name for name in (CONFIG, WEIGHTS) if os.path.lexists(os.path.join(folder, name))]
    try:
        with open(os.path.join(folder, CONFIG), encoding='utf-8') as file:
            about = json.load(file)
        ours = isinstance(about, dict) and about.keys() >= {'recurrent', 'tokenizer', 'model'}
    except (OSError, ValueError, RecursionError):
        ours = False
    if there and not ours:
        words = f'holds {there[0]}, which no export of ours wrote'
        fail(f'export = {folder!r}: {words}: name another folder, or move it away yourself')
    checkpoint.need_packages(safetensors=True)


def write_model(saved: dict, folder: str, dtype: torch.dtype) -> None:
    """config.json comes last: until then it says that the folder is an export's, but describes no
    model. OSError."""
    from safetensors.torch import save

    os.makedirs(folder, exist_ok=True)
    about = dict.fromkeys(['recurrent', 'tokenizer', 'model'])
    write_json(about, os.path.join(folder, CONFIG))
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in saved['model'].items()}
    data = save(weights, metadata={'format': 'pt'})
    write_atomic(os.path.join(folder, WEIGHTS), lambda file: file.write(data))
    sizes = {name: value for name, value in saved['model_config'].items() if name != 'path'}
    about = {'recurrent': saved['recurrent'], 'tokenizer': saved['config']['tokenizer']}
    about |= {'model': sizes, 'step': saved.get('step'), 'best_val_loss': saved.get('best')}
    write_json(about, os.path.join(folder, CONFIG))


def read_model(folder: str) -> tuple[LanguageModel, str]:
    """What write_model wrote -> the model, in fp32, and its tokenizer's name. CheckpointError says
    what is wrong."""
    checkpoint.need_packages(safetensors=True)
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
        wrong = f'not the description of an exported model ({first_line(error)})'
        raise CheckpointError(f'{where}: {wrong}') from None
    where = os.path.join(folder, WEIGHTS)
    try:
        weights = {name: tensor.float() for name, tensor in load_file(where).items()}
    except (OSError, SafetensorError, RuntimeError) as error:
        wrong = f'not the weights that {CONFIG} describes ({first_line(error)})'
        raise CheckpointError(f'{where}: {wrong}') from None
    checkpoint.load_weights(model, weights, where, assign=True)
    return model, about['tokenizer']


def export_model() -> None:
    check_target(export)
    _, saved = load_trained(out_dir, which)
    write_model(saved, export, torch.bfloat16 if dtype == 'bfloat16' else torch.float32)
    model, _ = read_model(export)  # what was written can be read
    size = os.path.getsize(os.path.join(export, WEIGHTS)) / 1e6
    params = model.num_params()['total']
    print(f'{export}: {WEIGHTS} ({size:.1f} MB), {CONFIG}; {params:,} parameters')


# ---- text ----


def read_prompt() -> str:
    if not prompt.startswith('FILE:'):
        return prompt
    try:
        with open(prompt[5:], encoding='utf-8') as file:
            return file.read()
    except OSError as error:
        fail(f'prompt: {prompt[5:]}: cannot be read: {error.strerror}')
    except UnicodeDecodeError as error:
        fail(f'prompt: {prompt[5:]}: cannot be read as text: {error.reason}')


def load_model(device: str) -> tuple[LanguageModel, Tokenizer]:
    """Model, in fp32 and evaluation mode, and tokenizer of out_dir."""
    if os.path.exists(os.path.join(out_dir, WEIGHTS)):
        model, name = read_model(out_dir)
    else:
        model, saved = load_trained(out_dir, which)
        name = saved['config']['tokenizer']
    return model.to(device).eval(), get_tokenizer(name)


def write_text() -> None:
    device_ = checkpoint.pick_device(device)
    amp = checkpoint.pick_dtype(dtype, device_)
    (model, tokenizer), text = load_model(device_), read_prompt()
    idx = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=device_)  # (1, T)
    decoder = Decoder(model, 1, amp, temperature, top_k, seed)
    for i in range(num_samples):
        characters = codecs.getincrementaldecoder('utf-8')('replace')  # one may span tokens
        print('---------------\n' * (i > 0) + text, end='', flush=True)
        for token in decoder.generate(idx, max_new_tokens):
            print(characters.decode(tokenizer.decode_bytes(token.tolist())), end='', flush=True)
        print(characters.decode(b'', final=True))


def main() -> None:
    configure(globals(), quiet=True)
    try:
        export_model() if export else write_text()
    except ValueError as error:  # CheckpointError, SizeError, DataError, pick_device's
        fail(error)


if __name__ == '__main__':
    words = checkpoint.last_words('the model needs more than there is')
    run_script(main, last_words=words)
