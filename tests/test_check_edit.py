"""Test that check_edit.py names the modes in which an edit is wrong.

Each edit here replaces texts in a copy of the project. Most are wrong in one mode alone."""

import itertools
import re
from dataclasses import dataclass, field

import pytest
import torch
from processes import apply_hacks, commit, run_check_edit
from small_runs import error_of

import check_edit

EXACT = ('float64', 'float32')  # the dtypes in which small differences are seen


CHUNK = """        with autocast:
            loss, new_state = model(x, y, state or None)
        (loss.objective * share).backward()
        loss_sum.add_(loss.cross_entropy * share)
        copy_state(state, new_state)
"""
HALVES = """        for half in zip(x.chunk(2, 1), y.chunk(2, 1), strict=True):
            with autocast:
                loss, new_state = model(*half, state or None)
            (loss.objective * share / 2).backward()
            loss_sum.add_(loss.cross_entropy * share / 2)
            copy_state(state, new_state)
"""


@dataclass
class Edit:
    part: str
    stage: str
    changes: list[tuple[str, str, str]]  # file, text, what replaces it
    wrong: set[str]  # the modes that are to be named
    settings: list[str] = field(default_factory=list)
    hack: str = ''  # a patch of tests/hacks that is applied before


def in_dtypes(*modes, dtypes=('float64', 'float32', 'bfloat16')):
    """Return the names of modes in each dtype."""
    return {f'{mode} {dtype}' for mode in modes for dtype in dtypes}


