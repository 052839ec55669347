"""Test paper/sweep.py: lists, jobs, running with failures, signals and stops.

A fake trainer that learns nothing stands in for train_lm.py; the last test runs both real ones."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import ROOT, output_of, start
from small_runs import AGENT, LM, assert_refused

from paper import figures, plans, sweep
from paper.plans import Plan, grid
from support.code import script_checksum
from support.loader import data_checksum, write_meta, write_shard
from support.run_folder import is_finished, log_of, settings_of

FAKE = '''
"""A trainer with settings and files of train_lm.py that learns nothing."""
import json, os, signal, time
from configurator import configure

out_dir = 'out/lm'
data_dir = 'data'
init_from = ''
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
fails = ''            # message, after the start
refuses = ''          # message, instead of a start
prints = ''           # name of a variable of the environment

RANGES = {'resume': [False, True, 'auto']}
config = configure(globals(), quiet=True)
if refuses:
    raise SystemExit(f'error: {refuses}')
if init_from:
    config['n_embd'] = 64
print(prints, os.environ.get(prints))
os.makedirs(out_dir, exist_ok=True)
path, stopped = f'{out_dir}/log.jsonl', []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))

def write(**more):
    with open(f'{out_dir}/config.json', 'w') as file:
        json.dump({**config, **more}, file)

write()
if fails:
    raise SystemExit(f'error: {fails}')
done = len(open(path).readlines()) if os.path.exists(path) else 0
with open(path, 'a') as file:
    for step in range(done, max_iters + 1):
        time.sleep(pause)
        print(json.dumps({'step': step, 'seconds': 0.1 * step}), file=file, flush=True)
        if stopped:
            raise SystemExit(143)
write(finished=True)
'''
HOSTILE = "a b; touch x' $(touch y) [c]"  # a folder that would create files if a shell read it


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that makes plan 'fake' of runs of the fake trainer in tmp_path, where the
    test then runs, and returns their folders."""
    (tmp_path / 'fake.py').write_text(FAKE)
    monkeypatch.chdir(tmp_path)

    def make(**settings):
        runs = grid(str(tmp_path / 'fake.py'), **settings)
        monkeypatch.setitem(plans.PLANS, 'fake', Plan('Fake', runs))
        return [Path('out') / run.folder for run in plans.runs_of('fake')]

    return make


@pytest.fixture
def main(monkeypatch, capsys):
    """Return a function that runs paper.sweep with these arguments in this process, and returns
    its exit status and what it printed."""

    def call(*argv):
        monkeypatch.setattr(sys, 'argv', ['sweep.py', *map(str, argv)])
        return sweep.main(), capsys.readouterr().out

    return call


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


# ---- lists and jobs ----


def test_all_plans_are_listed_with_what_makes_their_figure(main):
    _, out = main('--out=my runs')
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert rows.keys() == {'plan', *plans.names_of_plans()}
    assert rows['lm-small'].split()[1:3] == ['26', '3.0e+19']
    folders = "'my runs/lm-small' 'my runs/lm-small-long' 'my runs/lm-medium'"
    assert rows['lm'].endswith(f"{folders} '--out=my runs/lm'")
    assert 'python bench.py' in rows['latency']
    assert "config/probe_large.py 'my runs/sokoban-large'/arch-convlstm_" in rows['probes']


