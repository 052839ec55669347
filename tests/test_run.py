"""Test run.py: what a resumed run keeps, folders in use, saves that fail, trackers, signals."""

import errno
import json
import os
import signal
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from small_runs import assert_refused, run_agent, run_lm

import plots
import run
from configurator import Settings
from run import LAST, PREV, RunFolder, Stopper, load_checkpoint, load_last, log_of, settings_of

DEFAULTS = {
    'out_dir': 'out/lm',
    'resume': False,
    'overwrite': False,
    'eval_only': False,
    'n_layer': 2,
    'max_iters': 10,
    'betas': (0.8, 0.95),
    'tensorboard': False,
    'wandb': False,
    'wandb_project': 'project',
}
FIXED = ('n_layer',)


def open_folder(path, from_files=None, script='train_toy.py', defaults=DEFAULTS, **command_line):
    """Return the RunFolder of a toy trainer with these settings."""
    command_line = {'out_dir': str(path), **command_line}
    return RunFolder(Settings(defaults, from_files or {}, command_line), FIXED, script)


def train(path, steps=3, saves=(2, 3), finished=False, **options):
    """Run the toy trainer: log steps, save some of them, and end; return the RunFolder."""
    folder = open_folder(path, **options)
    folder.start(device_name='toy')
    start = folder.records[-1]['step'] + 1 if folder.records else 0
    for step in range(start, steps + 1):
        folder.log({'step': step, 'loss': 1.0 / (1 + step)})
        if step in saves:
            folder.save(step=step, model={'w': torch.full((3,), float(step))})
    folder.finish(finished)
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- a resumed run has its saved settings


RESUMED = [  # config files at the start, command line then; both now; max_iters, n_layer or message
    ({}, {}, {}, {}, (10, 2)),
    ({}, {'max_iters': 20}, {}, {}, (20, 2)),
    ({'max_iters': 5}, {'max_iters': 20}, {'max_iters': 5}, {}, (20, 2)),  # given again
    ({'n_layer': 3}, {'n_layer': 4}, {'n_layer': 3}, {}, (10, 4)),
    ({}, {}, {}, {'max_iters': 30}, (30, 2)),
    ({'max_iters': 5}, {}, {'max_iters': 7}, {}, (5, 2)),  # edited: printed, not used
    ({}, {'n_layer': 3}, {}, {'n_layer': 3}, (10, 3)),
    ({}, {'n_layer': 3}, {}, {'n_layer': 2}, 'was trained with n_layer = 3'),
    ({}, {}, {'n_layer': 3}, {}, 'was trained with n_layer = 2'),  # another file
    ({'n_layer': 3}, {}, {'n_layer': 4}, {}, 'was trained with n_layer = 3'),
]


@pytest.mark.parametrize('files, line, files_now, line_now, expected', RESUMED)
def test_a_resumed_run_keeps_its_settings(
    tmp_path, capsys, files, line, files_now, line_now, expected
):
    train(tmp_path, from_files=files, **line)
    capsys.readouterr()

    def resume():
        return open_folder(tmp_path, from_files=files_now, resume=True, **line_now)

    if isinstance(expected, str):
        assert_refused(expected, resume)
        return
    config = resume().config
    assert (config['max_iters'], config['n_layer']) == expected
    printed = capsys.readouterr().out
    assert ('the run had' in printed) == ('max_iters' in line_now)
    assert ('is not used' in printed) == (files_now.get('max_iters') == 7)


def test_all_starts_are_recorded_with_their_changes(tmp_path):
    train(tmp_path)
    train(tmp_path, steps=5, saves=(5,), resume=True, max_iters=30)
    train(tmp_path, steps=7, resume=True, betas=(0.5, 0.5))
    config = settings_of(tmp_path)
    starts = [(start['step'], start['changes']) for start in config['starts']]
    assert starts == [(0, {}), (3, {'max_iters': 30}), (5, {'betas': [0.5, 0.5]})]
    assert config['max_iters'] == 30 and config['device_name'] == 'toy'


def test_auto_stands_for_what_the_run_has_found(tmp_path, capsys):
    """So a restart by the same command changes nothing."""
    defaults = {**DEFAULTS, 'device': 'auto', 'threads': 0}
    folder = open_folder(tmp_path, defaults=defaults)
    folder.config |= {'device': 'cpu', 'threads': 2}
    folder.start()
    folder.save(step=3)
    folder.finish(False)
    again = open_folder(tmp_path, defaults=defaults, resume=True, device='auto', threads=0)
    assert (again.config['device'], again.config['threads']) == ('cpu', 2) and not again.changes
    assert 'the run had' not in capsys.readouterr().out


