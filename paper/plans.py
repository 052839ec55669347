"""The paper's experiments: a plan is a list of runs, and a run is the settings of a trainer.

Budgets (Section 4): within a budget W, every allocation of L layers, E experts per layer and width
d has E = round(W / (L C(d))), where C(d) is the cost of one expert; those with E = 0 are left out.

A plan of your own is a file in paper/studies/, and nothing else has to be edited. This is the whole
of paper/studies/decay.py, three values of a setting and three seeds of a tiny model:

    from paper.plans import Plan, grid

    PLAN = Plan(
        'Weight decay of Muon',
        grid(
            'train_lm.py',
            'config/tiny_lm.py',
            weight_decay=[0, 0.01, 0.1],
            seed=[1, 2, 3],
            max_iters=20,
            tokens_per_step=2048,
            val_tokens=16384,
            compile=False,
        ),
    )

    python data_fineweb.py --demo=True --tokenizer=bytes    # the text of config/tiny_lm.py
    python -m paper.sweep decay                             # list the nine runs
    python -m paper.sweep decay --run --workers=2           # half a minute each on one core
    python -m paper.figures out/decay

A list is an axis: its values distinguish the runs and name their folders. Any other value is the
same in all runs. A learning rate may be an axis, too. Beside other axes it is tuned: figures show
each model at its best rate, which the lowest seed chooses; the mean is that of the other seeds.
"""

import functools
import hashlib
import importlib
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import NamedTuple

from configurator import Script
from support.script import UserError, first_line

import torch

from convlstm import AgentConfig, build_agent
from lstm import build_lstm
from model import RESIDUALS, ModelConfig, build_model
from support.run_folder import log_of, settings_of
from tokenizer import VOCAB

ROOT = pathlib.Path(__file__).resolve().parent.parent
STUDIES = ROOT / 'paper' / 'studies'
AGGREGATIONS = ['sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2']  # of the paper
SIZES = ('n_layer', 'n_expert', 'n_embd')
LONGEST_NAME = 200  # bytes of a folder's name, of which most file systems allow 255

# ---- runs ----


class Run(NamedTuple):
    """A run: a trainer, its config files and further settings. Paths start in the project's root,
    unless they are absolute."""

    script: str
    config: tuple[str, ...]
    axes: dict  # settings that distinguish the runs of a plan, and name their folders
    fixed: dict  # settings that are the same in all runs
    W: float = 0.0  # the budget, in the unit of Cost.layers; 0 = none
    plan: str = ''  # the folder that holds the run's; '' = that of the plan that lists the run

    @property
    def folder(self) -> pathlib.Path:
        """Return the folder of the run, below the folder of all runs."""
        name = '_'.join(f'{name}-{value}' for name, value in self.axes.items())
        return pathlib.Path(folder_name(self.plan), folder_name(name))


def folder_name(text: str) -> str:
    """Return a text as the name of a folder. Where it is too long, or holds a slash, it is changed
    and ends with a checksum of the text, so that no two texts have one name."""
    name = text.replace('/', '-').encode(errors='surrogateescape')[:LONGEST_NAME]
    name = name.decode(errors='ignore')
    if name == text:
        return name
    return f'{name}-{hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]}'


class Plan(NamedTuple):
    """A figure or table, the runs that it needs, and the command that makes it of them, in which
    {folders} stands for the folders of these runs and {root} for that of the project."""

    title: str
    runs: list[Run] | Callable[[], list[Run]]  # a function where costs decide which runs there are
    draw: str = 'python -m paper.figures {folders}'


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
    """Return the settings of a trainer. Raises UserError if it is no Python."""
    try:
        return Script(ROOT / path)
    except UserError:
        raise
    except (SyntaxError, ValueError) as error:
        raise UserError(f'{path}: {first_line(error)}') from None


def full_settings(run: Run) -> dict:
    """Return all settings of a run."""
    script = script_of(run.script)
    found = dict(script.defaults)
    for path in run.config:
        found |= script.read_config(ROOT / path)
    return found | run.fixed | run.axes


def vary(runs: list[Run], name: str, texts: list[str], is_axis: bool = True) -> list[Run]:
    """Return the runs with each value of a setting, as texts of a command line. Other values of an
    axis lie beside the plan's; any other setting leads to a folder PLAN-NAME, and so does a size,
    because the allocations of a plan cost the same. Raises UserError if no trainer has the setting.

    is_axis: whether the setting distinguishes runs; if not, it changes no folder."""
    if not any(name in script_of(run.script).defaults for run in runs):
        script_of(runs[0].script).check(name, '', 'command line')  # raises UserError, with a hint
    found = {}
    for text, run in itertools.product(texts, runs):
        script = script_of(run.script)
        if name in script.defaults:
            setting = script.read_argument(f'--{name}={text}', [])
            if name in run.axes and name not in SIZES:
                run = run._replace(axes=run.axes | setting)
            elif is_axis:
                run = run._replace(axes=run.axes | setting, plan=f'{run.plan}-{name}')
            else:
                run = run._replace(fixed=run.fixed | setting)
        if found.setdefault(run.folder, run) != run:
            raise UserError(f'--{name}: two runs have the folder {run.folder}')
    return list(found.values())


