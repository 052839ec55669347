"""Test the plans: their runs are the paper's, by numbers written here or in the paper's tables."""

import csv
import re
import textwrap
from collections import Counter

import pytest
from processes import ROOT
from small_runs import assert_refused

from paper import plans, studies
from paper.plans import Plan, cost, full_settings, grid, names_of_plans, runs_of, vary

CELL = ('recurrent', 'n_layer', 'n_expert', 'n_embd')


def cells_of(runs):
    return [tuple(full_settings(run)[name] for name in CELL) for run in runs]


def first_seed(name, **values):
    """Return the runs of a plan with seed 1 and these values."""
    values = {'seed': 1, **values}
    return [run for run in runs_of(name) if values.items() <= run.axes.items()]


def folders_of(name):
    return {run.folder for run in runs_of(name)}


# ---- the paper's plans ----


@pytest.mark.parametrize('budget, n', [('small', 18), ('medium', 28), ('large', 38)])
def test_convlstm_plans_are_the_papers_allocations(budget, n):
    with open(ROOT / 'paper/results/paper/sokoban_returns.csv') as file:
        rows = [row for row in csv.DictReader(file) if row['plan'] == f'sokoban-{budget}']
    paper = [(r['kind'] == 'recurrent', *(int(r[name]) for name in CELL[1:])) for r in rows]
    found = cells_of(first_seed(f'sokoban-{budget}', arch='convlstm'))
    assert sorted(found) == sorted(paper) and len(found) == n


def test_the_convglu_plan_has_all_allocations_of_its_budget():
    one_layer = [(1, 1, 128), (1, 4, 64), (1, 16, 32)]
    deeper = [(2, 2, 64), (2, 8, 32), (4, 1, 64), (4, 4, 32), (8, 2, 32), (16, 1, 32)]
    found = cells_of(first_seed('sokoban-small', arch='convglu', recurrent=False))
    assert found == [(False, *sizes) for sizes in one_layer + deeper]


