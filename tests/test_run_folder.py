"""Test run_folder.py: what a resumed run keeps, folders in use, saves that fail, trackers,
signals."""

import errno
import fcntl
import itertools
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

from configurator import Settings
from support.script import TORCHRUN, UserError

import numpy as np
import pytest
import torch
from processes import need_git
from small_runs import assert_refused, run_lm

from support import code, plots, run_folder
from support.code import code_record, modules_of
from support.run_folder import (
    LAST,
    PREV,
    RunFolder,
    load_checkpoint,
    load_last,
    log_of,
    settings_of,
)
from support.signals import Stopper

DEFAULTS = {
    'out_dir': 'out/lm',
    'resume': False,
    'overwrite': False,
    'eval_only': False,
    'n_layer': 2,
    'max_iters': 10,
    'betas': (0.8, 0.95),
    'threads': 0,
    'tensorboard': False,
    'wandb': False,
    'wandb_project': 'project',
}
FIXED = ('n_layer',)


def open_folder(path, from_files=None, defaults=DEFAULTS, name='train_toy.py', **command_line):
    """Return the RunFolder of a toy trainer with these settings. name: of its file, which lies
    beside the folder; it is created if it does not exist."""
    script = path.parent / name
    script.touch()
    command_line = {'out_dir': str(path), **command_line}
    return RunFolder(Settings(defaults, from_files or {}, command_line), FIXED, script)


def train(path, steps=3, saves=(2, 3), device='toy', is_finished=False, **options):
    """Run the toy trainer: log steps, save some of them, and end; return the RunFolder."""
    folder = open_folder(path, **options)
    folder.config['threads'] = 2  # as found on the machine
    folder.start(device_name=device)
    start = folder.records[-1]['step'] + 1 if folder.records else 0
    for step in range(start, steps + 1):
        folder.log({'step': step, 'loss': 1.0 / (1 + step)})
        if step in saves:
            folder.save(step=step)
    folder.finish(is_finished)
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- a resumed run has its saved settings


def test_a_resumed_run_keeps_its_settings(tmp_path, capsys):
    """Config files may be given again, edited or not. They are ignored, with a line."""
    train(tmp_path, from_files={'n_layer': 3, 'max_iters': 5}, n_layer=4)
    edited = {'n_layer': 3, 'max_iters': 7}
    config = open_folder(tmp_path, from_files=edited, resume=True).config
    assert (config['n_layer'], config['max_iters']) == (4, 5)
    assert capsys.readouterr().out.count('the config files are ignored') == 1


def test_a_resumed_run_refuses_a_change_of_a_fixed_setting(tmp_path):
    """The folder is free again then, although the error is kept, as in a notebook."""
    train(tmp_path, n_layer=4)
    message = 'was trained with n_layer = 4'
    with pytest.raises(UserError, match=message) as error:
        open_folder(tmp_path, resume=True, n_layer=2)
    open_folder(tmp_path, resume=True)
    assert error.traceback


THREADS = [  # OMP_NUM_THREADS, cores, changed settings, what is printed; the run had 2
    (None, 2, {}, None),
    ('2', 4, {}, None),
    ('1', 4, {}, 'despite OMP_NUM_THREADS = 1'),
    (None, 1, {'threads': 0}, 'despite fewer cores (1)'),
    ('1', 1, {'threads': 2}, None),
]


@pytest.mark.parametrize('omp, cores, changes, line', THREADS)
def test_a_number_of_threads_that_does_not_fit_is_kept_and_named(
    tmp_path, monkeypatch, capsys, omp, cores, changes, line
):
    train(tmp_path)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(cores))
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    if omp:
        monkeypatch.setenv('OMP_NUM_THREADS', omp)
    assert open_folder(tmp_path, resume=True, **changes).config['threads'] == 2
    printed = capsys.readouterr().out
    assert line in printed if line else 'despite' not in printed