# ---- folders of runs ----


def runs_inside(
    folder: pathlib.Path, above: frozenset = frozenset(), is_linked: bool = False
) -> Iterator[tuple[bool, pathlib.Path]]:
    """Yield the folders of runs in a folder, behind symbolic links too, each with whether a link
    leads to it. Print links that lead nowhere."""
    real = folder.resolve()
    if real in above:  # a link to a folder that holds it
        return
    if is_run := (folder / 'log.jsonl').exists():
        yield is_linked, folder
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir():
            yield from runs_inside(
                path, above | {real, *real.parents}, is_linked or path.is_symlink()
            )
        elif path.is_symlink() and not path.exists() and not is_run:
            print(f'left out: {path}: a link to nothing')


def find_runs(folders: str | os.PathLike | Iterable) -> list[pathlib.Path]:
    """Return the folders of all runs in these folders, each once. Raises UserError for one without
    a run."""
    found = {}
    for folder in [folders] if isinstance(folders, str | os.PathLike) else folders:
        if folder == '':
            raise UserError('the name of a folder is empty: name a folder of runs')
        # links are last, and replace the others
        inside = sorted(runs_inside(pathlib.Path(folder).expanduser()))
        if not inside:
            raise UserError(f'{folder}: holds no run, a folder with config.json and log.jsonl')
        for _, path in inside:
            if str(path).encode(errors='replace').decode() != str(path):  # for pandas
                raise UserError(f'{path}: the name is not UTF-8: rename it, or make a link to it')
        found |= {path.resolve(): path for _, path in inside}
    return list(found.values())


def trainer_of(settings: dict) -> str | None:
    """Return the path of a run's trainer, None if it is gone."""
    paths = [str(settings.get(name)) for name in ('script_path', 'script')]
    return next((path for path in paths if (ROOT / path).is_file()), None)


def read_runs(
    folders: Iterable[pathlib.Path], scripts: Iterable[str] = ()
) -> list[tuple[dict, list[dict]]]:
    """Return the settings of the run in each folder, {} if there is none, and its log. A setting
    that is newer than a run has its default in the run's trainer or, if that lacks it, in one of
    these scripts, in another run's trainer, or in the one that its trainer copies."""
    found = [(settings_of(folder), log_of(folder)) for folder in folders]
    trainers = [trainer_of(settings) for settings, _ in found]
    defaults = {True: {}, False: {}}  # by whether they are those of agents
    for path in ('train_lm.py', 'train_sokoban.py', *sorted({*trainers} - {None}), *scripts):
        known = script_of(path).defaults
        defaults['n_envs' in known] |= known
    for (settings, _), path in zip(found, trainers, strict=True):
        known = defaults['n_envs' in settings] | (script_of(path).defaults if path else {})
        for name in known.keys() - settings.keys() if settings else ():
            x = known[name]
            settings[name] = [*x] if isinstance(x, tuple) else x  # as in JSON
    return found


# ---- costs ----


class Cost(NamedTuple):
    """The cost of a run."""

    layers: float  # forward FLOPs per token, or multiply-adds per step of one board
    training: float  # FLOPs of all updates, with a backward of two forwards


@functools.cache
def forward_cost(arch: str, recurrent: bool, sizes: tuple) -> tuple[float, float]:
    """Return the cost of the layers, in the unit of Cost.layers, and the FLOPs of a whole forward
    per token, or of the layers per step of one board."""
    with torch.device('meta'):
        if arch in AGENTS:
            macs = float(build_agent(AgentConfig(**dict(sizes))).nominal_macs())
            return macs, 2 * macs
        build = build_lstm if arch == 'lstm' else build_model
        flops = build(ModelConfig(**dict(sizes)), recurrent).flops_per_token()
        return flops['core'], sum(flops.values())


def updates(s: dict) -> int:
    """Return the number of updates of a run with these settings."""
    is_agent = 'n_envs' in s
    return math.ceil(s['total_steps'] / (s['n_envs'] * s['unroll'])) if is_agent else s['max_iters']


