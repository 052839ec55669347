"""Sample text from a model that train_lm.py trained, token by token in constant memory; score a
text; or export the model as plain files: model.safetensors, config.json and a model card.

$ python sample.py --out_dir=out/demo --prompt="The state of the Union"
$ python sample.py --out_dir=out/demo --prompt=FILE:prompt.txt --stop=False --max_new_tokens=-1
$ python sample.py --out_dir=out/demo --interactive               # continue every line you type
$ python sample.py --out_dir=out/demo --score=FILE:book.txt       # nats and bits per byte
$ python sample.py --out_dir=out/demo --export=out/demo_model
$ python sample.py --out_dir=out/demo_model --prompt="The state of the Union"

A terminal shows control characters, which a barely trained model of bytes writes and which would
change its state, as a replacement character. A file or a pipe gets the text unchanged.
"""

import codecs
import contextlib
import itertools
import math
import re
import signal
import sys
import threading
from collections.abc import Iterator

from configurator import configure
from support.script import UserError, run_script

import numpy as np
import torch
from torch import Tensor, nn

from decode import Decoder, progress
from lstm import LSTM, load_model
from overrides import choose_overrides
from support import ranks
from support.export import CARD
from support.files import read_text
from support.run_folder import CONFIG, WEIGHTS, refuse_best
from support.stream import SCORE_CHUNK, Stream
from tokenizer import VOCAB, Tokenizer, get_tokenizer

# -----------------------------------------------------------------------------
# fmt: off
out_dir = 'out/lm'             # folder of a run of train_lm.py, or of an export
which = 'best'                 # checkpoint: 'best' (lowest validation loss; if none, the last) or
                               # 'last'
prompt = ''                    # text to continue; '' = start a document; FILE:name reads a file,
                               # FILE:- standard input
interactive = False            # continue every line you type, in one stream; ctrl-C stops an
                               # answer, ctrl-D ends the conversation
max_new_tokens = 500           # tokens per text, at most; -1 = without end, until ctrl-C
stop = True                    # end a text at the end-of-text token; False = print <|endoftext|>
                               # there and go on with the next document
temperature = 0.8              # 1 = the model's distribution; lower is less random; 0 = greedy
top_k = 200                    # sample from the k most likely tokens only; 0 = all
top_p = 1.0                    # of these, keep the most likely that add up to this probability
num_samples = 1                # number of texts
seed = 1337                    # of the sampling
device = 'auto'                # 'auto' (cuda if there is one), 'cpu', 'cuda', 'cuda:1' or 'mps'
dtype = 'auto'                 # of matrix products: 'float32', 'bfloat16', or 'auto' (bfloat16 if
                               # the device is fast at it); of an export: 'auto' = float32
score = ''                     # instead of sampling, print the loss in nats and bits per byte on
                               # this text: FILE:name (or just name), FILE:- for standard input;
                               # line ends are read as \n, and a byte order mark is dropped
export = ''                    # instead of sampling, write the model to this folder; an earlier
                               # export there is replaced
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
END_OF_TEXT = '<|endoftext|>'
CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f]')  # all but newline and tab


# ---- the model ----


def load(folder: str, device: str = 'cpu') -> nn.Module:
    """Return the model of a run or of an export, in fp32. Raises UserError, also if the tokenizer
    does not fit it."""
    model = load_model(folder, which, device)
    name, V = str(model.metadata.get('tokenizer')), model.config.vocab_size
    if VOCAB.get(name) != V:
        raise UserError(f'{folder}: tokenizer = {name!r} does not fit vocab_size = {V}')
    return model


def export_model() -> None:
    """Write the model of out_dir into the folder `export`, in the format of support/export.py."""
    refuse_best(export)
    model = load(out_dir)
    if dtype == 'bfloat16':
        model = model.bfloat16()
    model.save_pretrained(export, config=model.metadata)
    model = load(export)  # check that it can be read
    print(f'{export}: {model.num_params()["total"]:,} parameters in {WEIGHTS}, {CONFIG}, {CARD}')


# ---- text ----


