"""Check an edit of the project in every mode: one to two minutes on two cores.

$ python check_edit.py                # or: make check-edit
$ python check_edit.py --z_loss=0.01  # settings of an edit, here of tests/hacks/e_z_loss.patch; or:
                                      # make check-edit ARGS=--z_loss=0.01
$ python check_edit.py --part=recurrent-lm --stage=evaluation  # while you mend it: seconds

There are four parts, each checked in a process of its own: language models and agents, recurrent
and non-recurrent. If the files that differ from git's HEAD are all of language models, or all of
agents, only those two parts are checked. The stages:

- training: a small random model trains in every mode and dtype. Losses, gradients and state must be
  those of the `plain` mode in float64, which computes the gradient of a weight for each token.
  `fast` defers these and reads the head in slices, `compiled` goes through torch.compile, and
  `recomputed` runs a chunk in segments. An agent runs `eager` or compiled. Gradients must reach
  every weight that is not frozen, and be the slope of the loss. make_chunk of train_lm.py must
  train as the model alone would, and a rollout of train_sokoban.py must give the outputs of an
  unroll. Gradients of a2c_loss must reach every weight, and that of the logits must agree with
  finite differences.
- evaluation: decoding and validation must give the logits and losses of one forward, and the steps
  of an agent those of an unroll.
- scripts: they train a small model for 12 updates, of which the last five must change every weight,
  resume it in a new process, evaluate, export and use it.

Each line says what was compared and how much it differs, relative to its size. A line that starts
with WRONG names a mode that disagrees, and the exit status is then 1. One that starts with NOTE
names what was not compared, or changes nothing. The last lines repeat these, and name settings that
are new since HEAD but were not given, and changed files that nothing here runs. What runs only with
other settings, as the router does, is checked if they are given: --aggregation=softmax_l2. All is
on the CPU and in one process: neither CUDA graphs, Triton kernels nor several ranks are checked.

All modes start from the same random state. Where an edit draws random numbers in training, as
dropout does, each dtype is compared with its own plain mode, because dtypes draw other numbers.
"""

import contextlib
import functools
import io
import itertools
import logging
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

from configurator import Script, configure
from support.script import UserError, first_line, run_script

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_file
import train_lm
import train_sokoban
import unroll
from decode import Decoder
from support import compiling
from support.code import modules_of
from support.files import read_json, read_tensors
from support.loader import find_shards, load_val
from support.random_states import randomize
from support.run_folder import (
    BEST,
    CONFIG,
    LAST,
    PREV,
    WEIGHTS,
    load_checkpoint,
    log_of,
    settings_of,
)
from support.stream import Stream

# -----------------------------------------------------------------------------
# fmt: off
everything = False     # check language models and agents, whatever the edit changes
part = ''              # check one part alone, such as 'recurrent-lm' or 'nonrecurrent-agent'
stage = ''             # check one stage alone: 'training', 'evaluation' or 'scripts'
detaches = False       # the edit stops gradients on purpose: they are not the slope of the loss
backend = 'aot_eager'  # of torch.compile: 'eager' captures, 'aot_eager' also differentiates, and
                       # 'inductor' generates code, as training does, which takes minutes
# fmt: on
# -----------------------------------------------------------------------------
PARTS = {  # trainer, recurrent
    'recurrent-lm': (train_lm, True),
    'nonrecurrent-lm': (train_lm, False),
    'recurrent-agent': (train_sokoban, True),
    'nonrecurrent-agent': (train_sokoban, False),
}
STAGES = ('training', 'evaluation', 'scripts')
RANGES = {
    'part': ['', *PARTS],
    'stage': ['', *STAGES],
    'backend': ['eager', 'aot_eager', 'inductor'],
}
ROOT = Path(__file__).resolve().parent
# The scripts of language models and of agents, the trainer first. Their files, and those that they
# import, are the files of a part.
SCRIPTS = {
    train_lm: ('train_lm.py', 'data_fineweb.py', 'sample.py'),
    train_sokoban: ('train_sokoban.py', 'play_sokoban.py'),
}
# Settings of what runs in all modes, and of what the scripts train; those of the edit replace them.
TINY = {
    train_lm: """--n_layer=2 --n_expert=3 --n_embd=24 --n_head=4 --n_kv_head=2 --window=3
        --block_size=22 --router_dim=5""".split(),
    train_sokoban: '--n_layer=2 --n_expert=3 --n_embd=8 --head_dim=16 --router_dim=5'.split(),
}
SMALL = {
    train_lm: """--n_layer=2 --n_expert=3 --n_embd=64 --n_head=2 --window=16 --block_size=16
        --tokens_per_step=512 --max_iters=12 --warmup_iters=2 --val_tokens=1024 --val_streams=8
        --eval_interval=7 --tokenizer=bytes --compile=False --threads=1 --device=cpu
        --dtype=float32""".split(),
    train_sokoban: """--n_layer=2 --n_expert=3 --n_embd=8 --head_dim=16 --split=generated
        --eval_split=generated --n_levels=50 --n_boxes=1 --max_moves=6 --time_limit=12 --n_envs=8
        --unroll=5 --total_steps=480 --eval_interval=7 --eval_games=16 --log_interval=1
        --compile=False --threads=1 --device=cpu --dtype=float32""".split(),
}
SLICES = model_file.LOGITS_PER_SLICE  # by device
VOCAB = 256  # of the language models that run in all modes: that of bytes
# What the scripts use, because training in all modes sets other values:
TILE = unroll.TILE
KEPT = unroll.MAX_KEPT_BYTES
SLICE = SLICES['cpu']
MODES = {  # config.mode, fused.enabled, unroll.MAX_KEPT_BYTES, SLICES['cpu']
    'plain': ('plain', False, KEPT, SLICE),
    'fast': ('fast', False, KEPT, 2400),  # a loss in five slices, the last of which is shorter
    'compiled': ('fast', True, KEPT, SLICE),
    'recomputed': ('fast', False, 0, SLICE),
    'compiled recomputed': ('fast', True, 0, SLICE),
}
NOTE = 'NOTE '  # main repeats the lines that start so
DETACHES = ' (--detaches, if the edit stops gradients on purpose)'
# What the logs and checkpoints of equal runs need not share.
TIMES = {'ms', 'tokens_per_s', 'env_steps_per_s', 'seconds', 'val_seconds', 'logged_seconds'}
TIMES |= {'config', 'metadata'}
TIME_OF_EDIT = re.compile('_(ms|s|seconds|time)$')  # names of times that an edit logs


