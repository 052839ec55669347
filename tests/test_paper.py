"""Test that the trainers follow the paper's recipe: defaults, config files, sizes, optimizers,
schedules, updates (test_plans.py: plans). Every expected value is written here by hand."""

import math

from configurator import Script, configure

import numpy as np
import pytest
import torch
from processes import ROOT
from small_runs import read_log, write_shards

import train_lm
import train_sokoban
from convlstm import AgentConfig, build_agent
from model import ModelConfig, build_model
from support import loader
from support.run_folder import LAST, load_checkpoint, settings_of
from tokenizer import VOCAB


def assert_settings(config, expected):
    """Assert that a config has these settings; it may have others."""
    assert {name: config.get(name) for name in expected} == expected


# ---- defaults ----

LM = {
    'tokenizer': 'gpt2',
    'tokens_per_step': 131072,
    'max_iters': 10000,
    'warmup_iters': 100,
    'final_lr_ratio': 0.01,
    'val_tokens': 10485760,
    'val_streams': 512,
    'window': 128,
    'aggregation': 'sqrt_sum',
    'share_kv': True,
    'residual': 'expert',
    'init_b': 'one',
    'learning_rate': 2e-2,
    'momentum': 0.95,
    'weight_decay': 0.01,
    'embedding_lr': 0.2,
    'head_lr': 0.004,
    'scalar_lr': 2e-2,
    'betas': (0.8, 0.95),
    'grad_clip': 1.0,
    'reset_every': 0,
}
AGENT = {
    'split': 'unfiltered-train',
    'n_envs': 32,
    'total_steps': 50_000_000,
    'unroll': 20,
    'gamma': 0.97,
    'gae_lambda': 0.97,
    'entropy_coef': 0.01,
    'value_coef': 1.0,
    'learning_rate': 4e-4,
    'adam_eps': 1e-6,
    'grad_clip': 1.0,
    'arch': 'convlstm',
    'aggregation': 'sqrt_sum',
    'radius': -1,
    'residual': 'expert',
}


def settings_by(script, *config_files):
    """Return all settings of a run by these config files."""
    script = Script(ROOT / script)
    found = dict(script.defaults)
    for name in config_files:
        found |= script.read_config(ROOT / f'config/{name}.py')
    return found


def test_defaults():
    assert_settings(settings_by('train_lm.py'), LM)
    assert_settings(settings_by('train_sokoban.py'), AGENT)


# ---- config files ----


@pytest.mark.parametrize(
    'name, recurrent, experts, window, block_size',
    [
        ('small_L2', True, 16, 128, 64),
        ('small_nonrecurrent_L2', False, 16, 128, 256),
        ('small_long_L2', True, 16, 1024, 64),
        ('small_long_nonrecurrent_L2', False, 16, 1024, 2048),
        ('medium_L2', True, 32, 128, 64),
        ('medium_nonrecurrent_L2', False, 32, 128, 256),
    ],
)
def test_config_files_of_language_models(name, recurrent, experts, window, block_size):
    sizes = {'n_layer': 2, 'n_expert': experts // 2, 'n_embd': 768, 'out_dir': f'out/{name}'}
    variant = {'recurrent': recurrent, 'window': window, 'block_size': block_size}
    assert_settings(settings_by('train_lm.py', name), LM | variant | sizes)


@pytest.mark.parametrize(
    'name, recurrent', [('sokoban_small_L4', True), ('sokoban_small_nonrecurrent_L4', False)]
)
def test_config_files_of_agents(name, recurrent):
    sizes = {'recurrent': recurrent, 'n_layer': 4, 'n_expert': 1, 'n_embd': 64}
    precision = {'dtype': 'float32'}  # the default is bfloat16 where that is fast
    assert_settings(settings_by('train_sokoban.py', name), AGENT | sizes | precision)


# ---- language models: sizes, optimizers, schedule ----


@pytest.mark.parametrize(
    'sizes, H, G, K',
    [
        ({'n_embd': 768}, 8, 4, 96),
        ({'n_embd': 128}, 2, 1, 64),
        ({'n_embd': 100, 'n_head': 5}, 5, 5, 20),
    ],
)
def test_heads_and_vocabulary_of_language_models(sizes, H, G, K):
    """Heads have 96 channels, or 64 if 96 does not divide n_embd. Keys and values have half as
    many heads, or as many if their number is odd."""
    c = ModelConfig(vocab_size=VOCAB['gpt2'], **sizes)
    assert (c.n_head, c.n_kv_head, c.head_dim, c.vocab_size) == (H, G, K, 50304)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """Return a folder of shards. Random bytes for training, because gradients are large where few
    bytes are frequent."""
    folder = tmp_path_factory.mktemp('text')
    write_shards(folder, val_000000=300)
    tokens = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint16)
    loader.write_shard(str(folder / 'fineweb_train_000001.bin'), tokens)
    return folder