EDITS = {
    'a gain in float32, which no product in bfloat16 takes': Edit(
        part='nonrecurrent-lm',
        stage='training',
        changes=[
            ('model.py', '    window: int  # W', '    gain: Tensor\n    window: int  # W'),
            (
                'model.py',
                '        self.window = config.window\n',
                '        self.window = config.window\n'
                '        self.gain = nn.Parameter(torch.ones(D))\n',
            ),
            (
                'model.py',
                '            window=self.window,\n',
                '            gain=self.gain, window=self.window,\n',
            ),
            ('model.py', 'attend(w.wqkv(x), cache)', 'attend(w.wqkv(x * w.gain), cache)'),
        ],
        wrong={f'{mode} bfloat16' for mode in ('plain', 'fast', 'compiled')},
    ),
    'dropout wherever gradients are enabled': Edit(
        part='recurrent-lm',
        stage='training',
        changes=[
            (
                'model.py',
                '    x = w.down(activation(w.up(x)))\n',
                '    x = w.down(activation(w.up(x)))\n'
                '    if torch.is_grad_enabled():\n        x = F.dropout(x, 0.3)\n',
            ),
        ],
        wrong=in_dtypes('recomputed', 'compiled recomputed'),
    ),
    'no gradient from segment to segment': Edit(
        part='recurrent-lm',
        stage='training',
        changes=[('unroll.py', '            segment.out_grad[-1] += ds\n', '')],
        wrong=in_dtypes('recomputed', 'compiled recomputed'),
    ),
    'another activation where it is compiled': Edit(
        part='nonrecurrent-lm',
        stage='training',
        changes=[
            (
                'model.py',
                '    return F.relu(x).square()\n',
                '    if torch.compiler.is_compiling():\n        return F.relu(x)\n'
                '    return F.relu(x).square()\n',
            ),
        ],
        wrong=in_dtypes('compiled'),
    ),
    'a scale that decoding lacks': Edit(
        part='nonrecurrent-lm',
        stage='evaluation',
        changes=[
            (
                'model.py',
                'return head_input(s, self.config)',
                'return 2 * head_input(s, self.config)',
            )
        ],
        wrong=in_dtypes('decoding', 'decoding compiled'),
    ),
    'other values from the chunk before': Edit(
        part='nonrecurrent-lm',
        stage='evaluation',
        changes=[('model.py', 'v.to(w.dtype))\n    cache', '1.2 * v.to(w.dtype))\n    cache')],
        wrong=in_dtypes('decoding', 'decoding compiled', 'validation in chunks', dtypes=EXACT),
    ),
    'other values where there is a mask': Edit(
        part='nonrecurrent-lm',
        stage='evaluation',
        changes=[
            (
                'model.py',
                '        y = attention(q, k, v, self.mask)',
                '        if self.mask is not None:\n            v = 2 * v\n'
                '        y = attention(q, k, v, self.mask)',
            ),
        ],
        wrong=in_dtypes('decoding', 'decoding compiled')
        | in_dtypes('as in training', dtypes=EXACT),
    ),
    'steps of an agent without the scale of its unroll': Edit(
        part='recurrent-agent',
        stage='evaluation',
        changes=[
            ('convlstm.py', 'start.shape), value.unflatten', 'start.shape), 2 * value.unflatten')
        ],
        wrong=in_dtypes('steps', 'steps compiled'),
    ),
    'no gradient from half to half of a chunk, whose loss is not the objective': Edit(
        part='recurrent-lm',
        stage='training',
        changes=[('train_lm.py', CHUNK, HALVES)],
        settings=['--z_loss=0.1'],
        hack='e_z_loss',
        wrong={'make_chunk'},
    ),
    'the second half of a chunk starts from the state of the first': Edit(
        part='recurrent-lm',
        stage='training',
        changes=[
            (
                'train_lm.py',
                CHUNK,
                HALVES.replace('            copy_state', '        copy_state'),
            )
        ],
        wrong={'make_chunk'},
    ),
    'chunks without a state, gradients of the last slice alone, heads of other experts': Edit(
        part='recurrent-lm',
        stage='training',
        changes=[
            ('train_lm.py', '        copy_state(state, new_state)\n', ''),
            (
                'model.py',
                'matmul_into(dlogits.t(), x_i, dw.dtype, total=dw)',
                'dw.copy_(dlogits.t() @ x_i)',
            ),
            (
                'ops.py',
                '    if shared:\n'
                '        return x.reshape(-1, G, E, R, K).permute(2, 0, 1, 3, 4).flatten(2)\n',
                '',
            ),
        ],
        wrong={'make_chunk', 'micro-batches', 'gradients', *in_dtypes('fast')},
    ),
    'a default setting that the model refuses': Edit(
        part='nonrecurrent-lm',
        stage='training',
        changes=[('train_lm.py', "init_b = 'one' ", "init_b = 'sqrt_experts' ")],
        wrong={'default settings'},
    ),
    'a state that outlives an episode, and a norm that one expert does not see': Edit(
        part='recurrent-agent',
        stage='training',
        changes=[
            ('train_sokoban.py', "start = step['done']", "start = step['solved']"),
            (
                'convlstm.py',
                '        terms = [] if ws is None',
                '        h = rms_norm(h)\n        terms = [] if ws is None',
            ),
        ],
        settings=['--arch=convlstm'],
        wrong={'rollout', 'one expert'},
    ),
    'no gradient from the rewards to the policy': Edit(
        part='recurrent-agent',
        stage='training',
        changes=[('train_sokoban.py', '(chosen * advantage)', '(chosen.detach() * advantage)')],
        wrong={'a2c_loss'},
    ),
    'gates of one expert, whose gradients are zero but for rounding': Edit(
        part='nonrecurrent-lm',
        stage='training',
        changes=[
            (
                'model.py',
                '    return F.softmax(scores.to(dtype) / math.sqrt(config.router_dim), -1)\n',
                '    gates = F.softmax(scores.to(dtype) / math.sqrt(config.router_dim), -1)\n'
                '    gates = gates * (gates == gates.amax(-1, keepdim=True))\n'
                '    return gates / gates.sum(-1, keepdim=True)\n',
            ),
        ],
        settings=['--aggregation=softmax_mean'],
        wrong={'gradients'},
    ),
    'label smoothing of the loss that is reported': Edit(
        part='recurrent-lm',
        stage='evaluation',
        changes=[
            (
                'model.py',
                "ignore_index=IGNORED, reduction='sum')",
                "ignore_index=IGNORED, reduction='sum', label_smoothing=0.1)",
            ),
        ],
        wrong=in_dtypes(
            'text by text',
            'validation',
            'validation in chunks',
            'validation compiled',
            dtypes=EXACT,
        ),
    ),
    'matrices that no update changes': Edit(
        part='nonrecurrent-lm',
        stage='scripts',
        changes=[('train_lm.py', '        muon.apply(shares)\n', '')],
        wrong={'trained'},
    ),
    'a warm-up after each start': Edit(
        part='nonrecurrent-lm',
        stage='scripts',
        changes=[
            (
                'train_lm.py',
                '    update = make_update(',
                '    first = step\n    update = make_update(',
            ),
            (
                'train_lm.py',
                'update(lr_at(step))',
                'update(lr_at(step) * min(1, (step - first + 1) / 3))',
            ),
        ],
        wrong={'resumed'},
    ),
    'a setting that only the trainer knows': Edit(
        part='nonrecurrent-lm',
        stage='scripts',
        changes=[
            ('model.py', '    cuda_graphs = False', '    scale = 1.0\n    cuda_graphs = False'),
            (
                'model.py',
                'return head_input(s, self.config)',
                'return self.scale * head_input(s, self.config)',
            ),
            (
                'train_lm.py',
                '    model.cuda_graphs =',
                '    model.scale = 0.5\n    model.cuda_graphs =',
            ),
        ],
        wrong={'loaded'},
    ),
}
SHORT = (
    'chunks without a state, gradients of the last slice alone, heads of other experts',
    'steps of an agent without the scale of its unroll',
    'a setting that only the trainer knows',
)


