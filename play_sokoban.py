"""
What Sokoban agents can do: `play` levels greedily, `report` the solve rate with two games as GIFs,
draw learning curves. train_sokoban.py calls these (`--eval_only=True --levels=unfiltered-test`
evaluates, `--plot=True` draws); as a script, this draws runs beside each other:

$ python play_sokoban.py --runs=out/sokoban_small_L4,out/sokoban_small_ff_L4 --picture=compare.png

Shape letters as in sokoban.py and convlstm.py: N boards at a time, n levels.
"""

import contextlib
import json
import os
import time
from functools import partial

# before torch: how threads wait, what ctrl-C does
from configurator import configure, every, fail, run_script, write_atomic, write_json

import numpy as np
import torch
import torch.distributed as dist

from checkpoint import device_name, print0
from convlstm import Agent
from figures import COLORS, NAMES, curve, finish, new, read_log, save
from sokoban import TIME_LIMIT, SokobanEnv, board_keys, draw_by, save_gif

# -----------------------------------------------------------------------------
# fmt: off
runs = ''                      # folders of runs, with a comma between them
picture = 'compare.png'        # what to draw into
# fmt: on
# -----------------------------------------------------------------------------

BOARDS = 256  # played at a time
STEPS = 'environment steps (millions)'


@torch.no_grad()
def play(
    model: Agent, levels: np.ndarray, device: str, seed: int | None = None, number: int = 0
) -> dict[str, torch.Tensor]:
    """Each of the packed levels (n, 17) once, for at most 120 steps: greedily, or with a seed at
    random. -> solved, return, steps (n,) and the actions (n, 120), 0 after a game's end, on the
    CPU. number: of the first level, where ranks share them (chance depends on it)."""
    n, parts, due = len(levels), [], every()
    for first in range(0, n, BOARDS):
        N = min(BOARDS, n)  # the last batch is filled up, so that no shape is new
        env = SokobanEnv(levels[(first + np.arange(N)) % n], N, device=device, order='sequence')
        w, state = model.prepare(), model.init_state(N)
        start = alive = torch.ones(N, dtype=torch.bool, device=device)
        won = ~start
        total, steps = torch.zeros(2, N, device=device)
        actions = torch.zeros(N, TIME_LIMIT, dtype=torch.int8, device=device)
        for t in range(TIME_LIMIT):
            if seed is None:
                logits, _, state = model.act(w, env.observe(), start, state)
                action = logits.argmax(-1)
            else:
                action = draw_by(board_keys(seed, 2, env.board + number + first), env.steps) % 4
            actions[:, t] = action * alive
            reward, start, solved = env.step(action)  # ended boards play on, and do not count
            total += reward * alive
            steps += alive
            won = won | solved & alive
            alive = alive & ~start
            if due():
                print0(f'    {first:,} of {n:,} levels played, and {t + 1} steps of the next {N}')
            if not alive.any():
                break
        result = {'solved': won, 'return': total, 'steps': steps, 'actions': actions}
        parts.append({k: v[: n - first].cpu() for k, v in result.items()})
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def evaluate(
    model: Agent, levels: np.ndarray, device: str, seed: int | None = None
) -> dict[str, float]:
    """Means over the levels, shared by the ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = np.array_split(np.arange(len(levels)), world)[rank]
    result = play(model, levels[mine], device, seed, int(mine[0]))
    sums = [result[k].double().sum() for k in ('solved', 'return', 'steps')]
    total = torch.stack(sums).to(device)
    if world > 1:
        dist.all_reduce(total)
    return dict(zip(('solve_rate', 'return', 'steps'), (total / len(levels)).tolist(), strict=True))


def replay(levels: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Levels (n, 17) and actions (n, T) -> observations (n, T + 1, 10, 10, 2) before, between and
    after them, without resets: a game's last one is its end."""
    env = SokobanEnv(levels, len(levels), order='sequence')
    boards = [env.observe().numpy()]
    for action in actions.T:
        env.move(torch.from_numpy(action.astype(np.int64)))
        boards.append(env.observe().numpy())
    return np.stack(boards, 1)


