"""Test that the patches of tests/hacks reach every mode: check_edit.py checks patched copies of the
project. What the patches do is tested in test_hack_effects.py."""

import re

import pytest
from processes import (
    ROOT,
    apply_hacks,
    apply_patch,
    commit,
    run_check_edit,
    run_in,
    skip_without_interpreter,
)

HACKS = {path.stem: path for path in sorted((ROOT / 'tests' / 'hacks').glob('?_*.patch'))}
SETTINGS = {
    'a_max_aggregation': ['--aggregation=max'],
    'e_z_loss': ['--z_loss=0.1'],
    'g_max_convlstm': ['--aggregation=max'],
    'j_looped_layers': ['--n_loop=2'],
    'k_window_per_layer': ['--windows=(3,2)'],
    'n_top_k': ['--active_experts=2', '--aggregation=softmax_l2'],
    'o_delay': ['--delay=2'],
    'p_mixed_recurrence': ['--n_recurrent=1'],
    't_dropout': ['--dropout=0.3'],
    'w_thinking_convlstm': ['--core_steps=2'],
}
# the most lines that a hack may add: what the project promises
LINES = {'j_looped_layers': 4, 'k_window_per_layer': 6, 'l_tied_head': 1}
TOGETHER = ['b_swiglu', 'e_z_loss', 'j_looped_layers', 'k_window_per_layer', 'l_tied_head']
# Pairs that change the same lines, by their letters: f, h, o and p, for example, those of `step`.
EXCLUSIVE = 'fh fo fp ho hp op bc bq dq fq iq it lp pq qt'.split()
# Those that leave what the small runs log as it was: log lines, and a second validation set.
SAME_LOSSES = ['s_second_validation', 'u_log_states']
TRITON = """
import os
os.environ['TRITON_INTERPRET'] = '1'  # before anything imports triton
import torch
import kernels, unroll  # the former registers the overrides
from model import RecurrentGPT
from reference import gradients, make, tokens

unroll.TILE, unroll.GROUP = 4, 3
found = []
for overrides in (), ('attention', 'experts', 'loss'):
    model = make(RecurrentGPT, dtype=torch.float32, **{settings})
    model.overrides = frozenset(overrides)
    loss, _ = model(tokens(2, 5), tokens(2, 5, seed=1))
    found.append([loss.cross_entropy, gradients(model, loss.objective)])
torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
"""


def test_every_mode_follows_five_hacks(tmp_path):
    apply_hacks(tmp_path, *TOGETHER)
    settings = [x for hack in TOGETHER for x in SETTINGS.get(hack, [])]
    status, printed = run_check_edit(tmp_path, '--part=recurrent-lm', '--stage=training', *settings)
    assert status == 0, printed


@pytest.mark.long
def test_every_mode_of_an_agent_follows_a_hack(tmp_path):
    apply_hacks(tmp_path, 'g_max_convlstm')
    options = ('--part=recurrent-agent', '--stage=training')
    status, printed = run_check_edit(tmp_path, *options, *SETTINGS['g_max_convlstm'])
    assert status == 0, printed


@pytest.mark.long
@pytest.mark.parametrize('hack', HACKS)
def test_a_hack_is_right_from_training_to_its_export(tmp_path, hack):
    """And its losses, or those of one part of the check, are not those of HEAD beside them."""
    apply_hacks(tmp_path)
    commit(tmp_path)
    apply_hacks(tmp_path, hack)
    status, printed = run_check_edit(tmp_path, *SETTINGS.get(hack, []))
    assert status == 0, printed
    pairs = re.findall(r', trained: (.*); HEAD: (.*)', printed)
    are_equal = [now == before for now, before in pairs]
    assert pairs and all(are_equal) == (hack in SAME_LOSSES), printed


def check_triton(folder, hacks, **settings):
    """Compare a patched model with all Triton overrides enabled with the same model without."""
    apply_hacks(folder, *hacks)
    run_in(folder, '-c', TRITON.format(settings=settings))


def test_triton_overrides_drop_none_of_five_hacks(tmp_path):
    skip_without_interpreter()
    check_triton(tmp_path, TOGETHER, n_loop=2, windows=(4, 2), z_loss=0.1)


def test_hacks_can_be_applied_together_but_for_a_few_pairs(tmp_path):
    found = []
    for first in HACKS:
        folder = tmp_path / first
        folder.mkdir()
        apply_hacks(folder, first)
        for second in [x for x in HACKS if x > first]:
            if not apply_patch(folder, second, '--check'):
                found.append(first[0] + second[0])
    assert found == sorted(EXCLUSIVE)


def test_a_hack_takes_few_lines():
    for hack, most in LINES.items():
        lines = HACKS[hack].read_text().splitlines()
        added = [x for x in lines if x.startswith('+') and not x.startswith('+++')]
        assert len(added) <= most, hack
