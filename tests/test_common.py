"""Test common.py: saves that fail, damaged and hostile files, the output folder, signals."""

import errno
import fcntl
import os
import pty
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from processes import start
from small_runs import assert_refused

import common
import kernels
from common import LAST, LOCK, PREV
from common import load_checkpoint, load_latest, prepare_out_dir, save_checkpoint


def list_names(folder):
    return sorted(os.listdir(folder))


# ---- checkpoints ----


@pytest.mark.parametrize(
    'failing_call, step_left',
    [
        (1, 2),  # the write
        (2, 2),  # fsync of the file
        (3, 2),  # the renaming of the last checkpoint to the previous one
        (4, 2),  # the renaming of the new file to the last checkpoint
        (5, 3),  # fsync of the folder
        (6, 3),  # none: all calls succeed
    ],
)
def test_a_save_that_fails_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch, failing_call, step_left
):
    for step in (1, 2):
        save_checkpoint({'step': step}, tmp_path / LAST, keep=PREV)
    calls = 0

    def count_call():
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise OSError(28, 'No space left on device')

    def save(obj, file, torch_save=torch.save):
        file.write(b'PK half')
        count_call()
        file.seek(0)
        torch_save(obj, file)

    def fsync(file, os_fsync=os.fsync):
        count_call()
        os_fsync(file)

    def replace(old, new, os_replace=os.replace):
        count_call()
        os_replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', save)
        patch.setattr(os, 'fsync', fsync)
        patch.setattr(os, 'replace', replace)
        with pytest.raises(OSError) if failing_call <= 5 else nullcontext():
            save_checkpoint({'step': 3}, tmp_path / LAST, keep=PREV)
    assert load_latest(tmp_path)[0]['step'] == step_left

    # the next save succeeds and leaves nothing else
    save_checkpoint({'step': 4}, tmp_path / LAST, keep=PREV)
    assert load_checkpoint(tmp_path / LAST)['step'] == 4
    assert load_checkpoint(tmp_path / PREV)['step'] == step_left
    assert list_names(tmp_path) == [LAST, PREV]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    assert_refused(f'holds no trained run, there is no {LAST}', load_latest, tmp_path)


def test_a_checkpoint_with_python_objects_is_refused(tmp_path):
    torch.save({'model': Path('any object')}, tmp_path / 'evil.pt')
    assert_refused('evil.pt: holds Python objects', load_checkpoint, tmp_path / 'evil.pt')


@pytest.mark.parametrize('damage', ['truncated', 'one bit flipped'])
def test_a_damaged_last_checkpoint_gives_way_to_the_previous_one(tmp_path, capsys, damage):
    """A line says so. If the previous one is damaged too, the run is refused. test_fuzz.py has more
    damages."""
    for step in (1, 2):
        save_checkpoint({'step': step, 'weights': torch.ones(5000)}, tmp_path / LAST, keep=PREV)
    content = bytearray((tmp_path / LAST).read_bytes())
    content[9000] ^= 1
    (tmp_path / LAST).write_bytes(b'' if damage == 'truncated' else content)
    loaded, source = load_latest(tmp_path)
    assert loaded['step'] == 1 and source.name == PREV
    out = capsys.readouterr().out
    assert out.startswith('warning: ') and LAST in out and PREV in out and out.count('\n') == 1
    (tmp_path / PREV).write_bytes(b'')
    assert_refused(PREV, load_latest, tmp_path)


# ---- the output folder ----


def test_a_new_folder_is_made_and_one_with_other_files_is_accepted(tmp_path):
    out = tmp_path / 'a' / 'b'
    prepare_out_dir(str(out)).release()
    (out / 'notes.txt').write_text('text')
    prepare_out_dir(out).release()
    assert {'notes.txt', LOCK} <= set(list_names(out))


@pytest.mark.parametrize('name', ['log.jsonl', 'ckpt_best.pt'])
def test_a_folder_with_a_run_is_refused(tmp_path, name):
    """Resuming is proposed only if there is a checkpoint to resume from."""
    prepare_out_dir(tmp_path).release()
    (tmp_path / name).write_text('')
    message = 'holds a run already: it has no checkpoint to resume from: replace it with'
    assert_refused(message, prepare_out_dir, tmp_path)
    message = 'no trained run, there is no ckpt_last.pt; replace it with --overwrite=True'
    assert_refused(message, prepare_out_dir, tmp_path, resume=True)
    (tmp_path / LAST).write_text('')
    assert_refused('already: continue it with --resume=True', prepare_out_dir, tmp_path)


