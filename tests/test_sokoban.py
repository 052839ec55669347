"""sokoban.py: levels (text, packed, downloaded, malformed), the generator by replay, the environment by hand and against Jumanji's."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import forks
import numpy as np
import pytest
import torch

import sokoban
from configurator import configure
from sokoban import (
    BOX,
    CHARS,
    DELTA,
    INTERIOR,
    TARGET,
    TIME_LIMIT,
    WALL,
    JumanjiEnv,
    LevelError,
    SokobanEnv,
    board_image,
    board_text,
    check_packed,
    draw,
    generate,
    load_levels,
    observations,
    parse_text,
    save_gif,
    unpack,
)

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / 'shared' / 'levels'
UP, RIGHT, DOWN, LEFT = range(4)
shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason='the shared folder of Boxoban levels is not there'
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def text(*rows):
    """A board of ten rows: the given ones (of ten characters) after one row of wall, the rest wall."""
    rows = ['#' * 10, *rows]
    return '\n'.join(rows + ['#' * 10] * (10 - len(rows)))


def env_of(*boards, N=1):
    return SokobanEnv(
        parse_text(''.join(f'; {i}\n{board}\n\n' for i, board in enumerate(boards)), 'test'),
        N,
        order='sequence',
    )


def masks(levels):
    grid, agent = unpack(levels)
    return *split(torch.from_numpy(grid)), torch.from_numpy(agent)


def split(grid):
    """Walls, targets and boxes as masks."""
    return (grid & WALL) > 0, (grid & TARGET) > 0, (grid & BOX) > 0


BOARD = text('#@$.  #  #', '# $* $.  #', '# .      #')


# ----------------------------------------------------------------------------- levels


def test_text_packed_text():
    boards = [
        BOARD,
        text('#@$.     #'),
        text('#+$      #'),
        text('#*@$. $. #', '#        #', '#$       #', '#.       #'),
    ]
    levels = parse_text(''.join(f'; {i}\n{board}\n\n' for i, board in enumerate(boards)), 'x')
    assert levels.shape == (4, 17) and levels.dtype == np.uint8
    assert [board_text(level) for level in levels] == boards
    check_packed(levels, 'x')
    assert [int(n) for n in masks(levels)[2].sum(1)] == [4, 1, 1, 4]


@pytest.mark.parametrize('old, new, what', [
    ('#@$.', '# $.', 'level 1 has not exactly one agent'),
    ('#@$.', '#@$@', 'level 1 has not exactly one agent'),
    ('#@$.', '#@$+', 'level 1 has not exactly one agent'),
    ('#@$.', '#@x.', 'level 1 has a character that is none of'),
    ('#@$.', '#@é.', 'level 1 has a character that is none of'),
    ('#@$.', '#@$ ', 'level 1 has not as many targets as boxes'),
    ('#@$.', '#@$$', 'level 1 has not 1 to 4 boxes'),
    ('#@$.', '#@$.\n', 'level 1 is not ten rows of ten characters'),
    ('#@$.', '#@$. ', 'level 1 is not ten rows of ten characters'),
    ('#@$.', ' @$.', 'level 1 is not walled in'),
    ('##########\n\n', '#### #####\n\n', 'level 1 is not walled in'),
    ('; 1\n', '; 1\n##########\n', 'level 1 is not ten rows of ten characters'),
    ('; 1\n', '', 'level 0 is not ten rows'),
    ('; 0\n', '', 'level 0 does not start with'),
])  # fmt: skip
def test_malformed_text(old, new, what):
    good = f'; 0\n{text("#$.     @#")}\n\n; 1\n{BOARD}\n\n'
    assert len(parse_text(good, 'a.txt')) == 2
    bad = (
        good.replace(old, new)
        if old.startswith(';')
        else '; 1'.join([good.split('; 1')[0], good.split('; 1')[1].replace(old, new)])
    )
    assert bad != good
    with pytest.raises(LevelError, match=f'^a.txt: {what}'):
        parse_text(bad, 'a.txt')


def test_no_boxes_and_five():
    for row in ('#@       #', '#@$$$$$..#'):
        with pytest.raises(LevelError, match='level 0 has not 1 to 4 boxes'):
            parse_text(f'; 0\n{text(row, "#...     #" if "$" in row else "#        #")}', 'x')


@pytest.mark.parametrize('cell, value, what', [
    (16, 64, 'a cell beyond 63'), (8, 255, 'a cell beyond 63'), (16, 'wall', 'in a wall'), (9, 'wall', 'in a wall'),
    (13, 'wall', 'in a wall'), (16, 'box', 'its agent on a box'),
    (12, 'box 2', 'not as many targets'), (8, 'target 2', 'not as many targets'),
])  # fmt: skip
def test_malformed_packed(cell, value, what):
    levels = generate(5, 4, 3)[0]
    check_packed(levels, 'p')
    bad = levels.copy()
    places = {
        'wall': int(np.unpackbits(bad[3, :8]).argmax()),
        'box': bad[3, 12],
        'box 2': bad[3, 13],
        'target 2': bad[3, 9],
    }
    bad[3, cell] = places.get(value, value)
    with pytest.raises(LevelError, match=f'^p: level 3 has .*{what}'):
        check_packed(bad, 'p')
    for other in (levels.astype(np.int64), levels[:, :16], levels[0], levels[:0], levels[None]):
        with pytest.raises(LevelError, match=r'^p: expected uint8 of shape \(N, 17\)'):
            check_packed(other, 'p')


def test_a_folder_of_levels(tmp_path):
    def found(split):
        levels, line = load_levels(str(tmp_path), split)
        return len(levels), line

    with pytest.raises(
        LevelError, match='nowhere: no such folder: `python sokoban.py .*--download=True'
    ):
        load_levels(str(tmp_path / 'nowhere'), 'unfiltered-test')
    with pytest.raises(
        LevelError,
        match='neither unfiltered-test.pack17.npy nor .*: `python sokoban.py .*--download=True',
    ):
        found('unfiltered-test')
    for split in ('', '-', '../unfiltered-test', 'none.txt/'):
        with pytest.raises(LevelError, match='split = .*expected a file that exists'):
            found(split)
    levels, _ = generate(30, 3, 1)

    def write(name, few):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(''.join(f'; {i}\n{board_text(level)}\n\n' for i, level in enumerate(few)))

    write('unfiltered/test/000.txt', levels[:3])
    write('unfiltered/test/001.txt', levels[3:5])
    assert found('unfiltered-test') == (
        5,
        f'5 levels of unfiltered-test from 2 files in {tmp_path}',
    )
    write('unfiltered_test_000.txt', levels[:7])
    assert found('unfiltered-test') == (7, f'7 levels of unfiltered-test from 1 file in {tmp_path}')
    write('unfiltered-test-001.txt', levels[7:9])
    assert sorted(map(bytes, load_levels(str(tmp_path), 'unfiltered-test')[0])) == sorted(
        map(bytes, levels[:9])
    )
    np.save(tmp_path / 'unfiltered-test.pack17.npy', levels)
    assert np.array_equal(load_levels(str(tmp_path), 'unfiltered-test')[0], levels)
    write('hard.txt', levels[:1])
    assert found('hard')[0] == 1
    crlf = (tmp_path / 'hard.txt').read_text().replace('\n', '\r\n')
    (tmp_path / 'hard.txt').write_bytes(crlf.encode())
    assert np.array_equal(load_levels(str(tmp_path), 'hard')[0], levels[:1])
    for name, n in (
        ('hard.txt', 1),
        ('unfiltered_test_000.txt', 7),
        ('unfiltered-test.pack17.npy', 30),
    ):  # a file by its name
        few, line = load_levels('', str(tmp_path / name))
        assert np.array_equal(few, levels[:n]) and line == f'{n} levels of {tmp_path / name}'


def test_damaged_files_are_one_line_that_names_the_file(tmp_path):
    good = tmp_path / 'good.npy'
    np.save(good, generate(50, 4, 3)[0])
    raw = good.read_bytes()
    np.savez(tmp_path / 'z.npz', a=np.zeros(3))
    np.save(tmp_path / 'objects.npy', np.array([{}, 1], dtype=object), allow_pickle=True)
    header = raw[:128].replace(b'(50, 17)', b'(10**9,)').replace(b'50, 17', b'(((((')
    damaged = [b'', raw[:5], raw[:60], raw[:-1], raw[:128], b'x' + raw[1:], header + raw[128:], raw.replace(b"'|u1'", b"'|O8'"),
               raw.replace(b'(50, 17)', b'(9999999999, 17)'), b'; 0\n', pickle.dumps([1]), (tmp_path / 'z.npz').read_bytes(),
               (tmp_path / 'objects.npy').read_bytes()]  # fmt: skip
    for i, data in enumerate(damaged):
        (tmp_path / 'hard.pack17.npy').write_bytes(data)
        with pytest.raises(
            LevelError, match=r'hard\.pack17\.npy: (cannot be read|expected uint8)'
        ) as error:
            load_levels(str(tmp_path), 'hard')
            pytest.fail(f'damage {i} went unseen')
        assert '\n' not in str(error.value)
    for data, what in ((b'', 'no level in it'), (b'\xff\xfe\x00;', 'level 0 does not start'),
                       (f'; 0\n{BOARD}'.encode('utf-16'), 'level 0 does not start'),
                       (f'; 0\n{BOARD}\n\n; 1\n{BOARD[:50]}'.encode(), 'level 1 is not ten rows')):  # fmt: skip
        (tmp_path / 'medium-valid.txt').write_bytes(data)
        with pytest.raises(LevelError, match=f'medium-valid.txt: {what}'):
            load_levels(str(tmp_path), 'medium-valid')
    (tmp_path / 'unfiltered-test.txt').mkdir()
    with pytest.raises(LevelError, match='unfiltered-test.txt: cannot be read'):
        load_levels(str(tmp_path), 'unfiltered-test')


def test_only_the_name_generates_levels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected, line = (
        generate(234, 2, 5)[0],
        '234 generated levels, boxes: 2, moves: at most 120, seed: 5',
    )
    levels, said = load_levels('', 'generated', n_levels=234, n_boxes=2, seed=5)
    assert np.array_equal(levels, expected) and said == line
    with pytest.raises(
        LevelError,
        match='data/boxoban: no such folder: `python sokoban.py --split=hard --download=True` fetches hard',
    ):
        load_levels('', 'hard', n_levels=234, n_boxes=2, seed=5)
    os.makedirs('data/boxoban')
    np.save('data/boxoban/hard.pack17.npy', expected[:5])
    assert load_levels('', 'hard')[1] == '5 levels of hard from 1 file in data/boxoban'


@pytest.mark.parametrize('swapped', [False, True])
def test_download(tmp_path, monkeypatch, swapped):
    hub = pytest.importorskip('huggingface_hub')
    levels, folder, asked = generate(60, 4, 9)[0], str(tmp_path / 'levels'), []
    grids = observations(levels)[..., ::-1]  # the Hub's order: fixed, variable
    content = [np.ascontiguousarray(grids[..., ::-1] if swapped else grids)]

    def fake(repo_id, filename):
        asked.append((repo_id, filename))
        np.save(tmp_path / filename, content[0])
        return str(tmp_path / filename)

    def offline(repo_id, filename):
        raise RuntimeError('no network\nat all')

    monkeypatch.setattr(hub, 'hf_hub_download', offline)
    with pytest.raises(
        LevelError,
        match='^cannot download unfiltered-valid.npy of InstaDeepAI/boxoban-levels: no network$',
    ):
        load_levels(folder, 'unfiltered-valid', download=True)
    monkeypatch.setattr(hub, 'hf_hub_download', fake)
    found, line = load_levels(folder, 'unfiltered-valid', download=True)
    assert (
        line
        == f'60 levels of unfiltered-valid downloaded from InstaDeepAI/boxoban-levels into {folder}'
    )
    assert np.array_equal(found, levels)
    again, line = load_levels(folder, 'unfiltered-valid', download=True)
    assert np.array_equal(again, levels) and 'from 1 file in' in line
    assert asked == [('InstaDeepAI/boxoban-levels', 'unfiltered-valid.npy')] and os.listdir(
        folder
    ) == ['unfiltered-valid.pack17.npy']

    def refused(what, split='hard'):
        with pytest.raises(LevelError, match=what):
            load_levels(folder, split, download=True)

    def change(place, value):
        content[0] = np.ascontiguousarray(grids.astype(np.int16))
        content[0][place] = value
        return content[0]

    for content[0] in (grids[:0], grids.astype(np.float32), grids[:, :9]):
        refused(r'hard.npy: expected integers of shape \(N, 10, 10, 2\)')
    for content[0], what in ((change((7, 0, 5, 0), 0), 'is not walled in'), (change((7, 4, 4, 0), 7), 'has a character'),
                             (change((7, 4, 4, 1), -2), 'has a character'), (change((7, 0, 0, 1), 4), 'has a character'),
                             (change((7, ..., 1), 0), 'has not exactly one agent')):  # fmt: skip
        refused(f'hard.npy: level 7 {what}')
    content[0] = grids
    monkeypatch.setattr(
        os, 'replace', lambda *_: (_ for _ in ()).throw(OSError(28, 'no space left'))
    )
    refused('cannot be written .no space left')
    assert os.listdir(folder) == ['unfiltered-valid.pack17.npy']


@shared
def test_the_real_levels():
    original = (SHARED / 'unfiltered_test_000.txt').read_text()
    levels, line = load_levels(str(SHARED), 'unfiltered-test')
    assert (
        ''.join(f'; {i}\n{board_text(level)}\n\n' for i, level in enumerate(levels)).split()
        == original.split()
    )
    assert line.startswith('1,000 levels of unfiltered-test from 1 file in ')
    start = time.process_time()
    train, line = load_levels(str(SHARED), 'unfiltered-train')
    assert time.process_time() - start < 2
    assert len(train) == 900_000 and line.startswith(
        '900,000 levels of unfiltered-train from 1 file in '
    )
    assert not {bytes(level) for level in levels} & {bytes(level) for level in train}


# ----------------------------------------------------------------------------- the generator


@pytest.mark.parametrize('boxes', [1, 2, 3, 4])
def test_generated_levels_are_solved_by_their_solutions(boxes):
    """Replayed forwards: not solved before the solution's last action, and solved by it, within the time limit."""
    levels, solutions = generate(400, boxes, seed=11)
    check_packed(levels, 'generated')
    wall, target, box, agent = masks(levels)
    assert (target.sum(1) == boxes).all() and (box.sum(1) == boxes).all()
    assert not (box & target).any() and not target.gather(1, agent[:, None]).any()
    assert all(3 * boxes <= len(actions) <= TIME_LIMIT for actions in solutions)
    env, solved_at = SokobanEnv(levels, 400, order='sequence'), torch.full((400,), -1)
    for t in range(max(map(len, solutions))):
        action = torch.tensor([int(actions[t]) if t < len(actions) else 0 for actions in solutions])
        solved = env.step(action)[2]
        solved_at = torch.where(solved & (solved_at < 0), t + 1, solved_at)
    assert solved_at.tolist() == [len(actions) for actions in solutions]