def test_the_commands_that_draw_work_from_the_folder_of_the_sweep(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(ROOT)
    root, prefix = shlex.quote(relative), shlex.quote(f'{relative}/')
    _, out = main()
    assert f'PYTHONPATH={root} python -m paper.figures out/lm-small\n' in out
    assert f'PYTHONPATH={root} python -m paper.probe {prefix}config/probe_large.py ' in out
    assert f'python {prefix}bench.py --suite=decode\n' in out


@pytest.mark.parametrize('name', ['sweep', 'figures', 'probe'])
def test_the_scripts_of_the_paper_run_from_any_folder(name, tmp_path):
    process = start([ROOT / f'paper/{name}.py', '--help'], cwd=tmp_path)
    assert 'paper' in output_of(process)


def test_another_package_named_paper_is_not_taken_for_this_folder(tmp_path):
    (tmp_path / 'paper').mkdir()
    (tmp_path / 'paper' / '__init__.py').touch()
    env = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    printed = output_of(start(['-c', 'import paper; print(paper.__path__)'], env=env))
    assert printed.strip() == str([str(ROOT / 'paper')])


def test_a_listed_run_has_its_cost_and_a_command_with_its_settings(main, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, out = main('lm-small', '--only=n_layer == 16 and n_embd == 768 and not recurrent')
    line = out.splitlines()[1]
    assert line.split()[1:6] == ['not', 'started', '2.14e+08', '1.00', '1.15e+18']
    name = 'recurrent-False_n_layer-16_n_expert-1_n_embd-768_seed-1'
    assert line.endswith(
        'python train_lm.py config/small_nonrecurrent_L2.py --recurrent=False --n_layer=16 '
        f'--n_expert=1 --n_embd=768 --seed=1 --out_dir=out/lm-small/{name} --resume=auto'
    )


def test_only_settings_that_change_results_change_the_folder(main, fake):
    fake(n_layer=[1])
    settings = ('--dtype=float32', '--threads=2', '--data_dir=there')
    _, out = main('fake', '--gpus_per_run=2', '--', *settings)
    assert '--out_dir=out/fake-dtype/n_layer-1_dtype-float32 ' in out
    assert '--threads=2' in out and '--data_dir=there' in out
    assert 'python -m torch.distributed.run --standalone --nproc_per_node=2 fake.py' in out
    assert out.endswith('python -m paper.figures out/fake-dtype\n')


def test_a_slurm_job_has_the_unfinished_runs_and_quotes_folders(main, fake):
    fake(n_layer=[1, 2, 4], max_iters=1)
    main('fake', '--run', f'--out={HOSTILE}', '--only=n_layer == 2')
    _, job = main('fake', '--slurm', f'--out={HOSTILE}')
    assert '--array=0-1\n' in job and '--gpus-per-task=1' in job
    environment = os.environ | {'SLURM_ARRAY_TASK_ID': '1', 'PYTHONSAFEPATH': '1'}
    subprocess.run(['bash'], input=job, text=True, env=environment)
    assert [is_finished(Path(HOSTILE, 'fake', f'n_layer-{L}')) for L in (1, 2, 4)] == [0, 1, 1]
    assert {path.name for path in Path().iterdir()} == {'fake.py', HOSTILE}


@pytest.mark.parametrize(
    'argv, message',
    [
        ('nonsense', "'nonsense' is no plan.*lm-small.*study-lm"),
        ('latency --run', 'latency has no runs: python .*bench.py'),
        ('lm-small --only=n_layer==3', "--only='n_layer==3': .*no run fulfills it"),
        ('lm-small --only=', "--only='': .*"),
        ('lm-small --vary=weight_decay', 'expected --vary=NAME=VALUE,VALUE'),
        ('lm-small --vary=seed=1 --vary=seed=2', 'seed is given twice: .*one --vary=seed='),
        ('lm-small --run -- --nonsense=1', "unknown setting 'nonsense'"),
        ('lm-small --run -- --out_dir=x', "'--out_dir=x': .*--out names"),
        ('lm-small --out=', 'argument --out: is empty'),
        ('lm-small --script=', 'argument --script: is empty'),
        ('lm-small --run --workers=-1', 'must be at least 1'),
        ('sokoban-small --run --gpus_per_run=3', '--gpus_per_run=3: there are 2 GPUs'),
    ],
)
def test_mistakes_are_refused_in_one_line_and_leave_nothing(
    argv, message, main, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: 2)
    assert_refused(message, main, *argv.split())
    assert not any(tmp_path.iterdir())


# ---- running ----


def test_workers_share_the_cores_and_the_gpus(main, fake, monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '6,7')
    monkeypatch.setattr(sweep.torch, 'get_num_threads', lambda: 8)
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: 2)
    threads, gpu = fake(prints=['OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES'], pause=0.1)
    main('fake', '--run')
    assert 'OMP_NUM_THREADS 4\n' in (threads / 'stdout.txt').read_text()
    assert re.search('CUDA_VISIBLE_DEVICES [67]\n', (gpu / 'stdout.txt').read_text())
    assert sweep.gpus_of_workers(workers=4, gpus_per_run=1) == ['6', '7', '6', '7']
    assert sweep.gpus_of_workers(workers=0, gpus_per_run=2) == ['6,7']


def test_a_failed_run_is_reported_and_the_next_call_runs_only_what_is_not_done(main, fake):
    failed, done = fake(fails=['no space: [1]', ''])
    status, out = main('fake', '--run')
    assert status == 1 and out.endswith('1 FAILED, 1 done\n')
    assert f'{failed}: FAILED (exit status 1): error: no space: [1]; see stdout.txt' in out
    before = (done / 'stdout.txt').read_text()
    status, out = main('fake', '--run')
    assert status == 1 and out.startswith('1 of 2 runs are done')
    assert (done / 'stdout.txt').read_text() == before


def test_no_further_run_is_started_after_two_that_the_trainer_refuses_in_the_same_words(main, fake):
    """A run that has started, or whose model is too large, may fail by itself."""
    refused, _, *others = fake(seed=[1, 2, 3, 4], refuses='16 boards for 3 ranks')
    status, out = main('fake', '--run')
    assert status == 2 and out.count('FAILED (') == 2
    assert f'{refused}: FAILED (exit status 1): error: 16 boards for 3 ranks; see stdout' in out
    assert '2 FAILED, 2 waiting\nstopped: the trainer refuses settings: correct them' in out
    assert not any(folder.exists() for folder in others)


def test_runs_that_are_refused_for_reasons_of_their_own_do_not_end_a_sweep(main, fake):
    fake(refuses=['the state takes 52 GB', 'the state takes 51 GB', ''])
    status, out = main('fake', '--run')
    assert status == 1 and out.endswith('2 FAILED, 1 done\n')


def test_runs_use_the_modules_of_this_project(main, fake, tmp_path, monkeypatch):
    """Their trainer lies elsewhere, and another clone is installed or in PYTHONPATH."""
    (tmp_path / 'clone').mkdir()
    (tmp_path / 'clone/configurator.py').write_text('raise SystemExit("another clone")')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'clone'))
    monkeypatch.setenv('PYTHONSAFEPATH', '1')
    path, safe = fake(prints=['PYTHONPATH', 'PYTHONSAFEPATH'])
    assert main('fake', '--run')[0] == 0
    assert f'PYTHONPATH {ROOT}:{tmp_path}/clone\n' in (path / 'stdout.txt').read_text()
    assert 'PYTHONSAFEPATH None\n' in (safe / 'stdout.txt').read_text()