def report(
    model: Agent, levels: np.ndarray, name: str, device: str, out_dir: str, about: dict
) -> dict:
    """Plays all levels, greedily; writes out_dir/eval_NAME.json, and as GIFs the longest game that
    was won and the first that was not."""
    begin = time.time()
    result = play(model, levels, device)
    record = {**about, 'n': len(levels), 'solve_rate': result['solved'].float().mean().item()}
    record |= {f'mean_{k}': result[k].mean().item() for k in ('return', 'steps')}
    record |= {'seconds': time.time() - begin, 'device': device_name(device)}
    record['torch'] = torch.__version__
    for label, chosen in (('solved', result['solved']), ('failed', ~result['solved'])):
        path = os.path.join(out_dir, f'eval_{name}_{label}.gif')
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)  # of an earlier evaluation
        if chosen.any():
            i = int((chosen * result['steps']).argmax())  # all that fail last 120 steps
            actions = result['actions'][i : i + 1, : int(result['steps'][i])].numpy()
            save_gif(list(replay(levels[i : i + 1], actions)[0]), path)
            record[f'{label}_level'] = i
    write_json(record, os.path.join(out_dir, f'eval_{name}.json'))
    return record


def plot_log(out_dir: str, title: str) -> str:
    """Return and solve rate over environment steps, from out_dir/log.jsonl into curve.png."""
    log, (figure, panels) = read_log(out_dir), new(2, 3.2, sharey=False)
    trained = {'label': 'training, last 1,000 games', 'color': COLORS[0]}
    held_out = {'label': 'held-out levels, greedy', 'color': COLORS[1], 'marker': 'o', 'ms': 4}
    labels = {'return': 'mean episodic return', 'solve_rate': 'levels solved'}
    for axes, (key, label) in zip(panels, labels.items(), strict=True):
        curve(axes, log, 'env_steps', f'{key}_1000', **trained)
        curve(axes, log, 'env_steps', f'eval_{key}', **held_out)
        if (level := log[0].get(f'random_{key}')) is not None:  # of a log from the start
            axes.axhline(level, color='gray', ls='--', lw=1, label='held-out levels, random')
        axes.set(xlabel=STEPS, ylabel=label)
    panels[1].yaxis.set_major_formatter('{x:.0%}')
    return save(finish(figure, title), out_dir, 'curve', ('png',))[0]


def compare(folders: list[str], path: str) -> None:
    """Return and explained variance over environment steps, up to where all runs have come.
    OSError, ValueError: a folder without a run."""
    logs, (figure, panels) = [read_log(folder) for folder in folders], new(2, 3.2, sharey=False)
    end = min(log[-1]['env_steps'] for log in logs)
    for i, (folder, log) in enumerate(zip(folders, logs, strict=True)):
        with open(os.path.join(folder, 'config.json')) as f:
            c = json.load(f)
        arch = NAMES[c.get('arch') or c['kind']]  # as older runs say
        name = f'{folder}: {arch}, {"recurrent" if c["recurrent"] else "feedforward"}'
        name += f', L = {c["n_layer"]}, E = {c["n_expert"]}, d = {c["n_embd"]}'
        shared = [r for r in log if r['env_steps'] <= end]
        curve(panels[0], shared, 'env_steps', 'return_1000', name, color=COLORS[i % 7])
        curve(panels[1], shared, 'env_steps', 'explained_variance', name, color=COLORS[i % 7])
    panels[0].set(xlabel=STEPS, ylabel='return, mean of the last 1,000 games')
    panels[1].set(xlabel=STEPS, ylabel='explained variance of the value')
    write_atomic(path, partial(finish(figure, '').savefig, dpi=160, format='png'))


def main() -> None:
    configure(globals(), quiet=True)
    if not runs:
        fail('runs is empty: name folders of runs, --runs=out/a,out/b')
    try:
        compare(runs.split(','), picture)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        fail(f'runs = {runs!r}: no comparison of these ({type(error).__name__}: {error})')
    print(picture)


if __name__ == '__main__':
    run_script(main)