def test_generated_levels_leave_others_out():
    levels, solutions = generate(60, 1, 5, 6)
    others, theirs = generate(40, 1, 5, 6, without=levels[5:25])
    assert np.array_equal(others, np.concatenate([levels[:5], levels[25:60]]))
    assert all(
        np.array_equal(a, b) for a, b in zip(theirs, solutions[:5] + solutions[25:], strict=True)
    )


def test_generated_levels_are_connected_and_varied():
    levels, solutions = generate(3000, 4, seed=2)
    wall, target, box, agent = masks(levels)
    reached = torch.zeros_like(wall).scatter(1, agent[:, None], True)
    for _ in range(64):
        reached = torch.stack([reached, *(reached.roll(d, 1) for d in DELTA)]).any(0) & ~wall
    assert torch.equal(reached, ~wall)
    assert (
        len(np.unique(levels, axis=0)) > 0.99 * 3000
        and len(np.unique(levels[:, :8], axis=0)) > 0.99 * 3000
    )
    assert 24 < (~wall).sum(1).float().mean() < 36  # Boxoban's have 31.7 cells of floor
    assert np.median([len(actions) for actions in solutions]) > 20
    boxes, corners = box.sum(0).view(10, 10)[1:-1, 1:-1], torch.tensor([0, 7])
    assert (target.sum(0)[INTERIOR] > 30).all() and (boxes > 15).sum() == 60
    assert not boxes[corners][:, corners].any()  # a box in a corner is stuck


