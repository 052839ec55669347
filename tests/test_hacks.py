"""The equations stand once: each patch of tests/hacks, of at most six lines in one file, is applied to a copy of the project, and there every
path trains and decodes as the patched plain equations do, and not as the unpatched ones. --long compiles with Inductor."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parent.parent
HACKS = {path.stem: path for path in sorted((ROOT / 'tests' / 'hacks').glob('*.patch'))}
SETTINGS = {'a_max_aggregation': {'aggregation': 'max'}, 'g_max_convlstm': {'aggregation': 'max'}}
plain = {}


def run(folder, hack, settings, *options):
    env = dict(
        os.environ,
        OMP_NUM_THREADS='1',
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT / 'tests')]),
    )
    what = 'agents' if 'convlstm' in hack else 'model'
    command = [sys.executable, str(ROOT / 'tests/hacks/run.py'), *options, what, repr(settings)]
    done = forks.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith('all paths agree\n'), (
        done.stdout + done.stderr[-4000:]
    )
    return done.stdout


@pytest.mark.parametrize('hack', HACKS)
def test_every_path_follows_a_patch(tmp_path, hack, request):
    changed = [
        line
        for line in HACKS[hack].read_text().splitlines()
        if line[0] in '+-' and line[:3] not in ('+++', '---')
    ]
    assert (
        sum(line[0] == '+' for line in changed) <= 6
        and sum(line[0] == '-' for line in changed) <= 6
    )
    assert HACKS[hack].read_text().count('+++ ') == 1
    if hack in ('c_gelu', 'e_z_loss') and not request.config.getoption('--long'):
        pytest.skip('--long: of its kind the short form has b_swiglu, and f_gated_state')
    options = ['--inductor'] if request.config.getoption('--long') else []
    for file in ROOT.glob('*.py'):
        shutil.copy(file, tmp_path)
    what = 'agents' if 'convlstm' in hack else 'model'
    if what not in plain:
        plain[what] = run(tmp_path, hack, {}, *options)
    subprocess.run(['git', 'apply', str(HACKS[hack])], cwd=tmp_path, check=True)
    assert (
        run(tmp_path, hack, SETTINGS.get(hack, {}), *options) != plain[what]
    )  # it is another model
