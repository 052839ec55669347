"""The recipe, as the paper and the design give it, against what the trainers really do: defaults,
config files, sizes, optimizers, schedules, losses. Every expected value is written here by hand and
none is read from the code. tests/mutate.py changes one setting at a time and sees that a test here
turns red."""

import copy
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import data_fineweb
import train_lm
import train_sokoban
from configurator import configure, read_config, read_script
from convlstm import AgentConfig, build_agent
from model import ModelConfig, build_model
from muon import Muon
from sokoban import check_boards

ROOT = Path(__file__).resolve().parent.parent

# ---- defaults ----

LM = {  # section 3
    'tokenizer': 'gpt2',
    'tokens_per_step': 131072,
    'max_iters': 10000,
    'recurrent': True,
    'n_layer': 2,  # the small budget: 16 blocks of width 768
    'n_expert': 8,
    'n_embd': 768,
    'n_head': 0,  # by the rule: heads of 96
    'n_kv_head': 0,  # by the rule: half as many
    'window': 128,
    'block_size': 64,
    'aggregation': 'sqrt_sum',
    'share_kv': True,
    'residual': 'expert',
    'learning_rate': 2e-2,
    'embedding_lr': 0.2,
    'head_lr': 0.004,
    'scalar_lr': 2e-2,
    'momentum': 0.95,
    'weight_decay': 0.01,
    'betas': (0.8, 0.95),
    'grad_clip': 1.0,
    'warmup_iters': 100,
    'final_lr_ratio': 0.01,
    'val_streams': 512,
}
LM_OURS = {  # where paper and design are silent
    'arch': 'experts',
    'baseline_lr': 0.0,
    'wandb_project': 'parallel-experts',
    'val_tokens': 10485760,
    'router_dim': 64,
    'adam_eps': 1e-10,
    'eval_interval': 250,
    'log_interval': 1,
    'batch_size': 0,
    'seed': 1337,
    'out_dir': 'out/lm',
    'data_dir': 'data/fineweb',
    'resume': False,
    'overwrite': False,
    'eval_only': False,
    'plot': False,
    'tensorboard': False,
    'wandb': False,
    'device': 'auto',
    'dtype': 'auto',
    'compile': True,
    'graphs': True,
    'path': 'fast',
    'threads': 0,
}
AGENT = {  # section 4
    'split': 'unfiltered-train',
    'env': 'torch',
    'n_envs': 32,
    'arch': 'convlstm',
    'recurrent': True,
    'n_layer': 4,  # the small budget's best: L = 4, E = 1, d = 64
    'n_expert': 1,
    'n_embd': 64,
    'aggregation': 'sqrt_sum',
    'radius': -1,
    'residual': 'expert',
    'total_steps': 50_000_000,
    'unroll': 20,
    'gamma': 0.97,
    'gae_lambda': 0.97,
    'entropy_coef': 0.01,
    'value_coef': 1.0,
    'learning_rate': 4e-4,
    'adam_eps': 1e-6,
    'grad_clip': 1.0,
}
AGENT_OURS = {
    'router_dim': 64,
    'head_dim': 256,
    'eval_split': 'unfiltered-valid',
    'eval_games': 512,
    'eval_interval': 1000,
    'log_interval': 50,
    'n_levels': 100000,
    'n_boxes': 4,
    'max_moves': 120,
    'levels_dir': '',
    'download': False,
    'levels': '',
    'best': False,
    'reuse': True,
    'seed': 1337,
    'out_dir': 'out/sokoban',
    'resume': False,
    'overwrite': False,
    'eval_only': False,
    'plot': False,
    'tensorboard': False,
    'wandb': False,
    'device': 'auto',
    'dtype': 'auto',
    'compile': True,
    'graphs': True,
    'path': 'fast',
    'threads': 0,
}


@pytest.mark.parametrize(
    'script, expected',
    [('train_lm.py', LM | LM_OURS), ('train_sokoban.py', AGENT | AGENT_OURS)],
)
def test_defaults(script, expected):
    """A setting that is new is not seen here, but by mutate.py: add it to a table above."""
    defaults = read_script(ROOT / script)[0]
    assert {name: defaults[name] for name in expected} == expected
    assert all(type(defaults[name]) is type(value) for name, value in expected.items())


# ---- config files ----