def test_generate_is_seeded_and_fast():
    start = time.process_time()
    levels, solutions = generate(2500, 4, seed=1)
    assert 2500 / (time.process_time() - start) > 1000
    more, _ = generate(2600, 4, seed=1)
    assert np.array_equal(more[:2500], levels) and not np.array_equal(
        generate(10, 4, seed=2)[0], levels[:10]
    )
    assert max(len(actions) for actions in generate(200, 1, seed=1, max_moves=8)[1]) <= 8
    with pytest.raises(LevelError, match='max_moves = 5'):
        generate(1, 1, max_moves=5)
    for bad in ({'boxes': 0}, {'boxes': 5}, {'n': 0}, {'seed': -1}):
        with pytest.raises(LevelError, match='n_boxes = '):
            generate(**{'n': 1, 'boxes': 4, 'seed': 0, **bad})


# ----------------------------------------------------------------------------- the environment


def play(env, actions):
    """One board's rewards and texts of the second row, for actions one after the other; no end among them."""
    rewards, rows = [], []
    for action in actions:
        reward, done, solved = env.step(torch.tensor([action]))
        assert reward.dtype == torch.float32 and not done.any() and not solved.any()
        rewards.append(round(reward.item(), 4))
        rows.append(board_text(env.observe()[0]).split('\n')[1])
    return rewards, rows


