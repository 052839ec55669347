"""Test decode.py against reference.py, its sampling, and what sample.py prints. pytest -m gpu runs
the decoder on a GPU too, as a CUDA graph from the fourth token on."""

import copy
import inspect
import io
import itertools
import math
import os
import re
import signal
import sys
import textwrap

from support.script import UserError, run_script

import processes
import pytest
import reference
import torch
import torch.nn.functional as F
from processes import ROOT
from reference import V, assert_close, assert_same_state, tokens
from torch._subclasses.fake_tensor import FakeTensorMode

import sample
import tracing
from decode import Decoder, generate
from decode import sample as sample_token
from model import GPT, LayerParams, RecurrentGPT, State
from support import compiling
from tokenizer import get_tokenizer
from tracing import trace

both_models = pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device'),
]
devices = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=on_gpu)])


def make(model_type, dtype=torch.float64, **changes):
    """Return a small model of odd sizes, all of whose parameters are random and not small."""
    sizes = {'n_layer': 3, 'n_embd': 36, 'n_head': 6, 'window': 5, 'n_expert': 3}
    return reference.make(model_type, 0, dtype, **sizes | changes).requires_grad_(False)


def expected_logits(model, x):
    """Return the reference's logits of x (B, T), read from an empty state."""
    return reference.run(model, x, reference.History(model, len(x)))[0]


# ---- logits and state ----


@devices
@pytest.mark.parametrize(
    'model_type, changes',
    [
        (RecurrentGPT, {}),
        (RecurrentGPT, {'share_kv': False, 'aggregation': 'softmax_l2'}),
        (RecurrentGPT, {'n_layer': 1, 'n_expert': 1, 'window': 1, 'aggregation': 'mean'}),
        (GPT, {}),
        (GPT, {'residual': 'shared', 'aggregation': 'softmax_mean'}),
    ],
    ids=str,
)
def test_the_decoder_follows_the_reference(model_type, changes, device):
    """Two of three streams are reset, at tokens 5 and 7; then the ring of five slots turns four
    times. For each token a second decoder loads the state of the first: its newest entry is in the
    last slot, that of the first in any. No tensor moves, because CUDA graphs read them."""
    model = make(model_type, **changes)
    history = reference.History(model, 3)
    model_there = copy.deepcopy(model).to(device)
    decoder, second = Decoder(model_there, 3), Decoder(model_there, 3)

    def expected_state():
        return State(*(x.to(device) for x in history.state()))

    def addresses():
        values = [*vars(decoder).values(), decoder.position.counters]
        return [x.data_ptr() for x in values if torch.is_tensor(x)]

    before = addresses()
    for t, token in enumerate(tokens(27, 3)):
        if t in (5, 7):
            history.reset(t - 5)
            decoder.load(expected_state())
        saved = decoder.state()
        decoder.step(token)
        second.load(saved)
        second.step(token)
        logits, history = reference.run(model, token[:, None], history)
        for d in (decoder, second):
            assert_close(d.logits, logits[:, 0].to(device))
            assert_same_state(d.state(), expected_state())
    assert logits.std() > 0.5  # flat logits would agree by chance
    assert addresses() == before


def test_a_step_does_not_wait_for_the_device():
    """A CUDA graph could not hold it. Fake tensors have no values to wait for."""
    model = make(RecurrentGPT)
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder = Decoder(model, 2, temperature=0.8, top_k=3, top_p=0.9, seed=None)
        decoder.step()
        with pytest.raises(RuntimeError):
            decoder.token.tolist()