class Precision(NamedTuple):
    """Dtypes of a run."""

    name: str
    weights: torch.dtype
    compute_dtype: torch.dtype  # of a Stream or Decoder; float32 = products are not autocast
    tolerance: float  # relative difference that rounding explains (compare)


FLOAT64 = Precision('float64', torch.float64, torch.float32, 1e-6)
FLOAT32 = Precision('float32', torch.float32, torch.float32, 5e-5)
BFLOAT16 = Precision('bfloat16', torch.float32, torch.bfloat16, 0.1)


# ---- what is printed ----

title = ''  # of what is being checked
wrong = []  # lines that start with WRONG
raised = set()  # errors whose traceback has been printed


def report(mode: str, text: str, agrees: bool = True) -> None:
    """Print a line about a mode."""
    line = f'{title}, {mode}: {text}'
    print(line if agrees else f'WRONG {line}', flush=True)
    if not agrees:
        wrong.append(line)


def note(mode: str, text: str) -> None:
    """Print a line about what is not checked, or changes nothing."""
    print(f'{NOTE}{title}, {mode}: {text}', flush=True)


@contextlib.contextmanager
def checking(mode: str) -> Iterator[None]:
    """Name the mode in which the edit raises an error, and continue after the with statement."""
    try:
        yield
    except UserError as error:
        report(mode, str(error), agrees=False)
    except Exception as error:  # noqa: BLE001  whatever an edit may raise
        report(mode, f'raises {first_line(error)}', agrees=False)
        if repr(error) not in raised:
            raised.add(repr(error))
            print(f'{title}: {traceback.format_exc()}', end='', flush=True)


# ---- comparisons ----


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference in a group of tensors, and the name of the tensor. The
    norm of a difference is divided by that of the expected tensor, but at least by a hundredth of
    the largest norm in the group, because small tensors may be zero but for rounding."""
    norms = {name: x.double().norm().item() for name, x in expected.items()}
    least = max(norms.values()) / 100 or 1.0
    worst = (-1.0, '')
    for name, x in expected.items():
        error = math.inf
        if found[name].shape == x.shape:
            error = (found[name].double() - x.double()).norm().item() / max(norms[name], least)
        worst = max(worst, (math.inf if math.isnan(error) else error, name))
    return worst


def compare(
    mode: str, what: str, found: dict, expected: dict, precision: Precision, hint: str = ''
) -> None:
    """Report how much the results of a mode differ from the expected ones. Both are groups of
    tensors by name, as in {'gradients': {'head': ...}}. hint: added if they differ too much."""
    texts, agrees = [], True
    for group, tensors in found.items():
        error, name = difference(tensors, expected[group])
        allowed = precision.tolerance
        if group in ('loss', 'losses'):  # a mean, in which the errors of tokens cancel
            allowed /= 10
        elif group == 'gradients' and precision is BFLOAT16:  # rounding may move a maximum
            allowed *= 3
        texts.append(f'{group} {error:.0e}')
        if error > allowed:
            suffix = f' in {name}' if name else ''
            texts[-1] = f'{group} {error:.1e}{suffix} (rounding explains {allowed:.0e})'
            agrees = False
    hint = '' if agrees else hint
    report(mode, f'{what}, differences: {", ".join(texts)}{hint}', agrees)


def seed() -> None:
    """Seed what an edit may draw."""
    torch.manual_seed(0)


def has_drawn() -> bool:
    """Return whether random numbers have been drawn since seed()."""
    return not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())


def compare_modes(
    what: str,
    modes: tuple[str, ...],
    run: Callable[[str, Precision], dict],
    may_draw: bool = False,
) -> dict:
    """Compare the results of run(mode, precision), which starts with seed(), in all modes and
    precisions with those of the first mode in float64, and return the latter. may_draw: whether
    the model is in training, where an edit may draw random numbers."""
    reference = expected = None
    is_random = False
    for precision, mode in itertools.product((FLOAT64, FLOAT32, BFLOAT16), modes):
        name = f'{mode} {precision.name}'
        with checking(name):
            found = run(mode, precision)
            if reference is None:
                reference = expected = found
                is_random = has_drawn()
                text = 'the reference'
                if is_random and not may_draw:
                    text = 'draws random numbers, although the model is in eval()'
                report(name, f'{what}: {text}', text == 'the reference')
            elif is_random and mode == modes[0]:
                expected = found
                report(name, f'{what}: the reference, because other dtypes draw other numbers')
            else:
                compare(name, what, found, expected, precision)
    return reference


def check_reach(mode: str, weights: dict[str, Tensor], grads: tuple[Tensor, ...]) -> None:
    """Check that gradients in float64 reach all weights. One that is zero but for rounding is about
    1e-16 of the others."""
    norms = [x.norm().item() for x in grads]
    unused = [name for name, x in zip(weights, norms, strict=True) if not x > 1e-12 * max(norms)]
    if unused:
        report(mode, f'none for {", ".join(unused)}', agrees=False)


def check_slope(
    mode: str,
    inputs: list[Tensor],
    grads: tuple[Tensor, ...],
    loss_of: Callable[[], Tensor],
    step: float = 1e-7,
    tolerance: float = 1e-6,
) -> None:
    """Compare the gradients of loss_of() with respect to some inputs with finite differences in a
    random direction, unless the edit stops gradients on purpose. If they differ, try another
    direction, because a kink, as of a ReLU, may lie on the way."""
    if detaches:
        return
    starts = [x.detach().clone() for x in inputs]
    for _ in range(2):
        direction = [torch.randn_like(x) for x in inputs]
        slope = sum((x * d).sum() for x, d in zip(grads, direction, strict=True))
        losses = []
        for shift in (step, -step):
            for x, start, d in zip(inputs, starts, direction, strict=True):
                x.data.copy_(start + shift * d)
            seed()
            losses.append(loss_of().detach().double())
        # Relative to the norm of the gradients, because the slope may be near zero.
        norm = torch.stack([x.norm() for x in grads]).norm()
        found = {'': torch.stack([(losses[0] - losses[1]) / (2 * step), norm])}
        expected = {'': torch.stack([slope, norm])}
        if difference(found, expected)[0] <= tolerance:
            break
    for x, start in zip(inputs, starts, strict=True):
        x.data.copy_(start)
    precision = FLOAT64._replace(tolerance=tolerance)
    found, expected = {'slopes': found}, {'slopes': expected}
    compare(mode, 'against finite differences', found, expected, precision, DETACHES)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model by name, without empty and frozen ones."""
    return {name: p for name, p in model.named_parameters() if p.numel() and p.requires_grad}


