"""Check an edit of the project in all modes.

    PYTHONPATH=. python tests/hacks/check.py --n_loop=2      (make check-edit ARGS=--n_loop=2)
    PYTHONPATH=. python tests/hacks/check.py models|agents|triton|two_chunks "{settings}"

The first form takes settings of train_lm.py. It trains a small model for 12 updates, resumes,
validates, scores, exports and samples it by the scripts, as a user does, and then runs `models`.

models and agents train for three updates in float64 in every mode, and models decode; all must give
what the plain mode gives. triton trains for one update in fp32, with Triton overrides run by the
interpreter. two_chunks compares gradients through the state with those of one long chunk. models
also names settings that change nothing. models and agents print the losses of the plain mode:
test_hacks.py runs this in patched copies, and compares them with those of the unpatched code.
"""

import ast
import contextlib
import functools
import io
import json
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

if sys.argv[1:2] == ['triton']:  # before anything imports triton
    os.environ['TRITON_INTERPRET'] = '1'

import torch

sys.path.append(str(Path(__file__).parent.parent))
from reference import gradients, tokens  # noqa: E402

import train_lm
import unroll
from convlstm import AgentConfig, build_agent
from decode import Decoder
from model import ModelConfig, build_model, randomize
from support import compiling

SIZES = {
    'vocab_size': 11,
    'n_layer': 2,
    'n_expert': 3,
    'n_embd': 24,
    'n_head': 2,
    'n_kv_head': 1,
    'window': 3,
    'router_dim': 5,
}
# name: config.mode, fused.enabled, unroll.MAX_KEPT_BYTES
MODES = {
    'plain': ('plain', False, 2**30),
    'fast': ('fast', False, 2**30),
    'compiled': ('fast', True, 2**30),
    'recomputed': ('fast', True, 0),
}


def make(settings, recurrent=True, mode='plain', **sizes):
    """Return a small random model; settings that are lists have one value per layer."""
    sizes = {**SIZES, **sizes}
    for name, x in settings.items():
        sizes.setdefault(name, x[: sizes['n_layer']] if isinstance(x, list | tuple) else x)
    model = randomize(build_model(ModelConfig(**sizes), recurrent)).double()
    set_mode(model, mode)
    return model


def set_mode(model, mode):
    model.config.mode, compiling.fused.enabled, unroll.MAX_KEPT_BYTES = MODES[mode]


