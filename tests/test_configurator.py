"""Test configurator.py: what is a setting, overrides from left to right, every refusal with its
message, and how a script starts and ends."""

import errno
import math
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
from processes import ROOT

from configurator import Mistake, configure
from files import write_atomic, write_json, write_text

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
name = ''
offset = -1
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
    'name': '',
    'offset': -1,
}
RANGES = {
    'resume': [False, True, 'auto'],
    'n_layer': (-1, math.inf),
    'betas': (0, 1),
}


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


FILES = {
    'first.py': 'n_layer = 3\nn_embd = +49\nbetas = [0.5, 1]\nout_dir = "é"',
    'five.py': '"""Goal."""\n# comment\nn_layer = 5',
    'six.py': 'n_layer = 6',
}
ACCEPTED = [  # arguments, the settings that they change
    ('--out_dir=123 --resume=True --n_layer=-1', {'out_dir': '123', 'resume': True, 'n_layer': -1}),
    ('--learning_rate=1 --threads=4', {'learning_rate': 1.0, 'threads': 4}),
    ('--betas=[1,0.5] --n_embd=7 --n_embd=8', {'betas': (1.0, 0.5), 'n_embd': 8}),
    ('--name= --threads=auto', {'name': '', 'threads': 'auto'}),
    ('--n_layer 3 --resume --offset -5', {'n_layer': 3, 'resume': True, 'offset': -5}),
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
    ('--resume=1', 'expected one of False, True, auto'),
    ('--betas=(0.5,-1.0)', 'must be between'),
    ('--resume False', '--resume=False'),
    ('--n_layer', 'needs a value, as in --n_layer=2'),
    ('--n_layer --resume', 'needs a value, as in --n_layer=2'),
    ('--learning_rate=nan', "a finite number (default 0.02), got 'nan'"),
    ('--learning_rate=1e999', 'a finite number'),
    ('--betas=0.5', 'a tuple'),
    ("--betas=(1,'a')", 'a tuple'),
    ('--betas=(0.5,2)', 'must be between'),
    ('--n_layer=-2', 'must be at least -1'),
    ('--out_dir=', 'out_dir is empty: name a folder'),
    ('--learning_rate=-1', 'learning_rate = -1.0: must be at least 0'),
    ('--n_embd=-1', 'n_embd = -1: must be at least 0'),
    ('--resume=maybe', "resume = 'maybe': expected one of False, True, auto"),
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


def assert_refused(message, function, *args):
    """Assert that function(*args) raises a Mistake of one line."""
    with pytest.raises(Mistake) as refusal:
        function(*args)
    assert message in str(refusal.value) and '\n' not in str(refusal.value), refusal.value


@pytest.mark.parametrize('argv, message', REFUSED)
def test_arguments_are_refused_in_one_line(configure_toy, argv, message):
    assert_refused(message, configure_toy, *argv.split())


@pytest.mark.parametrize('text, message', REFUSED_FILES)
def test_config_files_are_refused_in_one_line(tmp_path, configure_toy, text, message):
    (tmp_path / 'bad.py').write_text(text)
    assert_refused(message, configure_toy, 'bad.py')


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


def test_what_files_and_the_command_line_set_is_known(tmp_path, configure_toy):
    """A file that follows an argument wins."""
    (tmp_path / 'a.py').write_text('n_layer = 5\nn_embd = 64\n')
    config = configure_toy('--n_layer=3', '--betas=(0.1, 0.2)', 'a.py', '--n_embd=32')
    assert config.from_files == {'n_layer': 5, 'n_embd': 64}
    assert config.from_command_line == {'betas': (0.1, 0.2), 'n_embd': 32}
    assert (config['n_layer'], config['n_embd']) == (5, 32)


def test_a_list_of_values_may_mix_types(configure_toy):
    for text, value in (('False', False), ('True', True), ('auto', 'auto')):
        assert configure_toy(f'--resume={text}')['resume'] is value or value == 'auto'


def test_a_home_folder_is_expanded_in_every_text(configure_toy, monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    for text, value in (
        ('~/r', '/home/me/r'),
        ('FILE:~/a', 'FILE:/home/me/a'),
        ('a~b', 'a~b'),
        ('r [1], x', 'r [1], x'),
    ):
        assert configure_toy(f'--name={text}')['name'] == value


# ---- files ----


@pytest.mark.parametrize('number', [errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_synced_is_closed(tmp_path, monkeypatch, number):
    """Where the file system cannot sync folders nothing is wrong; a broken disk is an error."""
    opened = []

    def fsync(descriptor):
        opened.append(descriptor)
        if len(opened) == 2:  # the file's folder
            raise OSError(number, os.strerror(number))

    expected = pytest.raises(OSError) if number == errno.EIO else nullcontext()
    with monkeypatch.context() as patch, expected:
        patch.setattr(os, 'fsync', fsync)
        write_text('text', tmp_path / 'a.txt')
    with pytest.raises(OSError, match='Bad file descriptor'):
        os.fstat(opened[1])
    assert (tmp_path / 'a.txt').read_text() == 'text'


def test_two_processes_may_write_one_file(tmp_path):
    """Each has a temporary file of its own, so that a whole file is left whoever is last."""
    code = 'from files import write_json\nfor i in range(300): write_json([i] * 2000, "a.json")'
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    command = [sys.executable, '-c', code]
    both = [subprocess.Popen(command, cwd=tmp_path, env=env) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / 'a.json').read_text() and os.listdir(tmp_path) == ['a.json']


def test_a_write_that_fails_leaves_the_file_and_names_it(tmp_path):
    write_json([1], tmp_path / 'a.json')

    def fail(file):
        raise OSError(28, 'No space left on device')

    with pytest.raises(OSError) as error:
        write_atomic(tmp_path / 'a.json', fail)
    assert error.value.filename == str(tmp_path / 'a.json')
    assert os.listdir(tmp_path) == ['a.json']


# ---- how a script starts and ends ----


def run_code(code, env=None, stdout=subprocess.PIPE):
    """Run code that knows configurator; return the exit status and what it prints."""
    command = [sys.executable, '-c', f'import configurator\n{code}']
    options = {'stdout': stdout, 'stderr': subprocess.PIPE, 'text': True}
    done = subprocess.run(command, cwd=ROOT, env=env or {}, **options)
    return done.returncode, (done.stdout or '').strip(' ') + done.stderr


SPINS = 'import os; print(os.environ.get("GOMP_SPINCOUNT"))'


def test_threads_spin_a_bounded_time_unless_the_environment_says_otherwise():
    assert run_code(SPINS) == (0, '10000\n')
    assert run_code(SPINS, env={'OMP_WAIT_POLICY': 'active'}) == (0, 'None\n')


RUN = 'configurator.run_script(main, lambda error: "less of it")'
ENDS = [  # body of main(), exit status, what is printed
    ('return 3', 3, ''),
    ('raise SystemExit(4)', 4, ''),
    ('raise KeyboardInterrupt', 130, '\ninterrupted\n'),
    ('raise configurator.Mistake("a: is\\nwrong")', 2, 'error: a: is wrong\n'),
    ('raise OSError("no disk")', 2, 'error: no disk\n'),
    ('open("no.txt")', 2, 'error: no.txt: No such file or directory\n'),
    ('raise MemoryError', 2, 'error: less of it\n'),
]


@pytest.mark.parametrize('body, status, printed', ENDS)
def test_exit_status_and_message_of_a_script(body, status, printed):
    assert run_code(f'def main(): {body}\n{RUN}') == (status, printed)


def test_a_broken_pipe_of_something_else_is_not_taken_for_the_end_of_a_reader():
    status, printed = run_code(f'def main(): raise BrokenPipeError(32, "socket")\n{RUN}')
    assert status == 1 and 'BrokenPipeError' in printed


@pytest.mark.parametrize('unbuffered', ['', '1'])
def test_a_reader_that_has_ended_is_no_error(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    env = {'PYTHONUNBUFFERED': unbuffered}
    assert run_code(f'def main(): print("text")\n{RUN}', env, stdout=writer) == (0, '')
    os.close(writer)


@pytest.mark.parametrize('unbuffered', ['', '1'])
@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_a_full_disk_behind_standard_output_is_reported(unbuffered):
    with open('/dev/full', 'w') as full:
        env = {'PYTHONUNBUFFERED': unbuffered}
        result = run_code(f'def main(): print("text")\n{RUN}', env, stdout=full)
    assert result == (2, 'error: standard output: No space left on device\n')
