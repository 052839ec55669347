"""sokoban.py: levels (text, packed, downloaded, malformed), the generator by replay, the
environment by hand and against Jumanji's."""

import os
import sys
import types
from pathlib import Path

import forks
import numpy as np
import pytest
import torch

import sokoban
from sokoban import (
    BOX,
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


def text(*rows):
    """A board of ten rows: the given ones of ten characters after one of wall, the rest wall."""
    return '\n'.join(['#' * 10, *rows] + ['#' * 10] * (9 - len(rows)))


def numbered(boards):
    return ''.join(f'; {i}\n{board}\n\n' for i, board in enumerate(boards))


def env_of(*boards, N=1):
    return SokobanEnv(parse_text(numbered(boards), 'test'), N, order='sequence')


def split(grid):
    """Walls, targets and boxes as masks."""
    return (grid & WALL) > 0, (grid & TARGET) > 0, (grid & BOX) > 0


def masks(levels):
    grid, agent = unpack(levels)
    return *split(torch.from_numpy(grid)), torch.from_numpy(agent)


def refuses(message, function, *args, **more):
    with pytest.raises((LevelError, ValueError), match=message) as error:
        function(*args, **more)
    assert '\n' not in str(error.value)


BOARD = text('#@$.  #  #', '# $* $.  #', '# .      #')

# ----------------------------------------------------------------------------- levels


def test_text_packed_text():
    rows = ('#*@$. $. #', '#        #', '#$       #', '#.       #')
    boards = [BOARD, text('#@$.     #'), text('#+$      #'), text(*rows)]
    levels = parse_text(numbered(boards), 'x')
    assert levels.shape == (4, 17) and levels.dtype == np.uint8
    assert [board_text(level) for level in levels] == boards
    assert masks(check_packed(levels, 'x'))[2].sum(1).tolist() == [4, 1, 1, 4]


@pytest.mark.parametrize('old, new, what', [
    ('#@$.', '# $.', 'level 1 has not exactly one agent'),
    ('#@$.', '#@$+', 'level 1 has not exactly one agent'),
    ('#@$.', '#@x.', 'level 1 has a character that is none of'),
    ('#@$.', '#@é.', 'level 1 has a character that is none of'),
    ('#@$.', '#@$ ', 'level 1 has not as many targets as boxes'),
    ('#@$.', '#@$$', 'level 1 has not 1 to 4 boxes'),
    ('#@$.', '#@$.\n', 'level 1 is not ten rows of ten characters'),
    ('#@$.', '#@$. ', 'level 1 is not ten rows of ten characters'),
    ('#@$.', ' @$.', 'level 1 is not walled in'),
    ('; 1\n', '; 1\n##########\n', 'level 1 is not ten rows of ten characters'),
    ('; 1\n', '', 'level 0 is not ten rows'),
    ('; 0\n', '', 'level 0 does not start with'),
])  # fmt: skip
def test_malformed_text(old, new, what):
    good = numbered([text('#$.     @#'), BOARD])
    assert len(parse_text(good, 'a.txt')) == 2 and old in good
    refuses(f'^a.txt: {what}', parse_text, good.replace(old, new), 'a.txt')
    refuses('level 0 has not 1 to 4 boxes', parse_text, numbered([text('#@       #')]), 'x')


@pytest.mark.parametrize('cell, value', [
    (8, 255), (16, 'wall'), (9, 'wall'), (13, 'wall'), (16, 'box'), (12, 'box 2'), (8, 'target 2'),
])  # fmt: skip
def test_malformed_packed(cell, value):
    levels = generate(5, 4, 3)[0]
    bad, wall = levels.copy(), int(np.unpackbits(levels[3, :8]).argmax())
    places = {'wall': wall, 'box': bad[3, 12], 'box 2': bad[3, 13], 'target 2': bad[3, 9]}
    bad[3, cell] = places.get(value, value)
    refuses('^p: level 3 is none', check_packed, bad, 'p')
    refuses(r'^p: expected uint8 of shape \(N, 17\)', check_packed, levels[:0], 'p')


def test_a_folder_of_levels(tmp_path):
    """What is there later comes before what was there first: the tree, text files, the array."""
    fetches, levels = '`python sokoban.py .*--download=True', generate(30, 3, 1)[0]
    refuses(f'nowhere: no such folder: {fetches}', load_levels, f'{tmp_path}/nowhere', 'hard')
    refuses(f'no hard.pack17.npy, no .*: {fetches}', load_levels, str(tmp_path), 'hard')
    for name in ('', '-', '../unfiltered-test', 'none.txt/'):
        refuses('split = .*: no such file', load_levels, str(tmp_path), name)

    def found(name, few, files):
        got, line = load_levels(str(tmp_path), name)
        assert sorted(map(bytes, got)) == sorted(map(bytes, few))
        assert line == f'{len(few)} levels of {name} from {files} in {tmp_path}'

    def write(name, few):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(numbered(map(board_text, few)))

    write('unfiltered/test/000.txt', levels[:3])
    write('unfiltered/test/001.txt', levels[3:5])
    found('unfiltered-test', levels[:5], '2 files')
    write('unfiltered_test_000.txt', levels[:7])
    found('unfiltered-test', levels[:7], '1 file')
    write('unfiltered-test-001.txt', levels[7:9])
    found('unfiltered-test', levels[:9], '2 files')
    np.save(tmp_path / 'unfiltered-test.pack17.npy', levels)
    found('unfiltered-test', levels, '1 file')
    (tmp_path / 'hard.txt').write_text(numbered(map(board_text, levels[:1])), newline='\r\n')
    found('hard', levels[:1], '1 file')
    for name in ('hard.txt', 'unfiltered-test.pack17.npy'):  # a file by its name
        assert load_levels('', str(tmp_path / name))[1].endswith(f' levels of {tmp_path / name}')


def test_only_the_name_generates_levels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = 234, 2, 5, 120
    levels, said = load_levels('', 'generated', made=made)
    assert np.array_equal(levels, generate(234, 2, 5)[0])
    assert said == '234 generated levels, boxes: 2, moves: at most 120, seed: 5'
    message = (
        'data/boxoban: no such folder: `python sokoban.py --split=hard --download=True` fetches'
    )
    refuses(message, load_levels, '', 'hard', made=made)
    os.makedirs('data/boxoban')
    np.save('data/boxoban/hard.pack17.npy', levels[:5])
    assert load_levels('', 'hard')[1] == '5 levels of hard from 1 file in data/boxoban'


@pytest.mark.parametrize('swapped', [False, True])
def test_download(tmp_path, monkeypatch, swapped):
    hub = pytest.importorskip('huggingface_hub')
    levels, folder, asked, content = generate(60, 4, 9)[0], str(tmp_path / 'levels'), [], None
    grids = np.ascontiguousarray(observations(levels)[..., ::-1])  # the Hub's: fixed, variable

    def fake(repo_id, filename, revision):
        asked.append((repo_id, filename, revision))
        if content is None:
            raise RuntimeError('no network\nat all')
        np.save(tmp_path / filename, content)
        return str(tmp_path / filename)

    def repo_info(repo_id, revision, repo_type):
        assert (repo_id, revision, repo_type) == (sokoban.HUB, 'main', 'model')
        return types.SimpleNamespace(sha='c0ffee')

    monkeypatch.setattr(hub, 'repo_info', repo_info)
    monkeypatch.setattr(hub, 'hf_hub_download', fake)
    message = '^cannot download unfiltered-valid.npy of InstaDeepAI/boxoban-levels: .*no network:'
    refuses(message, load_levels, folder, 'unfiltered-valid', True)
    monkeypatch.delattr(hub, 'repo_info')  # all splits are of the first one's commit
    content = np.ascontiguousarray(grids[..., ::-1]) if swapped else grids
    found, line = load_levels(folder, 'unfiltered-valid', True)
    assert np.array_equal(found, levels)
    assert line.endswith(f'in {folder} downloaded from InstaDeepAI/boxoban-levels')
    again, line = load_levels(folder, 'unfiltered-valid', True)
    assert np.array_equal(again, levels) and line.endswith(f'from 1 file in {folder}')
    assert asked == [('InstaDeepAI/boxoban-levels', 'unfiltered-valid.npy', 'c0ffee')] * 2

    for wrong in (grids[:0], grids.astype(np.float32), grids[:, :9]):
        content = wrong
        message = r'hard.npy: expected integers of shape \(N, 10, 10, 2\)'
        refuses(message, load_levels, folder, 'hard', True)
    for place, value, what in (
        ((7, 0, 5, 0), 0, 'is not walled in'),
        ((7, 4, 4, 0), 7, 'has a character'),
        ((7, 4, 4, 1), -2, 'has a character'),
        ((7, 0, 0, 1), 4, 'has a character'),
        ((7, ..., 1), 0, 'has not exactly one agent'),
    ):
        content = grids.astype(np.int16)
        content[place] = value
        refuses(f'hard.npy: level 7 {what}', load_levels, folder, 'hard', True)
    assert sorted(os.listdir(folder)) == ['meta.json', 'unfiltered-valid.pack17.npy']


@pytest.mark.skipif(not SHARED.is_dir(), reason='the folder of Boxoban levels is not there')
def test_the_real_levels():
    original = (SHARED / 'unfiltered_test_000.txt').read_text()
    levels, line = load_levels(str(SHARED), 'unfiltered-test')
    assert numbered(map(board_text, levels)).split() == original.split()
    assert line.startswith('1,000 levels of unfiltered-test from 1 file in ')
    train, line = load_levels(str(SHARED), 'unfiltered-train')
    assert line.startswith('900,000 levels of unfiltered-train from 1 file in ')
    assert len(train) == 900_000 and not set(map(bytes, levels)) & set(map(bytes, train))


# ----------------------------------------------------------------------------- the generator


@pytest.mark.parametrize('boxes', [1, 2, 3, 4])
def test_generated_levels_are_solved_by_their_solutions(boxes):
    """Replayed forwards: not solved before the solution's last action, and solved by it, within the
    time limit."""
    levels, solutions = generate(400, boxes, seed=11)
    wall, target, box, agent = masks(check_packed(levels, 'generated'))
    assert (target.sum(1) == boxes).all() and (box.sum(1) == boxes).all()
    assert not (box & target).any() and not target.gather(1, agent[:, None]).any()
    assert all(3 * boxes <= len(actions) <= TIME_LIMIT for actions in solutions)
    env, solved_at = SokobanEnv(levels, 400, order='sequence'), torch.full((400,), -1)
    for t in range(max(map(len, solutions))):
        action = torch.tensor([int(actions[t]) if t < len(actions) else 0 for actions in solutions])
        solved = env.step(action)[2]
        solved_at = torch.where(solved & (solved_at < 0), t + 1, solved_at)
    assert solved_at.tolist() == [len(actions) for actions in solutions]


def test_generated_levels_are_connected_and_varied():
    levels, solutions = generate(3000, 4, seed=2)
    wall, target, box, agent = masks(levels)
    reached = torch.zeros_like(wall).scatter(1, agent[:, None], True)
    for _ in range(64):
        reached = torch.stack([reached, *(reached.roll(d, 1) for d in DELTA)]).any(0) & ~wall
    assert torch.equal(reached, ~wall)
    for some in (levels, levels[:, :8]):
        assert len(np.unique(some, axis=0)) > 0.99 * 3000
    assert 24 < (~wall).sum(1).float().mean() < 36  # Boxoban's have 31.7 cells of floor
    assert np.median([len(actions) for actions in solutions]) > 20
    boxes, corners = box.sum(0).view(10, 10)[1:-1, 1:-1], torch.tensor([0, 7])
    assert (target.sum(0)[INTERIOR] > 30).all() and (boxes > 15).sum() == 60
    assert not boxes[corners][:, corners].any()  # a box in a corner is stuck


def test_generate_is_seeded_and_leaves_others_out():
    levels, solutions = generate(60, 1, 5, 6)
    assert max(map(len, solutions)) <= 6 and np.array_equal(generate(40, 1, 5, 6)[0], levels[:40])
    assert not np.array_equal(generate(10, 1, 6, 6)[0], levels[:10])
    others, theirs = generate(40, 1, 5, 6, without=levels[5:25])
    assert np.array_equal(others, np.concatenate([levels[:5], levels[25:60]]))
    wanted = solutions[:5] + solutions[25:]
    assert all(np.array_equal(a, b) for a, b in zip(theirs, wanted, strict=True))
    for bad in ({'boxes': 0}, {'boxes': 5}, {'n': 0}, {'seed': -1}, {'max_moves': 5}):
        refuses('n_boxes = .*max_moves = ', generate, **{'n': 1, **bad})


# ----------------------------------------------------------------------------- the environment


@pytest.mark.parametrize('rows, actions, rewards, after', [
    # pushes onto a target and off it, against two boxes, and away
    (['#@$. $.  #'], [RIGHT], [0.9], ['# @* $.  #']),
    (['#@$. $.  #'], [RIGHT] * 3, [0.9, -1.1, -0.1], ['#  +$$.  #']),
    (['#@$. $.  #'], [RIGHT] * 3 + [LEFT], [0.9, -1.1, -0.1, -0.1], ['# @.$$.  #']),
    # blocked moves cost a step: a box against a wall, then three walls
    (['#@$#    .#'], [RIGHT, LEFT, UP, DOWN], [-0.1] * 4, ['#@$#    .#']),
    (['#  .     #', '#  $     #', '#  @     #', '#  $    .#', '#        #'], [DOWN, UP, UP],
     [-0.1, -0.1, 0.9], ['#  *     #', '#  @     #', '#        #', '#       .#', '#  $     #']),
])  # fmt: skip
def test_moves_by_hand(rows, actions, rewards, after):
    env = env_of(text(*rows))
    for action, wanted in zip(actions, rewards, strict=True):
        reward, done, solved = env.step(torch.tensor([action]))
        assert reward.dtype == torch.float32 and reward.item() == pytest.approx(wanted)
        assert not done.any() and not solved.any()
    assert board_text(env.observe()[0]) == text(*after)
    assert env.steps.tolist() == [len(actions)]


def test_solved_is_ten_more_and_the_next_level_starts():
    first, second = text('#@$.     #'), text('#.$  @   #')
    env = env_of(first, second)
    reward, done, solved = env.step(torch.tensor([RIGHT]))
    assert reward.item() == pytest.approx(10.9) and done.tolist() == solved.tolist() == [True]
    assert board_text(env.observe()[0]) == second
    assert env.steps.tolist() == [0] and env.level.tolist() == [1]
    for _ in range(3):
        reward, done, solved = env.step(torch.tensor([LEFT]))
    # after the last level the first one again
    assert solved.tolist() == [True] and board_text(env.observe()[0]) == first


def test_step_120_ends_an_episode():
    env = env_of(text('#@$.     #'), text('#.$@     #'))
    for t in range(2 * TIME_LIMIT):
        last = t == 2 * TIME_LIMIT - 1  # the second episode is solved by its last step
        reward, done, solved = env.step(torch.tensor([LEFT if last or t < TIME_LIMIT else UP]))
        assert done.item() == ((t + 1) % TIME_LIMIT == 0) and solved.item() == last
        assert reward.item() == pytest.approx(10.9 if last else -0.1)
        assert env.steps.item() == (t + 1) % TIME_LIMIT


def random_steps(env, steps, seed=0):
    rng, trace = torch.Generator().manual_seed(seed), []
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
    which, before = torch.arange(7) % 2 == 0, env.level.clone()
    env.reset(which)
    assert torch.equal(env.level, torch.where(which, (before + 7) % 40, before))
    refuses('order', SokobanEnv, levels, 7, order='shuffled')


def test_two_ranks_have_the_boards_of_one():
    levels, ends = generate(500, 1, 4)[0], 0
    whole = SokobanEnv(levels, 8, seed=3)
    parts = [SokobanEnv(levels, 4, seed=3, first=first) for first in (0, 4)]
    assert not torch.equal(SokobanEnv(levels, 8, seed=4).level, whole.level)
    for action in torch.from_numpy(np.random.default_rng(0).integers(0, 4, (300, 8))):
        reward, done, _ = whole.step(action)
        others = [env.step(half) for env, half in zip(parts, action.chunk(2), strict=True)]
        assert torch.equal(torch.cat([o[0] for o in others]), reward)
        assert torch.equal(torch.cat([env.observe() for env in parts]), whole.observe())
        ends += int(done.sum())
    assert ends > 16 and whole.level.unique().numel() > 4


def test_draw_is_uniform_and_depends_on_everything():
    board, count = torch.arange(400).repeat_interleave(500), torch.arange(500).repeat(400)
    x = draw(7, 0, board, count)
    assert x.min() >= 0 and x.max() < 2**53 and x.unique().numel() == 200_000
    keys = ((7, 0), (8, 0), (7, 1))
    u, seed, stream = (draw(*key, board, count).view(400, 500) / 2**53 for key in keys)
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), (u, seed), (u, stream)):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.012
    same = [draw(7, 0, board[:5], count) for count in (torch.tensor(3), torch.full((5,), 3))]
    assert torch.equal(*same)
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
    assert not torch.equal(random_steps(other, 150, seed=5), after)
    other.load_state_dict(state)
    assert torch.equal(random_steps(other, 150, seed=5), after)


