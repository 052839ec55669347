"""sweep.py: plans, checks before a sweep, running with failures and stops, tuning, tables.

Runs are made by a fake trainer, a script of a few lines that learns nothing: `--script` is how a
user's own trainer takes its place. One test each runs the real trainers."""

import csv
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

import data_fineweb
import figures
import sweep
from configurator import configure, read_script

ROOT = Path(__file__).resolve().parent.parent
PAPER = ROOT / 'results' / 'paper'

FAKE = '''
"""A trainer with the settings and files of train_lm.py that learns nothing."""
import json, os, signal, sys, time
from configurator import configure

out_dir = 'out/lm'
data_dir = 'data'
tokenizer = 'bytes'
tokens_per_step = 64
block_size = 8
val_tokens = 64
val_streams = 2
recurrent = True
n_layer = 2
n_expert = 8
n_embd = 32
n_head = 2
window = 8
residual = 'expert'
share_kv = True
init_b = 'one'
max_iters = 8
warmup_iters = 2
eval_interval = 4
batch_size = 0
learning_rate = 0.02
seed = 1
resume = False
overwrite = False
pause = 0.0           # seconds per update

config = configure(globals(), quiet=True)
if str(n_layer) in os.environ.get('FAILS', '').split():
    print(f'error: n_layer = {n_layer}: does not fit into {out_dir}', file=sys.stderr)
    raise SystemExit(2)
os.makedirs(out_dir, exist_ok=True)
with open(f'{out_dir}/config.json', 'w') as file:
    json.dump(config, file)
path, stopped = f'{out_dir}/log.jsonl', []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
done = len(open(path).readlines()) if resume else 0
with open(path, 'a' if resume else 'w') as file:
    for step in range(done, max_iters + 1):
        time.sleep(pause)
        loss = 3 - 0.1 * n_layer + 0.01 * seed + (learning_rate - 0.04) ** 2
        line = {'step': step, 'tokens': 64 * step, 'seconds': 0.1 * step, 'val_loss': loss}
        file.write(json.dumps(line) + chr(10))
        file.flush()
        if stopped:
            break
open(f'{out_dir}/ckpt_last.pt', 'w').write('weights')
raise SystemExit(143 if stopped else 0)
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Arguments of plan lm-small with the fake trainer, on two small shards."""
    data = tmp_path / 'data'
    data.mkdir()
    for name in ('val_000000', 'train_000001'):
        data_fineweb.write_shard(data / f'fineweb_{name}.bin', np.arange(200) % 100)
    meta = {'tokenizer': 'bytes', 'source': 'test', 'shards': []}
    (data / 'meta.json').write_text(json.dumps(meta))
    (tmp_path / 'fake.py').write_text(FAKE)
    (tmp_path / 'base.py').write_text(f'data_dir = {str(data)!r}\n')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    out, paths = tmp_path / 'out', (f'--script={tmp_path}/fake.py', f'--base={tmp_path}/base.py')
    return ['--plan=lm-small', f'--out_dir={out}', '--width=0.03125', *paths]


def settle(*argv):
    """Apply sweep's settings in this process."""
    sweep.base_config.cache_clear()
    sweep.cost_of_cell.cache_clear()
    configure(vars(sweep), [str(word) for word in argv], quiet=True)


def rows_of(*argv):
    settle(*argv)
    return sweep.plan_rows()


def main(monkeypatch, *argv):
    """Run sweep.py with these arguments in this process, and return its exit status."""
    settle()
    monkeypatch.setattr(sys, 'argv', ['sweep.py', *map(str, argv)])
    return sweep.main()


def folder_of(row):
    return Path(sweep.folder_of(row))


def write_finished(rows, value=lambda row: 1.0):
    """Write the folders of finished runs; value(row) is their return or loss."""
    for row in rows:
        n, lines = sweep.updates_of(row), []
        for k in range(8):
            record = {'step': n * k // 7, 'seconds': 1.0}
            if row.is_text:
                record |= {'tokens': record['step'], 'val_loss': value(row) if k == 7 else 9.0}
            else:  # the mean of the last five is the value
                returns = [None, -100.0, -100.0, *(value(row) + i for i in range(-2, 3))]
                record |= {'env_steps': record['step'] * 640, 'episodic_return': returns[k]}
                record |= {'return_1000': value(row) if k else None}
            lines.append(json.dumps(record) + '\n')
        folder_of(row).mkdir(parents=True, exist_ok=True)
        (folder_of(row) / 'config.json').write_text(json.dumps(sweep.config_of(row)))
        (folder_of(row) / 'log.jsonl').write_text(''.join(lines))


def sizes(row):
    return row.L, row.E, row.d


# ---- plans ----


def test_convlstm_plans_are_the_papers_84_rows_at_any_width():
    ours = []
    for budget in ('small', 'medium', 'large'):
        rows = rows_of(
            f'--plan=sokoban-{budget}', '--only=model=convlstm', '--seeds=1', '--width=0.5'
        )
        ours += [(r.recurrent, r.budget, r.L, r.E, 2 * r.d) for r in rows]
    with open(PAPER / 'sokoban_returns.csv') as file:
        paper = [
            (r['variant'] == 'recurrent', r['budget'], int(r['L']), int(r['E']), int(r['d']))
            for r in csv.DictReader(file)
        ]
    assert len(ours) == 84 and sorted(paper) == sorted(ours)


def test_convglu_plan():
    rows = rows_of('--plan=sokoban-small', '--only=model=convglu variant=nonrecurrent', '--seeds=1')
    one_layer = [(1, 1, 128), (1, 4, 64), (1, 16, 32)]
    deeper = [(2, 2, 64), (2, 8, 32), (4, 1, 64), (4, 4, 32), (8, 2, 32), (16, 1, 32)]
    assert [sizes(row) for row in rows] == one_layer + deeper


def test_language_models_cost_16_blocks():
    rows = rows_of('--plan=lm-small')
    D, W = 768, 128
    block = 2 * (2 * D * D + 2 * D * D // 2 + 8 * D * D) + 4 * W * D
    assert sweep.budget_of('transformer', True, 'small') == 16 * block
    assert sweep.budget_of('transformer', False, 'small') == 16 * (block + 4 * (257 / 2 - W) * D)
    for recurrent in (True, False):
        found = {sizes(row) for row in rows if row.recurrent == recurrent}
        assert {(L, 16 // L, 768) for L in (1, 2, 4, 8, 16)} | {(1, 4, 1536), (1, 62, 384)} < found
        # half an expert rounded up would cost 1.97 budgets
        assert (16, 1, 1536) not in found and (8, 1, 1536) not in found
    assert len(rows) == 26 and all(0.9 < sweep.over_budget(row) < 1.1 for row in rows)


def test_plan_lm_has_the_runs_of_its_budgets():
    rows = rows_of('--plan=lm')
    folders = {sweep.folder_of(row) for row in rows}
    parts = {
        sweep.folder_of(row)
        for part in ('lm-small', 'lm-medium')
        for row in rows_of(f'--plan={part}')
    }
    assert folders == parts and len(rows) == 58
    depths = [row.L for row in rows_of('--plan=lm-medium', '--only=d=768 variant=recurrent')]
    assert depths == [1, 2, 4, 8, 16, 32]


def test_the_reduced_scaling_plan_is_a_part_of_the_whole_one():
    whole = {sweep.folder_of(row) for row in rows_of('--plan=scaling')}
    part = {sweep.folder_of(row) for row in rows_of('--plan=scaling-reduced')}
    assert len(whole) == 392 and len(part) == 54 and part < whole


def test_the_residual_plan_has_the_cells_that_decide():
    rows = rows_of('--plan=residual', '--seeds=1')
    assert {row.more for row in rows} == {(('residual', 'expert'),), (('residual', 'shared'),)}
    text = {sizes(row) for row in rows if row.is_text}
    assert text == {(2, 8, 768), (4, 4, 768), (8, 2, 768), (16, 4, 384)}
    agents = {(row.recurrent, *sizes(row)) for row in rows if not row.is_text}
    assert agents == {(r, *cell) for r in (True, False) for cell in ((2, 2, 128), (8, 2, 32))}


def test_residual_changes_the_allocations_in_which_it_matters(tmp_path):
    """Those with several experts of a non-recurrent model; the others' runs are shared."""
    argv = ['--plan=lm-small', f'--out_dir={tmp_path}']
    default = {sweep.folder_of(row) for row in rows_of(*argv)}
    shared = rows_of(*argv, '--residual=shared')
    changed = [row for row in shared if sweep.folder_of(row) not in default]
    assert changed == [row for row in shared if not row.recurrent and row.E > 1]
    assert all(sweep.config_of(row)['residual'] == 'shared' for row in changed)


@pytest.mark.parametrize('plan', sweep.PLANS)
def test_names_are_unique_and_seeds_come_in_rounds(plan):
    rows = rows_of(f'--plan={plan}')
    assert len({row.name for row in rows}) == len(rows) or plan in sweep.SATURATION
    assert len({sweep.folder_of(row) for row in rows}) == len(rows)
    assert [row.seed for row in rows] == sorted(row.seed for row in rows)


def test_runs_under_the_former_name_of_the_variant_are_found(tmp_path):
    (row,) = rows_of(
        '--plan=lm-small', f'--out_dir={tmp_path}', '--only=variant=feedforward L=16 d=768'
    )
    former = tmp_path / 'lm-small' / 'transformer_feedforward_L16_E1_d768_s1'
    former.mkdir(parents=True)
    assert folder_of(row) == former


# ---- the table of the paper, lists, jobs ----


def test_no_plan_prints_a_command_for_every_figure_and_table(tmp_path, monkeypatch, capsys):
    """Each command is one that the scripts' settings take."""
    assert main(monkeypatch, f'--out_dir={tmp_path}') == 0
    out = capsys.readouterr().out
    for words in 'saturation|scaling|aggregation|radius|probes|latency|throughput|convglu'.split(
        '|'
    ):
        assert words in out.lower(), words
    lines = sweep.paper_table()
    named = {
        word[7:] for line in lines for word in shlex.split(line['command']) if word[:7] == '--plan='
    }
    assert named == set(sweep.PLANS)
    for line in lines:
        for command in line['command'].split(' && '):
            words = shlex.split(command)
            k = next(k for k, word in enumerate(words) if word.endswith('.py'))
            defaults = read_script(ROOT / words[k])[0]
            assert {word[2:].partition('=')[0] for word in words[k + 1 :] if word[:2] == '--'} <= {
                *defaults
            }


def test_the_table_counts_finished_runs(tmp_path, monkeypatch):
    write_finished(rows_of('--plan=share-kv', f'--out_dir={tmp_path}')[:2])
    plans = ('share-kv', 'aggregation', 'init-b')
    entries = [sweep.Entry(title='', plan=name, only='model=transformer') for name in plans]
    monkeypatch.setattr(sweep, 'PAPER', entries)
    unknown = ('no_setting', [1, 2], sweep.ABLATIONS['init-b'][2])
    monkeypatch.setitem(sweep.ABLATIONS, 'init-b', unknown)
    states = [line['state'] for line in sweep.paper_table()]
    assert states == ['2 of 6 done', 'not run', 'needs a setting no_setting']


def test_hours_are_those_of_the_planned_speeds():
    """The model of a GPU gives the speeds that the project plans with, within a quarter."""
    only = '--only=model=convlstm variant=recurrent d=128,64'
    agent, _, _, deeper = rows_of('--plan=sokoban-small', only, '--seeds=1')
    assert sizes(agent) == (1, 1, 128) and sizes(deeper) == (4, 1, 64)
    assert 50e6 / 3600 / sweep.modeled_hours(agent) == pytest.approx(55600, rel=0.25)
    assert 50e6 / 3600 / sweep.modeled_hours(deeper) == pytest.approx(27800, rel=0.25)
    (row,) = rows_of('--plan=lm-small', '--only=variant=recurrent L=2 d=768', '--also=val_tokens=1')
    assert 1.31072e9 / 3600 / sweep.modeled_hours(row) == pytest.approx(513e3, rel=0.25)


def test_a_list_has_a_command_per_run_that_its_script_takes(tmp_path, monkeypatch, capsys):
    """From any folder: what a plan names is looked for beside sweep.py too."""
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, '--plan=lm-small', '--only=d=768 L=16 variant=recurrent') == 0
    line = capsys.readouterr().out.splitlines()[2]
    words = shlex.split(line)
    k = words.index('python')
    assert words[1] == 'transformer_recurrent_L16_E1_d768_s1' and words[3] == '1.00'
    assert (tmp_path / words[k + 1]).samefile(ROOT / 'train_lm.py')
    config = configure({'__file__': words[k + 1]}, words[k + 2 :], quiet=True)
    assert config['n_layer'] == 16 and config['n_embd'] == 768


def test_jobs_are_quoted_and_run(fake, tmp_path, monkeypatch, capsys):
    """A folder's name is data in a shell line, whatever it holds; the Python is this one."""
    evil = tmp_path / "a b; touch x' $(touch y)"
    argv = [*fake, f'--out_dir={evil}', '--only=L=16 d=24 variant=recurrent']
    monkeypatch.chdir(ROOT)
    main(monkeypatch, *argv, '--emit=commands')
    python, script, *words = shlex.split(capsys.readouterr().out)
    assert python == sys.executable and Path(script).samefile(ROOT / 'sweep.py')
    assert main(monkeypatch, *words) == 0
    capsys.readouterr()
    assert (evil / 'lm-small' / 'transformer_recurrent_L16_E1_d24_s1' / 'ckpt_last.pt').exists()
    assert not any((folder / 'y').exists() for folder in (ROOT, tmp_path))
    main(monkeypatch, *argv, '--emit=slurm')
    job = capsys.readouterr().out
    assert job.startswith('#!/bin/bash') and '#SBATCH --array=0-0' in job
    assert shlex.quote(f'--out_dir={evil}') in job and f'exec {sys.executable} sweep.py' in job
    assert subprocess.run(['bash', '-n'], input=job, text=True).returncode == 0


MISTAKES = """
--plan=nonsense | nonsense lm-small share-kv
--plan= --run | plan is empty lm-small
--only=L=3 | leaves none L 1, 2, 4, 8, 16
--only=depth=3 | 'depth' is none of E, L
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
--script=no_trainer.py | script = 'no_trainer.py' no such file
--plan=aggregation --script=train_lm.py | script agents and language models --only=model
--also=data_dir=/nowhere --run | no train shards in '/nowhere' data_fineweb.py
--plan=sokoban-small --also=levels_dir=/nowhere --run | /nowhere --download
"""


@pytest.mark.parametrize('line', MISTAKES.strip().splitlines())
def test_mistakes_are_one_line_and_leave_nothing(line, tmp_path, monkeypatch, capsys):
    argv, words = line.split(' | ')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(monkeypatch, '--plan=lm-small', f'--out_dir={tmp_path}/none', *argv.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith('error: ') and error.count('\n') == 1
    assert all(word in error for word in words.split()), error
    assert not (tmp_path / 'none').exists()


# ---- before a sweep ----


def test_a_full_disk_is_found_before_the_first_run(fake, monkeypatch, capsys):
    usage = type('Usage', (), {'free': 10**6})
    monkeypatch.setattr(sweep.shutil, 'disk_usage', lambda path: usage)
    with pytest.raises(SystemExit):
        main(monkeypatch, *fake, '--run')
    assert '0.0 GB are free' in capsys.readouterr().err


def test_levels_are_downloaded_once_for_all_workers(tmp_path, monkeypatch):
    rows = rows_of(
        '--plan=sokoban-small', f'--also=levels_dir={tmp_path} download=True', '--only=L=1'
    )
    fetched = []
    monkeypatch.setattr(sweep, 'load_levels', lambda *args: fetched.append(args))
    sweep.check_data(rows)
    splits = ('unfiltered-train', 'unfiltered-valid')
    assert fetched == [(str(tmp_path), split, True) for split in splits]


def test_hours_are_measured_before_a_sweep(fake, monkeypatch, capsys):
    """0.1 s per update in the fake trainer's log, 8 updates, 5 runs two at a time."""
    argv = [*fake, '--only=variant=recurrent d=24', '--workers=2', '--run', '--measure']
    assert main(monkeypatch, *argv) == 0
    out = capsys.readouterr().out
    assert '0.1 s per update' in out and 'hours with 2 at a time' in out


def test_workers_and_gpus(monkeypatch):
    cases = [  # GPUs, CUDA_VISIBLE_DEVICES, settings, each worker's
        (0, '', '--workers=3', ['', '', '']),
        (4, '', '--gpus_per_run=2', ['0,1', '2,3']),
        (2, '6,7', '--workers=4', ['6', '7', '6', '7']),
        (4, '', '--index=6 --workers=1', ['2']),
    ]
    for gpus, visible, words, expected in cases:
        settle('--plan=lm-small', *words.split())
        monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda gpus=gpus: gpus)
        monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
        if visible:
            monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
        assert sweep.devices() == expected


# ---- running ----


def test_run_skips_resumes_and_survives_a_failure(fake, tmp_path, monkeypatch, capsys):
    argv = [*fake, '--only=L=1,2 d=24', '--workers=2', '--run']
    monkeypatch.setenv('FAILS', '2')
    assert main(monkeypatch, *argv) == 1
    monkeypatch.setenv('FAILS', '')
    out, rows = capsys.readouterr().out, sweep.plan_rows()
    assert '4 runs, 0 finished before' in out and out.count(': done') == 2, out
    bad = next(row for row in rows if row.L == 2)
    assert f'{bad.name}: FAILED (exit status 2): error: n_layer = 2: does not fit' in out
    assert f'failed: {bad.name}' in out
    assert json.loads((folder_of(bad) / 'failed.json').read_text())['exit'] == 2

    finished, cut = (row for row in rows if row.L == 1)
    before = (folder_of(finished) / 'log.jsonl').stat().st_mtime_ns
    lines = (folder_of(cut) / 'log.jsonl').read_text().splitlines()
    (folder_of(cut) / 'log.jsonl').write_text('\n'.join(lines[:5]) + '\n')
    # batch_size says how a run is run, and makes no other run of it
    status = main(monkeypatch, *argv, '--also=batch_size=2', '--table')
    out = capsys.readouterr().out
    assert status == 0 and '1 finished before' in out and 'FAILED' not in out, out
    assert not (folder_of(bad) / 'failed.json').exists()
    assert [record['step'] for record in figures.read_log(folder_of(cut))] == list(range(9))
    assert (folder_of(finished) / 'log.jsonl').stat().st_mtime_ns == before
    names = {path.name for path in (tmp_path / 'out/lm-small').glob('*.*')}
    assert {'table_transformer.csv', 'table_transformer.md', 'runs.json'} <= names
    with pytest.raises(SystemExit):
        main(monkeypatch, *argv, '--length=2')
    assert 'a run with other settings' in capsys.readouterr().err


def test_three_failures_alike_stop_the_sweep(fake, monkeypatch, capsys):
    """Numbers and folders do not tell two failures apart; a run in between that is done does."""
    argv = [*fake, '--only=d=24 variant=recurrent', '--run']
    monkeypatch.setenv('FAILS', '1 2 4 8 16')
    assert main(monkeypatch, *argv) == 1
    out = capsys.readouterr().out
    assert out.count('] transformer') == 3  # a line for each that has ended
    assert '3 runs in a row failed alike: 2 others are not started' in out
    monkeypatch.setenv('FAILS', '1 2 8 16')
    assert main(monkeypatch, *argv) == 1
    assert capsys.readouterr().out.count('] transformer') == 5


def test_ctrl_c_saves_and_the_next_call_resumes(fake, monkeypatch, capsys):
    argv = [*fake, '--only=L=16 d=24', '--run', '--workers=2', '--also=pause=0.05 max_iters=100000']
    rows, steps = rows_of(*argv), {}
    logs = {row: folder_of(row) / 'log.jsonl' for row in rows}

    def lines_of(row):  # of the file alone: sweep.py's settings change in this process meanwhile
        return logs[row].read_text().count('\n') if logs[row].exists() else 0

    for number in (signal.SIGINT, signal.SIGTERM):

        def interrupt(number=number):
            while any(lines_of(row) < steps.get(row, 0) + 4 for row in rows):
                time.sleep(0.05)
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=interrupt)
        thread.start()
        status = main(monkeypatch, *argv)
        thread.join()
        assert status == 128 + number and 'the same command resumes' in capsys.readouterr().out
        for row in rows:
            found = [record['step'] for record in figures.read_log(folder_of(row))]
            assert found == list(range(len(found))) and found[-1] > steps.get(row, 0)
            assert sweep.state_of(row) == ''
            steps[row] = found[-1]


def test_nothing_finished_is_overwritten(fake, monkeypatch, capsys):
    """Nor what another process works on, or a damaged log."""
    (row,) = rows_of(*fake, '--only=L=1 d=24 variant=recurrent')
    folder, log = folder_of(row), folder_of(row) / 'log.jsonl'
    folder.mkdir(parents=True)
    with FileLock(folder / '.lock'):
        assert sweep.execute([row]) == 1
    assert 'another process is at work on it' in capsys.readouterr().out
    with sweep.lock_folder(folder):  # a run whose sweep was killed
        assert sweep.start(row, '', 1) is None
    write_finished([row])
    assert sweep.start(row, '', 1) is None  # another process may have finished it meanwhile
    (folder / 'config.json').write_text('{')
    assert sweep.state_of(row) == 'done' and len(sweep.finished([row])) == 1
    text = '#' + log.read_text()
    log.write_text(text)
    assert sweep.state_of(row) == 'damaged' and sweep.finished([row]) == []
    assert 'a log that cannot be used: skipped' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.execute([row])
    assert log.read_text() == text


# ---- tuning ----


def rate_of(row):
    return dict(row.more)['learning_rate']


def test_the_best_value_by_seed_1_is_reported_by_other_seeds(fake, tmp_path, monkeypatch, capsys):
    argv = [*fake, '--only=L=1,4 d=24', '--seeds=2', '--tune=learning_rate=0.02,0.04,0.04,0.05,1']
    rows = rows_of(*argv)
    cells = [(recurrent, L) for recurrent in (True, False) for L in (1, 4)]
    found = [(row.recurrent, row.L, rate_of(row), row.seed) for row in rows]
    assert found == [(*cell, rate, 1) for cell in cells for rate in (0.02, 0.04, 0.05, 1.0)]

    loss = {0.02: 3.0, 0.04: 2.0, 0.05: 2.5}
    of_seeds = {
        (True, 1): (2.0, 2.2),
        (True, 4): (2.1, 2.3),
        (False, 1): (4, 4),
        (False, 4): (3, 3),
    }

    def value(row):
        return of_seeds[row.recurrent, row.L][row.seed - 2] if row.seed > 1 else loss[rate_of(row)]

    write_finished([row for row in rows if rate_of(row) in loss], value)
    assert rows_of(*argv) == rows  # some are missing
    for row in rows[3::4]:  # a rate too high for them
        folder_of(row).mkdir(parents=True)
        (folder_of(row) / 'failed.json').write_text('{}')
    main(monkeypatch, *argv, '--table')
    assert 'one seed per value so far' in capsys.readouterr().out
    grown = rows_of(*argv)
    assert grown[:16] == rows  # jobs' numbers stay
    more = [(row.recurrent, row.L, rate_of(row), row.seed) for row in grown[16:]]
    assert more == [(*cell, 0.04, seed) for seed in (2, 3) for cell in cells]

    write_finished(grown[16:], value)
    main(monkeypatch, *argv, '--table')
    folder = tmp_path / 'out/lm-small'
    with open(folder / 'table_transformer.csv') as file:
        first = next(csv.DictReader(file))
    assert (first['learning_rate'], first['n_seeds']) == ('0.04', '2')
    assert float(first['mean_loss']) == pytest.approx(2.1)
    # L = 4's mean of two draws is the smaller in 1 of 16; by t, Cauchy errors, in 1/2 - atan(.5)/pi
    words = (folder / 'table_transformer.md').read_text().splitlines()[-1]
    assert 'recurrent 1 (95%: 1 to 4), non-recurrent 4 (95%: 4 to 4)' in words
    smaller, equal, by_t = (float(x[:-2]) for x in words.split() if x[-2:] in ('%,', '%.'))
    assert 92.5 < smaller < 95 and abs(smaller + equal - 100) < 0.01 and 63 < by_t < 66.5
    saved = json.loads((folder / 'runs.json').read_text())
    assert saved['best_transformer'] == words and len(saved['runs']) == 20
    assert sum(run['reported'] for run in saved['runs']) == 8


def test_tuning_continues_beyond_an_edge(fake):
    """The higher, the better, but for L = 1, which wants the lowest: three rates more for each."""
    argv = [*fake, '--only=L=1,4 d=24 variant=recurrent', '--tune=learning_rate=0.02,0.04']
    rows = rows_of(*argv)
    for n in (4, 6, 8, 10):
        assert len(rows) == n and all(row.seed == 1 for row in rows)
        new = rows[n - 2 :] if n > 4 else rows
        write_finished(new, lambda row: rate_of(row) * (1 if row.L == 1 else -1))
        rows = rows_of(*argv)
    more = [(1, 0.01), (4, 0.08), (1, 0.005), (4, 0.16), (1, 0.0025), (4, 0.32)]
    assert [(row.L, rate_of(row)) for row in rows[4:10]] == more
    assert [(row.L, rate_of(row), row.seed) for row in rows[10:]] == [(1, 0.0025, 2), (4, 0.32, 2)]


def test_tuning_runs_the_other_seeds_in_the_same_call(fake, monkeypatch, capsys):
    argv = [*fake, '--only=L=8 d=24 variant=recurrent', '--tune=learning_rate=0.03,0.04,0.05']
    assert main(monkeypatch, *argv, '--run') == 0
    out = capsys.readouterr().out
    assert out.count(': done') == 4 and 'learning_rate-0.04_s2: done' in out


# ---- values, figures, tables ----


def test_saturation_is_the_best_of_at_most_L(tmp_path):
    only = '--only=model=convlstm variant=recurrent'
    rows = rows_of('--plan=sokoban-small', only, f'--out_dir={tmp_path}', '--seeds=2')
    rows = [row for row in rows if (row.L, row.d, row.seed) != (1, 128, 2)]  # one lucky seed
    means = {1: 3.0, 2: 8.0, 4: 5.0, 8: 9.0, 16: 1.0}
    write_finished(rows, lambda row: means[row.L] + row.seed - row.d / 1000 + (row.d == 128))
    found = figures.saturation(figures.summarize_cells(sweep.finished(rows)))
    best = dict(zip(means, (3, 8, 8, 9, 9), strict=True))
    for L, (mean, error, n) in found.items():
        assert mean == pytest.approx(best[L] + 1.5 - 0.032)
        assert error == pytest.approx(0.5) and n == 2


@pytest.mark.parametrize(
    'plan, model',
    [('scaling-reduced', 'convglu'), ('share-kv', 'transformer'), ('lm', 'transformer')],
)
def test_a_plans_figures_are_drawn(plan, model, tmp_path, monkeypatch):
    """Also with a run missing: the default of L = 1, against which nothing may be drawn then."""
    argv = [f'--plan={plan}', f'--only=model={model} L=1,2', f'--out_dir={tmp_path}']
    rows = rows_of(*argv)
    rows = [row for row in rows if (row.L, row.more) != (1, (('share_kv', True),))]
    write_finished(rows, lambda row: row.L + row.seed / 10 + row.recurrent)
    assert main(monkeypatch, *argv, '--figure') == 0
    assert len(list((tmp_path / plan).glob('*.svg'))) >= 1


def test_the_other_residual_rule_is_drawn_as_allocations(tmp_path, monkeypatch):
    argv = ['--plan=lm-small', f'--out_dir={tmp_path}', '--residual=shared', '--only=L=1,2']
    write_finished(rows_of(*argv), lambda row: row.L + row.d / 1000)
    assert main(monkeypatch, *argv, '--figure', '--table') == 0
    folder = tmp_path / 'lm-small/residual-shared'
    assert 'shared residual' in (folder / 'allocations_transformer.svg').read_text()
    runs = json.loads((folder / 'runs.json').read_text())['runs']
    assert all(run['reported'] for run in runs) and len(runs) == 12


def test_ablations_have_standard_errors(tmp_path):
    """Values with their errors, and differences to the default with theirs."""
    rows = rows_of('--plan=communication', f'--out_dir={tmp_path}', '--seeds=4')
    write_finished(rows, lambda row: dict(row.more)['radius'] + [0, 2, 4, 6][row.seed - 1])
    cells = figures.summarize_cells(sweep.finished(rows))
    points = {dict(row.more)['radius']: point for row, point in cells.items()}
    deviation = math.sqrt(20 / 3)
    assert figures.with_standard_errors(points)[5] == (
        pytest.approx(5 + 3),
        pytest.approx(deviation / 2),
        4,
    )
    differences = figures.differences(points, 7)
    assert differences[5] == (pytest.approx(-2), pytest.approx(deviation / math.sqrt(2)), 4)
    assert differences[7][0] == 0.0 and math.isnan(differences[7][1])


def test_tables_have_the_papers_values(tmp_path, monkeypatch):
    """Also of solve rates, of the best allocation of each depth; the seed that tuned is in none."""
    argv = ['--plan=sokoban-small', '--only=L=1,2', '--seeds=2', f'--out_dir={tmp_path}']
    argv.append('--tune=gamma=0.97')
    for _ in range(2):  # seed 1, then the others
        rows = rows_of(*argv)
        write_finished(rows, lambda row: {128: 5.0, 64: 7.0, 32: 2.0}[row.d] + row.seed)
    for row in (row for row in rows if row.d == 64):  # the best: only these are evaluated
        record = {'solve_rate': 0.5 + row.seed / 10, 'env_steps': sweep.updates_of(row) * 640}
        (folder_of(row) / 'eval_unfiltered-test.json').write_text(json.dumps(record))
    shown = tmp_path / 'shown'
    argv += [f'--results={shown}', '--table=solve', f'--reference={PAPER}']
    assert main(monkeypatch, *argv) == 0
    with open(shown / 'table_convlstm.csv') as file:
        first = next(csv.DictReader(file))
    assert [float(first[key]) for key in ('gamma', 'mean_return', 'variance')] == [0.97, 7.5, 0.5]
    assert (first['n_seeds'], first['paper_mean'], first['paper_variance']) == (
        '2',
        '7.75',
        '0.0076',
    )
    with open(shown / 'solve_convlstm.csv') as file:
        lines = list(csv.DictReader(file))
    ours = [line for line in lines if 'paper' not in line['variant']]
    assert [float(line['unfiltered_test_percent']) for line in ours[:2]] == [75, 75]
    paper = {line['unfiltered_test_percent'] for line in lines if 'paper' in line['variant']}
    assert {'86.03', '99.3'} <= paper


FAKE_AGENT = '''
"""An agent's trainer that solves three quarters of its levels."""
import json, os
from configurator import configure

