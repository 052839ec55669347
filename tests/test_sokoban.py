"""Test sokoban.py: levels, the generator by replay, the environment by hand and against Jumanji's,
evaluation, pictures."""

import importlib.util
import json
import subprocess
import sys
import types

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image
from processes import ROOT
from small_runs import assert_refused

import sokoban
from sokoban import BOX, DELTA, INTERIOR, TARGET, TIME_LIMIT, WALL, JumanjiEnv, SokobanEnv
from sokoban import board_image, board_keys, board_text, generate, load_levels, observations
from sokoban import parse_text, plan_image, random_bits, read_file

UP, RIGHT, DOWN, LEFT = range(4)
jumanji = pytest.mark.skipif(
    not importlib.util.find_spec('jumanji'), reason='pip install -r requirements.txt'
)


def text(*rows):
    """Return a board of ten rows: one of wall, the given rows, and walls below them."""
    return '\n'.join(['#' * 10, *rows] + ['#' * 10] * (9 - len(rows)))


def numbered(boards):
    """Return boards in the form of a Boxoban file."""
    return ''.join(f'; {i}\n{board}\n\n' for i, board in enumerate(boards))


def env_on(*boards, **options):
    """Return one environment board that plays these boards in turn."""
    return SokobanEnv(parse_text(numbered(boards), 'test'), 1, order='sequence', **options)


def env_on_all(levels):
    """Return an environment with a board for each level."""
    return SokobanEnv(levels, len(levels), order='sequence')


def masks(env):
    """Return walls, targets and boxes of an environment's boards, (N, 100) each."""
    return [(env.grid & bit) > 0 for bit in (WALL, TARGET, BOX)]


BOARD = text('#@$.  #  #', '# $* $.  #', '# .      #')

# ----------------------------------------------------------------------------- levels


def test_text_is_packed_and_unpacked():
    rows = ('#*@$. $. #', '#        #', '#$       #', '#.       #')
    boards = [BOARD, text('#@$.     #'), text('#+$      #'), text(*rows)]
    levels = parse_text(numbered(boards), 'x')
    assert levels.shape == (4, 17) and levels.dtype == np.uint8
    assert [board_text(board) for board in observations(levels)] == boards
    _, _, box = masks(env_on_all(levels))
    assert box.sum(1).tolist() == [4, 1, 1, 4]


@pytest.mark.parametrize(
    'old, new, message',
    [
        ('#@$.', '# $.', 'level 1 does not have exactly one agent'),
        ('#@$.', '#@é.', 'level 1 has a character that is none of'),
        ('#$.     @#', '#@       #', 'level 0 does not have 1 to 4 boxes'),
        ('#@$.', '#@$. ', 'level 1 is not ten rows of ten characters'),
        ('#@$.', ' @$.', 'level 1 is not walled in'),
        ('; 0\n', '', 'level 0 does not start with'),
    ],
)
def test_malformed_text_is_refused_by_file_and_level(old, new, message):
    boards = numbered([text('#$.     @#'), BOARD])
    assert_refused(f'^a.txt: {message}', parse_text, boards.replace(old, new), 'a.txt')


def test_malformed_arrays_are_refused_by_file_and_level(tmp_path):
    path = f'{tmp_path}/p.npy'
    levels = generate(5, 4, 3)[0]
    agent_on_box, no_cell = levels.copy(), levels.copy()
    agent_on_box[3, 16], no_cell[3, 8] = levels[3, 13], 255
    for broken, message in (
        (agent_on_box, 'level 3 does not have as many targets as boxes'),
        (no_cell, 'a cell of a packed level is not in 0..63'),
        (levels[:, :9], r'expected uint8 of shape \(N, 17\)'),
    ):
        np.save(path, broken)
        assert_refused(f'^{path}: {message}', read_file, path)


def test_a_large_file_is_unpacked_in_parts(tmp_path, monkeypatch):
    levels = generate(5, 4, 3)[0]
    np.save(tmp_path / 'p.npy', levels)
    unpacked, unpack_all = [], sokoban.observations

    def unpack_part(part):
        unpacked.append(len(part))
        return unpack_all(part)

    monkeypatch.setattr(sokoban, 'PART', 2)
    monkeypatch.setattr(sokoban, 'observations', unpack_part)
    assert np.array_equal(read_file(f'{tmp_path}/p.npy'), levels)
    assert unpacked == [2, 2, 1]


