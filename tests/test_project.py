"""The project as a newcomer meets it: --help, settings that do something, config files that load, a
file map that is true, imports that go one way, an old torch. The commands of docstrings name what
exists; those of README.md and the Makefile's demos run as they stand there, shrunk."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import tomllib

from conftest import run
import numpy as np
import pytest
from test_train import ROOT, TINY, data  # noqa: F401  a fixture

import sokoban
from configurator import configure, read_script

SCRIPTS = """bench data_fineweb figures play_sokoban probe_sokoban sample sokoban sweep train_lm
    train_sokoban"""
SCRIPTS = {f'{name}.py': importlib.import_module(name) for name in SCRIPTS.split()}
# in a code block: up to its comment
LINE = re.compile(r'^\s*(?:\$ )?((?:python|torchrun \S+ \S+) \w+\.py(?:[^#\n]*[^#\s])?)', re.M)
VALUE = r"""(?:=(?:'[^']*'|"[^"]*"|[\w./*,:-]*[\w*])| [a-z]+(?:-[a-z]+|(?= --))|\b)"""
PROSE = re.compile(rf'python \w+\.py(?: (?:config/\w+\.py|--\w+{VALUE}))*')
ELSEWHERE = {'bench.py', 'sweep.py', 'probe_sokoban.py'}  # tests of their own run these
AGENT = 'n_envs=4 unroll=3 eval_games=4 compile=False threads=1 device=cpu dtype=float32'
SMALL = {  # what makes a command of a script small
    'train_lm.py': 'n_kv_head=1 batch_size=0 max_iters=2 data_dir={shards} overwrite=True '
    + ' '.join(f'{k}={v}' for k, v in TINY.items() if k != 'max_iters'),
    'train_sokoban.py': f'{AGENT} n_embd=4 n_levels=100 total_steps=24 overwrite=True '
    'levels_dir={folder}/levels',
    'sokoban.py': 'picture={folder}/levels.png levels_dir={folder}/levels',
    'sample.py': 'max_new_tokens=3 device=cpu',
    'play_sokoban.py': 'levels_dir={folder}/levels device=cpu',
    'data_fineweb.py': 'tokenizer=bytes data_dir={folder}/shards{n}',
}
FILES = sorted(path.name for path in ROOT.glob('*.py'))
TREES = {name: ast.parse((ROOT / name).read_text()) for name in FILES}
ORDER = """bench probe_sokoban sweep train_lm train_sokoban sample play_sokoban figures baselines
    muon model unroll convlstm triton_kernels kernels sokoban data_fineweb checkpoint
    configurator"""


@pytest.mark.parametrize('script', SCRIPTS)
def test_help_names_every_setting_and_each_is_read(script, capsys):
    """Read by its name in the code, or as a word of a string: config['name'], a list of names."""
    with pytest.raises(SystemExit) as stop:
        configure(dict(vars(SCRIPTS[script])), ['--help'])
    lines, nodes = capsys.readouterr().out.splitlines(), list(ast.walk(TREES[script]))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    read |= {word for text in texts for word in text.split()}
    for name, value in read_script(ROOT / script)[0].items():  # each with a comment
        start = f'  --{name}={value!r}'
        assert name in read and any(x.startswith(start) and x[len(start) :].strip() for x in lines)
    assert stop.value.code == 0


def test_imports_go_one_way():
    """At its top a file imports only from those that stand after it in ORDER, which has all; a
    script first configurator, before torch, and numpy, which read how threads wait."""
    order = ORDER.split()
    assert sorted(f'{name}.py' for name in order) == FILES
    for k, name in enumerate(order):
        text = (ROOT / f'{name}.py').read_text()
        found = re.findall(r'^(?:from|import) (\w+)', text, re.M)
        assert not set(found) & set(order[: k + 1]), name
        known = [other for other in found if other in {*order, 'torch', 'numpy'}]
        assert known[:1] == ['configurator'] or '__main__' not in text, name


def test_every_config_file_is_one_of_its_script():
    whose = {'sokoban': 'train_sokoban.py', 'study': 'sweep.py', 'probe': 'probe_sokoban.py'}
    for path in (ROOT / 'config').glob('*.py'):
        first = path.name.partition('_')[0]
        script = SCRIPTS[whose.get(first, 'train_lm.py')]
        config = configure(dict(vars(script)), [str(path)], quiet=True)
        assert first == 'study' or config['out_dir'] == f'out/{path.stem}', path
        assert path.read_text().startswith('"""'), path


def test_readme_and_pyproject_map_the_files():
    """Every file of the root, once; the diffs of "Hack it" stand in tests/hacks."""
    readme = (ROOT / 'README.md').read_text()
    assert sorted(re.findall(r'^\| (\w+\.py) \|', readme, re.M)) == FILES
    modules = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']['setuptools']
    assert sorted(f'{name}.py' for name in modules['py-modules']) == FILES
    assert f'| config/ | {len(list((ROOT / "config").glob("*.py")))} files' in readme
    patches = [path.read_text().splitlines() for path in (ROOT / 'tests/hacks').glob('*.patch')]
    for diff in re.findall(r'^```diff$(.*?)^```$', readme, re.M | re.S):
        lines = {line for line in diff.splitlines() if line[:1] in ('+', '-')}
        assert len(lines) > 3 and any(lines <= set(patch) for patch in patches), diff


@pytest.mark.parametrize('script', ['train_lm', 'sample', 'sweep', 'probe_sokoban'])
def test_an_old_torch_is_one_line(script):
    code = f'import torch; torch.__version__ = "2.3.1"; import {script}'
    done = run(['-c', code])
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert done.stderr.startswith('error: torch 2.3.1')


# ---- commands ----


def from_readme():
    text = (ROOT / 'README.md').read_text()
    return LINE.findall(''.join(re.findall(r'^```$(.*?)^```$', text, re.M | re.S)))


def from_makefile():
    make = ['make', '-n', '--no-print-directory', '-o', '.venv/installed', 'demo', 'demo-sokoban']
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def from_docstrings():
    paths = [*(ROOT / name for name in SCRIPTS), *(ROOT / 'config').glob('*.py')]
    return PROSE.findall('\n'.join(read_script(path)[2] for path in paths))


def parts(command):
    """-> launcher, script, arguments."""
    words = shlex.split(command)
    k = next(k for k, word in enumerate(words) if word.endswith('.py'))
    return words[:k], words[k], words[k + 1 :]


def test_they_name_what_exists():
    """Scripts, config files and settings."""
    readme = from_readme()
    assert len(readme) > 20 and len(from_docstrings()) > 40
    for command in [*readme, *from_docstrings()]:
        _, script, argv = parts(command)
        argv = [os.path.join(ROOT, a) if a.startswith('config/') else a for a in argv]
        configure(dict(vars(SCRIPTS[script])), argv, quiet=True)


def make_files(folder):
    """What the commands read: books, levels, a prompt."""
    for name in ('books', 'levels'):
        (folder / name).mkdir()
    (folder / 'books' / 'a.txt').write_text('It was the best of times, it was the worst. ' * 120)
    (folder / 'prompt.txt').write_text('It was')
    for k, split in enumerate(('train', 'valid', 'test')):  # of which any agent solves some
        levels = sokoban.generate(100, 1, seed=k, max_moves=6)[0]
        np.save(folder / 'levels' / f'unfiltered-{split}.pack17.npy', levels)


def shrunk(command, folder, shards, number):
    """Its words: folders below this one, and after its own arguments those that make it small."""
    launcher, script, argv = parts(command)
    below = r'\b(out/|books/|prompt\.txt|game\.gif)'
    argv = [re.sub(below, rf'{folder}/\1', a) for a in argv]
    small = SMALL.get(script, '').format(folder=folder, shards=shards, n=number).split()
    config = next((a[7:-3] for a in argv if a.startswith('config/')), '')
    if script.startswith('train_') and not any(a.startswith('--out_dir=') for a in argv):
        small += [f'out_dir={folder}/out/{config}']
    if '--resume=True' in argv or '--eval_only=True' in argv:
        small += ['overwrite=False']
    if '--arch=transformer' in argv:
        small += ['n_expert=1']
    ranks = 2 if launcher[0] == 'torchrun' else 1
    return [script, *argv, *[f'--{setting}' for setting in small]], ranks


@pytest.mark.parametrize('commands, least', [(from_makefile, 7), (from_readme, 18)])
def test_they_run(data, tmp_path, commands, least):  # noqa: F811
    """In order: some go on where others stopped. Downloads: test_data.py."""
    make_files(tmp_path)
    env, ran = {**os.environ, 'OMP_NUM_THREADS': '1'}, 0
    for command in commands():
        if parts(command)[1] not in ELSEWHERE and '--pretokenized' not in command:
            words, ranks = shrunk(command, tmp_path, data, ran)
            done = run(words, ranks, env=env, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr[-2000:])
            ran += 1
    assert ran >= least