LEVELS = (1, 2, 4, 8, 16)
TEXT = {  # family: L * E blocks of width 768, levels, window, chunk: recurrent and not
    'small': (16, LEVELS, 128, 64, 256),
    'small_long': (16, LEVELS, 1024, 64, 2048),
    'medium': (32, (*LEVELS, 32), 128, 64, 256),
}
BOARDS = {  # family: (E, d) at L = 1, 2, 4, 8, 16: the rows with a solve rate in the paper
    'small': ((1, 128), (2, 64), (1, 64), (2, 32), (1, 32)),
    'medium': ((1, 256), (2, 128), (1, 128), (2, 64), (1, 64)),
    'large': ((4, 512), (8, 256), (1, 512), (7, 128), (13, 64)),
    'small_ff': ((4, 64), (2, 64), (1, 64), (2, 32), (1, 32)),
    'medium_ff': ((4, 128), (2, 128), (1, 128), (2, 64), (1, 64)),
    'large_ff': ((58, 128), (2, 512), (4, 256), (7, 128), (13, 64)),
}


def text_files():
    for family, (blocks, levels, window, chunk, chunk_gpt) in TEXT.items():
        for recurrent, name, block_size in (
            (True, family, chunk),
            (False, f'{family}_gpt', chunk_gpt),
        ):
            for L in levels:
                own = {
                    'recurrent': recurrent,
                    'n_layer': L,
                    'n_expert': blocks // L,
                    'n_embd': 768,
                    'window': window,
                    'block_size': block_size,
                    'out_dir': f'out/{name}_L{L}',
                }
                yield f'{name}_L{L}.py', own


def board_files():
    for family, cells in BOARDS.items():
        for L, (E, d) in zip(LEVELS, cells, strict=True):
            own = {
                'recurrent': not family.endswith('_ff'),
                'n_layer': L,
                'n_expert': E,
                'n_embd': d,
            }
            yield f'sokoban_{family}_L{L}.py', own | {'out_dir': f'out/sokoban_{family}_L{L}'}


def test_config_files_of_the_paper():
    """Each is the recipe at its own sizes, and nothing else: but for how many rows a GPU runs at a
    time, which is its own matter."""
    lm, agent = LM | LM_OURS, AGENT | AGENT_OURS
    del lm['batch_size']
    seen = set()
    for script, recipe, files in (
        ('train_lm.py', lm, text_files()),
        ('train_sokoban.py', agent, board_files()),
    ):
        defaults = read_script(ROOT / script)[0]
        for name, own in files:
            settings, expected = dict(defaults), recipe | own
            read_config(str(ROOT / 'config' / name), settings, defaults)
            assert {key: settings[key] for key in expected} == expected, name
            seen.add(name)
    families = ('small', 'medium', 'sokoban_small', 'sokoban_medium', 'sokoban_large')
    assert {name for name in os.listdir(ROOT / 'config') if name.startswith(families)} == seen


OURS = {  # our own small runs: what they change of the recipe but for sizes
    'demo.py': {'warmup_iters': 20, 'max_iters': 200},
    'tiny_lm.py': {'warmup_iters': 17, 'max_iters': 168, 'tokens_per_step': 10240},
    'tiny_gpt.py': {
        'warmup_iters': 17,
        'max_iters': 168,
        'tokens_per_step': 10240,
        'recurrent': False,
    },
    'sokoban_demo.py': {
        'learning_rate': 1e-3,
        'n_envs': 64,
        'unroll': 10,
        'total_steps': 1_600_000,
    },
    'sokoban_tiny.py': {
        'learning_rate': 1e-3,
        'n_envs': 64,
        'unroll': 10,
        'total_steps': 1_152_000,
    },
}
SIZES = (
    'tokenizer',
    'tokens_per_step',
    'max_iters',
    'warmup_iters',
    'val_streams',
    'split',
    'arch',
)
SIZES += ('n_layer', 'n_expert', 'n_embd', 'n_head', 'window', 'block_size')


@pytest.mark.parametrize('name', OURS)
def test_config_files_of_our_own(name):
    """The small runs keep the paper's optimizer, schedule and loss but for what is named above."""
    script, recipe = ('train_sokoban.py', AGENT) if 'sokoban' in name else ('train_lm.py', LM)
    defaults = read_script(ROOT / script)[0]
    settings = dict(defaults)
    read_config(str(ROOT / 'config' / name), settings, defaults)
    expected = {key: value for key, value in recipe.items() if key not in SIZES} | OURS[name]
    assert {key: settings[key] for key in expected} == expected


# ---- language models: sizes, optimizers, schedule ----