class NarrowFloats(TorchDispatchMode):
    """Record the smallest size, in bytes, of the floating-point numbers that are computed: 8 in
    float64, 4 after x.float() in an edit."""

    size = 8

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.size = min(self.size, x.element_size())
        return result


def check_gradients(model: nn.Module, loss_of: Callable[[], Tensor]) -> None:
    """Check the gradients of loss_of(), the loss of a model in float64."""
    weights = weights_of(model)
    seed()
    with NarrowFloats() as narrow:
        grads = torch.autograd.grad(loss_of(), list(weights.values()), materialize_grads=True)
    check_reach('gradients', weights, grads)
    if narrow.size < 4:
        note('gradients', 'not compared with slopes, which half precision in the edit rounds')
        return
    # A larger step where float32 rounds the loss.
    options = {'step': 1e-3, 'tolerance': 1e-3} if narrow.size < 8 else {}
    check_slope('gradients', list(weights.values()), grads, loss_of, **options)


# ---- language models in all modes ----


def make_lm(mode: str, precision: Precision) -> nn.Module:
    """Return a small random model with the settings of the edit."""
    model = randomize(train_lm.make_model(vars(train_lm), VOCAB))
    model.config.mode, compiling.fused.enabled, unroll.MAX_KEPT_BYTES, SLICES['cpu'] = MODES[mode]
    unroll.TILE = 9  # so that a chunk of TINY's block_size has three segments, two of odd length
    seed()
    return model.to(precision.weights)


def random_tokens(*shape: int) -> Tensor:
    """Return random tokens, always the same. Small ones are frequent, so that tokens repeat."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return (VOCAB * uniform**3).long()


def train(
    mode: str, precision: Precision, rows: int = 2, lr: float = 0.1, by_model: bool = False
) -> dict[str, dict]:
    """Train a model on two chunks of two streams, as train_lm.py does but by plain gradient
    descent. Return the losses, the gradients and the state after the last update. rows: of a
    micro-batch; by_model: without make_chunk of train_lm.py."""
    model, T, state = make_lm(mode, precision), train_lm.block_size, None
    options = {'compute_dtype': precision.compute_dtype, 'carries': model.recurrent}
    stream = Stream(model, 2, T, rows, **options)
    losses, grads = {}, {}
    for i, tokens in enumerate(random_tokens(2, 2, T + 1)):
        x, y = tokens[:, :-1], tokens[:, 1:]
        losses[f'loss {i + 1}'] = loss = torch.zeros_like(model.head[0, 0])
        if by_model:
            of_model, state = model(x, y, state and state.detach())
            of_model.objective.backward()
            loss += of_model.cross_entropy
        else:
            stream.run('train', train_lm.make_chunk(model, 2, loss, stream.autocast), x, y)
            state = stream.state
        for name, p in model.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads[f'{name}, chunk {i + 1}'] = grad
            p.data -= lr * grad
            p.grad = None
    buffers = dict(model.named_buffers())
    parts = {'state': state._asdict() if state else {}, 'buffers': buffers}
    return {'losses': losses, 'gradients': grads, **{name: x for name, x in parts.items() if x}}


def check_training() -> None:
    """Compare the modes of training, also in micro-batches, and check that every weight is
    trained."""
    modes = ('plain', 'fast', 'compiled')
    if train_lm.recurrent:
        modes += ('recomputed', 'compiled recomputed')
    what = f'2 chunks of {train_lm.block_size} tokens'
    reference = compare_modes(what, modes, train, may_draw=True)
    with checking('micro-batches'):
        found = train('fast', FLOAT64, rows=1)
        if has_drawn():
            note('micro-batches', 'not compared, because other rows draw other numbers')
        elif reference:
            compare('micro-batches', '1 row instead of 2', found, reference, FLOAT64)
    with checking('optimizers'):
        model = make_lm('fast', FLOAT32)
        groups = [group for x in train_lm.make_optimizers(model) for group in x.param_groups]
        trained = [id(p) for group in groups for p in group['params']]
        odd = [name for name, p in weights_of(model).items() if trained.count(id(p)) != 1]
        text = f'in none, or in several: {", ".join(odd)}' if odd else 'one for each weight'
        report('optimizers', text, not odd)
    with checking('gradients'):
        model, (x, y) = make_lm('plain', FLOAT64), random_tokens(2, 2, train_lm.block_size)
        check_gradients(model, lambda: model(x, y)[0].objective)
    with checking('make_chunk'):
        check_chunk()


def check_chunk() -> None:
    """Compare make_chunk of train_lm.py with the model, unless a chunk draws random numbers or cuts
    the sequences of a non-recurrent model."""
    # lr = 0, so that the second losses do not depend on the first gradients
    found = train('plain', FLOAT64, lr=0)
    drawn = torch.get_rng_state()
    expected = train('plain', FLOAT64, lr=0, by_model=True)
    if not torch.equal(drawn, torch.get_rng_state()):
        note('make_chunk', 'not compared, because it draws random numbers')
        return
    error, _ = difference(found['losses'], expected['losses'])
    if error > 1e-7 and not train_lm.recurrent:
        text = 'losses differ from those of the model by'
        note('make_chunk', f'{text} {error:.0e}: right only if it cuts the sequences')
        return
    if detaches:
        del found['gradients']
    hint = '' if detaches else DETACHES
    compare('make_chunk', 'as by the model alone', found, expected, FLOAT64, hint)


@torch.no_grad()
def decode(mode: str, precision: Precision) -> dict[str, dict]:
    """Return the logits of 24 tokens, by one forward, or by a decoder: from the start, after a
    prompt of odd length, and in a forward that continues from the decoder's state."""
    tokens = random_tokens(2, 24)
    model = make_lm('compiled' if mode == 'decoding compiled' else 'fast', precision).eval()
    state, logits = model.init_state(2), []
    decoder = Decoder(model, 2, precision.compute_dtype)
    for prompt in () if mode == 'forward' else (0, 7):
        decoder.prefill(tokens[:, :prompt])
        for token in tokens[:, prompt : prompt + 7].unbind(1):
            decoder.step(token)
            logits.append(decoder.logits.clone())
        state = decoder.state()
    with torch.autocast('cpu', torch.bfloat16, enabled=precision is BFLOAT16):
        rest, _ = model(tokens[:, len(logits) :], state=state)
    return {'logits': {f'token {t}': x for t, x in enumerate([*logits, *rest.unbind(1)])}}


