"""sokoban.py: levels (text, packed, downloaded, malformed), the generator by replay, the
environment by hand and against Jumanji's."""

import importlib.util
import types

from conftest import run
import numpy as np
import pytest
import torch

import sokoban
from sokoban import BOX, DELTA, INTERIOR, TARGET, TIME_LIMIT, WALL, JumanjiEnv, SokobanEnv
from sokoban import board_image, board_keys, board_text, generate, load_levels, observations
from sokoban import parse_text, random_bits, read_file

UP, RIGHT, DOWN, LEFT = range(4)
jumanji = pytest.mark.skipif(
    not importlib.util.find_spec('jumanji'), reason='pip install -r requirements.txt'
)


def text(*rows):
    """A board of ten rows: the given ones of ten characters after one of wall, the rest wall."""
    return '\n'.join(['#' * 10, *rows] + ['#' * 10] * (9 - len(rows)))


def all_of(levels):
    return SokobanEnv(levels, len(levels), order='sequence')


def numbered(boards):
    return ''.join(f'; {i}\n{board}\n\n' for i, board in enumerate(boards))


def texts(levels):
    return [board_text(board) for board in observations(levels)]


def env_of(*boards):
    return SokobanEnv(parse_text(numbered(boards), 'test'), 1, order='sequence')


def masks(env):
    """Walls, targets and boxes of an environment's boards, (N, 100) each."""
    return [(env.grid & bit) > 0 for bit in (WALL, TARGET, BOX)]


def refuses(message, function, *args, **more):
    with pytest.raises(ValueError, match=message) as error:
        function(*args, **more)
    assert '\n' not in str(error.value)


BOARD = text('#@$.  #  #', '# $* $.  #', '# .      #')

# ----------------------------------------------------------------------------- levels


def test_text_packed_text():
    rows = ('#*@$. $. #', '#        #', '#$       #', '#.       #')
    boards = [BOARD, text('#@$.     #'), text('#+$      #'), text(*rows)]
    levels = parse_text(numbered(boards), 'x')
    assert levels.shape == (4, 17) and levels.dtype == np.uint8
    assert texts(levels) == boards
    assert masks(all_of(levels))[2].sum(1).tolist() == [4, 1, 1, 4]


def test_malformed_levels(tmp_path):
    """By file and number. (test_fuzz.py: what is not refused is a level.)"""
    good, path = numbered([text('#$.     @#'), BOARD]), f'{tmp_path}/p.npy'
    for old, new, what in (
        ('#@$.', '# $.', 'level 1 has not exactly one agent'),
        ('#@$.', '#@é.', 'level 1 has a character that is none of'),
        ('#$.     @#', '#@       #', 'level 0 has not 1 to 4 boxes'),
        ('#@$.', '#@$. ', 'level 1 is not ten rows of ten characters'),
        ('#@$.', ' @$.', 'level 1 is not walled in'),
        ('; 0\n', '', 'level 0 does not start with'),
    ):
        refuses(f'^a.txt: {what}', parse_text, good.replace(old, new), 'a.txt')
    levels = generate(5, 4, 3)[0]
    broken, beyond = levels.copy(), levels.copy()
    broken[3, 16], beyond[3, 8] = levels[3, 13], 255  # the agent on a box
    for some, what in (
        (broken, 'level 3 has not as many targets as boxes'),
        (beyond, 'has a cell that is none of 0..63'),
        (levels[:, :9], r'expected uint8 of shape \(N, 17\)'),
    ):
        np.save(path, some)
        refuses(f'^{path}: {what}', read_file, path)


