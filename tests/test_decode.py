"""Test decode.py against reference.py, its sampling, and what sample.py prints. pytest -m gpu runs
the decoder on a GPU too, as a CUDA graph from the fourth token on."""

import io
import itertools
import math
import os
import re
import signal
import sys

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from reference import V, assert_close, assert_same_state, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import sample
from configurator import run_script
from decode import Decoder
from model import GPT, RecurrentGPT, State

OWN_CACHES = {'share_kv': False}
SHARED_RESIDUAL = {'residual': 'shared'}
VARIANTS = [
    (RecurrentGPT, {}),
    (RecurrentGPT, OWN_CACHES),
    (RecurrentGPT, {'aggregation': 'softmax_l2'}),
    (RecurrentGPT, {'window': 1}),
    (RecurrentGPT, {'n_expert': 1, **OWN_CACHES}),
    (RecurrentGPT, {'aggregation': 'mean', 'n_layer': 1, **OWN_CACHES}),
    (GPT, {}),
    (GPT, SHARED_RESIDUAL),
    (GPT, {'aggregation': 'softmax_l2', **SHARED_RESIDUAL}),
    (GPT, {'aggregation': 'softmax_mean'}),
    (GPT, {'n_expert': 1, **SHARED_RESIDUAL}),
]
variants = pytest.mark.parametrize('model_type, changes', VARIANTS, ids=str)
both_models = pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device'),
]
devices = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=on_gpu)])


def make(model_type, dtype=torch.float64, device='cpu', **changes):
    """Return a small model of odd sizes, all of whose parameters are random and not small."""
    sizes = {'n_layer': 3, 'n_embd': 36, 'n_head': 6, 'window': 5, 'n_expert': 3}
    return reference.make(model_type, 0, dtype, **sizes | changes).to(device)


def feed(decoder, x):
    """Feed x (B, T) token by token; return the logits (B, T, V)."""
    logits = []
    for token in x.unbind(1):
        decoder.step(token)
        logits.append(decoder.logits.clone())
    return torch.stack(logits, 1)


@torch.no_grad()
def expected(model, x):
    """Return the reference's logits, and its state at the end."""
    logits, history = reference.run(model, x, reference.History(model, len(x)))
    return logits, history.state()


class RefuseWaiting(TorchDispatchMode):
    """Refuse operations for which the host waits for the device: no CUDA graph can hold them."""

    waits = '_local_scalar_dense nonzero is_nonzero masked_select equal lift_fresh'.split()
    waits += ['_unique2', 'unique_dim', 'unique_consecutive']

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in self.waits, function
        return function(*args, **kwargs or {})


# ---- logits and state ----


@variants
@devices
def test_decoder_equals_the_reference(model_type, changes, device):
    """The stream passes three turns of the ring of keys and values, twice: the initial state is
    loaded in between. The host never waits for the device, and no tensor moves."""
    model, x = make(model_type, **changes), tokens(3, 3 * 5 + 4)
    logits, state = expected(model, x)
    decoder, initial = Decoder(model.to(device), 3), model.init_state(3)

    def addresses():
        tensors = [decoder.s, decoder.keys, decoder.values, decoder.logits, decoder.token]
        return [t.data_ptr() for t in (*tensors, decoder.position.counters)]

    before = addresses()
    assert logits.std() > 0.5  # flat logits would agree by chance
    for _ in range(2):
        with RefuseWaiting() if device == 'cpu' else torch.no_grad():
            found = feed(decoder, x.to(device))
        assert_close(found.cpu(), logits)
        assert_same_state(State(*(t.cpu() for t in decoder.state())), state)
        decoder.load(initial)
    assert decoder.step() is decoder.step()
    assert addresses() == before


def test_refuse_waiting_refuses_an_operation_that_waits():
    with RefuseWaiting(), pytest.raises(AssertionError, match='_local_scalar_dense'):
        torch.ones(1).item()


