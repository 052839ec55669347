"""The project as a newcomer meets it: --help, settings that do something, config files that load, a
file map and a pyproject.toml that are true, imports that go one way, an old torch."""

import ast
import re
import sys
import tomllib

import forks
import pytest
from test_commands import ROOT, SCRIPTS

from configurator import configure, read_script

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
    """At its top a file imports only from those that stand after it in ORDER, which has all."""
    order = ORDER.split()
    assert sorted(f'{name}.py' for name in order) == FILES
    for k, name in enumerate(order):
        for node in TREES[f'{name}.py'].body:
            found = {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            found |= {node.module} if isinstance(node, ast.ImportFrom) else set()
            assert not found & set(order[: k + 1]), name


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


@pytest.mark.parametrize('script', ['train_lm.py', 'sample.py', 'sweep.py', 'probe_sokoban.py'])
def test_an_old_torch_is_one_line(script, tmp_path):
    lines = ['import runpy, sys, torch', 'torch.__version__ = "2.3.1"', f'sys.argv = [{script!r}]']
    lines += [f'sys.path.insert(0, {str(ROOT)!r})']
    lines += [f'runpy.run_path({str(ROOT / script)!r}, run_name="__main__")']
    words = [sys.executable, '-c', '\n'.join(lines)]
    done = forks.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert done.stderr.startswith('error: torch 2.3.1')
