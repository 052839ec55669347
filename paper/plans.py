"""The paper's experiments: a plan is a list of runs, and a run is the settings of a trainer.

Budgets (Section 4): within a budget W, every allocation of L layers, E experts per layer and width
d has E = round(W / (L C(d))), where C(d) is the cost of one expert; those with E = 0 are left out.

A plan of your own is a file paper/studies/study_NAME.py, and nothing else has to be edited. This
is the whole of study_weight_decay.py, six runs:

    from paper.plans import Plan, grid

    PLAN = Plan(
        'Weight decay of Muon',
        grid('train_lm.py', 'config/small_L2.py', weight_decay=[0, 0.01, 0.1], seed=[1, 2]),
    )

    python -m paper.sweep study-weight-decay --run
    python -m paper.figures out/study-weight-decay

A list is an axis: its values distinguish the runs and name their folders. Any other value is the
same in all runs. If the learning rate is an axis, the runs with the lowest seed choose it: figures
show the other seeds at the value that is best with that seed.
"""

import functools
import importlib
import itertools
import math
import pathlib
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

from configurator import Mistake, Script, first_line

import torch

from baselines import build_lstm
from convlstm import AGGREGATIONS, AgentConfig, build_agent
from data_fineweb import VOCAB
from model import RESIDUALS, ModelConfig, build_model

ROOT = pathlib.Path(__file__).resolve().parent.parent
STUDIES = ROOT / 'paper' / 'studies'
TRAINERS = ('train_lm.py', 'train_sokoban.py')

# ---- runs ----


class Run(NamedTuple):
    """A run: a trainer, its config files and further settings. Paths start in the project's root,
    unless they are absolute."""

    script: str
    config: tuple[str, ...]
    axes: dict  # settings that distinguish the runs of a plan, and name their folders
    fixed: dict  # settings that are the same in all runs
    W: float = 0.0  # the budget, in the unit of Cost.layers; 0 = none
    plan: str = ''  # the plan to which the folder belongs; '' = the one that lists the run

    @property
    def folder(self) -> pathlib.Path:
        """Return the folder of the run, below the folder of all runs."""
        parts = [f'{name}-{value}' for name, value in self.axes.items()]
        if self.script not in TRAINERS:
            parts.append(f'script-{pathlib.Path(self.script).stem}')
        return pathlib.Path(self.plan, '_'.join(parts).replace('/', '-'))


def times(runs: list[Run], **axes: list) -> list[Run]:
    """Return each run with all combinations of the values of further axes."""
    for name, values in axes.items():
        runs = [run._replace(axes={**run.axes, name: x}) for run in runs for x in values]
    return runs


def grid(script: str, *config: str, cells: list[dict] | None = None, **settings) -> list[Run]:
    """Return the runs with all combinations of the settings that are lists; the other settings are
    the same in all runs. cells: axes that change together, such as n_layer and n_expert."""
    axes = {name: x for name, x in settings.items() if isinstance(x, list)}
    fixed = {name: x for name, x in settings.items() if name not in axes}
    return times([Run(script, config, cell, fixed) for cell in cells or [{}]], **axes)