@pytest.mark.parametrize('model_type, changes', VARIANTS[:2] + VARIANTS[6:7], ids=str)
@torch.no_grad()
def test_state_and_load_work_at_every_slot_of_the_ring(model_type, changes):
    """Three streams start with 0, 2 and 5 entries. After each token a second decoder loads the
    state of the first; its newest entry is then in the last slot, that of the first anywhere."""
    model, x = make(model_type, **changes), tokens(3, 19, seed=1)
    _, state = model(tokens(3, 9), state=model.init_state(3))
    state = state._replace(count=torch.tensor([0, 2, 5]))
    decoder, second = Decoder(model, 3), Decoder(model, 3)
    feed(decoder, tokens(3, 7, seed=2))  # the load must clear this
    decoder.load(state)
    for token in x.unbind(1):
        saved = decoder.state()
        unchanged = State(*(t.clone() for t in saved))
        second.load(saved)
        logits, state = model.step(token, state)
        for d in (decoder, second):
            assert_close(feed(d, token[:, None])[:, 0], logits)
            assert_same_state(d.state(), state)
        assert_same_state(saved, unchanged, 0)  # later steps do not change what state() returned


@both_models
@devices
def test_errors_in_bf16_and_fp32_are_small(model_type, device):
    """The reference in float64 is compared with. Measured errors are 0.009 in bf16 and 4e-7 in
    fp32, as those of the model under autocast. A GPU uses Triton forms."""
    model, x = make(model_type, torch.float32), tokens(4, 19)
    exact, _ = expected(reference.exact(model), x)
    model, x = model.to(device), x.to(device)
    for amp, least, most in ((torch.bfloat16, 1e-3, 0.2), (torch.float32, 1e-8, 1e-5)):
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, amp == torch.bfloat16):
            _, state = model(x, state=model.init_state(4))
        decoder = Decoder(model, 4, amp=amp)
        if device == 'cuda':
            pytest.importorskip('triton_kernels')  # registers the forms
            model.forms = frozenset({'attention', 'experts'})
        error = (feed(decoder, x).cpu() - exact).norm() / exact.norm()
        assert least < error < most, (amp, error)
        assert decoder.logits.dtype == decoder.s.dtype == torch.float32
        assert [t.dtype for t in decoder.state()] == [t.dtype for t in state]


# ---- Triton forms, in the interpreter ----

interpreted = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') != '1', reason='test_triton.py runs it in the interpreter'
)