def cost(run: Run) -> Cost:
    """Return the cost of a run. Raises UserError if its sizes do not fit together."""
    s = full_settings(run)
    is_agent = 'n_envs' in s
    if not is_agent:
        s['vocab_size'] = VOCAB[s['tokenizer']]
    names = {f.name for f in fields(AgentConfig if is_agent else ModelConfig)} & s.keys()
    sizes = tuple((name, s[name]) for name in sorted(names - {'mode', 'dtype'}))
    layers, forward = forward_cost(s['arch'], s['recurrent'], sizes)
    per_update = s['n_envs'] * s['unroll'] if is_agent else s['tokens_per_step']
    return Cost(layers, 3 * forward * updates(s) * per_update)


# ---- the paper's runs ----

AGENTS = ['convlstm', 'convglu']
KINDS = [True, False]  # recurrent or not
DEPTHS = [1, 2, 4, 8, 16]


def run_of(model: str, recurrent: bool, L: int, E: int, d: int) -> Run:
    """Return an agent's run, for which the defaults of its trainer are the paper's settings but for
    dtype (readings.md), or a language model's.

    model: the architecture of an agent, or the budget of a language model, whose config file has
    its window and chunks."""
    sizes = {'recurrent': recurrent, 'n_layer': L, 'n_expert': E, 'n_embd': d}
    if model in AGENTS:
        return Run('train_sokoban.py', (), {'arch': model, **sizes}, {'dtype': 'float32'})
    kind = '' if recurrent else '_nonrecurrent'
    return Run('train_lm.py', (f'config/{model}{kind}_L2.py',), sizes, {})


def allocations(
    model: str, n: int, width: int, widths: list, depths: list = DEPTHS, most: float = math.inf
) -> list[Run]:
    """Return the allocations, of at most `most` W, of the budget W of n experts of a width."""
    runs = []
    for recurrent in KINDS:
        W = n * cost(run_of(model, recurrent, 1, 1, width)).layers
        for L, d in itertools.product(depths, widths):
            expert = cost(run_of(model, recurrent, 1, 1, d)).layers
            E = round(W / (L * expert))
            if 0 < L * E * expert <= most * W:
                runs.append(run_of(model, recurrent, L, E, d)._replace(W=W))
    return runs


def sokoban(widths: list[int], archs: list[str] = AGENTS, n: int = 1) -> list[Run]:
    """Return the agents of a budget, that of n experts of the first width."""
    runs = [run for arch in archs for run in allocations(arch, n, widths[0], widths)]
    return times(runs, seed=[1, 2, 3])


def fineweb(budget: str, n: int, depths: list[int] = DEPTHS) -> list[Run]:
    """Return the language models of a budget, that of n experts of width 768. E is rounded, so that
    some allocations exceed W; those above 1.5 W are left out."""
    return times(allocations(budget, n, 768, [1536, 768, 384], depths, most=1.5), seed=[1])


def ablation(agents: list[Run], lms: list[Run], **values: list) -> list[Run]:
    """Return runs that differ in one setting: agents with three seeds, language models with one."""
    return times(times(agents, seed=[1, 2, 3]) + times(lms, seed=[1]), **values)


def scaling() -> list[Run]:
    """Return runs whose cost grows with L and E."""
    cells = list(itertools.product(KINDS, [1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 64]))
    agents = [run_of(arch, *cell, 64) for arch in AGENTS for cell in cells]
    return ablation(agents, [run_of('small', *cell, 384) for cell in cells])