def test_sizes_of_language_models():
    """V, heads of 96 and half as many for keys and values, FFN of 4 D, embedding and head
    untied."""
    assert data_fineweb.VOCAB == {'gpt2': 50304, 'bytes': 256}
    for D, H in ((384, 4), (768, 8), (1536, 16)):
        c = ModelConfig(n_embd=D)
        assert (c.n_head, c.n_kv_head, c.head_dim, c.vocab_size) == (H, H // 2, 96, 50304)
    model = build_model(
        ModelConfig(vocab_size=11, n_layer=1, n_expert=3, n_embd=192), recurrent=True
    )
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        'embedding': (11, 192),
        'head': (11, 192),
        'levels.0.wq': (3, 192, 192),
        'levels.0.wk': (3, 96, 192),
        'levels.0.wv': (3, 96, 192),
        'levels.0.wo': (3, 192, 192),
        'levels.0.up': (3, 768, 192),
        'levels.0.down': (3, 192, 768),
        'levels.0.a': (),
        'levels.0.b': (),
    }


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp('text')
    tokens = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint16)
    for name in ('val_000000', 'train_000001'):
        data_fineweb.write_shard(str(folder / f'fineweb_{name}.bin'), tokens)
    data_fineweb.write_meta(str(folder), {'tokenizer': 'bytes', 'source': 'test', 'shards': []})
    return folder


def lm_run(text, **settings):
    """A run of the defaults, but for its size, with weights that all matter."""
    small = {
        'data_dir': text,
        'tokenizer': 'bytes',
        'tokens_per_step': 128,
        'n_layer': 1,
        'n_expert': 2,
        'n_embd': 192,
        'val_tokens': 96,
        'val_streams': 3,
        'device': 'cpu',
        'dtype': 'float32',
        'threads': 1,
    }
    argv = [f'--{key}={value}' for key, value in (small | settings).items()]
    run = train_lm.make_run(configure(vars(train_lm), argv, quiet=True))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return run


@pytest.mark.parametrize('recurrent', [True, False])
def test_language_model_settings_arrive(text, recurrent):
    """Each setting of the model in its own place; whole rows of block_size tokens; validation in so
    many streams."""
    sizes = {
        'n_layer': 3,
        'n_expert': 2,
        'n_embd': 48,
        'n_head': 6,
        'n_kv_head': 3,
        'window': 7,
        'block_size': 16,
        'aggregation': 'softmax_mean',
        'share_kv': False,
        'residual': 'shared',
        'router_dim': 5,
    }
    run = lm_run(text, recurrent=recurrent, seed=5, **sizes)
    assert vars(run.model.config) == sizes | {'vocab_size': 256, 'path': 'fast'}
    assert type(run.model).__name__ == ('RecurrentGPT' if recurrent else 'GPT')
    assert type(run.loader).__name__ == ('StreamLoader' if recurrent else 'SequenceLoader')
    x, y, _ = run.loader.next()
    assert x.shape == y.shape == (8, 16) and run.val[0].shape == (3, 32)


AT_192 = {'embedding': 0.4, 'head': 0.008}  # (192 / 768)^-0.5 = 2 times the rates at 768
AT_768 = {'embedding': 0.2, 'head': 0.004}
MUON = {'wq': 1, 'wk': 1, 'wv': 1, 'wo': 1, 'up': 2, 'down': 1, 'router_q': 1, 'router_k': 1}
ADAM = ('a', 'b', 'router_q_bias', 'router_k_bias', 'expert_embedding')


@pytest.mark.parametrize('n_embd, rates', [(192, AT_192), (768, AT_768)])
def test_who_optimizes_what(text, n_embd, rates):
    """Muon the core's and the router's matrices, AdamW the rest: their settings and peak rates."""
    run = lm_run(text, n_embd=n_embd, n_expert=1, aggregation='softmax_l2')
    muon, adamw = run.optimizers
    assert type(muon) is Muon and type(adamw) is torch.optim.AdamW
    found = {}
    names = {id(p): name.split('.')[-1] for name, p in run.model.named_parameters()}
    for kind, optimizer in (('muon', muon), ('adamw', adamw)):
        for group in optimizer.param_groups:
            for p in group['params']:
                assert names[id(p)] not in found
                found[names[id(p)]] = kind, group['peak_lr']
    expected = {name: ('adamw', rate) for name, rate in rates.items()}
    expected |= {name: ('muon', 0.02) for name in MUON} | {name: ('adamw', 0.02) for name in ADAM}
    assert found.keys() == expected.keys()
    for name, (kind, rate) in expected.items():
        assert found[name] == (kind, pytest.approx(rate)), name
    of_muon = {'momentum': 0.95, 'nesterov': True, 'ns_steps': 5, 'weight_decay': 0.01}
    of_adamw = {'betas': (0.8, 0.95), 'eps': 1e-10, 'weight_decay': 0.0, 'amsgrad': False}
    for optimizer, wanted in ((muon, of_muon), (adamw, of_adamw)):
        for group in optimizer.param_groups:
            assert {key: group[key] for key in wanted} == wanted


