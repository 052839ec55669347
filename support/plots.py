"""The pictures of one run that the trainers draw at their end: loss.png and curve.png."""

import io
import pathlib

from support.files import Path, write_atomic
from support.run_folder import log_of

TRAINING = {'color': '#4477aa', 'lw': 1, 'alpha': 0.7}
EVALUATION = {'color': '#cc6677', 'lw': 1.5, 'marker': 'o', 'ms': 3}


def draw(axes, log: list[dict], x: str, y: str, label: str, style: dict) -> None:
    """Draw the values of y in a log, if there are any, over x in millions."""
    points = [(r[x] / 1e6, r[y]) for r in log if r.get(x) is not None and r.get(y) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


def save(figure, folder: Path, name: str) -> None:
    """Write a figure, titled with its folder, as folder/name, and print its path."""
    title = str(folder).replace('$', r'\$')  # dollar signs would start a formula
    figure.suptitle(title, fontsize=10)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150)
    path = pathlib.Path(folder, name)
    write_atomic(path, lambda file: file.write(picture.getvalue()))
    print(f'picture: {path}')


def plot_losses(folder: Path, unit: str) -> None:
    """Draw the losses of a language model as folder/loss.png. unit: 'token' or 'byte'."""
    from matplotlib.figure import Figure  # only here, because few runs are drawn

    log = log_of(folder)
    figure = Figure(figsize=(6, 3.6), layout='constrained')
    axes = figure.subplots()
    draw(axes, log, 'tokens', 'train_loss', 'training', TRAINING)
    draw(axes, log, 'tokens', 'val_loss', 'validation', EVALUATION)
    axes.set(xlabel=f'training {unit}s (millions)', ylabel=f'loss (nats per {unit})')
    save(figure, folder, 'loss.png')


def plot_returns(folder: Path) -> None:
    """Draw the returns and the solve rates of an agent as folder/curve.png."""
    from matplotlib.figure import Figure

    log = log_of(folder)
    figure = Figure(figsize=(9, 3.6), layout='constrained')
    for axes, key in zip(figure.subplots(1, 2), ('return', 'solve_rate'), strict=True):
        training, evaluation = 'training, last 1,000 episodes', 'evaluation levels, greedy'
        draw(axes, log, 'env_steps', f'{key}_1000', training, TRAINING)
        draw(axes, log, 'env_steps', f'eval_{key}', evaluation, EVALUATION)
        if log and log[0].get(f'random_{key}') is not None:
            label = 'evaluation levels, random policy'
            axes.axhline(log[0][f'random_{key}'], color='gray', ls='--', lw=1, label=label)
        axes.set(xlabel='environment steps (millions)')
    figure.axes[0].set(ylabel='mean episodic return')
    figure.axes[1].set(ylabel='levels solved', ylim=(0, None))
    figure.axes[1].yaxis.set_major_formatter('{x:.0%}')
    save(figure, folder, 'curve.png')