def test_a_folder_of_another_run_is_not_taken_for_a_result(main, fake):
    """Whatever says so: the plan has changed, or the command line names other data."""
    (folder,) = fake(n_layer=[1], max_iters=4)
    main('fake', '--run')
    message = f"{folder} has data_dir = 'data', not 'other': move it away, or choose another --out"
    for action in ('--run', '--slurm'):
        assert_refused(message, main, 'fake', action, '--', '--data_dir=other')
    main('fake', '--run', '--', f'--data_dir={Path("data").absolute()}')  # the same folder
    fake(n_layer=[1], max_iters=6)
    assert_refused(f'{folder} has max_iters = 4, not 6', main, 'fake', '--run')
    assert 'has max_iters = 4, not 6' in main('fake')[1]
    assert len(log_of(folder)) == 5
    saved = settings_of(folder)
    del saved['seed']  # as if the trainer had got this setting after the run, with a default of 1
    (folder / 'config.json').write_text(json.dumps(saved))
    fake(n_layer=[1], max_iters=4, seed=2)
    assert_refused(f'{folder} has seed = 1, not 2', main, 'fake', '--run')


def test_a_finished_run_counts_until_its_shards_are_replaced(main, fake):
    """Or deleted: then it counts, too."""
    (folder,) = fake(n_layer=[1])
    main('fake', '--run')
    Path('data').mkdir()
    shards = [Path('data/text_val_0.bin'), Path('data/text_train_1.bin')]
    for shard in shards:
        write_shard(shard, [1, 2, 3])
    write_meta('data', {'tokenizer': 'text', 'source': 'test', 'shards': []})
    record = {**settings_of(folder), 'data_checksum': data_checksum('data')}
    (folder / 'config.json').write_text(json.dumps(record))
    assert main('fake', '--run')[1].startswith('1 of 1 runs are done')
    shutil.copytree('data', 'copy')
    assert main('fake', '--run', '--', '--data_dir=copy')[1].startswith('1 of 1 runs are done')
    write_shard(shards[1], [1, 2, 4])
    message = f'{folder} has been trained on other shards than those in data: move it away'
    assert_refused(message, main, 'fake', '--run')
    shards[1].unlink()
    assert main('fake', '--run')[1].startswith('1 of 1 runs are done')


