"""
Text from a model that train_lm.py trained, streamed token by token in constant memory; and the
model as plain files that other programs read: model.safetensors, its weights, and config.json, its
sizes and tokenizer.

$ python sample.py --out_dir=out/demo --prompt="The state of the Union"
$ python sample.py --out_dir=out/demo --prompt=FILE:prompt.txt --max_new_tokens=-1   # until ctrl-C
$ python sample.py --out_dir=out/demo --interactive       # continues what is typed, line after line
$ python sample.py --out_dir=out/demo --score=prompt.txt  # nats and bits a byte of a text
$ python sample.py --out_dir=out/demo --export=out/demo_model
$ python sample.py --out_dir=out/demo_model --prompt="The state of the Union"
"""

import codecs
import itertools
import math
import os
import sys
from collections.abc import Iterator

from configurator import configure, fail, run_script  # before torch: how threads wait
from configurator import every

import torch
from torch import Tensor

import common
from common import BEST, CONFIG, WEIGHTS, CheckpointError
from data_fineweb import VOCAB, Tokenizer, get_tokenizer
from decode import Decoder
from hub import CARD, training_command
from model import EVAL_CHUNK, LanguageModel

# -----------------------------------------------------------------------------
# fmt: off
out_dir = 'out/lm'             # a folder that train_lm.py wrote, or an export
which = 'best'                 # 'best' (lowest validation loss), if there is one, or 'last'
prompt = ''                    # text to continue; '' starts a document; FILE:name reads a file,
                               # FILE:- standard input
interactive = False            # continue each line typed; the state goes on from line to line
max_new_tokens = 500           # tokens to write; -1: until ctrl-C
temperature = 0.8              # 1: the model's own distribution; lower is safer; 0: the likeliest
top_k = 200                    # keep only the likeliest tokens; 0: all
top_p = 1.0                    # and of these the likeliest that have this share; 1: all
num_samples = 1                # texts to write, one after the other
seed = 1337                    # of the draws
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda'
dtype = 'auto'                 # of products: 'float32', 'bfloat16'; 'auto': bfloat16 if it is fast;
                               # with `export` of the weights, 'auto': float32
score = ''                     # a text file, or - for standard input: instead of writing, say how
                               # many nats and bits a byte of it costs the model
export = ''                    # a folder to write the model into, instead of text; what it holds of
                               # an earlier export is replaced
# fmt: on
# -----------------------------------------------------------------------------

RANGES = {
    'which': ['best', 'last'],
    'max_new_tokens': (-1, math.inf),
    'temperature': (0, math.inf),
    'top_k': (0, math.inf),
    'top_p': (0.001, 1),
    'num_samples': (1, math.inf),
    'seed': (0, math.inf),
    'dtype': ['auto', 'float32', 'bfloat16'],
}


def check_tokenizer(about: dict) -> None:
    """Raise ValueError unless a model's description names a tokenizer of data_fineweb.py."""
    if about['tokenizer'] not in VOCAB:
        raise ValueError(f'unknown tokenizer {about["tokenizer"]!r}')


def load_trained(folder: str, which: str) -> LanguageModel:
    """Return the model, in fp32, of a run's best or last checkpoint; its `about` is what an export
    of it says. Raises CheckpointError."""
    file = BEST if which == 'best' else ''
    needed = ('model', 'model_config', 'recurrent')
    saved, where = common.load_run(folder, 'train_lm.py', needed, file=file)
    settings = saved['config']
    arch = settings.get('arch', 'experts')
    if arch != 'experts':
        raise CheckpointError(f'{where}: arch = {arch!r}: a baseline is not sampled or exported')
    with common.restoring(where, 'model_config'):
        sizes = {k: v for k, v in saved['model_config'].items() if k not in ('path', 'mode')}
        about = {
            'recurrent': saved['recurrent'],
            'tokenizer': settings['tokenizer'],
            'model': sizes,
            'step': saved.get('step'),
            'best_val_loss': saved.get('best'),
            'command': training_command('train_lm.py', settings),
        }
        check_tokenizer(about)
        model = LanguageModel.build(about)
    common.load_weights(model, saved['model'], where, assign=True)
    model.about = about
    return model


def load_model(folder: str, which: str) -> LanguageModel:
    """Return the model, in fp32, of an export or of a run. Raises CheckpointError."""
    if not os.path.exists(os.path.join(folder, WEIGHTS)):
        return load_trained(folder, which)
    model = LanguageModel.from_pretrained(folder)
    with common.restoring(os.path.join(folder, CONFIG), 'the model'):
        check_tokenizer(model.about)
    return model