def test_a_folder_of_levels(tmp_path):
    """What is there later comes before what was there first: the tree, text files, the array."""
    fetches, levels = '`python sokoban.py .*--download=True', generate(30, 3, 1)[0]
    refuses(f'nowhere: no such folder: {fetches}', load_levels, f'{tmp_path}/nowhere', 'hard')
    refuses(f'no hard.pack17.npy, no .*: {fetches}', load_levels, str(tmp_path), 'hard')
    for name in ('', '../unfiltered-test', 'none.txt/'):
        refuses('split = .*: no such file', load_levels, str(tmp_path), name)
    (tmp_path / 'unfiltered' / 'test').mkdir(parents=True)
    for path, n in (('unfiltered/test/000.txt', 3), ('unfiltered_test_000.txt', 7)):
        (tmp_path / path).write_text(numbered(texts(levels[:n])), newline='\r\n')
        got, line = load_levels(str(tmp_path), 'unfiltered-test')
        assert np.array_equal(got, levels[:n])
        assert line == f'{n} levels of unfiltered-test from 1 file in {tmp_path}'
    (tmp_path / 'unfiltered_test_001.txt').write_text(numbered(texts(levels[7:9])))
    got, line = load_levels(str(tmp_path), 'unfiltered-test', most=8)
    assert np.array_equal(got, levels[:8]) and line.startswith('the first 8 of 9 levels of unf')
    np.save(tmp_path / 'unfiltered-test.pack17.npy', levels)
    assert np.array_equal(load_levels(str(tmp_path), 'unfiltered-test')[0], levels)


def test_download(tmp_path, monkeypatch):
    """All splits are of one commit; the Hub's files have either channel first."""
    hub, content = pytest.importorskip('huggingface_hub'), {}
    levels, folder = generate(60, 4, 9)[0], str(tmp_path / 'levels')
    grids = np.ascontiguousarray(observations(levels)[..., ::-1])  # the Hub's: fixed, variable
    content |= {'unfiltered-valid': grids, 'medium-valid': grids[..., ::-1]}
    content['hard'] = grids.astype(np.int16)
    content['hard'][7, 4, 4, 1] = -2

    def fake(repo_id, filename, revision):
        assert (repo_id, revision) == (sokoban.HUB, 'c0ffee')
        if filename.removesuffix('.npy') not in content:
            raise hub.errors.EntryNotFoundError('404')
        np.save(tmp_path / filename, content[filename.removesuffix('.npy')])
        return str(tmp_path / filename)

    found = types.SimpleNamespace(sha='c0ffee')
    monkeypatch.setattr(hub, 'repo_info', lambda repo_id, revision, repo_type: found)
    monkeypatch.setattr(hub, 'hf_hub_download', fake)
    refuses('^cannot download medium-train.npy', load_levels, folder, 'medium-train', True)
    monkeypatch.delattr(hub, 'repo_info')
    for split in ('unfiltered-valid', 'medium-valid'):
        for where in (f' downloaded from {sokoban.HUB}', ''):  # the second time it is there
            got, line = load_levels(folder, split, True)
            assert np.array_equal(got, levels)
            assert line == f'60 levels of {split} from 1 file in {folder}{where}'
    refuses('hard.npy: level 7 has a character', load_levels, folder, 'hard', True)
    assert not sokoban.split_files(folder, 'hard')


# ----------------------------------------------------------------------------- the generator


@pytest.mark.parametrize('boxes', [1, 4])
def test_generated_levels_are_solved_by_their_solutions(boxes):
    """Replayed forwards: solved by the solution's last action, and not before."""
    levels, solutions = generate(400, boxes, seed=11)
    env, solved_at = all_of(levels), torch.zeros(400)
    _, target, box = masks(env)
    assert (target.sum(1) == boxes).all() and not (box & target).any()
    assert not target.gather(1, env.agent[:, None]).any()
    assert all(3 * boxes <= len(actions) <= TIME_LIMIT for actions in solutions)
    for t in range(max(map(len, solutions))):
        action = torch.tensor([int(actions[t]) if t < len(actions) else 0 for actions in solutions])
        solved_at[env.step(action)[2] & (solved_at == 0)] = t + 1
    assert solved_at.tolist() == [len(actions) for actions in solutions]