out_dir = 'out/sokoban'
split = 'generated'
eval_split = 'generated'
levels_dir = ''
download = False
levels = ''
eval_only = False
overwrite = False
arch = 'convglu'
recurrent = True
n_layer = 1
n_expert = 1
n_embd = 8
head_dim = 8
n_envs = 4
unroll = 5
total_steps = 100
eval_games = 6
seed = 1

config = configure(globals(), quiet=True)
os.makedirs(out_dir, exist_ok=True)
if eval_only:
    record = {'solve_rate': 0.75, 'env_steps': 100, 'n': eval_games}
    with open(f'{out_dir}/eval_{levels or eval_split}.json', 'w') as file:
        json.dump(record, file)
else:
    with open(f'{out_dir}/config.json', 'w') as file:
        json.dump(config, file)
    with open(f'{out_dir}/log.jsonl', 'w') as file:
        for step in range(6):
            record = {'step': step, 'env_steps': 20 * step, 'episodic_return': 1.0}
            file.write(json.dumps(record | {'seconds': 1.0}) + chr(10))
'''


def test_agents_are_evaluated_for_the_table_of_solve_rates(tmp_path, monkeypatch):
    """Where no evaluation is there yet."""
    (tmp_path / 'agent.py').write_text(FAKE_AGENT)
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    argv = ['--plan=sokoban-small', '--only=L=1,2 d=8,4 model=convglu', '--width=0.0625']
    argv += [f'--script={tmp_path}/agent.py', f'--out_dir={tmp_path}/out', '--seeds=1']
    assert main(monkeypatch, *argv, '--run', '--table=solve') == 0
    with open(tmp_path / 'out/sokoban-small/solve_convglu.csv') as file:
        lines = list(csv.DictReader(file))
    assert [line['L'] for line in lines] == ['1', '2', '1', '2']
    for line in lines:
        assert [float(x) for name, x in line.items() if name.endswith('_percent')] == [75.0]


# ---- the real trainers ----


@pytest.mark.long
def test_agents_are_trained_and_evaluated(tmp_path, monkeypatch, capsys):
    """Where no evaluation is there yet; its levels are generated."""
    also = """split=generated eval_split=generated n_levels=20 n_boxes=1 max_moves=12 n_envs=4
        unroll=5 head_dim=8 total_steps=1200 eval_interval=60 eval_games=6 log_interval=10
        compile=False device=cpu threads=1"""
    argv = ['--plan=sokoban-small', '--only=L=1 d=8 model=convglu variant=recurrent']
    argv += ['--width=0.0625', '--seeds=1', f'--also={" ".join(also.split())}']
    argv += [f'--out_dir={tmp_path}', '--table=solve', '--run']
    assert main(monkeypatch, *argv) == 0, capsys.readouterr()
    with open(tmp_path / 'sokoban-small' / 'solve_convglu.csv') as file:
        (line,) = csv.DictReader(file)
    rates = [float(x) for name, x in line.items() if name.endswith('_percent')]
    assert len(rates) == 1 and 0 <= rates[0] <= 100 and line['n_seeds'] == '1'


@pytest.mark.long
def test_a_language_model_is_trained(fake, monkeypatch, capsys):
    also = """n_head=2 window=12 block_size=8 tokens_per_step=64 max_iters=3 warmup_iters=1
        val_tokens=64 val_streams=2 tokenizer=bytes compile=False dtype=float32
        device=cpu threads=1"""
    argv = [word for word in fake if '--script' not in word]
    argv += ['--only=L=16 d=24 variant=recurrent', f'--also={" ".join(also.split())}', '--run']
    assert main(monkeypatch, *argv) == 0, capsys.readouterr()
    (row,) = sweep.plan_rows()
    assert sweep.state_of(row) == 'done'
