"""decode.py and sample.py: the ring decoder held to reference.py, states in and out, sampling, static memory, generation. pytest -m gpu adds: CUDA graphs against eager steps."""

import gc
import math
import sys

import pytest
import reference
import torch
from reference import V, assert_close, assert_same_state, tokens
from test_model import one_thread  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

import decode
import sample
import unroll
from decode import Decoder, generate
from model import GPT, ModelConfig, RecurrentGPT, State, build_model

KINDS = [RecurrentGPT, GPT]
VARIANTS = [
    (kind, {'n_expert': E, **more})
    for E in (1, 3)
    for kind, more in [
        (RecurrentGPT, {}),
        (RecurrentGPT, {'share_kv': False}),
        (RecurrentGPT, {'aggregation': 'softmax_l2'}),
        (RecurrentGPT, {'aggregation': 'mean', 'share_kv': False, 'n_layer': 1}),
        (RecurrentGPT, {'window': 1}),
        (GPT, {}),
        (GPT, {'residual': 'shared'}),
        (GPT, {'aggregation': 'softmax_l2', 'residual': 'shared'}),
        (GPT, {'aggregation': 'softmax_mean'}),
    ]
]


def make(kind, seed=0, dtype=torch.float64, device='cpu', **changes):
    """A small model of odd sizes with every parameter random and none of them small."""
    sizes = {'n_layer': 3, 'n_embd': 36, 'n_head': 6, 'window': 5}
    return reference.make(kind, seed, dtype, **sizes | changes).to(device)


def feed(decoder, x):
    """x (B, T) token by token -> logits (B, T, V)"""
    logits = []
    for t in range(x.size(1)):
        decoder.step(x[:, t])
        logits.append(decoder.logits.clone())
    return torch.stack(logits, 1)


# ---- the same as the model ----


@pytest.mark.parametrize('kind, changes', VARIANTS, ids=lambda x: getattr(x, '__name__', str(x)))
@pytest.mark.parametrize('B', [1, 3])
def test_decoder_is_the_reference(kind, changes, B):
    """Past three turns of the ring; and the state it ends with."""
    model, x = make(kind, **changes), tokens(B, 3 * 5 + 4)
    with torch.no_grad():
        expected, history = reference.run(model, x, reference.History(model, B))
    decoder = Decoder(model, B)
    found = feed(decoder, x)
    assert found.std() > 0.5  # nothing to compare in flat logits
    for t in range(x.size(1)):
        assert_close(found[:, t], expected[:, t], what=f'token {t}')
    assert_same_state(decoder.state(), history.state())


@pytest.mark.parametrize(
    'kind, changes',
    [(RecurrentGPT, {}), (RecurrentGPT, {'share_kv': False}), (GPT, {})],
    ids=lambda x: getattr(x, '__name__', str(x)),
)
def test_load_and_state_in_the_middle(kind, changes):
    """A state whose streams have seen 0, 2 and 5 tokens; out and in again at every slot of the ring."""
    model, x = make(kind, **changes), tokens(3, 19, seed=1)
    with torch.no_grad():
        _, state = model(tokens(3, 9), state=model.init_state(3))
        state = state._replace(count=torch.tensor([0, 2, 5]))
        kept = State(*(t.clone() for t in state))
        decoder, other = Decoder(model, 3), Decoder(model, 3)
        feed(decoder, tokens(3, 7, seed=2))  # the load must clear this
        decoder.load(state)
        assert_same_state(decoder.state(), state)
        for t in range(x.size(1)):
            other.load(decoder.state())  # its head is at the ring's end, the first one's anywhere
            logits, state = model.step(x[:, t], state)
            for d in (decoder, other):
                assert_close(feed(d, x[:, t : t + 1])[:, 0], logits, what=f'token {t}')
                assert_same_state(d.state(), state)
    assert decoder.count.tolist() == [5, 5, 5]
    copy = State(*(t.clone() for t in decoder.state()))
    mine = decoder.state()
    decoder.step()
    assert_same_state(mine, copy, 0)  # a copy: later steps leave it alone
    decoder.load(kept)
    decoder.step(x[:, 0])
    with torch.no_grad():
        assert_close(decoder.logits, model.step(x[:, 0], kept)[0])


def test_load_refuses_other_sizes():
    model = make(RecurrentGPT)
    for state in (
        model.init_state(2),
        make(RecurrentGPT, window=4).init_state(3),
        make(RecurrentGPT, share_kv=False).init_state(3),
    ):
        with pytest.raises(
            ValueError, match='3 levels, 3 streams, 2 heads, a window of 5, head size 6'
        ):
            Decoder(model, 3).load(state)