@torch.no_grad()
def validate(mode: str, precision: Precision) -> dict[str, dict]:
    """Return the loss of three texts of 23 tokens: the cross-entropy of the logits of one forward,
    or that of validation, text by text, in batches, or in chunks."""
    x, y = random_tokens(2, 3, 23)
    model = make_lm('compiled' if mode == 'validation compiled' else 'fast', precision).eval()
    if mode == 'logits':
        with torch.autocast('cpu', torch.bfloat16, enabled=precision is BFLOAT16):
            logits, _ = model(x, None, model.init_state(3))
        return {'loss': {'': nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())}}
    if mode == 'text by text':
        rows, T = 1, 23
    elif mode == 'validation in chunks':
        rows, T = 2, 5
    else:
        rows, T = 3, 23
    options = {'may_shrink': True, 'compute_dtype': precision.compute_dtype}
    loss, n = Stream(model, rows, T, rows, **options).score(x, y)
    return {'loss': {'': loss / n}}


def forward(mode: str, precision: Precision) -> dict[str, dict]:
    """Return the loss of texts as short as the window, so that the non-recurrent model sees the
    same in training, without a state, as in validation, with one."""
    model = make_lm('fast', precision).eval()
    x, y = random_tokens(2, 3, min(layer.window for layer in model.layers))
    state = model.init_state(3) if mode == 'with a state' else None
    with torch.autocast('cpu', torch.bfloat16, enabled=precision is BFLOAT16):
        with torch.set_grad_enabled(state is None):
            loss, _ = model(x, y, state)
    return {'loss': {'': loss.cross_entropy.detach()}}


def check_lm() -> None:
    """Compare the modes of a language model, and check that every weight is trained."""
    if stage in ('', 'training'):
        check_training()
    if stage in ('', 'evaluation'):
        compare_modes('24 tokens', ('forward', 'decoding', 'decoding compiled'), decode)
        modes = ('text by text', 'validation', 'validation in chunks', 'validation compiled')
        compare_modes('3 texts of 23 tokens', ('logits', *modes), validate)
        compare_modes('3 short texts', ('with a state', 'as in training'), forward)


# ---- agents in all modes ----


