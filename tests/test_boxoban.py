"""Test boxoban.py: levels as text, packed and downloaded; the generator by replay; the levels of a
run."""

import codecs
import sys
import zlib
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
    env = env_on_all(levels)
    assert np.array_equal(observations(levels), env.observe())
    assert masks(env)[2].sum(1).tolist() == [4, 1, 1, 4]  # boxes


@pytest.mark.parametrize('old, new, message', [
    ('#@$.', '# $.', 'level 1 does not have exactly one agent'),
    ('# .      #', '# .     @#', 'level 1 does not have exactly one agent'),
    ('#@$.', '#@é.', 'level 1 has a character that is none of'),
    ('#@$.', '#@-.', 'level 1 has a character that is none of'),
    ('#$.     @#', '#@       #', 'level 0 does not have 1 to 4 boxes'),
    ('#@$.', '#@ .', 'level 1 does not have as many targets as boxes'),
    ('#@$.', '#@$. ', 'level 1 is not ten rows of ten characters'),
    ('#@$.', ' @$.', 'level 1 is not walled in'),
    ('#$.     @#', '#*      @#', 'level 0 is solved already'),
    ('; 0\n', '', 'level 0 does not start with'),
])  # fmt: skip
def test_malformed_text_is_refused_by_file_and_level(old, new, message):
    boards = numbered([EASY, BOARD])
    assert_refused(f'^a.txt: {message}', parse_text, boards.replace(old, new, 1), 'a.txt')


@pytest.mark.parametrize('mark', [b'', codecs.BOM_UTF8], ids=['plain', 'with a byte order mark'])
@pytest.mark.parametrize('end', [b'\n', b'\r\n', b'\r'])
def test_text_files_of_every_editor_are_read_alike(tmp_path, mark, end):
    path = tmp_path / 'l.txt'
    path.write_bytes(mark + numbered([EASY, BOARD]).encode().replace(b'\n', end))
    assert np.array_equal(read_file(str(path)), parse_text(numbered([EASY, BOARD]), 'x'))


def test_a_text_file_in_utf_16_is_refused(tmp_path):
    (tmp_path / 'l.txt').write_text(numbered([EASY]), encoding='utf-16')
    assert_refused(f'^{tmp_path}/l.txt: ', read_file, f'{tmp_path}/l.txt')


def test_malformed_arrays_are_refused_by_file_and_level(tmp_path, monkeypatch):
    monkeypatch.setattr(boxoban, 'PART', 2)  # a level keeps its number in a file of several parts
    path = f'{tmp_path}/p.npy'
    levels = generate(5, 4, 3)[0]
    agent_on_box, box_in_wall, solved, no_cell = (levels.copy() for _ in range(4))
    agent_on_box[3, 16], no_cell[3, 8] = levels[3, 13], 255
    box_in_wall[3, 12] = np.unpackbits(levels[3, :8]).argmax()
    solved[3, 12:16] = levels[3, 8:12]
    boards = observations(levels).astype(np.int16)
    boards[3, 4, 4, 1] = -2
    for broken, message in (
        (agent_on_box, 'level 3 has a character that is none of'),
        (box_in_wall, 'level 3 has a character that is none of'),
        (solved, 'level 3 is solved already'),
        (no_cell, 'level 3 has a character that is none of'),
        (boards, 'level 3 has a character that is none of'),
        (levels[:, :9], r'expected uint8 of shape \(N, 17\)'),
        (levels[:0], r'expected uint8 of shape \(N, 17\)'),
    ):
        np.save(path, broken)
        assert_refused(f'^{path}: {message}', read_file, path)
    for same in (levels, observations(levels), observations(levels)[..., ::-1].astype(int)):
        np.save(path, same)
        assert np.array_equal(read_file(path), levels)


