"""Print the returns and solve rates of config/study_convlstm.py for each depth, and the best depth
by each measure.

    PYTHONPATH=. python results/cpu-amd-epyc/study_convlstm/solve_rates.py
"""

from pathlib import Path

import figures
import sweep
from configurator import read_json
from figures import Row

FOLDER = Path(__file__).with_name('sokoban-eight')

# {name: function of a run's log}. The first is the value that the rule of the study names.
MEASURES = {
    'mean return of the last five log lines, sampled actions': figures.run_value,
    'solved, last 1,000 training games, sampled actions': lambda log: log[-1]['solve_rate_1000'],
    'solved, 1,000 evaluation levels, greedy actions': lambda log: log[-1]['eval_solve_rate'],
}


def read_runs() -> list[tuple[Row, list[dict]]]:
    """Return the runs of the study and their logs."""
    runs = []
    for path in sorted(FOLDER.glob('*/config.json')):
        c = read_json(path)
        sizes = c['n_layer'], c['n_expert'], c['n_embd']
        row = Row(c['arch'], c['recurrent'], 'eight', *sizes, seed=c['seed'])
        runs.append((row, figures.read_log(path.parent)))
    return runs


def main() -> None:
    runs = read_runs()
    for name, measure in MEASURES.items():
        print(name)
        # as logs of one line, because best_depths and summarize_cells read the returns of a log
        values = [(row, [{'episodic_return': measure(log)}]) for row, log in runs]
        points = figures.with_standard_errors(figures.summarize_cells(values))
        for row, (value, error, n) in sorted(points.items()):
            print(f'{row.variant}, L = {row.L}: {value:.3f} +- {error:.3f}, {n} seeds')
        print(sweep.best_depths(values), end='\n\n')


if __name__ == '__main__':
    main()