def test_resume_keeps_a_run_and_overwrite_removes_it(tmp_path):
    """Both remove half-written checkpoints, and leave other files alone."""
    prepare_out_dir(tmp_path).release()
    for name in ('log.jsonl', LAST, '.ckpt_last.pt.tmp', 'notes.txt', '.notes.tmp'):
        (tmp_path / name).write_text('')
    prepare_out_dir(tmp_path, resume=True).release()
    others = {'.notes.tmp', LOCK, 'notes.txt'}
    assert set(list_names(tmp_path)) == others | {LAST, 'log.jsonl'}
    prepare_out_dir(tmp_path, overwrite=True).release()
    assert set(list_names(tmp_path)) == others


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    assert_refused('exclude each other', prepare_out_dir, tmp_path, resume=True, overwrite=True)


@pytest.mark.parametrize('out_dir', ['{}/file', '{}/file/sub', '/proc/run'])
def test_a_path_that_can_be_no_folder_is_refused(tmp_path, out_dir):
    (tmp_path / 'file').write_text('')
    assert_refused('cannot be used', prepare_out_dir, out_dir.format(tmp_path))


@pytest.mark.parametrize('name', ['config.json', 'log.jsonl', LAST, 'loss.png'])
def test_a_folder_that_no_run_wrote_is_left_unchanged(tmp_path, name):
    """A second call is refused too. A run that was copied without its mark can be resumed."""
    (tmp_path / name).write_text('text of another program')
    for settings in ({}, {'overwrite': True}, {}, {'overwrite': True}):
        message = f'holds {name}, which no run of ours wrote'
        assert_refused(message, prepare_out_dir, tmp_path, **settings)
        assert list_names(tmp_path) == [name]
    (tmp_path / LAST).write_text('')
    prepare_out_dir(tmp_path, resume=True).release()
    assert list_names(tmp_path) == sorted({LOCK, LAST, name})


def test_a_folder_without_a_checkpoint_cannot_be_resumed_and_is_left_unchanged(tmp_path):
    out = tmp_path / 'mistyped'
    assert_refused('mistyped: holds no trained run', prepare_out_dir, out, resume=True)
    assert not out.exists()


def test_a_folder_holds_one_run_at_a_time(tmp_path):
    """A refusal names the process that holds the folder. A killed process leaves no lock."""
    code = f'import common, time; lock = common.prepare_out_dir({str(tmp_path)!r})'
    with start(['-c', f'{code}; print("ready", flush=True); time.sleep(600)']) as other:
        assert other.stdout.readline() == 'ready\n'
        (tmp_path / LAST).write_text('')
        message = f'another run is using it .*process {other.pid} on .*: wait'
        for settings in ({}, {'overwrite': True}, {'resume': True}):
            assert_refused(message, prepare_out_dir, tmp_path, **settings)
        other.kill()
    prepare_out_dir(tmp_path, resume=True).release()


@pytest.mark.parametrize('number', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys, number):
    def flock(file, operation):
        raise OSError(number, 'Function not implemented')

    monkeypatch.setattr(fcntl, 'flock', flock)
    prepare_out_dir(tmp_path).release()
    assert f'warning: {tmp_path}: this file system has no locks' in capsys.readouterr().out
    assert list_names(tmp_path) == [LOCK]


def restart_changes(out_dir, monkeypatch, restarts, launch='a'):
    """Return the settings that change when torchrun starts a run for the n-th time."""
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', launch)
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', str(restarts))
    config, settings = {}, {}
    common.resume_if_restarted(out_dir, config, settings)
    assert config == settings
    return config


def test_a_run_restarted_by_torchrun_resumes_or_starts_over(tmp_path, monkeypatch):
    """It starts over if it has not saved anything yet."""
    assert restart_changes(tmp_path, monkeypatch, restarts=0) == {}
    prepare_out_dir(tmp_path).release()
    changes = restart_changes(tmp_path, monkeypatch, restarts=1)
    assert changes == {'resume': False, 'overwrite': True}
    (tmp_path / LAST).write_text('')
    changes = restart_changes(tmp_path, monkeypatch, restarts=2)
    assert changes == {'resume': True, 'overwrite': False}


def test_a_restart_does_not_touch_a_run_that_was_refused(tmp_path, monkeypatch):
    assert restart_changes(tmp_path, monkeypatch, restarts=0) == {}
    prepare_out_dir(tmp_path).release()
    (tmp_path / LAST).write_text('')
    assert restart_changes(tmp_path, monkeypatch, restarts=0) == {}  # another launch
    assert_refused('holds a run already', prepare_out_dir, tmp_path)
    assert restart_changes(tmp_path, monkeypatch, restarts=1) == {}