def arguments(**settings):
    return [f'--{name}={x}' for name, x in settings.items()]


SMALL = {
    'tokenizer': 'bytes',
    'tokens_per_step': 128,
    'n_layer': 1,
    'n_expert': 2,
    'n_embd': 192,
    'val_tokens': 96,
    'val_streams': 3,
    'compile': False,
    'device': 'cpu',
    'dtype': 'float32',
    'threads': 1,
}


def train_lm_once(text, out, **settings):
    """Train a small language model for one update; return its log line and its checkpoint."""
    argv = arguments(**{**SMALL, 'data_dir': text, 'out_dir': out, 'max_iters': 1, **settings})
    assert train_lm.main(configure(vars(train_lm), argv, quiet=True)) == 0
    return read_log(out)[1], load_checkpoint(out / LAST)


def test_language_model_settings_reach_the_model(text, tmp_path):
    sizes = {
        'n_layer': 3,
        'n_expert': 2,
        'n_embd': 48,
        'n_head': 6,
        'n_kv_head': 3,
        'window': 7,
        'block_size': 16,
        'aggregation': 'softmax_mean',
        'router_dim': 5,
        'share_kv': False,
        'init_b': 'sqrt_experts',
    }
    train_lm_once(text, tmp_path, recurrent=True, **sizes)
    assert_settings(settings_of(tmp_path / 'best')['model'], sizes | {'vocab_size': 256})


MUON = {'momentum': 0.95, 'weight_decay': 0.01, 'peak_lr': 0.02}
ADAMW = {'betas': (0.8, 0.95), 'weight_decay': 0.0, 'eps': 1e-10}
RATES = {'embedding': 0.4, 'head': 0.008}  # at n_embd = 192; at 768 half of these
MATRICES = {  # name: sqrt(max(1, out / in)), by which its updates are longer
    'wq': 1, 'wk': 1, 'wv': 1, 'wo': 1, 'up': 2, 'down': 1, 'router_q': 1, 'router_k': 1,
}  # fmt: skip

# step: rate relative to its peak; 100 steps of warm-up, then half a cosine to 1/100 over 9,900
SCHEDULE = {
    0: 0.01,
    99: 1.0,
    2574: 0.01 + 0.99 * (1 + math.sqrt(0.5)) / 2,
    5049: 0.505,
    9999: 0.01,
}


def test_schedule_of_a_language_model():
    configure(vars(train_lm), [], quiet=True)
    for step, fraction in SCHEDULE.items():
        assert train_lm.lr_at(step) == pytest.approx(fraction)


def norm_of(tensors):
    return torch.cat([x.flatten() for x in tensors]).norm().item()


@pytest.mark.parametrize(
    'recurrent, std, warmup_iters', [(True, 1e-3, 100), (False, 1e-3, 1), (True, 1.0, 1)]
)
def test_first_update_of_a_language_model(text, tmp_path, recurrent, std, warmup_iters):
    """From a model without zeros. The learning rates are 1 / warmup_iters of their peaks.

    Loss and gradient are means over the batch. A gradient whose norm exceeds 1 is clipped to 1.
    Muon takes the matrices of the layers and of their routers: its first step is nearly orthogonal,
    with singular values near its rate times sqrt(max(1, out / in)). AdamW takes the rest, and its
    first step changes every entry by its rate."""
    config = ModelConfig(256, 1, 2, 192, block_size=16, aggregation='softmax_l2')
    torch.manual_seed(0)
    model = build_model(config, recurrent)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model.head.normal_(std=std)  # if small, the gradient is not clipped
    model.metadata = {'tokenizer': 'bytes'}
    model.save_pretrained(tmp_path / 'random')
    settings = {'tokens_per_step': 512, 'init_from': tmp_path / 'random'}
    record, saved = train_lm_once(text, tmp_path / 'run', warmup_iters=warmup_iters, **settings)

    files = loader.find_shards(str(text), 'train')
    x, y, _ = loader.Loader(files, 32, 16, 256, recurrent, seed=1337).next()
    expected, _ = model(x, y)
    expected.objective.backward()
    norm = norm_of(p.grad for p in model.parameters())
    assert record['train_loss'] == pytest.approx(expected.objective.item(), rel=1e-4)
    assert record['grad_norm'] == pytest.approx(norm, rel=1e-3)
    muon, adamw = saved['optimizers']
    for group in muon['param_groups']:
        assert_settings(group, MUON)
    for group in adamw['param_groups']:
        assert_settings(group, ADAMW)
    clipped = [state['momentum_buffer'] / (1 - 0.95) for state in muon['state'].values()]
    clipped += [state['exp_avg'] / (1 - 0.8) for state in adamw['state'].values()]
    assert norm_of(clipped) == pytest.approx(min(1.0, norm), rel=1e-3)
    assert (norm > 1) == (std == 1)
    for name, before in model.named_parameters():
        change, name = (before - saved['model'][name]).detach(), name.split('.')[-1]
        if name in MATRICES:
            largest = torch.linalg.matrix_norm(change, 2) / (0.02 / warmup_iters * MATRICES[name])
            assert 0.7 < largest.min() and largest.max() < 1.4, name
        else:
            rate = RATES.get(name, 0.02) / warmup_iters
            assert change.abs().max().item() == pytest.approx(rate, rel=2e-3), name