@interpreted
@pytest.mark.parametrize(
    'model_type, changes',
    [
        (RecurrentGPT, {'n_layer': 1, 'window': 1, 'aggregation': 'softmax_l2', **OWN_CACHES}),
        (RecurrentGPT, {'n_layer': 1, 'window': 70, 'aggregation': 'mean'}),
        (GPT, {'n_layer': 1, **SHARED_RESIDUAL}),
    ],
    ids=str,
)
def test_with_triton_forms_it_equals_the_reference(model_type, changes):
    """Three streams start with an empty, a half full and a full window."""
    pytest.importorskip('triton_kernels')  # registers the forms
    model = make(model_type, torch.float32, n_expert=2, **changes)
    model.forms = frozenset({'attention', 'experts'})
    decoder = Decoder(model, 3)
    exact, W = reference.exact(model), model.config.window
    _, state = exact(tokens(3, W + 1), state=exact.init_state(3))
    state = state._replace(count=torch.tensor([0, W // 2, W]))
    decoder.load(state)
    for token in tokens(3, 4, seed=1).unbind(1):
        decoder.step(token)
        logits, state = exact.step(token, state)
        assert_close(decoder.logits, logits, rtol=1e-5)
    assert_same_state(decoder.state(), state, rtol=1e-5)


# ---- sampling and generation ----


SAMPLING = [  # temperature, top_k, top_p
    (1.0, 0, 1),
    (0.5, 0, 1),
    (2.0, 3, 1),
    (1.0, 1, 1),
    (0.7, 100, 1),
    (1.0, 0, 0.6),
    (2.0, 5, 0.8),
    (1.0, 0, 0.001),
]


@pytest.mark.parametrize('temperature, top_k, top_p', SAMPLING)
def test_samples_follow_the_softmax(temperature, top_k, top_p):
    """4,000 equal streams sample two tokens. Their frequencies, and those of the pairs, are near
    the probabilities."""
    model, B = make(RecurrentGPT, n_layer=1, n_embd=12, n_head=2), 4000
    decoder = Decoder(model, B, torch.float32, temperature, top_k, 5, top_p=top_p)
    samples, probabilities = [], []
    for _ in range(2):
        with RefuseWaiting():
            samples.append(decoder.step(torch.zeros(B, dtype=torch.int64)).clone())
        p, order = torch.exp(decoder.logits[0] / temperature).sort(descending=True)
        p[top_k or V :] = 0
        p /= p.sum()
        p[[k for k in range(V) if p[:k].sum() >= top_p]] = 0
        probabilities.append(torch.zeros(V, dtype=p.dtype).scatter(0, order, p / p.sum()))
    probabilities.append(torch.outer(*probabilities).flatten())
    samples.append(samples[0] * V + samples[1])  # pairs: the two steps must be independent
    for sampled, p in zip(samples, probabilities, strict=True):
        excess = torch.bincount(sampled, minlength=len(p)) - B * p
        # within 5 standard deviations, and two of the rarest; never what has no probability
        assert (excess.abs() <= 5 * (B * p * (1 - p)).sqrt() + 2 * (p > 0)).all(), excess
    assert (len(samples[0].unique()) == 1) == (top_k == 1 or top_p == 0.001)


@devices
@both_models
def test_a_seed_makes_generation_repeatable(model_type, device):
    """A generator with the same seed gives the same text, and seed = None draws from the generator
    of torch. Replayed graphs do not repeat their noise."""
    model, x = make(model_type, device=device), tokens(4, 3).to(device)
    with torch.no_grad():
        model.head.mul_(0.05)  # nearly uniform: two seeds cannot agree by chance
    seeds = 0, torch.Generator(device).manual_seed(0), 1, None, None
    decoders = [Decoder(model, 4, temperature=1.0, seed=seed) for seed in seeds]
    texts = [torch.stack(list(decoder.generate(x, 40))) for decoder in decoders]
    assert torch.equal(texts[0], texts[1])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(texts[1:]))
    assert len({tuple(row) for row in texts[0][4:].tolist()}) > 30  # of 36; two may agree by chance


@both_models
@pytest.mark.parametrize('top_k', [1, 3])
def test_generation_follows_the_reference(model_type, top_k):
    """Tokens are sampled from the logits after the prompt and all tokens before them. One decoder
    continues prompts of 1, 3 and 19 tokens (block_size is 8, window 5). top_k = 1 is greedy."""
    model, temperature = make(model_type, vocab_size=12), 0 if top_k == 1 else 2
    decoder = Decoder(model, 2, temperature=temperature, top_k=top_k)
    for length in (1, 3, 19):
        x, found = tokens(2, length), []
        for token in itertools.islice(decoder.generate(x, -1), 9):  # -1: without end
            found.append((token, decoder.logits.clone()))
        sampled, scores = (torch.stack(part, 1) for part in zip(*found, strict=True))
        logits, _ = expected(decoder.model, torch.cat([x, sampled[:, :-1]], 1))
        assert_close(scores, logits[:, -9:])
        assert (scores.topk(top_k).indices == sampled[..., None]).any(-1).all()
        assert sampled.unique(dim=1).size(1) > 1


# ---- sample.py ----


class Letters:
    """A tokenizer of V letters; 0 is the end of text."""

    eot = 0

    @staticmethod
    def encode(text):
        return [ord(letter) % V for letter in text]

    @classmethod
    def encode_document(cls, text):
        return np.array([cls.eot, *cls.encode(text)], np.uint16)

    @staticmethod
    def decode_bytes(ids):
        return bytes(97 + i for i in ids if i != Letters.eot)


def text_of(ids):
    """Return the text that stands for ids, with --stop=False."""
    return ''.join(chr(97 + i) if i != Letters.eot else '<|endoftext|>' for i in ids)


def run_sample(monkeypatch, capsys, model, argv, typed='', tokenizer=Letters):
    """Return what sample.py prints with this model. typed: its standard input, text or bytes."""
    typed = typed.encode() if isinstance(typed, str) else typed
    model.about = {'tokenizer': 'bytes'}
    monkeypatch.setattr(sample, 'load_model', lambda folder, which, device: model)
    monkeypatch.setattr(sample, 'get_tokenizer', lambda name: tokenizer)
    monkeypatch.setattr(sys, 'argv', ['sample.py', '--device=cpu', *argv])
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(typed)))
    with pytest.raises(SystemExit) as end:
        run_script(sample.main)
    assert end.value.code == 0
    return capsys.readouterr().out


