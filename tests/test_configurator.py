"""Test configurator.py: what is a setting, overrides from left to right, refusals, and how a script
starts and ends; and files.py."""

import errno
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass

from configurator import Script, configure
from support.script import UserError, run_script

import pytest
from processes import ROOT
from small_runs import assert_refused

import train_lm
import train_sokoban
from support.files import write_text
from support.values import check_fields

SCRIPT = '''"""Trains a toy."""
import math
_here = math.pi
try:
    import wandb as w
except ImportError:
    w = None
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
pairs = ((0, 1), (2, 3))
_computed = math.sqrt(4)
COUNT = 3
_hidden = 1
config = configure(globals())
late = 1
'''
DEFAULTS = {
    'out_dir': 'out',
    'resume': False,
    'n_layer': 2,
    'n_embd': 128,
    'n_head': 3,
    'betas': (0.8, 0.95),
    'learning_rate': 0.02,
    'threads': None,
    'name': '',
    'offset': -1,
    'pairs': ((0, 1), (2, 3)),
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


@pytest.mark.parametrize('end', [
    'config = configure(globals())', 'class After:\n    pass', 'if threads:\n    x = 1',
])  # fmt: skip
def test_settings_are_the_literals_up_to_the_first_block_or_the_call(tmp_path, end):
    path = tmp_path / 'toy.py'
    path.write_text(SCRIPT.replace('config = configure(globals())', end))
    assert Script(path).defaults == DEFAULTS


@pytest.mark.parametrize('line', [
    'n_embd = 8 * 4',
    'width = n_embd',
    'n_embd, n_head = 128, 2',
    'n_embd: int',
    'n_embd *= 2',
])  # fmt: skip
def test_a_line_that_only_looks_like_a_setting_is_refused(tmp_path, line):
    """If it were ignored, the model and the saved settings would lack it."""
    path = tmp_path / 'toy.py'
    path.write_text(SCRIPT.replace('resume = False', line))
    message = re.escape(f'{path}:12: {line!r}: a setting must be a literal: ')
    assert_refused(message, Script, path)
    path.write_text(SCRIPT.replace("out_dir = 'out'", "out_dir = 'out' + 'lm'"))
    assert_refused('a setting must be a literal', Script, path)  # the first one, too


FILES = {
    'five.py': '"""Goal."""\n# comment\nn_layer = 5\nbetas = [0.5, 1]\nout_dir = "é"',
    'six.py': 'n_layer = 6',
}
ACCEPTED = [  # arguments, the settings that they change
    (
        '--out_dir=123 --resume=auto --n_layer=-1',
        {'out_dir': '123', 'resume': 'auto', 'n_layer': -1},
    ),
    ('--betas=[1,0.5] --n_embd=7 --n_embd=8', {'betas': (1.0, 0.5), 'n_embd': 8}),
    ('--betas=1', {'betas': (1.0,)}),
    ('--n_layer 3 --resume --offset -5', {'n_layer': 3, 'resume': True, 'offset': -5}),
    ('--learning_rate=1 --threads=4 --name=', {'learning_rate': 1.0, 'threads': 4, 'name': ''}),
    ('--name=FILE:~/a --threads=auto', {'name': 'FILE:/home/me/a', 'threads': 'auto'}),
    ('--n_layer=9 six.py five.py', {'n_layer': 5, 'betas': (0.5, 1.0), 'out_dir': 'é'}),
]


@pytest.mark.parametrize('argv, changes', ACCEPTED)
def test_files_and_arguments_apply_from_left_to_right(
    tmp_path, monkeypatch, configure_toy, argv, changes
):
    monkeypatch.setenv('HOME', '/home/me')
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    # as text, in which 1 and 1.0 differ
    assert repr(configure_toy(*argv.split())) == repr(DEFAULTS | changes)


REFUSED = [  # argument, a part of the message
    ('--n_layr=3', "unknown setting 'n_layr', did you mean 'n_layer'"),
    ('--n_layer=2.0', "command line: n_layer expects an integer .default 2., got '2.0'"),
    ('--n_layer=True', 'n_layer expects an integer'),
    ('--n_embd=-1', 'n_embd = -1: must be at least 0'),
    ('--resume=1', 'resume = 1: expected one of False, True, auto'),
    ('--resume False', '--resume=False'),
    ('--n_layer --resume', 'needs a value, as in --n_layer=2'),
    ('--learning_rate=nan', "learning_rate expects a finite number .default 0.02., got 'nan'"),
    ("--betas=(1,'a')", 'betas expects a tuple'),
    ('--betas=(0.5,2)', 'betas = .*: must be between 0 and 1'),
    ('n_layer=3', "cannot read 'n_layer=3': expected config.py or --key=value"),
    ('missing.py', 'missing.py: cannot read the config file: No such file'),
]
REFUSED_FILES = [  # text of bad.py, a part of the message
    ('n_layer = 1\nn_layr = 3', "bad.py:2: unknown setting 'n_layr', did you mean 'n_layer'"),
    ('n_layer = "3"', "bad.py:1: n_layer expects an integer .default 2., got '3'"),
    ('import os', "bad.py:1: a config file holds only `name = literal` lines, not 'import os'"),
    ('n_layer = 2 ** 3', 'bad.py:1: n_layer: only literals are allowed'),
    ('n_layer = (', 'bad.py:1: not a valid config file'),
]


@pytest.mark.parametrize('argv, message', REFUSED)
def test_arguments_are_refused_in_one_line(configure_toy, argv, message):
    assert_refused(message, configure_toy, *argv.split())


@pytest.mark.parametrize('text, message', REFUSED_FILES)
def test_config_files_are_refused_in_one_line(tmp_path, configure_toy, text, message):
    (tmp_path / 'bad.py').write_text(text)
    assert_refused(message, configure_toy, 'bad.py')


OF_MODELS = [(train_lm, '--window=0'), (train_lm, '--aggregation=max')]
OF_MODELS += [(train_lm, '--block_size=0'), (train_sokoban, '--arch=lstm')]


@pytest.mark.parametrize('script, argument', OF_MODELS)
def test_trainers_know_what_the_settings_of_a_model_can_be(script, argument):
    name = argument[2:].partition('=')[0]
    assert_refused(f'^command line: {name} = ', configure, dict(vars(script)), [argument])


def test_a_size_of_a_dataclass_is_at_least_1_unless_it_has_a_range_or_is_0_by_default():
    @dataclass
    class Sizes:
        n_loop: int = 2
        n_recurrent: int = 0
        seed: int = 7

    ranges = {'seed': (0, math.inf)}
    check_fields(Sizes(n_loop=1, n_recurrent=0, seed=0), ranges)
    assert_refused('^n_loop = 0: must be at least 1$', check_fields, Sizes(n_loop=0), ranges)
    assert_refused('^n_recurrent = -1: must', check_fields, Sizes(n_recurrent=-1), ranges)


def test_changed_settings_are_printed(capsys, configure_toy):
    configure_toy('--n_layer=3')
    assert capsys.readouterr().out == 'n_layer = 3  (default 2)\n'


def test_an_empty_text_is_printed_although_it_is_the_default(capsys, configure_toy):
    configure_toy('--name=')
    assert capsys.readouterr().out == "name = ''  (default '')\n"


def test_help_lists_sections_settings_and_comments_in_order(capsys, configure_toy):
    with pytest.raises(SystemExit):
        configure_toy('--n_layer=3', '--help')
    lines = [' '.join(line.split()) for line in capsys.readouterr().out.splitlines()]
    expected = ['Trains a toy.', 'I/O', "--out_dir='out' where the run goes"]
    expected += ['model', '--n_layer=2 -1 = off', '--threads=None None = all']
    assert [line for line in lines if line in expected] == expected


def test_what_files_and_the_command_line_set_is_known(tmp_path, configure_toy):
    """A file that follows an argument wins."""
    (tmp_path / 'a.py').write_text('n_layer = 5\nn_embd = 64\n')
    config = configure_toy('--n_layer=3', '--betas=(0.1, 0.2)', 'a.py', '--n_embd=32')
    assert config.from_files == {'n_layer': 5, 'n_embd': 64}
    assert config.from_command_line == {'betas': (0.1, 0.2), 'n_embd': 32}


def test_settings_are_adopted_unless_the_user_has_set_them_or_what_they_depend_on(configure_toy):
    saved = {'n_layer': 5, 'n_embd': 64, 'betas': [0.5, 0.6], 'offset': 7, 'threads': 2}
    config = configure_toy('--n_layer=3', '--n_embd=128', '--name=a')
    depends_on = {'offset': ('n_embd',), 'threads': ('offset',), 'betas': ('name',)}
    lines = []
    saved |= {'name': 'a', 'pairs': [[4, 5]]}  # from JSON, as betas are
    names = ['n_layer', 'n_embd', 'betas', 'offset', 'threads', 'pairs']
    config.adopt(saved, names, 'run', depends_on, lines.append)
    assert config == DEFAULTS | {'n_layer': 3, 'name': 'a', 'betas': (0.5, 0.6)} | {
        'pairs': ((4, 5),)
    }
    assert lines == [
        'betas = (0.5, 0.6)  (from run)',
        'offset = 7 of run is not taken: n_embd differs',
        'threads = 2 of run is not taken: offset differs',
        'pairs = ((4, 5),)  (from run)',
    ]
    for damage in ({'offset': 'a'}, {'offset': None}):
        assert_refused('^run: damaged: offset', config.adopt, damage, ['offset'], 'run', {})


SCRIPTS = [
    Script(path)
    for path in (*ROOT.glob('*.py'), *ROOT.glob('paper/*.py'), *ROOT.glob('support/*.py'))
]


@pytest.mark.parametrize('config', sorted(ROOT.glob('config/*.py')), ids=lambda path: path.stem)
def test_a_shipped_config_file_is_accepted_by_a_script(config):
    def accepts(script):
        try:
            return script.read_config(config)
        except UserError:
            return False

    assert any(map(accepts, SCRIPTS))


# ---- files ----


def test_a_file_is_written_where_folders_cannot_be_synced(tmp_path, monkeypatch):
    def fsync(descriptor):
        if os.path.isdir(f'/proc/self/fd/{descriptor}'):
            raise OSError(errno.EINVAL, 'Invalid argument')

    monkeypatch.setattr(os, 'fsync', fsync)
    write_text('text', tmp_path / 'a.txt')
    assert (tmp_path / 'a.txt').read_text() == 'text'


@pytest.mark.parametrize('folder', ['clone', 'clone/exp', 'exp'])
def test_a_script_runs_with_the_modules_of_its_own_copy_of_the_project(tmp_path, folder):
    """With PYTHONSAFEPATH the folder of a script is not searched for modules. A script that lies in
    no copy of the project takes those that it finds."""
    script = tmp_path / folder / 'mine.py'
    script.parent.mkdir(parents=True)
    (tmp_path / 'clone').mkdir(exist_ok=True)
    (tmp_path / 'clone/configurator.py').touch()
    lines = ['from configurator import configure', 'from support.script import run_script']
    script.write_text(
        '\n'.join([*lines, 'size = 1', 'run_script(lambda: configure(globals()) and None)'])
    )
    env = os.environ | {'PYTHONSAFEPATH': '1', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    expected = f'error: {script}: would run with the modules of {ROOT}: unset PYTHONPATH'
    assert done.stderr.startswith(expected if 'clone' in folder else ''), done.stderr
    assert done.returncode == (2 if 'clone' in folder else 0)


# ---- how a script ends ----


ENDS = [  # what main() raises, exit status, what is printed
    (KeyboardInterrupt(), 130, '\ninterrupted\n'),
    (UserError('a: is\nwrong'), 2, 'error: a: is wrong\n'),
    (OSError(28, 'No space left', 'a.bin'), 2, 'error: a.bin: No space left\n'),
    (OSError('no name'), 2, 'error: no name\n'),
]


@pytest.mark.parametrize('error, status, printed', ENDS, ids=repr)
def test_exit_status_and_message_of_a_script(capsys, error, status, printed):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        run_script(main)
    assert (stop.value.code, capsys.readouterr().err) == (status, printed)


def test_a_link_to_nothing_in_place_of_a_folder_is_named(tmp_path, capsys):
    link = tmp_path / 'link'
    link.symlink_to('gone')
    with pytest.raises(SystemExit, match='2'):
        run_script(lambda: os.makedirs(link, exist_ok=True))
    expected = f'error: {link}: a link to gone, which is not there\n'
    assert capsys.readouterr().err == expected


PRINT = """
from support import script
script.run_script(lambda: print('text'))
"""


def print_to(stdout):
    """Run a script that prints to this file; return its exit status and its standard error."""
    command = [sys.executable, '-c', PRINT]
    done = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def test_a_reader_that_has_ended_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    assert print_to(writer) == (0, '')
    os.close(writer)


def test_a_broken_pipe_of_something_else_is_an_error():
    def main():
        raise BrokenPipeError(32, 'socket')

    with pytest.raises(BrokenPipeError):
        run_script(main)


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_a_full_disk_behind_standard_output_is_reported():
    with open('/dev/full', 'w') as full:
        result = print_to(full)
    assert result == (2, 'error: standard output: No space left on device\n')
