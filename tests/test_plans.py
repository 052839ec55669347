"""Test the plans: their runs are the paper's, by numbers written here or in the paper's tables."""

import csv
import itertools
import os
import re
import textwrap
from pathlib import Path

import pytest
from processes import ROOT
from small_runs import assert_refused

from paper import plans, studies
from paper.plans import PLANS, Plan, cost, full_settings, grid, runs_of, vary

CELL = ('recurrent', 'n_layer', 'n_expert', 'n_embd')


def cells_of(name, **values):
    """Return the allocations in a plan, of the runs with these values."""
    settings = [full_settings(run) for run in runs_of(name)]
    return {tuple(s[x] for x in CELL) for s in settings if values.items() <= s.items()}


def folders_of(name):
    return {run.folder for run in runs_of(name)}


# ---- the paper's plans ----


@pytest.mark.parametrize('budget, n', [('small', 18), ('medium', 28), ('large', 38)])
def test_convlstm_plans_are_the_papers_allocations(budget, n):
    with open(ROOT / 'paper/results/paper/sokoban_returns.csv') as file:
        rows = [row for row in csv.DictReader(file) if row['plan'] == f'sokoban-{budget}']
    paper = {(row['kind'] == 'recurrent', *(int(row[x]) for x in CELL[1:])) for row in rows}
    assert cells_of(f'sokoban-{budget}', arch='convlstm') == paper and len(paper) == n


def test_the_convglu_plan_has_all_allocations_of_its_budget():
    one_layer = [(1, 1, 128), (1, 4, 64), (1, 16, 32)]
    deeper = [(2, 2, 64), (2, 8, 32), (4, 1, 64), (4, 4, 32), (8, 2, 32), (16, 1, 32)]
    expected = {(False, *sizes) for sizes in one_layer + deeper}
    assert cells_of('sokoban-small', arch='convglu', recurrent=False) == expected


