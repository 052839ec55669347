"""Check an edit of the project in all modes; test_hacks.py runs this in patched copies.

    PYTHONPATH=.:tests python tests/hacks/check.py --n_loop=2      (make check-edit ARGS=...)
    PYTHONPATH=.:tests python tests/hacks/check.py models|agents|triton "{settings}" [--inductor]

The first form takes settings of train_lm.py. It trains a small model for 12 updates, resumes,
validates, scores, exports, samples and fine-tunes it by the scripts, as a user does, and then runs
`models`.

models and agents train for three updates in float64 in every mode, and models decode; all must give
what the plain mode gives. triton trains for one update in fp32, with Triton forms run by the
interpreter. two_chunks compares gradients through the state with those of one long chunk. Each
prints the losses of the plain mode, by which the test can tell a patched model from an unpatched
one."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if 'triton' in sys.argv:  # before anything imports triton
    os.environ['TRITON_INTERPRET'] = '1'

import torch
from reference import assert_close, assert_same_gradients, gradients, make, tokens
from small_runs import assert_equal, read_log
from test_convlstm import boards
from test_model import MODES, fake_graphed, set_mode

import graphs
import recompute
import unroll
from convlstm import AgentConfig, build_agent
from decode import Decoder
from model import GPT, RecurrentGPT
from run import load_checkpoint, log_of


def train(model, loss_of, updates=3):
    """Train for some updates; return the loss of each, loss_of(model, i), and the gradients of the
    last."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for i in range(updates):
        loss = loss_of(model, i)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }
        optimizer.step()
    return losses, grads


def assert_same(found, expected, what, rtol=1e-8, atol=1e-9):
    """Assert that two results of `train` are close. what: the name of the first in a message."""
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, msg=lambda message: f'{what}: {message}'
    )


def train_stream(model):
    """Train on three chunks of two streams."""
    state = None

    def loss_of(model, i):
        nonlocal state
        x, y = tokens(2, 7, seed=i), tokens(2, 7, seed=i + 10)
        loss, state = model(x, y, state)
        state = state.detach()
        return loss.objective

    return train(model, loss_of)


def settings_of(n_layer, settings):
    """Return settings of a model of n_layer layers: lists have one value per layer."""
    return {name: x[:n_layer] if isinstance(x, list | tuple) else x for name, x in settings.items()}


def models(settings):
    """Compare all modes of RecurrentGPT and GPT, and the decoder, with the plain mode."""
    recompute.graphed = fake_graphed
    recompute.can_capture = lambda x: True
    unroll.BLOCK = 3
    settings = {k: x for k, x in settings.items() if k not in ('n_layer', 'share_kv')}
    for n_layer, share_kv in ((2, True), (1, False)):
        found = {}
        for mode in MODES:
            sizes = {'n_layer': n_layer, 'share_kv': share_kv, 'n_expert': 3}
            model = make(RecurrentGPT, **sizes | settings_of(n_layer, settings))
            set_mode(model, mode)
            found[mode] = train_stream(model)
            assert_same(found[mode], found['plain'], mode)
        losses, grads = found['plain']
        print(*losses)
        check_every_weight_learns(grads)
        check_decoder(model)
    settings = settings_of(2, settings)
    gpt_settings = {'n_expert': 2, **settings}
    recurrent_names = parameter_names(make(RecurrentGPT, **settings))
    gpt_names = parameter_names(make(GPT, **gpt_settings))
    only_recurrent = {name for name in recurrent_names if name.split('.')[-1] in ('a', 'b')}
    if not recurrent_names <= gpt_names | only_recurrent:
        return  # the patch adds parameters to the recurrent model only
    x = tokens(2, 6)
    found = {}
    for mode in ('fast', 'compiled'):
        model = make(GPT, **gpt_settings)
        set_mode(model, mode)
        found[mode] = train(model, lambda model, i: model(x, x)[0].objective)
    assert_same(found['compiled'], found['fast'], 'GPT')
    check_decoder(model)


def parameter_names(model):
    return {name for name, _ in model.named_parameters()}


def check_every_weight_learns(grads):
    """Assert that each parameter gets a gradient in at least one layer. Without this a parameter
    that a patch adds would change the random weights of a model, and so its losses, unused."""
    names = {name.split('.')[-1] for name in grads}
    learning = {name.split('.')[-1] for name, grad in grads.items() if grad.any()}
    assert learning == names, f'no gradient: {names - learning}'


def check_decoder(model):
    """Compare the decoder's logits with the plain mode's, with and without compilation."""
    set_mode(model, 'plain')
    x = tokens(2, 11)
    with torch.no_grad():
        expected, _ = model(x, state=model.init_state(2))
    for compiled in (False, True):
        graphs.fused.enabled = compiled
        decoder = Decoder(model, 2)
        for t in range(x.size(1)):
            decoder.step(x[:, t])
            assert_close(decoder.logits, expected[:, t], what=f'decoder, token {t}')


def two_chunks(settings):
    """Compare the gradients of two chunks, the second of which starts from the state of the first,
    with those of one chunk, in all modes."""
    recompute.graphed = fake_graphed
    recompute.can_capture = lambda x: True
    unroll.BLOCK = 3
    for mode in MODES:
        model = make(RecurrentGPT, **settings)
        set_mode(model, mode)
        x, y = tokens(2, 10), tokens(2, 10, seed=1)
        expected = gradients(model, model(x, y)[0].objective)
        first, state = model(x[:, :5], y[:, :5])
        second, _ = model(x[:, 5:], y[:, 5:], state)
        found = gradients(model, (first.objective + second.objective) / 2)
        assert_same_gradients(model, found, expected)