def test_missing_levels_are_refused_with_the_command_that_downloads_them(tmp_path):
    command = '`python sokoban.py .*--download=True'
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
        (tmp_path / path).write_text(numbered(texts[:n]), newline='\r\n')
        found, line = load_levels(str(tmp_path), 'unfiltered-test')
        assert np.array_equal(found, levels[:n])
        assert line == f'{n} levels of unfiltered-test from 1 file in {tmp_path}'
    (tmp_path / 'unfiltered_test_001.txt').write_text(numbered(texts[7:9]))
    found, line = load_levels(str(tmp_path), 'unfiltered-test', limit=8)
    assert np.array_equal(found, levels[:8]) and line.startswith('the first 8 of 9 levels of unf')
    np.save(tmp_path / 'unfiltered-test.pack17.npy', levels)
    assert np.array_equal(load_levels(str(tmp_path), 'unfiltered-test')[0], levels)


def test_text_files_of_other_splits_are_left_out(tmp_path):
    """A split's own files are numbered or have its name alone."""
    own = ['hard.txt', 'hard1.txt', 'hard_000.txt', 'hard-001.txt', 'hard.2.txt']
    others = ['hard-test.txt', 'hard_train_000.txt', 'harder.txt', 'hard_1_2.txt']
    for name in own + others:
        (tmp_path / name).write_text('')
    assert sokoban.split_files(str(tmp_path), 'hard') == sorted(f'{tmp_path}/{n}' for n in own)
    assert sokoban.split_files(str(tmp_path), 'har') == []


def test_a_split_is_downloaded_once_and_all_splits_are_of_one_commit(tmp_path, monkeypatch):
    """Files on the Hub hold either channel first."""
    levels, folder = generate(60, 4, 9)[0], str(tmp_path / 'levels')
    fixed_first = np.ascontiguousarray(observations(levels)[..., ::-1])
    malformed = fixed_first.astype(np.int16)
    malformed[7, 4, 4, 1] = -2
    files = {
        'unfiltered-valid.npy': fixed_first,
        'medium-valid.npy': fixed_first[..., ::-1],
        'hard.npy': malformed,
    }

    def hf_hub_download(repo_id, filename, revision):
        assert (repo_id, revision) == (sokoban.HUB, 'c0ffee')
        if filename not in files:
            raise huggingface_hub.errors.EntryNotFoundError(f'there is no {filename}')
        np.save(tmp_path / filename, files[filename])
        return str(tmp_path / filename)

    commit = types.SimpleNamespace(sha='c0ffee')
    monkeypatch.setattr(huggingface_hub, 'repo_info', lambda repo_id, revision, repo_type: commit)
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', hf_hub_download)
    assert_refused('^cannot download medium-train.npy', load_levels, folder, 'medium-train', True)
    monkeypatch.delattr(huggingface_hub, 'repo_info')  # from here on the folder keeps to its commit
    for split in ('unfiltered-valid', 'medium-valid'):
        for source in (f' downloaded from {sokoban.HUB}', ''):  # the second time it is there
            found, line = load_levels(folder, split, True)
            assert np.array_equal(found, levels)
            assert line == f'60 levels of {split} from 1 file in {folder}{source}'
    assert_refused('hard.npy: level 7 has a character', load_levels, folder, 'hard', True)
    assert not sokoban.split_files(folder, 'hard')


# ----------------------------------------------------------------------------- the generator


@pytest.mark.parametrize('boxes', [1, 4])
def test_generated_levels_are_solved_by_their_solutions(boxes):
    """The last action of a solution solves its level, and none before it does."""
    levels, solutions = generate(400, boxes, seed=11)
    env, solved_at = env_on_all(levels), torch.zeros(400)
    _, target, box = masks(env)
    assert (target.sum(1) == boxes).all() and not (box & target).any()
    assert not target.gather(1, env.agent[:, None]).any()
    assert all(3 * boxes <= len(actions) <= TIME_LIMIT for actions in solutions)
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


