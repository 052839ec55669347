"""Draw architecture.svg: the recurrent model over two steps, and one of its layers.

    python paper/results/architecture.py

The drawing stands on a light card, so that it reads on white and on dark pages; its colors are
Okabe and Ito's, which color-blind readers can tell apart.
"""

from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

SVG = Path(__file__).with_suffix('.svg')
INK, CARD, LAYER = '#24292f', '#f6f8fa', '#dde3ea'
BLUE, ORANGE, GREEN = '#0072B2', '#D55E00', '#009E73'


def box(x, y, width, height, label, color, ink='white', size=9, zorder=3):
    """Draw a rounded box with its lower left corner at (x, y)."""
    style = 'round,pad=0,rounding_size=0.07'
    patch = FancyBboxPatch((x, y), width, height, style, fc=color, ec='none', zorder=zorder)
    plt.gca().add_patch(patch)
    center = {'ha': 'center', 'va': 'center', 'zorder': zorder + 1}
    plt.text(x + width / 2, y + height / 2, label, color=ink, size=size, **center)


def arrow(*points, color=INK, width=1.2, style='-'):
    """Draw an arrow along straight lines between points (x, y)."""
    plt.plot(*zip(*points[:-1], strict=True), color=color, lw=width, ls=style, zorder=2)
    line = {'color': color, 'lw': width, 'ls': style, 'shrinkA': 0, 'shrinkB': 0, 'zorder': 2}
    head = FancyArrowPatch(*points[-2:], arrowstyle='-|>', mutation_scale=7 + 3 * width, **line)
    plt.gca().add_patch(head)


def text(x, y, label, size=9, color=INK, **keywords):
    """Write a label, by default centered at (x, y)."""
    keywords = {'ha': 'center', 'va': 'center'} | keywords
    plt.text(x, y, label, color=color, size=size, **keywords)


def draw_step(x, name):
    """Draw one step from the embedding z to the logits, with three layers of three experts."""
    text(x + 0.15, 0.42, f'$z_{{{name}}}$', 11)
    plt.plot([x + 0.15, x + 0.15], [0.62, 3.27], color=INK, lw=1.2, zorder=1)
    for y, label in ((1.05, 'layer 1'), (2.0, 'layer 2'), (2.95, 'layer L')):
        box(x + 0.45, y, 1.9, 0.64, '', LAYER, zorder=1)
        for i in range(3):
            box(x + 0.55 + 0.6 * i, y + 0.1, 0.5, 0.44, '', BLUE)
        arrow((x + 0.15, y + 0.32), (x + 0.45, y + 0.32))
        text(x + 2.3, y + 0.75, label, 7.5, ha='right')
    arrow((x + 1.4, 1.69), (x + 1.4, 2.0))
    text(x + 1.4, 2.8, r'$\cdots$', 11, rotation=90)
    arrow((x + 1.4, 3.59), (x + 1.4, 4.05))
    text(x + 1.4, 4.2, f'logits of step ${name}$', 9)


def draw_layer(x):
    """Draw one layer, with its input, experts, cache of keys and values, and aggregation."""
    text(x + 2.3, 4.55, 'one layer: E experts in parallel', 10, weight='bold')
    arrow((x + 1.75, 0.6), (x + 2.2, 0.95))
    arrow((x + 2.9, 0.6), (x + 2.45, 0.95))
    text(x + 1.6, 0.42, '$s_{l-1}$', 11)
    text(x + 3.05, 0.42, '$z$', 11)
    box(x + 1.35, 0.95, 2.0, 0.36, '$u = a\\, s_{l-1} + b\\, z$', LAYER, INK, 10)
    for i, label in enumerate(('1', '2', 'E')):
        left = x + 1.1 + 0.95 * i
        arrow((x + 2.35, 1.31), (left + 0.375, 1.72))
        box(left, 1.72, 0.75, 1.38, '', BLUE)
        text(left + 0.375, 2.86, f'expert {label}', 7.5, 'white', zorder=5)
        box(left + 0.07, 1.81, 0.61, 0.37, 'attend', 'white', INK, 8, zorder=5)
        box(left + 0.07, 2.27, 0.61, 0.37, 'FFN', 'white', INK, 8, zorder=5)
        arrow((left + 0.375, 3.1), (x + 2.35, 3.5))
    text(x + 2.9, 2.4, '...', 10)
    box(x, 1.7, 0.78, 0.6, 'keys, values\nlast W steps', GREEN, 'white', 6.4)
    arrow((x + 1.35, 1.13), (x + 0.39, 1.13), (x + 0.39, 1.7), color=GREEN, width=1.6)
    arrow((x + 0.78, 2.0), (x + 1.1, 2.0), color=GREEN, width=1.6)
    text(x + 0.39, 2.5, 'one cache\nfor all experts', 7)
    box(x + 1.35, 3.5, 2.0, 0.36, r'$s_l = \Sigma_i\, h_i\, /\, \sqrt{E}$', LAYER, INK, 10)
    arrow((x + 2.35, 3.86), (x + 2.35, 4.25))


def main() -> None:
    plt.rcParams |= {'svg.hashsalt': 'architecture', 'mathtext.fontset': 'cm'}
    figure = plt.figure(figsize=(10.4, 4.9))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10.4), ylim=(0, 4.9))
    axes.axis('off')
    box(0.03, 0.03, 10.34, 4.84, '', CARD, zorder=0)
    draw_step(0.2, 't')
    draw_step(3.15, 't+1')
    text(
        2.85, 4.55, 'recurrent: the last state of a step starts the next', 10, ORANGE, weight='bold'
    )
    feedback = {'color': ORANGE, 'width': 2.4}
    arrow((0.6, 0.75), (1.6, 0.75), (1.6, 1.05), **feedback)
    arrow((1.6, 3.92), (2.85, 3.92), (2.85, 0.75), (4.55, 0.75), (4.55, 1.05), **feedback)
    arrow((4.55, 3.92), (5.75, 3.92), **feedback)
    draw_layer(6.1)
    figure.savefig(SVG, transparent=True, metadata={'Date': None})
    print(SVG)


if __name__ == '__main__':
    main()
