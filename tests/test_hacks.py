"""The equations stand once: each patch of tests/hacks, of at most six lines in one file, is applied
to a copy of the project, and there every path trains and decodes as the patched plain equations do,
and not as the unpatched ones. --long compiles with Inductor."""

import os
import shutil
import subprocess

from conftest import start
import pytest
from test_train import ROOT

HACKS = {path.stem: path for path in sorted((ROOT / 'tests' / 'hacks').glob('?_*.patch'))}
SETTINGS = {'a_max_aggregation': {'aggregation': 'max'}, 'g_max_convlstm': {'aggregation': 'max'}}
plain = {}


def run(folder, what, settings, *options):
    paths = os.pathsep.join([str(folder), str(ROOT / 'tests')])
    env = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': paths}
    command = [ROOT / 'tests/hacks/run.py', *options, what, repr(settings)]
    process = start(command, cwd=folder, env=env)
    out, error = process.communicate()
    assert process.returncode == 0, out + error[-4000:]
    assert out.endswith('all paths agree\n'), out
    return out


@pytest.mark.parametrize('hack', HACKS)
def test_every_path_follows_a_patch(tmp_path, hack, request):
    lines, long = HACKS[hack].read_text().splitlines(), request.config.getoption('--long')
    for sign in '+-':
        heads = [line.startswith(3 * sign + ' ') for line in lines]
        assert sum(heads) == 1 and sum(line[0] == sign for line in lines) <= 7, 'six lines, a file'
    if hack in ('c_gelu', 'e_z_loss') and not long:
        pytest.skip('--long: of its kind the short form has b_swiglu, and f_gated_state')
    options, what = ['--inductor'] * long, 'agents' if 'convlstm' in hack else 'model'
    for file in ROOT.glob('*.py'):
        shutil.copy(file, tmp_path)
    if what not in plain:
        plain[what] = run(tmp_path, what, {}, *options)
    subprocess.run(['git', 'apply', str(HACKS[hack])], cwd=tmp_path, check=True)
    found = run(tmp_path, what, SETTINGS.get(hack, {}), *options)
    assert found != plain[what]  # it is another model
