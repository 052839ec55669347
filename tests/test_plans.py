"""Test the plans: their runs are the paper's, by numbers written here or in the paper's tables."""

import csv
import re
from collections import Counter

import pytest
from processes import ROOT
from small_runs import assert_refused

from paper import plans
from paper.plans import Plan, cost, full_settings, grid, names_of_plans, runs_of, vary


def sizes_of(runs):
    return [tuple(run.axes[name] for name in ('n_layer', 'n_expert', 'n_embd')) for run in runs]


def settings_of(runs):
    """Return {(recurrent, L, E, d): all settings} of runs with one seed."""
    settings = [full_settings(run) for run in runs]
    names = ('recurrent', 'n_layer', 'n_expert', 'n_embd')
    return {tuple(s[name] for name in names): s for s in settings}


def first_seed(name, **values):
    """Return the runs of a plan with seed 1 and these values."""
    values = {'seed': 1, **values}
    return [run for run in runs_of(name) if values.items() <= run.axes.items()]


def folders_of(name):
    return {run.folder for run in runs_of(name)}


# ---- the paper's plans ----


def test_convlstm_plans_are_the_papers_84_allocations():
    found = []
    for budget in ('small', 'medium', 'large'):
        runs = first_seed(f'sokoban-{budget}', arch='convlstm')
        kinds = [run.axes['recurrent'] for run in runs]
        found += [(k, budget, *sizes) for k, sizes in zip(kinds, sizes_of(runs), strict=True)]
    with open(ROOT / 'paper/results/paper/sokoban_returns.csv') as file:
        paper = [
            (row['variant'] == 'recurrent', row['budget'], *(int(row[name]) for name in 'LEd'))
            for row in csv.DictReader(file)
        ]
    assert len(found) == 84 and sorted(found) == sorted(paper)


def test_the_convglu_plan_has_all_allocations_of_its_budget():
    one_layer = [(1, 1, 128), (1, 4, 64), (1, 16, 32)]
    deeper = [(2, 2, 64), (2, 8, 32), (4, 1, 64), (4, 4, 32), (8, 2, 32), (16, 1, 32)]
    runs = first_seed('sokoban-small', arch='convglu', recurrent=False)
    assert sizes_of(runs) == one_layer + deeper