@devices
@both_models
def test_errors_in_bf16_are_small(model_type, device):
    """The measured error is 0.009, as that of the model under autocast. A GPU uses Triton
    overrides."""
    model, x = make(model_type, torch.float32), tokens(4, 19)
    expected = expected_logits(reference.exact(model), x)
    decoder = Decoder(model.to(device), 4, compute_dtype=torch.bfloat16)
    if device == 'cuda':
        pytest.importorskip('kernels')  # registers the overrides
        model.overrides = frozenset({'attention', 'experts'})
    for token in x.T:
        decoder.step(token)
    error = (decoder.logits.cpu() - expected[:, -1]).norm() / expected[:, -1].norm()
    assert 1e-3 < error < 0.2
    assert decoder.logits.dtype == decoder.s.dtype == torch.float32


@pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') != '1', reason='test_triton.py runs it in the interpreter'
)
@pytest.mark.parametrize(
    'model_type, changes',
    [
        (RecurrentGPT, {'window': 1, 'share_kv': False, 'aggregation': 'softmax_l2'}),
        (RecurrentGPT, {'window': 70, 'aggregation': 'mean'}),
        (RecurrentGPT, {'window': 300}),  # in two parts
        (GPT, {'residual': 'shared'}),
    ],
    ids=str,
)
def test_with_triton_forms_it_equals_the_reference(monkeypatch, model_type, changes):
    """Three streams start with an empty, a half full and a full window."""
    pytest.importorskip('kernels')  # registers the overrides
    monkeypatch.setattr(compiling, 'candidates', {'split'})
    model = make(model_type, torch.float32, n_layer=1, n_expert=2, **changes)
    model.overrides = frozenset({'attention', 'experts'})
    decoder = Decoder(model, 3)
    exact, W = reference.exact(model), model.config.window
    _, state = exact(tokens(3, W + 1), state=exact.init_state(3))
    state = state._replace(count=torch.tensor([0, W // 2, W]))
    decoder.load(state)
    for token in tokens(4, 3, seed=1):
        decoder.step(token)
        logits, state = exact(token[:, None], state=state)
        assert_close(decoder.logits, logits[:, 0], rtol=1e-5)
    assert_same_state(decoder.state(), state, rtol=1e-5)


@both_models
def test_the_decoder_has_the_windows_of_layers_that_see_less_than_the_cache_holds(model_type):
    """It continues the model's state and returns one for it, over two turns of the ring."""
    model, x = make(model_type), tokens(2, 17)
    for layer, window in zip(model.layers, (3, 1, 4), strict=True):
        layer.window = window
    expected, after = model(x, state=model.init_state(2))
    _, state = model(x[:, :6], state=model.init_state(2))
    decoder = Decoder(model, 2)
    decoder.load(state)
    for t in range(6, 17):
        decoder.step(x[:, t])
        assert_close(decoder.logits, expected[:, t])
    assert_same_state(decoder.state(), after)


@both_models
def test_a_window_above_that_of_the_config_is_refused(model_type):
    model = make(model_type)
    model.layers[1].window = 6
    for run in (model, lambda x: Decoder(model, 1)):
        with pytest.raises(UserError, match=r'window = 6 .* at most window = 5'):
            run(tokens(1, 7))


@both_models
def test_keys_of_the_router_have_the_dtype_of_the_weights_under_autocast(model_type, monkeypatch):
    model = make(model_type, torch.float32, aggregation='softmax_l2')
    keys, bind = [], LayerParams.bind

    def keep(*arguments):
        weights = bind(*arguments)
        keys.append(weights.router_keys.weight)
        return weights

    monkeypatch.setattr(LayerParams, 'bind', keep)
    with torch.autocast('cpu', torch.bfloat16):
        model(tokens(1, 4))
        Decoder(model, 1)
    layers = [layer.expert_embedding @ layer.router_k.T for layer in model.layers]
    for found, expected in zip(keys, layers * 2, strict=True):
        assert_close(found, expected, rtol=1e-6)


# ---- sampling and generation ----


@pytest.mark.parametrize(
    'temperature, top_k, top_p', [(0.5, 100, 1), (2.0, 3, 1), (1.0, 100, 0.6), (2.0, 5, 0.8)]
)
def test_samples_follow_the_softmax(temperature, top_k, top_p):
    """The frequencies of the tokens of 4,000 equal streams are near their probabilities."""
    model, B = make(RecurrentGPT, n_layer=1, n_embd=12, n_head=2), 4000
    decoder = Decoder(model, B, torch.float32, temperature, top_k, 5, top_p)
    sampled = decoder.step(torch.zeros(B, dtype=torch.int64))
    p, order = torch.exp(decoder.logits[0] / temperature).sort(descending=True)
    kept = [k for k in range(top_k) if p[:k].sum() < top_p * p[:top_k].sum()]
    p = p[kept] / p[kept].sum()
    counts = torch.bincount(sampled, minlength=V)[order]
    excess = counts[kept] - B * p
    # within 5 standard deviations, and two of the rarest
    assert (excess.abs() <= 5 * (B * p * (1 - p)).sqrt() + 2).all(), excess
    assert counts[kept].sum() == B


@pytest.mark.parametrize('temperature, top_k, top_p', [
    (0.8, 5, 1), (0.8, 0, 0.5), (0.8, 0, 1), (math.inf, 5, 1),
])  # fmt: skip
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_noise_of_zero_chooses_no_token_that_is_left_out_or_unlikely(
    temperature, top_k, top_p, dtype
):
    """Apple's GPUs draw zeros from Exp(1). Token 0 is the likeliest of 256, by a factor of e^20
    over the last one at a temperature of 0.8."""
    logits = torch.arange(256.0, 0, -1).to(dtype)[None] / 16
    for token in (0, 255):
        noise = torch.ones(1, 256, dtype=dtype)
        noise[0, token] = 0
        assert sample_token(logits, noise, temperature, top_k, top_p) == 0


def test_noise_of_a_model_in_bf16_has_fp32(monkeypatch):
    """In bf16 many tokens would be equal, and the smaller one be sampled."""
    dtypes = []

    def record(logits, noise, *args):
        dtypes.append(noise.dtype)
        return sample_token(logits, noise, *args)

    monkeypatch.setattr('decode.sample', record)
    generate(make(RecurrentGPT).bfloat16(), tokens(1, 3), 2, temperature=1)
    assert set(dtypes) == {torch.float32}


@devices
@both_models
def test_generation_follows_the_reference_and_repeats_with_the_seed(model_type, device):
    """A generator with the same seed gives the same text, and seed = None draws from the generator
    of torch. Replayed graphs do not repeat their noise. The prompt is longer than block_size."""
    model, x = make(model_type), tokens(4, 19)
    model_there, texts = copy.deepcopy(model).to(device), []
    for seed in (0, torch.Generator(device).manual_seed(0), 1, None, None):
        decoder = Decoder(model_there, 4, temperature=20, seed=seed)  # no texts agree by chance
        texts.append(torch.stack(list(decoder.generate(x.to(device), 40))).cpu())  # (40, 4)
    assert torch.equal(texts[0], texts[1])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(texts[1:]))
    assert len({tuple(row) for row in texts[0][4:].tolist()}) > 30  # of 36; two may agree by chance
    logits = expected_logits(model, torch.cat([x, texts[-1][:-1].T], 1))
    assert_close(decoder.logits.cpu(), logits[:, -1])


@both_models
def test_generate_returns_the_texts_with_what_a_decoder_adds(model_type):
    model, x = make(model_type), tokens(3, 4)
    decoder = Decoder(model, 3, temperature=2, top_k=5, seed=7, top_p=0.9)
    added = torch.stack(list(decoder.generate(x, 9)), 1)
    options = {'temperature': 2, 'top_k': 5, 'top_p': 0.9}
    assert torch.equal(generate(model, x, 9, **options, seed=7), torch.cat([x, added], 1))
    first, second = (generate(model, x, 9, **options) for _ in range(2))
    assert not torch.equal(first, second)  # by default they draw from torch's generator
    assert torch.equal(generate(model, x, 0), x)
    for ids, n in ((x[0], 3), (x[:, :0], 3), (x, -1)):
        with pytest.raises(ValueError, match='expected texts'):
            generate(model, ids, n)


def test_a_decoder_is_for_one_state_of_the_weights():
    model, x = make(RecurrentGPT), tokens(1, 3)
    decoder = Decoder(model, 1)
    with torch.no_grad():
        model.head.mul_(2)
    with pytest.raises(ValueError, match='the weights have changed: make another Decoder'):
        decoder.prefill(x)


@pytest.mark.parametrize(
    'options', [{'top_p': 0}, {'top_p': 1.5}, {'temperature': -0.5}, {'top_k': -1}], ids=str
)
def test_settings_that_no_sampling_has_are_refused(options):
    with pytest.raises(ValueError, match='expected at least 0'):
        generate(make(RecurrentGPT), tokens(1, 3), 2, **options)


@pytest.mark.parametrize('use', [lambda model: Decoder(model, 1), lambda m: trace(m, tokens(1, 3))])
def test_a_class_that_overrides_the_forward_is_refused(use):
    class Skipping(RecurrentGPT):
        def hidden(self, z, state):
            s, state = super().hidden(z, state)
            return s + z, state

    model = make(RecurrentGPT)
    use(model)
    model.__class__ = Skipping
    with pytest.raises(ValueError, match='Skipping.hidden is overridden in test_decode'):
        use(model)


def test_the_notebooks_of_the_docstrings_run_in_another_folder(tmp_path):
    lines = [f'import sys; sys.path.insert(0, {str(ROOT)!r})']
    for source, after in ((generate, None), (tracing, 'It runs')):
        text = inspect.getdoc(source)
        example = text[text.index('    import torch') : after and text.index(after)]
        lines.append(textwrap.dedent(example.replace('PATH/', f'{ROOT}/')))
    (tmp_path / 'notebook.py').write_text('\n'.join(lines))
    done = processes.run(['notebook.py'], cwd=tmp_path)
    assert done.stdout[2:].startswith('Fellow citizens') and not done.stderr, done


# ---- sample.py ----

EOT = 255  # the end of a text in bytes, which is no byte of UTF-8


@pytest.fixture
def model():
    """Return a model of bytes that often samples the end of the text."""
    model = make(RecurrentGPT, torch.float32, vocab_size=256)
    model.head[EOT] *= 3
    return model


@pytest.fixture
def run_sample(tmp_path, monkeypatch, capsys):
    """Return a function that runs sample.py with a model and bytes typed as its standard input, and
    returns what it prints."""

    def run(model, *arguments, typed=b'', tokenizer='bytes'):
        model.save_pretrained(tmp_path / 'model', config={'tokenizer': tokenizer})
        options = [f'--out_dir={tmp_path}/model', '--device=cpu', '--dtype=float32', *arguments]
        monkeypatch.setattr(sys, 'argv', ['sample.py', *options])
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(typed)))
        with pytest.raises(SystemExit) as end:
            run_script(sample.main)
        assert end.value.code == 0
        return capsys.readouterr().out

    return run