def test_pushes_on_and_off_targets():
    rewards, rows = play(env_of(text('#@$. $.  #')), [RIGHT, RIGHT, RIGHT, LEFT])
    assert rewards == [0.9, -1.1, -0.1, -0.1]
    assert rows == [
        '# @* $.  #',
        '#  +$$.  #',
        '#  +$$.  #',
        '# @.$$.  #',
    ]  # the third pushes against two boxes


def test_blocked_moves_cost_a_step():
    env = env_of(text('#@$#    .#'))
    rewards, rows = play(env, [RIGHT, LEFT, UP, DOWN])  # a box against a wall, then three walls
    assert rewards == [-0.1] * 4 and rows == ['#@$#    .#'] * 4 and env.steps.tolist() == [4]


def test_boxes_are_pushed_up_and_down():
    env = env_of(text('#  .     #', '#  $     #', '#  @     #', '#  $    .#', '#        #'))
    assert play(env, [DOWN, UP, UP])[0] == [-0.1, -0.1, 0.9]
    assert board_text(env.observe()[0]) == text(
        '#  *     #', '#  @     #', '#        #', '#       .#', '#  $     #'
    )
    reward, done, solved = env.move(torch.tensor([UP]))  # a step without the reset
    assert reward.item() == pytest.approx(-0.1) and env.steps.tolist() == [4]