def test_defaults_of_muon():
    p = torch.nn.Parameter(torch.ones(2, 2))
    assert Muon([p]).defaults == {
        'lr': 0.02,
        'momentum': 0.95,
        'nesterov': True,
        'ns_steps': 5,
        'weight_decay': 0.01,
    }


SCHEDULE = {  # update: fraction of every peak; 100 of warm-up, half a cosine to 1/100 over 9,900
    0: 0.01,
    49: 0.5,
    99: 1.0,
    2574: 0.01 + 0.99 * (1 + math.sqrt(0.5)) / 2,
    5049: 0.505,
    9999: 0.01,
}


@pytest.mark.parametrize('recurrent', [True, False])
def test_updates_of_a_language_model(text, recurrent):
    """Real updates at some steps of the default schedule, optimizers fresh each time: loss and
    gradient are the batch's mean; above a norm of 1 the gradient is clipped to it; AdamW's first
    step is its rate in every entry, Muon's is nearly orthogonal and as long as rate times
    sqrt(max(1, out / in))."""
    sizes = {'tokens_per_step': 512, 'block_size': 16}
    run = lm_run(text, recurrent=recurrent, aggregation='softmax_l2', **sizes)
    clipped = []
    for step, fraction in SCHEDULE.items():
        with torch.no_grad():
            run.model.head.normal_(std=1.0 if step == 99 else 1e-3)
        model, loader = copy.deepcopy(run.model), copy.deepcopy(run.loader)
        x, y, reset = loader.next()
        state = None if reset or not recurrent else run.state
        exact, _ = model(x, y, state)
        exact.backward()
        for optimizer in run.optimizers:
            optimizer.state.clear()
        run.step = step
        loss, norm, _ = train_lm.train_update(run, False)
        assert loss == pytest.approx(exact.item(), rel=1e-4)
        length = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        assert norm == pytest.approx(length, rel=1e-3)
        left = torch.cat([p.grad.flatten() for p in run.model.parameters()]).norm().item()
        assert left == pytest.approx(min(1.0, length), rel=1e-3)
        clipped.append(length > 1)
        for group in (group for optimizer in run.optimizers for group in optimizer.param_groups):
            assert group['lr'].item() == pytest.approx(group['peak_lr'] * fraction, rel=1e-5)
        for (name, before), after in zip(
            model.named_parameters(), run.model.parameters(), strict=True
        ):
            check_step(name.split('.')[-1], before.detach(), after.detach(), fraction)
    assert set(clipped) == {True, False}


def check_step(name, before, after, fraction):
    change = before - after
    if name in MUON:
        longest = torch.linalg.matrix_norm(change, 2) / (0.02 * fraction * MUON[name])
        assert 0.7 < longest.min() and longest.max() < 1.4, name
    elif name != 'router_k_bias':  # its gradient is zero but for rounding
        rate = AT_192.get(name, 0.02) * fraction
        assert change.abs().max().item() == pytest.approx(rate, rel=2e-3), name


# ---- agents: sizes, optimizer, loss, schedule ----

LEVEL = """\
##########
#        #
#  @$ .  #
#        #
#   $ .  #
#        #
#   $ .  #
#        #
#   $ .  #
##########"""


@pytest.fixture(scope='module')
def level(tmp_path_factory):
    path = tmp_path_factory.mktemp('level') / 'one.npy'
    board = np.frombuffer(LEVEL.replace('\n', '').encode(), np.uint8).reshape(1, 10, 10)
    np.save(path, check_boards(board, 'one'))
    return path


def agent_run(level, **settings):
    """A run of the defaults, but for its size, on one level; its policy has some opinion."""
    small = {
        'split': level,
        'eval_split': level,
        'arch': 'convglu',
        'n_layer': 1,
        'n_embd': 4,
        'head_dim': 8,
        'device': 'cpu',
        'dtype': 'float32',
        'threads': 1,
        'compile': False,
    }
    argv = [f'--{key}={value}' for key, value in (small | settings).items()]
    run = train_sokoban.make_run(configure(vars(train_sokoban), argv, quiet=True))
    with torch.no_grad():
        run.model.logits.weight.mul_(100)
    return run


