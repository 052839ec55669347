"""Test paper/sweep.py: lists, jobs, running with failures, signals and stops.

A fake trainer that learns nothing stands in for train_lm.py; the last test runs both real ones."""

import json
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

import pytest
from processes import ROOT
from small_runs import AGENT, LM, assert_refused

from configurator import configure
from paper import figures, plans, sweep
from paper.plans import Plan, grid
from run import is_finished, log_of

FAKE = '''
"""A trainer with settings and files of train_lm.py that learns nothing."""
import json, os, signal, time
from configurator import configure

out_dir = 'out/lm'
data_dir = 'data'
resume = False
arch = 'experts'
recurrent = True
tokenizer = 'bytes'
tokens_per_step = 64
n_layer = 2
n_expert = 2
n_embd = 128
dtype = 'auto'
threads = 0
seed = 1
max_iters = 8
pause = 0.0           # seconds per update
fails = ''            # message
fails_at_stop = False
prints = ''           # name of a variable of the environment

RANGES = {'resume': [False, True, 'auto']}
config = configure(globals(), quiet=True)
if fails:
    raise SystemExit(f'error: {fails}')
print(prints, os.environ.get(prints))
os.makedirs(out_dir, exist_ok=True)
path, stopped = f'{out_dir}/log.jsonl', []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))

def write(**more):
    with open(f'{out_dir}/config.json', 'w') as file:
        json.dump({**config, **more}, file)

write()
done = len(open(path).readlines()) if os.path.exists(path) else 0
with open(path, 'a') as file:
    for step in range(done, max_iters + 1):
        time.sleep(pause)
        print(json.dumps({'step': step, 'seconds': 0.1 * step}), file=file, flush=True)
        if stopped:
            raise SystemExit('error: disk full' if fails_at_stop else 143)
write(finished=True)
'''
HOSTILE = "a b; touch x' $(touch y) [c]"  # a folder that would create files if a shell read it


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that makes plan 'fake' of runs of the fake trainer in tmp_path, where the
    test then runs."""
    (tmp_path / 'fake.py').write_text(FAKE)
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.chdir(tmp_path)

    def make(**settings):
        runs = grid(str(tmp_path / 'fake.py'), **settings)
        monkeypatch.setitem(plans.PLANS, 'fake', Plan('Fake', runs))
        return [Path('out') / run.folder for run in plans.runs_of('fake')]

    return make


@pytest.fixture
def main(monkeypatch):
    """Return a function that runs paper.sweep with these arguments in this process, and returns
    its exit status."""

    def call(*argv):
        monkeypatch.setattr(sys, 'argv', ['sweep.py', *map(str, argv)])
        return sweep.main()

    return call


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


# ---- lists and jobs ----


def test_all_plans_are_listed_with_what_makes_their_figure(main, capsys):
    assert main('--out=my runs') == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows.keys() == {'plan', *plans.names_of_plans()}
    assert rows['lm-small'].endswith("python -m paper.figures 'my runs/lm-small'")
    assert rows['lm-small'].split()[1:3] == ['26', '3.0e+19']
    assert rows['lm'].endswith("'my runs/lm-small' 'my runs/lm-medium' '--out=my runs/lm'")
    assert 'bench.py' in rows['latency']
    assert "config/probe_large.py 'my runs/sokoban-large'/arch-convlstm_" in rows['probes']


def test_a_listed_run_has_its_cost_and_a_command_with_its_settings(main, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main('lm-small', '--only=n_layer == 16 and n_embd == 768 and not recurrent') == 0
    head, line, *_ = capsys.readouterr().out.splitlines()
    state, cells = line[5:20].strip(), line[20:].split()
    assert (state, cells[:3]) == ('not started', ['2.14e+08', '1.00', '1.15e+18'])
    for name, cell in zip(('layers', 'layers/W', 'training'), cells, strict=False):
        assert head.index(name) + len(name) == line.index(cell) + len(cell)
    assert head.index('command') == line.index('python')
    _, script, *arguments = shlex.split(line[line.index('python') :])
    config = configure({'__file__': ROOT / script, 'RANGES': {'resume': ['auto']}}, arguments, True)
    assert config['block_size'] == 256 and config['n_expert'] == 1 and config['resume'] == 'auto'
    name = 'recurrent-False_n_layer-16_n_expert-1_n_embd-768_seed-1'
    assert config['out_dir'] == f'out/lm-small/{name}'


def test_only_settings_that_change_results_change_the_folder(main, fake, capsys):
    fake(n_layer=[1])
    main('fake', '--gpus_per_run=2', '--', '--dtype=float32', '--threads=2', '--data_dir=there')
    out = capsys.readouterr().out
    assert '--out_dir=out/fake-dtype/n_layer-1_dtype-float32 ' in out
    assert '--threads=2' in out and '--data_dir=there' in out
    assert 'python -m torch.distributed.run --standalone --nproc_per_node=2 fake.py' in out
    assert out.endswith('python -m paper.figures out/fake-dtype\n')


def test_states_of_runs_are_listed(main, fake, capsys):
    done, started, _, other, elsewhere = fake(n_layer=[1, 2, 4, 8, 16])
    more = {
        done: {'finished': True},
        started: {},
        other: {'n_expert': 3},
        elsewhere: {'data_dir': 'x'},
    }
    for folder, saved in more.items():
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text(json.dumps({'n_expert': 2, 'threads': 5, **saved}))
        (folder / 'log.jsonl').write_text('{"step": 5}\n')
    main('fake')
    lines = capsys.readouterr().out.splitlines()[1:]
    states = (
        'done',
        '5 of 8',
        'not started',
        'has n_expert = 3, not 2',
        "has data_dir = 'x', not 'data'",
    )
    assert all(state in line for state, line in zip(states, lines, strict=False))


def test_a_slurm_job_has_the_unfinished_runs_and_quotes_folders(main, fake, capsys):
    fake(n_layer=[1, 2, 4], max_iters=1)
    assert main('fake', '--run', f'--out={HOSTILE}', '--only=n_layer == 2') == 0
    capsys.readouterr()
    main('fake', '--slurm', f'--out={HOSTILE}')
    job = capsys.readouterr().out
    assert '--array=0-1 ' in job.replace('\n', ' ') and '--gpus-per-task=1' in job
    environment = os.environ | {'SLURM_ARRAY_TASK_ID': '1'}
    subprocess.run(['bash'], input=job, text=True, env=environment)
    assert [is_finished(Path(HOSTILE, 'fake', f'n_layer-{L}')) for L in (1, 2, 4)] == [0, 1, 1]
    assert {path.name for path in Path().iterdir()} == {'fake.py', HOSTILE}
    main('fake', '--run', f'--out={HOSTILE}')
    assert_refused('all 3 runs are done', main, 'fake', '--slurm', f'--out={HOSTILE}')


@pytest.mark.parametrize(
    'argv, message',
    [
        ('nonsense', "'nonsense' is no plan.*lm-small.*study-lm"),
        ('lm-small --rum', 'unrecognized arguments: --rum'),
        ('lm-small --workers=many', 'argument --workers: invalid int'),
        ('latency --run', 'latency needs no runs: python bench.py'),
        ('lm-small --only=depth==3', "--only='depth==3'.*depth"),
        ('lm-small --only=n_layer==', "--only='n_layer=='"),
        ('lm-small --only=n_layer', "--only='n_layer'"),
        ('lm-small --only=n_layer==3', "--only='n_layer==3': .*no run fulfills it"),
        ('lm-small --run --vary=nonsense=1', "unknown setting 'nonsense'"),
        ('lm-small --vary=weight_decay', 'expected --vary=NAME=VALUE,VALUE'),
        ('lm-small --run --vary=weight_decay=much', 'weight_decay expects a finite number'),
        ('lm-small --run -- dtype=float32', "'dtype=float32': expected .*--NAME=VALUE after --"),
        ('lm-small --run -- --out_dir=x', "'--out_dir=x': .*--out names"),
        ('lm-small --run --workers=-1', 'must be at least 1'),
        ('lm-small --vary=share_kv=False', 'share_kv = False is for recurrent = True'),
        ('sokoban-small --run --gpus_per_run=3', '--gpus_per_run=3: there are 2 GPUs'),
    ],
)
def test_mistakes_are_refused_in_one_line_and_leave_nothing(
    argv, message, main, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: 2)
    before, dashes, after = argv.partition(' -- ')
    arguments = [*before.split(), f'--out={tmp_path}/out', *dashes.split(), *after.split()]
    assert_refused(message, main, *arguments)
    assert not (tmp_path / 'out').exists()


# ---- running ----


@pytest.mark.parametrize(
    'gpus, visible, workers, per_run, expected',
    [
        (0, None, 3, 1, ['', '', '']),
        (0, None, 0, 2, ['']),
        (4, None, 0, 2, ['0,1', '2,3']),
        (2, '6,7', 4, 1, ['6', '7', '6', '7']),
    ],
)
def test_gpus_are_shared_out_to_workers(monkeypatch, gpus, visible, workers, per_run, expected):
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: gpus)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    assert sweep.gpus_of_workers(workers, per_run) == expected


def test_workers_share_the_cores_and_each_has_a_gpu(main, fake, monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(sweep.torch, 'get_num_threads', lambda: 8)
    monkeypatch.setattr(sweep, 'gpus_of_workers', lambda *_: ['6', '7'])
    folders = fake(prints=['OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES'], pause=0.1)
    assert main('fake', '--run') == 0
    threads, gpu = ((folder / 'stdout.txt').read_text().splitlines()[1] for folder in folders)
    assert threads == 'OMP_NUM_THREADS 4' and gpu[-1] in '67'


def test_a_failed_run_is_reported_and_the_next_call_runs_only_what_is_not_done(main, fake, capsys):
    failed, done = fake(fails=['no space: [1]', ''])
    assert main('fake', '--run') == 1
    out = capsys.readouterr().out
    assert f'{failed}: FAILED (exit status 1): error: no space: [1]; see stdout.txt' in out
    assert f'{done}: done' in out and out.endswith('1 FAILED, 1 done\n')
    before = (done / 'stdout.txt').read_text()
    assert main('fake', '--run') == 1
    assert (done / 'stdout.txt').read_text() == before
    assert capsys.readouterr().out.startswith('1 of 2 runs are done')


@pytest.mark.parametrize('name, value', [('max_iters', 6), ('data_dir', 'other')])
def test_a_folder_of_another_run_is_not_taken_for_a_result(main, fake, capsys, name, value):
    """Whatever says so: the plan has changed, or the command line names other data."""
    (folder,) = fake(n_layer=[1], max_iters=4)
    main('fake', '--run')
    argv = ['--', f'--{name}={value}'] if name == 'data_dir' else []
    if name == 'max_iters':
        fake(n_layer=[1], max_iters=6)
    message = rf'{folder} has {name} = .*, not {value!r}: move it away, or choose another --out'
    assert_refused(message, main, 'fake', '--run', *argv)
    assert_refused(message, main, 'fake', '--slurm', *argv)
    assert len(log_of(folder)) == 5


TORCHRUN = 'E1125 21:09:39 12522 torch/distributed/elastic/api.py:1002] failed\nTraceback (most\n'


@pytest.mark.parametrize(
    'status, printed, expected',
    [
        (1, f'error: rank 1: the loss is nan\n{TORCHRUN}', 'FAILED (exit status 1): error: rank 1'),
        (1, f'step 3\n{TORCHRUN}SignalException: 15\n', 'stopped'),
        (1, f'error: full disk\n{TORCHRUN}SignalException: 15\n', 'FAILED (exit status 1): error:'),
        (
            143,
            'Traceback (most recent call last):\nOSError: full\n',
            'FAILED (exit status 143): OS',
        ),
        (-15, 'importing', 'stopped'),
        (-9, 'step 3', 'FAILED (exit status -9): step 3'),
        (1, '', 'FAILED (exit status 1): it printed nothing'),
    ],
)
def test_what_became_of_a_run(tmp_path, status, printed, expected):
    (tmp_path / 'stdout.txt').write_text(f'python a.py\nerror: before\npython a.py\n{printed}')
    process = SimpleNamespace(args=['python', 'a.py'], returncode=status)
    assert sweep.outcome(process, tmp_path).startswith(expected)


def test_a_copy_of_the_trainer_has_folders_of_its_own(main, fake):
    fake(n_layer=[1])
    Path('mine.py').write_text(FAKE.replace('seed = 1\n', 'seed = 1\nz_loss = 0.0\n'))
    assert main('fake', '--script=mine.py', '--vary=z_loss=0,1.5', '--run') == 0
    names = {path.name for path in Path('out/fake-mine-z_loss').iterdir()}
    assert names == {'n_layer-1_z_loss-0.0', 'n_layer-1_z_loss-1.5'}


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_runs_and_the_next_call_resumes_them(number, main, fake, capsys):
    folders = fake(n_layer=[1, 2, 4], pause=0.02, max_iters=60)

    def interrupt():
        wait_for(lambda: all(len(log_of(folder)) > 3 for folder in folders[:2]))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    line = ['fake', '--run', '--workers=2', '--vary=n_layer=1,2,4']
    assert main(*line) == 128 + number
    thread.join()
    out = capsys.readouterr().out
    assert out.count(': stopped\n') == 2 and 'the same line resumes what was saved' in out
    assert not any(map(is_finished, folders)) and not folders[2].exists()
    assert main(*line) == 0
    for folder in folders:
        assert [record['step'] for record in log_of(folder)] == list(range(61))


def test_the_expected_time_follows_from_seconds_per_flop(main, fake):
    """One run of 8 updates is done, and one with twice as many layers has done a half."""
    fake(n_layer=[1, 2, 4])
    runs = plans.runs_of('fake')
    assert sweep.forecast(runs, Path('out'), 1) == '0 of 3 runs are done, eta unknown'
    for run, step, finished in ((runs[0], 8, True), (runs[1], 4, False)):
        folder = Path('out') / run.folder
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text(json.dumps({'finished': finished}))
        (folder / 'log.jsonl').write_text(json.dumps({'step': step, 'seconds': 1000.0}))
    flops = [plans.cost(run).training for run in runs]
    rate = 2000 / (flops[0] + flops[1] / 2)
    left = sweep.timedelta(seconds=int(rate * (flops[1] / 2 + flops[2]) / 2))
    assert sweep.forecast(runs, Path('out'), 2) == f'1 of 3 runs are done, eta {left}'


# ---- the real trainers ----


def kill(folder):
    """Kill the run in a folder, by the process that its lock names, once it has a checkpoint."""
    wait_for(lambda: (folder / 'last.pt').exists())
    os.kill(int(re.search(r'process (\d+)', (folder / '.run').read_text())[1]), signal.SIGKILL)


def test_real_trainers_are_run_two_at_a_time_and_a_killed_run_resumes(
    data, main, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    lms = grid('train_lm.py', recurrent=[True, False], **{**LM, 'max_iters': 60})
    agents = grid('train_sokoban.py', recurrent=[True], **{**AGENT, 'time_limit': 5})
    monkeypatch.setitem(plans.PLANS, 'tiny-lm', Plan('', lms))
    monkeypatch.setitem(plans.PLANS, 'tiny-agent', Plan('', agents))
    killed, other = (Path('out/tiny-lm', f'recurrent-{x}') for x in (True, False))
    line = ['tiny-lm', '--run', '--workers=2', '--', f'--data_dir={data}']
    thread = threading.Thread(target=kill, args=(killed,), daemon=True)
    thread.start()
    assert main(*line) == 1
    thread.join()
    assert f'{killed}: FAILED (exit status -9)' in capsys.readouterr().out
    assert is_finished(other) and not is_finished(killed)
    assert main(*line) == 0, capsys.readouterr()
    assert [record['step'] for record in log_of(killed)] == list(range(61))
    assert main('tiny-agent', '--run', '--workers=2') == 0
    for plan, value, kinds in (
        ('tiny-lm', 'loss', ['non-recurrent', 'recurrent']),
        ('tiny-agent', 'return', ['recurrent']),
    ):
        frame = figures.runs(f'out/{plan}')
        assert list(frame['kind']) == kinds and frame['finished'].all()
        assert value in frame and figures.varied(frame) == []
        monkeypatch.setattr(sys, 'argv', ['figures', f'out/{plan}'])
        figures.main()
        pictures = list(Path('out', plan).glob('*.png'))
        assert pictures and all(path.read_bytes().startswith(b'\x89PNG') for path in pictures)
