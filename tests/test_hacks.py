"""Test that a hack reaches every mode. Each patch of tests/hacks is applied to a copy of the
project; there, every mode trains and decodes as the patched plain mode does, and not as the
unpatched one."""

import functools
import os
import shutil
import subprocess

import processes
import pytest
from processes import ROOT

HACKS = {path.stem: path for path in sorted((ROOT / 'tests' / 'hacks').glob('?_*.patch'))}
SETTINGS = {
    'a_max_aggregation': {'aggregation': 'max'},
    'e_z_loss': {'z_loss': 0.1},
    'g_max_convlstm': {'aggregation': 'max'},
}
# the hacks that are tested without --long
SHORT = ['b_swiglu', 'f_gated_state', 'g_max_convlstm', 'h_wider_state']
SHORT_TRITON = ['e_z_loss']


def hacks_in_short(names, short):
    """Return the hacks as parameters of a test; those not in `short` run with --long only."""
    return [x if x in short else pytest.param(x, marks=pytest.mark.long) for x in names]


def run_modes(folder, group, settings, *options):
    """Run tests/hacks/check.py with the modules in `folder`, for all modes of a group: models, agents
    or triton; return what it prints."""
    paths = os.pathsep.join([str(folder), str(ROOT / 'tests')])
    command = [ROOT / 'tests/hacks/check.py', *options, group, repr(settings)]
    done = processes.run(command, cwd=folder, env=os.environ | {'PYTHONPATH': paths})
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.endswith('all modes agree\n'), done.stdout
    return done.stdout


@functools.cache
def run_unpatched(group, *options):
    return run_modes(ROOT, group, {}, *options)


def copy_and_patch(hack, folder):
    """Copy the modules of the project to `folder` and apply the patch there."""
    for file in ROOT.glob('*.py'):
        shutil.copy(file, folder)
    subprocess.run(['git', 'apply', str(HACKS[hack])], cwd=folder, check=True)


@pytest.mark.parametrize('hack', hacks_in_short(HACKS, SHORT))
def test_every_mode_follows_a_hack(tmp_path, hack, request):
    """check.py prints the losses of the plain mode first, and the patch changes them. Without --long
    Inductor compiles nothing."""
    options = ['--inductor'] if request.config.getoption('--long') else []
    group = 'agents' if 'convlstm' in hack else 'models'
    copy_and_patch(hack, tmp_path)
    losses, *_ = run_modes(tmp_path, group, SETTINGS.get(hack, {}), *options).splitlines()
    unpatched_losses, *_ = run_unpatched(group, *options).splitlines()
    assert losses != unpatched_losses


LANGUAGE_MODEL_HACKS = [hack for hack in HACKS if 'convlstm' not in hack]


@pytest.mark.parametrize('hack', hacks_in_short(LANGUAGE_MODEL_HACKS, SHORT_TRITON))
def test_triton_forms_never_drop_a_hack(tmp_path, hack):
    """A form whose functions were edited is not used, and the others compute the edited model."""
    pytest.importorskip('triton', reason='triton is not installed')
    copy_and_patch(hack, tmp_path)
    assert run_modes(tmp_path, 'triton', SETTINGS.get(hack, {})) != run_unpatched('triton')