@pytest.mark.skipif(BOXOBAN is None, reason='there are no levels of Boxoban here')
def test_the_real_levels_are_read(capsys):
    levels, line = load_levels(str(BOXOBAN), 'unfiltered-test')
    assert len(np.unique(levels, axis=0)) == 1000
    assert line == f'1,000 levels of unfiltered-test from 1 file in {BOXOBAN}'
    assert len(load_levels(str(BOXOBAN), 'unfiltered-valid')[0]) == 100_000
    assert 'warning' not in capsys.readouterr().out


# ----------------------------------------------------------------------------- splits


def test_missing_levels_are_refused_with_the_command_that_downloads_them(tmp_path):
    missing = f'^{tmp_path}/a b: no hard.npy, hard.txt or hard_000.txt: `python boxoban.py .*--down'
    assert_refused(missing, load_levels, f'{tmp_path}/a b', 'hard')
    for name in ('', '-', '../unfiltered-test', 'none.txt/', 'none.txt', 'none.npy'):
        assert_refused(f'^{name!r}: no such file', load_levels, str(tmp_path), name)


def test_a_split_is_found_in_each_of_its_forms(tmp_path):
    """The later ones have precedence. Text files of other splits are left out."""
    levels = generate(30, 3, 1)[0]
    texts = [board_text(board) for board in observations(levels)]
    (tmp_path / 'unfiltered' / 'test').mkdir(parents=True)
    for other in ('unfiltered_tests.txt', 'unfiltered_test_a.txt', 'unfiltered_000.txt'):
        (tmp_path / other).write_text('')
    forms = [['unfiltered/test/000.txt', 'unfiltered/test/001.txt'], ['unfiltered-test.txt']]
    for files in (*forms, ['unfiltered-test.txt', 'unfiltered_test_012.txt']):
        for i, path in enumerate(files):
            (tmp_path / path).write_text(numbered(texts[7 * i : 7 * i + 7]))
        found, line = load_levels(str(tmp_path), 'unfiltered-test')
        assert np.array_equal(found, levels[: 7 * len(files)])
        assert line.startswith(f'{7 * len(files)} levels of unfiltered-test from {len(files)} file')
    for n, name in ((20, 'unfiltered-test.npy'), (30, 'unfiltered-test.pack17.npy')):
        np.save(tmp_path / name, levels[:n])
        assert np.array_equal(load_levels(str(tmp_path), 'unfiltered-test')[0], levels[:n])


def test_a_missing_split_is_downloaded_once(tmp_path, monkeypatch):
    levels, folder = generate(60, 4, 9)[0], tmp_path / 'levels'
    calls = []

    def hf_hub_download(repo_id, filename, local_dir):
        calls.append((repo_id, filename))
        if filename != 'hard.npy':
            raise huggingface_hub.errors.EntryNotFoundError(f'there is no {filename}')
        folder.mkdir()
        np.save(folder / filename, observations(levels))

    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', hf_hub_download)
    for _ in range(2):
        assert np.array_equal(load_levels(str(folder), 'hard', True)[0], levels)
    assert calls == [(boxoban.HUB, 'hard.npy')]
    assert_refused('^cannot download medium-train.npy', load_levels, folder, 'medium-train', True)


# ----------------------------------------------------------------------------- the levels of a run


def test_a_run_has_all_training_levels_and_the_first_evaluation_levels(tmp_path):
    levels = generate(9, 1, 3)[0]
    np.save(tmp_path / 'a.npy', levels)
    split = {'split': f'{tmp_path}/a.npy', 'eval_split': f'{tmp_path}/a.npy', 'eval_games': 4}
    training, (found, line) = load_level_sets(settings(**split))
    assert len(training[0]) == 9 and training[1] == f'9 levels of {tmp_path}/a.npy'
    assert np.array_equal(found, levels[:4])
    assert line == f'the first 4 of 9 levels of {tmp_path}/a.npy'
    found, line = select_levels(settings(split='unknown'), evaluation=True)
    assert np.array_equal(found, generate(20, 1, 5, 6, evaluation=True)[0])
    assert line == '20 generated levels, boxes: 1, moves: at most 6, seed: 5'