def test_a_step_waits_for_nothing_and_works_in_place():
    """On the meta device nothing has a value: a step that asks for one fails."""
    levels = generate(20, 4, 4)[0]
    env = SokobanEnv(levels, 6, device='meta')
    results = env.step(torch.zeros(6, dtype=torch.int64, device='meta'))
    assert [x.shape for x in results] == [(6,)] * 3 and env.observe().shape == (6, 10, 10, 2)
    env = SokobanEnv(levels, 6)
    before = [getattr(env, name).data_ptr() for name in env.STATE]
    random_steps(env, 130)
    assert before == [getattr(env, name).data_ptr() for name in env.STATE]


# ----------------------------------------------------------------------------- Jumanji


def near_solved(n, seed):
    """Levels, and the actions that solve them: generated ones, played forward to their last 1 to 10
    actions for four fifths of them."""
    levels, solutions = generate(n, 4, seed)
    left = np.random.default_rng(seed).integers(1, 11, n)
    left = np.where(np.arange(n) % 5 == 0, TIME_LIMIT, left)
    begun = [
        actions[: max(0, len(actions) - k)] for actions, k in zip(solutions, left, strict=True)
    ]
    packed = []
    for level, actions in zip(levels, begun, strict=True):
        env = SokobanEnv(level[None], 1)
        for action in actions:
            env.move(torch.tensor([int(action)]))
        wall, target, box = (mask[:, INTERIOR].numpy() for mask in split(env.grid))
        packed.append(sokoban.pack(wall, target, box, np.searchsorted(INTERIOR, env.agent.numpy())))
    rest = [actions[len(done) :] for actions, done in zip(solutions, begun, strict=True)]
    return np.concatenate(packed), rest


