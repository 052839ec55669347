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
import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from configurator import configure, fail, run_script  # before torch: how threads wait
from configurator import every, write_json

import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import BEST, CONFIG, WEIGHTS, CheckpointError
from data_fineweb import VOCAB, Tokenizer, get_tokenizer
from kernels import Heads, apply_rope, by_expert, by_triton, chosen_lines, compiled, graphed
from kernels import made_up, rope_table, softcap, triton_module
from model import EVAL_CHUNK, LanguageModel, ModelConfig, Rules, State
from model import build_model, combine, levels, norm, token
from unroll import bind

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


def make_model(about: dict, recurrent: bool, tokenizer: str) -> LanguageModel:
    """A model of these sizes on the device 'meta': checked before any memory is taken. ValueError,
    TypeError: not a model's description."""
    if tokenizer not in VOCAB or type(recurrent) is not bool:
        raise ValueError('unknown tokenizer, or recurrent is not true or false')
    config = ModelConfig(**about | {'path': 'fast'})
    common.check_model(lambda config: build_model(config, recurrent), config)
    with torch.device('meta'):
        return build_model(config, recurrent)


def load_trained(folder: str, which: str) -> tuple[LanguageModel, dict]:
    """train_lm.py's best or last checkpoint -> its model, in fp32, and all that it holds.
    CheckpointError."""
    file = BEST if which == 'best' else ''
    needed = ('model', 'model_config', 'recurrent')
    saved, where = common.load_run(folder, 'train_lm.py', needed, (), {}, file)
    arch = saved['config'].get('arch', 'experts')
    if arch != 'experts':
        raise CheckpointError(f'{where}: arch = {arch!r}: a baseline is not sampled or exported')
    with common.restoring(where, 'model_config'):
        tokenizer = saved['config']['tokenizer']
        model = make_model(saved['model_config'], saved['recurrent'], tokenizer)
    common.load_weights(model, saved['model'], where, assign=True)
    return model, saved


# ---- the model as files ----


def read_model(folder: str) -> tuple[LanguageModel, str]:
    """An export -> the model, in fp32, and its tokenizer's name. CheckpointError."""
    where = os.path.join(folder, CONFIG)
    with common.restoring(where, 'it'), open(where, encoding='utf-8') as file:
        about = json.load(file)
        model = make_model(about['model'], about['recurrent'], about['tokenizer'])
    where = os.path.join(folder, WEIGHTS)
    weights = {name: tensor.float() for name, tensor in common.read_tensors(where).items()}
    common.load_weights(model, weights, where, assign=True)
    return model, about['tokenizer']


def export_model() -> None:
    _, saved = load_trained(out_dir, which)
    where = common.begin_export(export, 'tokenizer')
    kind = torch.bfloat16 if dtype == 'bfloat16' else torch.float32
    weights = {name: tensor.to(kind) for name, tensor in saved['model'].items()}
    said = common.write_tensors(weights, os.path.join(export, WEIGHTS))
    sizes = {name: value for name, value in saved['model_config'].items() if name != 'path'}
    about = {'recurrent': saved['recurrent'], 'tokenizer': saved['config']['tokenizer']}
    about |= {'model': sizes, 'step': saved.get('step'), 'best_val_loss': saved.get('best')}
    write_json(about, where)
    model, _ = read_model(export)  # what was written can be read
    params = model.num_params()['total']
    print(f'{said}, {CONFIG}; {params:,} parameters')


# ---- decoding: model.py's own equations for one token, keys and values in rings ----
#
#     for token in Decoder(model, B, temperature=0.8, top_k=200).generate(prompt, 500): ...


def begin(ids: Tensor, embedding: Tensor, place: Tensor) -> Tensor:
    """The embedding z (B, D) of tokens ids (B,). Rings go on by a slot: place (1 + B,), the newest
    entry's, not yet modulo W, and how many entries each stream has had."""
    place.add_(1)
    return norm(F.embedding(ids, embedding))