def test_levels_that_are_there_twice_are_counted_and_named(tmp_path, capsys):
    """In a file, and in both sets. The same boxes in another order, or in a text file, are the same
    level."""
    levels = generate(6, 2, 3)[0]
    shuffled = levels[[4, 2, 4]]
    shuffled[:, 12:16] = shuffled[:, [13, 12, 12, 13]]
    np.save(tmp_path / 'a.npy', np.concatenate([shuffled, generate(4, 2, 9)[0]]))
    (tmp_path / 'b.txt').write_text(numbered(map(board_text, observations(levels))))
    names = {'split': f'{tmp_path}/a.npy', 'eval_split': f'{tmp_path}/b.txt'}
    load_level_sets(settings(**names))
    within, between = capsys.readouterr().out.splitlines()
    assert within == f'warning: 1 of 7 levels of {tmp_path}/a.npy repeat an earlier one: numbers 2'
    assert between.startswith('warning: 2 of 6 evaluation levels')
    assert f'{tmp_path}/b.txt' in between and between.endswith("/a.npy'): numbers 2, 4")


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
    levels, _ = generate(1500, 4, seed=2)
    env = env_on_all(levels)
    wall, target, box = masks(env)
    reached = torch.zeros_like(wall).scatter(1, env.agent[:, None], True)
    for _ in range(64):
        reached = torch.stack([reached, *(reached.roll(d, 1) for d in DELTA)]).any(0) & ~wall
    assert torch.equal(reached, ~wall)
    assert len(np.unique(levels[:, :8], axis=0)) > 0.99 * 1500
    assert 24 < (~wall).sum(1).float().mean() < 36  # Boxoban's levels have 31.7 cells of floor
    # a box in one of the four corners could not be moved
    assert (target.sum(0)[INTERIOR] > 10).all() and (box.sum(0) > 5).sum() == 60


def test_the_seed_determines_the_levels():
    """The hash is that of the levels on which the shipped agent was evaluated."""
    levels, _ = generate(60, 1, 5, 6)
    assert np.array_equal(generate(40, 1, 5, 6)[0], levels[:40])
    assert not np.array_equal(generate(10, 1, 6, 6)[0], levels[:10])
    assert zlib.crc32(generate(200, 2, 7, 40, evaluation=True)[0]) == 657602913


def test_no_generated_level_is_in_both_sets_whatever_the_seeds_are():
    """Levels of one box and at most 6 moves are so few that seeds share some."""
    training = [set(map(bytes, generate(3000, 1, seed, 6)[0])) for seed in (1, 2)]
    evaluation = set(map(bytes, generate(800, 1, 3, 6, evaluation=True)[0]))
    assert training[0] & training[1]
    assert len(evaluation) > 400 and not evaluation & (training[0] | training[1])


@pytest.mark.parametrize('argument, message', [
    ({'boxes': 5}, 'n_boxes = 5: must be at least 1 and at most 4'),
    ({'n': 0}, 'n_levels = 0: must be at least 1'),
    ({'n': 0, 'evaluation': True}, 'eval_games = 0: must be at least 1'),
    ({'seed': -1}, 'seed = -1: must be at least 0'),
    ({'max_moves': 5}, 'max_moves = 5: must be at least 24 and at most 120'),
])  # fmt: skip
def test_generate_refuses_what_is_out_of_range(argument, message):
    assert_refused(message, generate, **{'n': 1, **argument})


def test_the_script_prints_levels_that_it_can_read_again(monkeypatch, capsys):
    argv = ['boxoban.py', '--split=generated', '--n_boxes=2', '--n_levels=5', '--show=3']
    monkeypatch.setattr(sys, 'argv', argv)
    boxoban.main()
    line, _, levels = capsys.readouterr().out.partition('\n')
    assert line == '5 generated levels, boxes: 2, moves: at most 120, seed: 1337'
    assert np.array_equal(parse_text(levels, 'x'), generate(3, 2, 1337)[0])