def test_all_starts_are_recorded_and_printed_with_their_changes(tmp_path, capsys):
    """With threads = 0 a run keeps the number that it has found."""
    train(tmp_path)
    train(tmp_path, resume=True, max_iters=30, betas=(0.5, 0.5), threads=0)
    assert capsys.readouterr().out.count('(the run had ') == 2
    config = settings_of(tmp_path)
    starts = [(start['step'], start['changes']) for start in config['starts']]
    assert starts == [(0, {}), (3, {'max_iters': 30, 'betas': [0.5, 0.5]})]
    assert (config['max_iters'], config['threads'], config['device_name']) == (30, 2, 'toy')


def test_another_device_is_named(tmp_path, capsys):
    for step, device in enumerate(('toy', 'toy', 'other', 'other', 'toy'), 1):
        train(tmp_path, step, saves=[step], device=device, resume='auto')
    lines = [line for line in capsys.readouterr().out.splitlines() if 'device_name' in line]
    assert lines == [
        "device_name = 'other'  (the run had 'toy')",
        "device_name = 'toy'  (the run had 'other')",
    ]


def test_changes_of_a_start_that_saved_nothing_are_named(tmp_path, capsys):
    train(tmp_path)
    train(tmp_path, resume=True, saves=(), max_iters=30)
    capsys.readouterr()
    assert open_folder(tmp_path, resume=True, betas=(0.5, 0.5)).config['max_iters'] != 30
    printed = capsys.readouterr().out
    assert (
        '  (not 30, as in a later start that this checkpoint does not have)' in printed
        and printed.count('(not') == 1
    )


def test_another_version_of_the_trainer_resumes_a_run_and_another_trainer_does_not(tmp_path):
    """A setting that the script has got since counts as its default."""
    train(tmp_path)
    newer = {**DEFAULTS, 'z_loss': 0.5}
    assert open_folder(tmp_path, defaults=newer, resume=True).config['z_loss'] == 0.5
    settings = Settings({**DEFAULTS, 'n_envs': 4}, {}, {'out_dir': str(tmp_path), 'resume': True})
    message = 'was written by train_toy.py, another trainer'
    assert_refused(message, RunFolder, settings, ('n_envs',), __file__)


# ---- the code of a run


