"""The small study, Sokoban: ConvGLU agents on easy generated levels, recurrent and not, L = 1, 2,
4 at one budget (4 experts of width 32), three seeds. Eighteen runs of eight minutes, two at a
time.
python sweep.py config/study_sokoban.py --run --figure --table"""

plan = 'sokoban-small'
base = 'config/sokoban_tiny.py'
width = 0.5  # C(128) -> C(64), the cost of 4 experts of width 32
only = 'model=convglu d=32'
seeds = 3
workers = 2
out_dir = 'out/study'
