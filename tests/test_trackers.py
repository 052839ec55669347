"""Test what common.py sends to TensorBoard and Weights & Biases."""

import pytest
from small_runs import run_agent

from common import open_trackers
from figures import read_log


@pytest.fixture(scope='module')
def tracked_run(tmp_path_factory):
    """Return the folder of a run, trained and then evaluated, that both trackers have followed."""
    pytest.importorskip('wandb')
    pytest.importorskip('tensorboard')
    folder = tmp_path_factory.mktemp('tracked')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('WANDB_MODE', 'offline')
        patch.setenv('WANDB_SILENT', 'true')
        for settings in ({'total_steps': 24}, {'eval_only': True}):
            assert run_agent(folder, tensorboard=True, wandb=True, **settings) == 0
    return folder


def games_in(folder):
    return {path.read_bytes() for path in folder.glob('eval_*.gif')}


def test_tensorboard_gets_curves_settings_and_games(tracked_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tracked_run), size_guidance={'images': 0, 'scalars': 0})
    board.Reload()
    curve = {x.step: x.value for x in board.Scalars('eval_return')}
    log = [record for record in read_log(tracked_run) if 'eval_return' in record]
    assert curve == {record['step']: pytest.approx(record['eval_return']) for record in log}
    assert 'settings/text_summary' in board.Tags()['tensors']
    tags = [tag for tag in board.Tags()['images'] if tag.endswith('_game')]
    games = {board.Images(tag)[0].encoded_image_string for tag in tags}
    assert games and games == games_in(tracked_run)


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path):
    event_accumulator = pytest.importorskip(
        'tensorboard.backend.event_processing.event_accumulator'
    )

    def track(losses, first_step=None):
        write, close = open_trackers({'out_dir': tmp_path}, True, '', first_step)
        for step, loss in losses.items():
            write({'step': step, 'loss': loss})
        close()

    track({0: 5.0, 1: 4.0, 2: 3.0})
    track({1: 4.5}, first_step=1)
    board = event_accumulator.EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(x.step, x.value) for x in board.Scalars('loss')] == [(0, 5.0), (1, 4.5)]


def test_wandb_gets_curves_settings_and_games(tracked_run):
    """Training and evaluation belong to one run of Weights & Biases."""
    folders = list(tracked_run.glob('wandb/offline-run-*'))
    identifiers = {folder.name.rpartition('-')[2] for folder in folders}
    assert len(folders) == 2 and len(identifiers) == 1
    files = [path for folder in folders for path in folder.glob('*.wandb')]
    stored = b''.join(path.read_bytes() for path in files)
    assert b'eval_return' in stored and b'learning_rate' in stored
    games = {path.read_bytes() for folder in folders for path in folder.rglob('*.gif')}
    assert games and games == games_in(tracked_run)