def test_solved_is_ten_more_and_the_next_level_starts():
    first, second = text('#@$.     #'), text('#.$  @   #')
    env = env_of(first, second)
    reward, done, solved = env.step(torch.tensor([RIGHT]))
    assert reward.item() == pytest.approx(10.9) and done.tolist() == solved.tolist() == [True]
    assert (
        board_text(env.observe()[0]) == second
        and env.steps.tolist() == [0]
        and env.level.tolist() == [1]
    )
    for action in (LEFT, LEFT, LEFT):
        reward, done, solved = env.step(torch.tensor([action]))
    assert (
        solved.tolist() == [True] and board_text(env.observe()[0]) == first
    )  # after the last level the first one again


def test_step_120_ends_an_episode():
    env = env_of(text('#@$.     #'), text('#.$@     #'))
    for t in range(2 * TIME_LIMIT):
        last = t == 2 * TIME_LIMIT - 1  # the second episode is solved by its last step
        reward, done, solved = env.step(torch.tensor([LEFT if last or t < TIME_LIMIT else UP]))
        assert done.item() == ((t + 1) % TIME_LIMIT == 0) and solved.item() == last
        assert reward.item() == pytest.approx(10.9 if last else -0.1)
        assert env.steps.item() == (t + 1) % TIME_LIMIT


def test_boards_do_not_touch_each_other():
    levels = generate(50, 3, 4)[0]
    actions = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (60, 50)))
    together = SokobanEnv(levels, 50, order='sequence')
    alone = [SokobanEnv(levels[i : i + 1], 1) for i in range(0, 50, 7)]
    for action in actions:
        together.step(action, torch.arange(50))
        for env, i in zip(alone, range(0, 50, 7), strict=True):
            env.step(action[i : i + 1])
            assert torch.equal(env.observe()[0], together.observe()[i])


def random_steps(env, steps, seed=0):
    rng = torch.Generator().manual_seed(seed)
    trace = []
    for _ in range(steps):
        out = env.step(torch.randint(0, 4, (env.N,), generator=rng))
        trace.append(torch.cat([*(x.float() for x in out), env.observe().flatten().float()]))
    return torch.stack(trace)


def test_order_of_levels():
    levels = generate(40, 1, 4)[0]
    env = SokobanEnv(levels, 7, order='sequence')
    for episode in range(8):
        assert env.level.tolist() == [(i + 7 * episode) % 40 for i in range(7)]
        env.reset(torch.ones(7, dtype=torch.bool))
    which = torch.arange(7) % 2 == 0
    before = env.level.clone()
    env.reset(which)
    assert torch.equal(env.level[~which], before[~which]) and torch.equal(
        env.level[which], (before[which] + 7) % 40
    )
    with pytest.raises(ValueError, match='order'):
        SokobanEnv(levels, 7, order='shuffled')