def test_generated_levels_are_connected_and_varied():
    levels, solutions = generate(3000, 4, seed=2)
    env = all_of(levels)
    wall, target, box = masks(env)
    reached = torch.zeros_like(wall).scatter(1, env.agent[:, None], True)
    for _ in range(64):
        reached = torch.stack([reached, *(reached.roll(d, 1) for d in DELTA)]).any(0) & ~wall
    assert torch.equal(reached, ~wall) and len(np.unique(levels[:, :8], axis=0)) > 0.99 * 3000
    assert 24 < (~wall).sum(1).float().mean() < 36  # Boxoban's have 31.7 cells of floor
    assert np.median([len(actions) for actions in solutions]) > 20
    # a box in one of the four corners is stuck
    assert (target.sum(0)[INTERIOR] > 30).all() and (box.sum(0) > 15).sum() == 60


def test_generate_is_seeded_and_leaves_others_out():
    levels, solutions = generate(60, 1, 5, 6)
    assert max(map(len, solutions)) <= 6 and np.array_equal(generate(40, 1, 5, 6)[0], levels[:40])
    assert not np.array_equal(generate(10, 1, 6, 6)[0], levels[:10])
    others, theirs = generate(40, 1, 5, 6, without=levels[5:25])
    assert np.array_equal(others, np.concatenate([levels[:5], levels[25:60]]))
    assert list(map(list, theirs)) == list(map(list, solutions[:5] + solutions[25:]))
    for bad in ({'boxes': 0}, {'boxes': 5}, {'n': 0}, {'seed': -1}, {'max_moves': 5}):
        refuses('n_boxes = .*max_moves = ', generate, **{'n': 1, **bad})


# ----------------------------------------------------------------------------- the environment


def test_ends_of_episodes():
    """Solved: ten more, and the next level starts, after the last the first again; or step 120."""
    env, levels = env_of(text('#@$.     #'), text('#.$@     #')), []
    for action, steps in ((RIGHT, 1), (LEFT, 1), (UP, TIME_LIMIT), (LEFT, 1)):
        for t in range(steps):
            reward, done, solved = env.step(torch.tensor([action]))
            assert done.item() == (t == steps - 1) and env.steps.item() == (t + 1) % steps
        assert solved.item() == (steps == 1)
        assert reward.item() == pytest.approx(10.9 if steps == 1 else -0.1)
        levels.append(env.level.item())
    assert levels == [1, 0, 1, 0]
    refuses('order', SokobanEnv, generate(4, 1)[0], 7, order='shuffled')


def test_chance_is_uniform_and_depends_on_everything():
    board, count = torch.arange(400).repeat_interleave(500), torch.arange(500).repeat(400)
    keys = [board_keys(*key, board) for key in ((7, 0), (8, 0), (7, 1), (2**64 - 1, 3), (-1, 0))]
    u, *others = (random_bits(key, count).view(400, 500).double() / 2**53 for key in keys)
    assert u.min() >= 0 and u.max() < 1 and u.unique().numel() == 200_000
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), *((u, other) for other in others)):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.012


# ----------------------------------------------------------------------------- Jumanji