def git(folder, *arguments):
    """Run a git command in a folder, as a user with a name."""
    need_git()
    user = ['-c', 'user.name=me', '-c', 'user.email=me@example.org']
    done = subprocess.run(['git', '-C', folder, *user, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TRAINER = """import torch
import layer  # beside the script
from package import part

def lazy():
    from package.deep import nothing
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a project's folder with a trainer and modules, and support/run_folder.py."""
    root = tmp_path / 'project'
    files = {
        'train.py': TRAINER,
        'layer.py': 'def f(x):\n    return x + 1\n',
        'package/__init__.py': '',
        'package/part.py': 'from .deep import nothing\n',
        'package/deep.py': 'from unknown import *\n',
        'package/unused.py': '',
        'support/code.py': '',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(code, 'PROJECT', root)
    monkeypatch.setattr(code, '__file__', str(root / 'support/code.py'))
    return root


def test_the_checksum_of_a_trainer_covers_what_it_imports_and_no_comments(project):
    script, module = project / 'train.py', project / 'package/deep.py'
    names = [str(path.relative_to(project)) for path in modules_of(script)]
    package = ['package/__init__.py', 'package/part.py', 'package/deep.py']
    assert names == ['train.py', 'layer.py', *package]
    before = code_record(script)
    assert before['folder'] == str(project) and before['commit'] == 'unknown'
    (project / 'layer.py').write_text('"""A layer."""\ndef f(x):\n    return (x + 1)  # why\n')
    (project / 'package/unused.py').write_text('x = 1')
    script.rename(project / 'mine.py')
    assert code_record(project / 'mine.py') == before
    module.write_text('x = 1')
    after = code_record(project / 'mine.py')
    assert after['checksum'] != before['checksum']
    assert after['script_checksum'] == before['script_checksum']


def test_the_code_of_a_loaded_module_is_what_was_loaded(project, monkeypatch):
    """A notebook that runs a trainer again after an edit of a module runs the old module."""
    module = project / 'layer.py'
    monkeypatch.setitem(sys.modules, 'layer', Mock(__file__=str(module)))
    before = code_record(project / 'train.py')
    module.write_text('def f(x):\n    return x + 2\n')
    assert code_record(project / 'train.py') == before


def test_the_commit_is_that_of_the_modules(project, tmp_path, monkeypatch):
    """It is unknown in a copy inside another repository, which does not keep it. GIT_DIR, as in a
    hook, may name another repository. Files that git does not know, of the project or elsewhere,
    and edited ones count as dirty; other files do not."""
    outside = tmp_path / 'mine.py'
    outside.write_text('import layer')

    def commit(script=project / 'train.py'):
        return code_record(script)['commit']

    git(tmp_path, 'init', '-q')
    git(tmp_path, 'commit', '-q', '--allow-empty', '-m', 'thesis')
    assert commit() == 'unknown'
    git(project, 'init', '-q')
    git(project, 'add', '.')
    git(project, 'commit', '-q', '-m', 'code')
    monkeypatch.setenv('GIT_DIR', str(tmp_path / '.git'))
    clean = git(project, '--git-dir=.git', 'rev-parse', '--short=12', 'HEAD')
    assert commit() == clean
    assert commit(outside) == f'{clean}-dirty'
    (project / 'package/unused.py').write_text('x = 1')
    assert commit() == clean
    (project / 'layer.py').write_text('import new')
    assert commit() == f'{clean}-dirty'
    (project / 'layer.py').write_text('def f(x):\n    return x + 1\n')
    assert commit() == clean
    (project / 'mine.py').write_text('import layer')
    (project / '.git/info/exclude').write_text('mine.py')
    assert commit(project / 'mine.py') == f'{clean}-dirty'


def test_a_resumed_run_names_another_trainer_and_other_code(tmp_path, capsys):
    """A copy of the trainer under another name has the same code."""
    path = tmp_path / 'run'

    def lines(name, text, **options):
        """Train with a trainer of this name and text; return the lines about the code."""
        (tmp_path / name).write_text(text)
        train(path, name=name, **options)
        return [x for x in capsys.readouterr().out.splitlines() if 'started' in x]

    assert lines('train_toy.py', 'x = 1') == []
    assert lines('train_toy.py', 'x = 1  # one', resume=True) == []
    message = 'the run was started by train_toy.py, and resumes with mine.py'
    assert lines('mine.py', 'x = 1', resume=True) == [message]
    (line,) = lines('train_toy.py', 'x = 2', resume=True)
    assert line.startswith('train_toy.py has changed since the run was started (commit ')
    (tmp_path / 'layer.py').write_text('x = 1')
    path = tmp_path / 'another'
    assert lines('train_toy.py', 'import layer') == []
    (tmp_path / 'layer.py').write_text('x = 2')
    (line,) = lines('train_toy.py', 'import layer', resume=True)
    assert line.startswith('modules that train_toy.py imports have changed since')
    config = settings_of(path)
    assert config['code'] == config['starts'][0]['code'] != config['starts'][-1]['code']


# ---- the log


def test_a_resumed_run_keeps_the_log_up_to_its_checkpoint(tmp_path):
    """Lines of lost updates, and a line that was cut short, are written again. Files of a save that
    was killed are removed."""
    train(tmp_path, steps=5, saves=(3,))
    with open(tmp_path / 'log.jsonl', 'a') as file:
        file.write('{"step": 6, "lo')
    (tmp_path / '.last.pt.0f0f0f0f.tmp').write_text('half')
    train(tmp_path, steps=4, resume=True)
    assert [r['step'] for r in log_of(tmp_path)] == [0, 1, 2, 3, 4]
    assert names_in(tmp_path) == ['.lock', 'config.json', LAST, 'log.jsonl']


def test_the_log_is_standard_json(tmp_path):
    open_folder(tmp_path).log({'step': 0, 'loss': float('nan')})
    assert json.loads((tmp_path / 'log.jsonl').read_text())['loss'] is None


@pytest.mark.parametrize('last', [{'step': 3}, None], ids=['the next line', 'the end'])
def test_lines_for_which_the_disk_has_no_room_are_written_later(tmp_path, capsys, last):
    """A line that was cut short is there once. There is one warning, because a line is logged in
    every update."""
    folder = open_folder(tmp_path)
    folder.log({'step': 0})
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, most))  # the second line takes 12 to 24
    try:
        folder.log({'step': 1})
        folder.log({'step': 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert log_of(tmp_path) == [{'step': 0}]
    assert capsys.readouterr().err.count(f'{tmp_path}/log.jsonl: File too large') == 1
    if last is None:
        folder.finish(True)
    else:
        folder.log(last)
    text = ''.join(f'{{"step": {n}}}\n' for n in range(3 if last is None else 4))
    assert (tmp_path / 'log.jsonl').read_text() == text


# ---- whose folder it is


def test_a_folder_with_a_run_is_refused_unless_it_is_resumed_or_replaced(tmp_path):
    train(tmp_path)
    before = contents_of(tmp_path)
    assert_refused('continue it with --resume=True, or replace it', open_folder, tmp_path)
    refusal = 'exclude each other'
    assert_refused(refusal, open_folder, tmp_path, resume=True, overwrite=True)
    assert_refused(refusal, open_folder, tmp_path.with_name('new'), resume='auto', overwrite=True)
    folder = open_folder(tmp_path, overwrite=True)
    assert contents_of(tmp_path) == before  # until the run really starts
    (tmp_path / 'notes.txt').write_text('mine')
    folder.start()
    assert names_in(tmp_path) == ['.lock', 'config.json', 'log.jsonl', 'notes.txt']
    assert log_of(tmp_path) == []


@pytest.mark.parametrize('name', ['TORCHELASTIC_RESTART_COUNT', 'SLURM_RESTART_COUNT'])
def test_a_restarted_job_does_not_replace_what_it_has_trained(tmp_path, monkeypatch, name):
    train(tmp_path)
    monkeypatch.setenv(name, '1')
    message = 'a restarted job would remove what it has trained: give --resume=auto'
    assert_refused(message, open_folder, tmp_path, overwrite=True)
    monkeypatch.setenv(name, '0')
    open_folder(tmp_path, overwrite=True)


def test_a_run_without_a_checkpoint_is_replaced_or_started_by_auto(tmp_path):
    train(tmp_path, saves=())
    assert_refused('holds a run without a checkpoint: replace it', open_folder, tmp_path)
    assert_refused('holds no trained run', open_folder, tmp_path, resume=True)
    assert train(tmp_path, resume='auto').saved is None


@pytest.mark.parametrize('is_finished, interval', [(True, 10), (False, 2)])
def test_a_run_whose_checkpoints_were_removed_is_not_replaced_by_auto(
    tmp_path, is_finished, interval
):
    train(tmp_path, defaults={**DEFAULTS, 'eval_interval': interval}).finish(is_finished)
    for name in (LAST, PREV):
        (tmp_path / name).unlink()
    before = contents_of(tmp_path)
    assert_refused('holds a run without a checkpoint', open_folder, tmp_path, resume='auto')
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize('name', ['log.jsonl', 'config.json', LAST, 'best', 'loss.png'])
def test_files_that_no_run_wrote_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text('of another program')
    for settings in ({}, {'overwrite': True}):
        assert_refused('which no run wrote', open_folder, tmp_path, **settings)
    assert names_in(tmp_path) == [name]


def test_a_run_that_is_killed_while_it_starts_can_be_replaced(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder, 'open_trackers', Mock(side_effect=KeyboardInterrupt))
        train(tmp_path)
    (tmp_path / '.lock').unlink()  # the process is gone
    train(tmp_path, overwrite=True)


def test_a_run_that_is_killed_while_it_replaces_another_does_not_continue_that(
    tmp_path, monkeypatch
):
    train(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, 'write_config', Mock(side_effect=KeyboardInterrupt))
        train(tmp_path, overwrite=True)
    (tmp_path / '.lock').unlink()  # the process is gone
    assert_refused('holds no trained run', open_folder, tmp_path, resume=True)


def test_links_in_a_folder_that_is_replaced_go_and_their_targets_stay(tmp_path):
    """Also a link to what is gone."""
    folder, disk = tmp_path / 'run', tmp_path / 'disk'
    train(folder)
    disk.mkdir()
    (disk / 'notes.txt').write_text('mine')
    (folder / 'best').symlink_to(disk)
    (folder / 'curve.png').symlink_to(disk / 'gone.png')
    train(folder, overwrite=True)
    assert names_in(folder) == ['.lock', 'config.json', LAST, 'log.jsonl', PREV]
    assert names_in(disk) == ['notes.txt']


def test_a_linked_checkpoint_stays_where_the_link_leads(tmp_path):
    folder, disk = tmp_path / 'run', tmp_path / 'disk'
    disk.mkdir()
    train(folder)
    (folder / LAST).rename(disk / 'last_of_run.pt')
    (folder / LAST).symlink_to('../disk/last_of_run.pt')
    (disk / '.last_of_run.pt.0f0f0f0f.tmp').write_text('of a save that was killed')
    (disk / '.another.pt.0f0f0f0f.tmp').write_text('of another run')
    train(folder, steps=5, saves=(4, 5), resume=True)
    assert all((folder / name).is_symlink() for name in (LAST, PREV))
    assert [load_checkpoint(folder / name)['step'] for name in (LAST, PREV)] == [5, 4]
    files = ['.another.pt.0f0f0f0f.tmp', 'last_of_run.pt', 'last_of_run.pt.prev.pt']
    assert names_in(disk) == files
    (disk / 'last_of_run.pt').unlink()  # as between the two renames of a save
    assert load_last(folder)[0]['step'] == 4


def test_a_copied_run_leaves_what_is_linked_to_the_original(tmp_path):
    folder, disk = tmp_path / 'run', tmp_path / 'disk'
    disk.mkdir()
    train(folder)
    (folder / LAST).rename(disk / 'last.pt')
    (folder / LAST).symlink_to(disk / 'last.pt')
    (disk / 'best').mkdir()
    (disk / 'best' / 'config.json').write_text('{}')
    (folder / 'best').symlink_to(disk / 'best')
    (disk / '.last.pt.0f0f0f0f.tmp').write_text('of a save of the original')
    shutil.copytree(folder, tmp_path / 'copy', symlinks=True)
    train(tmp_path / 'copy', steps=5, saves=(4, 5), resume=True)
    assert load_last(folder)[0]['step'] == 3 and load_last(tmp_path / 'copy')[0]['step'] == 5
    assert not any((tmp_path / 'copy' / name).is_symlink() for name in (LAST, 'best'))
    assert names_in(tmp_path / 'copy' / 'best') == ['config.json']
    assert names_in(disk) == ['.last.pt.0f0f0f0f.tmp', 'best', 'last.pt']


def test_links_to_a_disk_that_is_gone_are_named_before_a_run_starts(tmp_path):
    gone = tmp_path / 'gone'
    (tmp_path / 'link').symlink_to(gone)
    message = f'cannot be the folder of a run: {tmp_path}/link is a link to {gone}, which is not'
    for path in (tmp_path / 'link', tmp_path / 'link/run'):
        settings = Settings(DEFAULTS, {}, {'out_dir': str(path)})
        assert_refused(message, RunFolder, settings, FIXED, __file__)
    for name in (LAST, 'best'):
        folder = tmp_path / f'run_{name}'
        folder.mkdir()
        (folder / name).symlink_to(gone / name)
        assert_refused(f'{folder / name}: a link to {gone / name}', open_folder, folder)


def test_a_folder_holds_one_run_at_a_time(tmp_path):
    folder = open_folder(tmp_path)
    message = f'another run is using it \\(process {os.getpid()} on .*\\): wait'
    assert_refused(message, open_folder, tmp_path)
    folder.finish(False)
    open_folder(tmp_path)


@pytest.mark.filterwarnings('ignore:flock not supported')
def test_a_killed_run_can_be_replaced_where_files_cannot_be_locked(tmp_path, monkeypatch):
    """Then the file of the lock is the lock: it names the process that is gone."""
    monkeypatch.setattr(fcntl, 'flock', Mock(side_effect=OSError(errno.ENOSYS, 'no flock')))
    folder = open_folder(tmp_path)
    folder.start()
    folder.save(step=1)
    assert_refused('another run is using it', open_folder, tmp_path, resume=True)
    folder.finish(False)
    gone = subprocess.Popen(['true'])
    gone.wait()
    (tmp_path / '.lock').write_text(f'{gone.pid}\n{platform.node()}\n')
    open_folder(tmp_path, overwrite=True)


# ---- checkpoints


@pytest.mark.parametrize('failing_call', range(1, 6))
def test_a_save_that_fails_leaves_a_whole_checkpoint(tmp_path, monkeypatch, failing_call):
    """The calls are the write, the fsync of the file, the renaming of the last checkpoint to the
    previous one, that of the new file to the last checkpoint, and the fsync of the folder."""
    step_left = 2 if failing_call < 5 else 3
    folder = open_folder(tmp_path)
    for step in (1, 2):
        folder.save(step=step)
    calls = []

    def may_fail(function):
        def call(*args):
            calls.append(function)
            if len(calls) == failing_call:
                raise OSError(28, 'No space left on device')
            function(*args)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((torch, 'save'), (os, 'fsync'), (os, 'replace')):
            patch.setattr(module, name, may_fail(getattr(module, name)))
        with pytest.raises(OSError) as error:
            folder.save(step=3)
    assert failing_call == 5 or error.value.filename == str(tmp_path / LAST)
    assert load_last(tmp_path)[0]['step'] == step_left

    # the next save succeeds and leaves nothing else
    folder.save(step=4)
    assert load_checkpoint(tmp_path / LAST)['step'] == 4
    assert load_checkpoint(tmp_path / PREV)['step'] == step_left
    assert names_in(tmp_path) == ['.lock', LAST, PREV]


def test_a_damaged_last_checkpoint_gives_way_to_the_previous_one(tmp_path, capsys):
    """A line says so, and the next save keeps the previous one."""
    folder = open_folder(tmp_path)
    for step in (1, 2):
        folder.save(step=step, weights=torch.ones(5000))
    folder.finish(False)
    content = bytearray((tmp_path / LAST).read_bytes())
    content[9000] ^= 1  # a bit of the weights
    (tmp_path / LAST).write_bytes(content)
    resumed = open_folder(tmp_path, resume=True)
    assert resumed.saved['step'] == 1 and resumed.path_of_saved.name == PREV
    printed = capsys.readouterr().out
    assert (
        f'warning: {tmp_path / LAST}: damaged' in printed and f'using {tmp_path / PREV}' in printed
    )
    resumed.save(step=2)
    assert [load_checkpoint(tmp_path / name)['step'] for name in (LAST, PREV)] == [2, 1]


def test_a_finished_run_without_its_last_checkpoint_is_not_repeated_unasked(tmp_path):
    train(tmp_path, is_finished=True)
    (tmp_path / LAST).unlink()
    message = '--resume=True repeats it from update 2'
    assert_refused(message, train, tmp_path, resume='auto')
    assert [record['step'] for record in log_of(tmp_path)] == [0, 1, 2, 3]
    assert train(tmp_path, resume=True).step == 2


def test_a_checkpoint_that_cannot_be_opened_does_not_give_way(tmp_path):
    """It may be whole, and the next save would overwrite it."""
    train(tmp_path, saves=(2, 3))
    (tmp_path / LAST).unlink()
    (tmp_path / LAST).mkdir()
    with pytest.raises(IsADirectoryError):
        load_last(tmp_path)


def test_a_strange_file_in_the_best_model_ends_no_run(tmp_path, capsys):
    refuses = Mock(save_pretrained=Mock(side_effect=UserError('notes.txt')))
    open_folder(tmp_path).save_best(refuses, step=1)
    assert 'warning: best/ keeps the earlier model, if any: notes.txt' in capsys.readouterr().err


def test_a_checkpoint_for_which_there_is_no_memory_is_not_called_damaged(tmp_path, monkeypatch):
    def load(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    train(tmp_path)
    monkeypatch.setattr(torch, 'load', load)
    with pytest.raises(RuntimeError, match='DefaultCPUAllocator'):
        load_last(tmp_path)


def test_a_checkpoint_with_python_objects_is_refused(tmp_path):
    torch.save({'config': {}, 'model': Path('any object')}, tmp_path / 'evil.pt')
    assert_refused('evil.pt: holds Python objects', load_checkpoint, tmp_path / 'evil.pt')


def test_a_checkpoint_that_a_resumed_run_would_refuse_is_not_saved(tmp_path):
    """The one before it stays, and the update is in another file."""
    folder = train(tmp_path)
    before = contents_of(tmp_path)
    message = r'last\.pt: not saved: an edit saves numpy\S+, which a resumed run would refuse'
    assert_refused(message, folder.save, step=4, mean=np.float64(1))
    unsafe = tmp_path / 'unsafe.pt'
    assert torch.load(unsafe, weights_only=False)['step'] == 4
    unsafe.unlink()
    assert contents_of(tmp_path) == before


# ---- trackers


@pytest.mark.parametrize(
    'fails_in, error, expected_calls',
    [
        ('init', ValueError, ['init']),
        ('log', BrokenPipeError, ['init', 'log']),
        ('finish', OSError, ['init', 'log', 'log', 'log', 'log', 'finish']),
    ],
)
def test_a_tracker_that_fails_is_switched_off_with_one_warning(
    tmp_path, monkeypatch, capsys, fails_in, error, expected_calls
):
    wandb = Mock(id='abc')
    wandb.init.return_value = wandb
    getattr(wandb, fails_in).side_effect = error(28, 'the tracker is gone')
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    train(tmp_path, wandb=True)
    assert [name for name, _, _ in wandb.method_calls] == expected_calls
    assert [r['step'] for r in log_of(tmp_path)] == [0, 1, 2, 3]
    assert capsys.readouterr().err.count('warning: wandb') == 1


def test_both_trackers_follow_a_run_that_is_resumed(tmp_path, monkeypatch, capfd):
    """TensorBoard hides what is written again, and the run of Weights & Biases keeps its id."""
    pytest.importorskip('wandb')
    accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    train(tmp_path, saves=(1,), tensorboard=True, wandb=True)
    folder = open_folder(tmp_path, resume=True)
    folder.start()
    folder.log({'step': 2, 'loss': 4.5, 'name': 'text'})
    folder.finish(True)
    board = accumulator.EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(x.step, x.value) for x in board.Scalars('loss')] == [(0, 1.0), (1, 0.5), (2, 4.5)]
    assert 'settings/text_summary' in board.Tags()['tensors']
    ids = {path.stem for path in tmp_path.glob('wandb/offline-run-*/*.wandb')}
    assert len(ids) == 1 and 'warning: ' not in capfd.readouterr().err


def test_a_copy_of_a_run_is_a_new_run_of_weights_and_biases(tmp_path, monkeypatch, capsys):
    """A line says how a folder that was moved keeps the old one. A link to a folder is no copy."""
    wandb, steps = Mock(), itertools.count(4)
    wandb.init.side_effect = [Mock(id=name) for name in 'abcdefg']
    monkeypatch.setitem(sys.modules, 'wandb', wandb)

    def resume(path):
        """Resume a run; return the id that it asks for, and the line about it."""
        step = next(steps)
        train(path, steps=step, saves=(step,), resume=True)
        (line,) = [x for x in capsys.readouterr().out.splitlines() if 'wandb: ' in x] or [None]
        return wandb.init.call_args.kwargs.get('id'), line

    train(tmp_path / 'run', wandb=True)
    assert resume(tmp_path / 'run') == ('a', None)
    (tmp_path / 'link').symlink_to(tmp_path / 'run')
    assert resume(tmp_path / 'link') == ('b', None)
    shutil.copytree(tmp_path / 'run', tmp_path / 'copy')
    new, line = resume(tmp_path / 'copy')
    assert new is None and 'if it was only moved, WANDB_RUN_ID=c WANDB_RESUME=allow keeps c' in line
    assert resume(tmp_path / 'copy') == ('d', None)
    (tmp_path / 'copy').rename(tmp_path / 'moved')
    monkeypatch.setenv('WANDB_RUN_ID', 'e')
    assert resume(tmp_path / 'moved') == (None, None)


# ---- the machine


@pytest.mark.parametrize(
    'gpu, dtype, expected',
    [
        ('NVIDIA H100 80GB HBM3', torch.bfloat16, '30.0%'),
        ('NVIDIA H100 PCIe', torch.bfloat16, '39.2%'),
        ('NVIDIA H100 80GB HBM3', torch.float32, 'n/a'),
        ('Tesla T4', torch.bfloat16, 'n/a'),
    ],
)
def test_utilization_is_three_forwards_over_the_peak_of_all_gpus(monkeypatch, gpu, dtype, expected):
    """A forward of 0.989 GFLOPs per token at 200,000 tokens/s on two GPUs."""
    monkeypatch.setattr(run_folder, 'device_name', lambda device: gpu)
    monkeypatch.setattr(run_folder.dist, 'is_initialized', lambda: True)
    monkeypatch.setattr(run_folder.dist, 'get_world_size', lambda: 2)
    model = Mock(flops_per_token=lambda: {'layers': 0.9e9, 'head': 0.089e9})
    assert run_folder.mfu(model, 200_000, 'cuda:0', dtype) == expected


# ---- signals


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGUSR1', 'SIGUSR2', 'SIGXCPU'])
def test_signals_that_mean_stop_soon_set_the_flag_until_the_handlers_are_restored(name):
    number = getattr(signal, name)
    stopper = Stopper()
    os.kill(os.getpid(), number)
    assert stopper.signal == number
    stopper.restore()
    assert signal.getsignal(number) == signal.SIG_DFL


def test_the_handler_of_a_library_stays():
    received = []
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    stopper = Stopper()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stopper.signal is None and received == [signal.SIGUSR1]


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize('under_torchrun', [False, True])
def test_the_first_ctrl_c_waits_for_the_update_and_the_second_does_not(monkeypatch, under_torchrun):
    """Under torchrun a rank gets ctrl-C from the terminal and, within a second, from the launcher,
    whose copy does not count."""
    stopper = Stopper()
    press_ctrl_c()
    if under_torchrun:
        for name in TORCHRUN:
            monkeypatch.setenv(name, '0')
        press_ctrl_c()
        stopper.time -= 2  # two seconds later
    assert stopper.signal == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_under_nohup_a_closed_terminal_stops_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopper = Stopper()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stopper.signal is None


# ---- a real run


def test_pictures_of_a_run_show_training_and_evaluation(tmp_path, monkeypatch):
    training = dict.fromkeys(['train_loss', 'return_1000', 'solve_rate_1000'], 0.5)
    evaluation = dict.fromkeys(['val_loss', 'eval_return', 'eval_solve_rate'], 0.75)
    record = {'step': 9, 'tokens': 10**6, 'env_steps': 10**6, **training, **evaluation}
    (tmp_path / 'log.jsonl').write_text(json.dumps(record))
    figures = []
    monkeypatch.setattr(plots, 'save_figure', lambda figure, path: figures.append(figure))
    plots.plot_losses(tmp_path)
    plots.plot_returns(tmp_path)
    all_axes = [axes for figure in figures for axes in figure.axes]
    curves = [[line.get_xydata().tolist() for line in axes.lines] for axes in all_axes]
    assert curves == 3 * [[[[1, 0.5]], [[1, 0.75]]]]


def test_a_run_writes_its_log_config_picture_checkpoints_and_best_model(data, tmp_path):
    assert run_lm(data, tmp_path, plot=True) == 0
    best = {f'best/{name}' for name in ('model.safetensors', 'config.json', 'README.md')}
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*') if p.is_file()}
    assert files == {'config.json', 'log.jsonl', 'loss.png', LAST, PREV, '.lock', *best}
    config = settings_of(tmp_path)
    assert (config['device'], config['dtype'], config['threads']) == ('cpu', 'float32', 1)
    assert config['rows'] == 8 and config['finished']
    assert {'code', 'device_name', 'torch', 'command', 'script'} <= config.keys()
