"""Compare the two starting scales of the recurrent model, b = 1 and b = sqrt(E).

Each folder on the command line, such as out/init_b/sqrt_experts/r1_s2 (its parent names the
scale), is evaluated on 524,288 bytes in streams of 4,096, as in the study of depth, and gets a line
in losses.json: {scale/r<layers>_s<seed>: mean loss in nats per byte}. Then the losses and the
differences, paired by seed, are printed.

    PYTHONPATH=.:results/cpu-intel-xeon/study_lm python \
        results/cpu-amd-epyc/study_init_b/compare.py out/init_b/*/*
"""

import sys
from pathlib import Path

import by_position
import figures
from configurator import read_json, write_json

FILE = Path(__file__).with_name('losses.json')
SEEDS = (2, 3, 4)


def show(values: list[float]) -> str:
    """Return mean and standard error."""
    (mean, error, n) = figures.with_standard_errors({0: figures.summarize(values)})[0]
    return f'{mean:.4f} ± {error:.4f} ({n} seeds)'


def main() -> None:
    losses = read_json(FILE)
    for folder in sys.argv[1:]:
        name, by_end = by_position.evaluate(folder)
        scale = Path(folder).absolute().parent.name
        run = name.partition('/')[2]
        losses[f'{scale}/{run}'] = round(by_position.mean_loss(by_end, 0, by_position.ENDS[-1]), 4)
        write_json(dict(sorted(losses.items())), FILE)
    for L in (1, 2):
        one = [losses[f'one/r{L}_s{seed}'] for seed in SEEDS]
        larger = [losses[f'sqrt_experts/r{L}_s{seed}'] for seed in SEEDS]
        differences = [b - a for a, b in zip(one, larger, strict=True)]
        print(f'L = {L}: b = 1 {show(one)}, b = sqrt(E) {show(larger)}')
        print(f'    b = sqrt(E) minus b = 1: {show(differences)}')


if __name__ == '__main__':
    main()