def export_model() -> None:
    """Write the model of out_dir into the folder `export` (hub.py has the format)."""
    model = load_model(out_dir, which)
    if dtype == 'bfloat16':
        model = model.bfloat16()
    model.save_pretrained(export)
    model = load_model(export, which)  # what was written can be read
    print(f'{export}: {model.num_params()["total"]:,} parameters in {WEIGHTS}, {CONFIG}, {CARD}')


# ---- text ----


def read_text(name: str) -> str:
    """A file's text; '-': standard input's."""
    own = name != '-'
    try:
        with open(name if own else 0, encoding='utf-8', newline='', closefd=own) as file:
            return file.read()
    except UnicodeDecodeError as error:
        fail(f'{name}: cannot be read as text: {error.reason}')


def say(tokenizer: Tokenizer, stream: Iterator[Tensor]) -> None:
    characters = codecs.getincrementaldecoder('utf-8')('replace')  # one may span tokens
    for ids in stream:
        print(characters.decode(tokenizer.decode_bytes(ids.tolist())), end='', flush=True)
    print(characters.decode(b'', final=True))


def typed() -> Iterator[str]:
    """Lines of standard input, after the first each with the end of the one before."""
    ask = '> ' if sys.stdin.isatty() else ''
    try:
        for i in itertools.count():
            yield '\n' * (i > 0) + input(ask)
    except EOFError:
        print(end='\n' * bool(ask))


def write_text(decoder: Decoder, tokenizer: Tokenizer, text: str) -> None:
    """Continues text, num_samples times, or it and each line typed, in one stream."""
    ids, state = [tokenizer.eot, *tokenizer.encode(text)], None
    if not interactive:
        idx = torch.tensor([ids], device=decoder.token.device)  # (1, T)
        state = decoder.prefill(idx[:, :-1])  # once for all samples
        for i in range(num_samples):
            print('---------------\n' * (i > 0) + text, end='', flush=True)
            say(tokenizer, decoder.generate(idx[:, -1:], max_new_tokens, state))
        return
    for line in typed():
        idx = torch.tensor([ids + tokenizer.encode(line)], device=decoder.token.device)  # (1, T)
        say(tokenizer, decoder.generate(idx, max_new_tokens, state))
        ids, state = decoder.token.tolist(), decoder.state()  # its last token is not read yet


@torch.no_grad()
def score_text(model: LanguageModel, tokenizer: Tokenizer, amp: torch.dtype) -> None:
    """Loss on the text of `score` as one document, read as a stream."""
    text, device, due = read_text(score), model.embedding.device.type, every()
    if not text:
        fail(f'score = {score!r}: there is no text in it')
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]])
    n = min(model.config.block_size, EVAL_CHUNK)
    nats, tokens, size = 0.0, ids.size(1) - 1, len(text.encode())
    with torch.autocast(device, torch.bfloat16, enabled=amp == torch.bfloat16):
        state = model.init_state(1)
        for t in range(0, tokens, n):
            chunk = ids[:, t : t + n + 1].to(device)
            loss, state = model(chunk[:, :-1], chunk[:, 1:], state)
            nats += loss.cross_entropy.item() * (chunk.size(1) - 1)
            if due():
                sofar = f'{t + n:,} of {tokens:,} tokens: {nats / (t + n):.4f} nats a token'
                print(f'    {sofar}', file=sys.stderr)
    cost = f'{nats / size:.4f} nats a byte, {nats / size / math.log(2):.4f} bits a byte'
    print(f'{score}: {size:,} bytes, {tokens:,} tokens: {cost}')


def use_model() -> None:
    """Text from the model of out_dir, or its score of a text."""
    where = common.pick_device(device)
    amp = common.pick_dtype(dtype, where)
    model = load_model(out_dir, which).to(where).eval()
    tokenizer = get_tokenizer(model.about['tokenizer'])
    if score:
        score_text(model, tokenizer, amp)
    else:
        decoder = Decoder(model, 1, amp, temperature, top_k, seed, top_p=top_p)
        for line in decoder.lines:
            print(line, file=sys.stderr)
        text = read_text(prompt[5:]) if prompt.startswith('FILE:') else prompt
        write_text(decoder, tokenizer, text)


def main() -> None:
    configure(globals(), quiet=True)
    if sum(map(bool, (export, score, interactive))) > 1:
        fail('export, score and interactive exclude each other: choose one')
    if interactive and max_new_tokens == 0:
        fail('max_new_tokens = 0: interactive answers what is typed')
    export_model() if export else use_model()


if __name__ == '__main__':
    words = common.last_words('the model needs more than there is')
    run_script(main, last_words=words)
