"""Test that a hack reaches every mode. Each patch of tests/hacks is applied to a copy of the
project; there, every mode trains and decodes as the patched plain mode does, and not as the
unpatched one."""

import os
import sys

import processes
import pytest
from processes import ROOT

import unroll
from support import compiling

sys.path.append(str(ROOT / 'tests' / 'hacks'))
import check  # noqa: E402

HACKS = {path.stem: path for path in sorted((ROOT / 'tests' / 'hacks').glob('?_*.patch'))}
SETTINGS = {
    'a_max_aggregation': {'aggregation': 'max'},
    'e_z_loss': {'z_loss': 0.1},
    'g_max_convlstm': {'aggregation': 'max'},
    'j_looped_layers': {'n_loop': 2},
    'k_window_per_layer': {'windows': (4, 2)},
    'n_top_k': {'active_experts': 2, 'aggregation': 'softmax_l2'},
    'o_delay': {'delay': 2},
    'p_mixed_recurrence': {'n_recurrent': 1},
    'w_thinking_convlstm': {'core_steps': 2},
}
# the most lines that a hack may add: what the project promises
LINES = {'j_looped_layers': 4, 'k_window_per_layer': 6, 'l_tied_head': 1}
# hacks that are trained, resumed, exported and so on by the scripts, and the settings to do so
EDITS = {
    'j_looped_layers': ['--n_loop=2'],
    'k_window_per_layer': ['--windows=(16,8)'],
    'l_tied_head': [],
    'n_top_k': ['--n_expert=3', '--active_experts=2', '--aggregation=softmax_l2'],
    'o_delay': ['--delay=2'],
    'p_mixed_recurrence': ['--n_recurrent=1'],
    'q_gain': [],
}
# hacks that are tested together; alone each is tested with --long
TOGETHER = ['b_swiglu', 'e_z_loss', 'j_looped_layers', 'k_window_per_layer', 'l_tied_head']


def with_long(names, *short):
    """Return the hacks as parameters of a test; those not in `short` run with --long only."""
    return [x if x in short else pytest.param(x, marks=pytest.mark.long) for x in names]


def run_check(folder, *arguments):
    """Run tests/hacks/check.py with the modules in `folder`; return what it prints."""
    command = [ROOT / 'tests/hacks/check.py', *map(str, arguments)]
    done = processes.run(command, cwd=folder, env=os.environ | {'PYTHONPATH': str(folder)})
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.endswith('all modes agree\n'), done.stdout
    assert 'changes nothing' not in done.stdout, done.stdout
    return done.stdout


def check_patched(folder, hacks, *arguments):
    """Copy the modules of the project to `folder`, apply the patches there, and run check.py."""
    processes.apply_hacks(folder, *hacks)
    return run_check(folder, *arguments)


# Those of train_lm.py leave a chunk as it is.
OF_TRAINER = ('m_two_chunks', 'r_linear_decay', 's_second_validation', 'u_log_states')
FOLLOWED = [hack for hack in HACKS if hack not in OF_TRAINER]


@pytest.mark.parametrize('hack', with_long(FOLLOWED, 'g_max_convlstm'))
def test_every_mode_follows_a_hack(tmp_path, monkeypatch, hack):
    """The script prints the losses of the plain mode, and the patch changes them: of agents
    those of one architecture at least."""
    group = 'agents' if 'convlstm' in hack else 'models'
    printed = check_patched(tmp_path, [hack], group, SETTINGS.get(hack, {}))
    for owner, name in ((compiling.fused, 'enabled'), (unroll, 'MAX_KEPT_BYTES')):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    if group == 'agents':
        unpatched = [check.train_agent({}, arch=arch)[0] for arch in ('convlstm', 'convglu')]
    else:
        unpatched = [check.train_stream(check.make({}))[0]]
    for line, losses in zip(printed.splitlines(), unpatched, strict=False):
        if list(map(float, line.split())) != pytest.approx(losses):
            return
    raise AssertionError('the patch changes nothing')


LANGUAGE_MODEL_HACKS = [hack for hack in FOLLOWED if 'convlstm' not in hack]


@pytest.mark.parametrize('hack', with_long(LANGUAGE_MODEL_HACKS))
def test_triton_forms_never_drop_a_hack(tmp_path, hack):
    """A form whose functions were edited is not used, and the others compute the edited model."""
    pytest.importorskip('triton', reason='triton is not installed')
    check_patched(tmp_path, [hack], 'triton', SETTINGS.get(hack, {}))


@pytest.mark.parametrize('hack', with_long(EDITS))
def test_a_hack_is_right_from_training_to_its_export(tmp_path, hack):
    check_patched(tmp_path, [hack], *EDITS[hack])


def test_five_hacks_together_are_right_from_training_to_their_export(tmp_path):
    check_patched(tmp_path, TOGETHER, '--n_loop=2', '--windows=(16,8)', '--z_loss=0.1')


def test_triton_forms_drop_none_of_five_hacks(tmp_path):
    pytest.importorskip('triton', reason='triton is not installed')
    settings = {'n_loop': 2, 'windows': (4, 2), 'z_loss': 0.1}
    check_patched(tmp_path, TOGETHER, 'triton', settings)


def test_gradients_flow_through_two_chunks_after_a_patch(tmp_path):
    check_patched(tmp_path, ['m_two_chunks'], 'two_chunks', {})


@pytest.mark.parametrize('hack', LINES)
def test_a_hack_takes_few_lines(hack):
    lines = HACKS[hack].read_text().splitlines()
    added = [x for x in lines if x.startswith('+') and not x.startswith('+++')]
    assert len(added) <= LINES[hack]
