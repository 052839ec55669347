"""Draws depth_or_recurrence.png: four agents' training beside each other.
PYTHONPATH=. python results/cpu-intel-xeon/boxoban/depth_or_recurrence.py"""

from pathlib import Path

import figures

HERE = Path(__file__).parent
RUNS = {
    'recurrent, L = 4': HERE / 'convglu_L4_easy_first',
    'recurrent, L = 1': HERE.parents[1] / 'cpu-amd-epyc/boxoban/convglu_L1_easy_first',
    'not recurrent, L = 4': HERE / 'convglu_L4_ff_easy_first',
    'not recurrent, L = 1': HERE / 'convglu_L1_ff_easy_first',
}
SHOWN = {'return_1000': 'return, last 1,000 games', 'solve_rate_1000': 'solved, last 1,000 games'}

if __name__ == '__main__':
    figure, panels = figures.new(len(SHOWN), sharey=False)
    for axes, (key, ylabel) in zip(panels, SHOWN.items(), strict=True):
        for label, folder in RUNS.items():
            figures.curve(axes, figures.read_log(folder), 'env_steps', key, label)
        axes.set(xlabel='million environment steps', ylabel=ylabel)
    figures.finish(figure, 'ConvGLU on unfiltered-train, begun on easy levels; moves are drawn')
    print(*figures.save(figure, str(HERE), 'depth_or_recurrence', ('png',)))
