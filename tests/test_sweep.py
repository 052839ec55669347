"""Test sweep.py: plans, checks before a sweep, running with failures and stops, tuning, tables.

A fake trainer that learns nothing stands in for train_lm.py, by --script. One test for each of the
real trainers runs it."""

import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock
from processes import ROOT
from small_runs import LM, train_lm_as_rank

import data_fineweb
import figures
import sweep
from configurator import configure, read_script

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
    json.dump({**config, 'script': os.path.basename(__file__)}, file)
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
    """Return arguments for plan lm-small with the fake trainer, on two small shards."""
    data = tmp_path / 'data'
    data.mkdir()
    for name in ('val_000000', 'train_000001'):
        data_fineweb.write_shard(data / f'fineweb_{name}.bin', np.arange(200) % 100)
    meta = {'tokenizer': 'bytes', 'source': 'test', 'shards': []}
    data_fineweb.write_meta(data, meta)
    (tmp_path / 'fake.py').write_text(FAKE)
    (tmp_path / 'base.py').write_text(f'data_dir = {str(data)!r}\n')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    paths = [f'--script={tmp_path}/fake.py', f'--base={tmp_path}/base.py']
    return ['--plan=lm-small', f'--out_dir={tmp_path}/out', '--width=0.03125', *paths]


def apply_settings(*argv):
    """Apply the settings of sweep.py in this process."""
    sweep.base_config.cache_clear()
    sweep.cost_of_cell.cache_clear()
    configure(vars(sweep), map(str, argv), quiet=True)


def rows_of(*argv):
    """Return the rows of the plan that these arguments select."""
    apply_settings(*argv)
    return sweep.plan_rows()


def main(monkeypatch, *argv):
    """Run sweep.py with these arguments in this process, and return its exit status."""
    apply_settings()
    monkeypatch.setattr(sys, 'argv', ['sweep.py', *map(str, argv)])
    return sweep.main()


def folder_of(row):
    return Path(sweep.folder_of(row))


def write_finished(rows, value=lambda row: 1.0):
    """Write the folders of finished runs. value(row) is the final validation loss of a language
    model, or the mean of the last five returns of an agent."""
    for row in rows:
        x, records = value(row), []
        losses = [9.0] * 7 + [x]
        returns = [None, -100.0, -100.0, x - 2, x - 1, x, x + 1, x + 2]
        for k in range(8):
            step = sweep.updates_of(row) * k // 7
            record = {'step': step, 'seconds': 1.0}
            if row.is_text:
                record |= {'tokens': step, 'val_loss': losses[k]}
            else:
                record |= {'env_steps': step * 640, 'episodic_return': returns[k]}
                record |= {'return_1000': x if k else None}
            records.append(json.dumps(record) + '\n')
        folder_of(row).mkdir(parents=True, exist_ok=True)
        config = sweep.config_of(row) | {'script': os.path.basename(sweep.script_of(row))}
        (folder_of(row) / 'config.json').write_text(json.dumps(config))
        (folder_of(row) / 'log.jsonl').write_text(''.join(records))


def sizes_of(row):
    return row.L, row.E, row.d


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


# ---- plans ----


def test_convlstm_plans_are_the_papers_84_rows_at_any_width():
    found = []
    for budget in ('small', 'medium', 'large'):
        argv = [f'--plan=sokoban-{budget}', '--only=model=convlstm', '--seeds=1', '--width=0.5']
        found += [(row.recurrent, row.budget, row.L, row.E, 2 * row.d) for row in rows_of(*argv)]
    paper = []
    for row in read_csv(PAPER / 'sokoban_returns.csv'):
        sizes = (int(row[name]) for name in 'LEd')
        paper.append((row['variant'] == 'recurrent', row['budget'], *sizes))
    assert len(found) == 84 and sorted(found) == sorted(paper)


def test_the_convglu_plan_has_all_allocations_of_its_budget():
    rows = rows_of('--plan=sokoban-small', '--only=model=convglu variant=nonrecurrent', '--seeds=1')
    one_layer = [(1, 1, 128), (1, 4, 64), (1, 16, 32)]
    deeper = [(2, 2, 64), (2, 8, 32), (4, 1, 64), (4, 4, 32), (8, 2, 32), (16, 1, 32)]
    assert [sizes_of(row) for row in rows] == one_layer + deeper