def test_a_finished_run_that_changed_a_setting_midway_is_named(main, fake, capsys):
    (folder,) = fake(n_layer=[1], max_iters=4)
    main('fake', '--run')
    starts = [{}, {'changes': {'max_iters': 4, 'threads': 2}}]
    (folder / 'config.json').write_text(json.dumps({**settings_of(folder), 'starts': starts}))
    sweep.name_changed(plans.runs_of('fake'), Path('out'))
    assert f'{folder} changed max_iters when it resumed' in capsys.readouterr().err


def test_a_run_that_took_sizes_from_trained_weights_is_done(main, fake):
    fake(n_layer=[1], init_from='pretrained')
    main('fake', '--run')
    assert main('fake', '--run')[1].startswith('1 of 1 runs are done')
    fake(n_layer=[1], init_from='pretrained', max_iters=9)
    main('fake', '--run', '--out=other')
    fake(n_layer=[1], init_from='pretrained')
    assert_refused('has max_iters = 9, not 8', main, 'fake', '--run', '--out=other')


IN_USE = 'error: out: another run is using it (process 7 on host): wait for its end'
TORCHRUN = 'E1125 21:09:39 12522 torch/distributed/elastic/api.py:1002] failed\nTraceback (most\n'


@pytest.mark.parametrize(
    'status, printed, expected',
    [
        (1, f'error: the loss is nan\n{TORCHRUN}', 'FAILED (exit status 1): error: the loss'),
        (1, f'step 3\n{TORCHRUN}SignalException: 15\n', 'stopped'),
        (143, 'Traceback (most\nOSError: full\n', 'FAILED (exit status 143): OSError: full'),
        (-15, 'importing', 'stopped'),
        (2, f'{IN_USE}\n', 'in use by another process'),
        (1, f'{IN_USE}\nstep 3\nerror: the loss is nan', 'FAILED (exit status 1): error: the loss'),
        (-15, f'{IN_USE}\nstep 3\n', 'stopped'),
        (-signal.SIGUSR1, 'importing', 'stopped'),
        (128 + signal.SIGUSR2, 'step 3\n', 'stopped'),
    ],
)
def test_what_became_of_a_run(tmp_path, status, printed, expected):
    (tmp_path / 'stdout.txt').write_text(f'python a.py\nerror: before\npython a.py\n{printed}')
    process = SimpleNamespace(args=['python', 'a.py'], returncode=status)
    assert sweep.outcome(process, tmp_path).startswith(expected)


def test_a_copy_of_the_trainer_has_folders_of_its_own(main, fake):
    fake(n_layer=[1])
    Path('mine.py').write_text(FAKE.replace('seed = 1\n', 'seed = 1\nz_loss = 0.0\n'))
    main('fake', '--script=mine.py', '--vary=z_loss=0,1.5', '--run')
    names = {path.name for path in Path('out/fake-mine-z_loss').iterdir()}
    assert names == {'n_layer-1_z_loss-0.0', 'n_layer-1_z_loss-1.5'}


def test_a_copy_of_a_trainer_leaves_out_models_of_the_other_kind(main, tmp_path):
    script = shutil.copy(ROOT / 'train_sokoban.py', tmp_path / 'trainer.py')
    _, out = main('residual', f'--script={script}')
    assert out.count('trainer.py --') == len([r for r in plans.runs_of('residual') if not r.config])
    assert_refused(
        'trains agents, of which lm-small has none', main, 'lm-small', f'--script={script}'
    )


def test_listed_commands_of_a_copy_find_the_modules_of_this_project(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / 'train_lm.py', 'mine.py')
    options = ('lm-small', '--script=mine.py', '--only=n_layer == 16')
    _, out = main(*options)
    command = re.search('PYTHONPATH=.* mine.py ', out.splitlines()[1])[0] + '--help'
    command = command.replace(' python ', f' {shlex.quote(sys.executable)} ')
    assert '--max_iters=10000' in subprocess.check_output(command, shell=True, text=True)
    _, job = main(*options, '--slurm')
    assert f'export PYTHONPATH={shlex.quote(str(ROOT))}' in job


