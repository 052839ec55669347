"""Test what hacks of tests/hacks do, in patched copies of the project.

That every mode does the same is tested in test_hacks.py."""

import math
import textwrap

import numpy as np
import pytest
import small_runs
import torch
from processes import ROOT, apply_hacks, run_in
from small_runs import lm_arguments, read_log

from convlstm import AgentConfig, build_agent
from model import LanguageModel
from support.loader import load_val, write_shard

START = """
import torch
from reference import assert_close, make, run, tokens
from model import GPT, RecurrentGPT
from tracing import trace
"""


def check_in_patched(folder, hack, code):
    """Run code, which asserts something, in a copy of the project with a hack."""
    apply_hacks(folder, hack)
    run_in(folder, '-c', START + textwrap.dedent(code))


@pytest.mark.parametrize(
    'hack, settings, message',
    [
        ('j_looped_layers', 'n_loop=0', 'n_loop = 0: must be at least 1'),
        ('k_window_per_layer', 'windows=(3,)', 'windows = (3,): expected n_layer = 2 numbers'),
        ('k_window_per_layer', 'windows=(3, 5)', 'window = 5 of a layer: must be at least 1, and '),
        ('k_window_per_layer', 'windows=(-1, 4)', 'windows = (-1, 4): must be at least 0'),
        ('n_top_k', 'active_experts=2', 'active_experts = 2: needs a softmax aggregation'),
        (
            'n_top_k',
            "active_experts=3, aggregation='softmax_l2'",
            'active_experts = 3: n_expert = 2',
        ),
        ('o_delay', 'delay=0', 'delay = 0: must be at least 1'),
        ('p_mixed_recurrence', 'n_recurrent=3', 'n_recurrent = 3: n_layer = 2'),
        ('t_dropout', 'dropout=1.5', 'dropout = 1.5: must be between 0 and 1'),
    ],
)
def test_what_a_setting_of_a_hack_cannot_be_is_refused(tmp_path, hack, settings, message):
    code = f"""
        from support.script import UserError
        try:
            make(RecurrentGPT, {settings}).bind_weights(2, torch.float32)
        except UserError as error:
            assert str(error).startswith({message!r}), error
        else:
            raise AssertionError('nothing is refused')
    """
    check_in_patched(tmp_path, hack, code)


@pytest.mark.parametrize(
    'hack, name', [('o_delay', 'delay'), ('p_mixed_recurrence', 'n_recurrent')]
)
def test_a_setting_of_recurrence_is_refused_for_the_other_kind(tmp_path, hack, name):
    check_in_patched(
        tmp_path,
        hack,
        f"""
        from model import ModelConfig, build_model
        from support.script import UserError
        try:
            build_model(ModelConfig({name}=2), recurrent=False)
        except UserError as error:
            assert str(error) == '{name} = 2 is for recurrent = True'
        else:
            raise AssertionError('nothing is refused')
    """,
    )


def test_without_windows_of_layers_all_have_the_models(tmp_path):
    check_in_patched(
        tmp_path,
        'k_window_per_layer',
        """
        for windows, expected in (((0,), [4, 4]), ((0, 3), [4, 3]), ((2, 4), [2, 4])):
            model = make(RecurrentGPT, windows=windows)
            assert [layer.window for layer in model.layers] == expected
            assert model.config.window == 4
    """,
    )


def test_of_top_k_routing_two_experts_have_a_gate(tmp_path):
    check_in_patched(
        tmp_path,
        'n_top_k',
        """
        from model import softmax_gates
        config = make(GPT, active_experts=2, aggregation='softmax_mean').config
        scores = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)).double()
        gates = softmax_gates(scores, config, scores.dtype)
        top, experts = scores.topk(2)
        assert (gates > 0).sum(1).eq(2).all()
        assert_close(gates.gather(1, experts), (top / 6**0.5).softmax(1))
        config.active_experts = 0
        assert (softmax_gates(scores, config, scores.dtype) > 0).all()
    """,
    )


def test_with_a_delay_of_two_every_other_token_is_a_stream(tmp_path):
    """Here attention sees the token alone."""
    check_in_patched(
        tmp_path,
        'o_delay',
        """
        delayed, model = (make(RecurrentGPT, window=1, delay=n) for n in (2, 1))
        x = tokens(3, 9)
        logits, _ = delayed(x)
        for part in (slice(0, None, 2), slice(1, None, 2)):
            assert_close(logits[:, part], run(model, x[:, part])[0])
    """,
    )