def sixteen(depths: list[int], recurrent: bool = True) -> list[Run]:
    """Return language models of 16 experts of width 768."""
    return [run_of('small', recurrent, L, 16 // L, 768) for L in depths]


def union(*names: str) -> list[Run]:
    """Return the runs of several plans, which keep their folders."""
    return [run for name in names for run in runs_of(name)]


def probed() -> list[Run]:
    """Return the runs of the agents that the paper probes, which keep their folders."""
    agents = {'arch': 'convlstm', 'recurrent': True, 'n_embd': 256}
    runs = [run for run in runs_of('sokoban-large') if agents.items() <= run.axes.items()]
    return [run for run in runs if run.axes['n_layer'] <= 8]


def shared_residual() -> list[Run]:
    """Return the runs of lm-small with one residual per layer. The rules differ where there are
    several experts and a residual; all other runs are those of lm-small, and keep their folders."""
    return [
        run
        if run.axes['recurrent'] or run.axes['n_expert'] == 1
        else run._replace(axes={**run.axes, 'residual': 'shared'}, plan='lm-small-shared')
        for run in runs_of('lm-small')
    ]


# ---- plans ----

# The rules can be compared where there are several experts. With L = 16 and E = 4, 'expert' scales
# the residual stream most, by sqrt(4)^16.
RESIDUAL_LMS = [*sixteen([2, 4, 8], recurrent=False), run_of('small', False, 16, 4, 384)]
RESIDUAL_AGENTS = [run_of('convglu', r, L, 2, d) for L, d in ((2, 128), (8, 32)) for r in KINDS]

PLANS = {
    'sokoban-small': Plan('Sokoban, small budget', partial(sokoban, [128, 64, 32])),
    'sokoban-medium': Plan('Sokoban, medium budget', partial(sokoban, [256, 128, 64, 32])),
    'sokoban-large': Plan(
        'Sokoban, large budget', partial(sokoban, [1024, 512, 256, 128, 64], ['convlstm'])
    ),
    'sokoban': Plan(
        'Sokoban: saturation, solve rates',
        partial(union, 'sokoban-small', 'sokoban-medium', 'sokoban-large'),
        'python -m paper.figures {folders} --levels=unfiltered-test',
    ),
    'probes': Plan(
        'Planning probes',
        probed,
        'python -m paper.probe {root}config/probe_large.py '
        '{folders}/arch-convlstm_recurrent-True_n_layer-[1248]_*_n_embd-256_*',
    ),
    'lm-small': Plan('FineWeb, small budget', partial(fineweb, 'small', 16)),
    'lm-small-long': Plan(
        'FineWeb, small budget, long context', partial(fineweb, 'small_long', 16)
    ),
    'lm-medium': Plan('FineWeb, medium budget', partial(fineweb, 'medium', 32, [*DEPTHS, 32])),
    'lm': Plan('FineWeb: saturation', partial(union, 'lm-small', 'lm-small-long', 'lm-medium')),
    'scaling': Plan('Scaling the number of experts', scaling),
    'aggregation': Plan(
        'Aggregation of experts',
        ablation([run_of('convlstm', True, 1, 4, 128)], sixteen([2]), aggregation=AGGREGATIONS),
    ),
    'communication': Plan(
        'Communication radius',
        ablation([run_of('convlstm', True, 2, 8, 32)], [], radius=list(range(8))),
    ),
    'share-kv': Plan(
        'Sharing keys and values', ablation([], sixteen([1, 2, 4]), share_kv=[True, False])
    ),
    'latency': Plan('Latency per token', [], 'python {root}bench.py --suite=decode'),
    'throughput': Plan(
        'Training throughput on four GPUs',
        [],
        'torchrun --standalone --nproc_per_node=4 {root}bench.py --suite=train '
        '--contexts=32,64,128,256,1024,2048 --tokens_per_update=131072,262144',
    ),
    'residual': Plan(
        'Ours: residual rule',
        ablation(RESIDUAL_AGENTS, RESIDUAL_LMS, residual=list(RESIDUALS)),
    ),
    'lm-small-shared': Plan(
        'Ours: FineWeb, small budget, shared residual',
        shared_residual,
        'python -m paper.figures {folders} --plan=lm-small-shared '
        '--only="recurrent or n_expert == 1 or residual == \'shared\'"',
    ),
    'init-b': Plan(
        'Ours: initial b', ablation([], sixteen([1, 2]), init_b=['one', 'sqrt_experts'])
    ),
    # the same cost at L = 1, 2, 4 and 8, with no rounding of E
    'sokoban-eight': Plan('Ours: agents, eight experts', partial(sokoban, [64], n=8)),
}


def studies() -> dict[str, str]:
    """Return {plan: module} of the files in paper/studies that define PLAN. Raises UserError if one
    has the name of another plan."""
    found = {}
    for path in sorted(STUDIES.glob('*.py')):
        if re.search(r'^PLAN\b', path.read_text(encoding='utf-8'), re.MULTILINE):
            name = path.stem.replace('_', '-')
            if name in PLANS or name in found:
                raise UserError(f'{path}: there is a plan {name} already: rename the file')
            found[name] = f'paper.studies.{path.stem}'
    return found


def names_of_plans() -> list[str]:
    """Return the names of all plans."""
    return [*PLANS, *studies()]


def find_plan(name: str) -> Plan:
    """Return a plan. Raises UserError if there is none with this name."""
    modules = studies()
    if name in PLANS:
        return PLANS[name]
    if name not in modules:
        raise UserError(f'{name!r} is no plan: choose one of {", ".join(names_of_plans())}')
    return importlib.import_module(modules[name]).PLAN


def runs_of(name: str) -> list[Run]:
    """Return the runs of a plan, with checked settings: all with the first seed, then all with the
    second, and so on. Raises UserError for settings that a trainer does not have."""
    runs, source = find_plan(name).runs, f'plan {name}'
    found = {}
    for run in runs() if callable(runs) else runs:
        check = script_of(run.script).check
        run = run._replace(
            axes={k: check(k, x, source) for k, x in run.axes.items()},
            fixed={k: check(k, x, source) for k, x in run.fixed.items()},
            plan=run.plan or name,
        )
        if run.folder in found:
            raise UserError(f'{source}: two runs have the folder {run.folder}: add an axis')
        found[run.folder] = run
    return sorted(found.values(), key=lambda run: run.axes.get('seed', 0))
