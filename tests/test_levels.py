"""Test levels.py: levels as text, packed and downloaded; the levels of a run; the generator by
replay."""

import os
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from small_runs import assert_refused

import levels as boxoban
from levels import (
    BOX,
    TARGET,
    board_text,
    generate,
    load_level_sets,
    load_levels,
    observations,
    parse_text,
    read_file,
    select_levels,
)
from sokoban import SokobanEnv, replay

# Boxoban's own levels, where a folder above the project holds them
FOLDERS = [folder / 'shared' / 'levels' for folder in Path(__file__).resolve().parents]
BOXOBAN = next(filter(Path.is_dir, FOLDERS), None)


def text(*rows):
    """Return a board of ten rows: one of wall, the given rows, and walls below them."""
    return '\n'.join(['#' * 10, *rows] + ['#' * 10] * (9 - len(rows)))


def numbered(boards):
    """Return boards in the form of a Boxoban file."""
    return ''.join(f'; {i}\n{board}\n\n' for i, board in enumerate(boards))


BOARD = text('#@$.  #  #', '# $* $.  #', '# .      #')
EASY = text('#$.     @#')

# ---- text and packed levels ----


def test_text_is_packed_and_unpacked():
    """The first bytes are the rows of walls; others number the 64 cells of the interior by row."""
    boards = [BOARD, text('#+$      #')]
    levels = parse_text(numbered(boards), 'x')
    walls, targets, boxes = [4, 0, 0, *[255] * 5], [2, 10, 13, 17], [1, 9, 10, 12]
    assert levels[0].tolist() == [*walls, *targets, *boxes, 0] and levels.dtype == np.uint8
    assert [board_text(board) for board in observations(levels)] == boards
    env = SokobanEnv(levels, 2, order='sequence')
    assert np.array_equal(observations(levels), env.observe())


@pytest.mark.parametrize('old, new, message', [
    ('#@$.', '# $.', 'level 1 does not have exactly one agent'),
    ('#@$.', '#@é.', 'level 1 has a character that is none of'),
    ('#$.     @#', '#$$$$$..@#', 'level 0 does not have 1 to 4 boxes'),
    ('#@$.', '#@ .', 'level 1 does not have as many targets as boxes'),
    ('#@$.', '#@$. ', 'level 1 is not ten rows of ten characters'),
    ('#@$.', ' @$.', 'level 1 is not walled in'),
    ('#$.     @#', '#*      @#', 'level 0 is solved already'),
    ('; 0\n', '', 'level 0 does not start with'),
])  # fmt: skip
def test_malformed_text_is_refused_by_file_and_level(old, new, message):
    boards = numbered([EASY, BOARD])
    assert_refused(f'^a.txt: {message}', parse_text, boards.replace(old, new, 1), 'a.txt')


@pytest.mark.parametrize('end', [' ', ' \t', '\r'])
def test_blanks_at_the_ends_of_lines_mean_nothing(end, tmp_path):
    """Editors leave them, and files from Windows have a carriage return there."""
    boards = numbered([EASY, BOARD])
    (tmp_path / 'a.txt').write_text(boards.replace('\n', f'{end}\n'), newline='')
    assert np.array_equal(read_file(f'{tmp_path}/a.txt'), parse_text(boards, 'x'))


def test_packed_levels_are_read_or_refused_by_file_and_level(tmp_path, monkeypatch):
    monkeypatch.setattr(boxoban, 'PART', 2)  # a level keeps its number in a file of several parts
    path = f'{tmp_path}/p.npy'
    levels = generate(5, 4, 3)[0]
    np.save(path, levels)
    assert np.array_equal(read_file(path), levels)
    broken = levels.copy()
    broken[3, 16] = levels[3, 13]  # the agent stands on a box
    for array, message in (
        (broken, 'level 3 has a character that is none of'),
        (levels[:, :9], r'expected uint8 of shape \(N, 17\)'),
        (observations(levels), r'expected uint8 of shape \(N, 17\), found .* \(5, 10, 10, 2\)'),
    ):
        np.save(path, array)
        assert_refused(f'^{path}: {message}', read_file, path)