def nearby(rope: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rope (W + 1, 2, K) -> the newest slot (1,), its cos and sin (2, K), and the bias (B, W) of
    all slots: -inf where empty."""
    head, slot = place[:1], torch.arange(len(rope) - 1, device=place.device)
    older = (head - slot) % len(slot) >= place[1:, None]  # than the stream
    bias = torch.where(older, -math.inf, torch.zeros((), dtype=rope.dtype, device=place.device))
    newest = head % len(slot)
    return newest, rope.index_select(0, newest)[0], bias


def attention(
    heads: Callable, qkv: Tensor, ring: tuple, near: tuple, h: Heads, wide: torch.dtype
) -> Tensor:
    """The token's key and value into a level's ring, keys and values (B*C, W, K); its queries'
    attended values (E, B, H*K)."""
    (keys, values), (newest, rope, bias) = ring, near
    q, k, v = heads(qkv, h, wide)  # (B, C*M, K), (B, C, K)
    (B, C, K), dt = k.shape, keys.dtype
    q, k = apply_rope(torch.cat([q, k], 1), *rope).to(dt).split([C * h.M, C], 1)
    keys.index_copy_(1, newest, k.reshape(B * C, 1, K))
    values.index_copy_(1, newest, v.to(dt).reshape(B * C, 1, K))
    scores = torch.bmm(q.reshape(B * C, h.M, K), keys.transpose(1, 2)).to(wide)
    scores = torch.add(bias[:, None, None], scores.view(B, C, h.M, -1), alpha=1 / math.sqrt(K))
    p = F.softmax(scores, -1).to(dt).view(B * C, h.M, -1)
    return by_expert(torch.bmm(p, values), h)


def leave(
    how: frozenset, w: dict, u: Tensor, att: Tensor, gates: Tensor | None, rules: Rules
) -> Tensor:
    """model.leave, what stands around its first two products by Triton: for what w['leave'] of
    unroll.py, which has the norm and the sum too, does not know: GPT, other aggregations."""
    product = triton_module().product
    y, ss, _, _ = product(att.contiguous(), w['wo'].w, '', 'add', u, None, how)
    act = product(y, w['up'].w, 'norm', 'relu', None, ss, how)[0]
    return w['piece'](combine, y, w['down'](act), u, gates, rules=rules)


def likeliest(x: Tensor) -> Tensor:
    """x (B, V) -> (B,), in two steps: B rows alone would leave most of a GPU idle."""
    parts = x.view(len(x), math.gcd(x.size(1), 128), -1).max(-1)
    best = parts.values.argmax(-1, keepdim=True)
    return (parts.indices.gather(1, best) + best * (x.size(1) // parts.values.size(1))).squeeze(1)


def draw(logits: Tensor, x: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Tokens (B,) for logits (B, V): argmax of p / x with x ~ Exp(1) draws from p."""
    if 0 < top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    logits = logits / temperature
    if top_p < 1:
        p, order = F.softmax(logits, -1).sort(descending=True)
        more = p.cumsum(-1) - p >= top_p  # the likelier ones have that share already
        logits = logits.masked_fill(more.scatter(-1, order, more), -math.inf)
    return likeliest(logits - x.log())


def end(s: Tensor, readout: Tensor, kept: tuple, noise: Tensor | None, how: tuple) -> None:
    """Of the last level's s, all that is kept: the state, logits (B, V) and tokens drawn (B,)."""
    state, logits, token = kept
    if state.numel():
        state.copy_(s)
    logits.copy_(softcap(F.linear(norm(s).to(readout.dtype), readout).to(s.dtype)))
    token.copy_(likeliest(logits) if noise is None else draw(logits, noise, *how))


class Decoder:
    """B streams of a model whose weights stay as they are, in memory that never moves. amp:
    torch.bfloat16, or torch.float32 for products in the model's own dtype; temperature 0 is greedy;
    top_k 0 and top_p 1 keep every token; seed: an int, a torch.Generator, or None for torch's own.
    `logits` (B, V): the last.

    Keys and values lie in rings of W slots, a key rotated by its slot; when the head comes round to
    slot 0, all are rotated back by W: with the newest in slot h, slot j has angle j where j <= h,
    else j - W, and the query h. A key lives for W steps: no angle passes W, a stream without end
    stays exact."""

    @torch.no_grad()
    def __init__(
        self, model, B, amp=torch.float32, temperature=0, top_k=0, seed=0, compile=False, top_p=1.0
    ):
        c, device, wide = model.config, model.embedding.device, model.embedding.dtype
        dt, W = amp if amp == torch.bfloat16 else wide, c.window
        self.model, self.amp, self.rules = model, amp, model.levels[0].rules()
        self.how = temperature, top_k, top_p
        self.random = torch.Generator(device).manual_seed(seed) if isinstance(seed, int) else seed
        self.piece = compiled if compile else lambda f: f
        # cos and sin (W + 1, 2, K), rounded once, not also as angles
        like = torch.empty(B, c.n_embd, dtype=torch.float64, device=device)
        self.rope = torch.stack(rope_table(W + 1, c.head_dim, like), 1).to(wide)
        # what `bind` asks of a Recipe; a row of each stream
        self.bound = SimpleNamespace(rules=self.rules, dt=dt, piece=self.piece), like.to(wide)
        self.place = torch.full((1 + B,), W + W // 2, device=device)  # a full ring, for the trials
        self.head, self.count = self.place[:1], self.place[1:]
        self.triton = frozenset()
        if wide == torch.float32:
            key = 'a token through a level', self.rules, dt, compile, B, c.n_embd, W
            with torch.cuda.device_of(self.place):
                for _ in range(2):  # then with 'split', the experts' way to run
                    found = key, self.triton
                    trials = functools.partial(self.trials, model.levels[0].weights(), self.triton)
                    self.triton |= by_triton(found, device, trials)
        self.weights = [self.bind(x.weights(), self.triton) for x in model.levels]  # cast once
        self.embedding, self.readout = model.embedding.detach(), model.head.detach().to(dt)
        shape = 2, c.n_layer, B, self.rules.heads.C, W, c.head_dim
        self.k, self.v = torch.zeros(shape, dtype=dt, device=device)  # empty slots must be finite
        caches = self.k.flatten(1, 2), self.v.flatten(1, 2)  # (L, B*C, W, K)
        self.rings = list(zip(*caches, strict=True))
        self.s = torch.zeros(B, c.n_embd if model.recurrent else 0, dtype=wide, device=device)
        self.logits = torch.zeros(B, c.vocab_size, dtype=wide, device=device)
        self.token = torch.zeros(B, dtype=torch.int64, device=device)
        self.slot = torch.arange(W, device=device)
        self.head.fill_(W - 1)
        self.count.zero_()
        self.steps, self.graphs = 0, {}  # steps since the load

    def bind(self, weights: dict, triton: frozenset) -> dict:
        """A level's weights for the equations; triton: names of kernels."""
        w = bind(weights, *self.bound, 1, triton)
        known = self.rules.recurrent and w.get('leave') is not None
        if known or 'experts' not in triton:
            return w
        return w | {'leave': functools.partial(leave, triton)}

    def through(self, ws: list, s: Tensor, z: Tensor, rings: list, triton: frozenset) -> Tensor:
        """s, z (B, D) -> s[L]."""
        near = () if 'attention' in triton else self.piece(nearby)(self.rope, self.place)

        def attend(ring, heads, qkv, h, wide):
            if 'attention' in triton:
                return triton_module().ring_attention(qkv, ring, self.place, self.rope, h)
            return self.piece(attention)(heads, qkv, ring, near, h=h, wide=wide)

        attends = [functools.partial(attend, ring) for ring in rings]
        return (token if self.rules.recurrent else levels)(ws, s, z, attends, self.rules)

    def trials(self, weights: dict, base: frozenset) -> dict:
        """{name: function(triton)} for by_triton: a token through a level on made-up numbers, its
        window full, by what is chosen already, or with what has that name, too."""
        (recipe, like), h, W = self.bound, self.rules.heads, len(self.rope) - 1
        normal, turns = made_up(weights, recipe.dt)
        s, z = normal(2, *like.shape)
        # values so large that a mean of W of them counts beside u
        scales = 1, W**0.5
        ring = tuple(normal(len(like) * h.C, W, h.K).mul(x).to(recipe.dt) for x in scales)

        def run(name, triton):
            names = base | {name} if triton else base
            out = self.through([self.bind(next(turns), names)], s, z, [ring], names)
            return [out, *(x[:, W // 2] for x in ring)]

        fits = weights['up'].size(1) == weights['down'].size(2)  # as the kernels take them
        names = ['attention', 'experts'] if fits else ['attention']
        if base:
            names = ['split'] if 'experts' in base else []
        return {name: functools.partial(run, name) for name in names}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Go on from a state of the model (B streams); the next step wants a token."""
        self.k.copy_(apply_rope(state.k, *self.rope[:-1].unbind(1)))  # the newest in slot W - 1
        for x, given in zip((self.s, self.v, self.count), (state.s, *state[2:]), strict=True):
            x.copy_(given)
        self.head.fill_(self.slot.numel() - 1)
        self.steps = 0

    @torch.no_grad()
    def state(self) -> State:
        """The model's state now, a copy: keys not rotated, oldest first."""
        W = self.slot.numel()
        head = self.head % W
        order, angle = (head + 1 + self.slot) % W, self.slot - W * (self.slot > head)
        cos, sin = self.rope[angle.abs()].unbind(1)
        k = apply_rope(self.k, cos, -sin * angle.sign()[:, None]).to(self.k.dtype)
        v, count = self.v[..., order, :], self.count.clamp(max=W)
        return State(self.s.clone(), k[..., order, :], v, count)

    def advance(self) -> None:
        """One token for each stream, by tensors on the device alone: a CUDA graph can hold it."""
        z = self.piece(begin)(self.token, self.embedding, self.place)
        # not z itself: torch.compile would trace the first level apart
        s = self.s if self.rules.recurrent else z.clone()
        s = self.through(self.weights, s, z, self.rings, self.triton)
        noise = None
        if self.how[0]:
            noise = torch.empty_like(self.logits).exponential_(generator=self.random)
        self.piece(end)(s, self.readout, (self.s, self.logits, self.token), noise, self.how)

    @torch.no_grad()
    def step(self, token: Tensor | None = None) -> Tensor:
        """Feed token (B,), by default the last one drawn, and draw the next: (B,), always in the
        same memory. On a GPU a CUDA graph from the fourth step on."""
        if token is not None:
            self.token.copy_(token)
        if self.steps % self.slot.numel() == 0:  # a turn, outside the graph: all keys back by W
            cos, sin = self.rope[-1]
            self.k.copy_(apply_rope(self.k, cos, -sin))
        self.steps += 1
        if self.token.is_cuda:
            with torch.cuda.device_of(self.token):
                graphed(self.graphs, 'step', self.advance, generator=self.random)
        else:
            self.advance()
        return self.token

    @torch.no_grad()
    def prefill(self, idx: Tensor, state: State | None = None) -> State:
        """The tokens idx (B, T) by the model's chunk path, block_size at a time, after a state, by
        default anew. -> the state after them."""
        due, n = every(), self.model.config.block_size
        with torch.autocast(idx.device.type, torch.bfloat16, enabled=self.amp == torch.bfloat16):
            state = self.model.init_state(len(idx)) if state is None else state
            for t in range(0, idx.size(1), n):
                state = self.model.core(idx[:, t : t + n], state)[1]
                if due():
                    print(f'    {t + n:,} of {idx.size(1):,} tokens of the prompt', file=sys.stderr)
        self.load(state)
        return state

    def generate(
        self, idx: Tensor, max_new_tokens: int, state: State | None = None
    ) -> Iterator[Tensor]:
        """Continue prompts idx (B, T >= 1), after a state, by default anew: yields (B,) tokens, for
        ever where max_new_tokens < 0."""
        if max_new_tokens:
            self.prefill(idx[:, :-1], state)
            yield self.step(idx[:, -1]).clone()
        for _ in itertools.count() if max_new_tokens < 0 else range(max_new_tokens - 1):
            yield self.step().clone()


# ---- text ----


def read_text(name: str) -> str:
    """A file's text; '-': standard input's."""
    own = name != '-'
    try:
        with open(name if own else 0, encoding='utf-8', newline='', closefd=own) as file:
            return file.read()
    except UnicodeDecodeError as error:
        fail(f'{name}: cannot be read as text: {error.reason}')


def load_model(device: str) -> tuple[LanguageModel, Tokenizer]:
    """Model, in fp32 and evaluation mode, and tokenizer of out_dir."""
    if os.path.exists(os.path.join(out_dir, WEIGHTS)):
        model, name = read_model(out_dir)
    else:
        model, saved = load_trained(out_dir, which)
        name = saved['config']['tokenizer']
    return model.to(device).eval(), get_tokenizer(name)


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
            nats += loss.item() * (chunk.size(1) - 1)
            if due():
                sofar = f'{t + n:,} of {tokens:,} tokens: {nats / (t + n):.4f} nats a token'
                print(f'    {sofar}', file=sys.stderr)
    cost = f'{nats / size:.4f} nats a byte, {nats / size / math.log(2):.4f} bits a byte'
    print(f'{score}: {size:,} bytes, {tokens:,} tokens: {cost}')


def use_model() -> None:
    """Text from the model of out_dir, or its score of a text."""
    where = common.pick_device(device)
    amp = common.pick_dtype(dtype, where)
    model, tokenizer = load_model(where)
    if score:
        score_text(model, tokenizer, amp)
    else:
        decoder = Decoder(model, 1, amp, temperature, top_k, seed, top_p=top_p)
        for line in chosen_lines():
            print(f'pieces of a step: {line}', file=sys.stderr)
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