def test_a_setting_that_the_script_has_got_since_counts_as_its_default(tmp_path):
    train(tmp_path)
    newer = {**DEFAULTS, 'z_loss': 0.0}
    assert open_folder(tmp_path, defaults=newer, resume=True).config['z_loss'] == 0
    settings = Settings(newer, {}, {'out_dir': str(tmp_path), 'resume': True, 'z_loss': 0.1})
    message = 'was trained with z_loss = 0.0'
    assert_refused(message, RunFolder, settings, (*FIXED, 'z_loss'), 'train_toy.py')


def test_the_run_of_another_trainer_is_refused(tmp_path):
    train(tmp_path)
    others = {name: x for name, x in DEFAULTS.items() if name != 'n_layer'} | {'n_envs': 4}
    settings = Settings(others, {}, {'out_dir': str(tmp_path), 'resume': True})
    message = 'was written by train_toy.py, another trainer'
    assert_refused(message, RunFolder, settings, ('n_envs',), 'train_other.py')


def test_auto_starts_continues_and_leaves_a_finished_run_alone(tmp_path):
    assert open_folder(tmp_path, resume='auto').saved is None
    folder = train(tmp_path / 'a', resume='auto')
    assert not folder.finished
    folder = train(tmp_path / 'a', steps=5, saves=(5,), finished=True, resume='auto')
    assert folder.saved['step'] == 3
    assert open_folder(tmp_path / 'a', resume='auto').finished
    longer = train(tmp_path / 'a', steps=6, saves=(6,), resume='auto', max_iters=20)
    assert longer.saved['step'] == 5 and not open_folder(tmp_path / 'a', resume='auto').finished


# ---- the log


def test_a_resumed_run_keeps_the_log_up_to_its_checkpoint(tmp_path):
    """Lines of lost updates, and a line that was cut short, are written again."""
    train(tmp_path, steps=5, saves=(3,))
    with open(tmp_path / 'log.jsonl', 'a') as file:
        file.write('{"step": 6, "lo')
    assert [r['step'] for r in log_of(tmp_path)] == [0, 1, 2, 3, 4, 5]
    train(tmp_path, steps=4, resume=True)
    assert [r['step'] for r in log_of(tmp_path)] == [0, 1, 2, 3, 4]


def test_the_log_is_standard_json(tmp_path):
    folder = open_folder(tmp_path)
    folder.start()
    folder.log({'step': 0, 'loss': float('nan')})
    assert json.loads((tmp_path / 'log.jsonl').read_text())['loss'] is None


# ---- whose folder it is