def train(model, loss_of, updates=3):
    """Train for some updates; return the loss of each, loss_of(i), and the last gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for i in range(updates):
        loss = loss_of(i)
        losses.append(loss.item())
        grads = gradients(model, loss)
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()
        optimizer.step()
    return losses, grads


def train_stream(model):
    """Train on three chunks of two streams."""
    state = None

    def loss_of(i):
        nonlocal state
        loss, state = model(tokens(2, 7, seed=i), tokens(2, 7, seed=i + 10), state)
        state = None if state is None else state.detach()
        return loss.objective

    return train(model, loss_of)


def compare(found, rtol=1e-8, atol=1e-9):
    """Assert that all results, by mode, are those of the first mode, and return them."""
    expected = next(iter(found.values()))
    for mode, result in found.items():
        torch.testing.assert_close(
            result, expected, rtol=rtol, atol=atol, msg=lambda text, mode=mode: f'{mode}: {text}'
        )
    return expected


def models(settings):
    """Compare all modes of both language models, and the decoder, with the plain mode."""
    unroll.TILE = 3
    cases = [  # sizes, and modes that are compared with the first
        ({'share_kv': True}, ['plain', 'fast', 'compiled']),
        ({'share_kv': False, 'n_layer': 1}, ['plain', 'recomputed']),
    ]
    for sizes, modes in cases:
        found = {mode: train_stream(make(settings, mode=mode, **sizes)) for mode in modes}
        losses, grads = compare(found)
        print(*losses)
        # Without this a parameter that a patch adds would change the random weights of a model, and
        # so its losses, unused.
        names = {name.split('.')[-1] for name in grads}
        learning = {name.split('.')[-1] for name, grad in grads.items() if grad.any()}
        assert learning == names, f'no gradient: {names - learning}'
        check_decoder(make(settings, **sizes))
    compare({mode: train_stream(make(settings, False, mode)) for mode in ('fast', 'compiled')})
    check_decoder(make(settings, False))
    losses, _ = train_stream(make(settings))
    for name in settings.keys() - SIZES.keys() - {'block_size'}:  # which this file sets
        others = {other: x for other, x in settings.items() if other != name}
        if train_stream(make(others))[0] == losses:
            print(f'{name} changes nothing')


def check_decoder(model):
    """Compare the decoder's logits with the model's, with and without compilation."""
    x = tokens(2, 11)
    with torch.no_grad():
        expected, _ = model(x, state=model.init_state(2))
    for compiling.fused.enabled in (False, True):
        decoder = Decoder(model, 2)
        for t in range(x.size(1)):
            decoder.step(x[:, t])
            torch.testing.assert_close(decoder.logits, expected[:, t], rtol=1e-8, atol=1e-9)


def two_chunks(settings):
    """Compare the loss and the gradients of the trainer's micro-batch, which the patch runs as two
    chunks, with those of one chunk."""
    unroll.TILE = 3
    x, y = tokens(2, 10), tokens(2, 10, seed=1)
    model = make(settings)
    loss, _ = model(x, y)
    found = {'one chunk': {'loss': loss.cross_entropy.detach(), **gradients(model, loss.objective)}}
    for mode in ('plain', 'recomputed'):
        set_mode(model, mode)
        model.zero_grad()
        total = torch.zeros_like(loss.cross_entropy)
        chunk = train_lm.make_chunk(model, 2, total, contextlib.nullcontext())
        chunk(x, y, tuple(model.init_state(2)))
        grads = {name: p.grad for name, p in model.named_parameters()}
        found[mode] = {'loss': total, **grads}
    compare(found)


def triton(settings):
    """Compare training with all Triton overrides enabled, in fp32, with the plain mode."""
    import kernels  # noqa: F401  registers the forms

    unroll.TILE, unroll.GROUP = 4, 3
    x, y = tokens(2, 5), tokens(2, 5, seed=1)
    found = {}
    for forms in (frozenset(), frozenset({'attention', 'experts', 'loss'})):
        model = make(settings, mode='fast').float()
        model.overrides = forms
        found[forms] = train(model, lambda _, model=model: model(x, y)[0].objective, 1)
    print(*compare(found, rtol=1e-3, atol=1e-4)[0])


def train_agent(settings, compiled=False, arch='convlstm'):
    """Train a small agent on a few random boards, to act less and to expect more reward."""
    obs = torch.stack([tokens(3, 2, 10, 10) % 2 * 3, tokens(3, 2, 10, 10, seed=1) % 3], -1)
    start = torch.tensor([[True, True], [False, True], [False, False]])
    sizes = {'arch': arch, 'n_layer': 2, 'n_expert': 3, 'n_embd': 8, 'head_dim': 16}
    torch.manual_seed(0)
    agent = build_agent(AgentConfig(**sizes, **settings)).double()
    compiling.fused.enabled = compiled

    def loss_of(i):
        logits, value, _ = agent(obs.to(torch.uint8), start, agent.init_state(2))
        return logits.square().mean() + (value - i).square().mean()

    return train(agent, loss_of)


def agents(settings):
    """Compare compiled agents with those that run eagerly."""
    for arch in ('convlstm', 'convglu'):
        found = {f'compiled = {x}': train_agent(settings, x, arch) for x in (False, True)}
        print(*compare(found)[0])


# ---- an edit, checked end to end ----

# A small model that learns the demo's text; each of these may be given again.
EDIT = """--n_layer=2 --n_expert=2 --n_embd=64 --n_head=2 --window=16 --block_size=16 --max_iters=12
    --tokens_per_step=512 --val_tokens=1024 --val_streams=8 --eval_interval=6 --warmup_iters=2
    --compile=False --threads=1 --device=cpu --dtype=float32""".split()
PROMPT = 'Fellow citizens of the Senate'


def call(script, *arguments):
    """Run a script of the edited project in this process, and return what it prints."""
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(script, run_name='__main__')
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()


def edit(arguments):
    """Check an edit of the language models as a user meets it, and then all modes."""
    with tempfile.TemporaryDirectory() as folder:
        data, run, again, export, text = (f'{folder}/{x}' for x in ('data', 'a', 'b', 'c', 'd'))
        Path(text).write_text(f'{PROMPT} and of the House of Representatives: ' * 4)
        data = [f'--data_dir={data}', '--tokenizer=bytes']
        call('data_fineweb.py', *data, '--demo=True')
        call('train_lm.py', *data, f'--out_dir={run}', *EDIT, *arguments)
        shutil.copytree(run, again)  # as if it had been stopped after update 6
        os.replace(f'{again}/prev.pt', f'{again}/last.pt')
        call('train_lm.py', f'--out_dir={again}', '--resume=True')
        log, resumed_log = (
            [
                (record['step'], record.get('train_loss'), record.get('val_loss'))
                for record in map(json.loads, Path(out, 'log.jsonl').read_text().splitlines())
            ]
            for out in (run, again)
        )
        (_, first, _), (step, last, validated) = log[1], log[-1]
        assert step == 12 and last < first, log
        print(f'trained 12 updates: loss {first:.4f} to {last:.4f}')
        saved, resumed = (torch.load(f'{x}/last.pt', weights_only=True) for x in (run, again))
        assert resumed_log == log, 'the log of the resumed run differs'
        torch.testing.assert_close(resumed['model'], saved['model'], rtol=0, atol=0)
        print('resumed after 6 updates: bit-equal')

        printed = call('train_lm.py', f'--out_dir={run}', '--eval_only=True')
        assert f'validation loss {validated:.4f} nats' in printed, printed
        print(f'validated: {validated:.4f}, as logged')

        options = ['--which=last', '--device=cpu', '--dtype=float32']
        call('sample.py', f'--out_dir={run}', f'--export={export}', '--which=last')
        score, of_export = (
            call('sample.py', f'--out_dir={x}', f'--score={text}', *options) for x in (run, export)
        )
        assert score == of_export, (score, of_export)
        print(f'scored and exported: {of_export.strip()}, in both')

        prompt = [f'--prompt={PROMPT}', '--max_new_tokens=9']
        assert call('sample.py', f'--out_dir={export}', *prompt, *options).startswith(PROMPT)
        print('sampled')
    changed = {argument.split('=')[0].lstrip('-') for argument in arguments}
    models({name: x for name, x in saved['entries']['model'].items() if name in changed})


GROUPS = {'models': models, 'agents': agents, 'triton': triton, 'two_chunks': two_chunks}


def main(arguments):
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 256
    # capture only: to generate code takes minutes
    compiling.compiled = functools.cache(
        lambda f: torch.compile(f, backend='eager', fullgraph=True, dynamic=False)
    )
    if arguments and arguments[0] in GROUPS:
        GROUPS[arguments[0]](ast.literal_eval(arguments[1]))
    else:
        edit(arguments)
    print('all modes agree')


if __name__ == '__main__':
    main(sys.argv[1:])
