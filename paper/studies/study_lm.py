"""Study: which depth is best for a small language model, with and without recurrence.

Goal: the paper's question at 430,000 parameters: L = 1 to 16 layers at one budget (16 experts of
width 48), 7.05M bytes, each L with its own learning rate. Seed 1 tries the rate that was the best,
half of it and twice as much; three further seeds at the best rate are reported. Expected: the best
L is 2 or 4 with recurrence and 8 without (paper/results/README.md). Hardware and time: CPU cores,
60 runs of 4 to 25 minutes of one core each.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python -m paper.sweep study-lm --run --workers=2 -- --threads=1

Shorter, 1.7 MB: `-- --max_iters=168 --warmup_iters=17 --eval_interval=21`. The other residual rule:
`--vary=residual=shared --only="not recurrent and n_layer in (2, 4, 8)"`. If another rate is the
best on your machine: `--vary=learning_rate=0.02 --vary=seed=1,2,3,4 --only="n_layer == 4"`.
"""

from paper.plans import Plan, equal_work, grid

# {recurrent: {L: the best learning rate of Muon}}; with one for all, it would decide the order
RATES = {
    True: {1: 0.16, 2: 0.08, 4: 0.08, 8: 0.04, 16: 0.02},
    False: {1: 0.04, 2: 0.08, 4: 0.04, 8: 0.04, 16: 0.04},
}
CONFIGS = {True: 'config/tiny_lm.py', False: 'config/tiny_nonrecurrent.py'}
BYTES = {'max_iters': 688, 'warmup_iters': 70, 'eval_interval': 86}  # 7.05M

PLAN = Plan(
    'Study: depth of language models',
    [
        run
        for recurrent, config in CONFIGS.items()
        for L, best in RATES[recurrent].items()
        for rates, seeds in (([best / 2, best, 2 * best], [1]), ([best], [2, 3, 4]))
        for run in grid(
            'train_lm.py',
            config,
            cells=equal_work(16, [L]),
            recurrent=[recurrent],
            learning_rate=rates,
            seed=seeds,
            **BYTES,
        )
    ],
)