@pytest.mark.parametrize(
    'name, window, n, n_runs',
    [('small', 128, 16, 26), ('small-long', 1024, 16, 26), ('medium', 128, 32, 32)],
)
def test_language_models_cost_the_blocks_of_their_budget(name, window, n, n_runs):
    """Every depth that divides the number of experts of width 768 is there, and no allocation that
    exceeds the budget by half. test_paper.py holds the config files."""
    D, plan = 768, f'lm-{name}'
    for run in runs_of(plan):
        recurrent = run.axes['recurrent']
        context = window if recurrent else window + 0.5  # half of the chunk, with the token itself
        assert run.W == n * (2 * 11 * D * D + 4 * context * D)
        assert 0.89 < cost(run).layers / run.W < 1.1
        kind = '' if recurrent else '_nonrecurrent'
        assert run.config == (f'config/{name.replace("-", "_")}{kind}_L2.py',)
    depths = [L for L in (1, 2, 4, 8, 16, 32) if L <= n]
    assert {(kind, L, n // L, D) for kind in (True, False) for L in depths} <= cells_of(plan)
    assert len(folders_of(plan)) == n_runs


@pytest.mark.parametrize(
    'name, setting, values, n',
    [
        ('aggregation', 'aggregation', {'sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2'}, 16),
        ('communication', 'radius', set(range(8)), 24),
        ('share-kv', 'share_kv', {True, False}, 6),
        ('scaling', 'n_expert', {1, 2, 4, 8, 16, 32, 64}, 392),
    ],
)
def test_an_ablation_has_its_values(name, setting, values, n):
    runs = runs_of(name)
    assert {run.axes[setting] for run in runs} == values and len(runs) == n


def test_plans_share_the_folders_of_their_runs():
    """The rules for the residual differ where several experts have a residual."""
    budgets = ('lm-small', 'lm-small-long', 'lm-medium')
    assert folders_of('lm') == set().union(*map(folders_of, budgets))
    assert len(folders_of('lm')) == 84 and len(folders_of('sokoban')) == 390
    probed = {(True, 1, 15, 256), (True, 2, 8, 256), (True, 4, 4, 256), (True, 8, 2, 256)}
    assert cells_of('probes') == probed and len(folders_of('probes')) == 12
    assert folders_of('probes') < folders_of('sokoban-large')
    changed = folders_of('lm-small-shared') - folders_of('lm-small')
    assert len(changed) == 11 and all('residual-shared' in path.name for path in changed)


def test_sizes_of_plans_are_those_of_the_readings():
    """Where the paper gives none: paper/readings.md."""
    assert cells_of('aggregation') == {(True, 1, 4, 128), (True, 2, 8, 768)}
    assert cells_of('share-kv') == {(True, 1, 16, 768), (True, 2, 8, 768), (True, 4, 4, 768)}
    for arch, d in (('convlstm', 64), ('convglu', 64), ('experts', 384)):
        cells = itertools.product((True, False), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64), [d])
        assert cells_of('scaling', arch=arch) == {*cells}


def test_agents_of_the_paper_train_in_float32():
    """It names bfloat16 for language models only."""
    for name in PLANS:
        for settings in map(full_settings, runs_of(name)):
            assert settings['dtype'] == ('float32' if 'n_envs' in settings else 'auto')


def test_seeds_of_a_plan_come_in_rounds():
    seeds = [run.axes['seed'] for run in runs_of('sokoban-large')]
    assert seeds == [1] * 38 + [2] * 38 + [3] * 38


def test_training_flops_of_an_agent_are_three_forwards_of_all_steps():
    """Those of language models are in test_sweep.py."""
    run = runs_of('sokoban-small')[0]  # a recurrent ConvLSTM, L = E = 1, d = 128
    macs = 100 * 9 * (32 + 2 * 128) * 4 * 128
    assert cost(run) == (macs, 3 * 2 * macs * 50_000_000)


# ---- new plans ----


def test_the_plan_in_the_docstring_is_found_by_its_file(tmp_path, monkeypatch):
    code = re.search(r'\n    from paper.plans.*?\n    \)\n', plans.__doc__, re.DOTALL)[0]
    (tmp_path / 'weight_decay.py').write_text(textwrap.dedent(code))
    monkeypatch.setattr(plans, 'STUDIES', tmp_path)
    monkeypatch.setattr(studies, '__path__', [str(tmp_path)])
    assert plans.names_of_plans() == [*plans.PLANS, 'weight-decay']
    folders = [path.name for path in folders_of('weight-decay')]
    assert len(folders) == 9 and 'weight_decay-0.01_seed-3' in folders
    (tmp_path / 'weight_decay.py').rename(tmp_path / 'init_b.py')
    message = 'there is a plan init-b already: rename the file'
    assert_refused(f'init_b.py: {message}', plans.find_plan, 'init-b')
    for name in ('my-plan.py', 'my_plan.py'):
        (tmp_path / name).write_text('PLAN = None')
    (tmp_path / 'init_b.py').unlink()
    assert_refused('my_plan.py: there is a plan my-plan already', plans.find_plan, 'my-plan')


def test_two_values_never_share_a_folder():
    names = [
        'x/y',
        'x-y',
        'x_y',
        'x/y/',
        300 * 'x',
        301 * 'x',
        150 * 'é',
        149 * 'é' + 'e',
        '\udcff',
    ]
    (run,) = grid('train_lm.py', seed=[1], cells=[{}])
    varied = vary([run._replace(plan='p')], 'wandb_project', names)
    folders = {run.folder for run in varied}
    assert (
        len(folders) == len(names) and Path('p-wandb_project/seed-1_wandb_project-x-y') in folders
    )
    assert all(len(os.fsencode(part)) < 256 for folder in folders for part in folder.parts)
    run = run._replace(plan='p', axes={'n_layer': 1, 'n_expert': 2})
    same = run._replace(fixed={'n_embd': 64})
    assert_refused('--seed: two runs have the folder', vary, [run, same], 'seed', ['1'])


def test_many_settings_fit_the_name_of_a_folder():
    runs = [run._replace(plan='p') for run in grid('train_lm.py', n_layer=[1, 2])]
    defaults = plans.script_of('train_lm.py').defaults
    for name in [name for name in defaults if name != 'n_layer']:
        runs = vary(runs, name, [str(defaults[name])])
    parts = {part for run in runs for part in run.folder.parts}
    assert len(parts) == 3 and all(100 < len(part) < 256 for part in parts)


@pytest.mark.parametrize(
    'runs, message',
    [
        (grid('train_lm.py', n_layers=[1, 2]), "plan new: unknown setting 'n_layers'.*'n_layer'"),
        (grid('train_lm.py', n_layer=[1, 1]), 'plan new: two runs have the folder new/n_layer-1'),
        (grid('train_lm.py', n_embd=[100]), 'n_embd = 100'),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(runs, message, monkeypatch):
    monkeypatch.setitem(plans.PLANS, 'new', Plan('New', runs))
    assert_refused(message, lambda: [cost(run) for run in runs_of('new')])


# ---- varied settings ----


def test_a_varied_setting_that_is_no_axis_has_a_folder_of_its_own():
    """There all runs are complete: those with the default value, too."""
    runs = [run._replace(plan='p') for run in grid('train_lm.py', n_layer=[1, 2])]
    varied = vary(runs, 'weight_decay', ['0', '0.01'])  # 0.01 is the default
    ends = [f'n_layer-{L}_weight_decay-{x}' for x in ('0.0', '0.01') for L in (1, 2)]
    assert [str(run.folder) for run in varied] == [f'p-weight_decay/{end}' for end in ends]
    seeds = [run._replace(plan='p') for run in grid('train_lm.py', seed=[1])]
    varied = vary(seeds, 'seed', ['2'])  # values of an axis lie beside those of the plan
    assert [str(run.folder) for run in varied] == ['p/seed-2']
    varied = vary(runs, 'n_layer', ['2', '5'])  # other sizes cost more or less
    assert [str(run.folder) for run in varied] == ['p-n_layer/n_layer-2', 'p-n_layer/n_layer-5']


def test_a_trainer_that_is_no_python_is_one_line(tmp_path):
    (tmp_path / 'mine.py').write_text('n_layer = 1\nif n_layer\n')
    assert_refused('mine.py: SyntaxError: ', plans.script_of, str(tmp_path / 'mine.py'))
    (tmp_path / 'mine.py').write_text('n_layer = 1\nn_embd = 8 * 4\n')
    assert_refused(f'^{tmp_path}/mine.py:2: ', plans.script_of, str(tmp_path / 'mine.py'))