@torch.no_grad()
def conversation(model, prompt, lines, n):
    """Return the reference's greedy answers of n tokens to each line typed after the prompt."""
    history, unread, answers = reference.History(model, 1), [0, *Letters.encode(prompt)], []
    for i, line in enumerate(lines):
        unread += Letters.encode(line if i == 0 or unread == [0] else '\n' + line)
        answer = []
        for _ in range(n):
            logits, history = reference.run(model, torch.tensor([unread]), history)
            unread = [logits[0, -1].argmax().item()]
            answer += unread
        answers.append(text_of(answer))
    return answers


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_sample_prints_the_texts_of_the_decoder(dtype, monkeypatch, capsys):
    """The two texts start with the prompt and differ."""
    model = make(RecurrentGPT, torch.float32)
    argv = ['--prompt=ab', '--num_samples=2', '--max_new_tokens=30', '--top_p=0.9', '--stop=False']
    found = run_sample(monkeypatch, capsys, model, [*argv, f'--dtype={dtype}'])
    decoder, texts = Decoder(model, 1, getattr(torch, dtype), 0.8, 200, 1337, top_p=0.9), []
    for _ in range(2):
        sampled = torch.cat(list(decoder.generate(torch.tensor([[0, 97 % V, 98 % V]]), 30)))
        texts.append('ab' + text_of(sampled.tolist()))
    assert found == f'{texts[0]}\n---------------\n{texts[1]}\n' and texts[0] != texts[1]


def test_bytes_that_are_not_utf8_in_the_prompt_and_in_typed_lines_are_replaced(monkeypatch, capsys):
    """In a prompt of the command line, Python represents such a byte by a lone surrogate."""
    model = make(RecurrentGPT, torch.float32)
    argv = ['--max_new_tokens=1', '--dtype=float32', '--temperature=0', '--stop=False']
    found = run_sample(monkeypatch, capsys, model, [*argv, '--prompt=a\udcff'])
    assert found[:2] == 'a?' and len(found) == len('a?x\n')
    found = run_sample(monkeypatch, capsys, model, [*argv, '--interactive'], b'a\xff\n')
    assert len(found) == len('x\n')


def test_a_sample_stops_at_the_end_of_text_or_marks_it(monkeypatch, capsys):
    """Up to there it is the same sample. --stop=True is the default."""
    model = make(RecurrentGPT, torch.float32)
    argv = ['--prompt=ab', '--max_new_tokens=60', '--temperature=2', '--dtype=float32']
    marked = run_sample(monkeypatch, capsys, model, [*argv, '--stop=False'])
    assert marked.count('<|endoftext|>') > 1
    stopped = run_sample(monkeypatch, capsys, model, [*argv, '--stop=True'])
    assert stopped == marked.partition('<|endoftext|>')[0] + '\n'


def test_a_line_after_the_end_of_a_text_starts_the_next_document(monkeypatch, capsys):
    """Otherwise a line continues the stream on a new line."""
    read = []

    class Reading(Letters):
        @classmethod
        def encode(cls, text):
            read.append(text)
            return Letters.encode(text)

    def answer(decoder, tokens, n, state):
        decoder.token.fill_(Letters.eot if len(read) == 2 else 5)
        yield decoder.token.clone()

    monkeypatch.setattr(Decoder, 'generate', answer)
    argv = ['--interactive', '--dtype=float32']
    model = make(RecurrentGPT, torch.float32)
    assert run_sample(monkeypatch, capsys, model, argv, 'a\nb\nc', Reading) == '\nf\nf\n'
    assert read == ['', 'a', 'b', '\nc']