def test_samples_are_those_of_the_decoder_up_to_the_end_of_the_text(model, run_sample):
    """With --stop=False that is marked, and the next document follows. A byte of the prompt that is
    not UTF-8, for which Python has a lone surrogate, is replaced."""
    decoder = Decoder(model, 1, torch.bfloat16, 0.8, 200, 1337, top_p=0.9)
    texts = []
    for _ in range(2):
        ids = torch.cat(list(decoder.generate(torch.tensor([[EOT, *b'a?']]), 60))).tolist()
        documents = [part.decode(errors='replace') for part in bytes(ids).split(bytes([EOT]))]
        texts.append('a?' + '<|endoftext|>'.join(documents))
    assert texts[0] != texts[1] and texts[0].count('<|endoftext|>') > 1
    arguments = ['--prompt=a\udcff', '--max_new_tokens=60', '--top_p=0.9', '--dtype=bfloat16']
    printed = run_sample(model, *arguments, '--num_samples=2', '--stop=False')
    assert printed == f'{texts[0]}\n---------------\n{texts[1]}\n'
    assert run_sample(model, *arguments) == texts[0].partition('<|endoftext|>')[0] + '\n'


def conversation(model, prompt, lines, n):
    """Return the reference's greedy answers to each line typed after the prompt, of n bytes or up
    to the end of text. A line after that starts the next document."""
    history, unread, answers = reference.History(model, 1), [EOT, *prompt], []
    for i, line in enumerate(lines):
        unread += line if i == 0 or unread == [EOT] else b'\n' + line
        answer = []
        while len(answer) < n:
            logits, history = reference.run(model, torch.tensor([unread]), history)
            unread = [logits[0, -1].argmax().item()]
            if unread == [EOT]:
                break
            answer += unread
        answers.append(bytes(answer))
    return answers


