"""checkpoint.py: killed saves, damaged and hostile files, logs on resume, random states, the output folder's rules, signals."""

import errno
import json
import os
import pathlib
import pickle
import pty
import random
import signal
import sys
import time

import forks
import numpy as np
import pytest
import torch

import checkpoint
from configurator import write_json, write_text
from checkpoint import (
    LAST,
    LOCK,
    PREV,
    CheckpointError,
    JsonlLog,
    OutDirError,
    load_checkpoint,
    load_latest,
    load_run,
    prepare_out_dir,
    release,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from convlstm import AgentConfig, build_agent
from model import ModelConfig, build_model

ROOT = pathlib.Path(__file__).parents[1]


def names(folder):
    return sorted(os.listdir(folder))


def test_round_trip_of_a_training_state(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    obj = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': 3, 'config': {'betas': (0.8, 0.95), 'name': None},
           'half': torch.arange(3).bfloat16(), 'rng': rng_state()}  # fmt: skip
    save_checkpoint(obj, tmp_path / LAST)
    loaded = load_checkpoint(tmp_path / LAST)
    assert (
        torch.equal(loaded['model']['weight'], model.weight)
        and loaded['config'] == obj['config']
        and loaded['step'] == 3
    )
    assert (
        loaded['half'].dtype == torch.bfloat16 and loaded['rng']['python'] == obj['rng']['python']
    )
    optimizer.load_state_dict(loaded['optimizer'])
    assert names(tmp_path) == [LAST]


@pytest.mark.parametrize(
    'obj, where',
    [
        ({'a': [1, {'b': np.float64(1)}]}, r"checkpoint\['a'\]\[1\]\['b'\] is a float64"),
        ({'a': (pathlib.Path('x'),)}, r"\['a'\]\[0\] is a PosixPath"),
        ({'a': np.zeros(3)}, 'ndarray'),
        ({'a': torch.float32}, 'dtype'),
        ({(1, 2): 3}, 'key'),
    ],
)
def test_foreign_types_are_refused_by_their_place(tmp_path, obj, where):
    with pytest.raises(TypeError, match=where):
        save_checkpoint(obj, tmp_path / LAST)
    assert names(tmp_path) == []


def test_rotation_keeps_the_former_checkpoint(tmp_path, monkeypatch):
    for step in range(4):
        save_checkpoint({'step': step}, tmp_path / LAST, keep=PREV)
        assert load_checkpoint(tmp_path / LAST)['step'] == step
    assert load_checkpoint(tmp_path / PREV)['step'] == 2 and names(tmp_path) == [LAST, PREV]
    monkeypatch.setattr(os, 'link', lambda *_: (_ for _ in ()).throw(OSError('no hard links here')))
    save_checkpoint({'step': 4}, tmp_path / LAST, keep=PREV)
    assert [load_checkpoint(tmp_path / name)['step'] for name in (LAST, PREV)] == [4, 3] and names(
        tmp_path
    ) == [LAST, PREV]


KILLED = """
import os, sys, checkpoint as c
left = [10**9]
def dies(f):
    def call(*args):
        left[0] -= 1
        os._exit(9) if left[0] < 0 else None
        return f(*args)
    return call
def save(obj, file):
    file.write(b'PK half')
    file.flush()
    dies(lambda: None)()
    file.seek(0)
    torch_save(obj, file)
torch_save, c.torch.save = c.torch.save, save
os.fsync, os.link, os.replace = dies(os.fsync), dies(os.link), dies(os.replace)
for kill_at in range(7):
    path = f'{sys.argv[1]}/{kill_at}/{c.LAST}'
    os.mkdir(os.path.dirname(path))
    c.save_checkpoint({'step': 1}, path, keep=c.PREV)
    c.save_checkpoint({'step': 2}, path, keep=c.PREV)
    if os.fork() == 0:
        left[0] = kill_at
        c.save_checkpoint({'step': 3}, path, keep=c.PREV)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    """The process dies (os._exit) at each point of the third save: half written, fsync, link, two renames, fsync of the folder."""
    done = forks.run(
        [sys.executable, '-c', KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == ['9'] * 6 + ['0'], done.stderr
    for kill_at in range(7):
        out = tmp_path / str(kill_at)
        assert load_checkpoint(out / LAST)['step'] == (2 if kill_at < 5 else 3)
        save_checkpoint({'step': 4}, out / LAST, keep=PREV)
        assert load_checkpoint(out / LAST)['step'] == 4 and load_checkpoint(out / PREV)['step'] == (
            2 if kill_at < 5 else 3
        )
        assert names(out) == [LAST, PREV]


def test_an_error_in_the_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    save_checkpoint({'step': 1}, tmp_path / LAST)

    def full_disk(obj, file):
        file.write(b'PK\x03\x04 half of it')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(torch, 'save', full_disk)
    with pytest.raises(OSError, match=f'No space .*{LAST}'):
        save_checkpoint({'step': 2}, tmp_path / LAST, keep=PREV)
    assert load_checkpoint(tmp_path / LAST)['step'] == 1 and names(tmp_path) == [LAST]


@pytest.mark.parametrize('damage', ['empty', 'half', 'tail', 'text', 'bits', 'missing'])
def test_a_damaged_last_checkpoint_falls_back_on_the_one_before(tmp_path, capsys, damage):
    for step in (1, 2):
        save_checkpoint({'step': step, 'weights': torch.ones(5000)}, tmp_path / LAST, keep=PREV)
    path = tmp_path / LAST
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    broken = {
        'empty': b'',
        'half': whole[: len(whole) // 2],
        'tail': whole[:-10],
        'text': b'hello',
        'bits': bytes(flipped),
        'missing': b'',
    }
    path.unlink()  # a hard link apart from ckpt_prev.pt, but let no test depend on it
    path.write_bytes(broken[damage])
    if damage == 'missing':
        path.unlink()
    with pytest.raises(CheckpointError, match=LAST) as refusal:
        load_checkpoint(path)
    assert '\n' not in str(refusal.value)
    loaded, source = load_latest(tmp_path)
    assert loaded['step'] == 1 and source.name == PREV
    out = capsys.readouterr().out
    assert out.startswith('warning: ') and LAST in out and PREV in out and out.count('\n') == 1
    (tmp_path / PREV).write_bytes(b'')
    with pytest.raises(CheckpointError):
        load_latest(tmp_path)


def test_nothing_to_load(tmp_path):
    with pytest.raises(
        CheckpointError, match='holds no trained run, there is no ckpt_last.pt: train one first'
    ):
        load_latest(tmp_path)
    with pytest.raises(CheckpointError, match='no such checkpoint'):
        load_checkpoint(tmp_path / 'none.pt')
    with pytest.raises(CheckpointError, match='directory'):
        load_checkpoint(tmp_path)


class Evil:
    def __reduce__(self):
        return (os.system, ('touch evil_was_here',))


@pytest.mark.parametrize(
    'obj',
    [
        5,
        'config',
        ['config', 'model'],
        {'model': {}},
        {'config': {}, 'model': {}},
        {'config': 3, 'model': {}},
        {'config': ['n_layer'], 'model': {}},
    ],
)
def test_a_whole_file_that_is_no_run(tmp_path, obj):
    torch.save(obj, tmp_path / LAST)
    with pytest.raises(CheckpointError, match=f'{LAST}: not a checkpoint of this train_lm.py'):
        load_run(tmp_path, 'train_lm.py', ('model',), ('n_layer',), {'n_layer': 2})


@pytest.mark.parametrize(
    'save', [torch.save, lambda obj, path: path.write_bytes(pickle.dumps(obj))]
)
def test_a_pickled_object_is_refused_and_not_run(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    save({'model': Evil()}, tmp_path / 'evil.pt')
    with pytest.raises(
        CheckpointError, match='evil.pt: (holds Python objects|.*not a checkpoint)'
    ) as refusal:
        load_checkpoint(tmp_path / 'evil.pt')
    assert '\n' not in str(refusal.value) and names(tmp_path) == ['evil.pt']


def test_random_states_go_on_where_they_were(tmp_path):
    def draw():
        return [
            torch.rand(3).tolist(),
            np.random.rand(3).tolist(),
            np.random.randn(),
            random.random(),
            random.gauss(0, 1),
        ]

    draw()  # leaves half of a pair of normal numbers in numpy and in random
    save_checkpoint({'rng': rng_state()}, tmp_path / LAST)
    first, second = draw(), draw()
    set_rng_state(load_checkpoint(tmp_path / LAST)['rng'])
    assert draw() == first and draw() == second and first != second


def test_json_files(tmp_path):
    write_json({'a': (1, float('nan')), 'é': None}, tmp_path / 'config.json')
    assert json.loads((tmp_path / 'config.json').read_text(encoding='utf-8')) == {
        'a': [1, None],
        'é': None,
    }
    write_text('two\nlines', tmp_path / 'text')
    assert (tmp_path / 'text').read_bytes() == b'two\nlines' and names(tmp_path) == [
        'config.json',
        'text',
    ]


def test_a_resumed_log_has_each_step_once(tmp_path):
    path = tmp_path / 'log.jsonl'
    log = JsonlLog(path)
    log.write({'header': 'torch 2'})
    for step in range(5):
        log.write({'step': step, 'loss': float('inf') if step == 1 else 1.5})
        assert json.loads(path.read_text().splitlines()[-1])['step'] == step  # on file at once
    log.close()
    with open(path, 'a') as file:
        file.write('{"step": 2, "los')  # killed in the middle of a line
    log = JsonlLog(path, resume_step=2)
    log.write({'step': 3, 'loss': 2.5})
    log.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert (
        [r.get('step') for r in records] == [None, 0, 1, 2, 3]
        and records[2]['loss'] is None
        and records[4]['loss'] == 2.5
    )
    JsonlLog(path).close()
    assert path.read_text() == ''
    JsonlLog(tmp_path / 'new.jsonl', resume_step=7).close()
    assert (tmp_path / 'new.jsonl').read_text() == ''


def test_rules_of_the_output_folder(tmp_path):
    out = tmp_path / 'a' / 'b'
    assert prepare_out_dir(str(out)) == out and names(out) == [LOCK]
    (out / 'notes.txt').write_text('mine')
    prepare_out_dir(out)  # a folder with other things in it is no run
    for name in ('log.jsonl', 'ckpt_best.pt'):
        (out / name).write_text('')
        with pytest.raises(OutDirError, match='holds a run already'):
            prepare_out_dir(out)
        with pytest.raises(OutDirError, match='nothing to resume from'):
            prepare_out_dir(out, resume=True)
    with pytest.raises(OutDirError, match='exclude each other'):
        prepare_out_dir(out, resume=True, overwrite=True)
    (out / PREV).write_text('')
    (out / '.ckpt_last.pt.tmp').write_text('half')
    (out / '.notes.tmp').write_text('mine')
    (out / 'ckpt_folder.pt').mkdir()
    prepare_out_dir(out, resume=True)
    assert names(out) == [
        '.notes.tmp',
        LOCK,
        'ckpt_best.pt',
        'ckpt_folder.pt',
        PREV,
        'log.jsonl',
        'notes.txt',
    ]
    prepare_out_dir(out, overwrite=True)
    assert names(out) == ['.notes.tmp', LOCK, 'ckpt_folder.pt', 'notes.txt']
    release(out)


@pytest.mark.parametrize(
    'name, content',
    [
        ('config.json', '{"model_type": "gpt2"}'),
        ('config.json', '[1'),
        ('log.jsonl', '{}'),
        (LAST, 'theirs'),
        ('loss.png', ''),
    ],
)
def test_a_strangers_folder_stays_as_it_is(tmp_path, name, content):
    """Whatever is asked for, and however often: a refusal leaves no mark that would let the next one in."""
    (tmp_path / name).write_text(content)
    for _ in range(2):
        for settings in ({}, {'overwrite': True}):
            with pytest.raises(
                OutDirError, match=f'holds {name}, which no run of ours wrote'
            ) as refusal:
                prepare_out_dir(tmp_path, **settings)
            assert '\n' not in str(refusal.value)
        with pytest.raises(
            OutDirError, match='nothing to resume from' if name != LAST else 'ours wrote'
        ):
            if name == LAST:  # beside a config.json of somebody else
                (tmp_path / 'config.json').write_text('{}')
            prepare_out_dir(tmp_path, resume=True)
        (tmp_path / 'config.json').unlink() if name == LAST else None
    assert (tmp_path / name).read_text() == content and names(tmp_path) == [name]


def test_a_run_without_the_mark_is_known_by_its_config(tmp_path):
    """Of older runs, and of one that was killed before its log: config.json alone."""
    checkpoint.write_config({'out_dir': 'x'}, tmp_path, 'cpu')
    (tmp_path / 'log.jsonl').write_text('')
    with pytest.raises(OutDirError, match='holds a run already'):
        prepare_out_dir(tmp_path)
    prepare_out_dir(tmp_path, overwrite=True)
    release(tmp_path)
    assert names(tmp_path) == [LOCK]


def test_one_run_a_folder(tmp_path):
    """A forked child holds the folder: another run is refused by the child's number, whatever it asks for; a killed child leaves no lock."""
    ready, says = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        prepare_out_dir(tmp_path)
        os.write(says, b'x')
        time.sleep(60)
        os._exit(1)
    try:
        os.read(ready, 1)
        (tmp_path / LAST).write_text('')
        for settings in ({}, {'overwrite': True}, {'resume': True}):
            with pytest.raises(
                OutDirError, match=f'another run is at work in it .*process {child} on .*: wait'
            ) as refusal:
                prepare_out_dir(tmp_path, **settings)
            assert '\n' not in str(refusal.value)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    prepare_out_dir(tmp_path, resume=True)
    release(tmp_path)
    assert names(tmp_path) == [LOCK, LAST]


def test_a_disk_without_locks(tmp_path, monkeypatch, capsys):
    def unlocked(*_):
        raise OSError(errno.EOPNOTSUPP, 'Operation not supported')

    monkeypatch.setattr(checkpoint.fcntl, 'flock', unlocked)
    prepare_out_dir(tmp_path)
    release(tmp_path)
    assert 'without locks' in capsys.readouterr().out


def test_folders_that_cannot_be_used(tmp_path):
    held = dict(checkpoint.HELD)  # other tests' runs in this process
    (tmp_path / 'file').write_text('')
    for bad in (tmp_path / 'file', tmp_path / 'file' / 'sub', '', '/proc/run'):
        with pytest.raises(OutDirError) as refusal:
            prepare_out_dir(bad)
        assert '\n' not in str(refusal.value)
    with pytest.raises(OutDirError, match='nothing to resume'):
        prepare_out_dir(tmp_path / 'none', resume=True)
    assert names(tmp_path) == ['file']
    assert held == checkpoint.HELD


LOOP = """
import checkpoint, time
stopper = checkpoint.Stopper()
print('ready', flush=True)
while stopper.signal is None or {forever}:
    time.sleep(0.01)
    if stopper.signal is not None:
        print('seen', flush=True)
print('saved', stopper.signal)
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_update_finish(number):
    with forks.Popen(
        [sys.executable, '-c', LOOP.format(forever=False)],
        cwd=ROOT,
        stdout=-1,
        stderr=-1,
        text=True,
    ) as process:
        assert process.stdout.readline() == 'ready\n'
        process.send_signal(number)
        out, err = process.communicate()
    assert (
        process.returncode == 0
        and out.endswith(f'saved {int(number)}\n')
        and 'stopping after this update' in err
    )


def test_a_second_ctrl_c_stops_at_once():
    with forks.Popen(
        [sys.executable, '-c', LOOP.format(forever=True)], cwd=ROOT, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout.readline() == 'ready\n'
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == 'seen\n'
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode != 0 and err.endswith('\ninterrupted\n') and 'Traceback' not in err


def test_under_torchrun_the_launchers_copy_of_ctrl_c_does_not_count(monkeypatch):
    monkeypatch.setenv('RANK', '0')
    stopper = checkpoint.Stopper()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.signal == signal.SIGINT
        stopper.time = time.monotonic() - 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        stopper.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_closed_terminal_saves(tmp_path):
    """SIGHUP stops a run as SIGTERM does, and what it prints to the terminal that is gone does not end it before it has saved."""
    child, terminal = pty.fork()
    if child == 0:
        signal.alarm(60)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        stopper = checkpoint.Stopper()
        os.write(1, b'ready')
        while stopper.signal is None:
            time.sleep(0.01)
        os.write(1, b'a line of the log')
        (tmp_path / 'saved').write_text(str(stopper.signal))
        os._exit(0)
    os.read(terminal, 100)
    os.close(terminal)
    os.waitpid(child, 0)
    assert (tmp_path / 'saved').read_text() == str(signal.SIGHUP.value)


def test_under_nohup_a_closed_terminal_does_not_count():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stopper = checkpoint.Stopper()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopper.signal is None
        stopper.restore()
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(
    'config',
    [
        {'n_layer': 10**8},
        {'n_layer': 10**9, 'n_embd': 2, 'n_head': 1},
        {'n_expert': 10**9},
        {'n_embd': 2**39},
        {'n_embd': 2**63},
    ],
    ids=str,
)
def test_models_that_no_machine_holds(config):
    """Refused by size, before anything is allocated: at once, whatever the number of levels."""
    for build, about in ((build_agent, AgentConfig), (lambda c: build_model(c, True), ModelConfig)):
        sizes = {
            key: value for key, value in config.items() if key != 'n_head' or about is ModelConfig
        }
        if about is ModelConfig:
            sizes = {'n_head': 4, **sizes}
        with pytest.raises(
            checkpoint.SizeError, match='needs more than|larger than any machine'
        ) as refusal:
            checkpoint.check_model(build, about(**sizes))
        assert '\n' not in str(refusal.value)


@pytest.mark.parametrize(
    'config', [{'n_layer': 5}, {'n_layer': 5, 'n_expert': 3, 'aggregation': 'softmax_l2'}], ids=str
)
def test_sizes_are_counted_without_the_model(config, monkeypatch):
    """The bytes that are compared with the machine's: those of the parameters, for both kinds of both models."""
    needs = []
    monkeypatch.setattr(
        checkpoint,
        'check_fits',
        lambda need, what, kind: needs.append(need - config['n_layer'] * checkpoint.LEVEL_OBJECTS),
    )
    for build, about in [
        (build_agent, AgentConfig(kind, recurrent, n_embd=8, **config))
        for kind in ('convlstm', 'convglu')
        for recurrent in (True, False)
    ] + [
        (lambda c, r=recurrent: build_model(c, r), ModelConfig(n_embd=32, n_head=2, **config))
        for recurrent in (True, False)
    ]:
        checkpoint.check_model(build, about, 3)
        assert needs[-1] == 3 * 4 * sum(p.numel() for p in build(about).parameters())


def test_too_many_threads():
    with pytest.raises(checkpoint.SizeError, match='threads = 100000: at most'):
        checkpoint.set_threads(100000)
