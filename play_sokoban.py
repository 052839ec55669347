"""
What Sokoban agents can do: `play` levels greedily, `report` the solve rate with two games as GIFs, draw learning curves. train_sokoban.py
calls these (`--eval_only=True --levels=unfiltered-test` evaluates, `--plot=True` draws); as a script, this draws runs beside each other:

$ python play_sokoban.py --runs=out/sokoban_small_L4,out/sokoban_small_ff_L4 --picture=compare.png

Shape letters as in sokoban.py and convlstm.py: N boards at a time, n levels.
"""

import contextlib
import json
import os
import time

from configurator import (
    configure,
    every,
    fail,
    run_script,
    write_atomic,
    write_json,
)  # before torch: how threads wait, what ctrl-C does

import numpy as np
import torch
import torch.distributed as dist

from checkpoint import device_name, print0
from convlstm import Agent
from figures import read_log
from sokoban import TIME_LIMIT, SokobanEnv, draw, save_gif

# -----------------------------------------------------------------------------
# fmt: off
runs = ''                      # folders of runs, with a comma between them
picture = 'compare.png'        # what to draw into
# fmt: on
# -----------------------------------------------------------------------------

BOARDS = 256  # played at a time


@torch.no_grad()
def play(
    model: Agent, levels: np.ndarray, device: str, seed: int | None = None, number: int = 0
) -> dict[str, torch.Tensor]:
    """Each of the packed levels (n, 17) once, at most 120 steps: greedily, or with a seed at random. -> solved, return, steps (n,) and the
    actions (n, 120), on the CPU. number: of the first level, where ranks share them (chance depends on it)."""
    n, parts, due = len(levels), [], every()
    for first in range(0, n, BOARDS):
        N = min(BOARDS, n)  # the last batch is filled up, so that no shape is new
        env = SokobanEnv(levels[(first + np.arange(N)) % n], N, device=device, order='sequence')
        state, start = model.init_state(N), torch.ones(N, dtype=torch.bool, device=device)
        w, alive, actions = model.prepare(), torch.ones_like(start), []
        total, steps, won = (
            torch.zeros(N, device=device),
            torch.zeros(N, device=device),
            torch.zeros_like(start),
        )
        for t in range(TIME_LIMIT):
            if seed is None:
                logits, _, state = model.act(w, env.observe(), start, state)
                action = logits.argmax(-1)
            else:
                action = (
                    draw(seed, 2, env.board + (number + first), torch.tensor(t, device=device)) % 4
                )
            reward, start, solved = env.step(action)  # ended boards play on, and do not count
            total += reward * alive
            steps += alive
            won |= solved & alive
            alive &= ~start
            actions.append(action)
            if due():
                print0(f'    {first:,} of {n:,} levels played, and {t + 1} steps of the next {N}')
        result = {
            'solved': won,
            'return': total,
            'steps': steps,
            'actions': torch.stack(actions, 1).to(torch.int8),
        }
        parts.append({k: v[: n - first].cpu() for k, v in result.items()})
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def evaluate(
    model: Agent, levels: np.ndarray, device: str, seed: int | None = None
) -> dict[str, float]:
    """Means over the levels, shared by the ranks."""
    ranks = dist.is_initialized()
    mine = np.array_split(np.arange(len(levels)), dist.get_world_size() if ranks else 1)[
        dist.get_rank() if ranks else 0
    ]
    result = play(model, levels[mine], device, seed, int(mine[0]))
    total = torch.stack([result[k].double().sum() for k in ('solved', 'return', 'steps')]).to(
        device
    )
    if ranks:
        dist.all_reduce(total)
    return dict(zip(('solve_rate', 'return', 'steps'), (total / len(levels)).tolist(), strict=True))


def report(
    model: Agent, levels: np.ndarray, name: str, device: str, out_dir: str, about: dict
) -> dict:
    """Plays all levels, greedily; writes out_dir/eval_NAME.json, and as GIFs the longest game that was won and the first that was not."""
    begin = time.time()
    result = play(model, levels, device)
    record = {
        **about,
        'n': len(levels),
        'solve_rate': result['solved'].float().mean().item(),
        'mean_return': result['return'].mean().item(),
        'mean_steps': result['steps'].mean().item(),
        'seconds': time.time() - begin,
        'device': device_name(device),
        'torch': torch.__version__,
    }
    for label, chosen in (('solved', result['solved']), ('failed', ~result['solved'])):
        path = os.path.join(out_dir, f'eval_{name}_{label}.gif')
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)  # of an earlier evaluation
        if not chosen.any():
            continue
        index = int((chosen * result['steps']).argmax())  # all that fail last 120 steps
        env = SokobanEnv(levels[index : index + 1], 1, order='sequence')
        frames = [env.observe()[0].numpy()]
        for action in result['actions'][index, : int(result['steps'][index])].long():
            env.move(action[None])  # a step without the reset: the last frame is the game's end
            frames.append(env.observe()[0].numpy())
        record[f'{label}_level'] = index
        save_gif(frames, path)
    write_json(record, os.path.join(out_dir, f'eval_{name}.json'))
    return record


def plot_log(out_dir: str, title: str) -> str:
    """Return and solve rate over environment steps, from out_dir/log.jsonl into out_dir/curve.png."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    records = read_log(out_dir)
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout='constrained')
    for axes, trained, evaluated, label in (
        (panels[0], 'return_1000', 'eval_return', 'mean episodic return'),
        (panels[1], 'solve_rate_1000', 'eval_solve_rate', 'levels solved'),
    ):
        for key, name, style in (
            (trained, 'training, last 1,000 games', {'lw': 1.5, 'color': '#0072B2'}),
            (evaluated, 'held-out levels, greedy', {'marker': 'o', 'ms': 4, 'color': '#D55E00'}),
        ):
            points = [(r['env_steps'] / 1e6, r[key]) for r in records if r.get(key) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, **style)
        if (
            level := records[0].get(evaluated.replace('eval', 'random'))
        ) is not None:  # of a log from the start
            axes.axhline(level, color='gray', ls='--', lw=1, label='held-out levels, random')
        axes.set(xlabel='environment steps (millions)', ylabel=label)
        axes.grid(alpha=0.3)
    panels[1].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    path = os.path.join(out_dir, 'curve.png')
    write_atomic(path, lambda file: figure.savefig(file, dpi=160, format='png'))
    return path


def compare(folders: list[str], path: str) -> None:
    """Return and explained variance over environment steps, up to where all runs have come. OSError, ValueError: a folder without a run."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    logs, labels = [read_log(folder) for folder in folders], []
    for folder in folders:
        with open(os.path.join(folder, 'config.json')) as f:
            c = json.load(f)
        labels.append(
            f'{"recurrent" if c["recurrent"] else "not recurrent"} {c["arch"]}, L = {c["n_layer"]}, E = {c["n_expert"]}, d = {c["n_embd"]}'
        )
    end = min(log[-1]['env_steps'] for log in logs)
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout='constrained')
    for axes, key, label in (
        (panels[0], 'return_1000', 'return, mean of the last 1,000 games'),
        (panels[1], 'explained_variance', 'explained variance of the value'),
    ):
        for log, name in zip(logs, labels, strict=True):
            points = [
                (r['env_steps'] / 1e6, r[key])
                for r in log
                if r.get(key) is not None and r['env_steps'] <= end
            ]
            axes.plot(*zip(*points, strict=True), lw=1.5, label=name)
        axes.set(xlabel='environment steps (millions)', ylabel=label)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    write_atomic(path, lambda file: figure.savefig(file, dpi=160, format='png'))


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