# ---- agents: sizes, optimizer, schedule ----


SIZES = {
    'arch': 'convglu',
    'recurrent': False,
    'n_layer': 2,
    'n_expert': 2,
    'n_embd': 6,
    'aggregation': 'softmax_mean',
    'router_dim': 5,
    'residual': 'shared',
    'head_dim': 7,
}
EASY = {
    'split': 'generated',
    'eval_split': 'generated',
    'n_levels': 20,
    'eval_games': 4,
    'n_boxes': 1,
    'max_moves': 6,
    'log_interval': 1,
    'compile': False,
    'device': 'cpu',
    'dtype': 'float32',
    'threads': 1,
}


def train_agent(out, updates=1, **settings):
    """Train a small agent; return the last line of its log and its checkpoint."""
    argv = arguments(**{**SIZES, **EASY, 'out_dir': out, 'total_steps': 640 * updates, **settings})
    assert train_sokoban.main(configure(vars(train_sokoban), argv, quiet=True)) == 0
    return read_log(out)[-1], load_checkpoint(out / LAST)


def test_initialization_of_agents():
    """The observation is encoded in 32 channels, the bias of forget gates is 1, and the policy is
    nearly uniform."""
    agent = build_agent(AgentConfig(n_layer=2, n_expert=3, n_embd=8))
    assert agent.encoder.shape == (32, 6, 3, 3)
    for gain, bias in zip(agent.gain, agent.bias, strict=True):
        assert gain.shape == bias.shape == (3, 4, 8) and (gain == 1).all()
        assert (bias[:, 1] == 1).all() and not bias[:, [0, 2, 3]].any()
    assert agent.logits.weight.abs().max() < 0.02 and not agent.logits.bias.any()


@pytest.mark.parametrize('value_coef', [1.0, 1e-3])
def test_first_update_of_an_agent(tmp_path, value_coef):
    """Adam's rate starts at 4e-4 and falls linearly to 0. Its first step changes entries by at most
    its rate. A gradient whose norm exceeds 1 is clipped to 1. All sizes are those of the
    settings."""
    record, saved = train_agent(tmp_path, value_coef=value_coef)
    assert_settings(saved['entries']['model'], SIZES | {'radius': -1})
    assert record['env_steps'] == 640 and saved['boards']['grid'].shape == (32, 100)
    (group,) = saved['optimizer']['param_groups']
    assert (group['betas'], group['eps'], group['weight_decay']) == ((0.9, 0.999), 1e-6, 0)
    clipped = norm_of(
        state['exp_avg'] / (1 - 0.9) for state in saved['optimizer']['state'].values()
    )
    assert clipped == pytest.approx(min(1.0, record['grad_norm']), rel=1e-3)
    assert (record['grad_norm'] > 1) == (value_coef == 1)
    torch.manual_seed(1337)
    before = build_agent(AgentConfig(**saved['entries']['model'])).state_dict()
    changes = [(before[name] - x).abs().max().item() for name, x in saved['model'].items()]
    assert 0.5 < max(changes) / 4e-4 < 1.01


def test_schedule_of_an_agent(tmp_path):
    train_agent(tmp_path, updates=4)
    assert [r.get('lr') for r in read_log(tmp_path)[1:]] == pytest.approx([4e-4, 3e-4, 2e-4, 1e-4])