@pytest.mark.parametrize('is_terminal', [True, False])
def test_control_characters_do_not_reach_a_terminal(monkeypatch, capsys, is_terminal):
    """A file or a pipe gets the text unchanged."""
    raw = 'a\tb\n' + ''.join(map(chr, [*range(9), *range(11, 32), *range(127, 160)])) + 'é☕'
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_terminal)
    sample.show(raw)
    assert capsys.readouterr().out == (f'a\tb\n{63 * chr(0xFFFD)}é☕' if is_terminal else raw)


def test_files_and_typed_lines_are_read_alike_with_any_line_ends(tmp_path, monkeypatch, capsys):
    """A byte order mark is dropped: prompts, scores and conversations are the same."""
    model = make(RecurrentGPT, torch.float32)
    plain = 'a bad cab\nfaded\n'
    found = set()
    for name, content in ('a', plain), ('b', '\ufeff' + plain.replace('\n', '\r\n')):
        (tmp_path / name).write_bytes(content.encode())
        argv = ['--dtype=float32', '--max_new_tokens=5', '--temperature=0']
        outputs = [
            run_sample(monkeypatch, capsys, model, [*argv, f'--prompt=FILE:{tmp_path}/{name}']),
            run_sample(monkeypatch, capsys, model, [*argv, '--prompt=FILE:-'], content),
            run_sample(monkeypatch, capsys, model, [*argv, f'--score={tmp_path}/{name}']),
            run_sample(monkeypatch, capsys, model, [*argv, '--interactive'], content),
        ]
        assert outputs[0].startswith(plain)
        found.add('|'.join(outputs).replace(f'{tmp_path}/{name}', ''))
    assert len(found) == 1


@both_models
def test_a_conversation_is_one_stream(model_type, monkeypatch, capsys):
    """Every answer continues all that was typed and answered before. They are greedy, as those of
    the reference."""
    model, typed = make(model_type), ['ab', 'bad cab', 'c']
    argv = ['--interactive', '--temperature=0', '--max_new_tokens=7', '--prompt=deed']
    argv += ['--dtype=float32', '--stop=False']
    printed = run_sample(monkeypatch, capsys, model, argv, '\n'.join(typed)).splitlines()
    answers = conversation(model, 'deed', typed, 7)
    assert printed == answers and len(set(answers)) > 1


def test_ctrl_c_stops_an_answer_and_not_the_conversation(monkeypatch, capsys):
    """The tokens printed so far stay in the stream."""

    class Interrupting(Letters):
        """Press ctrl-C at every fifth token."""

        tokens = 0

        @classmethod
        def decode_bytes(cls, ids):
            cls.tokens += 1
            if cls.tokens % 5 == 0:
                signal.raise_signal(signal.SIGINT)
            return Letters.decode_bytes(ids)

    model, handler = make(RecurrentGPT), signal.getsignal(signal.SIGINT)
    argv = ['--interactive', '--temperature=0', '--max_new_tokens=-1', '--dtype=float32']
    argv.append('--stop=False')
    printed = run_sample(monkeypatch, capsys, model, argv, 'ab\ncab\n', Interrupting).splitlines()
    assert printed == conversation(model, '', ['ab', 'cab'], 5)
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_second_ctrl_c_ends_the_script():
    with pytest.raises(KeyboardInterrupt), sample.stop_by_ctrl_c() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)


@both_models
def test_a_score_equals_that_of_the_reference(model_type, tmp_path, monkeypatch, capsys):
    """The text is longer than a chunk."""
    model, text = make(model_type, torch.float32), 'a bad cab é faded ' * 12
    (tmp_path / 'a.txt').write_text(text)
    ids = torch.tensor([[0, *Letters.encode(text)]])
    logits, _ = expected(reference.exact(model), ids[:, :-1])
    nats = F.cross_entropy(logits[0], ids[0, 1:], reduction='sum').item()
    size = len(text.encode())
    argv = [f'--score={tmp_path}/a.txt', '--dtype=float32']
    printed = run_sample(monkeypatch, capsys, model, argv)
    pattern = r'a.txt: (\d+) bytes, (\d+) tokens: (\S+) nats per byte, (\S+) bits per byte'
    found = re.search(pattern, printed).groups()
    assert [int(x) for x in found[:2]] == [size, len(text)]
    values = [float(x) for x in found[2:]]
    assert values == pytest.approx([nats / size, nats / size / math.log(2)], abs=1e-4)
