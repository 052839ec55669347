"""Study: how the experts of a recurrent language model are aggregated.

Goal: the four aggregations at L = 2, each at its own learning rate: seed 1 chooses it, three other
seeds are reported. Expected: differences of about 0.01 nats per byte; the plain mean is the best
(paper/results/README.md). Hardware and time: two CPU cores, 32 runs of about four minutes.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python -m paper.sweep study-aggregation --run --workers=2 -- --threads=1
"""

from paper.plans import AGGREGATIONS, Plan, grid

PLAN = Plan(
    'Study: aggregation',
    grid(
        'train_lm.py',
        'config/tiny_lm.py',
        aggregation=AGGREGATIONS,
        learning_rate=[0.04, 0.08],  # the best two of four for sqrt_sum (study_lm.py)
        seed=[1, 2, 3, 4],
    ),
)
