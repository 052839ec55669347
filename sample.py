"""
Text from a model that train_lm.py trained or export.py wrote, streamed token by token in constant memory.

$ python sample.py --out_dir=out/demo --prompt="The state of the Union"
$ python sample.py --out_dir=out/demo --prompt=FILE:prompt.txt --max_new_tokens=-1        # for ever; ctrl-C ends it
"""

import codecs
import os

from configurator import (
    configure,
    fail,
    run_script,
)  # before torch: how threads wait, what ctrl-C does

import torch

from checkpoint import last_words, pick_device, pick_dtype
from data_fineweb import Tokenizer, get_tokenizer
from decode import Decoder
from export import WEIGHTS, load_trained, read_model
from model import LanguageModel

# -----------------------------------------------------------------------------
# fmt: off
out_dir = 'out/lm'             # a folder that train_lm.py or export.py wrote
which = 'best'                 # 'best' (lowest validation loss) or 'last'; the last one also where there is no best
prompt = ''                    # text to continue; FILE:name reads it from a file; '' starts a document
max_new_tokens = 500           # tokens to write; -1: until ctrl-C
temperature = 0.8              # 1: the model's own distribution; lower is safer; 0: always the likeliest token
top_k = 200                    # keep only the likeliest tokens; 0: all
num_samples = 1                # texts to write, one after the other
seed = 1337                    # of the draws
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda'
dtype = 'auto'                 # of matrix products: 'auto': bfloat16 where the device is fast at it, else float32
# fmt: on
# -----------------------------------------------------------------------------


def load_model(kind: str) -> tuple[LanguageModel, Tokenizer]:
    """Model, in fp32 and evaluation mode, and tokenizer of out_dir."""
    if which not in ('best', 'last'):
        fail(f"which = {which!r}: expected 'best' or 'last'")
    if os.path.exists(os.path.join(out_dir, WEIGHTS)):
        model, name = read_model(out_dir)
    else:
        model, saved = load_trained(out_dir, which)
        name = saved['config']['tokenizer']
    return model.to(kind).eval(), get_tokenizer(name)


def read_prompt() -> str:
    if not prompt.startswith('FILE:'):
        return prompt
    try:
        with open(prompt[5:], encoding='utf-8') as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as error:
        fail(
            f'prompt: {prompt[5:]}: cannot be read as text ({error.strerror if isinstance(error, OSError) else error.reason})'
        )


def main() -> None:
    configure(globals(), quiet=True)
    if temperature < 0 or top_k < 0 or num_samples < 1:
        fail(
            f'temperature = {temperature}, top_k = {top_k}, num_samples = {num_samples}: expected >= 0, >= 0 and >= 1'
        )
    if max_new_tokens < -1:
        fail(f'max_new_tokens = {max_new_tokens}: expected a number of tokens, or -1 for no end')
    try:
        kind = pick_device(device)
        amp = pick_dtype(dtype, kind)
        model, tokenizer = load_model(kind)
    except ValueError as error:  # CheckpointError, DataError, pick_device's, ModelConfig's
        fail(error)
    text = read_prompt()
    idx = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=kind)  # (1, T)
    decoder = Decoder(model, 1, amp, temperature, top_k, seed)
    for i in range(num_samples):
        characters = codecs.getincrementaldecoder('utf-8')('replace')  # a character may span tokens
        print('---------------\n' * (i > 0) + text, end='', flush=True)
        for token in decoder.generate(idx, max_new_tokens):
            print(characters.decode(tokenizer.decode_bytes(token.tolist())), end='', flush=True)
        print(characters.decode(b'', final=True))


if __name__ == '__main__':
    run_script(main, last_words=last_words('the model needs more than there is'))