def test_two_ranks_have_the_boards_of_one():
    levels = generate(500, 1, 4)[0]
    whole, parts = (
        SokobanEnv(levels, 8, seed=3),
        [SokobanEnv(levels, 4, seed=3, first=first) for first in (0, 4)],
    )
    ends = 0
    for action in torch.from_numpy(np.random.default_rng(0).integers(0, 4, (300, 8))):
        reward, done, _ = whole.step(action)
        others = [env.step(action[i : i + 4]) for i, env in zip((0, 4), parts, strict=True)]
        assert torch.equal(torch.cat([o[0] for o in others]), reward)
        assert torch.equal(torch.cat([env.observe() for env in parts]), whole.observe())
        ends += int(done.sum())
    assert ends > 16 and whole.level.unique().numel() > 4
    other = SokobanEnv(levels, 8, seed=4)
    assert not torch.equal(other.level, SokobanEnv(levels, 8, seed=3).level)


def test_draw_is_uniform_and_depends_on_everything():
    board, count = (
        torch.arange(400)[:, None].expand(400, 500).reshape(-1),
        torch.arange(500).repeat(400),
    )
    x = draw(7, 0, board, count)
    assert x.min() >= 0 and x.max() < 2**53 and x.unique().numel() == 200_000
    for n in (2, 10, 1000):
        expected = 200_000 / n
        chi2 = ((torch.bincount(x % n, minlength=n) - expected) ** 2 / expected).sum()
        assert abs(chi2 - (n - 1)) < 5 * (2 * (n - 1)) ** 0.5
    u = x.double().view(400, 500) / 2**53
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), (u, draw(8, 0, board, count).view(400, 500) / 2**53),
                 (u, draw(7, 1, board, count).view(400, 500) / 2**53)):  # fmt: skip
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.double().flatten()]))[0, 1]) < 0.012
    assert torch.equal(
        draw(7, 0, board[:5], torch.tensor(3)), draw(7, 0, board[:5], torch.full((5,), 3))
    )
    draw(2**64 - 1, 3, board, count), draw(-1, 0, board, count)


def test_state_round_trip_is_bit_equal():
    levels = generate(300, 2, 4)[0]
    env = SokobanEnv(levels, 16, seed=1)
    random_steps(env, 150)
    state = env.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    after = random_steps(env, 150, seed=5)
    assert all(torch.equal(state[name], kept[name]) for name in state)  # a copy, not a view
    other = SokobanEnv(levels, 16, seed=1)
    other.load_state_dict(state)
    assert torch.equal(random_steps(other, 150, seed=5), after)
    assert (
        all(
            torch.equal(tensor, env.state_dict()[name])
            for name, tensor in other.state_dict().items()
        )
        and 'level' in state
    )
    older = {k: v for k, v in state.items() if k != 'grid'} | dict(
        zip(('wall', 'target', 'box'), split(state['grid']), strict=True)
    )
    other.load_state_dict(older)  # a checkpoint of before `grid`
    assert torch.equal(random_steps(other, 150, seed=5), after)
    assert not torch.equal(random_steps(SokobanEnv(levels, 16, seed=1), 150, seed=5), after)


def test_a_step_waits_for_nothing_and_works_in_place():
    """On the meta device nothing has a value: a step that asks for one fails."""
    levels = generate(20, 4, 4)[0]
    env = SokobanEnv(levels, 6, device='meta')
    reward, done, solved = env.step(torch.zeros(6, dtype=torch.int64, device='meta'))
    assert reward.shape == done.shape == solved.shape == (6,) and env.observe().shape == (
        6,
        10,
        10,
        2,
    )
    with pytest.raises((RuntimeError, NotImplementedError)):
        done.any().item()
    env = SokobanEnv(levels, 6)
    before = [getattr(env, name).data_ptr() for name in env.STATE]
    random_steps(env, 130)
    assert before == [getattr(env, name).data_ptr() for name in env.STATE]


# ----------------------------------------------------------------------------- Jumanji


