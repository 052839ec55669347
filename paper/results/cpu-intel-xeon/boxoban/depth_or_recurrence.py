"""Draw depth_or_recurrence.png, the training curves of six agents, and print the return and the
solve rate of each in its last million steps.

    PYTHONPATH=. python results/cpu-intel-xeon/boxoban/depth_or_recurrence.py
"""

from pathlib import Path

import figures

XEON = Path(__file__).parent
EPYC = XEON.parents[1] / 'cpu-amd-epyc/boxoban'
STYLES = {'recurrent': '-', 'non-recurrent': '--'}
# {sizes: (folder of the recurrent agent, of the non-recurrent one)}. The first two cost the same.
RUNS = {
    'L = 4, E = 1': (XEON / 'convglu_L4_easy_first', XEON / 'convglu_L4_nonrecurrent_easy_first'),
    'L = 1, E = 4': (
        EPYC / 'convglu_L1_E4_easy_first',
        EPYC / 'convglu_L1_E4_nonrecurrent_easy_first',
    ),
    'L = 1, E = 1': (EPYC / 'convglu_L1_easy_first', XEON / 'convglu_L1_nonrecurrent_easy_first'),
}
CURVES = {'return_1000': 'return, last 1,000 games', 'solve_rate_1000': 'solved, last 1,000 games'}
LAST = 9_000_000  # the records after this number of environment steps are summarized


def summarize(log: list[dict]) -> str:
    """Return as text mean return, mean solve rate and number of games after LAST steps."""
    last = [record for record in log if record.get('env_steps', 0) > LAST]
    score, solved = (sum(record[key] for record in last) / len(last) for key in CURVES)
    games = sum(record['episodes'] for record in last)
    return f'{score:.2f}, {solved:.1%}, {games:,} games'


def main() -> None:
    figure, panels = figures.new_figure(len(CURVES), sharey=False)
    for i, (sizes, folders) in enumerate(RUNS.items()):
        for (kind, style), folder in zip(STYLES.items(), folders, strict=True):
            log = figures.read_log(folder)
            label = f'{sizes}, {kind}'
            for axes, key in zip(panels, CURVES, strict=True):
                color = figures.COLORS[i]
                figures.draw_curve(axes, log, 'env_steps', key, label, color=color, ls=style, lw=1)
            print(f'{label}: {summarize(log)}')
    for axes, ylabel in zip(panels, CURVES.values(), strict=True):
        axes.set(xlabel='environment steps (millions)', ylabel=ylabel)
    figures.percent_axis(panels[1].yaxis)
    title = 'ConvGLU on unfiltered-train, initialized from easy levels; sampled actions'
    figures.finish_figure(figure, title)
    print(*figures.save_figure(figure, str(XEON), 'depth_or_recurrence', ('png',)))


if __name__ == '__main__':
    main()