def test_a_folder_with_a_run_is_refused_unless_it_is_resumed_or_replaced(tmp_path):
    train(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert_refused('continue it with --resume=True, or replace it', open_folder, tmp_path)
    refusal = 'exclude each other'
    assert_refused(refusal, open_folder, tmp_path, resume=True, overwrite=True)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    folder = open_folder(tmp_path, overwrite=True)
    assert (tmp_path / LAST).exists()  # until the run really starts
    (tmp_path / 'notes.txt').write_text('mine')
    folder.start()
    assert names_in(tmp_path) == ['.run', 'config.json', 'log.jsonl', 'notes.txt']
    assert log_of(tmp_path) == []


def test_a_run_without_a_checkpoint_is_replaced_or_started_by_auto(tmp_path):
    train(tmp_path, saves=())
    assert_refused('holds a run without a checkpoint: replace it', open_folder, tmp_path)
    assert_refused('holds no trained run', open_folder, tmp_path, resume=True)
    assert train(tmp_path, resume='auto').saved is None


@pytest.mark.parametrize('name', ['log.jsonl', 'config.json', 'last.pt', 'best', 'loss.png'])
def test_files_that_no_run_wrote_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text('of another program')
    for settings in ({}, {'overwrite': True}):
        assert_refused('which no run wrote', open_folder, tmp_path, **settings)
    assert names_in(tmp_path) == [name]


def test_a_copy_of_a_run_without_its_hidden_files_resumes(tmp_path):
    train(tmp_path / 'a')
    (tmp_path / 'a' / '.run').unlink()
    assert train(tmp_path / 'a', steps=5, resume=True).step == 3


def test_a_folder_holds_one_run_at_a_time(tmp_path):
    folder = open_folder(tmp_path)
    message = f'another run is using it \\(process {os.getpid()} on .*\\): wait'
    assert_refused(message, open_folder, tmp_path)
    folder.finish(False)
    open_folder(tmp_path)


def test_a_path_that_can_be_no_folder_is_refused(tmp_path):
    (tmp_path / 'file').write_text('')
    message = 'file: cannot be the folder of a run: it is a file'
    assert_refused(message, open_folder, tmp_path / 'file')


def test_an_evaluation_writes_nothing(tmp_path):
    train(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    folder = open_folder(tmp_path, eval_only=True)
    assert folder.saved['step'] == 3
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    train(tmp_path)
    (tmp_path / '.last.pt.0f0f0f0f.tmp').write_text('half')
    train(tmp_path, resume=True)
    assert not list(tmp_path.glob('.*.tmp'))


# ---- checkpoints


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
    folder = open_folder(tmp_path)
    for step in (1, 2):
        folder.save(step=step)
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
            folder.save(step=3)
    assert load_last(tmp_path)[0]['step'] == step_left

    # the next save succeeds and leaves nothing else
    folder.save(step=4)
    assert load_checkpoint(tmp_path / LAST)['step'] == 4
    assert load_checkpoint(tmp_path / PREV)['step'] == step_left
    assert names_in(tmp_path) == ['.run', LAST, PREV]


@pytest.mark.parametrize('damage', ['truncated', 'one bit flipped'])
def test_a_damaged_last_checkpoint_gives_way_to_the_previous_one(tmp_path, capsys, damage):
    """A line says so, and the next save keeps the previous one. If that is damaged too, the run is
    refused. test_fuzz.py has more damages."""
    folder = open_folder(tmp_path)
    for step in (1, 2):
        folder.save(step=step, weights=torch.ones(5000))
    folder.finish(False)
    content = bytearray((tmp_path / LAST).read_bytes())
    content[9000] ^= 1
    (tmp_path / LAST).write_bytes(b'' if damage == 'truncated' else content)
    resumed = open_folder(tmp_path, resume=True)
    assert resumed.saved['step'] == 1 and resumed.path_of_saved.name == PREV
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith('warning: ')]
    assert LAST in line and PREV in line
    resumed.save(step=2)
    assert [load_checkpoint(tmp_path / name)['step'] for name in (LAST, PREV)] == [2, 1]
    for name in (LAST, PREV):
        (tmp_path / name).write_bytes(b'')
    assert_refused(PREV, load_last, tmp_path)


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


# ---- trackers


@pytest.mark.parametrize('error', [BrokenPipeError, ConnectionResetError, OSError, ValueError])
@pytest.mark.parametrize('fails_in', ['init', 'log', 'finish'])
def test_a_tracker_that_fails_is_switched_off_with_one_warning(
    tmp_path, monkeypatch, capsys, error, fails_in
):
    logged = []

    def fail(name):
        if name == fails_in:
            raise error(28, 'the tracker is gone')

    class Tracked:
        id = 'abc'

        def log(self, record, step):
            if step == 1:
                fail('log')
            logged.append(step)

        def finish(self):
            fail('finish')

    def init(**options):
        fail('init')
        return Tracked()

    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
    train(tmp_path, wandb=True)
    assert [r['step'] for r in log_of(tmp_path)] == [0, 1, 2, 3]
    assert logged == {'init': [], 'log': [0], 'finish': [0, 1, 2, 3]}[fails_in]
    assert capsys.readouterr().err.count('warning: wandb') == 1


def test_a_resumed_run_continues_its_run_of_weights_and_biases(tmp_path, monkeypatch):
    """Its id is its own, whatever the folders in wandb/ are called."""
    calls = []

    def init(**options):
        calls.append(options)
        run_id = options.get('id', f'id-{len(calls)}')
        return types.SimpleNamespace(id=run_id, log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
    train(tmp_path, wandb=True)
    train(tmp_path, wandb=True, resume=True)
    assert [call.get('id') for call in calls] == [None, 'id-1']


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path):
    accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    train(tmp_path, saves=(1,), tensorboard=True)
    folder = open_folder(tmp_path, resume=True)
    folder.start()
    folder.log({'step': 2, 'loss': 4.5, 'name': 'text'})
    folder.finish(True)
    board = accumulator.EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(x.step, x.value) for x in board.Scalars('loss')] == [(0, 1.0), (1, 0.5), (2, 4.5)]
    assert 'settings/text_summary' in board.Tags()['tensors']