@pytest.mark.parametrize('kind', KINDS)
def test_bf16_is_as_exact_as_the_models_own(kind):
    """Against float64, the decoder's error in bf16 is no larger than 1.5 times that of the model under autocast; so in fp32."""
    model, x = make(kind, dtype=torch.float32), tokens(4, 19)
    with torch.no_grad():
        twin = reference.exact(model)
        exact, _ = reference.run(twin, x, reference.History(twin, 4))
        for amp, least in ((torch.bfloat16, 1e-3), (torch.float32, 1e-8)):
            with torch.autocast('cpu', torch.bfloat16, enabled=amp == torch.bfloat16):
                logits, state = model(x, state=model.init_state(4))
            decoder = Decoder(model, 4, amp=amp)
            error, allowed = (
                (y.double() - exact).norm() / exact.norm() for y in (feed(decoder, x), logits)
            )
            assert least < error < 1.5 * allowed, (amp, error, allowed)
            assert decoder.logits.dtype == decoder.s.dtype == torch.float32
            assert [t.dtype for t in decoder.state()] == [t.dtype for t in state]


@pytest.mark.parametrize(
    'kind, changes',
    [VARIANTS[i] for i in (10, 11, 16)],
    ids=lambda x: getattr(x, '__name__', str(x)),
)
def test_compile(kind, changes, monkeypatch):
    """A level's step is one graph, traced once for all levels and tokens, and gives the same. Inductor is left out: it takes 20 s."""
    model, x, graphs = make(kind, **changes), tokens(2, 17), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)

    monkeypatch.setattr(
        decode,
        'compiled',
        lambda op: torch.compile(op, fullgraph=True, dynamic=False, backend=backend),
    )
    torch._dynamo.reset()
    assert_close(feed(Decoder(model, 2, compile=True), x), feed(Decoder(model, 2), x))
    assert len(graphs) == 1


# ---- sampling ----


def test_greedy_is_the_argmax_and_feeds_itself():
    model, x = make(RecurrentGPT), tokens(3, 4)
    decoder, logits = Decoder(model, 3), Following(model, x[:, :-1])
    feed(decoder, x[:, :-1])
    token = decoder.step(x[:, -1])
    assert torch.equal(token, logits.after(x[:, -1]).argmax(-1))
    for _ in range(8):
        expected = logits.after(token).argmax(-1)
        assert torch.equal(token, decoder.logits.argmax(-1))
        assert torch.equal(decoder.step(), expected)


@pytest.mark.parametrize('temperature, top_k', [(1.0, 0), (0.5, 0), (2.0, 3), (1.0, 1), (0.7, 100)])
def test_sampling_draws_the_softmax(temperature, top_k):
    """Frequencies over 4,000 like streams by a chi-square test, at two steps, and of pairs of the two draws."""
    model, B = make(RecurrentGPT, n_layer=1, n_embd=12, n_head=2), 4000
    decoder, x = (
        Decoder(model, B, temperature=temperature, top_k=top_k, seed=5),
        torch.zeros(B, dtype=torch.int64),
    )
    draws, probabilities = [], []
    for _ in range(2):
        draws.append(decoder.step(x).clone())
        logits = decoder.logits[0]
        keep = torch.zeros(V, dtype=torch.bool).index_fill_(
            0, logits.argsort(descending=True)[: top_k or V], True
        )
        p = torch.exp(logits / temperature) * keep
        probabilities.append(p / p.sum())
    probabilities.append(torch.outer(*probabilities).flatten())
    draws.append(draws[0] * V + draws[1])  # are the two steps' draws independent?
    for draw, p in zip(draws, probabilities, strict=True):
        count = torch.bincount(draw, minlength=p.numel()).double()
        assert count[p == 0].sum() == 0
        rare = p * B < 5  # one bin for all of these
        count, p = (torch.cat([t[~rare], t[rare].sum()[None]]) for t in (count, p))
        count, p = count[p > 0], p[p > 0]
        chi2, degrees = ((count - B * p).square() / (B * p)).sum().item(), p.numel() - 1
        assert chi2 < degrees + 4 * math.sqrt(2 * degrees) + 4, (chi2, degrees)
    if top_k != 1:
        assert len(draws[0].unique()) > 1