def test_a_run_is_done_for_its_own_trainer_only(main, fake):
    """Two copies may have one name, or a copy was edited; comments and layout do not count."""
    fake(n_layer=[1])
    folder = Path('out/fake-mine/n_layer-1')
    for version in ('v1', 'v2'):
        Path(version).mkdir()
        Path(version, 'mine.py').write_text(f'{FAKE}print({version!r})\n')
    main('fake', '--run', '--script=v1/mine.py')
    code = {'script_checksum': script_checksum('v1/mine.py')}
    config = settings_of(folder) | {'starts': [{'code': code}]}
    (folder / 'config.json').write_text(json.dumps(config))
    Path('v1/mine.py').write_text(f'# a comment\n{FAKE}\n\nprint("v1")\n')
    assert main('fake', '--run', '--script=v1/mine.py')[1].startswith('1 of 1 runs are done')
    message = f'{folder} has been trained by another mine.py: move it away, or choose another --out'
    assert_refused(message, main, 'fake', '--run', '--script=v2/mine.py')
    assert 'has been trained by another mine.py' in main('fake', '--script=v2/mine.py')[1]


def test_long_and_strange_values_have_folders_of_their_own(main, fake):
    """Values that differ by a slash only, and a value of 300 bytes."""
    fake(n_layer=[1], max_iters=1)
    assert main('fake', '--run', '--', f'--prints={300 * "x"}')[0] == 0
    assert main('fake', '--run', '--vary=init_from=out/A/b,out/A-b')[0] == 0
    assert len(list(Path('out/fake-init_from').iterdir())) == 2
    assert len(list(Path('out').glob('*/*/log.jsonl'))) == 3


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGUSR1], ids=str)
def test_a_signal_saves_the_runs_and_the_next_call_resumes_them(main, fake, number):
    folders = fake(n_layer=[1, 2, 4], pause=0.1, max_iters=30)

    def interrupt():
        wait_for(lambda: all(len(log_of(folder)) > 3 for folder in folders[:2]))
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    status, out = main('fake', '--run', '--workers=2')
    assert status == 128 + number and out.count(': stopped\n') == 2
    assert not any(map(is_finished, folders)) and not folders[2].exists()
    assert f' {log_of(folders[0])[-1]["step"]} of 30 ' in main('fake')[1]
    assert main('fake', '--run', '--workers=2')[0] == 0
    for folder in folders:
        assert [record['step'] for record in log_of(folder)] == list(range(31))


def test_the_expected_time_follows_from_seconds_per_flop(fake):
    """16 of 56 updates have taken 2,001 s, and two workers share the other 40."""
    fake(max_iters=[8, 16, 32])
    runs = plans.runs_of('fake')
    assert sweep.forecast(runs, Path('out'), 2) == '0 of 3 runs are done, eta unknown'
    for run, seconds in zip(runs[:2], (1001, 1000), strict=True):
        folder = 'out' / run.folder
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text(json.dumps({**run.axes, 'finished': run == runs[0]}))
        (folder / 'log.jsonl').write_text(json.dumps({'step': 8, 'seconds': seconds}))
    assert sweep.forecast(runs, Path('out'), 2) == '1 of 3 runs are done, eta 0:41:41'


# ---- the real trainers ----


def kill(folder):
    """Kill the run in a folder, by the process that its lock names, once it has a checkpoint."""
    wait_for(lambda: (folder / 'last.pt').exists())
    os.kill(int((folder / '.lock').read_text().split()[0]), signal.SIGKILL)


def test_real_trainers_are_run_side_by_side_and_a_killed_run_resumes(
    data, main, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lms = grid('train_lm.py', arch=['experts'], **{**LM, 'max_iters': 60}, plot=False)
    agents = grid('train_sokoban.py', arch=['convlstm'], **{**AGENT, 'time_limit': 5}, plot=False)
    monkeypatch.setitem(plans.PLANS, 'tiny', Plan('', lms + agents))
    killed, agent = (Path('out/tiny', f'arch-{arch}') for arch in ('experts', 'convlstm'))
    line = ['tiny', '--run', '--workers=2', '--', f'--data_dir={data}']
    threading.Thread(target=kill, args=(killed,), daemon=True).start()
    status, out = main(*line)
    assert status == 1 and f'{killed}: FAILED (exit status -9)' in out
    assert is_finished(agent) and not is_finished(killed)
    assert main(*line)[0] == 0
    assert [record['step'] for record in log_of(killed)] == list(range(61))
    frame = figures.runs('out/tiny')
    assert list(frame['model']) == ['ConvLSTM', 'Transformer'] and frame['finished'].all()
    monkeypatch.setattr(sys, 'argv', ['figures', 'out/tiny', '--figure=learning'])
    figures.main()
    assert len(list(Path('out/tiny').glob('learning_*.png'))) == 2
