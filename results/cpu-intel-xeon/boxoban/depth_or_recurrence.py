"""Draws depth_or_recurrence.png: six agents' training beside each other; prints what each solves in
the last million steps of it.
PYTHONPATH=. python results/cpu-intel-xeon/boxoban/depth_or_recurrence.py"""

from pathlib import Path

import figures

INTEL = Path(__file__).parent
AMD = INTEL.parents[1] / 'cpu-amd-epyc/boxoban'
KINDS = {'recurrent': '-', 'not recurrent': '--'}
# one folder a kind; the first two sizes cost the same
RUNS = {
    'L = 4, E = 1': (INTEL / 'convglu_L4_easy_first', INTEL / 'convglu_L4_ff_easy_first'),
    'L = 1, E = 4': (AMD / 'convglu_L1_E4_easy_first', AMD / 'convglu_L1_E4_ff_easy_first'),
    'L = 1, E = 1': (AMD / 'convglu_L1_easy_first', INTEL / 'convglu_L1_ff_easy_first'),
}
SHOWN = {'return_1000': 'return, last 1,000 games', 'solve_rate_1000': 'solved, last 1,000 games'}
LAST = 9_000_000  # environment steps


def in_the_end(log: list[dict]) -> str:
    """Means of SHOWN, which are over 1,000 games themselves, and the number of games."""
    last = [r for r in log if r.get('env_steps', 0) > LAST]
    values = [sum(r[key] for r in last) / len(last) for key in SHOWN]
    return '{:.2f}, {:.1%}, {:,} games'.format(*values, sum(r['episodes'] for r in last))


def main() -> None:
    figure, panels = figures.new(len(SHOWN), sharey=False)
    for i, (sizes, pair) in enumerate(RUNS.items()):
        for (kind, style), folder in zip(KINDS.items(), pair, strict=True):
            log, look = figures.read_log(folder), {'color': figures.COLORS[i], 'ls': style, 'lw': 1}
            for axes, key in zip(panels, SHOWN, strict=True):
                figures.curve(axes, log, 'env_steps', key, f'{sizes}, {kind}', **look)
            print(f'{sizes}, {kind}: {in_the_end(log)}')
    for axes, ylabel in zip(panels, SHOWN.values(), strict=True):
        axes.set(xlabel='million environment steps', ylabel=ylabel)
    figures.finish(figure, 'ConvGLU on unfiltered-train, begun on easy levels; moves are drawn')
    print(*figures.save(figure, str(INTEL), 'depth_or_recurrence', ('png',)))


if __name__ == '__main__':
    main()
