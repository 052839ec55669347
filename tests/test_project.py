"""The project as a newcomer meets it: --help, settings that do something, config files that load, a file map that is true, an old torch."""

import ast
import re
import sys
from pathlib import Path

import forks
import pytest
from test_commands import SCRIPTS

import probe_sokoban
import sweep
import train_lm
import train_sokoban
from configurator import configure, read_script

ROOT = Path(__file__).resolve().parent.parent


def test_the_scripts_are_these():
    """SCRIPTS of test_commands.py, whose commands are checked, has all that can be started."""
    assert set(SCRIPTS) == {
        p.name for p in ROOT.glob('*.py') if "\nif __name__ == '__main__':" in p.read_text()
    }


@pytest.mark.parametrize('script', SCRIPTS)
def test_help_names_every_setting(script, capsys):
    defaults, _, docstring = read_script(ROOT / script)
    with pytest.raises(SystemExit) as stop:
        configure(dict(vars(SCRIPTS[script])), ['--help'])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and docstring.strip().splitlines()[0] in out
    for name, value in defaults.items():
        line = next(line for line in out.splitlines() if line.startswith(f'  --{name}={value!r}'))
        assert line.removeprefix(f'  --{name}={value!r}').strip(), name  # each with a comment


@pytest.mark.parametrize('script', SCRIPTS)
def test_every_setting_is_read(script):
    """By its name in the code, or as a string: config['name'], a tuple of names."""
    defaults = read_script(ROOT / script)[0]
    nodes = list(ast.walk(ast.parse((ROOT / script).read_text())))
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} | {
        n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    if (
        script == 'baselines.py'
    ):  # takes train_lm.py's config files, and says which settings mean nothing to it
        read |= {*read_script(ROOT / 'train_lm.py')[0], 'out'}  # out: bench.py's report reads it
    assert defaults and not defaults.keys() - read


@pytest.mark.parametrize('script', sorted(p.name for p in ROOT.glob('*.py')))
def test_public_functions_have_type_hints(script):
    """All arguments and the result; torch's own protocols (autograd.Function, compiled kernels) aside."""
    body = ast.parse((ROOT / script).read_text()).body
    functions = [
        f
        for node in body
        for f in (node.body if isinstance(node, ast.ClassDef) else [node])
        if isinstance(f, ast.FunctionDef)
    ]
    bare = []
    for f in functions:
        names = [
            a
            for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
            if a.arg not in ('self', 'cls')
        ]
        if (
            f.name.startswith('_')
            or [a.arg for a in names[:1]] == ['ctx']
            or any('triton.jit' in ast.unparse(d) for d in f.decorator_list)
        ):
            continue
        bare += [f.name] if f.returns is None or any(a.annotation is None for a in names) else []
    assert not bare


def test_every_config_file_is_one_of_its_script():
    for path in sorted((ROOT / 'config').glob('*.py')):
        kind = path.name.partition('_')[0]
        module = {'sokoban': train_sokoban, 'study': sweep, 'probe': probe_sokoban}.get(
            kind, train_lm
        )
        config = configure(dict(vars(module)), [str(path)], quiet=True)
        assert path.read_text().startswith('"""') and (
            kind == 'study' or config['out_dir'] == f'out/{path.stem}'
        ), path


def test_readme_maps_the_files():
    """Every file of the root, once."""
    readme = (ROOT / 'README.md').read_text()
    assert sorted(re.findall(r'^\| (\w+\.py) \|', readme, re.M)) == sorted(
        path.name for path in ROOT.glob('*.py')
    )
    said = int(re.search(r'^\| config/ \| (\d+) files', readme, re.M)[1])
    assert said == len(list((ROOT / 'config').glob('*.py')))


@pytest.mark.parametrize(
    'script',
    ['train_lm.py', 'train_sokoban.py', 'sample.py', 'sweep.py', 'bench.py', 'probe_sokoban.py'],
)
def test_an_old_torch_is_one_line(script, tmp_path):
    (tmp_path / 'old.py').write_text(
        f'import runpy, sys, torch\ntorch.__version__ = "2.3.1+cu121"\nsys.path.insert(0, {str(ROOT)!r})\n'
        f'sys.argv = [{script!r}]\nrunpy.run_path({str(ROOT / script)!r}, run_name="__main__")\n'
    )
    done = forks.run(
        [sys.executable, str(tmp_path / 'old.py')], capture_output=True, text=True, cwd=tmp_path
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith('error: torch 2.3.1')
        and done.stderr.count('\n') == 1
    ), done.stderr