def need_jumanji():
    pytest.importorskip('jumanji', reason='jumanji is missing: pip install -r requirements.txt')


def test_parity_with_jumanji(request):
    """The same levels and actions in both: every reward, grid, end, step count and next level, over
    20,000 steps (--long: 128,000)."""
    need_jumanji()
    N, steps, least, n = 160, 130, 10, 300
    if request.config.getoption('--long'):
        N, steps, least, n = 512, 250, 100, 2000
    levels, solutions = near_solved(n, 5)
    index = {o.tobytes(): i for i, o in enumerate(observations(levels))}
    table = np.zeros((len(levels), TIME_LIMIT), np.int64)
    for row, actions in zip(table, solutions, strict=True):
        row[: len(actions)] = actions
    theirs, ours = JumanjiEnv(levels, N, seed=1), SokobanEnv(levels, N)
    level = np.array([index[o.tobytes()] for o in theirs.observe().numpy()])
    ours.reset(torch.ones(N, dtype=torch.bool), torch.from_numpy(level))
    rng, met = (
        np.random.default_rng(0),
        dict.fromkeys('on off solved late wall box pushed'.split(), 0),
    )
    skill = np.array([0, 1, 0.5, 0.9])[np.arange(N) % 4]  # how often a board follows its solution
    for _ in range(steps):
        solving = table[level, ours.steps.numpy()]
        action = np.where(rng.random(N) < skill, solving, rng.integers(0, 4, N))
        seen, action = ours.observe(), torch.from_numpy(action)
        near, far = (ours.agent + k * torch.tensor(DELTA)[action] for k in (1, 2))
        near, far = (split(ours.grid[torch.arange(N), c.clamp(0, 99)]) for c in (near, far))
        met['wall'] += int(near[0].sum() + (near[2] & far[0]).sum())
        met['box'] += int((near[2] & far[2]).sum())
        reward, done, solved = theirs.step(action)
        grids = theirs.observe()
        for i in np.flatnonzero(done.numpy()):
            level[i] = index[grids[i].numpy().tobytes()]
        for a, b in zip(
            ours.step(action, torch.from_numpy(level)), (reward, done, solved), strict=True
        ):
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
    env, half = JumanjiEnv(levels, 16, seed=3), JumanjiEnv(levels, 8, seed=3, first=8)
    assert torch.equal(half.observe(), env.observe()[8:])  # the same on however many ranks
    random_steps(env, 100)
    state = env.state_dict()
    assert all(type(x) is torch.Tensor for x in state.values())
    here, after = env.observe(), random_steps(env, 150, seed=5)
    other = JumanjiEnv(levels, 16, seed=4)
    assert not torch.equal(other.observe(), here)
    other.load_state_dict(state)
    assert torch.equal(other.observe(), here)
    assert torch.equal(random_steps(other, 150, seed=5), after)
    refuses('4 boxes', JumanjiEnv, generate(5, 3, 0)[0], 2)