def test_agent_settings_arrive(level):
    sizes = {
        'arch': 'convglu',
        'recurrent': False,
        'n_layer': 3,
        'n_expert': 2,
        'n_embd': 6,
        'aggregation': 'softmax_mean',
        'router_dim': 5,
        'residual': 'shared',
        'head_dim': 7,
    }
    run = agent_run(level, **sizes)
    assert vars(run.model.config) == sizes | {'radius': -1, 'dtype': 'float32', 'path': 'fast'}
    run = agent_run(level, n_expert=4, radius=2)
    assert run.model.config.radius == 2


def test_agents_begin_as_the_design_says():
    """32 channels of the observation, forget gates open by 1, a nearly uniform policy."""
    agent = build_agent(AgentConfig(n_layer=2, n_expert=3, n_embd=8))
    assert agent.encoder.shape == (32, 6, 3, 3)
    for gain, bias in zip(agent.gain, agent.bias, strict=True):
        assert gain.shape == bias.shape == (3, 4, 8) and (gain == 1).all()
        assert (bias[:, 1] == 1).all() and not bias[:, [0, 2, 3]].any()
    assert agent.logits.weight.abs().max() < 0.02 and not agent.logits.bias.any()


def test_adam(level):
    run = agent_run(level)
    (group,) = run.optimizer.param_groups
    assert type(run.optimizer) is torch.optim.Adam
    assert [id(p) for p in group['params']] == [id(p) for p in run.model.parameters()]
    wanted = {
        'betas': (0.9, 0.999),
        'eps': 1e-6,
        'weight_decay': 0,
        'amsgrad': False,
        'maximize': False,
    }
    assert {key: group[key] for key in wanted} == wanted
    assert run.env.N == 32 and run.updates == 78125  # 50,000,000 / (32 x 20)


def test_rollout_and_loss(level):
    """20 steps of 32 boards; the loss of advantage actor-critic and generalised advantages, term
    by term, at the default settings. Every third board's episode ends inside the unroll, and
    others at its last step."""
    run = agent_run(level)
    run.env.steps[::3], run.env.steps[1::3] = 120 - 7, 120 - 20
    batch = train_sokoban.rollout(run)
    assert (
        batch['reward'].shape == (20, 32) and batch['done'].sum() >= 22 and batch['done'][-1].any()
    )
    stats = train_sokoban.backward(run, batch)
    value, reward, done = (batch[key].detach().double() for key in ('value', 'reward', 'done'))
    advantage = torch.zeros(20, 32, dtype=torch.float64)
    after, following = torch.zeros(32, dtype=torch.float64), batch['last'].double()
    for t in reversed(range(20)):
        delta = reward[t] + 0.97 * (1 - done[t]) * following - value[t]
        after = delta + 0.97 * 0.97 * (1 - done[t]) * after
        advantage[t], following = after, value[t]
    pi = torch.softmax(batch['logits'].detach().double(), -1)
    chosen = pi.gather(-1, batch['action'][..., None]).squeeze(-1)
    policy = -(chosen.log() * advantage).mean()
    error = advantage.square().mean()  # of a value whose target is itself plus the advantage
    entropy = -(pi * pi.log()).sum(-1).mean()
    wanted = [policy + 1.0 * error - 0.01 * entropy, policy, error, entropy]
    assert stats[:4].tolist() == pytest.approx([x.item() for x in wanted], rel=1e-4)
    assert min(abs(x) for x in wanted) > 0.01


def test_updates_of_an_agent(level):
    """Adam's rate is 4e-4, annealed linearly to 0 over 78,125 updates; its first step is its rate
    in every entry; a gradient longer than 1 is clipped to 1."""
    run = agent_run(level)
    clipped = []
    for step, rate in ((0, 4e-4), (15625, 3.2e-4), (39062.5, 2e-4), (62500, 8e-5)):
        run.step = step
        run.optimizer.state.clear()
        with torch.no_grad():
            run.model.value.bias.fill_(3.0 if step else 0.0)
        before = [p.detach().clone() for p in run.model.parameters()]
        stats, games, _ = train_sokoban.update(run, False)
        assert games.shape == (20, 3, 32)
        assert run.optimizer.param_groups[0]['lr'].item() == pytest.approx(rate, rel=1e-5)
        left = torch.cat([p.grad.flatten() for p in run.model.parameters()]).norm().item()
        assert left == pytest.approx(min(1.0, stats['grad_norm']), rel=1e-3)
        clipped.append(stats['grad_norm'] > 1)
        change = max(
            (a - p).abs().max().item() for a, p in zip(before, run.model.parameters(), strict=True)
        )
        assert rate * 0.5 < change < rate * 1.01
    assert True in clipped
