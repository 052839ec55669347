"""common.py: failing saves, damaged and hostile files, the output folder, signals."""

import contextlib
import functools
import itertools
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import common
from common import LAST, LOCK, PREV, CheckpointError
from common import load_checkpoint, load_latest, prepare_out_dir, save_checkpoint


def names(folder):
    return sorted(os.listdir(folder))


def refused(words, function, *args, **settings):
    """In one line."""
    with pytest.raises(CheckpointError, match=words) as refusal:
        function(*args, **settings)
    assert '\n' not in str(refusal.value)


# ---- checkpoints ----


@pytest.mark.parametrize('step, whole', [(0, 2), (1, 2), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_save_that_fails_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step, whole):
    """At each point of the third: half written, fsync, two renames, fsync of the folder, none."""
    for n in (1, 2):
        save_checkpoint({'step': n}, tmp_path / LAST, keep=PREV)
    calls = itertools.count()

    def dies(function, *args):
        if next(calls) == step:
            raise OSError(28, 'No space left on device')
        return function(*args)

    def save(obj, file, real=torch.save):
        file.write(b'PK half')
        dies(file.seek, 0)
        real(obj, file)

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(torch, 'save', save)
        for name in ('fsync', 'replace'):
            patch.setattr(os, name, functools.partial(dies, getattr(os, name)))
        save_checkpoint({'step': 3}, tmp_path / LAST, keep=PREV)
    assert load_latest(tmp_path)[0]['step'] == whole
    save_checkpoint({'step': 4}, tmp_path / LAST, keep=PREV)
    assert load_checkpoint(tmp_path / LAST)['step'] == 4 and names(tmp_path) == [LAST, PREV]
    assert load_checkpoint(tmp_path / PREV)['step'] == whole


def test_bad_files_are_refused(tmp_path, monkeypatch, capsys):
    """A damaged last checkpoint gives way to the one before; pickled objects are not loaded."""
    monkeypatch.chdir(tmp_path)
    refused(f'holds no trained run, there is no {LAST}', load_latest, '.')
    torch.save({'model': Path('any object')}, 'evil.pt')
    refused('evil.pt: holds Python objects', load_checkpoint, 'evil.pt')
    for step in (1, 2):
        save_checkpoint({'step': step, 'weights': torch.ones(5000)}, LAST, keep=PREV)
    whole = Path(LAST).read_bytes()
    flipped = whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:]
    for damaged in (b'', flipped):  # test_fuzz.py has more
        Path(LAST).write_bytes(damaged)
        loaded, source = load_latest('.')
        out = capsys.readouterr().out
        assert loaded['step'] == 1 and source.name == PREV
        assert out.startswith('warning: ') and LAST in out and PREV in out and out.count('\n') == 1
    Path(PREV).write_bytes(b'')
    refused(PREV, load_latest, '.')


# ---- the output folder ----


def test_rules_of_the_output_folder(tmp_path):
    out = tmp_path / 'a' / 'b'
    prepare_out_dir(str(out)).release()
    (out / 'notes.txt').write_text('mine')
    prepare_out_dir(out).release()  # a folder with other things in it is no run
    for name in ('log.jsonl', 'ckpt_best.pt'):
        (out / name).write_text('')
        refused('holds a run already', prepare_out_dir, out)
    refused('exclude each other', prepare_out_dir, out, resume=True, overwrite=True)
    (out / '.ckpt_last.pt.tmp').write_text('half')
    (out / '.notes.tmp').write_text('mine')
    prepare_out_dir(out, resume=True).release()
    kept = {'.notes.tmp', LOCK, 'notes.txt'}
    assert set(names(out)) == kept | {'ckpt_best.pt', 'log.jsonl'}
    prepare_out_dir(out, overwrite=True).release()
    assert set(names(out)) == kept
    (tmp_path / 'file').write_text('')
    for bad in (tmp_path / 'file', tmp_path / 'file' / 'sub', '/proc/run'):
        refused('cannot be used', prepare_out_dir, bad)


@pytest.mark.parametrize('name', ['config.json', 'log.jsonl', LAST, 'loss.png'])
def test_a_folder_that_no_run_wrote_is_left_unchanged(tmp_path, name):
    """Also when it is asked for twice. A run that was copied without its mark can be resumed."""
    (tmp_path / name).write_text('theirs')
    for settings in 2 * ({}, {'overwrite': True}):
        words = f'holds {name}, which no run of ours wrote'
        refused(words, prepare_out_dir, tmp_path, **settings)
        assert names(tmp_path) == [name]
    prepare_out_dir(tmp_path, resume=True).release()
    assert names(tmp_path) == [LOCK, name]


def test_one_run_per_folder(tmp_path):
    """A process that holds the folder is named in the refusal; killed, it leaves no lock."""
    code = f'import common, time; lock = common.prepare_out_dir({str(tmp_path)!r})'
    command = [sys.executable, '-c', f'{code}; print("ready", flush=True); time.sleep(60)']
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        words = f'another run is using it .*process {other.pid} on .*: wait'
        for settings in ({}, {'overwrite': True}, {'resume': True}):
            refused(words, prepare_out_dir, tmp_path, **settings)
        other.kill()
    prepare_out_dir(tmp_path).release()


def test_restarts_by_torchrun(tmp_path, monkeypatch):
    """A restarted launch resumes the run that it started, and no run that it was refused."""

    def attempt(n):
        monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', str(n))
        common.resume_if_restarted(tmp_path, config := {}, settings := {})
        return config if config == settings else None

    assert attempt(0) == {}
    prepare_out_dir(tmp_path).release()
    assert attempt(1) == {'resume': False, 'overwrite': True}
    (tmp_path / LAST).write_text('')
    assert attempt(2) == {'resume': True, 'overwrite': False, 'init_from': ''}
    assert attempt(0) == {}
    refused('holds a run already', prepare_out_dir, tmp_path)
    assert attempt(1) == {}


# ---- signals ----


def test_a_closed_terminal_lets_the_update_finish(tmp_path):
    """The update is saved, though printing fails, to a `tee` that has ended too. Under nohup
    nothing stops."""
    child, terminal = pty.fork()
    if child == 0:
        signal.alarm(60)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        common.Stopper().restore()
        os.kill(os.getpid(), signal.SIGHUP)
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
        (tmp_path / 'saved').write_text(str(int(stopper.signal)))
        os._exit(0)
    os.read(terminal, 100)
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / 'saved').read_text() == str(int(signal.SIGHUP))


@pytest.mark.parametrize('ranks', [False, True])
def test_a_second_ctrl_c_stops_at_once(monkeypatch, ranks, capfd):
    """Under torchrun the launcher's own copy, within a second, does not count."""
    if ranks:
        monkeypatch.setenv('RANK', '0')
    former, stopper = signal.getsignal(signal.SIGINT), common.Stopper()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        if ranks:
            os.kill(os.getpid(), signal.SIGINT)
            stopper.time -= 2
        assert stopper.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        stopper.restore()
    assert signal.getsignal(signal.SIGINT) is former
    assert capfd.readouterr().err.count('stopping after this update') == 1
