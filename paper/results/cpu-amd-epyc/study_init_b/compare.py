"""Compare the two starting scales of the recurrent model, b = 1 and b = sqrt(E).

Each folder on the command line, such as out/init_b/sqrt_experts/r1_s2 (its parent names the
scale), is evaluated on 524,288 bytes in streams of 4,096, as in the study of depth, and gets a line
in losses.json: {scale/r<layers>_s<seed>: mean loss in nats per byte}. Then the mean losses and the
differences, paired by seed, are printed.

    PYTHONPATH=.:results/cpu-intel-xeon/study_lm python \
        results/cpu-amd-epyc/study_init_b/compare.py out/init_b/*/*
"""

import sys
from pathlib import Path
from statistics import mean

import by_position
import lengths
from configurator import read_json, write_json

FILE = Path(__file__).with_name('losses.json')
SEEDS = (2, 3, 4)


def main() -> None:
    losses = read_json(FILE)
    for folder in sys.argv[1:]:
        name, by_end = by_position.evaluate(folder)
        scale = Path(folder).absolute().parent.name
        run = name.partition('/')[2]
        losses[f'{scale}/{run}'] = round(by_position.mean_loss(by_end, 0, by_position.ENDS[-1]), 4)
        write_json(dict(sorted(losses.items())), FILE)
    for L in (1, 2):
        by_scale = {
            scale: {seed: losses[f'{scale}/r{L}_s{seed}'] for seed in SEEDS}
            for scale in ('one', 'sqrt_experts')
        }
        for scale, by_seed in by_scale.items():
            print(f'L = {L}, init_b = {scale}: {mean(by_seed.values()):.4f}')
        value, error, n = lengths.difference(by_scale['sqrt_experts'], by_scale['one'])
        print(f'L = {L}, sqrt_experts - one: {value:.4f} +- {error:.4f}, {n} seeds')


if __name__ == '__main__':
    main()