@pytest.mark.skipif(BOXOBAN is None, reason='there are no levels of Boxoban here')
def test_the_real_levels_are_read():
    levels, line = load_levels(str(BOXOBAN), 'unfiltered-test')
    assert len(np.unique(levels, axis=0)) == 1000
    assert line == f'1,000 levels of unfiltered-test from 1 file in {BOXOBAN}'
    assert len(load_levels(str(BOXOBAN), 'unfiltered-valid')[0]) == 100_000


def test_an_observation_with_a_further_channel_is_drawn():
    """As of an edit that gives an agent the former frame, too."""
    (board,) = observations(parse_text(numbered([BOARD]), 'x'))
    assert board_text(np.concatenate([board, board[..., :1]], -1)) == BOARD


# ---- splits ----


def test_a_split_is_found_in_each_of_its_forms(tmp_path):
    """Each file holds one level. Later forms have precedence; other splits are left out."""
    levels = generate(5, 3, 1)[0]
    (tmp_path / 'unfiltered' / 'test').mkdir(parents=True)
    (tmp_path / 'unfiltered_tests.txt').touch()
    (tmp_path / 'unfiltered_test_a.txt').touch()
    boards = [board_text(board) for board in observations(levels)]
    for i, (name, found) in enumerate((
        ('unfiltered/test/000.txt', [0]),
        ('unfiltered/test/001.txt', [0, 1]),
        ('unfiltered-test.txt', [2]),
        ('unfiltered_test_012.txt', [2, 3]),
        ('unfiltered-test.pack17.npy', [4]),
    )):  # fmt: skip
        if name.endswith('.npy'):
            np.save(tmp_path / name, levels[[i]])
        else:
            (tmp_path / name).write_text(numbered([boards[i]]))
        assert np.array_equal(load_levels(str(tmp_path), 'unfiltered-test')[0], levels[found])


@pytest.fixture
def hub(monkeypatch):
    """Let the Hub have the arrays in this dict, by file; return it and the list of downloads."""
    arrays, calls = {}, []

    def hf_hub_download(repo_id, filename, local_dir):
        calls.append((repo_id, filename))
        np.save(f'{local_dir}/{filename}', arrays[filename])

    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', hf_hub_download)
    return arrays, calls


def test_only_a_missing_split_is_downloaded(tmp_path, hub):
    """The second call finds the download; 'hard' is in a file of the user."""
    arrays, calls = hub
    levels = generate(6, 4, 9)[0]
    np.save(tmp_path / 'hard.pack17.npy', levels[:2])
    arrays['medium-valid.npy'] = observations(levels)
    for split, n in (('medium-valid', 6), ('medium-valid', 6), ('hard', 2)):
        assert np.array_equal(load_levels(str(tmp_path), split, download=True)[0], levels[:n])
    assert calls == [('InstaDeepAI/boxoban-levels', 'medium-valid.npy')]


def test_a_second_process_waits_for_a_download(tmp_path, hub, monkeypatch):
    arrays, calls = hub
    arrays['hard.npy'] = observations(generate(4, 1, 9)[0])

    def read_slowly(path):
        time.sleep(0.2)
        return np.load(path)

    monkeypatch.setattr(boxoban, 'read_array', read_slowly)
    with ThreadPoolExecutor() as pool:
        loading = [pool.submit(load_levels, str(tmp_path), 'hard', True) for _ in range(2)]
        assert [len(future.result()[0]) for future in loading] == [4, 4]  # levels
    assert len(calls) == 1


def test_a_download_is_written_as_packed_levels(tmp_path, hub, monkeypatch):
    """The Hub's arrays have the walls in channel 0. A board that is no level is named."""
    monkeypatch.setattr(boxoban, 'PART', 2)
    levels = generate(5, 4, 3)[0]
    boards = observations(levels)[..., ::-1].copy()
    hub[0]['hard.npy'] = boards
    load_levels(str(tmp_path), 'hard', download=True)
    assert [x for x in os.listdir(tmp_path) if x[0] != '.'] == ['hard.pack17.npy']
    assert np.array_equal(np.load(tmp_path / 'hard.pack17.npy'), levels)
    boards[3, 0, 0, 0] = 0
    hub[0]['medium-train.npy'] = boards
    message = r'medium-train\.npy: level 3 is not walled in'
    assert_refused(message, load_levels, str(tmp_path), 'medium-train', download=True)