def stop_after_five(self, tokens, n, state, generate=Decoder.generate):
    """Generate tokens, and press ctrl-C at the fifth."""
    for i, token in enumerate(generate(self, tokens, n, state), 1):
        if i == 5:
            signal.raise_signal(signal.SIGINT)
        yield token


@pytest.mark.parametrize('n', [5, -1])
def test_a_conversation_is_one_stream(model, tmp_path, run_sample, monkeypatch, n):
    """Every answer continues all that was typed and answered before. It ends after n tokens or, if
    n = -1, by ctrl-C. A byte order mark, line ends and a byte that is not UTF-8 are replaced."""
    lines = [b'ab', b'bad cab', 'c\ufffd'.encode(), b'fed', b'dab']
    answers = conversation(reference.exact(model), b'deed', lines, 5)
    assert {len(answer) == 5 for answer in answers[:-1]} == {True, False}
    if n < 0:
        monkeypatch.setattr(Decoder, 'generate', stop_after_five)
    (tmp_path / 'prompt.txt').write_bytes(b'deed')
    arguments = ['--interactive', '--temperature=0', f'--prompt=FILE:{tmp_path}/prompt.txt']
    typed = b'\xef\xbb\xbfab\r\nbad cab\r\nc\xff\r\nfed\r\ndab'
    printed = run_sample(model, *arguments, f'--max_new_tokens={n}', typed=typed)
    assert printed == ''.join(answer.decode(errors='replace') + '\n' for answer in answers)


