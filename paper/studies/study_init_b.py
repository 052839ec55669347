"""Study: the scale of the embedding in a recurrent language model of several experts.

Goal: all experts start equal, so s is sqrt(E) times as large as the embedding z at the start. Does
it help the wide, shallow models to start with b = sqrt(E) instead of 1? L = 1 and 2, 7.05M bytes,
each at its own learning rate: seed 1 chooses it, three other seeds are reported. Expected: no gain
(paper/results/README.md). Hardware and time: CPU cores, 32 runs of 7 to 10 minutes of one core
each.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python -m paper.sweep study-init-b --run --workers=2 -- --threads=1
"""

from paper.plans import Plan, equal_work, grid
from paper.studies.study_lm import BYTES

PLAN = Plan(
    'Study: initial b',
    grid(
        'train_lm.py',
        'config/tiny_lm.py',
        cells=equal_work(16, [1, 2]),
        init_b=['one', 'sqrt_experts'],
        learning_rate=[0.08, 0.16],  # the best for b = 1 at L = 2 and at L = 1 (study_lm.py)
        seed=[1, 2, 3, 4],
        **BYTES,
    ),
)
