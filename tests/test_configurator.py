"""configurator.py: what is a setting, overrides in order, every refusal with its message, nothing
executed; how a script begins and ends."""

import math
import os
import pathlib
import subprocess
import sys

import pytest

from configurator import configure, read_config

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = '''"""Trains a toy."""
import math
# fmt: off
# I/O
out_dir = 'out'  # where the
                 # run goes
resume = False
# --- model ---
n_layer = 2  # -1 = off
n_embd = 128
n_head: int = 3
betas = (0.8, 0.95)
learning_rate = 2e-2
threads = None  # None = all
computed = math.sqrt(4)
COUNT = 3
_hidden = 1
def after():
    late = 1
too_late = 5
'''
DEFAULTS = {'out_dir': 'out', 'resume': False, 'n_layer': 2, 'n_embd': 128, 'betas': (0.8, 0.95)}
DEFAULTS |= {'learning_rate': 0.02, 'threads': None}
RANGES = {'n_layer': (-1, math.inf), 'betas': (0, 1), 'out_dir': ['out', '', 'a=b c', 'é', '123']}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """-> run(*argv, **config files by stem) -> config, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'toy.py').write_text(SCRIPT)

    def run(*argv, **files):
        for stem, text in files.items():
            (tmp_path / f'{stem}.py').write_text(text)
        return configure({'__file__': str(tmp_path / 'toy.py'), 'RANGES': RANGES}, argv)

    return run


# ---- settings ----


FILES = {'first': 'n_layer = 3\nn_embd = +49\nbetas = [0.5, 1]\nout_dir = "é"'}
FILES |= {'five': '"""Goal."""\n# comment\nn_layer = 5', 'six': 'n_layer = 6'}
GIVEN = [  # left to right: files and arguments, and what they change
    ('', {}),
    ('--out_dir=123 --resume=True --n_layer=-1', {'out_dir': '123', 'resume': True, 'n_layer': -1}),
    ('--learning_rate=1 --threads=4', {'learning_rate': 1.0, 'threads': 4}),
    ('--betas=[1,0.5] --n_embd=7 --n_embd=8', {'betas': (1.0, 0.5), 'n_embd': 8}),
    ('--out_dir= --threads=auto', {'out_dir': '', 'threads': 'auto'}),
    ('--n_layer 3 --resume --n_embd -1', {'n_layer': 3, 'resume': True, 'n_embd': -1}),
    ('--threads --resume=False', {'threads': True}),  # None takes anything: a switch too
    ('first.py', {'n_layer': 3, 'n_embd': 49, 'betas': (0.5, 1.0), 'out_dir': 'é'}),
    ('five.py six.py', {'n_layer': 6}),
    ('--n_layer=9 five.py', {'n_layer': 5}),
]


@pytest.mark.parametrize('argv, changed', GIVEN)
def test_files_and_arguments_left_to_right(run, argv, changed):
    # 1 is not 1.0 there
    assert repr(run(*argv.split(), **FILES)) == repr(DEFAULTS | changed)


# words of the message :: what is given :: more of it; words with bad.py: in that file, \n a newline
BAD = r"""
unknown setting 'n_layr', did you mean 'n_layer'? :: --n_layr=3
unknown setting 'COUNT', --help lists the settings :: --COUNT=3
did you mean 'learning_rate'? :: --Learning-Rate=3
unknown setting :: --too_late=3 :: --computed=3
command line: n_layer expects an integer (default 2), got '2.0' :: --n_layer=2.0
an integer :: --n_layer=True :: --n_layer=2**3 :: --n_layer x
True or False :: --resume=1
--resume=False :: --resume False
needs a value, as in --n_layer=2 :: --n_layer :: --n_layer --resume
a finite number (default 0.02), got 'nan' :: --learning_rate=nan
a finite number :: --learning_rate=1e999
a tuple :: --betas=0.5 :: --betas=(1,'a')
must be between :: --betas=(0.5,2)
must be at least -1 :: --n_layer=-2
out_dir = 'x': expected one of out, :: --out_dir=x
--key=value :: n_layer=3 :: -n_layer=3 :: =
missing.py: cannot read the config file: No such file :: missing.py
bad.py:2: unknown setting 'n_layr', did you mean 'n_layer' :: n_layer = 1\nn_layr = 3
bad.py:1: n_layer expects an integer (default 2), got '3' :: n_layer = "3"
bad.py:1: a config file holds only `name = literal` lines, not 'import os' :: import os
bad.py:1 :: learning_rate = 1e300 ** 9 :: n_layer = 9 ** 9 ** 9 :: print(1) :: n_layer = (
bad.py:1 :: n_layer = [1][0] :: n_layer += 1 :: threads = {[]: 1} :: n_layer = COUNT
bad.py:2 :: \nn_layer = int("3") :: n_layer = 1\n  n_embd = 2
bad.py:1: overwrite is for the command line alone :: overwrite = True
"""
BAD = [line.replace('\\n', '\n').split(' :: ') for line in BAD.strip('\n').split('\n')]


@pytest.mark.parametrize('given, words', [(x, words) for words, *given in BAD for x in given])
def test_refused_in_one_line(capsys, run, given, words):
    """A hostile power too, which is not computed."""
    with pytest.raises(SystemExit) as stop:
        run('bad.py', bad=given) if words.startswith('bad.py') else run(*given.split())
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == '' and err.startswith('error: ') and words in err, err
    assert err.count('\n') == 1, err


def test_changed_settings_are_printed_and_help_lists_all(capsys, run):
    run('--n_layer=3')
    assert capsys.readouterr().out == 'n_layer = 3  (default 2)\n'
    with pytest.raises(SystemExit) as stop:
        run('--n_layer=3', '--help')
    text = capsys.readouterr().out
    lines = [' '.join(line.split()) for line in text.splitlines()]
    wanted = ['Trains a toy.', 'usage: python toy.py [config.py ...] [--key=value ...]', 'I/O']
    wanted += ["--out_dir='out' where the run goes", '--resume=False', 'model']
    wanted += ['--n_layer=2 -1 = off', '--n_embd=128', '--threads=None None = all']
    places = [lines.index(line) for line in wanted]
    assert places == sorted(places) and 'too_late' not in text and not stop.value.code


# ---- how a script starts and ends ----

SPINS = 'import os; print(os.environ.get("GOMP_SPINCOUNT"))'
FULL = 'error: standard output: No space left on device\n'
RUN = 'configurator.run_script(main, "stopped", lambda error: "less of it")'
PROCESSES = [  # code, environment, exit status, what it prints; 'full': a full disk behind stdout
    ('import os; os.kill(os.getpid(), 2); input()', {}, -2, '\ninterrupted\n'),  # while it loads
    (SPINS, {}, 0, '10000\n'),  # threads spin a bounded time, unless the user says otherwise
    (SPINS, {'OMP_WAIT_POLICY': 'active'}, 0, 'None\n'),
    (f'main = lambda: print("text")\n{RUN}', 'full', 2, FULL),
    (f'main = lambda: 3\n{RUN}', {}, 3, ''),
    (f'def main(): raise KeyboardInterrupt\n{RUN}', {}, 130, '\nstopped\n'),
    (f'def main(): raise BrokenPipeError\n{RUN}', {}, 0, ''),
    (f'def main(): raise OSError("no disk")\n{RUN}', {}, 2, 'error: no disk\n'),
    (f'def main(): raise MemoryError\n{RUN}', {}, 2, 'error: less of it\n'),
]


@pytest.mark.parametrize('code, environment, status, printed', PROCESSES)
def test_how_a_script_starts_and_ends(code, environment, status, printed):
    full = environment == 'full'
    command = [sys.executable, '-c', f'import configurator\nconfigurator.setup_process()\n{code}']
    with open('/dev/full' if full else os.devnull, 'w') as file:
        pipes = {'stdout': file if full else subprocess.PIPE, 'stderr': subprocess.PIPE}
        env = {} if full else environment
        done = subprocess.run(command, cwd=ROOT, env=env, text=True, **pipes)
    assert (done.returncode, (done.stdout or '').lstrip() + done.stderr) == (status, printed)


def test_a_renamed_config_file_works_under_its_old_name(tmp_path, capsys):
    """The old name's own lines win, so that runs begun under it resume in their folder."""
    (tmp_path / 'new.py').write_text("out_dir = 'out/new'\nn_layer = 3\n")
    (tmp_path / 'old.py').write_text("renamed_to = 'new.py'\nout_dir = 'out/old'\n")
    defaults = {'out_dir': 'out/lm', 'n_layer': 2}
    config = dict(defaults)
    read_config(str(tmp_path / 'old.py'), config, defaults)
    assert config == {'out_dir': 'out/old', 'n_layer': 3}
    assert f'{tmp_path}/new.py: use that name' in capsys.readouterr().err