def test_a_second_ctrl_c_ends_the_script():
    with pytest.raises(KeyboardInterrupt), sample.stop_by_ctrl_c() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize('is_terminal, end', [(True, '\ufffd\ufffd\n'), (False, '\x1b\x9f\n')])
def test_control_characters_reach_a_file_but_no_terminal(monkeypatch, capsys, is_terminal, end):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_terminal)
    sample.show('é☕\ta\n\x1b\x9f\n')
    assert capsys.readouterr().out == 'é☕\ta\n' + end


def test_a_score_is_that_of_the_reference_per_byte(run_sample):
    """Tokens are no bytes, and the text is longer than a chunk."""
    model, text = make(RecurrentGPT, torch.float32, vocab_size=50304), 'a bad cab é faded ' * 5
    ids = torch.tensor([[50256, *get_tokenizer('gpt2').encode(text)]])
    logits = expected_logits(reference.exact(model), ids[:, :-1])
    size = len(text.encode())
    nats = F.cross_entropy(logits[0], ids[0, 1:], reduction='sum').item() / size
    printed = run_sample(model, '--score=FILE:-', typed=text.encode(), tokenizer='gpt2')
    found = {unit: float(value) for value, unit in re.findall(r'([\d.]+) (\w+)', printed)}
    expected = {'bytes': size, 'tokens': ids.size(1) - 1, 'nats': nats, 'bits': nats / math.log(2)}
    assert found == pytest.approx(expected, abs=1e-4)