def equal_work(n: int, depths: list[int]) -> list[dict]:
    """Return cells of n experts, distributed over different numbers of layers."""
    return [{'n_layer': L, 'n_expert': n // L} for L in depths]


@functools.cache
def script_of(path: str) -> Script:
    """Return the settings of a trainer."""
    return Script(ROOT / path)


@functools.cache
def base_settings(script: str, config: tuple[str, ...]) -> dict:
    """Return the settings that a trainer has by default and by config files."""
    found = dict(script_of(script).defaults)
    for path in config:
        found |= script_of(script).read_config(ROOT / path)
    return found


def full_settings(run: Run) -> dict:
    """Return all settings of a run."""
    return {**base_settings(run.script, run.config), **run.fixed, **run.axes}


def has_effect(run: Run, name: str) -> bool:
    """Return whether a setting can change the results of a run: the residual rule cannot if there
    is one expert, or no residual."""
    s = full_settings(run)
    has_residual = s['arch'] == 'convglu' or (s['arch'] == 'experts' and not s['recurrent'])
    return name != 'residual' or (s['n_expert'] > 1 and has_residual)


def vary(runs: list[Run], name: str, texts: list[str], in_name: bool = True) -> list[Run]:
    """Return the runs with each value of a setting, as texts of a command line; an axis of this
    name is replaced. A run that has the value already, or whose results do not depend on it, keeps
    its folder, so that it is not trained again. in_name: whether the value is part of the name."""
    if not any(name in script_of(run.script).defaults for run in runs):
        script_of(runs[0].script).check(name, '', 'command line')  # raises Mistake, with a hint
    found = {}
    for text, run in itertools.product(texts, runs):
        if name in script_of(run.script).defaults:
            value = script_of(run.script).read_argument(f'--{name}={text}', [])[name]
            if not in_name:
                run = run._replace(fixed={**run.fixed, name: value})
            elif name in run.axes or (has_effect(run, name) and full_settings(run)[name] != value):
                run = run._replace(axes={**run.axes, name: value})
        found.setdefault(run.folder, run)
    return list(found.values())


# ---- costs ----


class Cost(NamedTuple):
    """The cost of a run."""

    layers: float  # forward FLOPs per token, or multiply-adds per step of one board
    training: float  # FLOPs of all updates, with a backward of two forwards


@functools.cache
def agent_macs(sizes: tuple) -> float:
    """Return the paper's cost of an agent's layers in multiply-adds per step."""
    with torch.device('meta'):
        return float(build_agent(AgentConfig(**dict(sizes))).nominal_macs())


@functools.cache
def lm_flops(arch: str, recurrent: bool, sizes: tuple) -> dict[str, float]:
    """Return the forward FLOPs per token of a language model's core and head."""
    config = ModelConfig(**dict(sizes))
    with torch.device('meta'):
        model = build_model if arch == 'experts' else build_lstm
        return model(config, recurrent).flops_per_token()


def updates(s: dict) -> int:
    """Return the number of updates of a run with these settings."""
    is_agent = 'n_envs' in s
    return math.ceil(s['total_steps'] / (s['n_envs'] * s['unroll'])) if is_agent else s['max_iters']


def cost(run: Run) -> Cost:
    """Return the cost of a run. Raises Mistake if its sizes do not fit together."""
    s = full_settings(run)
    is_agent = 'n_envs' in s
    names = {f.name for f in fields(AgentConfig if is_agent else ModelConfig)} & s.keys()
    sizes = tuple((name, s[name]) for name in sorted(names - {'mode', 'dtype'}))
    if is_agent:
        macs = agent_macs(sizes)
        return Cost(macs, 3 * 2 * macs * updates(s) * s['n_envs'] * s['unroll'])
    sizes += (('vocab_size', VOCAB[s['tokenizer']]),)
    flops = lm_flops(s['arch'], s['recurrent'], sizes)
    return Cost(flops['core'], 3 * sum(flops.values()) * updates(s) * s['tokens_per_step'])


# ---- the paper's runs ----

AGENTS = ['convlstm', 'convglu']
KINDS = [True, False]  # recurrent or not
DEPTHS = [1, 2, 4, 8, 16]
# Budgets of agents: W as a number of experts of the first width, and the widths.
AGENT_BUDGETS = {
    'small': (1, [128, 64, 32]),
    'medium': (1, [256, 128, 64, 32]),
    'large': (1, [1024, 512, 256, 128, 64]),
    'eight': (8, [64]),  # ours: the same cost at L = 1, 2, 4 and 8, with no rounding of E
}
# Budgets of language models: W as a number of experts of width 768, and the depths.
LM_BUDGETS = {'small': (16, DEPTHS), 'small_long': (16, DEPTHS), 'medium': (32, [*DEPTHS, 32])}
MOST_COST = 1.5  # language models above 1.5 W are left out (E is rounded, so that some exceed W)


def agent(arch: str, recurrent: bool, L: int, E: int, d: int) -> Run:
    """Return an agent's run. The defaults of its trainer are the paper's settings."""
    sizes = {'arch': arch, 'recurrent': recurrent, 'n_layer': L, 'n_expert': E, 'n_embd': d}
    return Run('train_sokoban.py', (), sizes, {})


def lm(budget: str, recurrent: bool, L: int, E: int, d: int) -> Run:
    """Return a language model's run, with the window and the chunks of its budget."""
    sizes = {'recurrent': recurrent, 'n_layer': L, 'n_expert': E, 'n_embd': d}
    kind = '' if recurrent else '_nonrecurrent'
    return Run('train_lm.py', (f'config/{budget}{kind}_L2.py',), sizes, {})


def allocations(
    run_of: Callable, n: int, width: int, depths: list, widths: list, most: float = math.inf
) -> list[Run]:
    """Return the allocations, of at most `most` W, of the budget W of n experts of a width.
    run_of(recurrent, L, E, d): the run of an allocation."""
    runs = []
    for recurrent in KINDS:
        W = n * cost(run_of(recurrent, 1, 1, width)).layers
        for L, d in itertools.product(depths, widths):
            expert = cost(run_of(recurrent, 1, 1, d)).layers
            E = round(W / (L * expert))
            if 0 < L * E * expert <= most * W:
                runs.append(run_of(recurrent, L, E, d)._replace(W=W))
    return runs


def sokoban(budget: str, archs: list[str] = AGENTS) -> list[Run]:
    """Return the agents of a budget."""
    n, widths = AGENT_BUDGETS[budget]
    runs = []
    for arch in archs:
        runs += allocations(functools.partial(agent, arch), n, widths[0], DEPTHS, widths)
    return times(runs, seed=[1, 2, 3])


def fineweb(budget: str) -> list[Run]:
    """Return the language models of a budget."""
    n, depths = LM_BUDGETS[budget]
    run_of = functools.partial(lm, budget)
    return times(allocations(run_of, n, 768, depths, [1536, 768, 384], MOST_COST), seed=[1])


def scaling(depths: list[int], experts: list[int], seeds: list[int]) -> list[Run]:
    """Return runs whose cost grows with L and E; language models have one seed."""
    cells = list(itertools.product(KINDS, depths, experts))
    runs = times([agent(arch, *cell, 64) for arch in AGENTS for cell in cells], seed=seeds)
    return runs + times([lm('small', *cell, 384) for cell in cells], seed=[1])


def ablation(agents: list[Run], lms: list[Run], **values: list) -> list[Run]:
    """Return runs that differ in one setting: agents with three seeds, language models with one."""
    return times(times(agents, seed=[1, 2, 3]) + times(lms, seed=[1]), **values)


def sixteen(depths: list[int], recurrent: bool = True) -> list[Run]:
    """Return language models of 16 experts of width 768."""
    return [lm('small', recurrent, L, 16 // L, 768) for L in depths]


def union(*names: str) -> list[Run]:
    """Return the runs of several plans, which keep their folders."""
    return [run for name in names for run in runs_of(name)]


# ---- plans ----


class Plan(NamedTuple):
    """A figure or table, the runs that it needs, and the command that makes it of them."""

    title: str
    runs: list[Run] | Callable[[], list[Run]]  # a function where costs decide which runs there are
    draw: str = ''  # '' = paper.figures with the folders of the runs


SOKOBAN = ('sokoban-small', 'sokoban-medium', 'sokoban-large')
# The agents that the paper probes.
PROBED = {'arch': 'convlstm', 'recurrent': True, 'n_embd': 256}
PROBED_FOLDERS = 'out/sokoban-large/arch-convlstm_recurrent-True_n_layer-[1248]_*_n_embd-256_*'
# The rules can be compared where there are several experts. With L = 16 and E = 4, 'expert' scales
# the residual stream most, by sqrt(4)^16.
RESIDUAL_LMS = [*sixteen([2, 4, 8], recurrent=False), lm('small', False, 16, 4, 384)]
RESIDUAL_AGENTS = [agent('convglu', r, L, 2, d) for L, d in ((2, 128), (8, 32)) for r in KINDS]

PLANS = {
    'sokoban-small': Plan('Sokoban, small budget', lambda: sokoban('small')),
    'sokoban-medium': Plan('Sokoban, medium budget', lambda: sokoban('medium')),
    'sokoban-large': Plan('Sokoban, large budget', lambda: sokoban('large', ['convlstm'])),
    'sokoban': Plan('Sokoban: saturation, solve rates', lambda: union(*SOKOBAN)),
    'probes': Plan(
        'Planning probes',
        lambda: [
            run
            for run in runs_of('sokoban-large')
            if PROBED.items() <= run.axes.items() and run.axes['n_layer'] <= 8
        ],
        f'python -m paper.probe config/probe_large.py {PROBED_FOLDERS}',
    ),
    'lm-small': Plan('FineWeb, small budget', lambda: fineweb('small')),
    'lm-small-long': Plan('FineWeb, small budget, long context', lambda: fineweb('small_long')),
    'lm-medium': Plan('FineWeb, medium budget', lambda: fineweb('medium')),
    'lm': Plan('FineWeb: saturation', lambda: union('lm-small', 'lm-medium')),
    'scaling': Plan(
        'Scaling the number of experts',
        lambda: scaling([1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 64], [1, 2, 3]),
    ),
    'scaling-reduced': Plan(
        'Scaling the number of experts: a part of the runs',
        lambda: [run._replace(plan='scaling') for run in scaling([1, 2, 4], [1, 4, 16], [1])],
    ),
    'aggregation': Plan(
        'Aggregation of experts',
        ablation(
            [agent('convlstm', True, 1, 4, 128)], sixteen([2]), aggregation=list(AGGREGATIONS)
        ),
    ),
    'communication': Plan(
        'Communication radius',
        ablation([agent('convlstm', True, 2, 8, 32)], [], radius=list(range(8))),
    ),
    'share-kv': Plan(
        'Sharing keys and values', ablation([], sixteen([1, 2, 4]), share_kv=[True, False])
    ),
    'latency': Plan('Latency per token', [], 'python bench.py --suite=decode'),
    'throughput': Plan(
        'Training throughput on four GPUs',
        [],
        'torchrun --standalone --nproc_per_node=4 bench.py --suite=train',
    ),
    'residual': Plan(
        'Ours: residual rule',
        ablation(RESIDUAL_AGENTS, RESIDUAL_LMS, residual=list(RESIDUALS)),
    ),
    'lm-small-shared': Plan(
        'Ours: FineWeb, small budget, shared residual',
        lambda: vary(runs_of('lm-small'), 'residual', ['shared']),
    ),
    'init-b': Plan(
        'Ours: initial b', ablation([], sixteen([1, 2]), init_b=['one', 'sqrt_experts'])
    ),
    'sokoban-eight': Plan('Ours: agents, eight experts at every depth', lambda: sokoban('eight')),
}


def names_of_plans() -> list[str]:
    """Return the names of all plans: those above, and one for each file study_NAME.py."""
    studies = [*sorted(STUDIES.glob('study_*.py')), STUDIES / 'depth.py']
    return [*PLANS, *(path.stem.replace('_', '-') for path in studies)]


def find_plan(name: str) -> Plan:
    """Return a plan. Raises Mistake if there is none with this name."""
    if name not in names_of_plans():
        raise Mistake(f'{name!r} is no plan: choose one of {", ".join(names_of_plans())}')
    if name in PLANS:
        return PLANS[name]
    module = f'paper.studies.{name.replace("-", "_")}'
    try:
        return importlib.import_module(module).PLAN
    except (ImportError, AttributeError) as error:
        raise Mistake(f'{module}: holds no PLAN: {first_line(error)}') from None


def runs_of(name: str) -> list[Run]:
    """Return the runs of a plan, with checked settings: all with the first seed, then all with the
    second, and so on. Raises Mistake for settings that a trainer does not have."""
    runs = find_plan(name).runs
    found = {}
    for run in runs() if callable(runs) else runs:
        script, source = script_of(run.script), f'plan {name}'
        run = run._replace(
            axes={k: script.check(k, x, source) for k, x in run.axes.items()},
            fixed={k: script.check(k, x, source) for k, x in run.fixed.items()},
            plan=run.plan or name,
        )
        if run.folder in found:
            raise Mistake(
                f'{source}: two runs have the folder {run.folder}: give them another axis'
            )
        found[run.folder] = run
    return sorted(found.values(), key=lambda run: run.axes.get('seed', 0))
