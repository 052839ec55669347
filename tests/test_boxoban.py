"""Test boxoban.py: levels as text, packed and downloaded; the generator by replay; the levels of a
run."""

import codecs
import concurrent.futures
import os
import sys
import threading
import types
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from small_runs import assert_refused

import boxoban
from boxoban import BOX, DELTA, INTERIOR, MOST_MOVES, TARGET, WALL, board_text, generate
from boxoban import load_level_sets, load_levels, observations, parse_text, read_file, select_levels
from sokoban import SokobanEnv

# Boxoban's own levels, where a folder above the project holds them
FOLDERS = [folder / 'shared' / 'levels' for folder in Path(__file__).resolve().parents]
BOXOBAN = next(filter(Path.is_dir, FOLDERS), None)


def text(*rows):
    """Return a board of ten rows: one of wall, the given rows, and walls below them."""
    return '\n'.join(['#' * 10, *rows] + ['#' * 10] * (9 - len(rows)))


def numbered(boards):
    """Return boards in the form of a Boxoban file."""
    return ''.join(f'; {i}\n{board}\n\n' for i, board in enumerate(boards))


def env_on_all(levels):
    """Return an environment with a board for each level."""
    return SokobanEnv(levels, len(levels), order='sequence')


def masks(env):
    """Return walls, targets and boxes of an environment's boards, (N, 100) each."""
    return [(env.grid & bit) > 0 for bit in (WALL, TARGET, BOX)]


def settings(**changes):
    """Return settings of train_sokoban.py about levels."""
    generated = {'split': 'generated', 'eval_split': 'generated', 'levels_dir': ''}
    sizes = {'n_levels': 30, 'eval_games': 20, 'n_boxes': 1, 'max_moves': 6, 'seed': 5}
    return {**generated, **sizes, 'download': False, **changes}


BOARD = text('#@$.  #  #', '# $* $.  #', '# .      #')
EASY = text('#$.     @#')

# ----------------------------------------------------------------------------- text and arrays


def test_text_is_packed_and_unpacked():
    rows = ('#*@$. $. #', '#        #', '#$       #', '#.       #')
    boards = [BOARD, text('#@$.     #'), text('#+$      #'), text(*rows)]
    levels = parse_text(numbered(boards), 'x')
    assert levels.shape == (4, 17) and levels.dtype == np.uint8
    assert [board_text(board) for board in observations(levels)] == boards
    _, _, box = masks(env_on_all(levels))
    assert box.sum(1).tolist() == [4, 1, 1, 4]


def test_a_board_is_what_the_environment_shows_first():
    levels = generate(50, 3, 1)[0]
    assert np.array_equal(observations(levels), env_on_all(levels).observe())


@pytest.mark.parametrize(
    'old, new, message',
    [
        ('#@$.', '# $.', 'level 1 does not have exactly one agent'),
        ('#@$.', '#@é.', 'level 1 has a character that is none of'),
        ('#$.     @#', '#@       #', 'level 0 does not have 1 to 4 boxes'),
        ('#@$.', '#@$. ', 'level 1 is not ten rows of ten characters'),
        ('#@$.', ' @$.', 'level 1 is not walled in'),
        ('#$.     @#', '#*      @#', 'level 0 is solved already'),
        ('; 0\n', '', 'level 0 does not start with'),
    ],
)
def test_malformed_text_is_refused_by_file_and_level(old, new, message):
    boards = numbered([EASY, BOARD])
    assert_refused(f'^a.txt: {message}', parse_text, boards.replace(old, new), 'a.txt')


@pytest.mark.parametrize('mark', [b'', codecs.BOM_UTF8], ids=['plain', 'with a byte order mark'])
@pytest.mark.parametrize('end', [b'\n', b'\r\n', b'\r'])
def test_text_files_of_every_editor_are_read_alike(tmp_path, mark, end):
    path = tmp_path / 'l.txt'
    path.write_bytes(mark + numbered([EASY, BOARD]).encode().replace(b'\n', end))
    assert np.array_equal(read_file(str(path)), parse_text(numbered([EASY, BOARD]), 'x'))


def test_a_text_file_in_utf_16_is_refused_with_the_reason(tmp_path):
    (tmp_path / 'l.txt').write_text(numbered([EASY]), encoding='utf-16')
    assert_refused('l.txt: is UTF-16, or no text: save it as UTF-8', read_file, f'{tmp_path}/l.txt')


