"""sweep.py and figures.py: the paper's rule, plans, running with failures and stops, jobs for a cluster, figures and tables from logs."""

import csv
import fcntl
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from test_train import needs

import data_fineweb
import figures
import sweep
import train_lm
import train_sokoban
from configurator import configure

ROOT = Path(__file__).resolve().parent.parent
PAPER = ROOT.parent / 'shared' / 'paper'
BASE = """tokenizer = 'bytes'
n_head = 2
window = 8
block_size = 8
tokens_per_step = 64
max_iters = 6
warmup_iters = 2
eval_interval = 3
val_tokens = 128
val_streams = 4
compile = False
dtype = 'float32'
device = 'cpu'
"""


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """A config file for runs of a second, with its data."""
    folder = tmp_path_factory.mktemp('sweep data')
    for name in ('val_000000', 'train_000001'):
        data_fineweb.write_shard(str(folder / f'fineweb_{name}.bin'), bytes_of(2000))
    data_fineweb.write_meta(str(folder), {'tokenizer': 'bytes', 'source': 'test', 'shards': []})
    path = folder / 'base.py'
    path.write_text(f'{BASE}data_dir = {str(folder)!r}\n')
    return path


def bytes_of(n):
    import numpy as np

    return (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)


def forget():
    """What sweep keeps for a process's one plan."""
    for cached in (sweep.files_of, sweep.under, sweep.cost):
        cached.cache_clear()


def sized(*argv):
    """sweep's settings, here -> its rows."""
    forget()
    configure(vars(sweep), [str(a) for a in argv], quiet=True)
    return sweep.plan_rows()


def start(*argv):
    return forks.Popen(
        [sys.executable, str(ROOT / 'sweep.py'), *map(str, argv)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )


def call(*argv):
    process = start(*argv)
    out, err = process.communicate()
    return process.returncode, out, err


def fake(rows, value=None, updates=None, seconds=1.0):
    """Finished runs as their logs have them; value(row) -> return or loss."""
    for row in rows:
        folder = Path(sweep.folder_of(row))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'config.json').write_text(json.dumps(sweep.config_of(row)))
        total, v = updates or sweep.total_of(row), value(row) if value else 1.0
        with open(folder / 'log.jsonl', 'w') as log:
            for k in range(8):
                step = total * k // 7
                record = (
                    {
                        'step': step,
                        'tokens': step,
                        'seconds': seconds,
                        'val_loss': v if k == 7 else 9.0,
                    }
                    if row.model == 'transformer'
                    else {
                        'step': step,
                        'env_steps': step * 640,
                        'seconds': seconds,
                        'episodic_return': None if k == 0 else v + (k - 5) if k > 2 else -100.0,
                        'return_1000': None if k == 0 else v,
                    }
                )
                log.write(json.dumps(record) + '\n')


# ----------------------------------------------------------------------------- the rule


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's tables are not here (../shared/paper)")
def test_convlstm_plans_are_the_papers_84_rows_in_order():
    ours = []
    for budget in ('small', 'medium', 'large'):
        ours += [
            (r.variant, r.budget, r.L, r.E, r.d)
            for r in sized(f'--plan=sokoban-{budget}', '--only=model=convlstm', '--seeds=1')
        ]
    with open(PAPER / 'sokoban_returns.csv') as file:
        paper = [
            (r['variant'], r['budget'], int(r['L']), int(r['E']), int(r['d']))
            for r in csv.DictReader(file)
        ]
    assert len(ours) == len(paper) == 84 and sorted(ours) == sorted(paper)

    def budgets(rows, kind):
        return [r for r in rows if r[0] == kind]

    for kind in ('recurrent', 'feedforward'):  # kind by kind in the paper's order too
        assert budgets(ours, kind) == budgets(paper, kind)


def test_the_rule_by_hand():
    """C(d) = 9 (32 + 2d) 4d: C(128) = 1,327,104, C(64) = 368,640, C(32) = 110,592."""
    rows = sized('--plan=sokoban-small', '--only=model=convlstm kind=recurrent', '--seeds=1')
    assert [(r.L, r.E, r.d) for r in rows] == [
        (1, 1, 128),
        (1, 4, 64),
        (1, 12, 32),
        (2, 2, 64),
        (2, 6, 32),
        (4, 1, 64),
        (4, 3, 32),
        (8, 2, 32),
        (16, 1, 32),
    ]
    assert sweep.cost(*rows[0][:7])[0] == 100 * 1327104 and sweep.over_budget(
        rows[3]
    ) == pytest.approx(4 * 368640 / 1327104)
    glu = sized('--plan=sokoban-small', '--only=model=convglu kind=feedforward', '--seeds=1')
    assert [(r.L, r.E, r.d) for r in glu] == [
        (1, 1, 128),
        (1, 4, 64),
        (1, 16, 32),
        (2, 2, 64),
        (2, 8, 32),
        (4, 1, 64),
        (4, 4, 32),
        (8, 2, 32),
        (16, 1, 32),
    ]


