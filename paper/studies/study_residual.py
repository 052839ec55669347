"""Study: the residual rule of a non-recurrent language model of several experts.

Goal: each expert with a residual of its own (the paper's rule) against one shared residual, at L =
2, each at its own learning rate: seed 1 chooses it, three other seeds are reported. Hardware and
time: two CPU cores, 16 runs of about four minutes. Other depths, longer: see study_lm.py.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python -m paper.sweep study-residual --run --workers=2 -- --threads=1
"""

from paper.plans import RESIDUALS, Plan, grid

PLAN = Plan(
    'Study: residual rule',
    grid(
        'train_lm.py',
        'config/tiny_nonrecurrent.py',
        residual=list(RESIDUALS),
        learning_rate=[0.04, 0.08],  # the best two of four for 'expert' (study_lm.py)
        seed=[1, 2, 3, 4],
    ),
)