def test_more_generated_levels_than_fit_into_memory_are_refused():
    """The message names neither n_levels nor eval_games: either may have been too large."""
    assert_refused('^1,000,000,000,000 generated levels: needs more than', generate, 10**12)


def test_excluded_levels_are_left_out():
    levels, solutions = generate(60, 1, 5, 6)
    others, other_solutions = generate(40, 1, 5, 6, exclude=levels[5:25])
    assert np.array_equal(others, np.concatenate([levels[:5], levels[25:60]]))
    expected = solutions[:5] + solutions[25:]
    assert [list(x) for x in other_solutions] == [list(x) for x in expected]


@pytest.mark.parametrize(
    'argument, message',
    [
        ({'boxes': 0}, 'n_boxes = 0: must be between 1 and 4'),
        ({'boxes': 5}, 'n_boxes = 5: must be between 1 and 4'),
        ({'n': 0}, 'n_levels = 0: must be at least 1'),
        ({'seed': -1}, 'seed = -1: must be at least 0'),
        ({'max_moves': 5}, 'max_moves = 5: must be between 24 and 120 for n_boxes = 4'),
    ],
)
def test_generate_refuses_what_is_out_of_range(argument, message):
    assert_refused(message, generate, **{'n': 1, **argument})


# ----------------------------------------------------------------------------- the environment


@pytest.mark.parametrize('limit', [TIME_LIMIT, 7])
def test_episodes_end_when_solved_or_at_the_time_limit(limit):
    """A step costs 0.1, a box on a target gives 1 and a solved level 10. The next level starts at
    once, and the first one follows the last."""
    env, levels = env_on(text('#@$.     #'), text('#.$@     #'), time_limit=limit), []
    for action, steps in ((RIGHT, 1), (LEFT, 1), (UP, limit), (LEFT, 1)):
        for t in range(steps):
            reward, done, solved = env.step(torch.tensor([action]))
            assert done.item() == (t == steps - 1) and env.steps.item() == (t + 1) % steps
        assert solved.item() == (steps == 1)
        assert reward.item() == pytest.approx(10.9 if steps == 1 else -0.1)
        levels.append(env.level.item())
    assert levels == [1, 0, 1, 0]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match='order'):
        SokobanEnv(generate(4, 1)[0], 7, order='shuffled')


def test_random_bits_are_uniform_and_depend_on_seed_stream_board_and_count():
    board, count = torch.arange(400).repeat_interleave(500), torch.arange(500).repeat(400)
    keys = [board_keys(*key, board) for key in ((7, 0), (8, 0), (7, 1), (2**64 - 1, 3), (-1, 0))]
    u, *others = (random_bits(key, count).view(400, 500).double() / 2**53 for key in keys)
    assert u.min() >= 0 and u.max() < 1 and u.unique().numel() == 200_000
    assert abs(u.mean() - 0.5) < 0.004  # six standard errors
    pairs = [(u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), *((u, other) for other in others)]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.012


# ----------------------------------------------------------------------------- evaluation


def test_replay_shows_every_board_and_resets_none():
    levels = parse_text(numbered([text('#@$.     #')]), 'x')
    boards = sokoban.replay(levels, np.array([[RIGHT, LEFT]]))
    rows = [board_text(board).split('\n')[1] for board in boards[0]]
    assert rows == ['#@$.     #', '# @*     #', '#@ *     #']


def test_an_evaluation_adds_up_in_float64_on_any_device(monkeypatch):
    """Apple's GPUs have no float64. Here there is none, so that moving anything to it fails."""
    names = ('solved', 'return', 'steps')
    results = {name: torch.tensor([1.0, 0.0]) for name in names}
    monkeypatch.setattr(sokoban, 'run_episodes', lambda *args, **options: results)
    found = sokoban.evaluate(sokoban.RANDOM, generate(2, 1)[0], 'mps')
    assert found == {'solve_rate': 0.5, 'return': 0.5, 'steps': 0.5}