def near_solved(n, seed):
    """Levels, and the actions that solve them: generated ones, played forward to their last 1 to 10 actions for four fifths of them."""
    levels, solutions = generate(n, 4, seed)
    rng = np.random.default_rng(seed)
    left = np.where(np.arange(n) % 5 == 0, TIME_LIMIT, rng.integers(1, 11, n))
    env = SokobanEnv(levels, n, order='sequence')
    for t in range(TIME_LIMIT):
        action = [
            int(actions[t]) if t < len(actions) - k else -1
            for actions, k in zip(solutions, left, strict=True)
        ]
        stays = torch.tensor(action) < 0
        state = env.state_dict()
        env.step(torch.tensor(action).clamp(min=0))
        for name, tensor in env.state_dict().items():
            getattr(env, name).copy_(
                torch.where(stays.view(-1, *[1] * (tensor.dim() - 1)), state[name], tensor)
            )
    wall, target, box = (mask[:, INTERIOR].numpy() for mask in split(env.grid))
    agent = np.searchsorted(INTERIOR, env.agent.numpy())
    packed = sokoban.pack(wall, target, box, agent)
    return packed, [actions[-k:] for actions, k in zip(solutions, left, strict=True)]


def need_jumanji():
    pytest.importorskip(
        'jumanji', reason='jumanji is not installed: pip install -r requirements.txt'
    )