def make_agent(precision: Precision) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a small random agent with the settings of the edit, random observations of two boards
    in five steps (5, 2, 10, 10, 2), of all values that its planes know, and where episodes start
    (5, 2)."""
    settings = {**vars(train_sokoban), 'dtype': 'float32'}
    if precision is BFLOAT16:
        settings['dtype'] = 'bfloat16'
    seed()
    agent = train_sokoban.make_agent(settings)
    for p in agent.parameters():  # what starts at zero hides other gradients
        p.data += 0.01 * torch.randn_like(p)
    agent.to(precision.weights)
    shape = (5, 2, *agent.config.board_size)
    channels = [
        torch.tensor([value for k, value in agent.config.planes if k == channel] or [0])
        for channel in range(1 + max(k for k, _ in agent.config.planes))
    ]
    obs = torch.stack([values[torch.randint(len(values), shape)] for values in channels], -1)
    start = torch.tensor([[1, 1], [0, 1], [0, 0], [1, 0], [0, 0]]) > 0
    seed()
    return agent, obs.to(torch.uint8), start


def agent_loss(agent: nn.Module, obs: Tensor, start: Tensor) -> Tensor:
    """Return the loss of an agent that is to act less and to expect more reward."""
    logits, value, _ = agent(obs, start, agent.init_state(2))
    return logits.square().mean() + (value - 1).square().mean()


def run_agent(mode: str, precision: Precision) -> dict[str, dict]:
    """Return the loss of an agent in an unroll, and its gradients."""
    agent, obs, start = make_agent(precision)
    compiling.fused.enabled = mode == 'compiled'
    loss = agent_loss(agent, obs, start)
    weights = weights_of(agent)
    grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    gradients = dict(zip(weights, grads, strict=True))
    return {'loss': {'': loss.detach()}, 'gradients': gradients}


@torch.no_grad()
def act(mode: str, precision: Precision) -> dict[str, dict]:
    """Return the logits and values of an agent by an unroll, or by its steps."""
    agent, obs, start = make_agent(precision)
    agent.eval()
    compiling.fused.enabled = mode == 'steps compiled'
    state = agent.init_state(2)
    if mode == 'unroll':
        logits, value, _ = agent(obs, start, state)
    else:
        w, steps = agent.prepare(), []
        for obs_t, start_t in zip(obs, start, strict=True):
            *outputs, state = agent.act(w, obs_t, start_t, state)
            steps.append(outputs)
        logits, value = map(torch.stack, zip(*steps, strict=True))
    return {'logits': {'': logits}, 'values': {'': value}}


def check_rollout() -> None:
    """Compare two rollouts of random actions with an unroll, and check that the gradients of
    a2c_loss on the second reach all weights, and that those of the logits are its slope. Those of
    the values are not: values also enter their own targets, through which no gradient flows."""
    agent, _, _ = make_agent(FLOAT64)
    weights = weights_of(agent)
    easy = dict(split='generated', eval_split='generated', n_levels=8, eval_games=8, n_boxes=1)
    (levels, _), _ = train_sokoban.load_level_sets({**vars(train_sokoban), **easy, 'max_moves': 6})
    boards = train_sokoban.SokobanEnv(levels, 8, time_limit=3)
    actions = torch.randint(4, (5, 8), generator=torch.Generator().manual_seed(0))
    state = agent.init_state(8)
    seen, batches = [], []

    def choose(_: Tensor, t: int) -> Tensor:
        seen.append((boards.observe(), boards.steps == 0))
        return actions[t]

    seed()
    for _ in range(2):
        batch, state = train_sokoban.rollout(agent, boards, state, choose, 5)
        batches.append(batch)
    if has_drawn():
        note('rollout', 'not compared with an unroll, which draws other numbers')
    else:
        logits, values = (torch.cat([x[name] for x in batches]) for name in ('logits', 'value'))
        found = {'logits': {'': logits}, 'values': {'': values, 'last': batches[0]['last']}}
        obs, start = map(torch.stack, zip(*seen, strict=True))
        logits, values, _ = agent(obs, start, agent.init_state(8))
        expected = {'logits': {'': logits}, 'values': {'': values, 'last': values[5]}}
        compare('rollout', 'as an unroll', found, expected, FLOAT64)
    if not hasattr(train_sokoban, 'a2c_loss'):
        note('rollout', 'gradients are not checked, because train_sokoban.py has no a2c_loss')
        return

    def loss_of() -> Tensor:
        return train_sokoban.a2c_loss(batch)[0]

    seed()
    logits = batch['logits']
    inputs = [*weights.values(), logits]
    *grads, of_logits = torch.autograd.grad(loss_of(), inputs, materialize_grads=True)
    check_reach('a2c_loss', weights, grads)
    # A larger step, because the loss is computed in float32.
    check_slope('a2c_loss', [logits], (of_logits,), loss_of, step=1e-2, tolerance=1e-2)


def check_one_expert() -> None:
    """Compare an agent of one expert, where s is h (Agent.s_is_h), with the same agent without that
    shortcut."""
    with mock.patch.object(train_sokoban, 'n_expert', 1):
        agent, _, _ = make_agent(FLOAT64)
        if agent.s_is_h:
            found = run_agent('eager', FLOAT64)
            with mock.patch.object(type(agent), 's_is_h', False):
                expected = run_agent('eager', FLOAT64)
            compare('one expert', 'an unroll of 5 steps', found, expected, FLOAT64)


def check_agent() -> None:
    """Compare the modes of an agent, and check that every weight is trained."""
    if stage in ('', 'training'):
        compare_modes('an unroll of 5 steps', ('eager', 'compiled'), run_agent, may_draw=True)
        with checking('gradients'):
            agent, obs, start = make_agent(FLOAT64)
            check_gradients(agent, lambda: agent_loss(agent, obs, start))
        with checking('rollout'):
            check_rollout()
        with checking('one expert'):
            try:
                check_one_expert()
            except UserError as error:  # settings of the edit may need several
                note('one expert', f'not checked: {error}')
    if stage in ('', 'evaluation'):
        compare_modes('5 steps', ('unroll', 'steps', 'steps compiled'), act)


# ---- the scripts ----


def run_here(script: str, *arguments: str) -> str:
    """Run a script in this process, and return what it prints. Raises UserError if it ends with an
    error that it explains."""
    sys.argv = [script, *arguments]
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(str(ROOT / script), run_name='__main__')
        except SystemExit as end:
            if end.code:
                text = errors.getvalue().strip() or printed.getvalue().strip()
                raise UserError(f'{script}: {text.splitlines()[-1]}') from None
    return printed.getvalue()


def run_in(folder: Path, script: str, *arguments: str) -> None:
    """Run a script of a folder in a new process. Raises UserError if it ends with an error that it
    explains, and RuntimeError if it ends with another one."""
    env = {**os.environ, 'PYTHONPATH': str(folder)}
    env.pop('PYTHONSAFEPATH', None)
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        error = UserError if done.returncode == 2 else RuntimeError
        raise error(f'{script}: {done.stderr.strip()}')


def losses_in(run: Path) -> str:
    """Return the first and the last losses in the log of a run."""
    texts = []
    for name in ('train_loss', 'loss', 'val_loss', 'eval_return'):
        values = [record[name] for record in log_of(run) if name in record]
        if values:
            # Twelve updates of a learned scale may move a loss by 1e-5.
            texts.append(f'{name} {values[0]:.6f} to {values[-1]:.6f}')
    return ', '.join(texts)


def losses_of_head(script: str, arguments: list[str], data: tuple[str, ...]) -> str:
    """Return the losses of a run by HEAD's files, or why they do not run. data: the command that
    prepares the shards, which HEAD runs if the edit changes it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = tarfile.open(fileobj=io.BytesIO(git('archive', 'HEAD')))
        files.extractall(folder, filter='data')
        try:
            if data and all_changed().intersection(modules_of(ROOT / data[0])):
                run_in(folder, *data, '--data_dir=data')
                arguments = [*arguments, '--data_dir=data']  # the last one counts
            run_in(folder, script, *arguments, f'--out_dir={folder}/run')
        except (UserError, RuntimeError, OSError) as error:
            return f'does not run ({str(error).splitlines()[-1]})'
        return losses_in(folder / 'run')