def test_malformed_arrays_are_refused_by_file_and_level(tmp_path):
    path = f'{tmp_path}/p.npy'
    levels = generate(5, 4, 3)[0]
    agent_on_box, box_in_wall, solved, no_cell = (levels.copy() for _ in range(4))
    agent_on_box[3, 16], no_cell[3, 8] = levels[3, 13], 255
    box_in_wall[3, 12] = np.unpackbits(levels[3, :8]).argmax()
    solved[3, 12:16] = levels[3, 8:12]
    for broken, message in (
        (agent_on_box, 'level 3 does not have as many targets as boxes'),
        (box_in_wall, 'level 3 has a character that is none of'),
        (solved, 'level 3 is solved already'),
        (no_cell, 'a cell of a packed level is not in 0..63'),
        (levels[:, :9], r'expected uint8 of shape \(N, 17\)'),
    ):
        np.save(path, broken)
        assert_refused(f'^{path}: {message}', read_file, path)


def test_a_large_file_is_checked_in_parts(tmp_path, monkeypatch):
    """A level that is refused keeps its number in the file."""
    levels = generate(5, 4, 3)[0]
    np.save(tmp_path / 'p.npy', levels)
    monkeypatch.setattr(boxoban, 'PART', 2)
    assert np.array_equal(read_file(f'{tmp_path}/p.npy'), levels)
    levels[4, 12:16] = levels[4, 8:12]
    np.save(tmp_path / 'p.npy', levels)
    assert_refused('level 4 is solved already', read_file, f'{tmp_path}/p.npy')


@pytest.mark.skipif(BOXOBAN is None, reason='there are no levels of Boxoban here')
def test_the_real_levels_are_read_and_none_is_solved_already():
    levels, line = load_levels(str(BOXOBAN), 'unfiltered-test')
    assert len(np.unique(levels, axis=0)) == 1000
    assert line == f'1,000 levels of unfiltered-test from 1 file in {BOXOBAN}'
    assert len(load_levels(str(BOXOBAN), 'unfiltered-valid')[0]) == 100_000


# ----------------------------------------------------------------------------- splits


def test_missing_levels_are_refused_with_the_command_that_downloads_them(tmp_path):
    command = '`python boxoban.py .*--download=True'
    assert_refused(
        f'nowhere: no such folder: {command}', load_levels, f'{tmp_path}/nowhere', 'hard'
    )
    missing = 'no hard.pack17.npy, hard.txt or hard_000.txt'
    assert_refused(f'{missing}: {command}', load_levels, str(tmp_path), 'hard')
    for name in ('', '../unfiltered-test', 'none.txt/', 'none.txt', 'none.npy'):
        assert_refused(f'^{name!r}: no such file', load_levels, str(tmp_path), name)


def test_a_split_is_found_in_each_of_its_forms(tmp_path):
    """An array has precedence over text files, and those over a tree of folders."""
    levels = generate(30, 3, 1)[0]
    texts = [board_text(board) for board in observations(levels)]
    (tmp_path / 'unfiltered' / 'test').mkdir(parents=True)
    for path, n in (('unfiltered/test/000.txt', 3), ('unfiltered_test_000.txt', 7)):
        (tmp_path / path).write_text(numbered(texts[:n]))
        found, line = load_levels(str(tmp_path), 'unfiltered-test')
        assert np.array_equal(found, levels[:n])
        assert line == f'{n} levels of unfiltered-test from 1 file in {tmp_path}'
    (tmp_path / 'unfiltered_test_001.txt').write_text(numbered(texts[7:9]))
    assert np.array_equal(load_levels(str(tmp_path), 'unfiltered-test')[0], levels[:9])
    np.save(tmp_path / 'unfiltered-test.pack17.npy', levels)
    assert np.array_equal(load_levels(str(tmp_path), 'unfiltered-test')[0], levels)