def test_parity_with_jumanji(request):
    """The same levels and actions in both: every reward, grid, end, step count and next level, over 20,000 steps (--long: 128,000)."""
    need_jumanji()
    N, steps, least, n = (
        (512, 250, 100, 2000) if request.config.getoption('--long') else (160, 130, 10, 300)
    )
    levels, solutions = near_solved(n, 5)
    index = {o.tobytes(): i for i, o in enumerate(observations(levels))}
    table = np.zeros((len(levels), TIME_LIMIT), np.int64)
    for row, actions in zip(table, solutions, strict=True):
        row[: len(actions)] = actions
    theirs = JumanjiEnv(levels, N, seed=1)
    level = np.array([index[o.tobytes()] for o in theirs.observe().numpy()])
    ours = SokobanEnv(levels, N)
    ours.reset(torch.ones(N, dtype=torch.bool), torch.from_numpy(level))
    rng, met = (
        np.random.default_rng(0),
        dict.fromkeys(('on', 'off', 'solved', 'late', 'wall', 'box', 'pushed'), 0),
    )
    follow = np.arange(N) % 4  # of four boards one plays at random, one solves, two do both
    for _ in range(steps):
        action = np.where(
            rng.random(N) < np.array([0, 1, 0.5, 0.9])[follow],
            table[level, ours.steps.numpy()],
            rng.integers(0, 4, N),
        )
        seen, action = ours.observe(), torch.from_numpy(action)
        step = torch.tensor(DELTA)[action]
        (wall, _, box), (wall_beyond, _, box_beyond) = (
            split(ours.grid[torch.arange(N), (ours.agent + k * step).clamp(0, 99)]) for k in (1, 2)
        )
        met['wall'] += int(wall.sum() + (box & wall_beyond).sum())
        met['box'] += int((box & box_beyond).sum())
        reward, done, solved = theirs.step(action)
        grids = theirs.observe()
        level = np.array(
            [
                index[o.tobytes()] if ended else at
                for o, ended, at in zip(grids.numpy(), done.tolist(), level, strict=True)
            ]
        )
        mine = ours.step(action, torch.from_numpy(level))
        for a, b in zip(mine, (reward, done, solved), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert torch.equal(ours.observe(), grids)
        assert ours.steps.tolist() == theirs.state_dict()['step_count'].tolist()
        met['solved'] += int(solved.sum())
        met['late'] += int((done & ~solved).sum())
        met['on'] += int(((reward > 0.5) & (reward < 2)).sum())
        met['off'] += int((reward < -0.5).sum())
        met['pushed'] += int((seen[..., 0] != grids[..., 0]).flatten(1).sum(1).eq(3).sum())
    assert all(count >= least for count in met.values()), met
    assert np.unique(level).size > N // 2  # resets draw from all levels


def test_jumanji_state_round_trip_is_bit_equal():
    need_jumanji()
    levels, _ = near_solved(100, 6)
    env = JumanjiEnv(levels, 16, seed=3)
    assert torch.equal(
        JumanjiEnv(levels, 8, seed=3, first=8).observe(), env.observe()[8:]
    )  # boards begin the same on however many ranks
    random_steps(env, 100)
    state = env.state_dict()
    assert all(type(x) is torch.Tensor for x in state.values())
    here, after = env.observe(), random_steps(env, 150, seed=5)
    other = JumanjiEnv(levels, 16, seed=4)
    assert not torch.equal(other.observe(), here)
    other.load_state_dict(state)
    assert torch.equal(other.observe(), here) and torch.equal(
        random_steps(other, 150, seed=5), after
    )
    with pytest.raises(LevelError, match='4 boxes'):
        JumanjiEnv(generate(5, 3, 0)[0], 2)


def test_jumanji_is_imported_only_where_it_is_used(monkeypatch):
    code = 'import sys, sokoban as s; s.SokobanEnv(s.generate(5)[0], 2); print({"jax", "jumanji", "PIL"} & set(sys.modules))'
    assert (
        subprocess.run(
            [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
        ).stdout
        == 'set()\n'
    )
    monkeypatch.setitem(sys.modules, 'jumanji', None)
    monkeypatch.setitem(sys.modules, 'jumanji.wrappers', None)
    with pytest.raises(
        LevelError, match="env = 'jumanji' needs jumanji and jax, see requirements.txt"
    ):
        JumanjiEnv(generate(5)[0], 2)


# ----------------------------------------------------------------------------- pictures, command line


def test_pictures(tmp_path):
    image = pytest.importorskip('PIL.Image')
    board = text('#@$.     #', '# *      #', '#$. $.   #')
    env = env_of(board)
    observation = env.observe()[0]
    assert board_text(observation) == board and board_text(observation.numpy()) == board
    picture = board_image(observation, 20)
    assert (
        picture.shape == (200, 200, 3) and picture.dtype == np.uint8 and picture.flags.c_contiguous
    )
    tiles = {
        char: picture[20 * y : 20 * y + 20, 20 * x : 20 * x + 20]
        for y, row in enumerate(board.split('\n'))
        for x, char in enumerate(row)
    }
    tiles['+'] = board_image(env_of(text('#+$      #')).observe()[0], 20)[20:40, 20:40]
    assert (
        len({tile.tobytes() for tile in tiles.values()})
        == len(tiles)
        == len(set(CHARS.tobytes())) - 1
        == 7
    )
    frames = [board_image(observation)]  # pictures and observations alike
    for action in (RIGHT, RIGHT, DOWN, LEFT):
        env.step(torch.tensor([action]))
        frames.append(env.observe()[0].numpy())
    path = tmp_path / 'a.gif'
    save_gif(frames, path, ms=100)
    with image.open(path) as gif:
        durations = []
        for k in range(gif.n_frames):
            gif.seek(k)
            durations.append(gif.info['duration'])
            assert gif.size == (240, 240)
        last = np.array(gif.convert('RGB')).astype(int)
    assert sum(durations) == 100 * 4 + 800 and abs(last - board_image(frames[-1])).mean() < 2
    with pytest.raises(OSError):
        save_gif(frames, tmp_path / 'no' / 'a.gif')
    assert os.listdir(tmp_path) == ['a.gif']


def run(*arguments):
    return forks.run(
        [sys.executable, 'sokoban.py', *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_command_line(tmp_path, monkeypatch, capsys):
    done = run(
        '--split=generated',
        '--n_levels=20',
        '--n_boxes=2',
        '--show=5',
        f'--picture={tmp_path / "p.png"}',
    )
    source, *blocks = done.stdout.split('\n\n')
    levels = generate(20, 2, 1337)[0]
    assert (done.returncode, done.stderr, source) == (
        0,
        '',
        '20 generated levels, boxes: 2, moves: at most 120, seed: 1337',
    )
    assert np.array_equal(parse_text('\n\n'.join(blocks), 'stdout'), levels[:5])
    image = pytest.importorskip('PIL.Image')
    with image.open(tmp_path / 'p.png') as png:
        assert png.size == (3 * 248, 2 * 248)
    done = run(f'--levels_dir={tmp_path / "x"}')
    assert (
        done.returncode == 2
        and done.stderr.startswith('error: ')
        and 'no such folder' in done.stderr
        and done.stderr.count('\n') == 1
    )
    settings = configure({'__file__': sokoban.__file__}, [])
    for argument, what in (('--n_boxes=7', 'n_boxes = 7'), ('--show=0', 'show = 0'), ('--boxes=3', "did you mean 'n_boxes'"),
                           ('--seed=-1', 'seed = -1'), (f'--picture={tmp_path / "x" / "p.png"}', 'cannot be written')):  # fmt: skip
        vars(sokoban).update(settings)
        monkeypatch.setattr(
            sys, 'argv', ['sokoban.py', '--split=generated', '--n_levels=5', argument]
        )
        with pytest.raises(SystemExit) as end:
            sokoban.main()
        message = capsys.readouterr().err
        assert (
            end.value.code == 2
            and message.startswith('error: ')
            and what in message
            and message.count('\n') == 1
        )
    vars(sokoban).update(settings)