def unequal(a: object, b: object, name: str = '') -> list[str]:
    """Return the names of what differs in two logs, checkpoints or models, but for times."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = [x for x in {**a, **b} if x not in TIMES and not TIME_OF_EDIT.search(str(x))]
        return [x for key in names for x in unequal(a.get(key), b.get(key), f'{name} {key}')]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [x for i, pair in pairs for x in unequal(*pair, f'{name} {i}')]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if torch.equal(a, b) else [name]
    return [] if repr(a) == repr(b) else [name]


def report_unequal(mode: str, what: str, a: object, b: object) -> None:
    """Report whether two trees of tensors and plain types are bit-equal."""
    odd = unequal(a, b)
    report(mode, f'{what} differ in{",".join(odd[:4])}' if odd else f'{what} are equal', not odd)


def check_scripts(folder: Path, edit: list[str]) -> None:
    """Train a small model by its trainer; resume, evaluate, export and use it. folder: for what the
    scripts write."""
    compiling.fused.enabled, unroll.MAX_KEPT_BYTES, SLICES['cpu'] = MODES['plain'][1:]
    unroll.TILE = TILE
    trainer, recurrent = PARTS[part]
    script = SCRIPTS[trainer][0]
    run, resumed, export, other = (folder / x for x in ('run', 'resumed', 'export', 'other'))
    fixed = [*SMALL[trainer], f'--recurrent={recurrent}', f'--arch={trainer.arch}']
    data = ()
    if trainer is train_lm:
        fixed.insert(0, f'--data_dir={folder}/data')
        tokenizer = [x for x in [*fixed, *edit] if setting_of(x) == 'tokenizer'][-1]
        data = ('data_fineweb.py', '--demo=True', tokenizer)
        with checking('data'):
            run_here(*data, fixed[0])

    with checking('trained'):
        printed = run_here(script, *fixed, *edit, f'--out_dir={run}')
        for line in printed.splitlines():
            if line.startswith('parameters'):
                report('trained', line)
        losses, known = losses_in(run), [*fixed, *edit]
        if changed_files(trainer):
            known = [x for x in known if setting_of(x) in settings_of_head(script)]
            of_head = losses_of_head(script, known, data)
            report('trained', f'{losses}; HEAD: {of_head}')
            if losses == of_head and not edit:
                note('trained', 'as to its losses, the edit changes nothing')
        else:
            report('trained', losses)
    if not (run / PREV).exists():
        note('trained', f'resuming, exports and evaluations are not checked: there is no {PREV}')
        return
    with checking('trained'):
        before, after = (load_checkpoint(run / x)['model'] for x in (PREV, LAST))
        if trainer is train_lm:
            model = train_lm.make_model(vars(train_lm), VOCAB)
        else:
            model, _, _ = make_agent(FLOAT32)
        still = [name for name in weights_of(model) if torch.equal(after[name], before[name])]
        if still:
            report('trained', f'updates do not change {", ".join(still)}', agrees=False)

    with checking('resumed'):
        shutil.copytree(run, resumed)
        os.replace(resumed / PREV, resumed / LAST)  # as if it had been stopped half-way
        run_in(ROOT, script, f'--out_dir={resumed}', '--resume=True')
        results = [{'log': log_of(x), **load_checkpoint(x / LAST)} for x in (run, resumed)]
        report_unequal('resumed', 'half-way in a new process: the ends', *results)

    with checking('exported'):
        exporter = 'sample.py' if trainer is train_lm else 'play_sokoban.py'
        run_here(exporter, f'--out_dir={run}', '--which=last', f'--export={export}')
        saved, entries = load_checkpoint(run / LAST), read_json(export / CONFIG)
        entries = {name: entries.get(name) for name in saved['entries']}
        found = [entries, read_tensors(export / WEIGHTS)]
        expected = [saved['entries'], saved['model']]
        report_unequal('exported', 'settings and weights of run and export', found, expected)

    score = 'val_loss' if trainer is train_lm else 'eval_return'
    evaluated = {record['step']: record for record in log_of(run) if score in record}
    last, best = log_of(run)[-1], evaluated.get(settings_of(run / BEST).get('step'))
    uses = {  # command, and the line of the log that has the same evaluation
        f'evaluated {x.name}': ((script, f'--out_dir={x}', '--eval_only=True'), record)
        for x, record in ((run, last), (export, last), (run / BEST, best))
        if record  # of an edit that saves no best model there is none
    }
    if trainer is train_sokoban:
        levels = f'--n_levels={settings_of(run)["eval_games"]}'
        options = ('--which=last', '--device=cpu', '--measure=True', levels)
        uses['played'] = ('play_sokoban.py', f'--out_dir={export}', *options), last
    for mode, (command, record) in uses.items():
        with checking(mode):
            if trainer is train_lm:
                # --eval_only prints every validation loss of the log
                logged = [f' {x:.4f} ' for name, x in record.items() if name.endswith('val_loss')]
            else:
                logged = [f'return {record["eval_return"]:.2f},']
            printed = run_here(*command)
            missing = [x.strip() for x in logged if x not in printed]
            text = f'logged {" and ".join(missing)}, now: {printed.splitlines()[-1]}'
            report(mode, text if missing else 'as logged', not missing)
    if trainer is train_lm:
        use_lm(export, run)

    for argument in edit:
        if argument in fixed or setting_of(argument) in ('arch', 'recurrent'):
            continue
        others = [x for x in edit if x != argument]
        with checking('settings'):
            try:
                run_here(script, *fixed, *others, f'--out_dir={other}', '--overwrite=True')
            except UserError as error:
                report('settings', f'{argument} cannot be left out: {error}')
            else:
                if not unequal(log_of(run), log_of(other)):
                    note('settings', f'{argument} changes nothing')
                elif [*fixed, *others] == known:  # HEAD lacks this setting alone
                    is_same = losses_in(other) == of_head
                    losses = 'those of HEAD' if is_same else f'{losses_in(other)}; HEAD: {of_head}'
                    report('settings', f'without {argument}, the losses are {losses}')


@torch.no_grad()
def use_lm(export: Path, run: Path) -> None:
    """Load a language model from the export of a run, score a text, and sample."""
    with checking('loaded'):
        settings = settings_of(run)
        model_type = type(train_lm.make_model(vars(train_lm), VOCAB))  # as the trainer has it
        model = model_type.load_trained(export)
        shards = find_shards(settings['data_dir'], 'val')
        V = model.config.vocab_size
        x, y = load_val(shards, settings['val_tokens'], settings['val_streams'], V)
        precision = BFLOAT16 if settings['dtype'] == 'bfloat16' else FLOAT32
        with torch.autocast('cpu', torch.bfloat16, enabled=precision is BFLOAT16):
            loss, _ = model(x, y, model.init_state(len(x)))
        found, logged = loss.cross_entropy, torch.tensor(log_of(run)[-1]['val_loss'])
        losses = {'loss': {'': found}}, {'loss': {'': logged}}
        compare('loaded', 'validated, and as logged', *losses, precision)
    text = run.parent / 'text'
    text.write_text('Fellow citizens of the Senate and of the House. ' * 4)
    options = ('sample.py', '--device=cpu', '--dtype=float32', f'--out_dir={export}')
    with checking('scored'):
        report('scored', run_here(*options, f'--score={text}').rpartition(': ')[2].strip())
    if train_lm.arch == 'experts':  # an LSTM cannot be sampled
        with checking('sampled'):
            report('sampled', repr(run_here(*options, '--max_new_tokens=9')))


# ---- what is checked ----


def setting_of(argument: str) -> str:
    """Return the name of the setting in an argument."""
    return argument.removeprefix('--').partition('=')[0]


def git(*arguments: str) -> bytes:
    """Return what a git command prints about the project's folder."""
    # GIT_DIR and the like, of a hook for example, name another repository.
    env = {name: x for name, x in os.environ.items() if not name.startswith('GIT_')}
    command = ['git', '-C', str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, env=env).stdout


