"""The study of agents on Boxoban's levels (fetch them first, or add download=True to `also`):
ConvLSTM, recurrent and not, L = 1, 2, 4 at one budget (4 experts of width 32), the paper's recipe
but for length: 10M environment steps, annealed over them. A run takes about two and a half hours
of one core.
python sweep.py config/study_boxoban.py --run --figure --table"""

plan = 'sokoban-small'
width = 0.5  # d = 32
length = 0.2  # of 50M steps
only = 'model=convlstm d=32'
also = 'threads=1'
seeds = 1
workers = 2
out_dir = 'out/study_boxoban'
