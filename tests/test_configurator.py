"""Test configurator.py: what is a setting, overrides from left to right, every refusal with its
message, and how a script starts and ends."""

import math
import os
import subprocess
import sys

import pytest
from processes import ROOT

from configurator import configure, read_config, write_text

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
DEFAULTS = {
    'out_dir': 'out',
    'resume': False,
    'n_layer': 2,
    'n_embd': 128,
    'betas': (0.8, 0.95),
    'learning_rate': 0.02,
    'threads': None,
}
RANGES = {'n_layer': (-1, math.inf), 'betas': (0, 1), 'out_dir': ['out', '', 'a=b c', 'é', '123']}


@pytest.fixture
def configure_toy(tmp_path, monkeypatch):
    """Return a function that configures the toy script with these arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'toy.py').write_text(SCRIPT)
    return lambda *argv: configure({'__file__': str(tmp_path / 'toy.py'), 'RANGES': RANGES}, argv)


# ---- settings ----


def test_settings_are_the_literals_above_the_first_function(configure_toy):
    assert configure_toy() == DEFAULTS


def test_a_setting_that_the_script_changes_is_not_set_by_the_user(configure_toy):
    config = configure_toy('--n_layer=2')  # the default
    config['n_embd'] = 64
    assert config.set_by_user == {'n_layer'}


def test_a_setting_under_its_old_name_is_set_and_noted(tmp_path, capsys, configure_toy):
    script = {'__file__': str(tmp_path / 'toy.py'), 'RENAMED': {'depth': 'n_layer'}}
    config = configure(script, ['--depth=3'], quiet=True)
    assert 'depth is now called n_layer' in capsys.readouterr().err
    assert config.set_by_user == {'n_layer'} and config == DEFAULTS | {'n_layer': 3}


FILES = {
    'first.py': 'n_layer = 3\nn_embd = +49\nbetas = [0.5, 1]\nout_dir = "é"',
    'five.py': '"""Goal."""\n# comment\nn_layer = 5',
    'six.py': 'n_layer = 6',
}
ACCEPTED = [  # arguments, the settings that they change
    ('--out_dir=123 --resume=True --n_layer=-1', {'out_dir': '123', 'resume': True, 'n_layer': -1}),
    ('--learning_rate=1 --threads=4', {'learning_rate': 1.0, 'threads': 4}),
    ('--betas=[1,0.5] --n_embd=7 --n_embd=8', {'betas': (1.0, 0.5), 'n_embd': 8}),
    ('--out_dir= --threads=auto', {'out_dir': '', 'threads': 'auto'}),
    ('--n_layer 3 --resume --n_embd -1', {'n_layer': 3, 'resume': True, 'n_embd': -1}),
    ('--threads --resume=False', {'threads': True}),  # None takes anything, also a switch
    ('first.py', {'n_layer': 3, 'n_embd': 49, 'betas': (0.5, 1.0), 'out_dir': 'é'}),
    ('five.py six.py', {'n_layer': 6}),
    ('--n_layer=9 five.py', {'n_layer': 5}),
]


@pytest.mark.parametrize('argv, changes', ACCEPTED)
def test_files_and_arguments_apply_from_left_to_right(tmp_path, configure_toy, argv, changes):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    # as text, in which 1 and 1.0 differ
    assert repr(configure_toy(*argv.split())) == repr(DEFAULTS | changes)


REFUSED = [  # argument, message
    ('--n_layr=3', "unknown setting 'n_layr', did you mean 'n_layer'?"),
    ('--COUNT=3', "unknown setting 'COUNT', --help lists the settings"),
    ('--Learning-Rate=3', "did you mean 'learning_rate'?"),
    ('--too_late=3', 'unknown setting'),
    ('--computed=3', 'unknown setting'),
    ('--n_layer=2.0', "command line: n_layer expects an integer (default 2), got '2.0'"),
    ('--n_layer=True', 'an integer'),
    ('--n_layer=2**3', 'an integer'),
    ('--n_layer x', 'an integer'),
    ('--resume=1', 'True or False'),
    ('--resume False', '--resume=False'),
    ('--n_layer', 'needs a value, as in --n_layer=2'),
    ('--n_layer --resume', 'needs a value, as in --n_layer=2'),
    ('--learning_rate=nan', "a finite number (default 0.02), got 'nan'"),
    ('--learning_rate=1e999', 'a finite number'),
    ('--betas=0.5', 'a tuple'),
    ("--betas=(1,'a')", 'a tuple'),
    ('--betas=(0.5,2)', 'must be between'),
    ('--n_layer=-2', 'must be at least -1'),
    ('--out_dir=x', "out_dir = 'x': expected one of out, "),
    ('n_layer=3', '--key=value'),
    ('-n_layer=3', '--key=value'),
    ('=', '--key=value'),
    ('missing.py', 'missing.py: cannot read the config file: No such file'),
]
REFUSED_FILES = [  # text of bad.py, message
    ('n_layer = 1\nn_layr = 3', "bad.py:2: unknown setting 'n_layr', did you mean 'n_layer'"),
    ('n_layer = "3"', "bad.py:1: n_layer expects an integer (default 2), got '3'"),
    ('import os', "bad.py:1: a config file holds only `name = literal` lines, not 'import os'"),
    ('learning_rate = 1e300 ** 9', 'bad.py:1'),
    ('n_layer = 9 ** 9 ** 9', 'bad.py:1'),  # would take forever if it were computed
    ('print(1)', 'bad.py:1'),
    ('n_layer = (', 'bad.py:1'),
    ('n_layer = [1][0]', 'bad.py:1'),
    ('n_layer += 1', 'bad.py:1'),
    ('threads = {[]: 1}', 'bad.py:1'),
    ('n_layer = COUNT', 'bad.py:1'),
    ('\nn_layer = int("3")', 'bad.py:2'),
    ('n_layer = 1\n  n_embd = 2', 'bad.py:2'),
    ('overwrite = True', 'bad.py:1: overwrite is for the command line alone'),
    ("out_dir = 'a\\0b'", 'bad.py:1: out_dir holds a NUL character'),
]


def assert_refused(capsys, message, function, *args):
    """Assert that function(*args) ends the process after one line on standard error."""
    with pytest.raises(SystemExit) as stop:
        function(*args)
    out, error = capsys.readouterr()
    assert stop.value.code == 2 and out == '' and error.startswith('error: '), error
    assert message in error and error.count('\n') == 1, error


@pytest.mark.parametrize('argv, message', REFUSED)
def test_arguments_are_refused_in_one_line(capsys, configure_toy, argv, message):
    assert_refused(capsys, message, configure_toy, *argv.split())


@pytest.mark.parametrize('text, message', REFUSED_FILES)
def test_config_files_are_refused_in_one_line(tmp_path, capsys, configure_toy, text, message):
    (tmp_path / 'bad.py').write_text(text)
    assert_refused(capsys, message, configure_toy, 'bad.py')


def test_changed_settings_are_printed(capsys, configure_toy):
    configure_toy('--n_layer=3')
    assert capsys.readouterr().out == 'n_layer = 3  (default 2)\n'


def test_help_lists_sections_settings_and_comments_in_order(capsys, configure_toy):
    with pytest.raises(SystemExit) as stop:
        configure_toy('--n_layer=3', '--help')
    text = capsys.readouterr().out
    lines = [' '.join(line.split()) for line in text.splitlines()]
    expected = [
        'Trains a toy.',
        'usage: python toy.py [config.py ...] [--key=value ...]',
        'I/O',
        "--out_dir='out' where the run goes",
        '--resume=False',
        'model',
        '--n_layer=2 -1 = off',
        '--n_embd=128',
        '--threads=None None = all',
    ]
    places = [lines.index(line) for line in expected]
    assert places == sorted(places) and 'too_late' not in text and not stop.value.code


def test_a_renamed_config_file_works_under_its_old_name(tmp_path, capsys):
    """Lines of the old file take precedence, so that runs started under it resume in their
    folder."""
    (tmp_path / 'new.py').write_text("out_dir = 'out/new'\nn_layer = 3\n")
    (tmp_path / 'old.py').write_text("renamed_to = 'new.py'\nout_dir = 'out/old'\n")
    defaults = {'out_dir': 'out/lm', 'n_layer': 2}
    config = dict(defaults)
    read_config(str(tmp_path / 'old.py'), config, defaults)
    assert config == {'out_dir': 'out/old', 'n_layer': 3}
    assert f'{tmp_path}/new.py: use that name' in capsys.readouterr().err


# ---- files ----


def test_a_folder_that_cannot_be_synced_is_closed(tmp_path, monkeypatch):
    opened = []

    def fsync(descriptor):
        opened.append(descriptor)
        if len(opened) == 2:  # the file's folder
            raise OSError(5, 'Input/output error')

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, 'fsync', fsync)
        write_text('text', tmp_path / 'a.txt')
    with pytest.raises(OSError, match='Bad file descriptor'):
        os.fstat(opened[1])


# ---- how a script starts and ends ----


def run_code(code, env=None, stdout=subprocess.PIPE):
    """Run code after setup_process(); return the exit status and what it prints."""
    command = [sys.executable, '-c', f'import configurator\nconfigurator.setup_process()\n{code}']
    options = {'stdout': stdout, 'stderr': subprocess.PIPE, 'text': True}
    done = subprocess.run(command, cwd=ROOT, env=env or {}, **options)
    # before the line of an error, run_script prints an empty one on standard output
    return done.returncode, (done.stdout or '').lstrip() + done.stderr


SPINS = 'import os; print(os.environ.get("GOMP_SPINCOUNT"))'


def test_threads_spin_a_bounded_time_unless_the_environment_says_otherwise():
    assert run_code(SPINS) == (0, '10000\n')
    assert run_code(SPINS, env={'OMP_WAIT_POLICY': 'active'}) == (0, 'None\n')


def test_ctrl_c_while_a_script_loads_prints_one_line():
    assert run_code('import os; os.kill(os.getpid(), 2); input()') == (-2, '\ninterrupted\n')


RUN = 'configurator.run_script(main, "stopped", lambda error: "less of it")'
ENDS = [  # body of main(), exit status, what is printed
    ('return 3', 3, ''),
    ('raise KeyboardInterrupt', 130, '\nstopped\n'),
    ('raise BrokenPipeError', 0, ''),
    ('raise OSError("no disk")', 2, 'error: no disk\n'),
    ('open("no.txt")', 2, 'error: no.txt: No such file or directory\n'),
    ('raise MemoryError', 2, 'error: less of it\n'),
]


@pytest.mark.parametrize('body, status, printed', ENDS)
def test_exit_status_and_message_of_a_script(body, status, printed):
    assert run_code(f'def main(): {body}\n{RUN}') == (status, printed)


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_a_full_disk_behind_standard_output_is_reported():
    with open('/dev/full', 'w') as full:
        result = run_code(f'def main(): print("text")\n{RUN}', stdout=full)
    assert result == (2, 'error: standard output: No space left on device\n')