def triton(settings):
    """Compare training with all Triton forms enabled, in fp32, with the plain mode."""
    import triton_kernels  # noqa: F401  registers the forms

    unroll.BLOCK = 4
    unroll.GROUP = 3
    found = []
    for forms in (frozenset(), frozenset({'attention', 'experts', 'loss'})):
        model = make(RecurrentGPT, dtype=torch.float32, n_expert=3, n_embd=24, n_head=2, **settings)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.7)  # the rounding of fp32 stays small
        model.forms = forms
        found.append(train(model, lambda model, i: model(*tokens(2, 2, 7))[0].objective, 1))
    plain, with_forms = found
    assert_same(with_forms, plain, 'Triton forms', rtol=1e-3, atol=1e-4)
    print(*plain[0])


def agents(settings):
    """Compare all modes of agents with the plain mode."""
    for arch, residual in (('convlstm', 'expert'), ('convglu', 'expert'), ('convglu', 'shared')):
        sizes = {'arch': arch, 'residual': residual, 'n_layer': 2, 'n_expert': 3, 'n_embd': 8}
        obs, start = boards(T=3, B=2)

        def loss_of(agent, i, obs=obs, start=start):
            logits, value, _ = agent(obs, start, agent.init_state(2))
            return logits.square().mean() + (value - i).square().mean()

        found = {}
        for mode in ('plain', 'fast', 'compiled'):
            torch.manual_seed(0)
            agent = build_agent(AgentConfig(head_dim=16, **sizes, **settings)).double()
            agent.config.mode = 'plain' if mode == 'plain' else 'fast'
            graphs.fused.enabled = mode == 'compiled'
            found[mode] = train(agent, loss_of)
            assert_same(found[mode], found['plain'], mode)
        print(*found['plain'][0])


# ---- an edit, checked end to end ----

# A small model that learns the demo's text; each of these may be given again.
EDIT = """--n_layer=2 --n_expert=2 --n_embd=64 --n_head=2 --window=16 --block_size=16 --max_iters=12
    --tokens_per_step=1024 --val_tokens=4096 --val_streams=16 --eval_interval=6 --warmup_iters=2
    --compile=False --threads=1 --device=cpu --dtype=float32""".split()
PROMPT = 'Fellow citizens of the Senate'


def call(script, *arguments):
    """Run a script of the edited project and return what it prints."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}')
    return done.stdout


def edit(arguments):
    """Check an edit of the language models as a user meets it, and then all modes."""
    with tempfile.TemporaryDirectory() as folder:
        data, run, again, export, tuned, text = (
            Path(folder, name) for name in ('data', 'run', 'again', 'export', 'tuned', 'a.txt')
        )
        text.write_text(f'{PROMPT} and of the House of Representatives: ' * 4)
        call('data_fineweb.py', '--demo=True', '--tokenizer=bytes', f'--data_dir={data}')
        train = ['train_lm.py', '--tokenizer=bytes', f'--data_dir={data}', *EDIT, *arguments]
        call(*train, f'--out_dir={run}')
        records = log_of(run)
        first, last = records[1]['train_loss'], records[-1]['train_loss']
        assert len(records) == 13 and last < first, (first, last)
        print(f'trained 12 updates: loss {first:.4f} to {last:.4f}')

        shutil.copytree(run, again)  # as if it had been stopped after update 6
        os.replace(again / 'prev.pt', again / 'last.pt')
        call('train_lm.py', f'--out_dir={again}', '--resume=True')
        assert read_log(again) == read_log(run), 'the log of the resumed run differs'
        weights, resumed = (load_checkpoint(x / 'last.pt')['model'] for x in (run, again))
        assert_equal(resumed, weights)
        print('resumed after 6 updates: bit-equal')

        printed = call('train_lm.py', f'--out_dir={run}', '--eval_only=True')
        assert f'validation loss {records[-1]["val_loss"]:.4f} nats' in printed, printed
        print(f'validated: {records[-1]["val_loss"]:.4f}, as logged')

        options = ['--device=cpu', '--dtype=float32']
        call('sample.py', f'--out_dir={run}', f'--export={export}', '--which=last')
        score, of_export = (
            call('sample.py', f'--out_dir={x}', f'--score={text}', '--which=last', *options)
            for x in (run, export)
        )
        assert score == of_export, (score, of_export)
        print(f'scored and exported: {re.search(r"[0-9.]+ nats", of_export)[0]} per byte in both')

        sampled = call(
            'sample.py', f'--out_dir={export}', f'--prompt={PROMPT}', '--max_new_tokens=9', *options
        )
        assert sampled.startswith(PROMPT)
        printed = call(*train, f'--out_dir={tuned}', f'--init_from={export}', '--max_iters=3')
        assert 'initialized from scratch' not in printed, printed
        assert log_of(tuned)[1]['train_loss'] < last + 0.5 * (first - last), log_of(tuned)
        print('sampled and fine-tuned')
        sizes = load_checkpoint(run / 'last.pt')['entries']['model']
    changed = {argument.split('=')[0].lstrip('-') for argument in arguments}
    models({name: x for name, x in sizes.items() if name in changed})


GROUPS = {'models': models, 'agents': agents, 'triton': triton, 'two_chunks': two_chunks}


def main(arguments):
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 256
    if '--inductor' not in arguments:  # stop before Inductor, whose C++ compiler takes minutes
        graphs.compiled = functools.cache(
            lambda f: torch.compile(f, backend='aot_eager', fullgraph=True, dynamic=False)
        )
    if arguments and arguments[0] in GROUPS:
        GROUPS[arguments[0]](ast.literal_eval(arguments[1]))
    else:
        edit(arguments)
    print('all modes agree')


if __name__ == '__main__':
    main(sys.argv[1:])
