"""sweep.py and figures.py: plans, jobs, running with failures and stops, figures, tables."""

import csv
import fcntl
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import run
import pytest
from test_train import ROOT, TINY, data, launch, mistake  # noqa: F401  a fixture

import figures
import sweep
import train_lm
from configurator import configure

PAPER = ROOT / 'results' / 'paper'


@pytest.fixture
def tiny(data, tmp_path, tmp_path_factory):  # noqa: F811
    """Plan lm-small of runs of a second, by a config file."""
    base = tmp_path_factory.mktemp('a base') / 'base.py'
    settings = {**TINY, 'data_dir': str(data)}
    base.write_text('\n'.join(f'{key} = {value!r}' for key, value in settings.items()))
    return ['--plan=lm-small', f'--base={base}', '--width=0.03125', f'--out_dir={tmp_path}']


def forget():
    """What sweep keeps for a process's one plan."""
    for cached in (sweep.under, sweep.cost):
        cached.cache_clear()


def sized(*argv):
    """sweep's settings, here -> its rows."""
    forget()
    configure(vars(sweep), [str(a) for a in argv], quiet=True)
    return sweep.plan_rows()


def call(*argv):
    process = launch('sweep.py', argv)
    out, err = process.communicate()
    return process.returncode, out, err


def folder_of(row):
    return Path(sweep.folder_of(row))