def apply_edit(folder, changes, *hacks):
    """Copy the project to `folder`, apply patches of tests/hacks, and replace texts there."""
    apply_hacks(folder, *hacks)
    for name, text, new in changes:
        source = (folder / name).read_text()
        assert source.count(text) == 1, f'{name}: {text}'
        (folder / name).write_text(source.replace(text, new))


def wrong_modes(printed):
    """Return the modes named by the lines that start with WRONG."""
    return set(re.findall(r'^WRONG [\w -]+, ([\w -]+):', printed, re.M))


@pytest.mark.parametrize(
    'name', [x if x in SHORT else pytest.param(x, marks=pytest.mark.long) for x in EDITS]
)
def test_the_modes_of_a_wrong_edit_are_named(tmp_path, name):
    edit = EDITS[name]
    apply_edit(tmp_path, edit.changes, *filter(None, [edit.hack]))
    options = (f'--part={edit.part}', f'--stage={edit.stage}')
    status, printed = run_check_edit(tmp_path, *options, *edit.settings)
    assert status == 1 and wrong_modes(printed) == edit.wrong, printed


FROZEN = '        self.embedding = nn.Parameter(torch.randn(config.vocab_size, config.n_embd))\n'
BRANCH = '            s = s + a if is_shared else a\n'
BIAS = '        self.bias = nn.ParameterList(torch.zeros(E, 2, D) for _ in range(L))\n'
RIGHT = {
    'a norm in float32': Edit(
        part='nonrecurrent-lm',
        stage='training',
        changes=[('model.py', '    return norm(s)\n', '    return norm(s.float()).to(s.dtype)\n')],
        wrong=set(),
    ),
    'a frozen embedding': Edit(
        part='recurrent-lm',
        stage='training',
        changes=[('model.py', FROZEN, f'{FROZEN}        self.embedding.requires_grad_(False)\n')],
        wrong=set(),
    ),
    'a branch whose gate starts at zero': Edit(
        part='recurrent-agent',
        stage='training',
        changes=[
            (
                'convlstm.py',
                BIAS,
                f'{BIAS}        self.gate = nn.Parameter(torch.zeros(()))\n'
                '        self.branch = normal(D, D, fan_in=D)\n',
            ),
            (
                'convlstm.py',
                BRANCH,
                f'{BRANCH}            s = s + self.gate * F.linear(s, self.branch)\n',
            ),
        ],
        settings=['--arch=convglu'],
        wrong=set(),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize('name', RIGHT)
def test_a_right_edit_agrees(tmp_path, name):
    edit = RIGHT[name]
    apply_edit(tmp_path, edit.changes)
    options = (f'--part={edit.part}', f'--stage={edit.stage}')
    status, printed = run_check_edit(tmp_path, *options, *edit.settings)
    assert status == 0, printed


@pytest.mark.parametrize('factor, kinks, agrees', [(1, 1, True), (1, 2, False), (1.001, 0, False)])
def test_a_slope_is_wrong_if_it_is_in_two_directions(monkeypatch, factor, kinks, agrees):
    monkeypatch.setattr(check_edit, 'wrong', [])
    x = torch.ones(5, dtype=torch.float64)
    jumps = itertools.chain([1e-3, 0] * kinks, itertools.repeat(0))  # of losses, by direction

    def loss_of():
        return x.square().sum() + next(jumps)

    check_edit.check_slope('gradients', [x], (2 * factor * x.clone(),), loss_of)
    assert (check_edit.wrong == []) == agrees


@pytest.mark.parametrize('detaches', [False, True])
def test_gradients_stopped_on_purpose_are_not_compared_with_slopes(monkeypatch, capsys, detaches):
    monkeypatch.setattr(check_edit, 'wrong', [])
    monkeypatch.setattr(check_edit, 'detaches', detaches)
    x = torch.ones(5, dtype=torch.float64)
    stopped = x.clone()  # the gradient of (x.detach() * x).sum()
    check_edit.check_slope('gradients', [x], (stopped,), lambda: x.square().sum())
    assert (check_edit.wrong == []) == detaches
    assert ('--detaches' in capsys.readouterr().out) != detaches


@pytest.mark.long
def test_head_prepares_the_data_that_an_edit_prepares_differently(tmp_path):
    apply_hacks(tmp_path)
    commit(tmp_path)
    read = 'yield json.loads(line).get(column)'
    apply_edit(tmp_path, [('data_fineweb.py', read, f'{read}.lower()')])
    options = ('--part=nonrecurrent-lm', '--stage=scripts')
    status, printed = run_check_edit(tmp_path, *options)
    now, before = re.search(r', trained: (.*); HEAD: (.*)', printed).groups()
    assert status == 0 and now != before and before.startswith('train_loss'), printed


def test_changed_files_are_those_that_git_names(tmp_path, monkeypatch):
    monkeypatch.setattr(check_edit, 'ROOT', tmp_path)
    changed = check_edit.all_changed.__wrapped__  # without its cache
    apply_hacks(tmp_path)
    assert changed() == set()  # git does not keep the project
    commit(tmp_path)
    assert changed() == set()
    for name in ('model.py', 'new.py'):
        (tmp_path / name).write_text('')
    assert changed() == {tmp_path / 'model.py', tmp_path / 'new.py'}


@pytest.mark.long
def test_dropout_in_evaluation_is_named(tmp_path):
    down = '    x = w.down(activation(w.up(x)))\n'
    apply_edit(tmp_path, [('model.py', down, f'{down}    x = F.dropout(x, 0.3)\n')])
    status, printed = run_check_edit(tmp_path, '--part=nonrecurrent-lm', '--stage=evaluation')
    line = 'forward float64: 24 tokens: draws random numbers, although the model is in eval()'
    assert status == 1 and f'WRONG nonrecurrent-lm, {line}' in printed, printed


@pytest.mark.long
def test_settings_that_change_nothing_or_were_not_given_are_named(tmp_path):
    apply_hacks(tmp_path)
    commit(tmp_path)
    apply_hacks(tmp_path, 'j_looped_layers')
    for name in ('data_states', 'kernels', 'tracing'):
        (tmp_path / f'{name}.py').write_text('MOVES = {}\n')
    options = ('--stage=scripts', '--recurrent=True', '--router_dim=9')
    status, printed = run_check_edit(tmp_path, *options)
    end = printed.partition('all modes agree, but this was not checked:\n')[2]
    assert status == 0 and end.splitlines() == [
        'recurrent-lm: the LSTM is not checked, --arch=lstm does that',
        'recurrent-lm, settings: --router_dim=9 changes nothing',
        'n_loop is new, but was not given: try another value, --n_loop=...',
        'data_states.py has changed, and nothing here runs it',
        'kernels.py has changed, and nothing here runs it',
        'tracing.py has changed, and nothing here runs it',
    ], printed


def apply_top_k(folder):
    """Apply the patch n_top_k, and let the model refuse settings that do not fit together."""
    apply_hacks(folder, 'n_top_k')
    source = (folder / 'model.py').read_text()
    refusal = """        if self.active_experts and not self.routed:
            raise UserError(f'active_experts = {self.active_experts}: needs a softmax aggregation')
"""
    text = '        D = self.n_embd\n'
    assert source.count(text) == 1
    (folder / 'model.py').write_text(source.replace(text, refusal + text))


def test_settings_that_the_model_refuses_are_not_checked(tmp_path):
    apply_top_k(tmp_path)
    status, printed = run_check_edit(tmp_path, '--part=recurrent-lm', '--active_experts=2')
    line = 'not checked: active_experts = 2: needs a softmax aggregation'
    assert status == 2 and all(x.endswith(line) for x in printed.splitlines()), printed


@pytest.mark.long
def test_a_setting_that_another_needs_is_named(tmp_path):
    apply_top_k(tmp_path)
    options = ('--part=nonrecurrent-lm', '--stage=scripts')
    settings = ('--active_experts=2', '--aggregation=softmax_l2', '--n_expert=3')
    status, printed = run_check_edit(tmp_path, *options, *settings)
    reason = 'train_lm.py: error: active_experts = 2: needs a softmax aggregation'
    line = f'settings: --aggregation=softmax_l2 cannot be left out: {reason}'
    assert status == 0 and line in printed and 'Traceback' not in printed, printed


@pytest.mark.parametrize(
    'arguments, reason',
    [
        (['--top_k=2'], "unknown setting 'top_k'"),
        (['--part=recurrent-lm', '--top_k=2'], "unknown setting 'top_k'"),
        (['--n_layer=-1'], 'n_layer = -1: must be at least 1'),
        (['n_layer=2'], "'n_layer=2': expected --name=value"),
    ],
)
def test_wrong_settings_are_refused_at_once(capfd, arguments, reason):
    assert reason in error_of(capfd, check_edit, arguments)