def test_both_trackers_follow_a_real_run(tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    assert run_agent(tmp_path, total_steps=24, tensorboard=True, wandb=True) == 0
    board = accumulator.EventAccumulator(str(tmp_path))
    board.Reload()
    curve = {x.step: x.value for x in board.Scalars('eval_return')}
    log = [record for record in log_of(tmp_path) if 'eval_return' in record]
    assert curve == {record['step']: pytest.approx(record['eval_return']) for record in log}
    (path,) = tmp_path.glob('wandb/offline-run-*/*.wandb')
    stored = path.read_bytes()
    assert b'eval_return' in stored and b'learning_rate' in stored


# ---- signals


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_waits_for_the_update_and_the_second_does_not(capfd):
    stopper = Stopper()
    press_ctrl_c()
    assert stopper.signal == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert capfd.readouterr().err.count('stopping after this update') == 1


@pytest.mark.parametrize('number', [errno.EIO, errno.ENOSPC, errno.EPIPE])
def test_a_signal_counts_though_its_line_cannot_be_printed(monkeypatch, number):
    def write(descriptor, data):
        raise OSError(number, 'text')

    stopper = Stopper()
    with monkeypatch.context() as patch:
        patch.setattr(os, 'write', write)
        press_ctrl_c()
    assert stopper.signal == signal.SIGINT


def test_under_torchrun_the_launchers_copy_of_ctrl_c_does_not_count(monkeypatch, capfd):
    """A rank gets ctrl-C from the terminal and, within a second, from the launcher."""
    monkeypatch.setenv('RANK', '0')
    stopper = Stopper()
    press_ctrl_c()
    press_ctrl_c()
    assert stopper.signal == signal.SIGINT
    stopper.time -= 2  # two seconds later
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert capfd.readouterr().err.count('stopping after this update') == 1


def test_under_nohup_a_closed_terminal_stops_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopper = Stopper()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stopper.signal is None


# ---- a real run


PICTURES = [  # function and arguments, (training value, evaluation value) of each of its axes
    (plots.plot_losses, ['byte'], [('train_loss', 'val_loss')]),
    (
        plots.plot_returns,
        [],
        [('return_1000', 'eval_return'), ('solve_rate_1000', 'eval_solve_rate')],
    ),
]


@pytest.mark.parametrize('plot, arguments, names', PICTURES, ids=['losses', 'returns'])
def test_the_picture_of_a_run_shows_training_and_evaluation(
    tmp_path, monkeypatch, plot, arguments, names
):
    log = [{'step': n, 'tokens': 10**6 * n, 'env_steps': 10**6 * n} for n in range(3)]
    for training, evaluation in names:
        log[1] |= {training: 0.5}
        log[2] |= {training: 0.25, evaluation: 0.75}
    (tmp_path / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)))
    figures = []
    monkeypatch.setattr(plots, 'save', lambda figure, folder, name: figures.append(figure))
    plot(tmp_path, *arguments)
    for axes in figures[0].axes:
        points = [line.get_xydata().tolist() for line in axes.lines]
        assert points == [[[1, 0.5], [2, 0.25]], [[2, 0.75]]]
    assert len(figures[0].axes) == len(names)


def test_a_run_writes_its_log_config_picture_checkpoints_and_best_model(data, tmp_path):
    assert run_lm(data, tmp_path, plot=True) == 0
    best = {f'best/{name}' for name in ('model.safetensors', 'config.json', 'README.md')}
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*') if p.is_file()}
    assert files == {'config.json', 'log.jsonl', 'loss.png', LAST, PREV, '.run', *best}
    config = settings_of(tmp_path)
    assert (config['device'], config['dtype'], config['threads']) == ('cpu', 'float32', 1)
    assert config['rows'] == 8 and config['finished'] and run.is_finished(tmp_path)
    assert {'commit', 'device_name', 'torch', 'command', 'script'} <= config.keys()