def test_jumanji_is_missing(monkeypatch):
    for name in ('jumanji', 'jumanji.wrappers'):
        monkeypatch.setitem(sys.modules, name, None)
    refuses("env = 'jumanji' needs jumanji and jax", JumanjiEnv, generate(5)[0], 2)


# ----------------------------------------------------------------------------- pictures, commands


def test_pictures(tmp_path):
    image = pytest.importorskip('PIL.Image')
    board = text('#@$.     #', '# *      #', '#$. $.   #')
    env = env_of(board)
    observation = env.observe()[0]
    assert board_text(observation) == board_text(observation.numpy()) == board
    picture, tiles = board_image(observation, 20), {}
    assert picture.shape == (200, 200, 3) and picture.dtype == np.uint8
    for y, row in enumerate(board.split('\n')):
        for x, char in enumerate(row):
            tiles[char] = picture[20 * y : 20 * y + 20, 20 * x : 20 * x + 20].tobytes()
    tiles['+'] = board_image(env_of(text('#+$      #')).observe()[0], 20)[20:40, 20:40].tobytes()
    assert len(set(tiles.values())) == len(tiles) == 7
    frames = [board_image(observation)]  # pictures and observations alike
    for action in (RIGHT, RIGHT, DOWN, LEFT):
        env.step(torch.tensor([action]))
        frames.append(env.observe()[0].numpy())
    save_gif(frames, tmp_path / 'a.gif', ms=100)
    with image.open(tmp_path / 'a.gif') as gif:
        assert gif.size == (240, 240)
        gif.seek(gif.n_frames - 1)
        last = np.array(gif.convert('RGB')).astype(int)
    assert abs(last - board_image(frames[-1])).mean() < 2


def test_command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, 'sokoban.py', '--split=generated', '--n_levels=20', *arguments]
        return forks.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run('--n_boxes=2', '--show=5', f'--picture={tmp_path / "p.png"}')
    source, *blocks = done.stdout.split('\n\n')
    said = '20 generated levels, boxes: 2, moves: at most 120, seed: 1337'
    assert (done.returncode, done.stderr, source) == (0, '', said)
    shown = parse_text('\n\n'.join(blocks), 'stdout')
    assert np.array_equal(shown, generate(20, 2, 1337)[0][:5])
    with pytest.importorskip('PIL.Image').open(tmp_path / 'p.png') as png:
        assert png.size == (3 * 248, 2 * 248)
    for argument, what in (
        ('--split=hard', 'no such folder'),
        (f'--picture={tmp_path}/x/p.png', 'No such file or directory'),
        ('--n_boxes=7', 'n_boxes = 7'),
        ('--show=0', 'show = 0: must be at least 1'),
    ):
        done = run(argument, f'--levels_dir={tmp_path}/x')
        assert done.returncode == 2 and done.stderr.startswith('error: ') and what in done.stderr
        assert done.stderr.count('\n') == 1