@jumanji
def test_parity_with_jumanji(request):
    """Both play the same levels with the same actions: every reward, grid, end, step count and next
    level, over 20,000 steps (--long: 128,000)."""
    N, steps, n = (512, 250, 2000) if request.config.getoption('--long') else (160, 130, 300)
    levels, solutions = generate(n, 4, 5, max_moves=40)
    table = np.zeros((len(levels), TIME_LIMIT), np.int64)
    for row, actions in zip(table, solutions, strict=True):
        row[: len(actions)] = actions
    theirs, ours = JumanjiEnv(levels, N, seed=1), SokobanEnv(levels, N, seed=1)
    rng, met = np.random.default_rng(0), torch.zeros(5)
    skill = np.array([0, 1, 0.5, 0.9])[np.arange(N) % 4]  # how often a board follows its solution
    for _ in range(steps):
        solving = table[ours.level.numpy(), ours.steps.numpy()]
        action = np.where(rng.random(N) < skill, solving, rng.integers(0, 4, N))
        action, seen = torch.from_numpy(action), ours.observe()
        reward, done, solved = here = ours.step(action)
        for a, b in zip(here, theirs.step(action), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert torch.equal(ours.observe(), theirs.observe())
        assert all(torch.equal(x, theirs.state_dict()[k]) for k, x in ours.state_dict().items())
        moved = (seen[..., 0] != ours.observe()[..., 0]).flatten(1).sum(1)
        # blocked, pushed, solved, late, off a target
        kinds = moved == 0, moved == 3, solved, done & ~solved, reward < -0.5
        met += torch.stack(kinds).sum(1)
    assert met.min() >= 10, met
    assert ours.level.unique().numel() > N // 4  # resets draw from all levels


# ----------------------------------------------------------------------------- Gymnasium


def test_gymnasiums_own_checkers_pass():
    gymnasium = pytest.importorskip('gymnasium')
    check = importlib.import_module('gymnasium.utils.env_checker').check_env
    name, few = 'sokoban:ParallelExperts/Sokoban-v0', {'n_levels': 40, 'n_boxes': 1}
    env, levels = gymnasium.make(name, render_mode='rgb_array', **few), generate(40, 1)[0]
    check(env.unwrapped)
    seen = env.reset(seed=5)[0]
    assert any(np.array_equal(seen, board) for board in observations(levels))
    assert np.array_equal(env.render(), board_image(seen)) and (env.reset()[0] != seen).any()
    ours, many = SokobanEnv(levels, 6), gymnasium.make_vec(name, num_envs=6, **few)
    assert many.reset(seed=1)[0].shape == many.observation_space.shape
    ours.load_state_dict(many.unwrapped.boards.state_dict())
    ours.keys.copy_(many.unwrapped.boards.keys)
    for _ in range(TIME_LIMIT + 1):
        before, action = ours.observe().numpy(), many.action_space.sample()
        seen, *gave, cut, infos = many.step(action)
        wanted = [x.numpy() for x in ours.step(torch.from_numpy(action))]
        assert seen in many.observation_space and np.array_equal(seen, ours.observe())
        assert all(map(np.array_equal, wanted, (*gave, infos['solved']))) and not cut.any()
        assert (infos['_final_obs'] == gave[1]).all()
        assert (infos['final_obs'] != before).sum() <= 6 * 3  # not the next level's


def test_without_gymnasium_there_is_the_plain_environment():
    code = 'import sys; sys.modules["gymnasium"] = None; import sokoban as s'
    code += '; print(s.SokobanEnv(s.generate(3, 1)[0], 2).observe().shape)'
    done = run(['-c', code])
    assert done.stdout == 'torch.Size([2, 10, 10, 2])\n', done


def test_a_widely_used_ppo_learns_on_it():
    """A few updates of Stable-Baselines3's."""
    sb3 = pytest.importorskip('stable_baselines3')
    few = {'n_levels': 40, 'n_boxes': 1}
    env = pytest.importorskip('gymnasium').make('sokoban:ParallelExperts/Sokoban-v0', **few)
    ppo = sb3.PPO('MlpPolicy', env, n_steps=64, batch_size=32, device='cpu', seed=0)
    before = torch.nn.utils.parameters_to_vector(ppo.policy.parameters()).detach()
    after = torch.nn.utils.parameters_to_vector(ppo.learn(192).policy.parameters())
    assert after.isfinite().all() and (after != before).any()


# ----------------------------------------------------------------------------- pictures


def test_pictures():
    rows, tiles = [text('#@$.     #', '# *      #', '#$. $.   #'), text('#+$      #')], {}
    frames = [env_of(row).observe()[0].numpy() for row in rows]
    for board, row in zip(frames, rows, strict=True):
        parts = board_image(board, 20).reshape(10, 20, 10, 20, 3).swapaxes(1, 2).reshape(100, -1)
        for char, tile in zip(row.replace('\n', ''), parts, strict=True):
            assert tiles.setdefault(char, tile.tobytes()) == tile.tobytes()
    assert len(set(tiles.values())) == len(tiles) == 7
