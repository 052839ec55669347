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
from filelock import FileLock
from processes import ROOT
from small_runs import AGENT, LM, assert_refused

from configurator import configure
from paper import figures, plans, sweep
from paper.plans import Plan, grid
from run import is_finished, log_of, settings_of

FAKE = '''
"""A trainer with settings and files of train_lm.py that learns nothing."""
import json, os, signal, sys, time
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
residual = 'expert'
weight_decay = 0.01
dtype = 'auto'
threads = 0
seed = 1
max_iters = 8
pause = 0.0           # seconds per update
fails = ''            # message
prints = ''           # name of a variable of the environment

RANGES = {'resume': [False, True, 'auto']}
config = configure(globals(), quiet=True)
if fails:
    raise SystemExit(f'error: {fails}')
print(prints, os.environ.get(prints))
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
            raise SystemExit(143)
write(finished=True)
'''


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


def test_without_a_plan_all_plans_are_listed_with_what_makes_their_figure(main, capsys):
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {cells[1]: cells for cells in ([x.strip() for x in s.split('|')] for s in lines)}
    assert rows.keys() - {'plan'} >= set(plans.names_of_plans())
    assert rows['lm-small'][3:6] == ['26', '3.0e+19', '`python -m paper.figures out/lm-small`']
    assert rows['lm'][5] == '`python -m paper.figures out/lm-small out/lm-medium`'
    assert 'bench.py' in rows['latency'][5] and 'paper.probe' in rows['probes'][5]


def settings_in(command):
    """Return all settings of a listed command, as the trainer reads them."""
    arguments = shlex.split(command[command.index('python train_') :])
    script = {'__file__': ROOT / arguments[1], 'RANGES': {'resume': ['auto']}}
    return configure(script, arguments[2:], quiet=True)


def test_a_listed_command_has_the_settings_of_the_run(main, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main('lm-small', '--only=n_layer == 16 and n_embd == 768 and not recurrent') == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line.split()[:6] == ['0', 'not', 'started', '2.14e+08', '1.00', '1.15e+18']
    config = settings_in(line)
    assert config['block_size'] == 256 and config['n_expert'] == 1 and config['resume'] == 'auto'
    name = 'recurrent-False_n_layer-16_n_expert-1_n_embd-768_seed-1'
    assert config['out_dir'] == f'out/lm-small/{name}'


def names_in(out):
    return [Path(name).name for name in re.findall(r"--out_dir=([^' ]+)", out)]


def test_settings_that_change_results_are_part_of_the_folders_name(main, fake, capsys):
    fake(n_layer=[1])
    main('fake', '--', '--dtype=float32', '--threads=2', '--data_dir=there')
    out = capsys.readouterr().out
    assert names_in(out) == ['n_layer-1_dtype-float32_script-fake']
    assert '--threads=2' in out and '--data_dir=there' in out


def test_states_of_runs_are_listed(main, fake, capsys):
    done, started, _, other = fake(n_layer=[1, 2, 4, 8])
    for folder, saved in ((done, {'finished': True}), (started, {}), (other, {'n_layer': 3})):
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text(json.dumps({'n_expert': 2, **saved}))
        (folder / 'log.jsonl').write_text('{"step": 5}\n')
    main('fake')
    lines = capsys.readouterr().out.splitlines()[2:]
    states = ('done', '5 of 8', 'not started', 'has n_layer = 3')
    assert all(state in line for state, line in zip(states, lines, strict=False))


HOSTILE = "a b; touch x' $(touch y) [c]"  # a folder that would create files if a shell read it


def test_a_slurm_job_has_the_unfinished_runs_and_quotes_folders(main, fake, capsys):
    fake(n_layer=[1, 2, 4])
    assert main('fake', '--run', f'--out={HOSTILE}', '--only=n_layer == 2') == 0
    capsys.readouterr()
    main('fake', '--slurm', f'--out={HOSTILE}', '--', '--data_dir=a b')
    job = capsys.readouterr().out
    assert '--array=0,2\n' in job and '--gpus-per-task=1' in job
    *_, cd, line = job.splitlines()
    assert shlex.split(cd) == ['cd', os.getcwd()]
    assert shlex.split(line) == [
        *('exec', sys.executable, '-m', 'paper.sweep', 'fake', '--run', f'--out={HOSTILE}'),
        *('--index=$SLURM_ARRAY_TASK_ID', '--', '--data_dir=a b'),
    ]
    assert subprocess.run(['bash', '-n'], input=job, text=True).returncode == 0


def test_a_slurm_job_of_finished_runs_is_refused(main, fake):
    fake(n_layer=[1])
    main('fake', '--run')
    assert_refused('all 1 runs are done', main, 'fake', '--slurm')


@pytest.mark.parametrize(
    'argv, message',
    [
        ('nonsense', "'nonsense' is no plan.*lm-small"),
        ('lm-small --rum', 'unrecognized arguments: --rum'),
        ('latency --run', 'latency needs no runs: python bench.py'),
        ('lm-small --only=depth==3', "--only='depth==3'.*depth"),
        ('lm-small --only=n_layer==', "--only='n_layer=='"),
        ('lm-small --only=n_layer', "--only='n_layer'"),
        ('lm-small --only=n_layer==3', "--only='n_layer==3': .*no run fulfills it"),
        ('lm-small --vary=nonsense=1', "unknown setting 'nonsense'"),
        ('lm-small --vary=weight_decay', 'expected --vary=NAME=VALUE,VALUE'),
        ('lm-small --vary=weight_decay=much', 'weight_decay expects a finite number'),
        ('lm-small --run -- dtype=float32', "'dtype=float32': expected .*--NAME=VALUE after --"),
        ('lm-small --run -- --out_dir=x', "'--out_dir=x': .*--out names"),
        ('lm-small --run --index=26', '--index=26: there are runs 0 to 25'),
        ('lm-small --run --workers=-1', 'must be at least 1'),
        ('lm-small --script=no.py', '--script=no.py: there is no such file'),
        ('aggregation --script=train_lm.py', 'two trainers: add --only'),
        ('lm-small --vary=share_kv=False', 'share_kv = False is for recurrent = True'),
        ('sokoban-small --run --gpus_per_run=3', '--gpus_per_run=3: there are 2 GPUs'),
    ],
)
def test_mistakes_are_refused_in_one_line_and_leave_nothing(
    argv, message, main, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: 2)
    at = argv.find(' -- ') if ' -- ' in argv else len(argv)
    arguments = [*argv[:at].split(), f'--out={tmp_path}/out', *argv[at:].split()]
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
    monkeypatch.setattr(sweep.os, 'sched_getaffinity', lambda pid: range(8), raising=False)
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '6,7')
    folders = fake(prints=['OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES'], pause=0.1)
    assert main('fake', '--run') == 0
    printed = [(folder / 'stdout.txt').read_text().splitlines()[1] for folder in folders]
    assert printed == ['OMP_NUM_THREADS 4', 'CUDA_VISIBLE_DEVICES 7']