def test_with_the_former_initial_scale_only_p_and_r_are_smaller(tmp_path):
    """By sqrt(Z / (Z + D)) and sqrt(D / (Z + D)), in recurrent agents: the random numbers are the
    same (paper/studies/initial_scale.py)."""
    sizes = {'arch': 'convglu', 'n_layer': 2, 'n_expert': 2, 'n_embd': 96}
    for recurrent in (True, False):
        torch.manual_seed(0)
        today = build_agent(AgentConfig(recurrent=recurrent, **sizes)).state_dict()
        torch.save(today, tmp_path / f'today_{recurrent}.pt')
    check_in_patched(
        tmp_path,
        'x_former_scale_convlstm',
        f"""
        from convlstm import AgentConfig, build_agent
        for recurrent in (True, False):
            torch.manual_seed(0)
            agent = build_agent(AgentConfig(recurrent=recurrent, **{sizes}))
            today = torch.load(f'today_{{recurrent}}.pt')
            if recurrent:
                today['wp'] *= (32 / (32 + 96)) ** 0.5
                today['wr'] *= (96 / (32 + 96)) ** 0.5
            for name, x in agent.state_dict().items():
                assert_close(x, today[name], rtol=1e-6)
    """,
    )


def test_of_mixed_recurrence_the_second_layer_reads_the_first_alone(tmp_path):
    """Its weights change the logits, but not what the first layer computes at any token."""
    check_in_patched(
        tmp_path,
        'p_mixed_recurrence',
        """
        model, x = make(RecurrentGPT, n_recurrent=1), tokens(2, 9)
        (first, *_), one = trace(model, x).s, make(RecurrentGPT, n_layer=1)
        one.load_state_dict(model.state_dict(), strict=False)
        assert_close(first, trace(one, x).s[0])
        logits, _ = model(x)
        with torch.no_grad():
            model.layers[1].up.mul_(2)
        assert_close(trace(model, x).s[0], first)
        assert (model(x)[0] - logits).abs().max() > 0.01
        assert not hasattr(model.layers[1], 'a')
    """,
    )


def test_every_norm_has_a_gain(tmp_path):
    """With gains of 1 the model is the reference, and each gain changes the logits."""
    check_in_patched(
        tmp_path,
        'q_gain',
        """
        for kind, n in ((RecurrentGPT, 10), (GPT, 8)):
            model, x = make(kind), tokens(2, 9)
            gains = [p for name, p in model.named_parameters() if 'gain_' in name]
            assert len(gains) == n  # of z and s, and for each layer of u, y, q and k, and h
            for gain in gains:
                gain.data.fill_(1)
            expected, _ = run(model, x)
            assert_close(model(x)[0], expected)
            for gain in gains:
                gain.data[..., 0] = 2
                assert (model(x)[0] - expected).abs().max() > 1e-4
                gain.data.fill_(1)
            assert {id(p) for p in gains} <= {id(p) for p in model.param_groups()['scalars']}
    """,
    )


def test_dropout_keeps_a_share_of_the_ffns_outputs_and_their_mean_in_training_only(tmp_path):
    check_in_patched(
        tmp_path,
        't_dropout',
        """
        from decode import Decoder
        from model import experts
        torch.manual_seed(0)
        model, u = make(GPT, n_expert=1, dropout=0.3), torch.randn(999, 16).double()

        def ffn(training):
            (w, _), x = model.train(training).bind_weights(999, u.dtype), torch.zeros_like(u)[None]
            return experts(w, u, x, None, model.config) - u

        expected, found = ffn(training=False), ffn(training=True)
        kept = found.abs() > 1e-9
        assert abs(kept.double().mean() - 0.7) < 0.02
        assert_close(found[kept], expected[kept] / 0.7, 1e-6)
        assert not torch.equal(ffn(training=True), found)
        logits = []
        for training in (False, True):
            decoder = Decoder(model.train(training), 1)
            decoder.prefill(torch.tensor([[1, 2, 3]]))
            decoder.step(torch.tensor([4]))
            logits.append(decoder.logits.clone())
        assert torch.equal(*logits) and logits[0].std() > 0.01 and model.training
    """,
    )


def test_gradients_flow_through_two_chunks(tmp_path):
    """The loss and the gradients of a micro-batch that runs as two chunks, which may differ in
    length, are those of one."""
    apply_hacks(tmp_path, 'm_two_chunks')
    code = """if True:
        import contextlib, unroll
        from reference import assert_close, assert_same_gradients, gradients, make, tokens
        from model import RecurrentGPT
        from train_lm import make_chunk
        unroll.TILE = 3
        model, x, y = make(RecurrentGPT), tokens(2, 9), tokens(2, 9, seed=1)
        loss, _ = model(x, y)
        expected, total = gradients(model, loss.objective), 0 * model.head[0, 0].detach()
        chunk = make_chunk(model, 2, total, contextlib.nullcontext())
        chunk(x, y, tuple(model.init_state(2)))
        assert_close(total, loss.cross_entropy)
        found = {name: p.grad for name, p in model.named_parameters()}
        assert_same_gradients(model, found, expected)
    """
    run_in(tmp_path, '-c', code)