@pytest.mark.parametrize('kind', KINDS)
def test_a_seed_makes_generation_repeatable(kind):
    model, x = make(kind), tokens(2, 3)
    with torch.no_grad():
        model.head.mul_(0.05)  # nearly uniform: two seeds cannot agree by chance
    runs = [
        torch.stack(list(generate(model, x, 12, seed=seed)))
        for seed in (0, torch.Generator().manual_seed(0), 1)
    ]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    torch.manual_seed(3)
    runs = [
        torch.stack(list(generate(model, x, 12))) for _ in range(2)
    ]  # torch's own generator goes on
    torch.manual_seed(3)
    assert not torch.equal(*runs) and torch.equal(
        runs[0], torch.stack(list(generate(model, x, 12)))
    )


# ---- generation ----


class Following:
    """The reference's logits along a stream that begins with a prompt (B, T)."""

    def __init__(self, model, prompt):
        self.model, self.history = model, reference.History(model, len(prompt))
        for token in prompt.unbind(1):
            self.after(token)

    @torch.no_grad()
    def after(self, token):
        """(B, V) after one more token (B,)"""
        logits, self.history = reference.run(self.model, token[:, None], self.history)
        return logits[:, 0]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('prompt', [1, 3, 19])
def test_greedy_generation_is_the_reference(kind, prompt):
    """Also for a prompt of several chunks (block_size 8) and past the window (5)."""
    model, x = make(kind), tokens(2, prompt)
    found = list(generate(model, x, 9, temperature=0))
    assert len(found) == 9
    logits = Following(model, x[:, :-1])
    for before, token in zip([x[:, -1], *found], found, strict=False):
        assert torch.equal(token, logits.after(before).argmax(-1))
    assert len({tuple(t.tolist()) for t in found}) > 1


@pytest.mark.parametrize('kind', KINDS)
def test_sampled_generation_follows_the_reference(kind):
    """What it draws from at each step are the logits after what it drew; two prompts one after the other do not mix."""
    model = make(kind)
    decoder = Decoder(model, 2, temperature=2.0, top_k=3)
    for prompt in (3, 10):
        x, drawn = tokens(2, prompt), 0
        following, before = Following(model, x[:, :-1]), x[:, -1]
        for token in decoder.generate(x, 7):
            logits = following.after(before)
            assert_close(decoder.logits, logits)
            assert (logits.topk(3).indices == token[:, None]).any(1).all()
            before, drawn = token, drawn + 1
        assert drawn == 7


def tensors():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize('kind, temperature', [(RecurrentGPT, 1.0), (GPT, 0)])
def test_memory_is_static(kind, temperature):
    """step returns the same memory each time; nothing moves and nothing is added."""
    decoder = Decoder(make(kind), 2, temperature=temperature, top_k=4)
    first = decoder.step(tokens(2))
    held = {
        name: (x, x.data_ptr(), x.shape, x._version)
        for name, x in vars(decoder).items()
        if isinstance(x, torch.Tensor)
    }
    assert {'token', 'logits', 'k', 'v', 'count', 'head'} <= held.keys()
    before = tensors()
    for _ in range(20):
        assert decoder.step() is first
    assert tensors() <= before  # fewer, where an earlier test leaves some to collect
    decoder.load(decoder.state())
    for name, (x, *where, version) in held.items():
        assert (
            getattr(decoder, name) is x and where == [x.data_ptr(), x.shape] and not x.requires_grad
        ), name
        assert (x._version > version) == (
            name in ('token', 'logits', 'k', 'v', 'count', 'head', 's')
        ), name
    assert not unroll._blocks and torch.is_grad_enabled()


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for the device or the device for the host: a CUDA graph cannot hold it."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.seen += 1
        assert name not in (
            '_local_scalar_dense',
            'nonzero',
            'is_nonzero',
            'masked_select',
            'equal',
            'lift_fresh',
            'unique',
        ), name
        return function(*args, **kwargs or {})


@pytest.mark.parametrize('kind, changes', VARIANTS, ids=lambda x: getattr(x, '__name__', str(x)))
def test_a_step_never_waits(kind, changes):
    decoder = Decoder(make(kind, **changes), 2, temperature=0.7, top_k=3)
    with NoWaiting() as mode:
        decoder.step()
        assert mode.seen > 40
        with pytest.raises(AssertionError, match='_local_scalar_dense'):  # the mode works
            decoder.token[0].item()


