"""The study of agents on Boxoban's levels (fetch them first, or add download=True to `also`):
ConvLSTM, recurrent and not, L = 1, 2, 4 at one budget (4 experts of width 32), the paper's recipe
but for length: 10M environment steps, annealed over them. By the rate of a run's first
steps 2.2 to 6 hours of one core (AMD EPYC, Zen 4), 26 for all six; they are resumable.
python sweep.py config/study_boxoban.py --run --figure --table"""

plan = 'sokoban-small'
width = 0.5  # d = 32
length = 0.2  # of 50M steps
only = 'model=convlstm d=32'
also = 'threads=1'
seeds = 1
workers = 2
out_dir = 'out/study_boxoban'
