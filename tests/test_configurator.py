"""configurator.py: what is a setting, overrides in order, every refusal with its message, nothing executed."""

import ast
import os
import pathlib
import subprocess
import sys
import time

import pytest

from configurator import configure, every

SCRIPT = '''# a licence line, not a heading
"""Trains a toy.

    python toy.py --n_layer=3
"""
# imports
import math
# -----------------------------------------------------------------------------
# I/O
out_dir = 'out'  # where the
                 # run goes
resume = False
# --- model ---
n_layer = 2  # -1 = off
n_embd = 64 * n_layer
n_head: int = 3
betas = (0.8, 0.95)
learning_rate = 2e-2
threads = None  # None = all
computed = math.sqrt(4)
COUNT = 3
_hidden = 1
def after():
    # not a comment of a setting
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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """-> run(*argv, **config files by stem) -> config, with the script and the files in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'toy.py').write_text(SCRIPT)

    def run(*argv, **files):
        for stem, text in files.items():
            (tmp_path / f'{stem}.py').write_bytes(
                text if isinstance(text, bytes) else text.encode()
            )
        return configure({'__file__': str(tmp_path / 'toy.py')}, argv)

    return run


def refused(capsys, run, *argv, **files):
    """-> the one line on stderr of a run that must end with status 2."""
    with pytest.raises(SystemExit) as stop:
        run(*argv, **files)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert (
        captured.out == '' and captured.err.startswith('error: ') and captured.err.count('\n') == 1
    ), captured.err
    return captured.err


def test_settings_are_the_plain_assignments_before_the_first_block(run, tmp_path):
    assert run() == DEFAULTS and list(run()) == list(DEFAULTS)
    settings = {'__file__': str(tmp_path / 'toy.py'), 'other': 1}
    config = configure(settings, ['--n_layer=4'])
    assert settings['n_layer'] == 4 and settings['other'] == 1 and '__file__' not in config
    assert configure(settings, []) == DEFAULTS  # an earlier call leaves no trace


def test_values_on_the_command_line(run):
    argv = [
        '--out_dir=123',
        '--resume=True',
        '--n_layer=-1',
        '--learning_rate=1',
        '--betas=[1, 0.5]',
        '--threads=4',
        '--n_embd=7',
    ]
    config = run(*argv, '--n_embd=8')
    assert config == {
        'out_dir': '123',
        'resume': True,
        'n_layer': -1,
        'learning_rate': 1.0,
        'betas': (1.0, 0.5),
        'threads': 4,
        'n_embd': 8,
    }
    assert type(config['learning_rate']) is float and type(config['betas'][0]) is float
    assert run('--out_dir=a=b c')['out_dir'] == 'a=b c'
    assert run('--out_dir="quoted"')['out_dir'] == 'quoted'
    assert run('--out_dir=')['out_dir'] == '' and run('--threads=auto')['threads'] == 'auto'


def test_files_and_arguments_left_to_right(run):
    first = '"""Goal."""\n# comment\n_width = 2 ** 5\nn_layer = 3\nn_embd = _width * n_layer // 2 - -1\nbetas = [0.5, 1]\nout_dir = "é"\n'
    assert run('first.py', first=first) == DEFAULTS | {
        'n_layer': 3,
        'n_embd': 49,
        'betas': (0.5, 1.0),
        'out_dir': 'é',
    }
    assert (
        run(
            'first.py',
            'second.py',
            first='n_layer = 5',
            second='n_layer = n_layer + 1\nn_embd = n_embd % 100',
        )['n_layer']
        == 6
    )
    assert (
        run('--n_layer=9', 'first.py', first='n_embd = n_layer * 2')['n_embd'] == 18
    )  # sees what stands to its left
    assert (
        run('first.py', '--n_layer=9')['n_layer'] == 9
        and run('--n_layer=9', 'first.py', first='n_layer = 5')['n_layer'] == 5
    )


@pytest.mark.parametrize(
    'argument, words',
    [
        ('--n_layr=3', ["unknown setting 'n_layr'", "'n_layer'"]),
        ('--Learning-Rate=3', ["'learning_rate'"]),
        ('--too_late=3', ['unknown setting', '--help']),
        ('--COUNT=3', ['unknown setting']),
        ('--n_layer=2.0', ['n_layer', 'an integer', 'default 2', "'2.0'", 'command line']),
        ('--n_layer=True', ['an integer']),
        ('--n_layer=2**3', ['an integer']),
        ('--n_layer=' + '-' * 50000 + '1', ['an integer']),
        ('--n_layer=' + '9' * 5000, ['an integer']),
        ('--resume=1', ['True or False']),
        ('--resume=true', ['write True']),
        ('--out_dir', ['--out_dir=out']),
        ('--n_layer', ['needs a value', '--n_layer=2']),
        ('--learning_rate=nan', ['a finite number', "'nan'"]),
        ('--learning_rate=-inf', ['a finite number']),
        ('--learning_rate=1e999', ['a finite number']),
        ('--learning_rate=True', ['a finite number']),
        ("--betas=(1, 'a')", ['a tuple']),
        ('--betas=0.5', ['a tuple']),
        ('n_layer=3', ['--key=value']),
        ('-n_layer=3', ['--key=value']),
        ('', ['--key=value']),
        ('missing.py', ['missing.py', 'No such file']),
    ],
)
def test_refused_arguments(capsys, run, argument, words):
    line = refused(capsys, run, argument)
    assert all(word in line for word in words), line


def test_values_without_equals_and_switches(capsys, run):
    assert run('--n_layer', '3', '--resume', '--out_dir', '-x') == DEFAULTS | {
        'n_layer': 3,
        'resume': True,
        'out_dir': '-x',
    }
    assert (
        run('--threads', '--resume=False')['threads'] is True
    )  # None takes anything, so it is a switch too
    capsys.readouterr()
    assert 'an integer' in refused(capsys, run, '--n_layer', 'x')
    assert '--resume=False' in refused(
        capsys, run, '--resume', 'False'
    )  # a switch takes no argument: not silently turned on
    assert '--n_layer=2' in refused(capsys, run, '--n_layer', '--resume')


@pytest.mark.parametrize(
    'text, words',
    [
        ('n_layer = 1\nn_layr = 3', ['bad.py:2', "'n_layer'"]),
        ('n_layer = "3"', ['bad.py:1', 'an integer', "'3'"]),
        ('out_dir = 3', ['a string']),
        ('resume = "true"', ['write True']),
        ('learning_rate = 1e999', ['bad.py:1', 'not finite']),
        ('import os', ['bad.py:1', "'import os'"]),
        ('print(1)', ['bad.py:1']),
        ('\nn_layer = int("3")', ['bad.py:2', 'int(']),
        ('n_layer = (1).real', ['bad.py:1']),
        ('n_layer = [1][0]', ['bad.py:1']),
        ('n_layer = unknown', ['unknown is not defined']),
        ('n_layer = COUNT', ['COUNT is not defined']),
        ('n_layer += 1', ['bad.py:1']),
        ('n_layer, n_embd = 1, 2', ['bad.py:1']),
        ('out_dir = f"{n_layer}"', ['bad.py:1']),
        ('out_dir = "a" * 10', ['needs numbers']),
        ('out_dir = "%d" % 10', ['needs numbers']),
        ('n_layer = 9 ** 9 ** 9', ['bad.py:1', 'too large']),
        ('n_layer = 2 ** 63 ** 2', ['too large']),
        ('learning_rate = 1e300 ** 9', ['bad.py:1']),
        ('learning_rate = (-1.0) ** 0.5', ['bad.py:1']),
        ('n_layer = 1 // 0', ['bad.py:1', 'zero']),
        ('threads = {[]: 1}', ['bad.py:1']),
        ('threads = {**{}}', ['bad.py:1']),
        ('threads = b"x"', ['bad.py:1']),
        ('n_layer = ' + '-' * 3000 + '1', ['bad.py:1']),
        ('n_layer = (', ['bad.py:1']),
        ('n_layer = 1\n  n_embd = 2', ['bad.py:2']),
        (b'out_dir = "\xff"', ['bad.py:1']),
        (b'n_layer = 1\0', ['bad.py']),
    ],
)
def test_refused_config_files(capsys, run, text, words):
    start = time.monotonic()
    line = refused(capsys, run, 'bad.py', bad=text)
    assert all(word in line for word in words), line
    assert time.monotonic() - start < 2  # a hostile power is refused, not computed


def test_a_folder_is_no_config_file(capsys, run, tmp_path):
    (tmp_path / 'folder.py').mkdir()
    assert 'folder.py' in refused(capsys, run, 'folder.py')


def test_help(capsys, run):
    with pytest.raises(SystemExit) as stop:
        run('--n_layer=3', '--help')
    assert not stop.value.code
    text = capsys.readouterr().out
    assert (
        text.startswith('Trains a toy.\n\n    python toy.py --n_layer=3')
        and 'usage: python toy.py' in text
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["--out_dir='out'", 'where', 'the', 'run', 'goes'] in lines and [
        '--n_layer=2',
        '-1',
        '=',
        'off',
    ] in lines
    assert (
        lines.index(['I/O'])
        < lines.index(['--resume=False'])
        < lines.index(['model'])
        < lines.index(['--n_embd=128'])
    )
    assert (
        'licence' not in text
        and 'imports' not in text
        and 'not a comment' not in text
        and 'too_late' not in text
    )


def test_the_differences_are_printed_by_rank_0(capsys, run, monkeypatch):
    run('--n_layer=3')
    assert capsys.readouterr().out == 'n_layer = 3  (default 2)\n'
    monkeypatch.setenv('RANK', '1')
    run('--n_layer=3')
    assert capsys.readouterr().out == ''


def test_in_a_real_script(tmp_path):
    (tmp_path / 'real.py').write_text(
        'import sys\nsys.path.insert(0, sys.argv.pop(1))\nfrom configurator import configure\nsteps = 5  # updates\n'
        'configure(globals())\nlater = 1\ndef main():\n    print(steps, later)\nmain()\n'
    )
    root = str(pathlib.Path(__file__).parents[1])
    command = [sys.executable, str(tmp_path / 'real.py'), root]
    done = subprocess.run([*command, '--steps=7'], capture_output=True, text=True)
    assert done.stdout == 'steps = 7  (default 5)\n7 1\n' and done.stderr == ''
    done = subprocess.run([*command, '--later=7'], capture_output=True, text=True)
    assert (
        done.returncode == 2
        and 'Traceback' not in done.stderr
        and "unknown setting 'later'" in done.stderr
    )


# -----------------------------------------------------------------------------
# how a script begins and ends

ROOT = pathlib.Path(__file__).parents[1]


def python(code, stdout=subprocess.PIPE, **environment):
    done = subprocess.run(
        [sys.executable, '-c', code],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={'PYTHONPATH': str(ROOT), **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    'script',
    sorted(
        p.name
        for p in ROOT.glob('*.py')
        if 'import torch' in p.read_text() and '__main__' in p.read_text()
    ),
)
def test_configurator_is_imported_before_torch(script):
    """It says how OpenMP's threads wait, which torch reads when it is loaded, and makes a ctrl-C during the seconds that takes no traceback."""
    imports = [
        node
        for node in ast.parse((ROOT / script).read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    modules = [getattr(node, 'module', None) or node.names[0].name for node in imports]
    others = {path.stem for path in ROOT.glob('*.py')} | {'torch', 'numpy'}
    assert next(name for name in modules if name in others) == 'configurator'


def test_ctrl_c_while_a_script_is_loading():
    code, _, error = python(
        'import configurator, os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)'
    )
    assert code == -2 and error == '\ninterrupted\n'


@pytest.mark.parametrize(
    ('given', 'spins'),
    [({}, '10000'), ({'GOMP_SPINCOUNT': '5'}, '5'), ({'OMP_WAIT_POLICY': 'active'}, 'None')],
)
def test_threads_spin_a_bounded_time_unless_the_user_says_otherwise(given, spins):
    assert (
        python('import configurator, os; print(os.environ.get("GOMP_SPINCOUNT"))', **given)[
            1
        ].strip()
        == spins
    )


@pytest.mark.parametrize(
    ('body', 'expected'),
    [
        ('return None', (0, '')),
        ('return 3', (3, '')),
        ('raise KeyboardInterrupt', (130, '\nlast words\n')),
        ('raise BrokenPipeError', (0, '')),
        ('open("/no/such")', (2, "error: [Errno 2] No such file or directory: '/no/such'\n")),
        ('configurator.fail("no")', (2, 'error: no\n')),
    ],
)
def test_how_a_script_ends(body, expected):
    code, _, error = python(
        f'import configurator\ndef main():\n    {body}\nconfigurator.run_script(main, "last words")'
    )
    assert (code, error) == expected


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full here')
@pytest.mark.parametrize('flush', [True, False])
def test_a_full_disk_behind_standard_output(flush):
    with open('/dev/full', 'w') as full:
        code, _, error = python(
            f'import configurator\nconfigurator.run_script(lambda: print("text", flush={flush}))',
            stdout=full,
        )
    assert (code, error) == (2, 'error: standard output: No space left on device\n')


def test_progress_is_due_once_in_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    due, seen = every(10), []
    for now[0], said in (
        (9, False),
        (10, False),
        (11, False),
        (19, True),
        (21, False),
        (29, False),
    ):
        seen.append(due(said))
    assert seen == [False, True, False, False, False, True]