def test_language_models_cost_16_blocks():
    D, W = 768, 128
    block = 2 * (2 * D * D + 2 * D * D // 2 + 8 * D * D) + 4 * W * D
    budgets = {True: 16 * block, False: 16 * (block + 4 * (257 / 2 - W) * D)}
    runs = runs_of('lm-small')
    assert len(runs) == 26
    for recurrent in (True, False):
        part = [run for run in runs if run.axes['recurrent'] == recurrent]
        assert {run.W for run in part} == {budgets[recurrent]}
        assert all(0.9 < cost(run).layers / run.W < 1.1 for run in part)
        found = set(sizes_of(part))
        assert {(L, 16 // L, 768) for L in (1, 2, 4, 8, 16)} | {(1, 4, 1536), (1, 62, 384)} < found
        # half an expert rounded up would cost 1.97 budgets
        assert (16, 1, 1536) not in found and (8, 1, 1536) not in found


@pytest.mark.parametrize(
    'name, recurrent, experts, window, block_size',
    [
        ('lm-small', True, 16, 128, 64),
        ('lm-small', False, 16, 128, 256),
        ('lm-small-long', True, 16, 1024, 64),
        ('lm-small-long', False, 16, 1024, 2048),
        ('lm-medium', True, 32, 128, 64),
        ('lm-medium', False, 32, 128, 256),
    ],
)
def test_language_models_have_the_context_of_their_budget(
    name, recurrent, experts, window, block_size
):
    """A plan has the paper's width with every depth that divides the number of experts."""
    settings = settings_of(runs_of(name))
    for L in [L for L in (1, 2, 4, 8, 16, 32) if L <= experts]:
        s = settings[recurrent, L, experts // L, 768]
        assert (s['window'], s['block_size'], s['max_iters']) == (window, block_size, 10000)


@pytest.mark.parametrize('budget', ['small', 'medium', 'large'])
def test_plans_of_agents_have_all_whose_solve_rate_is_in_the_paper(budget):
    settings = settings_of(first_seed(f'sokoban-{budget}', arch='convlstm'))
    with open(ROOT / 'paper/results/paper/sokoban_solve_rates.csv') as file:
        rows = [row for row in csv.DictReader(file) if row['budget'] == budget]
    assert len(rows) == 10
    for row in rows:
        s = settings[row['variant'] == 'recurrent', *(int(row[name]) for name in 'LEd')]
        assert (s['total_steps'], s['split']) == (50_000_000, 'unfiltered-train')


def test_every_experts_plan_has_its_ablated_values():
    found = {
        name: {run.axes[setting] for run in runs_of(name)}
        for name, setting in {
            'aggregation': 'aggregation',
            'communication': 'radius',
            'share-kv': 'share_kv',
            'residual': 'residual',
            'init-b': 'init_b',
        }.items()
    }
    assert found == {
        'aggregation': {'sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2'},
        'communication': set(range(8)),
        'share-kv': {True, False},
        'residual': {'expert', 'shared'},
        'init-b': {'one', 'sqrt_experts'},
    }


def test_the_residual_plan_has_the_cells_that_decide():
    runs = first_seed('residual', residual='shared')
    kinds = [(run.script, run.axes['recurrent']) for run in runs]
    assert set(zip(kinds, sizes_of(runs), strict=True)) == {
        *((('train_lm.py', False), s) for s in ((2, 8, 768), (4, 4, 768), (8, 2, 768))),
        (('train_lm.py', False), (16, 4, 384)),
        *((('train_sokoban.py', r), s) for r in (True, False) for s in ((2, 2, 128), (8, 2, 32))),
    }


def test_plans_of_several_budgets_share_the_folders_of_their_runs():
    assert folders_of('lm') == folders_of('lm-small') | folders_of('lm-medium')
    assert len(folders_of('lm')) == 58 and len(folders_of('sokoban')) == 390
    assert folders_of('probes') < folders_of('sokoban-large')
    assert Counter(sizes_of(runs_of('probes'))) == {
        (1, 15, 256): 3,
        (2, 8, 256): 3,
        (4, 4, 256): 3,
        (8, 2, 256): 3,
    }


def test_the_reduced_scaling_plan_is_a_part_of_the_whole_one():
    whole, reduced = folders_of('scaling'), folders_of('scaling-reduced')
    assert len(whole) == 392 and len(reduced) == 54 and reduced < whole


def test_a_shared_residual_changes_only_models_with_several_experts_and_a_residual():
    """All other runs are the same by both rules, and keep their folders."""
    shared = runs_of('lm-small-shared')
    changed = [run for run in shared if run.folder not in folders_of('lm-small')]
    kinds = [(run.axes['recurrent'], run.axes['n_expert'] > 1) for run in changed]
    assert len(shared) == 26 and set(kinds) == {(False, True)}
    assert changed == [run for run in shared if run.axes.get('residual') == 'shared']
    agents = vary(runs_of('sokoban-small'), 'residual', ['shared'])
    assert {run.axes['arch'] for run in agents if 'residual' in run.axes} == {'convglu'}


@pytest.mark.parametrize('name', names_of_plans())
def test_seeds_of_a_plan_come_in_rounds(name):
    seeds = [run.axes['seed'] for run in runs_of(name)]
    assert seeds == sorted(seeds) and (seeds or name in ('latency', 'throughput'))


def test_training_flops_are_three_forwards_of_all_tokens_or_steps():
    (run,) = [run for run in runs_of('lm-small') if sizes_of([run]) == [(16, 1, 768)]][:1]
    forward = cost(run).layers + 2 * 50304 * 768
    assert cost(run).training == 3 * forward * 131072 * 10000
    (run,) = first_seed('sokoban-small', arch='convlstm', recurrent=True, n_layer=1, n_embd=128)
    macs = 100 * 9 * (32 + 2 * 128) * 4 * 128
    assert cost(run).layers == macs
    assert cost(run).training == 3 * 2 * macs * 50_000_000


def test_the_study_reports_the_rate_that_was_best():
    """Seed 1 tries the rates beside it, too."""
    deepest = [run for run in runs_of('study-lm') if run.axes['n_layer'] == 16]
    recurrent = [run.axes for run in deepest if run.axes['recurrent']]
    found = [(axes['seed'], axes['learning_rate']) for axes in recurrent]
    assert found == [(1, 0.01), (1, 0.02), (1, 0.04), (2, 0.02), (3, 0.02), (4, 0.02)]


# ---- new plans ----


def test_the_plan_in_the_docstring_has_six_runs(monkeypatch):
    code = re.search(r'\n    from paper.plans.*?\n    \)\n', plans.__doc__, re.DOTALL)[0]
    scope = {}
    exec('if True:' + code, scope)
    monkeypatch.setitem(plans.PLANS, 'new', scope['PLAN'])
    names = {f'new/weight_decay-{x}_seed-{seed}' for x in ('0.0', '0.01', '0.1') for seed in (1, 2)}
    assert {str(run.folder) for run in runs_of('new')} == names
    assert {full_settings(run)['n_layer'] for run in runs_of('new')} == {2}


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


def test_an_unknown_plan_is_refused_with_the_names_of_all():
    assert_refused("'nonsense' is no plan: .*lm-small.*study-lm", runs_of, 'nonsense')


# ---- varied settings ----


def test_a_varied_setting_is_an_axis_and_the_value_that_a_run_has_keeps_its_folder():
    runs = grid('train_lm.py', n_layer=[1, 2])
    varied = vary(runs, 'weight_decay', ['0', '0.01', '1'])  # 0.01 is the default
    names = ['n_layer-1_weight_decay-0.0', 'n_layer-2_weight_decay-0.0', 'n_layer-1', 'n_layer-2']
    assert [str(run.folder) for run in varied][:4] == names
    assert [full_settings(run)['weight_decay'] for run in varied] == [
        0.0,
        0.0,
        0.01,
        0.01,
        1.0,
        1.0,
    ]


def test_a_varied_axis_of_the_plan_is_replaced():
    runs = vary(grid('train_lm.py', n_layer=[1, 2], seed=[1, 2]), 'seed', ['2', '5'])
    folders = ['n_layer-1_seed-2', 'n_layer-2_seed-2', 'n_layer-1_seed-5', 'n_layer-2_seed-5']
    assert [str(run.folder) for run in runs] == folders


def test_in_a_plan_of_both_trainers_a_setting_may_be_of_one():
    runs = vary(runs_of('aggregation'), 'tokens_per_step', ['64'])
    assert {(run.script, 'tokens_per_step' in run.axes) for run in runs} == {
        ('train_lm.py', True),
        ('train_sokoban.py', False),
    }