def test_a_failed_run_is_reported_and_the_others_are_made(main, fake, capsys):
    failed, done = fake(fails=['no space: [1]', ''])
    assert main('fake', '--run') == 1
    out = capsys.readouterr().out
    assert f'{failed}: FAILED (exit status 1): error: no space: [1]; see stdout.txt' in out
    assert f'{done}: done' in out and out.endswith('1 done, 1 FAILED\n')
    assert is_finished(done) and not is_finished(failed)


def test_the_same_line_skips_finished_runs_and_resumes_the_others(main, fake, capsys):
    finished, interrupted = fake(n_layer=[1, 2])
    main('fake', '--run')
    (interrupted / 'config.json').write_text('{}')
    log = interrupted / 'log.jsonl'
    log.write_text(''.join(log.read_text().splitlines(keepends=True)[:5]))
    before = (finished / 'stdout.txt').read_text()
    assert main('fake', '--run') == 0
    assert [record['step'] for record in log_of(interrupted)] == list(range(9))
    assert (finished / 'stdout.txt').read_text() == before
    assert 'fake: 2 runs, 1 are done' in capsys.readouterr().out


def test_values_with_spaces_and_folders_with_brackets_reach_the_run(main, fake):
    fake(n_layer=[1])
    assert main('fake', '--run', f'--out={HOSTILE}', '--', f'--data_dir={HOSTILE}') == 0
    (folder,) = Path(HOSTILE, 'fake').iterdir()
    assert settings_of(folder)['data_dir'] == HOSTILE and is_finished(folder)
    assert {path.name for path in Path().iterdir()} == {'fake.py', HOSTILE}


def test_a_folder_of_another_run_is_not_taken_for_a_result(main, fake, capsys):
    (folder,) = fake(n_layer=[1], max_iters=4)
    main('fake', '--run')
    fake(n_layer=[1], max_iters=6)
    assert main('fake', '--run') == 1
    assert f'{folder}: FAILED: the folder has max_iters = 4, not 6: move' in capsys.readouterr().out
    assert len(log_of(folder)) == 5


def test_a_run_that_another_process_uses_is_left_alone(main, fake, capsys):
    used, done = fake(n_layer=[1, 2])
    used.mkdir(parents=True)
    with FileLock(used / '.run'):
        assert main('fake', '--run') == 1
    assert f'{used}: in use' in capsys.readouterr().out and is_finished(done)
    assert [path.name for path in used.iterdir()] == ['.run']


def test_a_run_that_another_process_has_just_started_is_not_called_failed(main, fake, capsys):
    used, done = fake(fails=['out: another run is using it (process 3 on host): wait', ''])
    assert main('fake', '--run') == 1
    assert f'{used}: in use' in capsys.readouterr().out and is_finished(done)