def test_language_models_cost_16_blocks():
    D, W = 768, 128
    block = 2 * (2 * D * D + 2 * D * D // 2 + 8 * D * D) + 4 * W * D
    budgets = {True: 16 * block, False: 16 * (block + 4 * (257 / 2 - W) * D)}
    runs = runs_of('lm-small')
    assert len(runs) == 26
    assert all(run.W == budgets[run.axes['recurrent']] for run in runs)
    assert all(0.9 < cost(run).layers / run.W < 1.1 for run in runs)
    found = {cell[1:] for cell in cells_of(runs)}
    assert {(1, 4, 1536), (1, 62, 384)} < found
    # half an expert rounded up would cost 1.97 budgets
    assert (16, 1, 1536) not in found and (8, 1, 1536) not in found


@pytest.mark.parametrize(
    'name, budget, n',
    [('small', 'small', 16), ('small-long', 'small_long', 16), ('medium', 'medium', 32)],
)
def test_language_models_have_the_config_of_their_budget(name, budget, n):
    """And every depth that divides the number of experts of the paper's width (test_paper.py holds
    the config files)."""
    runs = runs_of(f'lm-{name}')
    for run in runs:
        kind = '' if run.axes['recurrent'] else '_nonrecurrent'
        assert run.config == (f'config/{budget}{kind}_L2.py',)
    depths = [L for L in (1, 2, 4, 8, 16, 32) if L <= n]
    assert {(kind, L, n // L, 768) for kind in (True, False) for L in depths} <= {*cells_of(runs)}


@pytest.mark.parametrize(
    'name, setting, values, n',
    [
        ('aggregation', 'aggregation', {'sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2'}, 16),
        ('communication', 'radius', set(range(8)), 24),
        ('share-kv', 'share_kv', {True, False}, 6),
        ('residual', 'residual', {'expert', 'shared'}, 32),
        ('init-b', 'init_b', {'one', 'sqrt_experts'}, 4),
        ('scaling', 'n_expert', {1, 2, 4, 8, 16, 32, 64}, 392),
        ('sokoban-eight', 'n_layer', {1, 2, 4, 8}, 48),
    ],
)
def test_an_ablation_has_its_values(name, setting, values, n):
    runs = runs_of(name)
    assert {run.axes[setting] for run in runs} == values and len(runs) == n


def test_plans_of_several_budgets_share_the_folders_of_their_runs():
    assert folders_of('lm') == folders_of('lm-small') | folders_of('lm-medium')
    assert len(folders_of('lm')) == 58 and len(folders_of('sokoban')) == 390
    assert folders_of('probes') < folders_of('sokoban-large')
    probed = [(True, 1, 15, 256), (True, 2, 8, 256), (True, 4, 4, 256), (True, 8, 2, 256)]
    assert Counter(cells_of(runs_of('probes'))) == dict.fromkeys(probed, 3)


def test_a_shared_residual_has_a_folder_for_models_with_several_experts_and_a_residual():
    """All other runs are the same by both rules, and keep their folders."""
    runs = runs_of('lm-small-shared')
    changed = [run for run in runs if run.folder not in folders_of('lm-small')]
    assert len(runs) == 26 and len(changed) == 11
    for run in changed:
        assert run.axes['residual'] == 'shared' and run.folder.parts[0] == 'lm-small-shared'
        assert not run.axes['recurrent'] and run.axes['n_expert'] > 1


def test_seeds_of_a_plan_come_in_rounds():
    for name in names_of_plans():
        seeds = [run.axes['seed'] for run in runs_of(name)]
        assert seeds == sorted(seeds) and (seeds or name in ('latency', 'throughput')), name


def test_training_flops_are_three_forwards_of_all_tokens_or_steps():
    (run,) = [run for run in runs_of('lm-small') if cells_of([run]) == [(True, 16, 1, 768)]]
    forward = cost(run).layers + 2 * 50304 * 768
    assert cost(run).training == 3 * forward * 131072 * 10000
    (run,) = first_seed('sokoban-small', arch='convlstm', recurrent=True, n_layer=1, n_embd=128)
    macs = 100 * 9 * (32 + 2 * 128) * 4 * 128
    assert cost(run).layers == macs
    assert cost(run).training == 3 * 2 * macs * 50_000_000


# ---- new plans ----


def test_the_plan_in_the_docstring_is_found_by_its_file(tmp_path, monkeypatch):
    code = re.search(r'\n    from paper.plans.*?\n    \)\n', plans.__doc__, re.DOTALL)[0]
    (tmp_path / 'weight_decay.py').write_text(textwrap.dedent(code))
    (tmp_path / 'other.py').write_text('"""No PLAN."""\n')
    monkeypatch.setattr(plans, 'STUDIES', tmp_path)
    monkeypatch.setattr(studies, '__path__', [str(tmp_path)])
    assert set(names_of_plans()) - set(plans.PLANS) == {'weight-decay'}
    runs = runs_of('weight-decay')
    names = {f'weight_decay-{x}_seed-{seed}' for x in ('0.0', '0.01', '0.1') for seed in (1, 2, 3)}
    assert {run.folder.name for run in runs} == names
    assert {full_settings(run)['n_embd'] for run in runs} == {48}


@pytest.mark.parametrize(
    'runs, message',
    [
        (grid('train_lm.py', n_layers=[1, 2]), "plan new: unknown setting 'n_layers'.*'n_layer'"),
        (grid('train_lm.py', n_layer=['two']), 'plan new: n_layer expects an integer'),
        (grid('train_lm.py', n_layer=[1, 1]), 'plan new: two runs have the folder new/n_layer-1'),
        (grid('train_lm.py', 'config/no.py', n_layer=[1]), 'config/no.py: cannot read'),
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


def test_other_values_of_an_axis_lie_beside_those_of_the_plan():
    runs = vary(grid('train_lm.py', n_layer=[1, 2], seed=[1, 2]), 'seed', ['2', '5'])
    folders = ['n_layer-1_seed-2', 'n_layer-2_seed-2', 'n_layer-1_seed-5', 'n_layer-2_seed-5']
    assert [str(run.folder) for run in runs] == folders


def test_in_a_plan_of_both_trainers_a_setting_may_be_of_one():
    runs = vary(runs_of('aggregation'), 'tokens_per_step', ['64'])
    assert {(run.script, run.plan) for run in runs} == {
        ('train_lm.py', 'aggregation-tokens_per_step'),
        ('train_sokoban.py', 'aggregation'),
    }