def test_language_models_cost_16_blocks(capsys):
    rows = sized('--plan=lm-small')
    sweep.print_plan(rows)
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == 'not among them: transformer_feedforward_L8_E1_d1536_s1, 1.97 budgets; --dear asks for it'
    )
    D, W = 768, 128
    block = 2 * (2 * D * D + 2 * D * D // 2 + 8 * D * D) + 4 * W * D
    assert sweep.budget_of('transformer', True, 'small') == 16 * block
    assert sweep.budget_of('transformer', False, 'small') == 16 * (block + 4 * (257 / 2 - W) * D)
    for kind in ('recurrent', 'feedforward'):
        mine = {(r.L, r.E, r.d) for r in rows if r.variant == kind}
        assert (
            {(L, 16 // L, 768) for L in (1, 2, 4, 8, 16)} < mine
            and (1, 4, 1536) in mine
            and (1, 62, 384) in mine
            and (16, 1, 1536) not in mine
        )
    assert len(rows) == 26 and all(0.9 < sweep.over_budget(r) < 1.1 for r in rows)
    asked = sized('--plan=lm-small', '--dear')  # exactly these two more: half an expert rounded up
    assert {(r.L, r.E, r.d, round(sweep.over_budget(r), 2)) for r in set(asked) - set(rows)} == {
        (8, 1, 1536, 1.97)
    } and len(asked) == 28
    assert [r.L for r in sized('--plan=lm-medium', '--only=d=768 kind=recurrent')] == [
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    assert {r.budget for r in sized('--plan=lm-small-long')} == {'small-long'}
    assert (
        sweep.under('transformer', True, 'small-long')['window'] == 1024
        and sweep.under('transformer', False, 'small-long')['block_size'] == 2048
    )


def test_shrunk_plans_keep_the_rule(base):
    rows = sized(
        '--plan=sokoban-small',
        '--width=0.5',
        '--length=0.01',
        '--only=model=convlstm kind=recurrent',
        '--seeds=1',
    )
    c = lambda d: 9 * (32 + 2 * d) * 4 * d  # noqa: E731
    expected = [
        (L, round(c(64) / (L * c(d))), d)
        for L in (1, 2, 4, 8, 16)
        for d in (64, 32, 16)
        if round(c(64) / (L * c(d)))
    ]
    assert [(r.L, r.E, r.d) for r in rows] == expected
    assert sweep.settings_of(rows[0])['total_steps'] == 500000
    rows = sized(
        '--plan=lm-small', f'--base={base}', '--width=0.0625', '--length=0.5', '--only=d=48'
    )
    assert [(r.L, r.E) for r in rows[:5]] == [(L, 16 // L) for L in (1, 2, 4, 8, 16)]
    assert sweep.settings_of(rows[0]) | {
        'max_iters': 3,
        'warmup_iters': 1,
        'eval_interval': 2,
    } == sweep.settings_of(rows[0])


def test_ablation_plans():
    rows = sized('--plan=communication')
    assert (
        [dict(r.more)['radius'] for r in rows[:8]] == list(range(8))
        and len(rows) == 24
        and {(r.L, r.E, r.d, r.recurrent) for r in rows} == {(2, 8, 32, True)}
    )
    rows = sized('--plan=aggregation')
    assert {(r.model, r.L, r.E, r.d) for r in rows} == {
        ('convlstm', 1, 4, 128),
        ('transformer', 2, 8, 768),
    } and len(rows) == 4 * 3 + 4
    assert {dict(r.more)['share_kv'] for r in sized('--plan=share-kv')} == {True, False}
    assert {dict(r.more)['residual'] for r in sized('--plan=residual')} == {'expert', 'shared'}
    rows = sized('--plan=scaling', '--seeds=1')
    assert {r.model for r in rows} == {'convlstm', 'convglu', 'transformer'} and {
        r.E for r in rows
    } == {1, 2, 4, 8, 16, 32, 64}
    assert len(rows) == 3 * 2 * 4 * 7


@pytest.mark.parametrize('plan', sweep.PLANS)
def test_names_are_unique_and_seeds_come_in_rounds(plan):
    rows = sized(f'--plan={plan}')
    assert len({r.name for r in rows}) == len(rows) and [r.seed for r in rows] == sorted(
        r.seed for r in rows
    )
    sokoban = [r for r in rows if r.model != 'transformer']
    assert {r.seed for r in sokoban} in (set(), {1, 2, 3}) and all(
        r.seed == 1 for r in rows if r.model == 'transformer'
    )


@pytest.mark.parametrize('plan', [name for name in sweep.PLANS if not name.startswith('sokoban')])
def test_language_model_rows_fit_80_GB(plan):
    """Each row runs as many rows at a time as its own sizes leave room for, on one GPU and on four."""
    rows = [row for row in sized(f'--plan={plan}') if row.is_text]
    taken = set()
    for config in map(sweep.config_of, rows):
        assert config['batch_size'] == 0
        vars(train_lm).update(config)
        for ranks in (1, 4):
            at_once, need = needs(config, ranks)
            assert need < 79 * 2**30 / 1e9 and at_once * config['block_size'] >= 2048, (
                config['n_layer'],
                config['n_expert'],
                config['n_embd'],
                ranks,
            )
            taken.add(at_once * config['block_size'])
    assert plan == 'communication' or 32768 in taken  # and no fewer than they must
    assert len(taken) > 1 or plan not in ('lm-medium', 'lm-small-long')


# ----------------------------------------------------------------------------- the command line


def test_list_has_a_line_a_run_with_a_command_that_parses():
    status, out, _ = call('--plan', 'sokoban-small', '--only', 'L=16', '--seeds=1')
    lines = out.splitlines()
    assert status == 0 and len(lines) == 2 + 4
    configure(
        dict(vars(train_sokoban)),
        shlex.split(lines[2])[shlex.split(lines[2]).index('train_sokoban.py') + 1 :],
        quiet=True,
    )
    assert (
        lines[2].split()[:9]
        == ['0', 'convlstm', 'recurrent', '16', '1', '32', '1', '176.9', '1.33']
        and '--n_layer=16' in lines[2]
    )


@pytest.mark.parametrize(
    'argv, words',
    [
        (['--plan=nonsense'], ['nonsense', *sweep.PLANS]),
        ([], ['sokoban-small']),
        (['--plan=lm-small', '--only=L=3'], ['leaves none']),
        (['--plan=lm-small', '--only=depth=3'], ["'depth'", 'model, kind, L, E, d']),
        (['--plan=lm-small', '--base=nowhere.py'], ['nowhere.py', 'No such file']),
        (['--plan=lm-small', '--width=0'], ['width = 0.0', 'positive']),
        (['--plan=lm-small', '--width=0.0833'], ['n_embd', 'base, width']),
        (['--plan=lm-small', '--emit=pbs'], ["emit = 'pbs'"]),
        (['--plan=lm-small', '--table=mode'], ["table = 'mode'"]),
        (['--plan=lm-small', '--table', 'solve'], ['--table=solve']),
        (['--plan=lm-small', '--table=solve', '--run'], ['no Sokoban agents']),
        (['--plan=lm-small', '--reference=nowhere', '--run'], ["reference = 'nowhere'"]),
        (['--plan=lm-small', '--length=1e307'], ['length = 1e+307']),
        (['--plan=lm-small', '--run', '--index=99'], ['index = 99', '0 to 25']),
        (
            ['--plan=lm-small', '--only=L=8 d=1536 kind=recurrent'],
            ['L8_E1_d1536', '1.97 budgets', '--dear'],
        ),
        (['--plan=lm-small', '--seeds=-1'], ['seeds = -1']),
        (['--plan=lm-small', '--tune=learning_rate'], ['tune', "'learning_rate=0.02,0.04'"]),
        (['--plan=lm-small', '--tune=n_layer=1,2'], ['n_layer', 'cannot be tuned']),
        (['--plan=lm-small', '--tune=threads=1,2'], ['threads', 'cannot be tuned']),
        (
            ['--plan=lm-small', '--tune=learning_rat=0.02'],
            ['tune = ', "'learning_rat'", "'learning_rate'"],
        ),
        (['--plan=lm-small', '--tune=learning_rate=0.02,'], ['tune = ', 'learning_rate expects']),
        (['--plan=lm-small', '--only=L=3'], ['leaves none', 'L=1,2,4,8,16']),
        (['--plan=lm-small', '--emit=slurm', '--run'], ["emit = 'slurm'", 'run']),
        (['--plan=lm-small', '--index=0'], ['index = 0', '--run']),
        (
            ['--plan=lm-small', '--table', '--results=README.md'],
            ["results = 'README.md'", 'not a folder'],
        ),
        (['--plan=lm-small', '--figure'], ['no run of plan', '--run']),
        (['--plan=lm-small', '--gpus_per_run=64', '--run'], ['gpus_per_run = 64']),
    ],
)
def test_mistakes_are_one_line(argv, words, tmp_path, monkeypatch, capsys):
    forget()
    monkeypatch.setattr(sys, 'argv', ['sweep.py', *argv, f'--out_dir={tmp_path}/none'])
    with pytest.raises(SystemExit) as stop:
        sweep.main()
    err = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and err.count('\n') == 1
        and err.startswith('error: ')
        and all(word in err for word in words)
    ), err
    assert not (tmp_path / 'none').exists()


def test_jobs_are_quoted_and_run(base, tmp_path):
    """A folder's name is data in a shell line, whatever it holds."""
    evil = tmp_path / "a b; touch x' $(touch y)"
    argv = [
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=16 d=24 kind=feedforward',
        f'--out_dir={evil}',
    ]
    status, out, _ = call(*argv, '--emit=commands')
    lines = out.splitlines()
    assert status == 0 and len(lines) == 1 and lines[0].endswith('--index=0')
    words = subprocess.run(
        ['sh', '-c', f'python() {{ printf "%s\\0" "$@"; }}; {lines[0]}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    done = forks.run(
        [sys.executable, *words.split('\0')[:-1]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [evil.name] and not (ROOT / 'y').exists()
    assert (evil / 'lm-small' / 'transformer_feedforward_L16_E1_d24_s1' / 'ckpt_last.pt').exists()
    status, out, _ = call(*argv, '--emit', 'slurm')
    assert (
        out.startswith('#!/bin/bash')
        and '#SBATCH --array=0-0' in out
        and shlex.quote(f'--out_dir={evil}') in out
    )
    assert subprocess.run(['bash', '-n'], input=out, text=True).returncode == 0


@pytest.mark.parametrize(
    'config, cells',
    [
        ('study_lm.py', {(L, 16 // L, 48) for L in (1, 2, 4, 8, 16)}),
        ('study_sokoban.py', {(1, 4, 32), (2, 2, 32), (4, 1, 32)}),
        ('study_residual.py', {(2, 8, 48)}),
        ('study_aggregation.py', {(2, 8, 48)}),
    ],
)
def test_studies(config, cells, tmp_path):
    rows = sized(ROOT / 'config' / config, f'--out_dir={tmp_path}')
    assert (
        {(r.L, r.E, r.d) for r in rows} == cells
        and sweep.seeds == 3
        and {r.seed for r in rows} == ({1} if sweep.tune else {1, 2, 3})
    )
    assert all(0.99 < sweep.over_budget(r) < 1.04 for r in rows)
    lm = [r for r in rows if r.model == 'transformer']
    assert (
        len({round(sweep.cost(*r[:7])[0], -5) for r in lm}) <= 1
    )  # the same for both kinds, within 50 kFLOP of 1 M


# ----------------------------------------------------------------------------- running


def test_run_skips_resumes_and_survives_a_failure(base, tmp_path):
    """Two workers; a run that fails is recorded and the rest goes on; what is finished is left alone; what was killed is resumed."""
    argv = [
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=1,2 d=48',
        f'--out_dir={tmp_path}',
        '--workers=2',
    ]
    rows = sized(*argv)
    assert len(rows) == 4
    bad = Path(sweep.folder_of(rows[1]))
    bad.mkdir(parents=True)
    (bad / 'config.json').mkdir()  # whatever keeps a run from writing its files
    status, out, err = call(*argv, '--run')
    assert status == 1 and '4 runs, 0 finished before' in out and out.count(': done') == 3, (
        out + err
    )
    assert f'{rows[1].name}: FAILED (exit status' in out and f'failed: {rows[1].name}' in out
    failed = json.loads((bad / 'failed.json').read_text())
    assert failed['exit'] != 0 and failed['message'] and rows[1].script in failed['command']
    (bad / 'config.json').rmdir()
    before = (Path(sweep.folder_of(rows[0])) / 'log.jsonl').stat().st_mtime_ns
    assert sweep.state_of(rows[1]) == 'failed' and sweep.state_of(rows[0]) == 'done'
    cut = Path(sweep.folder_of(rows[3]))  # a run killed after its first checkpoint
    reference = (cut / 'log.jsonl').read_text().splitlines()
    (cut / 'log.jsonl').write_text('\n'.join(reference[:4]) + '\n{"step": 4, "tr')
    os.replace(cut / 'ckpt_prev.pt', cut / 'ckpt_last.pt')
    assert sweep.state_of(rows[3]) == 'cut' and sweep.progress(rows[3])[0] == 0.5
    status, out, err = call(*argv, '--run', '--figure', '--table')
    assert status == 0 and '4 runs, 2 finished before' in out and 'FAILED' not in out, out + err
    assert (
        not (bad / 'failed.json').exists()
        and (Path(sweep.folder_of(rows[0])) / 'log.jsonl').stat().st_mtime_ns == before
    )

    def losses(lines):
        return [(r['step'], r.get('train_loss'), r.get('val_loss')) for r in map(json.loads, lines)]

    assert losses((cut / 'log.jsonl').read_text().splitlines()) == losses(reference)
    assert {p.name for p in (tmp_path / 'lm-small').glob('*.*')} == {
        'allocations_transformer.png',
        'allocations_transformer.svg',
        'saturation_transformer.png',
        'saturation_transformer.svg',
        'table_transformer.csv',
        'table_transformer.md',
        'runs.json',
    }
    assert 'nats a byte' in (tmp_path / 'lm-small' / 'allocations_transformer.svg').read_text()
    configure(
        vars(sweep), [*argv, '--length=2'], quiet=True
    )  # the same folders, another length: not silently taken for it
    status, out, err = call(*argv, '--length=2', '--run')
    assert status == 2 and 'other settings' in err and err.count('\n') == 1


def test_ctrl_c_saves_and_the_next_call_goes_on(base, tmp_path):
    argv = [
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=16 d=24',
        f'--out_dir={tmp_path}',
        '--workers=2',
        '--length=100',
        '--run',
    ]
    process = start(*argv)
    logs, deadline = tmp_path / 'lm-small', time.time() + 600
    while (
        sum(p.stat().st_size > 500 for p in logs.glob('*/log.jsonl')) < 2 and time.time() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and 'the same command goes on' in out, out + err
    rows = sized(*argv)
    assert all(sweep.state_of(row) == 'cut' and 0 < sweep.progress(row)[0] < 1 for row in rows)
    steps = [
        json.loads((Path(sweep.folder_of(row)) / 'log.jsonl').read_text().splitlines()[-1])['step']
        for row in rows
    ]
    process = start(*argv)
    while (
        any(
            figures.read_log(sweep.folder_of(row))[-1]['step'] <= step
            for row, step in zip(rows, steps, strict=True)
        )
        and time.time() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    for row, step in zip(rows, steps, strict=True):  # nothing was done twice
        log = figures.read_log(sweep.folder_of(row))
        assert log[-1]['step'] > step and [r['step'] for r in log] == list(range(len(log)))


def test_a_run_that_another_process_has_is_left_to_it(base, tmp_path):
    argv = [
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=16 d=24 kind=recurrent',
        f'--out_dir={tmp_path}',
        '--run',
    ]
    folder = Path(sweep.folder_of(sized(*argv)[0]))
    folder.mkdir(parents=True)
    with open(folder / '.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out, _ = call(*argv)
    assert status == 1 and 'another process has it' in out and not (folder / 'log.jsonl').exists()


def test_a_run_that_another_process_finishes_is_done(base, tmp_path, monkeypatch, capsys):
    rows = sized(
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=16 d=24 kind=recurrent',
        f'--out_dir={tmp_path}',
    )
    monkeypatch.setattr(sweep, 'start', lambda row, gpu, n: fake([row]))
    assert sweep.execute(rows) == 0 and 'another process has finished it' in capsys.readouterr().out


def test_runs_that_fail_alike_end_a_sweep(tmp_path):
    """Without levels no run can start: three say so, not all."""
    base = tmp_path / 'base.py'
    base.write_text(f'levels_dir = {str(tmp_path)!r}\n')  # an empty one
    status, out, err = call(
        '--plan=sokoban-small',
        '--only=model=convglu',
        '--seeds=3',
        f'--out_dir={tmp_path}/out',
        f'--base={base}',
        '--run',
    )
    assert (
        status == 1
        and out.count('FAILED') == 3
        and 'the first 3 runs failed alike: the other ' in out
        and '--download=True --levels_dir=' in out
    ), out + err


# ----------------------------------------------------------------------------- values, figures, tables


def test_values_and_spread(tmp_path):
    rows = sized(
        '--plan=sokoban-small', '--only=L=1,2 model=convlstm', f'--out_dir={tmp_path}', '--seeds=3'
    )
    fake(rows, lambda row: row.seed * 1.0 + row.L)
    runs = sweep.finished(rows)
    assert len(runs) == len(rows)
    assert figures.value(*runs[0]) == pytest.approx(
        1 + 1 + 0
    )  # the last five: v-2, v-1, v, v+1, v+2
    mean, deviation, n = figures.cells(runs)[rows[0]._replace(seed=0)]
    assert (mean, deviation, n) == (
        pytest.approx(3.0),
        pytest.approx(statistics.stdev([2, 3, 4])),
        3,
    )
    one = figures.cells(runs[:1])[rows[0]._replace(seed=0)]
    assert math.isnan(one[1]) and one[2] == 1


def test_saturation_is_the_best_of_at_most_L(tmp_path):
    rows = sized(
        '--plan=sokoban-small',
        '--only=model=convlstm kind=recurrent',
        f'--out_dir={tmp_path}',
        '--seeds=2',
    )
    means = {1: 3.0, 2: 8.0, 4: 5.0, 8: 9.0, 16: 1.0}
    fake(rows, lambda row: means[row.L] + row.seed - row.d / 1000)
    got = figures.saturation(figures.cells(sweep.finished(rows)))
    best = {1: 3, 2: 8, 4: 8, 8: 9, 16: 9}
    for L, (mean, error, n) in got.items():
        assert mean == pytest.approx(best[L] + 1.5 - 0.032) and n == 2
        assert error == pytest.approx(statistics.stdev([1, 2]) / math.sqrt(2))
    lm = sized('--plan=lm-small', '--only=d=768 kind=recurrent', f'--out_dir={tmp_path}')
    fake(
        lm, lambda row: {1: 3.6, 2: 3.5, 4: 3.52, 8: 3.55, 16: 3.4}[row.L]
    )  # a loss: less is better
    assert [
        round(m, 2) for m, _, _ in figures.saturation(figures.cells(sweep.finished(lm))).values()
    ] == [3.6, 3.5, 3.5, 3.5, 3.4]


@pytest.mark.parametrize(
    'plan, model, words',
    [
        (
            'communication',
            'convlstm',
            ['radius r', 'bars: one standard error', 'return minus that of 7'],
        ),
        ('scaling', 'convglu', ['L = 8', 'experts E a level']),
        (
            'share-kv',
            'transformer',
            [
                'share kv',
                'True',
                'False',
                'bars: one standard error',
                '>validation loss (nats a token)<',
                'validation loss minus that of True',
            ],
        ),
    ],
)
def test_ablation_figures(plan, model, words, tmp_path):
    rows = [
        row
        for row in sized(f'--plan={plan}', f'--out_dir={tmp_path}', '--seeds=2')
        if row.model == model
    ]
    fake(
        rows,
        lambda row: row.L + row.seed / 10 + (0.5 if dict(row.more).get('share_kv') is False else 0),
    )
    if (
        plan == 'share-kv'
    ):  # the default of L = 1 is missing: nothing may be drawn against another setting
        rows = [row for row in rows if (row.L, row.more) != (1, (('share_kv', True),))]
    figures.draw(
        f'{plan}, shrunk',
        sweep.plan_rows(),
        [(row, figures.read_log(sweep.folder_of(row))) for row in rows],
        'token',
        '',
        str(tmp_path),
    )
    text = next(tmp_path.glob('*.svg')).read_text()
    assert (
        all(word in text for word in (*words, ', shrunk, 2 seeds'))
        and len(list(tmp_path.glob('*.png'))) == 1
    )
    if plan == 'share-kv':  # three cells' values, two differences of two points each
        rows = [row._replace(seed=0) for row in rows]
        figure = figures.ablation_figure(
            dict.fromkeys(rows, (1.0, 0.1, 2)),
            [(('share_kv', True),), (('share_kv', False),)],
            (('share_kv', True),),
            'title',
            'loss',
        )
        assert [len(axes.containers) for axes in figure.axes] == [3, 2]


def test_standard_errors_and_differences_by_hand():
    """Means 3 and 5, deviations 1 and 2, of four seeds each."""
    points = {'a': (3.0, 1.0, 4), 'b': (5.0, 2.0, 4), 'c': (4.0, math.nan, 1)}
    assert figures.with_errors(points) | {'c': 0} == {
        'a': (3.0, 0.5, 4),
        'b': (5.0, 1.0, 4),
        'c': 0,
    }
    assert figures.differences(points, 'a')['b'] == (2.0, pytest.approx(math.sqrt(1.25)), 4)
    assert figures.differences(points, 'a')['a'][0] == 0.0 and math.isnan(
        figures.differences(points, 'a')['a'][1]
    )


def test_ablations_are_drawn_with_standard_errors(tmp_path, monkeypatch):
    """What the two panels are given: values with their errors, and differences with theirs."""
    rows, drawn = sized('--plan=communication', f'--out_dir={tmp_path}', '--seeds=4'), []
    fake(rows, lambda row: dict(row.more)['radius'] + [0, 2, 4, 6][row.seed - 1])
    points = figures.cells(sweep.finished(rows))
    deviation, real = statistics.stdev([0, 2, 4, 6]), figures.line
    monkeypatch.setattr(
        figures,
        'line',
        lambda axes, points, *more: (drawn.append(points), real(axes, points, *more)),
    )
    ways = [(('radius', r),) for r in range(8)]
    figures.ablation_figure(points, ways, ways[7], 'title', 'return')
    assert drawn[0][5] == (pytest.approx(5 + 3), pytest.approx(deviation / 2), 4)
    assert drawn[1][5] == (pytest.approx(-2), pytest.approx(deviation / math.sqrt(2)), 4)
    assert drawn[1][7][0] == 0.0 and math.isnan(drawn[1][7][1])


def test_the_three_budgets_are_joined(tmp_path):
    """Plan sokoban reads the runs of its three parts where those are, and draws a line a budget."""
    parts = []
    for budget in ('small', 'medium', 'large'):
        parts += sized(
            f'--plan=sokoban-{budget}',
            f'--out_dir={tmp_path}',
            '--only=L=1,2 model=convlstm',
            '--seeds=2',
        )
        fake(sweep.plan_rows(), lambda row: row.d / 100 + row.seed)
    rows = sized(
        '--plan=sokoban', f'--out_dir={tmp_path}', '--only=L=1,2 model=convlstm', '--seeds=2'
    )
    assert sorted(rows) == sorted(parts) and len(sweep.finished(rows)) == len(rows)
    paths = figures.draw('sokoban', rows, sweep.finished(rows), 'token', '', str(tmp_path))
    assert [os.path.basename(path) for path in paths] == [
        'budgets_convlstm.png',
        'budgets_convlstm.svg',
    ]
    text = Path(paths[1]).read_text()
    assert all(
        word in text
        for word in (
            'small budget',
            'medium budget',
            'large budget',
            'at most L levels',
            'one standard error',
        )
    )


def test_another_runs_settings_are_not_taken_for_this(base, tmp_path, capsys):
    """Whatever makes another run counts; what only says how it runs does not."""
    rows = sized(
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=1 d=24',
        f'--out_dir={tmp_path}',
    )
    fake(rows)
    assert len(sweep.finished(rows)) == 2
    for text, finished in (
        ('share_kv = False', 0),
        ("aggregation = 'mean'", 0),
        ('betas = (0.8, 0.9)', 0),
        ('val_tokens = 64', 0),
        ('batch_size = 2', 2),
        ('threads = 3', 2),
    ):
        other = tmp_path / 'other.py'
        other.write_text(base.read_text() + text)
        rows = sized(
            '--plan=lm-small',
            f'--base={other}',
            '--width=0.03125',
            '--only=L=1 d=24',
            f'--out_dir={tmp_path}',
        )
        assert len(sweep.finished(rows)) == finished, text
        assert ('other settings' in capsys.readouterr().err) == (finished == 0)


def test_nothing_finished_is_ever_overwritten(base, tmp_path):
    """Without checkpoints: a finished run stays done, also without its config.json; a damaged log is refused; a killed start is made anew."""
    (row,) = sized(
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=1 d=24 kind=recurrent',
        f'--out_dir={tmp_path}',
    )
    fake([row])
    folder = Path(sweep.folder_of(row))
    assert sweep.state_of(row) == 'done' and '--overwrite=True' not in sweep.command(row, 'done')
    assert sweep.start(row, '', 1) is None  # another process may have finished it meanwhile
    (folder / 'config.json').write_text('{')
    assert sweep.state_of(row) == 'done' and len(sweep.finished([row])) == 1
    log = (folder / 'log.jsonl').read_text()
    (folder / 'log.jsonl').write_text('#' + log)
    assert sweep.state_of(row) == 'damaged'
    with pytest.raises(SystemExit):
        sweep.execute([row])
    assert (folder / 'log.jsonl').read_text() == '#' + log
    (folder / 'log.jsonl').write_text(log.splitlines()[0] + '\n')
    assert sweep.state_of(row) == 'begun' and sweep.command(row, 'begun')[-1] == '--overwrite=True'
    (folder / 'ckpt_last.pt').write_text('')
    assert sweep.state_of(row) == 'cut' and sweep.command(row, 'cut')[-1] == '--resume=True'
    (folder / 'log.jsonl').write_text('#' + log)  # resuming repairs it
    assert sweep.state_of(row) == 'cut' and sweep.progress(row) == (0.0, 0.0)
    sweep.print_plan([row])


def test_config_files_under_the_runs(base, tmp_path):
    """base_ff alone leaves the recurrent runs their own; a file is looked for beside sweep.py too."""
    rows = sized('--plan=lm-small-long', f'--base_ff={base}', '--only=d=768 L=1')
    assert sweep.config_of(rows[0])['window'] == 1024 and sweep.config_of(rows[1])['window'] == 8
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        row = sized(
            '--plan=lm-small',
            '--base=config/tiny_lm.py',
            '--width=0.0625',
            '--only=d=48 L=1 kind=recurrent',
        )[0]
        assert (
            sweep.config_of(row)['block_size'] == 32
            and os.path.exists(sweep.arguments(row)[0])
            and os.path.exists(sweep.arguments(row)[1])
        )
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    'gpus, settings, visible, expected',
    [
        (0, ['--workers=3'], None, ['', '', '']),
        (4, [], None, ['0', '1', '2', '3']),
        (4, ['--gpus_per_run=2'], None, ['0,1', '2,3']),
        (2, ['--workers=4'], '6,7', ['6', '7', '6', '7']),
        (4, ['--index=6', '--workers=1'], None, ['2']),
    ],
)
def test_workers_and_gpus(monkeypatch, gpus, settings, visible, expected):
    sized('--plan=lm-small', *settings)
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: gpus)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    assert sweep.devices() == expected


def test_eta_counts_what_is_done(tmp_path):
    """A finished run of 100 s, one of the same kind half done, two to come, by two workers: 250 s of work, and none can be shorter than 100."""
    rows = sized(
        '--plan=lm-small', '--only=L=1 d=768 kind=recurrent', '--seeds=4', f'--out_dir={tmp_path}'
    )
    assert sweep.remaining(rows, rows, 2) == 'n/a'
    fake(rows[:2], seconds=100.0)
    path = Path(sweep.folder_of(rows[1])) / 'log.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        ''.join(json.dumps(r | {'step': 5000, 'seconds': 50.0}) + '\n' for r in lines[:4])
    )
    assert (
        sweep.remaining(rows, rows[1:], 2) == '0:02:05'
        and sweep.remaining(rows, rows[3:], 2) == '0:01:40'
        and sweep.remaining(rows, [], 2) == '0:00:00'
    )


def test_each_cell_is_tuned_with_seed_1_and_its_best_gets_the_other_seeds(base, tmp_path):
    argv = [
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.0625',
        '--only=L=1,4 d=48 kind=recurrent',
        f'--out_dir={tmp_path}',
        '--seeds=3',
        '--tune=learning_rate=0.02,0.04,0.04,1',
    ]
    rows = sized(*argv)
    assert [(r.L, r.more, r.seed) for r in rows] == [
        (L, (('learning_rate', rate),), 1) for L in (1, 4) for rate in (0.02, 0.04, 1.0)
    ]
    assert (
        '--learning_rate=0.04' in sweep.arguments(rows[1])
        and sweep.config_of(rows[1])['learning_rate'] == 0.04
    )
    loss = {(1, 0.02): 3.0, (1, 0.04): 2.0, (1, 1.0): 2.5, (4, 0.02): 1.0, (4, 0.04): 1.5}
    fake(rows[:5], lambda row: loss[row.L, row.more[0][1]])
    assert sized(*argv) == rows  # one is missing
    bad = Path(sweep.folder_of(rows[5]))
    bad.mkdir(parents=True)
    (bad / 'failed.json').write_text('{}')  # a rate too high for it
    grown = sized(*argv)
    assert grown[:6] == rows  # jobs' numbers stay
    assert [(r.L, r.more[0][1], r.seed) for r in grown[6:]] == [
        (1, 0.04, 2),
        (4, 0.02, 2),
        (1, 0.04, 3),
        (4, 0.02, 3),
    ]
    fake(grown[6:], lambda row: 9.0)  # the best with all seeds is shown, not a lucky single one
    shown = figures.at_best(sweep.finished(grown), 'learning_rate')
    assert {(r.L, r.more[0][1], r.seed) for r, _ in shown} == {(1, 0.04, s) for s in (1, 2, 3)} | {
        (4, 0.02, s) for s in (1, 2, 3)
    }
    assert figures.without(rows[0], 'learning_rate').more == () and figures.at_best(
        sweep.finished(grown), ''
    ) == sweep.finished(grown)


def test_tuning_goes_on_to_the_other_seeds(base, tmp_path):
    """One command: a value that cannot run is no winner and does not stop the rest."""
    argv = [
        '--plan=residual',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=8 model=transformer residual=shared',
        f'--out_dir={tmp_path}',
        '--seeds=2',
        '--tune=grad_clip=-1,1',
    ]
    status, out, err = call(*argv)
    assert status == 0 and len(out.splitlines()) == 5 and 'other seeds' in out.splitlines()[-1]
    status, out, err = call(*argv, '--run', '--figure', '--table')
    assert (
        status == 1
        and out.count(': done') == 2
        and 'grad_clip' in out
        and '3 runs, 1 finished before' in out
    ), out + err
    drawn = (tmp_path / 'residual' / 'ablation_transformer.svg').read_text()
    assert 'best grad clips, 2 seeds' in drawn and 'bars: one standard error' in drawn
    assert (
        (tmp_path / 'residual' / 'table_transformer.csv')
        .read_text()
        .splitlines()[0]
        .startswith('variant,budget,L,E,d,residual,grad_clip,')
    )


def test_a_changed_winner_is_followed(base, tmp_path, monkeypatch):
    """A value that failed before and is the best once it has run: its other seeds run too, in the same command."""
    argv = [
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.0625',
        '--only=L=1 d=48 kind=recurrent',
        f'--out_dir={tmp_path}',
        '--seeds=2',
        '--tune=learning_rate=0.02,0.04',
    ]
    rows, asked = sized(*argv), []
    fake(rows[:1], lambda row: 2.0)
    os.makedirs(sweep.folder_of(rows[1]))
    (Path(sweep.folder_of(rows[1])) / 'failed.json').write_text('{}')

    def execute(rows):
        asked.append([(row.more[0][1], row.seed) for row in rows])
        fake(rows, lambda row: 1.0 if row.more[0][1] == 0.04 else 2.0)
        return 0

    monkeypatch.setattr(sweep, 'execute', execute)
    monkeypatch.setattr(sys, 'argv', ['sweep.py', *argv, '--run'])
    forget()
    assert sweep.main() == 0
    assert asked == [[(0.02, 1), (0.04, 1), (0.02, 2)], [(0.02, 1), (0.04, 1), (0.04, 2)]]


def test_best_of_cells_with_all_seeds(tmp_path):
    """One lucky seed of an unfinished cell is no best."""
    rows = sized(
        '--plan=sokoban-small',
        '--only=L=1 model=convlstm kind=recurrent',
        f'--out_dir={tmp_path}',
        '--seeds=2',
    )
    rows = [row for row in rows if (row.d, row.seed) != (128, 2)]
    fake(rows, lambda row: {128: 9.0, 64: 7.0, 32: 2.0}[row.d])
    runs = sweep.finished(rows)
    assert [row.d for row in figures.chosen_by_return(runs)] == [64]
    assert figures.saturation(figures.cells(runs)) == {1: (7.0, 0.0, 2)}


@pytest.mark.parametrize(
    'damage',
    [
        {'episodic_return': 'abc'},
        {'episodic_return': {}},
        {'episodic_return': math.nan},
        {'env_steps': 'x'},
        {'step': 1.5},
    ],
)
def test_damaged_values(damage, tmp_path):
    rows = sized(
        '--plan=sokoban-small',
        '--only=L=1 model=convlstm kind=recurrent d=64',
        f'--out_dir={tmp_path}',
        '--seeds=1',
    )
    fake(rows)
    path = Path(sweep.folder_of(rows[0])) / 'log.jsonl'
    path.write_text(path.read_text() + json.dumps({'step': 10**9} | damage) + '\n')
    with pytest.raises(figures.LogError, match='log.jsonl:9'):
        figures.read_log(sweep.folder_of(rows[0]))


def test_a_corrupt_log_is_named_and_skipped(tmp_path, capsys):
    rows = sized(
        '--plan=sokoban-small',
        '--only=L=1 model=convlstm kind=recurrent',
        f'--out_dir={tmp_path}',
        '--seeds=1',
    )
    fake(rows)
    path = Path(sweep.folder_of(rows[1])) / 'log.jsonl'
    path.write_text(path.read_text().replace('"step"', '"st\x00ep', 1))
    unfinished = Path(sweep.folder_of(rows[2])) / 'log.jsonl'
    unfinished.write_text(unfinished.read_text().splitlines()[0] + '\n{"half')
    assert [row for row, _ in sweep.finished(rows)] == rows[:1]
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and f'{path}:1' in err and 'skipped' in err
    status, out, err = call(
        '--plan=sokoban-small',
        '--only=L=1 model=convlstm kind=recurrent',
        f'--out_dir={tmp_path}',
        '--seeds=1',
        '--table',
    )
    assert status == 0 and '1 of 3 runs' in out and f'{path}:1' in err


def test_the_table_has_the_papers_layout(tmp_path):
    argv = [
        '--plan=sokoban-small',
        '--only=L=1,2',
        f'--out_dir={tmp_path}',
        f'--results={tmp_path}/shown',
    ]
    rows = sized(*argv)
    fake(rows, lambda row: row.seed + row.d / 64)
    status, out, err = call(*argv, '--table', '--figure')
    assert status == 0, err
    with open(tmp_path / 'shown' / 'table_convlstm.csv') as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == [
        'variant',
        'budget',
        'L',
        'E',
        'd',
        'mean_return',
        'variance',
        'n_seeds',
    ]
    assert table[0] == {
        'variant': 'recurrent',
        'budget': 'small',
        'L': '1',
        'E': '1',
        'd': '128',
        'mean_return': '4.0000',
        'variance': '1.0000',
        'n_seeds': '3',
    }
    assert (tmp_path / 'shown' / 'table_convlstm.md').read_text().splitlines()[
        2
    ] == '| recurrent | small | 1 | 1 | 128 | 4.0000 | 1.0000 | 3 |'
    runs = json.loads((tmp_path / 'shown' / 'runs.json').read_text())['runs']
    assert len(runs) == len(rows) and runs[0]['value'] == 3.0 and runs[0]['seed'] == 1
    names = {p.name for p in (tmp_path / 'shown').iterdir()}
    assert {
        f'{f}_{m}.{k}'
        for f in ('allocations', 'saturation', 'curves')
        for m in ('convlstm', 'convglu')
        for k in ('png', 'svg')
    } < names


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's tables are not here (../shared/paper)")
def test_the_papers_points_beside_ours(tmp_path):
    argv = [
        '--plan=sokoban-small',
        '--only=L=1,2 model=convlstm',
        f'--out_dir={tmp_path}',
        '--seeds=1',
    ]
    fake(sized(*argv))
    status, out, err = call(*argv, '--table', '--figure', f'--reference={PAPER}')
    assert status == 0, err
    with open(tmp_path / 'sokoban-small' / 'table_convlstm.csv') as file:
        row = next(csv.DictReader(file))
    assert (row['paper_mean'], row['paper_variance'], row['variance']) == ('7.7500', '0.0076', '')
    assert 'd = 64, paper' in (tmp_path / 'sokoban-small' / 'allocations_convlstm.svg').read_text()
    status, out, err = call(*argv, '--figure', f'--reference={tmp_path}')
    assert status == 2 and 'sokoban_returns.csv' in err and err.count('\n') == 1


def test_the_solve_table_takes_the_best_of_each_depth(tmp_path):
    argv = [
        '--plan=sokoban-small',
        '--only=L=1,2 kind=recurrent model=convlstm',
        f'--out_dir={tmp_path}',
        '--seeds=2',
    ]
    rows = sized(*argv)
    fake(rows, lambda row: {128: 5.0, 64: 7.0, 32: 2.0}[row.d] + row.seed)
    for row in rows:
        if row.d == 64:  # the best: only these are looked at
            steps = sweep.total_of(row) * 640
            (Path(sweep.folder_of(row)) / 'eval_unfiltered-test.json').write_text(
                json.dumps({'solve_rate': 0.5 + row.seed / 10, 'env_steps': steps})
            )
    reference = tmp_path / 'paper'
    reference.mkdir()
    (reference / 'sokoban_baselines.csv').write_text(
        'method,training_steps,unfiltered_test_percent,std\n"DRC(3,3)",2B,99.3,\n'
    )
    (reference / 'sokoban_returns.csv').write_text(
        'variant,budget,L,E,d,mean_return,variance,n_seeds\n'
    )
    (reference / 'sokoban_solve_rates.csv').write_text(
        'variant,budget,L,E,d,unfiltered_test_percent,std\nrecurrent,small,1,1,128,86.03,3.71\n'
    )
    status, out, err = call(*argv, '--table=solve', f'--reference={reference}')
    assert status == 0, err
    lines = (tmp_path / 'sokoban-small' / 'solve_convlstm.csv').read_text().splitlines()
    assert lines == [
        'variant,budget,L,E,d,unfiltered_test_percent,std,n_seeds',
        'recurrent,small,1,4,64,65.00,7.07,2',
        'recurrent,small,2,2,64,65.00,7.07,2',
        '"recurrent, paper",small,1,1,128,86.03,3.71,',
        '"DRC(3,3), 2B, paper",,,,,99.30,,',
    ]


def test_solve_table_of_trained_agents(tmp_path):
    """Trains two tiny agents, and plays where no evaluation is there yet."""
    base = tmp_path / 'base.py'
    base.write_text(
        "split = 'generated'\neval_split = 'generated'\nn_levels = 20\nn_boxes = 1\nmax_moves = 12\nn_envs = 4\nunroll = 5\nhead_dim = 8\n"
        "total_steps = 1200\neval_interval = 60\neval_games = 6\nlog_interval = 10\ncompile = False\ndevice = 'cpu'\n"
    )
    argv = [
        '--plan=sokoban-small',
        f'--base={base}',
        '--width=0.0625',
        '--only=L=1 d=8 model=convglu',
        f'--out_dir={tmp_path}',
        '--seeds=1',
        '--workers=2',
    ]
    status, out, err = call(*argv, '--run', '--table=solve', '--levels=', '--figure')
    assert status == 0, out + err
    assert out.count('playing generated') == 2
    lines = (tmp_path / 'sokoban-small' / 'solve_convglu.csv').read_text().splitlines()
    assert (
        lines[0] == 'variant,budget,L,E,d,held_out_percent,std,n_seeds'
        and len(lines) == 3
        and 0 <= float(lines[1].split(',')[5]) <= 100
    )
    status, out, err = call(*argv, '--table=solve', '--levels=')
    assert status == 0 and 'playing' not in out
    for folder in (tmp_path / 'sokoban-small').glob('convglu*'):  # of a file that was there once
        (folder / 'eval_nope.json').write_text((folder / 'eval_generated.json').read_text())
    status, out, err = call(*argv, '--table=solve', f'--levels={tmp_path}/nope.txt')
    assert status == 2 and 'nope.txt' in err and 'its evaluation on nope failed' in err
