"""Test paper/first_hour.py without a GPU: steps that fail or take too long, and the report."""

import json
import shlex
import shutil
import subprocess
import sys

from configurator import configure

import pytest
import torch
from processes import ROOT
from small_runs import assert_refused

from paper import first_hour
from paper.first_hour import Step

SCRIPTS = {path.name for path in ROOT.glob('*.py')}
LOG = """import json, os, sys
os.makedirs(sys.argv[1])
with open(sys.argv[1] + '/log.jsonl', 'w') as file:
    for step in range(101):
        record = dict(step=step, ms=step, tokens_per_s=2 * step, memory_gb=3)
        print(json.dumps(record), file=file)
print('512 rows per micro-batch')"""
CELLS = """import json, os, sys
json.dump(dict(results=[dict(median=7.0)]), open(sys.argv[1], 'w'))
open(sys.argv[1].replace('.json', '.md'), 'w').write('H100\\n| median |\\n')
print(os.getcwd(), sys.argv[1], '/tmp/torchinductor_alice/ab.py')
sys.exit('no kernel')"""


def run_main(monkeypatch, path, steps):
    monkeypatch.setattr(sys, 'argv', ['first_hour.py', f'--out={path}'])
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(first_hour.ranks, 'device_name', lambda device: 'H100')
    monkeypatch.setattr(first_hour, 'STEPS', steps)
    return first_hour.main()


def test_every_command_is_one_that_its_script_takes(monkeypatch):
    """Those of `make gpu` and, on small machines, those of the demos."""
    monkeypatch.chdir(ROOT)
    commands = [step.command.format(data='D', out='O') for step in first_hour.STEPS]
    if shutil.which('make'):
        demos = ['make', '-n', 'demo', 'demo-sokoban', 'demo-states']
        commands += subprocess.check_output(demos, text=True).splitlines()
    checked = 0
    for command in commands:
        arguments = shlex.split(command)
        for i, name in enumerate(arguments):
            if name in SCRIPTS:
                configure({'__file__': str(ROOT / name)}, arguments[i + 1 :], quiet=True)
                checked += 1
    assert checked >= len(first_hour.STEPS) - 1


def test_a_step_that_fails_says_what_to_do_and_the_others_run(monkeypatch, tmp_path, capsys):
    """Figures of training are medians of its second half; cells are those measured so far. The
    report names no folder of the machine. A step has its share of the time and what those before it
    left."""
    monkeypatch.setattr(first_hour, 'LEAST', 0.5)
    steps = [
        Step('slow', '-c "import time; print(17, flush=True); time.sleep(60)"', 3, 'wait'),
        Step('late', '-c "" --out={out}/late.json', 0, 'hurry'),
        Step('training', f'-c "{CELLS}" {{out}}/training.json', 60, 'try less'),
        Step('recurrent', f'-c "{LOG}" {{out}}/recurrent', 0, 'try more'),
    ]
    path = tmp_path / 'new' / 'gpu.json'
    assert run_main(monkeypatch, path, steps) == 1
    report, text = json.loads(path.read_text()), path.with_suffix('.md').read_text()
    slow, late, training, recurrent = report['steps']
    assert slow['status'].startswith('ended after') and slow['last_lines'] == ['17']
    assert late['status'] == 'no time was left' and late['command'] in text
    assert training['status'] == 'failed (1)' and recurrent['status'] == 'ok'
    assert training['last_lines'] == [
        '. OUT/training.json /tmp/torchinductor_USER/ab.py',
        'no kernel',
    ]
    run = report['training']['recurrent']
    assert (run['ms'], run['tokens_per_s'], run['memory_gb']) == (75.5, 151, 3)
    assert '151 tokens/s, 76 ms per update, 3.0 GB. CUDA graphs: yes. Per GPU, the paper: ' in text
    assert 'the paper: 52,375 tokens/s, modeled: 428,000.' in text
    assert report['cells']['training'][0]['median'] == 7.0
    assert '| median |\n' in text and 'try less' in text
    printed = capsys.readouterr().out
    assert 'what to do: try less' in printed
    assert f'alone: python -c "" --out={tmp_path}/new/gpu/alone/late.json' in printed
    for folder in (tmp_path, first_hour.ROOT):
        assert str(folder) not in text + path.read_text()


def test_tests_that_hang_are_a_failure(monkeypatch, tmp_path, capsys):
    steps = [Step('tests', '-c "import time; time.sleep(60)"', 3, 'turn it off')]
    monkeypatch.setattr(first_hour, 'LEAST', 0.5)
    assert run_main(monkeypatch, tmp_path / 'gpu.json', steps) == 1
    assert 'what to do: turn it off' in capsys.readouterr().out


def test_without_a_gpu_or_with_an_older_report_nothing_is_run(monkeypatch, tmp_path):
    (tmp_path / 'gpu.json').write_text('kept')
    assert_refused('exists: choose another name', run_main, monkeypatch, tmp_path / 'gpu.json', [])
    monkeypatch.undo()
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, 'argv', ['first_hour.py'])
        assert_refused('finds no CUDA device', first_hour.main)
    assert (tmp_path / 'gpu.json').read_text() == 'kept'


@pytest.mark.parametrize('name', first_hour.TRAINED)
def test_both_runs_stand_beside_the_papers_figures(name):
    sizes = dict(zip(('model', 'L', 'E', 'C'), first_hour.TRAINED[name], strict=True))
    run = {**sizes, 'captured': True, 'updates': 100, 'ms': 1, 'tokens_per_s': 1, 'memory_gb': 1}
    assert 'Per GPU, the paper: ' in first_hour.describe(run)


def test_the_shares_of_the_steps_are_ten_minutes():
    assert sum(step.seconds for step in first_hour.STEPS) == 600
