"""What common.py sends to TensorBoard and Weights & Biases."""

import pytest
import test_train_sokoban

from figures import read_log


def test_trackers_get_curves_settings_and_games(tmp_path, monkeypatch):
    """Of a run and of its evaluation, which belong to one run of Weights & Biases."""
    pytest.importorskip('wandb')
    events = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    both = {'tensorboard': True, 'wandb': True}
    assert test_train_sokoban.run(tmp_path, total_steps=24, **both) == 0
    assert test_train_sokoban.run(tmp_path, eval_only=True, **both) == 0
    board = events.EventAccumulator(str(tmp_path), size_guidance={'images': 0, 'scalars': 0})
    board.Reload()
    log = read_log(tmp_path)
    curve = {x.step: pytest.approx(x.value) for x in board.Scalars('eval_return')}
    assert {r['step']: r['eval_return'] for r in log if 'eval_return' in r} == curve
    gifs = {path.read_bytes() for path in tmp_path.glob('eval_*.gif')}
    games = [tag for tag in board.Tags()['images'] if tag.endswith('_game')]
    assert gifs and {board.Images(tag)[0].encoded_image_string for tag in games} == gifs
    assert 'settings/text_summary' in board.Tags()['tensors']
    kept = tmp_path.glob('wandb/offline-run-*/files/media/videos/*.gif')
    assert {path.read_bytes() for path in kept} == gifs
    names = [path.name for path in tmp_path.glob('wandb/offline-run-*')]
    assert len(names) == 2 and len({name.rpartition('-')[2] for name in names}) == 1
    stored = b''.join(path.read_bytes() for path in tmp_path.glob('wandb/offline-run-*/*.wandb'))
    assert b'eval_return' in stored and b'learning_rate' in stored