def fake(rows, value=lambda row: 1.0):
    """Finished runs as their logs have them; value(row) -> return or loss."""
    for row in rows:
        v, n, lines = value(row), sweep.total_of(row), []
        returns = [None, -100.0, -100.0, *(v + k for k in range(-2, 3))]
        for k in range(8):
            record = {'step': n * k // 7, 'seconds': 1.0}
            if row.is_text:
                record |= {'tokens': record['step'], 'val_loss': v if k == 7 else 9.0}
            else:
                record |= {'env_steps': record['step'] * 640, 'episodic_return': returns[k]}
                record |= {'return_1000': v if k else None}
            lines.append(json.dumps(record) + '\n')
        folder_of(row).mkdir(parents=True, exist_ok=True)
        (folder_of(row) / 'config.json').write_text(json.dumps(sweep.config_of(row)))
        (folder_of(row) / 'log.jsonl').write_text(''.join(lines))


def test_convlstm_plans_are_the_papers_84_rows_at_any_width():
    ours, half = [], ('--only=model=convlstm', '--seeds=1', '--width=0.5')
    for budget in ('small', 'medium', 'large'):
        rows = sized(f'--plan=sokoban-{budget}', *half)
        ours += [(r.variant, r.budget, *map(str, (r.L, r.E, 2 * r.d))) for r in rows]
    with open(PAPER / 'sokoban_returns.csv') as file:
        paper = [tuple(line[:5]) for line in csv.reader(file)][1:]
    assert len(ours) == 84 and sorted(paper) == sorted(ours)
    glu = sized('--plan=sokoban-small', '--seeds=1', '--only=model=convglu variant=feedforward')
    some = [(2, 2, 64), (2, 8, 32), (4, 1, 64), (4, 4, 32), (8, 2, 32), (16, 1, 32)]
    assert [r[3:6] for r in glu] == [(1, 1, 128), (1, 4, 64), (1, 16, 32), *some]


def test_language_models_cost_16_blocks():
    """Half an expert rounded up, 1.97 budgets, is left out."""
    rows = sized('--plan=lm-small')
    D, W = 768, 128
    block = 2 * (2 * D * D + 2 * D * D // 2 + 8 * D * D) + 4 * W * D
    assert sweep.budget_of('transformer', True, 'small') == 16 * block
    assert sweep.budget_of('transformer', False, 'small') == 16 * (block + 4 * (257 / 2 - W) * D)
    for variant in ('recurrent', 'feedforward'):
        mine = {r[3:6] for r in rows if r.variant == variant}
        assert {(L, 16 // L, 768) for L in (1, 2, 4, 8, 16)} | {(1, 4, 1536), (1, 62, 384)} < mine
        assert (16, 1, 1536) not in mine and (8, 1, 1536) not in mine
    assert len(rows) == 26 and all(0.9 < sweep.over_budget(r) < 1.1 for r in rows)
    depths = [r.L for r in sized('--plan=lm-medium', '--only=d=768 variant=recurrent')]
    assert depths == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize('plan', sweep.PLANS)
def test_names_are_unique_and_seeds_come_in_rounds(plan):
    rows = sized(f'--plan={plan}')
    assert len({r.name for r in rows}) == len(rows)
    assert [r.seed for r in rows] == sorted(r.seed for r in rows)
    assert rows[-1].seed == (1 if all(row.is_text for row in rows) else 3)


# ---- the command line ----


def test_list_has_a_line_a_run_with_a_command_that_parses(tmp_path):
    """From any folder: what a plan names is looked for beside sweep.py too."""
    line = [ROOT / 'sweep.py', '--plan=lm-small', '--only=d=768 L=16']
    out = run(line, cwd=tmp_path).stdout
    words = shlex.split(out.splitlines()[1])
    assert words[1] == 'transformer_recurrent_L16_E1_d768_s1' and words[3:7:2] == ['1.00', '0%']
    assert (tmp_path / words[7]).samefile(ROOT / 'train_lm.py')
    argv = [os.path.join(tmp_path, words[8]), *words[9:]]
    assert configure(dict(vars(train_lm)), argv, quiet=True)['n_layer'] == 16


MISTAKES = """
--plan=nonsense | nonsense lm-small share-kv
--only=L=3 | leaves none L 1,2,4,8,16
--also=nonsense=1 | also = 'nonsense'
--also=n_layer=3 | also sets n_layer itself
--width=0.0833 | n_embd base, width
--table=solve --run | no Sokoban agents
--run --index=99 | index = 99 0 to 25
--tune=learning_rate | tune 'learning_rate=0.02,0.04'
--tune=n_layer=1,2 | n_layer cannot be tuned
--emit=slurm --run | emit = 'slurm' run
--figure | no run of plan --run
--gpus_per_run=64 --run | gpus_per_run = 64
"""


@pytest.mark.parametrize('line', MISTAKES.strip().splitlines())
def test_mistakes_are_one_line(line, tmp_path, capfd):
    forget()
    argv, words = line.split(' | ')
    argv = ['--plan=lm-small', *argv.split(), f'--out_dir={tmp_path}/none']
    error = mistake(capfd, sweep, argv)
    assert all(word in error for word in words.split()) and not (tmp_path / 'none').exists(), error


def test_jobs_are_quoted_and_run(tiny, tmp_path):
    """A folder's name is data in a shell line, whatever it holds; the Python is this one."""
    evil = tmp_path / "a b; touch x' $(touch y)"
    argv = [*tiny, f'--out_dir={evil}', '--only=L=16 d=24 variant=feedforward']
    status, out, _ = call(*argv, '--emit=commands')
    assert status == 0 and out.count('\n') == 1 and out.endswith('--index=0\n')
    done = subprocess.run(shlex.split(out), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [evil.name] and not (ROOT / 'y').exists()
    assert (evil / 'lm-small' / 'transformer_feedforward_L16_E1_d24_s1' / 'ckpt_last.pt').exists()
    out = call(*argv, '--emit', 'slurm')[1]
    assert out.startswith('#!/bin/bash') and '#SBATCH --array=0-0' in out
    assert shlex.quote(f'--out_dir={evil}') in out and f'exec {sys.executable} sweep.py' in out
    assert subprocess.run(['bash', '-n'], input=out, text=True).returncode == 0


# ---- running ----


def test_run_skips_resumes_and_survives_a_failure(tiny, tmp_path):
    """What is finished is left alone; the same folders are refused to runs of other settings."""
    argv = [*tiny, '--only=L=1,2 d=24', '--workers=2', '--run']
    rows = sized(*argv)
    bad, cut = folder_of(rows[1]), folder_of(rows[3])
    (bad / 'config.json').mkdir(parents=True)  # whatever keeps a run from writing its files
    status, out, err = call(*argv)
    assert status == 1 and '4 runs, 0 finished before' in out and out.count(': done') == 3, out
    assert f'{rows[1].name}: FAILED (exit status' in out and f'failed: {rows[1].name}' in out
    assert json.loads((bad / 'failed.json').read_text())['message']
    (bad / 'config.json').rmdir()
    before = (folder_of(rows[0]) / 'log.jsonl').stat().st_mtime_ns
    lines = (cut / 'log.jsonl').read_text().splitlines()  # killed after its first checkpoint
    (cut / 'log.jsonl').write_text('\n'.join(lines[:5]) + '\n{"step": 5, "tr')
    os.replace(cut / 'ckpt_prev.pt', cut / 'ckpt_last.pt')
    assert [sweep.state_of(row) for row in rows] == ['done', 'failed', 'done', '']
    # what only says how a run is run makes no other run of it
    status, out, err = call(*argv, '--also=batch_size=2', '--figure', '--table')
    assert status == 0 and '2 finished before' in out and 'FAILED' not in out, out + err
    assert not (bad / 'failed.json').exists() and steps_of(rows[3]) == list(range(9))
    assert (folder_of(rows[0]) / 'log.jsonl').stat().st_mtime_ns == before
    found = {path.name.partition('_')[0] for path in (tmp_path / 'lm-small').glob('*.*')}
    assert found == {'allocations', 'saturation', 'curves', 'table', 'runs.json'}
    assert 'nats a byte' in (tmp_path / 'lm-small/allocations_transformer.svg').read_text()
    status, out, err = call(*argv, '--length=2')
    assert status == 2 and 'other settings' in err and err.count('\n') == 1


def steps_of(row):
    path = folder_of(row) / 'log.jsonl'
    return [r['step'] for r in figures.read_log(path.parent)] if path.exists() else []


def test_ctrl_c_saves_and_the_next_call_goes_on(tiny):
    argv = [*tiny, '--only=L=16 d=24', '--run', '--workers=2', '--length=100']
    rows, done = sized(*argv), [[0], [0]]
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before, process = [steps[-1] for steps in done], launch('sweep.py', argv)
        while process.poll() is None and any(
            len(steps_of(row)) < step + 3 for row, step in zip(rows, before, strict=True)
        ):
            time.sleep(0.1)
        process.send_signal(number)
        out, err = process.communicate()
        assert process.returncode == status and 'the same command goes on' in out, out + err
        assert all(sweep.state_of(r) == '' and 0 < sweep.look(r)[1] < 1 for r in rows)
        done = [steps_of(row) for row in rows]
        for steps, step in zip(done, before, strict=True):  # nothing was done twice
            assert steps[-1] > step and steps == list(range(len(steps)))


def test_nothing_finished_is_ever_overwritten(tiny, capsys):
    """Nor what another process has, or a damaged log, which is skipped in a table."""
    (row,) = sized(*tiny, '--only=L=1 d=24 variant=recurrent')
    folder, log = folder_of(row), folder_of(row) / 'log.jsonl'
    folder.mkdir(parents=True)
    with open(folder / '.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep.execute([row]) == 1 and 'another process has it' in capsys.readouterr().out
    fake([row])
    assert sweep.start(row, '', 1) is None  # another process may have finished it meanwhile
    (folder / 'config.json').write_text('{')
    assert sweep.state_of(row) == 'done' and len(sweep.finished([row])) == 1
    text = '#' + log.read_text()
    log.write_text(text)
    assert sweep.state_of(row) == 'damaged' and sweep.finished([row]) == []
    assert 'a log that cannot be used: this run is skipped' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.execute([row])
    assert log.read_text() == text


WORKERS = [  # GPUs, CUDA_VISIBLE_DEVICES, settings, each worker's
    (0, '', '--workers=3', ['', '', '']),
    (4, '', '--gpus_per_run=2', ['0,1', '2,3']),
    (2, '6,7', '--workers=4', ['6', '7', '6', '7']),
    (4, '', '--index=6 --workers=1', ['2']),
]


@pytest.mark.parametrize('gpus, visible, words, expected', WORKERS)
def test_workers_and_gpus(monkeypatch, gpus, visible, words, expected):
    sized('--plan=lm-small', *words.split())
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: gpus)
    monkeypatch.setattr(os, 'environ', {'CUDA_VISIBLE_DEVICES': visible} if visible else {})
    assert sweep.devices() == expected


def test_each_cell_is_tuned_with_seed_1_and_its_best_is_shown_by_other_seeds(tiny, tmp_path):
    argv = [*tiny, '--only=L=1,4 d=24', '--seeds=2', '--tune=learning_rate=0.02,0.04,0.04,0.05,1']
    rows, rates = sized(*argv), (0.02, 0.04, 0.05, 1.0)
    found = [(r.recurrent, r.L, r.more, r.seed) for r in rows]
    cells = [(recurrent, L) for recurrent in (True, False) for L in (1, 4)]
    assert found == [(*cell, (('learning_rate', rate),), 1) for cell in cells for rate in rates]
    loss = {0.02: 3.0, 0.04: 2.0, 0.05: 2.5}
    of_seeds = {(True, 1): (2.0, 2.2), (True, 4): (2.1, 2.3)}
    of_seeds |= {(False, 1): (4, 4), (False, 4): (3, 3)}

    def value(row):
        return of_seeds[row.recurrent, row.L][row.seed - 2] if row.seed > 1 else loss[rate_of(row)]

    fake([row for row in rows if rate_of(row) in loss], value)
    assert sized(*argv) == rows  # some are missing
    for bad in rows[3::4]:  # a rate too high for them
        folder_of(bad).mkdir(parents=True)
        (folder_of(bad) / 'failed.json').write_text('{}')
    assert 'one seed a value so far' in call(*argv, '--table')[1]
    grown = sized(*argv)
    assert grown[:16] == rows  # jobs' numbers stay
    more = [(r.recurrent, r.L, rate_of(r), r.seed) for r in grown[16:]]
    assert more == [(*cell, 0.04, seed) for seed in (2, 3) for cell in cells]
    fake(grown[16:], value)
    out, folder = call(*argv, '--table', '--figure')[1], tmp_path / 'lm-small'
    lines = (folder / 'table_transformer.csv').read_text().splitlines()
    assert lines[0].startswith('variant,budget,L,E,d,learning_rate,mean_loss,variance,n_seeds')
    assert lines[1] == 'recurrent,small,1,16,24,0.04,2.1,0.02,2'
    # L = 4's mean of two draws is the smaller in 1 of 16; by t, Cauchy errors, in 1/2 - atan(.5)/pi
    words = (folder / 'table_transformer.md').read_text().splitlines()[-1]
    assert words in out and 'recurrent 1 (95%: 1 to 4), feedforward 4 (95%: 4 to 4)' in words
    smaller, equal, by_t = (float(x[:-2]) for x in words.split() if x[-2:] in ('%,', '%.'))
    assert 92.5 < smaller < 95 and abs(smaller + equal - 100) < 0.01 and 63 < by_t < 66.5
    saved = json.loads((folder / 'runs.json').read_text())
    assert saved['best_transformer'] == words and len(saved['runs']) == 20
    assert sum(r['reported'] for r in saved['runs']) == 8
    assert 'best learning rates, 2 seeds' in (folder / 'allocations_transformer.svg').read_text()


def rate_of(row):
    return dict(row.more)['learning_rate']


def test_tuning_goes_on_beyond_an_edge(tiny):
    """The higher, the better, but for L = 1, which wants the lowest: three rates more for each."""
    argv = [*tiny, '--only=L=1,4 d=24 variant=recurrent', '--tune=learning_rate=0.02,0.04']
    rows = sized(*argv)
    for n in (4, 6, 8, 10):
        assert len(rows) == n and all(row.seed == 1 for row in rows)
        fake(rows[n - 2 :] if n > 4 else rows, lambda r: rate_of(r) * (1 if r.L == 1 else -1))
        rows = sized(*argv)
    more = [(1, 0.01), (4, 0.08), (1, 0.005), (4, 0.16), (1, 0.0025), (4, 0.32)]
    assert [(row.L, rate_of(row)) for row in rows[4:10]] == more
    assert [(row.L, rate_of(row), row.seed) for row in rows[10:]] == [(1, 0.0025, 2), (4, 0.32, 2)]


def test_tuning_goes_on_to_the_other_seeds(tiny):
    """By one command: a value that cannot run is no winner, one that failed before may be."""
    argv = [*tiny, '--plan=residual', '--seeds=1', '--tune=grad_clip=-1,1,2']
    argv += ['--only=L=8 model=transformer residual=shared']
    first, _, last = sized(*argv)
    fake([last], lambda row: 99.0)
    folder_of(first).mkdir()
    (folder_of(first) / 'failed.json').write_text('{}')
    status, out, err = call(*argv, '--run', '--table')
    assert status == 1 and out.count(': done') == 2 and 'grad_clip' in out, out + err
    assert '1 runs, 0 finished before' in out and 'grad_clip-1.0_s2: done' in out


# ---- values, figures, tables ----


def test_saturation_is_the_best_of_at_most_L(tmp_path):
    only = '--only=model=convlstm variant=recurrent'
    rows = sized('--plan=sokoban-small', only, f'--out_dir={tmp_path}', '--seeds=2')
    rows = [row for row in rows if (row.L, row.d, row.seed) != (1, 128, 2)]  # one lucky seed
    means = {1: 3.0, 2: 8.0, 4: 5.0, 8: 9.0, 16: 1.0}
    fake(rows, lambda row: means[row.L] + row.seed - row.d / 1000 + (row.d == 128))
    best, found = (3, 8, 8, 9, 9), figures.saturation(figures.cells(sweep.finished(rows)))
    points = [(pytest.approx(x + 1.5 - 0.032), pytest.approx(0.5), 2) for x in best]
    assert found == dict(zip(means, points, strict=True))


FIGURES = [  # plan, model, what its figure says
    ('communication', 'convlstm', 'radius|return minus that of 7'),
    ('scaling', 'convglu', 'L = 8|experts E a level'),
    ('share-kv', 'transformer', 'share kv|>validation loss (nats a token)<|of True'),
    ('sokoban', 'convlstm', 'at most L levels|small budget|medium budget|large budget'),
]


@pytest.mark.parametrize('plan, model, words', FIGURES)
def test_a_plans_figure(plan, model, words, tmp_path):
    """Plan sokoban's runs are those of its three parts, where these are."""
    more = ['--seeds=2', f'--out_dir={tmp_path}']
    for part in [f'sokoban-{x}' for x in sweep.AGENTS] if plan == 'sokoban' else [plan]:
        rows = [row for row in sized(f'--plan={part}', *more) if row.model == model]
        fake(rows, lambda row: row.L + row.seed / 10 + (row.more == (('share_kv', False),)) / 2)
    # the default of L = 1 is missing: nothing may be drawn against another setting
    rows = [row for row in sized(f'--plan={plan}', *more) if row.model == model]
    rows = [row for row in rows if (row.L, row.more) != (1, (('share_kv', True),))]
    runs = sweep.finished(rows)
    figures.draw(f'{plan}, shrunk', sweep.plan_rows(), runs, 'token', '', str(tmp_path))
    text = next(tmp_path.glob('*.svg')).read_text()
    assert len(runs) == len(rows)
    assert all(word in text for word in (*words.split('|'), ', shrunk, 2 seeds')), text


def test_ablations_are_drawn_with_standard_errors(tmp_path, monkeypatch):
    """What the two panels are given: values with their errors, and differences with theirs."""
    rows, drawn = sized('--plan=communication', f'--out_dir={tmp_path}', '--seeds=4'), []
    fake(rows, lambda row: dict(row.more)['radius'] + [0, 2, 4, 6][row.seed - 1])
    points, deviation = figures.cells(sweep.finished(rows)), math.sqrt(20 / 3)
    monkeypatch.setattr(figures, 'line', lambda axes, points, *more: drawn.append(points))
    monkeypatch.setattr(figures, 'finish', lambda figure, *words: figure)
    ways = [(('radius', r),) for r in range(8)]
    figures.ablation_figure(points, ways, ways[7], 'title', 'return')
    assert drawn[0][5] == (pytest.approx(5 + 3), pytest.approx(deviation / 2), 4)
    assert drawn[1][5] == (pytest.approx(-2), pytest.approx(deviation / math.sqrt(2)), 4)
    assert drawn[1][7][0] == 0.0 and math.isnan(drawn[1][7][1])


def test_tables_have_the_papers_layout_and_points(tmp_path):
    """Also of solve rates, of the best allocation of each depth; the seed that tuned is in none."""
    shown = tmp_path / 'shown'
    argv = ['--plan=sokoban-small', '--only=L=1,2', '--seeds=2', f'--out_dir={tmp_path}']
    argv.append('--tune=gamma=0.97')
    for _ in range(2):  # seed 1, then the others
        fake(rows := sized(*argv), lambda row: {128: 5.0, 64: 7.0, 32: 2.0}[row.d] + row.seed)
    for row in (row for row in rows if row.d == 64):  # the best: only these are looked at
        record = {'solve_rate': 0.5 + row.seed / 10, 'env_steps': sweep.total_of(row) * 640}
        (folder_of(row) / 'eval_unfiltered-test.json').write_text(json.dumps(record))
    argv += [f'--results={shown}', '--table=solve', '--figure']
    status, out, err = call(*argv, f'--reference={PAPER}')
    assert status == 0, err
    lines = (shown / 'table_convlstm.csv').read_text().splitlines()
    header = 'variant,budget,L,E,d,gamma,mean_return,variance,n_seeds,paper_mean,paper_variance'
    assert lines[:2] == [header, 'recurrent,small,1,1,128,0.97,7.5,0.5,2,7.75,0.0076']
    table = (shown / 'table_convlstm.md').read_text().splitlines()
    assert table[2] == f'| {lines[1].replace(",", " | ")} |'
    assert 'd = 64, paper' in (shown / 'allocations_convlstm.svg').read_text()
    lines = (shown / 'solve_convlstm.csv').read_text().splitlines()
    assert lines[0] == 'variant,budget,L,E,d,gamma,unfiltered_test_percent,std,n_seeds'
    assert lines[2] == 'recurrent,small,2,2,64,0.97,75,7.0711,2'
    assert '"recurrent, paper",small,1,1,128,,86.03,3.71,' in lines
    assert '"DRC(3,3), 2B, paper",,,,,,99.3,,' in lines


def test_solve_table_of_trained_agents(tmp_path):
    """Trains two tiny agents, and plays where no evaluation is there yet."""
    also = 'split=generated eval_split=generated n_levels=20 n_boxes=1 max_moves=12 n_envs=4 '
    also += 'unroll=5 head_dim=8 total_steps=1200 eval_interval=60 eval_games=6 log_interval=10 '
    argv = ['--plan=sokoban-small', '--only=L=1 d=8 model=convglu', '--width=0.0625', '--seeds=1']
    argv += [f'--also={also} compile=False device=cpu', f'--out_dir={tmp_path}', '--table=solve']
    status, out, err = call(*argv, '--run', '--workers=2')
    assert status == 0 and out.count('playing generated') == 2, out + err
    lines = (tmp_path / 'sokoban-small' / 'solve_convglu.csv').read_text().splitlines()
    assert lines[0] == 'variant,budget,L,E,d,held_out_percent,std,n_seeds' and len(lines) == 3
    assert 0 <= float(lines[1].split(',')[5]) <= 100 and lines[1].endswith(',,1')