def test_language_models_cost_16_blocks():
    rows = rows_of('--plan=lm-small')
    D, W = 768, 128
    block = 2 * (2 * D * D + 2 * D * D // 2 + 8 * D * D) + 4 * W * D
    assert sweep.budget_of('transformer', True, 'small') == 16 * block
    assert sweep.budget_of('transformer', False, 'small') == 16 * (block + 4 * (257 / 2 - W) * D)
    for recurrent in (True, False):
        found = {sizes_of(row) for row in rows if row.recurrent == recurrent}
        assert {(L, 16 // L, 768) for L in (1, 2, 4, 8, 16)} | {(1, 4, 1536), (1, 62, 384)} < found
        # half an expert rounded up would cost 1.97 budgets
        assert (16, 1, 1536) not in found and (8, 1, 1536) not in found
    assert len(rows) == 26 and all(0.9 < sweep.budget_ratio(row) < 1.1 for row in rows)


def folders_of(plan):
    return {sweep.folder_of(row) for row in rows_of(f'--plan={plan}')}


def test_plan_lm_has_the_runs_of_its_budgets():
    assert folders_of('lm') == folders_of('lm-small') | folders_of('lm-medium')
    assert len(folders_of('lm')) == 58
    depths = [row.L for row in rows_of('--plan=lm-medium', '--only=d=768 variant=recurrent')]
    assert depths == [1, 2, 4, 8, 16, 32]


def test_the_reduced_scaling_plan_is_a_part_of_the_whole_one():
    whole, reduced = folders_of('scaling'), folders_of('scaling-reduced')
    assert len(whole) == 392 and len(reduced) == 54 and reduced < whole


def test_the_residual_plan_has_the_cells_that_decide():
    rows = rows_of('--plan=residual', '--seeds=1')
    assert {row.overrides for row in rows} == {(('residual', 'expert'),), (('residual', 'shared'),)}
    text = {sizes_of(row) for row in rows if row.is_text}
    assert text == {(2, 8, 768), (4, 4, 768), (8, 2, 768), (16, 4, 384)}
    agents = {(row.recurrent, *sizes_of(row)) for row in rows if not row.is_text}
    assert agents == {(r, *cell) for r in (True, False) for cell in ((2, 2, 128), (8, 2, 32))}


def test_residual_changes_non_recurrent_models_with_several_experts_only(tmp_path):
    """All other models compute the same by both rules, and have their runs in common."""
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


def split_command(command):
    """Return the script and the arguments of a shell command."""
    arguments = shlex.split(command)
    k = next(k for k, word in enumerate(arguments) if word.endswith('.py'))
    return arguments[k], arguments[k + 1 :]


def settings_in(arguments):
    """Return {name: value} of the arguments --name=value."""
    pairs = (word.removeprefix('--').partition('=') for word in arguments if word[:2] == '--')
    return {name: value for name, _, value in pairs}


def test_without_a_plan_the_commands_of_all_figures_and_tables_are_printed(
    tmp_path, monkeypatch, capsys
):
    assert main(monkeypatch, f'--out_dir={tmp_path}') == 0
    out = capsys.readouterr().out.lower()
    for topic in ('saturation', 'scaling', 'aggregation', 'radius', 'probes', 'latency'):
        assert topic in out
    assert 'throughput' in out and 'convglu' in out


def test_commands_of_the_papers_table_name_every_plan_and_only_known_settings():
    apply_settings()
    plans = set()
    for line in sweep.paper_table():
        for command in line['command'].split(' && '):
            script, arguments = split_command(command)
            settings = settings_in(arguments)
            assert settings.keys() <= read_script(ROOT / script)[0].keys()
            plans.add(settings.get('plan'))
    assert plans - {None} == set(sweep.PLANS)


def test_the_table_counts_finished_runs(tmp_path, monkeypatch):
    write_finished(rows_of('--plan=share-kv', f'--out_dir={tmp_path}')[:2])
    plans = ('share-kv', 'aggregation')
    entries = [sweep.Entry(title='', plan=name, only='model=transformer') for name in plans]
    monkeypatch.setattr(sweep, 'PAPER', entries)
    states = [line['state'] for line in sweep.paper_table()]
    assert states == ['2 of 6 done', 'not run']


def test_hours_are_those_of_the_planned_speeds():
    """The model of a GPU gives the speeds that the project plans with, within a quarter."""
    only = '--only=model=convlstm variant=recurrent d=128,64'
    agent, _, _, deeper = rows_of('--plan=sokoban-small', only, '--seeds=1')
    assert sizes_of(agent) == (1, 1, 128) and sizes_of(deeper) == (4, 1, 64)
    assert 50e6 / 3600 / sweep.modeled_hours(agent) == pytest.approx(55600, rel=0.25)
    assert 50e6 / 3600 / sweep.modeled_hours(deeper) == pytest.approx(27800, rel=0.25)
    (row,) = rows_of('--plan=lm-small', '--only=variant=recurrent L=2 d=768', '--also=val_tokens=1')
    assert 1.31072e9 / 3600 / sweep.modeled_hours(row) == pytest.approx(513e3, rel=0.25)


def test_a_list_has_a_command_per_run_that_works_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, '--plan=lm-small', '--only=d=768 L=16 variant=recurrent') == 0
    line = capsys.readouterr().out.splitlines()[2]
    _, name, _, cost, *_ = shlex.split(line)
    assert name == 'transformer_recurrent_L16_E1_d768_s1' and cost == '1.00'
    script, arguments = split_command(line)
    assert (tmp_path / script).samefile(ROOT / 'train_lm.py')
    config = configure({'__file__': script}, arguments, quiet=True)
    assert config['n_layer'] == 16 and config['n_embd'] == 768


# the name of a folder that would create a file y if a shell read it
HOSTILE = "a b; touch x' $(touch y)"


def test_printed_commands_quote_folders_and_run(fake, tmp_path, monkeypatch, capsys):
    argv = [*fake, f'--out_dir={tmp_path}/{HOSTILE}', '--only=L=16 d=24 variant=recurrent']
    monkeypatch.chdir(ROOT)
    main(monkeypatch, *argv, '--emit=commands')
    python, script, *arguments = shlex.split(capsys.readouterr().out)
    assert python == sys.executable and Path(script).samefile(ROOT / 'sweep.py')
    assert main(monkeypatch, *arguments) == 0
    folder = tmp_path / HOSTILE / 'lm-small' / 'transformer_recurrent_L16_E1_d24_s1'
    assert (folder / 'ckpt_last.pt').exists()
    assert not (ROOT / 'y').exists() and not (tmp_path / 'y').exists()


def test_a_slurm_job_quotes_folders_and_is_valid_shell(fake, tmp_path, monkeypatch, capsys):
    argv = [*fake, f'--out_dir={tmp_path}/{HOSTILE}', '--only=L=16 d=24 variant=recurrent']
    main(monkeypatch, *argv, '--emit=slurm')
    job = capsys.readouterr().out
    assert job.startswith('#!/bin/bash') and '#SBATCH --array=0-0' in job
    assert shlex.quote(argv[-2]) in job and f'exec {sys.executable} sweep.py' in job
    assert subprocess.run(['bash', '-n'], input=job, text=True).returncode == 0


MISTAKES = [  # arguments, parts of the message
    ('--plan=nonsense', ['nonsense', 'lm-small', 'share-kv']),
    ('--plan= --run', ['plan is empty', 'lm-small']),
    ('--plan= --script=train_lm.py', ["script = 'train_lm.py': needs a plan", 'lm-small']),
    ('--plan= --only=L=1', ["only = 'L=1': needs a plan"]),
    ('--plan= --tune=learning_rate=0.02', ["tune = 'learning_rate=0.02': needs a plan"]),
    ('--plan= --residual=shared', ["residual = 'shared': needs a plan"]),
    ('--plan=share-kv --residual=shared', ["residual = 'shared': is for the plans", 'lm-small']),
    ('--plan=scaling --residual=shared', ["residual = 'shared': is for the plans", 'lm-small']),
    ('--measure=maybe', ['measure', 'None, True, False']),
    ('--only=L=3', ['leaves none', 'L can be', '8', '16']),
    ('--only=depth=3', ["'depth' is none of E, L"]),
    ('--also=nonsense=1', ["also = 'nonsense"]),
    ('--also=n_layer=3', ['also', 'sets n_layer', 'itself']),
    ('--also=max_iters=0', ['max_iters = 0: must be at least 1']),
    ('--also=eval_interval=0', ['eval_interval = 0: must be at least 1']),
    ('--plan=sokoban-small --also=unroll=0', ['unroll = 0: must be at least 1']),
    ('--width=0.0833', ['n_embd', 'base', 'width']),
    ('--table=solve --run', ['no Sokoban agents']),
    ('--run --index=99', ['index = 99', '0 to 25']),
    ('--tune=learning_rate', ['tune', 'learning_rate=0.02,0.04']),
    ('--tune=n_layer=1,2', ['n_layer cannot be tuned']),
    ('--emit=slurm --run', ["emit = 'slurm'", 'run']),
    ('--figure', ['no run of plan', '--run']),
    ('--gpus_per_run=64 --run', ['gpus_per_run = 64']),
    ('--table --reference=/nowhere', ["reference = '/nowhere'", 'no such folder']),
    ('--script=no_trainer.py', ["script = 'no_trainer.py'", 'no such file']),
    (
        '--plan=aggregation --script=train_lm.py',
        ['script', 'agents and language models', '--only=model'],
    ),
    (
        '--also=data_dir=/nowhere --run',
        ["no train shards in '/nowhere'", 'data_fineweb.py'],
    ),
    ('--plan=sokoban-small --also=levels_dir=/nowhere --run', ['/nowhere', '--download']),
]


@pytest.mark.parametrize('arguments, parts', MISTAKES)
def test_mistakes_are_refused_in_one_line_and_leave_nothing(
    arguments, parts, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(monkeypatch, '--plan=lm-small', f'--out_dir={tmp_path}/none', *arguments.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith('error: ') and error.count('\n') == 1
    assert all(part in error for part in parts), error
    assert not (tmp_path / 'none').exists()


# ---- before a sweep ----


def test_a_full_disk_is_found_before_the_first_run(fake, monkeypatch, capsys):
    monkeypatch.setattr(sweep.shutil, 'disk_usage', lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(SystemExit):
        main(monkeypatch, *fake, '--run')
    assert '0.0 GB are free' in capsys.readouterr().err


@pytest.mark.parametrize('model, copies, size', [('transformer', 2, 2), ('convlstm', 3, 4)])
def test_a_checkpoint_has_the_weights_their_moments_and_the_state(monkeypatch, model, copies, size):
    """Muon has one moment, Adam two. On a GPU the state of language models has two bytes per
    number."""
    rows = rows_of('--plan=aggregation', f'--only=model={model}')
    monkeypatch.setattr(sweep.torch.cuda, 'is_available', lambda: True)
    full, best = sweep.checkpoint_bytes(rows[0])
    assert full - copies * best == size * sweep.cost(rows[0]).state > 0


def test_levels_are_downloaded_once_for_all_workers(tmp_path, monkeypatch):
    rows = rows_of(
        '--plan=sokoban-small',
        f'--also=levels_dir={tmp_path} download=True',
        '--only=L=1',
        '--table=solve',  # which needs the test split too
    )
    fetched = []
    monkeypatch.setattr(sweep, 'load_levels', lambda *args: fetched.append(args))
    sweep.check_data(rows)
    splits = ('unfiltered-test', 'unfiltered-train', 'unfiltered-valid')
    assert fetched == [(str(tmp_path), split, True) for split in splits]


def test_in_a_plan_of_both_kinds_a_setting_of_also_may_be_of_one_script(monkeypatch, capsys):
    rows = rows_of('--plan=aggregation', '--also=download=True batch_size=2')
    settings = {row.is_text: sweep.settings_of(row) for row in rows}
    assert settings[False]['download'] is True and 'batch_size' not in settings[False]
    assert settings[True]['batch_size'] == 2 and 'download' not in settings[True]
    with pytest.raises(SystemExit):  # a plan of language models alone
        main(monkeypatch, '--plan=lm-small', '--also=download=True')
    assert "no trainer of plan 'lm-small' has a setting 'download'" in capsys.readouterr().err


def test_hours_are_measured_before_a_sweep(fake, monkeypatch, capsys):
    """The fake trainer logs 0.1 s per update. Five runs are made, two at a time."""
    argv = [*fake, '--only=variant=recurrent d=24', '--workers=2', '--run', '--measure']
    assert main(monkeypatch, *argv) == 0
    out = capsys.readouterr().out
    assert 'measured, one run alone: transformer_recurrent' in out and '0.1 s per update' in out
    assert 'hours with 2 at a time if the runs do not slow each other down' in out


def test_hours_are_measured_with_the_threads_and_ranks_of_the_runs(fake, monkeypatch):
    (row,) = rows_of(*fake, '--only=L=1 d=24 variant=recurrent', '--gpus_per_run=2')
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(sweep.os, 'sched_getaffinity', lambda pid: range(32), raising=False)
    started = []

    def fake_run(line, env, **options):
        started.append((line, env))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sweep.subprocess, 'run', fake_run)
    monkeypatch.setattr(sweep, 'read_log', lambda folder: [])
    sweep.measured_update(row, '2,3', 4)
    ((line, env),) = started
    assert '--nproc_per_node=2' in line and '-m' in line
    assert (env['OMP_NUM_THREADS'], env['CUDA_VISIBLE_DEVICES']) == ('4', '2,3')


@pytest.mark.parametrize(
    'gpus, visible, settings, expected',
    [  # GPUs, CUDA_VISIBLE_DEVICES, settings, the GPUs of each worker
        (0, None, '--workers=3', ['', '', '']),
        (4, None, '--gpus_per_run=2', ['0,1', '2,3']),
        (2, '6,7', '--workers=4', ['6', '7', '6', '7']),
        (4, None, '--index=6 --workers=1', ['2']),
    ],
)
def test_gpus_are_shared_out_to_workers(monkeypatch, gpus, visible, settings, expected):
    apply_settings('--plan=lm-small', *settings.split())
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: gpus)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    assert sweep.devices() == expected


# ---- running ----


def test_a_failed_run_is_reported_and_the_others_are_made(fake, monkeypatch, capsys):
    monkeypatch.setenv('FAILS', '2')
    assert main(monkeypatch, *fake, '--only=L=1,2 d=24 variant=recurrent', '--run') == 1
    done, failed = sweep.plan_rows()
    out = capsys.readouterr().out
    assert '2 runs, 0 finished before' in out and f'{done.name}: done' in out, out
    assert f'{failed.name}: FAILED (exit status 2): error: n_layer = 2: does not fit' in out
    assert out.endswith(f'; see {sweep.folder_of(failed)}\n')
    assert json.loads((folder_of(failed) / 'failed.json').read_text())['exit'] == 2


def test_the_same_command_skips_resumes_and_repeats_runs(fake, tmp_path, monkeypatch, capsys):
    """It skips finished runs, resumes interrupted ones and repeats failed ones. The settings of how
    a run is run, such as batch_size, may change."""
    argv = [*fake, '--only=L=1,2,4 d=24 variant=recurrent', '--run']
    monkeypatch.setenv('FAILS', '4')
    assert main(monkeypatch, *argv) == 1
    finished, interrupted, failed = sweep.plan_rows()
    log = folder_of(interrupted) / 'log.jsonl'
    log.write_text(''.join(log.read_text().splitlines(keepends=True)[:5]))
    before = (folder_of(finished) / 'log.jsonl').stat().st_mtime_ns
    capsys.readouterr()

    monkeypatch.setenv('FAILS', '')
    status = main(monkeypatch, *argv, '--also=batch_size=2', '--table')
    out = capsys.readouterr().out
    assert status == 0 and '1 finished before' in out and 'FAILED' not in out, out
    assert (folder_of(finished) / 'log.jsonl').stat().st_mtime_ns == before
    for row in (interrupted, failed):
        assert [record['step'] for record in figures.read_log(folder_of(row))] == list(range(9))
    assert not (folder_of(failed) / 'failed.json').exists()
    names = {path.name for path in (tmp_path / 'out/lm-small').glob('*.*')}
    assert {'table_transformer.csv', 'table_transformer.md', 'runs.json'} <= names


def test_a_folder_of_a_run_with_other_settings_is_refused(fake, monkeypatch, capsys):
    argv = [*fake, '--only=L=1 d=24 variant=recurrent']
    write_finished(rows_of(*argv))
    with pytest.raises(SystemExit):
        main(monkeypatch, *argv, '--run', '--length=2')
    assert 'a run with other settings' in capsys.readouterr().err


@pytest.mark.parametrize('finished', ['fake.py', 'train_lm.py', None])
def test_a_run_of_another_script_is_not_taken_for_one_of_the_plan(fake, capsys, finished):
    """A config.json without the name of a script is one of the standard trainer."""
    custom = [*fake, '--only=L=1 d=24 variant=recurrent']
    standard = [word for word in custom if '--script' not in word]
    (row,) = rows_of(*(custom if finished == 'fake.py' else standard))
    write_finished([row])
    if finished is None:
        config = folder_of(row) / 'config.json'
        config.write_text(json.dumps(sweep.config_of(row)))
    assert sweep.state_of(row) == 'done'

    (row,) = rows_of(*(standard if finished == 'fake.py' else custom))
    assert sweep.state_of(row) == 'other' and sweep.finished([row]) == []
    assert 'a run with other settings or of another script: skipped' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.execute([row])


def test_a_setting_that_the_script_got_later_counts_as_its_default(fake):
    argv = [*fake, '--only=L=1 d=24 variant=recurrent']
    (row,) = rows_of(*argv)
    write_finished([row])
    config = folder_of(row) / 'config.json'
    saved = json.loads(config.read_text())
    del saved['learning_rate']  # as if the run were older than the setting
    config.write_text(json.dumps(saved))
    assert sweep.state_of(row) == 'done'
    (row,) = rows_of(*argv, '--also=learning_rate=0.5')
    assert sweep.state_of(row) == 'other'


TOO_SHORT = ['--plan=sokoban-small', '--only=L=1 d=8 model=convglu variant=recurrent']
TOO_SHORT += ['--width=0.0625', '--seeds=1', '--also=n_envs=4 unroll=10 total_steps=440']


def test_an_agent_too_short_for_a_return_is_refused_before_it_starts(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(monkeypatch, *TOO_SHORT, f'--out_dir={tmp_path}/out', '--run')
    assert '110 steps per board give no return: at least 120' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_a_finished_agent_without_a_return_is_skipped_with_the_reason(tmp_path, capsys):
    (row,) = rows_of(*TOO_SHORT, f'--out_dir={tmp_path}')
    write_finished([row])
    log = folder_of(row) / 'log.jsonl'
    records = [record | {'episodic_return': None} for record in figures.read_log(log.parent)]
    log.write_text(''.join(json.dumps(record) + '\n' for record in records))
    assert sweep.finished([row]) == []
    error = capsys.readouterr().err
    assert 'logged no return: it has fewer steps per board than time_limit' in error
    assert sweep.outcome(row, 0).startswith('FAILED (exit status 0): a run that logged no return')


def test_a_run_that_cannot_start_leaves_the_others_running(fake, monkeypatch, capsys):
    def start(row, *args, start=sweep.start):
        if row.L == 2:
            raise OSError(28, 'No space left on device')
        return start(row, *args)

    monkeypatch.setattr(sweep, 'start', start)
    argv = [*fake, '--only=L=1,2,4 d=24 variant=recurrent', '--workers=2', '--run']
    assert main(monkeypatch, *argv) == 1
    out = capsys.readouterr().out
    assert 'L2_E8_d24_s1: FAILED to start: OSError: [Errno 28] No space left' in out
    assert [sweep.state_of(row) for row in sweep.plan_rows()] == ['done', '', 'done']


def test_three_equal_failures_in_a_row_stop_the_sweep(fake, monkeypatch, capsys):
    """The numbers and folders in two messages may differ."""
    argv = [*fake, '--only=d=24 variant=recurrent', '--run']
    monkeypatch.setenv('FAILS', '1 2 4 8 16')
    assert main(monkeypatch, *argv) == 1
    out = capsys.readouterr().out
    assert out.count('] transformer') == 3  # a line for each run that has ended
    assert '3 runs in a row failed alike: 2 others are not started' in out


def test_runs_that_are_not_started_are_not_counted_as_ended(fake, monkeypatch, capsys):
    """With two workers a fourth run is at work when the third one fails."""
    monkeypatch.setenv('FAILS', '1 2 4 8 16')
    argv = [*fake, '--only=d=24 variant=recurrent', '--run', '--workers=2']
    assert main(monkeypatch, *argv) == 1
    assert re.findall(r'\[(\d)/5\]', capsys.readouterr().out) == ['1', '2', '3', '4']


def test_failures_with_a_success_in_between_do_not_stop_the_sweep(fake, monkeypatch, capsys):
    monkeypatch.setenv('FAILS', '1 2 8 16')
    assert main(monkeypatch, *fake, '--only=d=24 variant=recurrent', '--run') == 1
    assert capsys.readouterr().out.count('] transformer') == 5


def test_a_signal_saves_the_runs_and_the_next_call_resumes_them(fake, monkeypatch, capsys):
    argv = [*fake, '--only=L=16 d=24', '--run', '--workers=2', '--also=pause=0.05 max_iters=100000']
    rows, steps = rows_of(*argv), {}
    # The thread below reads these files only: settings change in this process meanwhile.
    logs = [folder_of(row) / 'log.jsonl' for row in rows]

    def count_lines():
        return [log.read_text().count('\n') if log.exists() else 0 for log in logs]

    def interrupt(number, before):
        """Send the signal once each log has four lines more than before, or after a minute."""
        deadline = time.monotonic() + 60
        while any(now < n + 4 for now, n in zip(count_lines(), before, strict=True)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        arguments = (number, count_lines())
        thread = threading.Thread(target=interrupt, args=arguments, daemon=True)
        thread.start()
        status = main(monkeypatch, *argv)
        thread.join(timeout=60)
        assert status == 128 + number and 'the same command resumes' in capsys.readouterr().out
        for row in rows:
            found = [record['step'] for record in figures.read_log(folder_of(row))]
            assert found == list(range(len(found))) and found[-1] > steps.get(row, 0)
            assert sweep.state_of(row) == ''
            steps[row] = found[-1]


@pytest.fixture
def row(fake):
    """Return a row of the plan whose folder is empty."""
    (row,) = rows_of(*fake, '--only=L=1 d=24 variant=recurrent')
    folder_of(row).mkdir(parents=True)
    return row


# What two ranks of a run print, and then torchrun.
TORCHRUN = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "train_lm.py", line 10, in <module>
[rank1]: IndexError: index out of range
error: rank 0: another rank died, or cannot be reached (RuntimeError: Connection closed by peer)
E1125 21:09:39.365000 12522 torch/distributed/elastic/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : 2 (pid: 12496)
"""


def test_the_message_of_a_failure_under_torchrun_is_its_cause(tmp_path):
    path = tmp_path / 'stdout.txt'
    path.write_text(TORCHRUN)
    assert sweep.last_error(path) == 'IndexError: index out of range'


def test_a_run_that_another_sweep_works_on_is_left_alone(row, capsys):
    with FileLock(folder_of(row) / '.lock'):
        assert sweep.execute([row]) == 1
    assert 'another process is at work on it' in capsys.readouterr().out


def test_a_run_whose_sweep_was_killed_is_left_alone_until_it_ends(row):
    with sweep.lock_folder(folder_of(row)):
        assert sweep.start(row, '', 1) is None


def test_a_run_that_another_process_has_finished_meanwhile_is_not_started(row):
    write_finished([row])
    assert sweep.start(row, '', 1) is None


def test_a_damaged_config_does_not_undo_a_finished_run(row):
    write_finished([row])
    (folder_of(row) / 'config.json').write_text('{')
    assert sweep.state_of(row) == 'done' and len(sweep.finished([row])) == 1


def test_a_damaged_log_is_skipped_in_tables_and_never_overwritten(row, capsys):
    write_finished([row])
    log = folder_of(row) / 'log.jsonl'
    text = '#' + log.read_text()
    log.write_text(text)
    assert sweep.state_of(row) == 'damaged' and sweep.finished([row]) == []
    assert 'a log that cannot be used: skipped' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.execute([row])
    assert log.read_text() == text


# ---- tuning ----


def rate_of(row):
    return dict(row.overrides)['learning_rate']


def describe(rows):
    return [(row.recurrent, row.L, rate_of(row), row.seed) for row in rows]


def test_the_best_value_by_seed_1_is_reported_by_other_seeds(fake, tmp_path, monkeypatch, capsys):
    """Seed 1 tries every value. Once all of its runs have finished or failed, the plan grows by the
    runs of two further seeds with the best value, and only those are in the table."""
    argv = [*fake, '--only=L=1,4 d=24', '--seeds=2', '--tune=learning_rate=0.02,0.04,0.04,0.05,1']
    models = [(recurrent, L) for recurrent in (True, False) for L in (1, 4)]
    rows = rows_of(*argv)
    rates = (0.02, 0.04, 0.05, 1.0)
    assert describe(rows) == [(*model, rate, 1) for model in models for rate in rates]

    loss_by_rate = {0.02: 3.0, 0.04: 2.0, 0.05: 2.5}
    losses_of_seeds = {  # recurrent, L: losses of seeds 2 and 3
        (True, 1): (2.0, 2.2),
        (True, 4): (2.1, 2.3),
        (False, 1): (4, 4),
        (False, 4): (3, 3),
    }

    def loss(row):
        if row.seed == 1:
            return loss_by_rate[rate_of(row)]
        return losses_of_seeds[row.recurrent, row.L][row.seed - 2]

    write_finished([row for row in rows if rate_of(row) in loss_by_rate], loss)
    assert rows_of(*argv) == rows  # the runs with a rate of 1 are missing
    for row in rows[3::4]:  # these fail: the rate is too high
        folder_of(row).mkdir(parents=True)
        (folder_of(row) / 'failed.json').write_text('{}')
    main(monkeypatch, *argv, '--table')
    assert 'one seed per value so far' in capsys.readouterr().out
    all_rows = rows_of(*argv)
    assert all_rows[:16] == rows  # the numbers of jobs stay
    assert describe(all_rows[16:]) == [(*model, 0.04, seed) for seed in (2, 3) for model in models]

    write_finished(all_rows[16:], loss)
    main(monkeypatch, *argv, '--table')
    folder = tmp_path / 'out/lm-small'
    first, *_ = read_csv(folder / 'table_transformer.csv')
    assert (first['learning_rate'], first['n_seeds']) == ('0.04', '2')
    assert float(first['mean_loss']) == pytest.approx(2.1)
    saved = json.loads((folder / 'runs.json').read_text())
    assert len(saved['runs']) == 20 and sum(run['reported'] for run in saved['runs']) == 8

    # The mean of two draws for L = 4 is the smaller in 1 of 16 bootstrap draws; with t-distributed,
    # that is, Cauchy errors it is in 1/2 - atan(0.5) / pi = 35% of them.
    summary = (folder / 'table_transformer.md').read_text().splitlines()[-1]
    assert saved['best_transformer'] == summary
    assert 'recurrent 1 (95%: 1 to 4), non-recurrent 4 (95%: 4 to 4)' in summary
    percentages = [x[:-2] for x in summary.split() if x.endswith(('%,', '%.'))]
    smaller, equal, smaller_by_t = map(float, percentages)
    assert 92.5 < smaller < 95 and abs(smaller + equal - 100) < 0.01 and 63 < smaller_by_t < 66.5


def test_tuning_continues_beyond_an_edge(fake):
    """The best rate is the lowest for L = 1 and the highest for L = 4. Each gets three more rates
    beyond that edge, then a second seed."""
    argv = [*fake, '--only=L=1,4 d=24 variant=recurrent', '--tune=learning_rate=0.02,0.04']
    rows, n_finished = rows_of(*argv), 0
    for n in (4, 6, 8, 10):
        assert len(rows) == n and all(row.seed == 1 for row in rows)
        write_finished(rows[n_finished:], lambda row: rate_of(row) if row.L == 1 else -rate_of(row))
        rows, n_finished = rows_of(*argv), n
    added = [(1, 0.01), (4, 0.08), (1, 0.005), (4, 0.16), (1, 0.0025), (4, 0.32)]
    assert [(row.L, rate_of(row)) for row in rows[4:10]] == added
    assert [(row.L, rate_of(row), row.seed) for row in rows[10:]] == [(1, 0.0025, 2), (4, 0.32, 2)]


def test_tuning_runs_the_other_seeds_in_the_same_call(fake, monkeypatch, capsys):
    argv = [*fake, '--only=L=8 d=24 variant=recurrent', '--tune=learning_rate=0.03,0.04,0.05']
    assert main(monkeypatch, *argv, '--run') == 0
    out = capsys.readouterr().out
    assert out.count(': done') == 4 and 'learning_rate-0.04_s2: done' in out


# ---- values, figures, tables ----


def test_saturation_at_L_is_the_best_return_of_at_most_L_layers(tmp_path):
    """The best allocation of L = 1 does not count, because one of its two seeds is missing."""
    only = '--only=model=convlstm variant=recurrent'
    rows = rows_of('--plan=sokoban-small', only, f'--out_dir={tmp_path}', '--seeds=2')
    rows = [row for row in rows if (row.L, row.d, row.seed) != (1, 128, 2)]
    means = {1: 3.0, 2: 8.0, 4: 5.0, 8: 9.0, 16: 1.0}
    write_finished(rows, lambda row: means[row.L] + row.seed - row.d / 1000 + (row.d == 128))
    found = figures.saturation(figures.summarize_cells(sweep.finished(rows)))
    best = {1: 3.0, 2: 8.0, 4: 8.0, 8: 9.0, 16: 9.0}
    assert found.keys() == best.keys()
    for L, (mean, error, n) in found.items():
        assert mean == pytest.approx(best[L] + 1.5 - 0.032)
        assert error == pytest.approx(0.5) and n == 2


@pytest.mark.parametrize(
    'plan, model',
    [('scaling-reduced', 'convglu'), ('share-kv', 'transformer'), ('lm', 'transformer')],
)
def test_a_plans_figures_are_drawn(plan, model, tmp_path, monkeypatch):
    """They are drawn even if a run is missing: here the default of L = 1, to which differences of
    the share-kv plan refer."""
    argv = [f'--plan={plan}', f'--only=model={model} L=1,2', f'--out_dir={tmp_path}']
    rows = rows_of(*argv)
    rows = [row for row in rows if (row.L, row.overrides) != (1, (('share_kv', True),))]
    write_finished(rows, lambda row: row.L + row.seed / 10 + row.recurrent)
    assert main(monkeypatch, *argv, '--figure') == 0
    assert len(list((tmp_path / plan).glob('*.svg'))) >= 1


def test_the_shared_residual_has_a_folder_figure_and_table_of_its_own(tmp_path, monkeypatch):
    argv = ['--plan=lm-small', f'--out_dir={tmp_path}', '--residual=shared', '--only=L=1,2']
    write_finished(rows_of(*argv), lambda row: row.L + row.d / 1000)
    assert main(monkeypatch, *argv, '--figure', '--table') == 0
    folder = tmp_path / 'lm-small/residual-shared'
    assert 'shared residual' in (folder / 'allocations_transformer.svg').read_text()
    runs = json.loads((folder / 'runs.json').read_text())['runs']
    assert all(run['reported'] for run in runs) and len(runs) == 12


def test_values_and_differences_of_ablations_have_standard_errors(tmp_path):
    """The four seeds add 0, 2, 4 and 6 to a value: their standard deviation is sqrt(20 / 3)."""
    rows = rows_of('--plan=communication', f'--out_dir={tmp_path}', '--seeds=4')
    write_finished(rows, lambda row: dict(row.overrides)['radius'] + [0, 2, 4, 6][row.seed - 1])
    cells = figures.summarize_cells(sweep.finished(rows))
    points = {dict(row.overrides)['radius']: point for row, point in cells.items()}
    deviation = math.sqrt(20 / 3)
    assert figures.with_standard_errors(points)[5] == (
        pytest.approx(5 + 3),
        pytest.approx(deviation / 2),
        4,
    )
    differences = figures.differences(points, 7)
    assert differences[5] == (pytest.approx(-2), pytest.approx(deviation / math.sqrt(2)), 4)
    assert differences[7][0] == 0.0 and math.isnan(differences[7][1])


def test_tables_put_the_papers_values_beside_those_of_the_runs(tmp_path, monkeypatch):
    """Solve rates are those of the best allocation of each depth. Seed 1, by which gamma is tuned,
    counts in no table."""
    argv = ['--plan=sokoban-small', '--only=L=1,2', '--seeds=2', f'--out_dir={tmp_path}']
    argv.append('--tune=gamma=0.97')
    for _ in range(2):  # seed 1, then the others
        rows = rows_of(*argv)
        write_finished(rows, lambda row: {128: 5.0, 64: 7.0, 32: 2.0}[row.d] + row.seed)
    for row in rows:
        if row.d == 64:  # the best: only these are evaluated
            record = {'solve_rate': 0.5 + row.seed / 10, 'env_steps': sweep.updates_of(row) * 640}
            (folder_of(row) / 'eval_unfiltered-test.json').write_text(json.dumps(record))
    results = tmp_path / 'results'
    argv += [f'--results={results}', '--table=solve', f'--reference={PAPER}']
    assert main(monkeypatch, *argv) == 0

    first, *_ = read_csv(results / 'table_convlstm.csv')
    assert [float(first[key]) for key in ('gamma', 'mean_return', 'variance')] == [0.97, 7.5, 0.5]
    paper_columns = first['paper_mean'], first['paper_variance']
    assert first['n_seeds'] == '2' and paper_columns == ('7.75', '0.0076')

    lines = read_csv(results / 'solve_convlstm.csv')
    rates = [line['unfiltered_test_percent'] for line in lines if 'paper' not in line['variant']]
    assert [float(rate) for rate in rates[:2]] == [75, 75]
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
        json.dump({**config, 'script': os.path.basename(__file__)}, file)
    with open(f'{out_dir}/log.jsonl', 'w') as file:
        for step in range(6):
            record = {'step': step, 'env_steps': 20 * step, 'episodic_return': 1.0}
            file.write(json.dumps(record | {'seconds': 1.0}) + chr(10))
'''


def test_agents_without_an_evaluation_are_evaluated_for_the_table(tmp_path, monkeypatch):
    (tmp_path / 'agent.py').write_text(FAKE_AGENT)
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    argv = ['--plan=sokoban-small', '--only=L=1,2 d=8,4 model=convglu', '--width=0.0625']
    argv += [f'--script={tmp_path}/agent.py', f'--out_dir={tmp_path}/out', '--seeds=1']
    assert main(monkeypatch, *argv, '--run', '--table=solve') == 0
    lines = read_csv(tmp_path / 'out/sokoban-small/solve_convglu.csv')
    assert [line['L'] for line in lines] == ['1', '2', '1', '2']
    for line in lines:
        assert [float(x) for name, x in line.items() if name.endswith('_percent')] == [75.0]


# ---- the real trainers ----


def test_a_run_that_starts_from_another_model_keeps_the_sizes_of_its_plan(data, trained, tmp_path):
    """The other model has n_kv_head = 1, the plan 0, which stands for half of n_head."""
    settings = {**LM, 'data_dir': data, 'init_from': trained / 'recurrent'}
    sizes = ('n_layer', 'n_expert', 'n_embd')
    also = ' '.join(f'{name}={x}' for name, x in settings.items() if name not in sizes)
    argv = ['--plan=lm-small', '--only=L=16 d=32 variant=recurrent', '--width=0.0416667']
    (row,) = rows_of(*argv, f'--also={also}', f'--out_dir={tmp_path}')
    assert train_lm_as_rank(sweep.arguments(row)[1:]) == 0
    assert sweep.state_of(row) == 'done'


@pytest.mark.long
def test_train_sokoban_is_run_and_evaluated(tmp_path, monkeypatch, capsys):
    also = """split=generated eval_split=generated n_levels=20 n_boxes=1 max_moves=12 n_envs=4
        unroll=5 head_dim=8 total_steps=1200 eval_interval=60 eval_games=6 log_interval=10
        compile=False device=cpu threads=1"""
    argv = ['--plan=sokoban-small', '--only=L=1 d=8 model=convglu variant=recurrent']
    argv += ['--width=0.0625', '--seeds=1', f'--also={" ".join(also.split())}']
    argv += [f'--out_dir={tmp_path}', '--table=solve', '--run']
    assert main(monkeypatch, *argv) == 0, capsys.readouterr()
    (line,) = read_csv(tmp_path / 'sokoban-small' / 'solve_convglu.csv')
    rates = [float(x) for name, x in line.items() if name.endswith('_percent')]
    assert len(rates) == 1 and 0 <= rates[0] <= 100 and line['n_seeds'] == '1'


@pytest.mark.long
def test_train_lm_is_run(fake, monkeypatch, capsys):
    also = """n_head=2 window=12 block_size=8 tokens_per_step=64 max_iters=3 warmup_iters=1
        val_tokens=64 val_streams=2 tokenizer=bytes compile=False dtype=float32
        device=cpu threads=1"""
    argv = [word for word in fake if '--script' not in word]
    argv += ['--only=L=16 d=24 variant=recurrent', f'--also={" ".join(also.split())}', '--run']
    assert main(monkeypatch, *argv) == 0, capsys.readouterr()
    (row,) = sweep.plan_rows()
    assert sweep.state_of(row) == 'done'