def show(text: str) -> None:
    """Print a part of a text at once, without control characters if it goes to a terminal."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = CONTROL.sub('\ufffd', text)
    print(text, end='', flush=True)


def print_text(
    tokenizer: Tokenizer, tokens: Iterator[Tensor], interrupted: threading.Event | None = None
) -> None:
    """Print the text of tokens, (1,) each, as they arrive, until they end, the text ends (see
    `stop`), or `interrupted` is set."""
    decoder = codecs.getincrementaldecoder('utf-8')('replace')  # a character may span tokens
    for token in tokens:
        ids = token.tolist()
        ends = ids == [tokenizer.eot]
        if ends and stop:
            break
        text = decoder.decode(tokenizer.decode_bytes(ids), final=ends)
        show(text + END_OF_TEXT if ends else text)
        if interrupted is not None and interrupted.is_set():
            break
    show(decoder.decode(b'', final=True) + '\n')


def write_samples(decoder: Decoder, tokenizer: Tokenizer, text: str) -> None:
    """Print num_samples continuations of a text."""
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=decoder.token.device)
    state = decoder.prefill(ids[:, :-1])  # once for all samples
    for i in range(num_samples):
        if i > 0:
            show('---------------\n')
        show(text)
        print_text(tokenizer, decoder.generate(ids[:, -1:], max_new_tokens, state))


@contextlib.contextmanager
def stop_by_ctrl_c() -> Iterator[threading.Event]:
    """Within a with statement, let the first ctrl-C set an event, which is read between two tokens,
    so that the decoder's state stays consistent. A second ctrl-C interrupts as usual."""
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
    """Continue each line that the user types until the end of the input. All are one stream, and
    `text` stands before the first line."""
    ids = [tokenizer.eot, *tokenizer.encode(text)]  # tokens that the model has not read yet
    state = None
    at_terminal = sys.stdin.isatty()
    for i in itertools.count():
        try:
            line = input('> ' if at_terminal else '').removeprefix('\ufeff')
        except EOFError:
            if at_terminal:
                print()
            return
        # A line continues the last one, unless that was answered to its end.
        separator = '' if i == 0 or ids == [tokenizer.eot] else '\n'
        ids += tokenizer.encode(separator + line)
        with stop_by_ctrl_c() as interrupted:
            tokens = torch.tensor([ids], device=decoder.token.device)  # (1, T)
            print_text(tokenizer, decoder.generate(tokens, max_new_tokens, state), interrupted)
        ids = decoder.token.tolist()  # the last token was sampled, but not read yet
        state = decoder.state()


def score_text(model: nn.Module, tokenizer: Tokenizer, compute_dtype: torch.dtype) -> None:
    """Print the loss on the text of the file `score`, read as one document in a single stream."""
    name = score.removeprefix('FILE:')
    text = read_text(name)
    if not text:
        raise UserError(f'score = {score!r}: there is no text in it')
    ids = torch.from_numpy(tokenizer.encode_document(text).astype(np.int64))[None]  # (1, 1 + n)
    T = min(model.config.block_size, SCORE_CHUNK)
    stream = Stream(model, 1, T, 1, compute_dtype=compute_dtype)
    sums = stream.score(ids[:, :-1], ids[:, 1:], progress)
    nats, tokens = sums.tolist()
    size = len(text.encode())  # bytes
    loss = f'{nats / size:.4f} nats per byte, {nats / size / math.log(2):.4f} bits per byte'
    print(f'{name}: {size:,} bytes, {tokens:,.0f} tokens: {loss}')


@ranks.explain_errors('a smaller model takes less')
def main() -> None:
    """Export the model, score a text, converse or write samples, depending on the settings."""
    configure(globals(), quiet=True)
    if [bool(export), bool(score), interactive].count(True) > 1:
        raise UserError('export, score and interactive exclude each other: choose one')
    if interactive and sys.stdin is None:
        raise UserError('interactive = True: standard input is closed')
    if interactive and max_new_tokens == 0:
        raise UserError('max_new_tokens = 0: interactive needs at least 1, or -1')
    if export:
        export_model()
        return

    device_ = ranks.pick_device(device)
    compute_dtype = ranks.pick_dtype(dtype, device_)
    model = load(out_dir, device_)
    tokenizer = get_tokenizer(model.metadata['tokenizer'])
    if score:
        score_text(model, tokenizer, compute_dtype)
        return

    if isinstance(model, LSTM):
        raise UserError(f'{out_dir}: holds an LSTM, which can be scored and exported, not sampled')
    for line in choose_overrides(model, [1], compute_dtype):
        print(line, file=sys.stderr)
    decoder = Decoder(
        model,
        B=1,
        compute_dtype=compute_dtype,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    text = read_text(prompt.removeprefix('FILE:')) if prompt.startswith('FILE:') else prompt
    if interactive:
        converse(decoder, tokenizer, text)
    else:
        write_samples(decoder, tokenizer, text)


if __name__ == '__main__':
    run_script(main)