def test_missing_levels_are_refused_with_the_command_that_downloads_them(tmp_path):
    missing = (
        f'^{tmp_path}/a b: no hard.pack17.npy, hard.txt or hard_000.txt: `python levels.py .*--down'
    )
    assert_refused(missing, load_levels, f'{tmp_path}/a b', 'hard')
    assert_refused("^'none.npy': no such file", load_levels, str(tmp_path), 'none.npy')


# ---- the levels of a run ----


def test_a_run_has_all_training_and_the_first_evaluation_levels(tmp_path, monkeypatch, capsys):
    """A warning names levels that are there twice, in a file or in both sets. The same boxes in
    another order, or in a text file, are the same level."""
    monkeypatch.chdir(tmp_path)
    levels = generate(6, 2, 3)[0]
    shuffled = levels[[4, 2, 4]]
    shuffled[:, 12:16] = shuffled[:, [13, 12, 12, 13]]
    np.save('a.npy', np.concatenate([shuffled, generate(4, 2, 9)[0]]))
    Path('b.txt').write_text(numbered(map(board_text, observations(levels))))
    settings = {'split': 'a.npy', 'eval_split': 'b.txt', 'levels_dir': '', 'download': False}
    training, evaluation = load_level_sets({**settings, 'n_levels': 3, 'eval_games': 5})
    assert len(training[0]) == 7 and training[1] == '7 levels of a.npy'
    assert np.array_equal(evaluation[0], levels[:5])
    assert evaluation[1] == 'the first 5 of 6 levels of b.txt'
    assert capsys.readouterr().out == (
        'warning: 1 of 7 levels of a.npy repeat an earlier one: numbers 2\n'
        "warning: 2 of 5 evaluation levels (eval_split = 'b.txt') are among the training levels "
        "(split = 'a.npy'): numbers 2, 4\n"
    )


# ---- the generator ----


@pytest.mark.parametrize('boxes', [1, 4])
def test_generated_levels_are_solved_by_their_solutions(boxes):
    """The last action of a solution solves its level, and none before it does. No box and no agent
    starts on a target."""
    levels, solutions = generate(400, boxes, seed=11)
    lengths = [len(actions) for actions in solutions]
    assert 3 * boxes <= min(lengths) and max(lengths) <= 120
    table = np.array([np.pad(actions, (0, 120 - len(actions))) for actions in solutions])
    boards = replay(levels, table)  # (400, 121, 10, 10, 2)
    unsolved = ((boards[..., 0] == BOX) & (boards[..., 1] != TARGET)).any((2, 3))
    assert unsolved.argmin(1).tolist() == lengths
    assert ((boards[:, 0] == BOX).sum((1, 2, 3)) == boxes).all()
    assert not (boards[:, 0] > 0).all(-1).any()


def test_the_seed_determines_the_levels():
    """The hash is that of the levels on which the shipped agent was evaluated."""
    assert np.array_equal(generate(40, 1, 5, 6)[0], generate(60, 1, 5, 6)[0][:40])
    assert zlib.crc32(generate(200, 2, 7, 40, evaluation=True)[0]) == 657602913


def test_no_generated_level_is_in_both_sets_whatever_the_seeds_are():
    """Levels of one box and at most 6 moves are so few that seeds share some."""
    settings = {'split': 'generated', 'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 6}
    settings |= {'n_levels': 1500, 'eval_games': 300}
    training = [set(map(bytes, select_levels({**settings, 'seed': seed})[0])) for seed in (1, 3)]
    evaluation, line = select_levels({**settings, 'seed': 3}, evaluation=True)
    assert training[0] & training[1]
    assert len(evaluation) == 300 and not (training[0] | training[1]) & set(map(bytes, evaluation))
    assert line == '300 generated levels, boxes: 1, moves: at most 6, seed: 3'


def test_the_script_prints_levels_that_it_can_read_again(monkeypatch, capsys):
    argv = ['levels.py', '--split=generated', '--n_boxes=2', '--n_levels=5', '--show=3']
    monkeypatch.setattr(sys, 'argv', argv)
    boxoban.main()
    levels = capsys.readouterr().out.partition('\n')[2]
    assert np.array_equal(parse_text(levels, 'x'), generate(3, 2, 1337)[0])
