"""A hack reaches every mode: each patch of tests/hacks is applied to a copy of the project, and
there every mode trains and decodes as the patched plain mode does, and not as the unpatched one."""

import functools
import os
import shutil
import subprocess

import processes
import pytest
from processes import ROOT

HACKS = {path.stem: path for path in sorted((ROOT / 'tests' / 'hacks').glob('?_*.patch'))}
SETTINGS = {'a_max_aggregation': {'aggregation': 'max'}, 'g_max_convlstm': {'aggregation': 'max'}}
SHORT = ['b_swiglu', 'f_gated_state', 'g_max_convlstm', 'h_wider_state']


def run(folder, what, settings, *options):
    """Run tests/hacks/run.py on the copy in `folder`; return what it prints."""
    paths = os.pathsep.join([str(folder), str(ROOT / 'tests')])
    command = [ROOT / 'tests/hacks/run.py', *options, what, repr(settings)]
    done = processes.run(command, cwd=folder, env=os.environ | {'PYTHONPATH': paths})
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.endswith('all modes agree\n'), done.stdout
    return done.stdout


def copy_project(folder):
    for file in ROOT.glob('*.py'):
        shutil.copy(file, folder)


@functools.cache
def unpatched(what, *options):
    return run(ROOT, what, {}, *options)


def apply(hack, folder):
    copy_project(folder)
    subprocess.run(['git', 'apply', str(HACKS[hack])], cwd=folder, check=True)


@pytest.mark.parametrize('hack', HACKS)
def test_every_mode_follows_a_hack(tmp_path, hack, request):
    """The short form leaves some hacks out; --long compiles with Inductor."""
    long = request.config.getoption('--long')
    if hack not in SHORT and not long:
        pytest.skip('--long runs it')
    options, what = ['--inductor'] * long, 'agents' if 'convlstm' in hack else 'models'
    apply(hack, tmp_path)
    found = run(tmp_path, what, SETTINGS.get(hack, {}), *options)
    assert found.splitlines()[0] != unpatched(what, *options).splitlines()[0]  # another model


@pytest.mark.parametrize(
    'hack', ['e_z_loss', pytest.param('i_expert_scale', marks=[pytest.mark.long])]
)
def test_triton_forms_never_drop_a_hack(tmp_path, hack):
    """A form whose functions were edited is not used, and the others compute the edited model."""
    pytest.importorskip('triton', reason='triton is not installed')
    apply(hack, tmp_path)
    assert run(tmp_path, 'triton', {}) != unpatched('triton')