def test_an_evaluation_is_written_with_a_solved_and_a_failed_game(tmp_path):
    """A policy that always pushes right solves one of two levels."""
    levels = parse_text(numbered([text('#.$@     #'), text('#@$.     #')]), 'x')
    right = sokoban.StatelessPolicy(lambda obs: torch.eye(4)[[RIGHT] * len(obs)])
    record = sokoban.write_evaluation(right, levels, 'a/two.txt', 'cpu', str(tmp_path), {'step': 3})
    assert json.loads((tmp_path / 'eval_two.json').read_text()) == record
    assert record['step'] == 3 and record['n'] == 2 and record['solve_rate'] == 0.5
    assert record['mean_steps'] == 60.5 and record['mean_return'] == pytest.approx(-0.55, abs=1e-5)
    assert record['solved_level'] == 1 and record['failed_level'] == 0
    with Image.open(record['solved_game']) as gif:
        assert gif.n_frames == 2
        gif.seek(1)  # the end of the game: the box is on its target
        end = np.asarray(gif.convert('RGB'), float)
    on_target = board_image(sokoban.replay(levels[1:], np.array([[RIGHT]]))[0, -1])
    assert abs(end - on_target).mean() < 3  # a GIF has 256 colors


# ----------------------------------------------------------------------------- Jumanji


