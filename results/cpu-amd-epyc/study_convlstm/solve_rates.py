"""Print returns and solve rates of the ConvLSTM study by depth, and the best depths by each.

PYTHONPATH=. python results/cpu-amd-epyc/study_convlstm/solve_rates.py
"""

from pathlib import Path

import figures
import sweep
from configurator import read_json
from figures import Row

FOLDER = Path(__file__).with_name('sokoban-eight')


def last_return(log: list[dict]) -> float:
    """Return the mean return of the last five log lines, with sampled actions."""
    return figures.run_value(log)


def solved_in_training(log: list[dict]) -> float:
    """Return the share of the last 1,000 training games that was solved, with sampled actions."""
    return log[-1]['solve_rate_1000']


def solved_greedily(log: list[dict]) -> float:
    """Return the share of 1,000 evaluation levels that was solved, with greedy actions."""
    return log[-1]['eval_solve_rate']


def read_runs() -> list[tuple[Row, list[dict]]]:
    runs = []
    for path in sorted(FOLDER.glob('*/config.json')):
        c = read_json(path)
        sizes = c['n_layer'], c['n_expert'], c['n_embd']
        row = Row(c['arch'], c['recurrent'], 'eight', *sizes, seed=c['seed'])
        runs.append((row, figures.read_log(path.parent)))
    return runs


def main() -> None:
    runs = read_runs()
    for measure in (last_return, solved_in_training, solved_greedily):
        print(measure.__doc__.splitlines()[0])
        # as logs of one line, because a run's value is the mean of its last returns
        values = [(row, [{'episodic_return': measure(log)}]) for row, log in runs]
        points = figures.with_standard_errors(figures.summarize_cells(values))
        for row, (value, error, n) in sorted(points.items()):
            print(f'{row.variant}, L = {row.L}: {value:.3f} +- {error:.3f}, {n} seeds')
        print(sweep.best_depths(values), end='\n\n')


if __name__ == '__main__':
    main()
