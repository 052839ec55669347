"""Write text with a model that train_lm.py trained, token by token in constant memory; score texts;
export the model as plain files: model.safetensors, config.json and a model card.

$ python sample.py --out_dir=out/demo --prompt="The state of the Union"
$ python sample.py --out_dir=out/demo --prompt=FILE:prompt.txt --max_new_tokens=-1   # until ctrl-C
$ python sample.py --out_dir=out/demo --interactive               # continues every line you type
$ python sample.py --out_dir=out/demo --score=FILE:book.txt       # nats and bits per byte
$ python sample.py --out_dir=out/demo --export=out/demo_model
$ python sample.py --out_dir=out/demo_model --prompt="The state of the Union"
"""

import codecs
import contextlib
import itertools
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator

from configurator import Mistake, configure, every, fail, run_script, setup_process

if __name__ == '__main__':
    setup_process()  # before torch is imported

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
interactive = False            # continue every line you type, in one stream; ctrl-C stops an
                               # answer, ctrl-D ends the conversation
max_new_tokens = 500           # tokens to write; -1: until ctrl-C
temperature = 0.8              # 1: the model's own distribution; lower is safer; 0: greedy
top_k = 200                    # keep only the k likeliest tokens; 0: all
top_p = 1.0                    # and of these the likeliest that together have this probability
num_samples = 1                # texts to write, one after the other
seed = 1337                    # of the sampling
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda'
dtype = 'auto'                 # of products: 'float32', 'bfloat16'; 'auto': bfloat16 if it is fast;
                               # of exported weights: 'auto' is float32
score = ''                     # FILE:name (or just name) or FILE:-: instead of writing, print how
                               # many nats and bits per byte the text costs the model
export = ''                    # a folder to write the model into, instead of text; replaces an
                               # earlier export there
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


# ---- the model ----


def check_tokenizer(about: dict) -> None:
    """Raise ValueError unless a model's description names a tokenizer of data_fineweb.py."""
    if about['tokenizer'] not in VOCAB:
        raise ValueError(f'unknown tokenizer {about["tokenizer"]!r}')


def load_trained(folder: str, which: str) -> LanguageModel:
    """Return the model, in fp32, of a run's best or last checkpoint; its `about` has the entries
    that an export of it adds to config.json. Raises CheckpointError."""
    needed = ('model', 'model_config', 'recurrent')
    file = BEST if which == 'best' else ''
    saved, path = common.load_run(folder, 'train_lm.py', needed, file=file)
    settings = saved['config']
    arch = settings.get('arch', 'experts')
    if arch != 'experts':
        raise CheckpointError(f'{path}: arch = {arch!r}: a baseline is not sampled or exported')
    with common.restoring(path, 'model_config'):
        sizes = dict(saved['model_config'])
        for how_it_ran in ('mode', 'path'):
            sizes.pop(how_it_ran, None)
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
    common.load_weights(model, saved['model'], path, assign=True)
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
    """Write the model of out_dir into the folder `export`, in the format of hub.py."""
    model = load_model(out_dir, which)
    if dtype == 'bfloat16':
        model = model.bfloat16()
    model.save_pretrained(export)
    model = load_model(export, which)  # check that it can be read
    print(f'{export}: {model.num_params()["total"]:,} parameters in {WEIGHTS}, {CONFIG}, {CARD}')


# ---- text ----


def read_text(name: str) -> str:
    """Return the text of a file, '-' for standard input. Raises Mistake if it is not UTF-8."""
    try:
        if name == '-':
            return sys.stdin.buffer.read().decode()
        with open(name, encoding='utf-8', newline='') as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise Mistake(f'{name}: cannot be read as text: {error.reason}') from None


def print_text(
    tokenizer: Tokenizer, tokens: Iterator[Tensor], stop: threading.Event | None = None
) -> None:
    """Print the text of tokens (1,) as they come, to their end or until `stop` is set."""
    characters = codecs.getincrementaldecoder('utf-8')('replace')  # one may span tokens
    for token in tokens:
        print(characters.decode(tokenizer.decode_bytes(token.tolist())), end='', flush=True)
        if stop is not None and stop.is_set():
            break
    print(characters.decode(b'', final=True))