@jumanji
def test_parity_with_jumanji(request):
    """Both play the same levels with the same actions. Every reward, grid, end, step count and next
    level is equal, over 20,000 steps, and 128,000 with --long."""
    N, steps, n = (512, 250, 2000) if request.config.getoption('--long') else (160, 130, 300)
    levels, solutions = generate(n, 4, 5, max_moves=40)
    table = np.zeros((len(levels), TIME_LIMIT), np.int64)
    for row, actions in zip(table, solutions, strict=True):
        row[: len(actions)] = actions
    limit = {'time_limit': 100}  # not the default of either
    original = JumanjiEnv(levels, N, seed=1, **limit)
    ours = SokobanEnv(levels, N, seed=1, **limit)
    rng = np.random.default_rng(0)
    met = torch.zeros(5)
    skill = np.array([0, 1, 0.5, 0.9])[np.arange(N) % 4]  # how often a board follows its solution
    for _ in range(steps):
        solving = table[ours.level.numpy(), ours.steps.numpy()]
        action = np.where(rng.random(N) < skill, solving, rng.integers(0, 4, N))
        action = torch.from_numpy(action)
        before = ours.observe()
        reward, done, solved = ours.step(action)
        for a, b in zip((reward, done, solved), original.step(action), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert torch.equal(ours.observe(), original.observe())
        state = original.state_dict()
        assert all(torch.equal(x, state[name]) for name, x in ours.state_dict().items())
        changed = (before[..., 0] != ours.observe()[..., 0]).flatten(1).sum(1)
        # blocked, pushed, solved, out of time, pushed off a target
        kinds = changed == 0, changed == 3, solved, done & ~solved, reward < -0.5
        met += torch.stack(kinds).sum(1)
    assert met.min() >= 10, met
    assert ours.level.unique().numel() > N // 4  # resets sample from all levels


# ----------------------------------------------------------------------------- Gymnasium


GYM_NAME = 'sokoban:ParallelExperts/Sokoban-v0'
GYM_OPTIONS = {'n_levels': 40, 'n_boxes': 1}


@pytest.fixture
def gym_env():
    """Return one board with 40 levels as a Gymnasium environment."""
    gymnasium = pytest.importorskip('gymnasium')
    return gymnasium.make(GYM_NAME, render_mode='rgb_array', **GYM_OPTIONS)


def test_the_checker_of_gymnasium_accepts_the_environment(gym_env):
    from gymnasium.utils.env_checker import check_env

    check_env(gym_env.unwrapped)


def test_a_gymnasium_environment_samples_generated_levels_and_draws_them(gym_env):
    seen, _ = gym_env.reset(seed=5)
    assert any(np.array_equal(seen, board) for board in observations(generate(40, 1)[0]))
    assert np.array_equal(gym_env.render(), board_image(seen))
    assert (gym_env.reset()[0] != seen).any()


def test_a_gymnasium_vector_environment_steps_as_ours_does():
    gymnasium = pytest.importorskip('gymnasium')
    ours = SokobanEnv(generate(40, 1)[0], 6)
    vector = gymnasium.make_vec(GYM_NAME, num_envs=6, **GYM_OPTIONS)
    assert vector.reset(seed=1)[0].shape == vector.observation_space.shape
    ours.load_state_dict(vector.unwrapped.boards.state_dict())
    ours.keys.copy_(vector.unwrapped.boards.keys)
    for _ in range(TIME_LIMIT + 1):
        before = ours.observe().numpy()
        action = vector.action_space.sample()
        seen, reward, terminated, truncated, infos = vector.step(action)
        expected = [x.numpy() for x in ours.step(torch.from_numpy(action))]
        assert seen in vector.observation_space and np.array_equal(seen, ours.observe())
        assert all(map(np.array_equal, expected, (reward, terminated, infos['solved'])))
        assert not truncated.any() and (infos['_final_obs'] == terminated).all()
        assert (infos['final_obs'] != before).sum() <= 6 * 3  # of the episode's end, not a new one


def test_without_gymnasium_there_is_the_plain_environment():
    code = 'import sys; sys.modules["gymnasium"] = None; import sokoban as s'
    code += '; print(s.SokobanEnv(s.generate(3, 1)[0], 2).observe().shape)'
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == 'torch.Size([2, 10, 10, 2])\n', done


def test_ppo_of_stable_baselines3_trains_on_the_environment():
    sb3 = pytest.importorskip('stable_baselines3')
    import gymnasium

    env = gymnasium.make(GYM_NAME, **GYM_OPTIONS)
    ppo = sb3.PPO('MlpPolicy', env, n_steps=64, batch_size=32, device='cpu', seed=0)
    before = torch.nn.utils.parameters_to_vector(ppo.policy.parameters()).detach()
    after = torch.nn.utils.parameters_to_vector(ppo.learn(192).policy.parameters())
    assert after.isfinite().all() and (after != before).any()


# ----------------------------------------------------------------------------- pictures


def test_each_character_has_a_picture_of_its_own():
    rows, pictures = [text('#@$.     #', '# *      #', '#$. $.   #'), text('#+$      #')], {}
    for row in rows:
        board = env_on(row).observe()[0].numpy()
        tiles = board_image(board, 20).reshape(10, 20, 10, 20, 3).swapaxes(1, 2).reshape(100, -1)
        for char, tile in zip(row.replace('\n', ''), tiles, strict=True):
            assert pictures.setdefault(char, tile.tobytes()) == tile.tobytes()
    assert len(set(pictures.values())) == len(pictures) == 7


def test_arrows_point_where_the_plan_does_and_wrong_ones_look_different():
    """The dark part of an arrow to the right lies mostly on the left of its cell."""
    board = env_on(text('#@       #', '#  $.    #')).observe()[0].numpy()
    plan = np.full((10, 10), -1)
    plan[1, 1], plan[1, 5], plan[1, 7] = RIGHT, RIGHT, UP  # the first is under the agent
    plain, picture = board_image(board), plan_image(board, plan)
    drawn = (picture != plain).any(-1)
    cells = drawn.reshape(10, 24, 10, 24).any((1, 3))
    assert np.argwhere(cells).tolist() == [[1, 5], [1, 7]]
    dark = (picture == (20, 40, 70)).all(-1)
    right, up = dark[24:48, 120:144], dark[24:48, 168:192]
    assert right[:, :12].sum() > right[:, 12:].sum() > 0
    assert up[12:].sum() > up[:12].sum() > 0
    truth = np.where(plan == UP, UP, LEFT)
    judged = plan_image(board, plan, truth)
    assert np.array_equal(judged[24:48, 168:192], picture[24:48, 168:192])
    assert (judged[24:48, 120:144] != picture[24:48, 120:144]).any()


def test_a_gif_of_a_long_game_in_which_nothing_moves_is_written(tmp_path):
    """Pillow adds up the durations of equal frames, up to 655 s."""
    frames = 10_001 * [np.zeros((10, 10, 3), np.uint8)]
    sokoban.save_gif(frames, str(tmp_path / 'game.gif'), ms=250)
    with Image.open(tmp_path / 'game.gif') as gif:
        assert 600_000 < gif.info['duration'] < 655_360