def test_generation_streams(monkeypatch):
    """No token is computed before it is asked for, and none after the last; each is a tensor of its own."""
    model, steps = make(RecurrentGPT), []
    step = Decoder.step
    monkeypatch.setattr(Decoder, 'step', lambda *args: steps.append(1) or step(*args))
    assert list(generate(model, tokens(1, 3), 0)) == [] and not steps
    stream = generate(model, tokens(1, 19), -1)  # for ever
    found = [next(stream) for _ in range(25)]
    assert len(steps) == 25 and all(t.shape == (1,) and t.dtype == torch.int64 for t in found)
    assert len({t.data_ptr() for t in found}) == 25
    assert len(list(generate(model, tokens(1, 3), 4))) == 4 and len(steps) == 29
    with pytest.raises(ValueError, match='at least one token'):
        next(generate(model, tokens(1, 0), 3))


class Bytes:
    """A tokenizer of V letters."""

    eot = 0

    def encode(self, text):
        return [ord(c) % V for c in text]

    def decode_bytes(self, ids):
        return bytes(97 + i for i in ids)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_sample_prints_what_the_decoder_draws(dtype, monkeypatch, capsys):
    """Two samples by one decoder, the second with other draws, both from the prompt on."""
    model = make(RecurrentGPT, dtype=torch.float32)
    monkeypatch.setattr(sample, 'load_model', lambda kind: (model, Bytes()))
    for name in ('prompt', 'num_samples', 'max_new_tokens', 'device', 'dtype'):
        monkeypatch.setattr(sample, name, getattr(sample, name))  # main overrides them for good
    monkeypatch.setattr(
        sys,
        'argv',
        [
            'sample.py',
            '--prompt=ab',
            '--num_samples=2',
            '--max_new_tokens=30',
            '--device=cpu',
            f'--dtype={dtype}',
        ],
    )
    sample.main()
    decoder, expected = Decoder(model, 1, getattr(torch, dtype), 0.8, 200, 1337), []
    for _ in range(2):
        drawn = torch.cat(list(decoder.generate(torch.tensor([[0, 97 % V, 98 % V]]), 30)))
        expected.append('ab' + Bytes().decode_bytes(drawn.tolist()).decode())
    assert (
        capsys.readouterr().out == f'{expected[0]}\n---------------\n{expected[1]}\n'
        and expected[0] != expected[1]
    )


def test_sample_refuses_a_dtype(monkeypatch, capsys):
    monkeypatch.setattr(sample, 'dtype', 'auto')
    monkeypatch.setattr(sys, 'argv', ['sample.py', '--dtype=half'])
    with pytest.raises(SystemExit) as error:
        sample.main()
    stderr = capsys.readouterr().err
    assert error.value.code == 2 and "dtype = 'half'" in stderr and stderr.count('\n') == 1


# ---- on a GPU ----

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')]


class TestOnGPU:
    pytestmark = gpu

    @pytest.mark.parametrize(
        'kind, changes', VARIANTS, ids=lambda x: getattr(x, '__name__', str(x))
    )
    def test_graph_replays_are_eager_steps(self, kind, changes):
        """3W steps past the capture and a load in between; then the reference."""
        model, x = make(kind, device='cuda', **changes), tokens(2, 22).cuda()
        graphed, eager = Decoder(model, 2), Decoder(model, 2)
        eager.warm = -math.inf  # never captured
        for _ in range(2):
            found = feed(graphed, x)
            assert_close(found, feed(eager, x))
            assert graphed.graph is not None and eager.graph is None
            assert_same_state(graphed.state(), eager.state())
            exact = make(kind, **changes)
            assert_close(
                found.cpu(), reference.run(exact, x.cpu(), reference.History(exact, 2))[0].detach()
            )
            for d in (graphed, eager):
                d.load(model.init_state(2))
        assert all(
            torch.equal(graphed.step(), eager.step()) for _ in range(20)
        )  # feeding themselves

    def test_graphs_draw_anew_and_repeatably(self):
        model = make(RecurrentGPT, dtype=torch.float32, device='cuda', vocab_size=V)
        with torch.no_grad():
            model.head.mul_(0.05)
        x = tokens(8, 3).cuda()
        runs = [
            torch.stack(list(generate(model, x, 40, seed=seed, amp=torch.bfloat16)))
            for seed in (0, 0, 1)
        ]
        assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
        assert (
            len({tuple(row) for row in runs[0][4:].tolist()}) == 36
        )  # replays do not repeat their noise

    @pytest.mark.parametrize('recurrent', [True, False])
    def test_generate(self, recurrent):
        torch.manual_seed(0)
        model = build_model(ModelConfig(256, 2, 2, 128, window=16, block_size=8), recurrent).cuda()
        found = [
            t.item()
            for t in generate(model, torch.zeros(1, 3, dtype=torch.int64, device='cuda'), 50)
        ]
        assert len(found) == 50 and all(0 <= t < 256 for t in found)