@functools.cache
def all_changed() -> set[Path]:
    """Return the files of the project that differ from HEAD, and new ones; none if git does not
    keep the project."""
    try:
        git('ls-files', '--error-unmatch', Path(__file__).name)
        names = git('diff', 'HEAD', '--name-only', '--relative', '-z')
        names += git('ls-files', '--others', '--exclude-standard', '-z')
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {ROOT / name for name in names.decode().split('\0')[:-1]}  # \0 ends each name


@functools.cache
def files_of(trainer: ModuleType) -> set[Path]:
    """Return the files of language models, or of agents, without those that only a GPU runs."""
    files = {path for script in SCRIPTS[trainer] for path in modules_of(ROOT / script)}
    return files - {ROOT / 'kernels.py', ROOT / 'overrides.py'}


def changed_files(trainer: ModuleType) -> set[Path]:
    """Return the files of language models, or of agents, that differ from HEAD."""
    return files_of(trainer) & all_changed()


@functools.cache
def settings_of_head(script: str) -> dict:
    """Return the settings of HEAD's script with their defaults, {} if it is not valid Python."""
    with tempfile.TemporaryDirectory() as folder:
        former = Path(folder) / script
        former.write_bytes(git('show', f'HEAD:./{script}'))
        try:
            return Script(former).defaults
        except SyntaxError:
            return {}


def choose_archs(trainer: ModuleType, recurrent: bool, edit: list[str]) -> list[str]:
    """Return the architectures that a part checks: that of the edit's settings, or all."""
    archs = [x.partition('=')[2] for x in edit if setting_of(x) == 'arch']
    if archs or trainer is train_sokoban:
        return archs[-1:] or ['convlstm', 'convglu']
    changed = changed_files(trainer)
    has_lstm = recurrent and (everything or not changed or ROOT / 'lstm.py' in changed)
    return ['experts', 'lstm'] if has_lstm else ['experts']