def test_text_files_of_other_splits_are_left_out(tmp_path):
    """A split's own files are numbered or have its name alone."""
    own = ['hard.txt', 'hard1.txt', 'hard_000.txt', 'hard-001.txt', 'hard.2.txt']
    others = ['hard-test.txt', 'hard_train_000.txt', 'harder.txt', 'hard_1_2.txt']
    for name in own + others:
        (tmp_path / name).write_text('')
    assert boxoban.split_files(str(tmp_path), 'hard') == sorted(f'{tmp_path}/{n}' for n in own)
    assert boxoban.split_files(str(tmp_path), 'har') == []


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Replace the Hub by arrays in a dict {file name: array}, all of one commit."""
    files = {}

    def hf_hub_download(repo_id, filename, revision):
        assert (repo_id, revision) == (boxoban.HUB, 'c0ffee')
        if filename not in files:
            raise huggingface_hub.errors.EntryNotFoundError(f'there is no {filename}')
        np.save(tmp_path / filename, files[filename])
        return str(tmp_path / filename)

    commit = types.SimpleNamespace(sha='c0ffee')
    monkeypatch.setattr(huggingface_hub, 'repo_info', lambda repo_id, revision, repo_type: commit)
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', hf_hub_download)
    return files


def test_a_split_is_downloaded_once_and_all_splits_are_of_one_commit(tmp_path, monkeypatch, hub):
    """Files on the Hub hold either channel first."""
    levels, folder = generate(60, 4, 9)[0], str(tmp_path / 'levels')
    hub['unfiltered-valid.npy'] = np.ascontiguousarray(observations(levels)[..., ::-1])
    hub['medium-valid.npy'] = observations(levels)
    malformed = observations(levels).astype(np.int16)
    malformed[7, 4, 4, 1] = -2
    hub['hard.npy'] = malformed
    assert_refused('^cannot download medium-train.npy', load_levels, folder, 'medium-train', True)
    monkeypatch.delattr(huggingface_hub, 'repo_info')  # from here on the folder keeps to its commit
    for split in ('unfiltered-valid', 'medium-valid'):
        for source in (f' downloaded from {boxoban.HUB}', ''):  # the second time it is there
            found, line = load_levels(folder, split, True)
            assert np.array_equal(found, levels)
            assert line == f'60 levels of {split} from 1 file in {folder}{source}'
    assert_refused('hard.npy: level 7 has a character', load_levels, folder, 'hard', True)
    assert not boxoban.split_files(folder, 'hard')


def test_two_downloads_at_once_do_not_disturb_each_other(tmp_path, monkeypatch, hub):
    """Both find no file, and both are about to rename theirs when the first one does."""
    levels, folder = generate(60, 4, 9)[0], str(tmp_path / 'levels')
    hub['hard.npy'] = observations(levels)
    os.makedirs(folder)
    both, replace = threading.Barrier(2, timeout=60), os.replace

    def replace_together(source, target):
        both.wait()
        replace(source, target)

    monkeypatch.setattr(os, 'replace', replace_together)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(boxoban.download_split, 'hard', folder) for _ in range(2)]
        assert [call.result() for call in calls] == [None, None]
    assert sorted(os.listdir(folder)) == ['hard.pack17.npy', 'meta.json']
    assert np.array_equal(load_levels(folder, 'hard')[0], levels)


# ----------------------------------------------------------------------------- the levels of a run


def test_a_run_has_all_training_levels_and_the_first_evaluation_levels(tmp_path):
    levels = generate(9, 1, 3)[0]
    np.save(tmp_path / 'a.npy', levels)
    np.save(tmp_path / 'b.npy', generate(9, 1, 4)[0])
    split = {'split': f'{tmp_path}/b.npy', 'eval_split': f'{tmp_path}/a.npy', 'eval_games': 4}
    training, (found, line) = load_level_sets(settings(**split))
    assert len(training[0]) == 9 and training[1] == f'9 levels of {tmp_path}/b.npy'
    assert np.array_equal(found, levels[:4])
    assert line == f'the first 4 of 9 levels of {tmp_path}/a.npy'


def test_the_evaluation_levels_of_a_run_do_not_depend_on_its_training_levels():
    (_, _), (expected, _) = load_level_sets(settings())
    found, line = select_levels(settings(n_levels=7, split='unknown'), evaluation=True)
    assert np.array_equal(found, expected)
    assert line == '20 generated levels, boxes: 1, moves: at most 6, seed: 5'


def test_evaluation_levels_that_are_training_levels_are_counted_and_named(tmp_path, capsys):
    """The same boxes in another order, or in a text file, are the same level."""
    levels = generate(6, 2, 3)[0]
    shuffled = levels[[4, 2]]
    shuffled[:, 12:16] = shuffled[:, [13, 12, 12, 13]]
    np.save(tmp_path / 'a.npy', np.concatenate([shuffled, generate(4, 2, 9)[0]]))
    (tmp_path / 'b.txt').write_text(numbered(map(board_text, observations(levels))))
    names = {'split': f'{tmp_path}/a.npy', 'eval_split': f'{tmp_path}/b.txt'}
    load_level_sets(settings(**names))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith('warning: 2 of 6 evaluation levels') and line.endswith(': numbers 2, 4')
    assert f'{tmp_path}/a.npy' in line and f'{tmp_path}/b.txt' in line


def test_a_file_that_is_trained_and_evaluated_on_is_reported(tmp_path, capsys):
    np.save(tmp_path / 'a.npy', generate(12, 1, 3)[0])
    load_level_sets(settings(split=f'{tmp_path}/a.npy', eval_split=f'{tmp_path}/a.npy'))
    assert 'warning: 12 of 12 evaluation levels' in capsys.readouterr().out


# ----------------------------------------------------------------------------- the generator


@pytest.mark.parametrize('boxes', [1, 4])
def test_generated_levels_are_solved_by_their_solutions(boxes):
    """The last action of a solution solves its level, and none before it does."""
    levels, solutions = generate(400, boxes, seed=11)
    env, solved_at = env_on_all(levels), torch.zeros(400)
    _, target, box = masks(env)
    assert (target.sum(1) == boxes).all() and not (box & target).any()
    assert not target.gather(1, env.agent[:, None]).any()
    assert all(3 * boxes <= len(actions) <= MOST_MOVES for actions in solutions)
    for t in range(max(map(len, solutions))):
        action = torch.tensor([int(actions[t]) if t < len(actions) else 0 for actions in solutions])
        _, _, solved = env.step(action)
        solved_at[solved & (solved_at == 0)] = t + 1
    assert solved_at.tolist() == [len(actions) for actions in solutions]


def test_generated_levels_are_connected_and_varied():
    levels, solutions = generate(1500, 4, seed=2)
    env = env_on_all(levels)
    wall, target, box = masks(env)
    reached = torch.zeros_like(wall).scatter(1, env.agent[:, None], True)
    for _ in range(64):
        reached = torch.stack([reached, *(reached.roll(d, 1) for d in DELTA)]).any(0) & ~wall
    assert torch.equal(reached, ~wall)
    assert len(np.unique(levels[:, :8], axis=0)) > 0.99 * 1500
    assert 24 < (~wall).sum(1).float().mean() < 36  # Boxoban's levels have 31.7 cells of floor
    assert np.median([len(actions) for actions in solutions]) > 20
    # a box in one of the four corners could not be moved
    assert (target.sum(0)[INTERIOR] > 10).all() and (box.sum(0) > 5).sum() == 60


def test_the_seed_determines_the_levels():
    levels, solutions = generate(60, 1, 5, 6)
    assert max(map(len, solutions)) <= 6
    assert np.array_equal(generate(40, 1, 5, 6)[0], levels[:40])
    assert not np.array_equal(generate(10, 1, 6, 6)[0], levels[:10])


def test_no_generated_level_is_in_both_sets_whatever_the_seeds_are():
    """Levels of one box and at most 6 moves are so few that seeds share some."""
    training = [set(map(bytes, generate(3000, 1, seed, 6)[0])) for seed in (1, 2)]
    evaluation = set(map(bytes, generate(800, 1, 3, 6, evaluation=True)[0]))
    assert training[0] & training[1]
    assert len(evaluation) > 400 and not evaluation & (training[0] | training[1])


@pytest.mark.parametrize(
    'argument, message',
    [
        ({'boxes': 0}, 'n_boxes = 0: must be between 1 and 4'),
        ({'boxes': 5}, 'n_boxes = 5: must be between 1 and 4'),
        ({'n': 0}, 'n_levels = 0: must be at least 1'),
        ({'n': 0, 'evaluation': True}, 'eval_games = 0: must be at least 1'),
        ({'seed': -1}, 'seed = -1: must be at least 0'),
        ({'max_moves': 5}, 'max_moves = 5: must be between 24 and 120 for n_boxes = 4'),
    ],
)
def test_generate_refuses_what_is_out_of_range(argument, message):
    assert_refused(message, generate, **{'n': 1, **argument})


# ----------------------------------------------------------------------------- the script


def test_the_script_prints_levels_that_it_can_read_again(tmp_path, monkeypatch, capsys):
    argv = ['boxoban.py', '--split=generated', '--n_boxes=2', '--n_levels=5', '--show=3']
    monkeypatch.setattr(sys, 'argv', argv)
    boxoban.main()
    line, _, levels = capsys.readouterr().out.partition('\n')
    assert line == '5 generated levels, boxes: 2, moves: at most 120, seed: 1337'
    assert np.array_equal(parse_text(levels, 'x'), generate(3, 2, 1337)[0])