def test_a_folder_that_cannot_be_made_is_reported(main, fake, capsys):
    blocked, done = fake(n_layer=[1, 2])
    blocked.parent.mkdir(parents=True)
    blocked.write_text('a file')
    assert main('fake', '--run') == 1
    assert f'{blocked}: FAILED: [Errno 17] File exists' in capsys.readouterr().out
    assert is_finished(done)


TORCHRUN = """error: rank 1: the loss is nan
E1125 21:09:39.365000 12522 torch/distributed/elastic/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_the_message_of_a_failure_under_torchrun_is_that_of_the_run(tmp_path):
    (tmp_path / 'stdout.txt').write_text(f'python a.py\nerror: before\npython a.py\n{TORCHRUN}')
    process = SimpleNamespace(args=['python', 'a.py'], returncode=1)
    text = 'FAILED (exit status 1): error: rank 1: the loss is nan; see stdout.txt'
    assert sweep.outcome(process, tmp_path) == text


def test_more_than_one_gpu_per_run_is_started_by_torchrun(main, fake, capsys):
    fake(n_layer=[1])
    main('fake', '--gpus_per_run=2')
    line = capsys.readouterr().out.splitlines()[2]
    assert 'python -m torch.distributed.run --standalone --nproc_per_node=2 fake.py' in line


def test_a_copy_of_the_trainer_has_folders_of_its_own(main, fake, capsys):
    fake(n_layer=[1])
    Path('mine.py').write_text(FAKE.replace('seed = 1\n', 'seed = 1\nz_loss = 0.0\n'))
    assert main('fake', '--script=mine.py', '--vary=z_loss=0,1.5', '--run') == 0
    names = {path.name for path in Path('out/fake').iterdir()}
    assert names == {'n_layer-1_script-mine', 'n_layer-1_z_loss-1.5_script-mine'}


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_runs_and_the_next_call_resumes_them(number, main, fake, capsys):
    folders = fake(n_layer=[1, 2, 4], pause=0.02, max_iters=60)

    def interrupt():
        wait_for(lambda: all(len(log_of(folder)) > 3 for folder in folders[:2]))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert main('fake', '--run', '--workers=2') == 128 + number
    thread.join()
    out = capsys.readouterr().out
    assert out.count(': stopped\n') == 2 and 'the same line resumes what was saved' in out
    assert not any(map(is_finished, folders)) and not folders[2].exists()
    assert main('fake', '--run', '--workers=2') == 0
    for folder in folders:
        assert [record['step'] for record in log_of(folder)] == list(range(61))


def test_the_expected_time_follows_from_seconds_per_flop(main, fake):
    """One run of 8 x 0.1 s is done, and one with twice as many layers has done a half."""
    args = SimpleNamespace(out=Path('out'))
    fake(n_layer=[1, 2, 4])
    runs = plans.runs_of('fake')
    assert sweep.expected(runs, args, 1) == 'unknown'
    for run, step, seconds in ((runs[0], 8, 1000.0), (runs[1], 4, 1000.0)):
        folder = Path('out') / run.folder
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text('{"n_expert": 2}')
        (folder / 'log.jsonl').write_text(json.dumps({'step': step, 'seconds': seconds}))
    flops = [plans.cost(run).training for run in runs]
    rate = 2000 / (flops[0] + flops[1] / 2)
    left = int(rate * (flops[1] / 2 + flops[2]) / 2)
    assert sweep.expected(runs, args, 2) == str(sweep.timedelta(seconds=left))


# ---- the real trainers ----


def kill(folder):
    """Kill the run in a folder, by the process that its lock names, once it has a checkpoint."""
    wait_for(lambda: (folder / 'last.pt').exists())
    os.kill(int(re.search(r'process (\d+)', (folder / '.run').read_text())[1]), signal.SIGKILL)


def test_real_trainers_are_run_two_at_a_time_and_a_killed_run_resumes(
    data, main, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    lms = grid('train_lm.py', recurrent=[True, False], **{**LM, 'max_iters': 150})
    agents = grid('train_sokoban.py', recurrent=[True, False], **{**AGENT, 'time_limit': 5})
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
    assert is_finished(killed)
    assert [record['step'] for record in log_of(killed)] == list(range(151))
    assert main('tiny-agent', '--run', '--workers=2') == 0
    assert all(map(is_finished, Path('out/tiny-agent').iterdir()))
    for plan, value in (('tiny-lm', 'loss'), ('tiny-agent', 'return')):
        frame = figures.runs(f'out/{plan}')
        assert list(frame['kind']) == ['recurrent', 'non-recurrent'] and frame['finished'].all()
        assert value in frame and figures.varied(frame) == []
        command = [sys.executable, '-m', 'paper.figures', str(tmp_path / 'out' / plan)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        pictures = list(Path('out', plan).glob('*.png'))
        assert pictures and all(path.read_bytes().startswith(b'\x89PNG') for path in pictures)