@pytest.mark.parametrize('launch', ['', 'none'])
def test_a_restart_in_a_launch_without_a_name_resumes_nothing(tmp_path, monkeypatch, launch):
    """'none' is the name of every launch of torchrun without --standalone and --rdzv_id."""
    assert restart_changes(tmp_path, monkeypatch, 0, launch) == {}
    prepare_out_dir(tmp_path).release()
    assert restart_changes(tmp_path, monkeypatch, 1, launch) == {}


def test_a_restart_in_a_launch_without_a_name_does_not_overwrite(tmp_path, monkeypatch):
    """The run in the folder may be the one that is restarted."""
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    overwrites = {'resume': False, 'overwrite': True}
    assert_refused('--rdzv_id=NAME', common.resume_if_restarted, tmp_path, overwrites)


# ---- the device ----


def test_memory_that_holds_tensors_is_not_free(monkeypatch):
    """10 bytes of 80 are free on the GPU, and 10 of the 30 that torch has reserved."""
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (10, 80))
    monkeypatch.setattr(torch.cuda, 'memory_reserved', lambda device: 30)
    monkeypatch.setattr(torch.cuda, 'memory_allocated', lambda device: 20)
    assert common.device_memory('cuda:0') == (80, 20)


def test_a_trial_of_the_compiler_that_runs_out_of_memory_raises(monkeypatch):
    def trial():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 GB")

    monkeypatch.setattr(kernels.fused, 'enabled', True)
    with pytest.raises(RuntimeError, match='DefaultCPUAllocator'):
        common.compiles(torch.nn.Linear(1, 1), trial)


# ---- signals ----


def save_after_the_terminal_closes(path):
    """Wait for SIGHUP, print to a terminal and a pipe that are both gone, and write the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stopper = common.Stopper()
    os.write(1, b'ready')
    while stopper.signal is None:
        time.sleep(0.01)
    os.write(1, b'a line of the log')
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = open(writer, 'w')
    common.print0('another line')
    path.write_text(str(int(stopper.signal)))


def test_an_update_is_saved_though_the_terminal_is_closed(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        try:
            signal.alarm(600)
            save_after_the_terminal_closes(tmp_path / 'saved')
            os._exit(0)
        finally:  # never return into pytest
            os._exit(1)
    os.read(terminal, 100)
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / 'saved').read_text() == str(int(signal.SIGHUP))


def test_a_run_that_nobody_reads_stops_as_after_sigterm(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
            sys.stdout = open(1, 'w', closefd=False)
            stopper = common.Stopper()
            for line in ('a line', 'the next line'):
                common.print0(line)
            (tmp_path / 'signal').write_text(str(int(stopper.signal)))
            os._exit(0)
        finally:  # never return into pytest
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / 'signal').read_text() == str(int(signal.SIGTERM))


def test_under_nohup_a_closed_terminal_stops_nothing():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopper = common.Stopper()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopper.signal is None
    finally:
        stopper.restore()
        signal.signal(signal.SIGHUP, previous)


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def stopper(monkeypatch):
    """Return a common.Stopper; assert that it restores the handler of SIGINT."""
    monkeypatch.setattr(common.Stopper, 'stopping', False)  # restored at the end
    handler, stopper = signal.getsignal(signal.SIGINT), common.Stopper()
    yield stopper
    stopper.restore()
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_first_ctrl_c_waits_for_the_update_and_the_second_does_not(stopper, capfd):
    press_ctrl_c()
    assert stopper.signal == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert capfd.readouterr().err.count('stopping after this update') == 1


@pytest.mark.parametrize('number', [errno.EIO, errno.ENOSPC, errno.EPIPE])
def test_a_signal_counts_though_its_line_cannot_be_printed(stopper, monkeypatch, number):
    def write(descriptor, data):
        raise OSError(number, 'text')

    with monkeypatch.context() as patch:
        patch.setattr(os, 'write', write)
        press_ctrl_c()
    assert stopper.signal == signal.SIGINT


def test_under_torchrun_the_launchers_copy_of_ctrl_c_does_not_count(monkeypatch, stopper, capfd):
    """A rank gets ctrl-C from the terminal and, within a second, from the launcher."""
    monkeypatch.setenv('RANK', '0')
    press_ctrl_c()
    press_ctrl_c()
    assert stopper.signal == signal.SIGINT
    stopper.time -= 2  # two seconds later
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert capfd.readouterr().err.count('stopping after this update') == 1