def write_samples(decoder: Decoder, tokenizer: Tokenizer, text: str) -> None:
    """Print num_samples continuations of a text."""
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=decoder.token.device)
    state = decoder.prefill(ids[:, :-1])  # once for all samples
    for i in range(num_samples):
        print('---------------\n' * (i > 0) + text, end='', flush=True)
        print_text(tokenizer, decoder.generate(ids[:, -1:], max_new_tokens, state))


@contextlib.contextmanager
def stop_by_ctrl_c() -> Iterator[threading.Event]:
    """Let the first ctrl-C set an event within a with statement, so that it comes between two
    tokens and the decoder's state stays whole. A second one interrupts as usual."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def converse(decoder: Decoder, tokenizer: Tokenizer, text: str) -> None:
    """Continue a text and each line typed after it, in one stream, until the end of the input."""
    ids, state = [tokenizer.eot, *tokenizer.encode(text)], None
    question = '> ' if sys.stdin.isatty() else ''
    for i in itertools.count():
        try:
            line = input(question)
        except EOFError:
            print(end='\n' if question else '')
            return
        ids += tokenizer.encode(line if i == 0 else '\n' + line)
        with stop_by_ctrl_c() as stop:
            tokens = torch.tensor([ids], device=decoder.token.device)  # (1, T)
            print_text(tokenizer, decoder.generate(tokens, max_new_tokens, state), stop)
        # the last token was sampled, but not read yet
        ids, state = decoder.token.tolist(), decoder.state()


@torch.no_grad()
def score_text(model: LanguageModel, tokenizer: Tokenizer, amp: torch.dtype) -> None:
    """Print the loss on the text of the file `score`, read as one document and as a stream."""
    name = score.removeprefix('FILE:')
    text, device, due = read_text(name), model.embedding.device.type, every()
    if not text:
        raise Mistake(f'score = {score!r}: there is no text in it')
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]])  # (1, 1 + tokens)
    n = min(model.config.block_size, EVAL_CHUNK)
    nats, tokens, size = 0.0, ids.size(1) - 1, len(text.encode())
    with torch.autocast(device, torch.bfloat16, enabled=amp == torch.bfloat16):
        state = model.init_state(1)
        for t in range(0, tokens, n):
            chunk = ids[:, t : t + n + 1].to(device)
            loss, state = model(chunk[:, :-1], chunk[:, 1:], state)
            nats += loss.cross_entropy.item() * (chunk.size(1) - 1)
            if due():
                so_far = f'{t + n:,} of {tokens:,} tokens, {nats / (t + n):.4f} nats per token'
                print(f'    {so_far}', file=sys.stderr)
    cost = f'{nats / size:.4f} nats per byte, {nats / size / math.log(2):.4f} bits per byte'
    print(f'{name}: {size:,} bytes, {tokens:,} tokens: {cost}')


def main() -> None:
    """Export, score, converse or write samples, as the settings say."""
    configure(globals(), quiet=True)
    if sum(map(bool, (export, score, interactive))) > 1:
        fail('export, score and interactive exclude each other: choose one')
    if interactive and max_new_tokens == 0:
        fail('max_new_tokens = 0: interactive answers what is typed')
    if export:
        export_model()
        return

    device_ = common.pick_device(device)
    amp = common.pick_dtype(dtype, device_)
    model = load_model(out_dir, which).to(device_).eval()
    tokenizer = get_tokenizer(model.about['tokenizer'])
    if score:
        score_text(model, tokenizer, amp)
        return

    decoder = Decoder(
        model,
        B=1,
        amp=amp,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    for line in decoder.lines:
        print(line, file=sys.stderr)
    text = read_text(prompt.removeprefix('FILE:')) if prompt.startswith('FILE:') else prompt
    if interactive:
        converse(decoder, tokenizer, text)
    else:
        write_samples(decoder, tokenizer, text)


if __name__ == '__main__':
    run_script(main, explain=common.error_explainer('a smaller model takes less'))