def test_the_gru_cell_is_that_of_torch(tmp_path):
    """With the identity as the recurrent matrix of the candidate and none of the gates."""
    check_in_patched(
        tmp_path,
        'v_gru_convlstm',
        """
        from convlstm import lstm_cell, rms_norm
        x, h = torch.randn(2, 1, 1, 2, 3, 5).double(), torch.randn(2, 1, 1, 2, 5).double()
        gain, bias = torch.randn(2, 2, 3, 5).double()
        cell = torch.nn.GRUCell(15, 5, bias=False).double()
        cell.weight_ih.data = torch.eye(15).double()
        cell.weight_hh.data = torch.cat([torch.zeros(10, 5), torch.eye(5)]).double()
        inputs = (rms_norm(x, (-2, -1)) * gain + bias).flatten(-2)
        for start in (h, None):
            expected = cell(inputs.view(4, 15), None if start is None else h.view(4, 5))
            for found in lstm_cell(start, gain, bias, x.flatten(3)):
                assert_close(found.view(4, 5), expected)
    """,
    )


def test_an_agent_that_thinks_sees_a_board_twice(tmp_path):
    """Its state is reset at the first of two steps of the core alone."""
    check_in_patched(
        tmp_path,
        'w_thinking_convlstm',
        """
        from convlstm import AgentConfig, build_agent
        agent = build_agent(AgentConfig(n_embd=4, head_dim=8, n_layer=2, core_steps=2)).double()
        obs, state = tokens(2, 10, 10, 2, vocab=3).to(torch.uint8), agent.init_state(2)
        state, start = [x + 0.5 for x in state], torch.tensor([True, False])
        _, found = agent.encode_and_step(agent.prepare(), obs, start, state)
        macs, agent.config.core_steps = agent.nominal_macs(), 1
        assert macs == 2 * agent.nominal_macs()
        for start in (start, torch.tensor([False, False])):
            _, state = agent.encode_and_step(agent.prepare(), obs, start, state)
        for x, y in zip(found, state):
            assert_close(x, y)
        from support.script import UserError
        for sizes in ({'core_steps': 0}, {'core_steps': 2, 'recurrent': False}):
            try:
                AgentConfig(**sizes)
            except UserError as error:
                assert str(error).startswith(f'core_steps = {sizes["core_steps"]}')
            else:
                raise AssertionError('nothing is refused')
    """,
    )


def test_the_learning_rate_falls_along_a_line(tmp_path):
    apply_hacks(tmp_path, 'r_linear_decay')
    code = """if True:
        import train_lm
        train_lm.warmup_iters, train_lm.max_iters, train_lm.final_lr_ratio = 2, 6, 0.2
        print(*[train_lm.lr_at(step) for step in range(6)])
    """
    rates = [float(x) for x in run_in(tmp_path, '-c', code).split()]
    assert rates == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])


def train_with(folder, hack, **settings):
    """Train with a hack, and return the validated lines of the log."""
    apply_hacks(folder, hack)
    small_runs.write_shards(folder, val_000000=100, train_000001=2000)
    run_in(folder, 'train_lm.py', *lm_arguments(folder, folder / 'run', **settings))
    return [record for record in read_log(folder / 'run') if 'val_loss' in record]


def test_a_second_validation_set_is_logged_beside_the_first(tmp_path):
    other = tmp_path / 'other'
    other.mkdir()
    small_runs.write_shards(other, val_000000=100)
    shard = other / 'fineweb_val_000000.bin'
    write_shard(str(shard), np.arange(65, 165, dtype=np.uint16))
    *_, last = train_with(tmp_path, 's_second_validation', other_data_dir=other)
    x, y = load_val([str(shard)], small_runs.LM['val_tokens'], small_runs.LM['val_streams'], 256)
    model = LanguageModel.load_trained(tmp_path / 'run', 'last')
    loss = model(x, y, model.init_state(len(x)))[0].cross_entropy.item()
    assert last['other_val_loss'] == pytest.approx(loss, rel=1e-5)
    assert last['other_val_bits_per_byte'] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert last['val_loss'] < loss - 0.1
    printed = run_in(tmp_path, 'train_lm.py', f'--out_dir={tmp_path}/run', '--eval_only=True')
    assert f'validation loss {last["val_loss"]:.4f}' in printed
    assert f'on {other}: {loss:.4f}' in printed


def test_sizes_of_states_and_dead_units_are_logged(tmp_path):
    records = train_with(tmp_path, 'u_log_states')
    assert len(records) == 3
    for record in records:
        for l in range(2):
            assert record[f's_rms_{l}'] == pytest.approx(2**0.5, abs=0.3)  # two equal experts
            assert 0 <= record[f'dead_units_{l}'] < 1


def test_the_speed_of_ppo_is_measured(tmp_path):
    apply_hacks(tmp_path, 'ppo')
    (tmp_path / 'paper').symlink_to(ROOT / 'paper')  # with the table of targets
    sizes = ('--agents=1,2,4', '--unroll=3', '--n_envs=4', '--rounds=1', '--seconds=0.001')
    machine = ('--device=cpu', '--threads=1', f'--out={tmp_path / "report.json"}')
    assert 'env steps/s' in run_in(tmp_path, 'bench.py', '--suite=sokoban', *sizes, *machine)