def check_part(edit: list[str]) -> int:
    """Check one part. Return 1 if a mode disagrees, 2 if the settings are refused, else 0."""
    global title
    trainer, recurrent = PARTS[part]
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # torch.compile logs the errors that it raises, too
    torch._dynamo.config.recompile_limit = 256  # as in compiling.compiled
    torch._dynamo.config.accumulated_recompile_limit = 4096
    # Code that inductor generates draws what an eager function draws.
    options = {'fallback_random': True} if backend == 'inductor' else None
    compiling.compiled = functools.cache(
        functools.partial(torch.compile, backend=backend, options=options, dynamic=False)
    )
    known = Script(trainer.__file__).defaults
    edit = [x for x in edit if setting_of(x) in known]
    is_checked = False
    archs = choose_archs(trainer, recurrent, edit)
    if trainer is train_lm and recurrent and archs == ['experts']:
        print(f'{NOTE}{part}: the LSTM is not checked, --arch=lstm does that')
    for arch in archs:
        title = part if arch == 'experts' else f'{part} {arch}'
        arguments = [*TINY[trainer], f'--recurrent={recurrent}', f'--arch={arch}', *edit]
        try:
            configure(vars(trainer), arguments, quiet=True)
            if arch == 'lstm' and not recurrent:
                raise UserError('an LSTM is recurrent')
            if trainer is train_sokoban:
                run_agent('eager', FLOAT64)
            elif arch == 'lstm':
                make_lm('plain', FLOAT64)
            else:
                train('plain', FLOAT64)
        except UserError as error:
            if edit:
                note('not checked', str(error))
            else:
                report('default settings', f'refused at small sizes: {error}', agrees=False)
            continue
        except Exception:  # noqa: BLE001  every mode will raise it, and be named
            pass
        if arch == 'lstm' and stage not in ('', 'scripts'):
            note('not checked', 'an LSTM has no modes, only --stage=scripts')
            continue
        is_checked = True
        if trainer is train_sokoban:
            check_agent()
        elif arch == 'experts':  # an LSTM has no modes
            check_lm()
        if stage in ('', 'scripts'):
            with tempfile.TemporaryDirectory() as folder:
                check_scripts(Path(folder), edit)
    if is_checked:
        print(f'{part}: {"modes disagree" if wrong else "all modes agree"}', flush=True)
    return 1 if wrong else 0 if is_checked else 2


def join_values(arguments: list[str]) -> list[str]:
    """Return the arguments with every `--name value` as --name=value, and every other `--name` as
    --name=True. Raises UserError for what is no setting."""
    joined = []
    for argument in arguments:
        if argument.startswith('--'):
            joined.append(argument)
        elif joined and '=' not in joined[-1]:
            joined[-1] += f'={argument}'
        else:
            raise UserError(f'command line: {argument!r}: expected --name=value')
    return [x if '=' in x or x == '--help' else f'{x}=True' for x in joined]


def check_settings(edit: list[str], trainers: list[ModuleType]) -> None:
    """Raise UserError for a setting that no trainer has, or whose value none takes."""
    scripts = [Script(trainer.__file__, trainer.RANGES) for trainer in trainers]
    for argument in edit:
        name, errors = setting_of(argument), []
        known = [script for script in scripts if name in script.defaults] or scripts[:1]
        for script in known:
            try:
                script.read_argument(argument, [])
            except UserError as error:
                errors.append(error)
        if len(errors) == len(known):
            raise errors[0]


def main() -> int:
    """Check what the edit changes, each part in a process of its own. Return the exit status: 0 =
    all modes agree, 1 = some disagree, 2 = the settings are refused."""
    options = Script(__file__).defaults
    arguments = join_values(sys.argv[1:])
    configure(globals(), [x for x in arguments if setting_of(x) in {*options, 'help'}], quiet=True)
    edit = [x for x in arguments if setting_of(x) not in options]
    trainers = list(SCRIPTS)
    if not part:
        trainers = [x for x in SCRIPTS if everything or changed_files(x)] or trainers
    check_settings(edit, trainers)
    if part:
        return check_part(edit)
    parts = []
    for name, (trainer, recurrent) in PARTS.items():
        if trainer not in trainers:
            print(f'{name}: not checked, no file of it has changed (--everything=True checks it)')
        elif f'--recurrent={not recurrent}' not in edit:
            parts.append(name)

    notes = []

    def run(name: str) -> int:
        command = [sys.executable, __file__, *arguments, f'--part={name}']
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
        with subprocess.Popen(command, **pipes) as child:
            for line in child.stdout:
                print(line, end='', flush=True)
                if line.startswith(NOTE):
                    notes.append(line.removeprefix(NOTE).strip())
        return child.returncode

    print(f'checking {", ".join(parts)}: a minute or two', flush=True)
    with ThreadPoolExecutor(2) as pool:
        statuses = dict(zip(parts, pool.map(run, parts), strict=True))
    failed = [name for name, status in statuses.items() if status not in (0, 2)]
    if failed:
        print(f'WRONG: modes disagree in {", ".join(failed)}')
        return 1
    if 0 not in statuses.values():
        return 2
    for trainer in filter(changed_files, trainers):
        former = settings_of_head(SCRIPTS[trainer][0])
        in_edit = {*map(setting_of, edit)}
        for name in Script(trainer.__file__).defaults if former else ():
            if name not in former and name not in in_edit:
                notes.append(f'{name} is new, but was not given: try another value, --{name}=...')
    for path in sorted(all_changed().difference(*map(files_of, SCRIPTS))):
        name = path.relative_to(ROOT)
        if path.suffix == '.py' and 'tests' not in name.parts:
            notes.append(f'{name} has changed, and nothing here runs it')
    if not all_changed():
        notes.append('git knows of no change: settings are checked only if they are given')
    if notes:
        print('all modes agree, but this was not checked:')
        print(*notes, sep='\n')
    else:
        print('all modes agree')
    return 0


if __name__ == '__main__':
    run_script(main)
