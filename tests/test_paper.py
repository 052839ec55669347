"""Test that the trainers follow the paper's recipe: defaults, config files, sizes, optimizers,
schedules, updates (test_plans.py: plans). Every expected value is written here by hand."""

import math

import numpy as np
import pytest
import torch
from processes import ROOT
from small_runs import StopAt, read_log

import loader
import text as text_files
import train_lm
import train_sokoban
from configurator import Script, configure
from convlstm import AgentConfig, build_agent
from model import ModelConfig, build_model
from muon import Muon
from run import LAST, load_checkpoint, settings_of


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


def defaults_of(script):
    return Script(ROOT / script).defaults


def test_defaults_of_language_models():
    assert_settings(defaults_of('train_lm.py'), LM)


def test_defaults_of_agents():
    assert_settings(defaults_of('train_sokoban.py'), AGENT)


# ---- config files ----


def config_file(name, script):
    """Return all settings of a run by a config file."""
    script = Script(ROOT / script)
    return {**script.defaults, **script.read_config(ROOT / 'config' / f'{name}.py')}


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
    assert_settings(config_file(name, 'train_lm.py'), LM | variant | sizes)


@pytest.mark.parametrize(
    'name, recurrent', [('sokoban_small_L4', True), ('sokoban_small_nonrecurrent_L4', False)]
)
def test_config_files_of_agents(name, recurrent):
    sizes = {'recurrent': recurrent, 'n_layer': 4, 'n_expert': 1, 'n_embd': 64}
    assert_settings(config_file(name, 'train_sokoban.py'), AGENT | sizes)


# ---- language models: sizes, optimizers, schedule ----


@pytest.mark.parametrize(
    'sizes, H, G, K',
    [
        ({'n_embd': 384}, 4, 2, 96),
        ({'n_embd': 768}, 8, 4, 96),
        ({'n_embd': 128}, 2, 1, 64),
        ({'n_embd': 100, 'n_head': 5}, 5, 5, 20),
    ],
)
def test_heads_of_language_models(sizes, H, G, K):
    """Heads have 96 channels, or 64 if 96 does not divide n_embd. Keys and values have half as
    many heads, or as many if their number is odd."""
    c = ModelConfig(**sizes)
    assert (c.n_head, c.n_kv_head, c.head_dim, c.vocab_size) == (H, G, K, 50304)


def test_sizes_of_language_models():
    """The FFN has 4 D inner activations; embedding and head are not tied."""
    assert text_files.VOCAB == {'gpt2': 50304, 'bytes': 256}
    model = build_model(ModelConfig(vocab_size=11, n_layer=1, n_expert=3, n_embd=192), True)
    shapes = {name.split('.')[-1]: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == {
        'embedding': (11, 192),
        'head': (11, 192),
        'a': (),
        'b': (),
        'wq': (3, 192, 192),
        'wk': (3, 96, 192),
        'wv': (3, 96, 192),
        'wo': (3, 192, 192),
        'up': (3, 768, 192),
        'down': (3, 192, 768),
    }


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """Return a folder of random bytes. They cannot be learned, so gradients stay large."""
    folder, rng = tmp_path_factory.mktemp('text'), np.random.default_rng(0)
    for name in ('val_000000', 'train_000001'):
        tokens = rng.integers(0, 256, 3000).astype(np.uint16)
        loader.write_shard(str(folder / f'fineweb_{name}.bin'), tokens)
    meta = {'tokenizer': 'bytes', 'source': 'test', 'shards': []}
    loader.write_meta(folder, meta)
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


@pytest.mark.parametrize('recurrent', [True, False])
def test_language_model_settings_reach_the_model(text, tmp_path, recurrent):
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
        'share_kv': not recurrent,
        'residual': 'expert' if recurrent else 'shared',
    }
    train_lm_once(text, tmp_path, recurrent=recurrent, **sizes)
    assert_settings(settings_of(tmp_path / 'best')['model'], sizes | {'vocab_size': 256})


AT_192 = {'embedding': 0.4, 'head': 0.008}  # (192 / 768)^-0.5 = 2 times the rates at 768
AT_768 = {'embedding': 0.2, 'head': 0.004}
MUON = {  # matrix: sqrt(max(1, out / in)), by which its updates are longer
    'wq': 1, 'wk': 1, 'wv': 1, 'wo': 1, 'up': 2, 'down': 1, 'router_q': 1, 'router_k': 1,
}  # fmt: skip
ADAM = ('a', 'b', 'router_q_bias', 'router_k_bias', 'expert_embedding')


@pytest.mark.parametrize('n_embd, rates', [(192, AT_192), (768, AT_768)])
def test_muon_optimizes_matrices_and_adamw_the_rest(n_embd, rates):
    """Each parameter has one optimizer and a peak rate; the optimizers have the paper's settings.
    Muon takes the matrices of the layers and of their routers."""
    configure(vars(train_lm), [f'--n_embd={n_embd}'], quiet=True)
    config = ModelConfig(n_layer=1, n_expert=1, n_embd=n_embd, aggregation='softmax_l2')
    model = build_model(config, recurrent=True)
    muon, adamw = train_lm.make_optimizers(model)
    assert type(muon) is Muon and type(adamw) is torch.optim.AdamW
    names = {id(p): name.split('.')[-1] for name, p in model.named_parameters()}
    found = {}
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            for p in group['params']:
                assert names[id(p)] not in found
                found[names[id(p)]] = optimizer, pytest.approx(group['peak_lr'])
    expected = {name: (muon, 0.02) for name in MUON}
    expected |= {name: (adamw, 0.02) for name in ADAM}
    expected |= {name: (adamw, rate) for name, rate in rates.items()}
    assert found == expected
    for group in muon.param_groups:
        assert (group['momentum'], group['weight_decay'], group['ns_steps']) == (0.95, 0.01, 5)
        assert group['nesterov']
    for group in adamw.param_groups:
        assert (group['betas'], group['weight_decay'], group['eps']) == ((0.8, 0.95), 0.0, 1e-10)


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


def watch_clipping(monkeypatch, name):
    """Return a list that will hold the norm of the gradients after each clipping."""
    norms, real = [], getattr(torch.nn.utils, name)

    def clip(params, *args):
        params = list(params)
        result = real(params, *args)
        norms.append(norm_of(p.grad for p in params))
        return result

    monkeypatch.setattr(torch.nn.utils, name, clip)
    return norms


@pytest.mark.parametrize('recurrent', [True, False])
@pytest.mark.parametrize('std, warmup_iters', [(1e-3, 100), (1.0, 1), (1e-3, 1)])
def test_first_update_of_a_language_model(
    text, tmp_path, monkeypatch, recurrent, std, warmup_iters
):
    """From a model without zeros. The learning rates are 1 / warmup_iters of their peaks.

    Loss and gradient are means over the batch. A gradient whose norm exceeds 1 is clipped to 1. The
    first step of AdamW changes every entry by its rate. That of Muon is nearly orthogonal, with
    singular values near its rate times sqrt(max(1, out / in))."""
    config = ModelConfig(256, 1, 2, 192, block_size=16, aggregation='softmax_l2')
    torch.manual_seed(0)
    model = build_model(config, recurrent)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model.head.normal_(std=std)  # small, so that most gradients are not clipped
    model.about = {'tokenizer': 'bytes'}
    model.save_pretrained(tmp_path / 'random')
    clipped_norms = watch_clipping(monkeypatch, 'clip_grads_with_norm_')
    settings = {'tokens_per_step': 512, 'init_from': tmp_path / 'random'}
    record, saved = train_lm_once(text, tmp_path / 'run', warmup_iters=warmup_iters, **settings)

    files = loader.find_shards(str(text), 'train')
    x, y, _ = loader.Loader(files, 32, 16, 256, recurrent, seed=1337).next()
    expected, _ = model(x, y)
    expected.objective.backward()
    norm = norm_of(p.grad for p in model.parameters())
    assert record['train_loss'] == pytest.approx(expected.objective.item(), rel=1e-4)
    assert record['grad_norm'] == pytest.approx(norm, rel=1e-3)
    assert clipped_norms == [pytest.approx(min(1.0, norm), rel=1e-3)]
    assert (norm > 1) == (std == 1)
    for name, before in model.named_parameters():
        change, name = (before - saved['model'][name]).detach(), name.split('.')[-1]
        if name in MUON:
            largest = torch.linalg.matrix_norm(change, 2) / (0.02 / warmup_iters * MUON[name])
            assert 0.7 < largest.min() and largest.max() < 1.4, name
        elif name != 'router_k_bias':  # its gradient is zero but for rounding
            rate = AT_192.get(name, 0.02) / warmup_iters
            assert change.abs().max().item() == pytest.approx(rate, rel=2e-3), name


# ---- agents: sizes, optimizer, schedule ----


EASY = {
    'arch': 'convglu',
    'n_layer': 1,
    'n_embd': 4,
    'head_dim': 8,
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


def train_agent_once(out, monkeypatch, **settings):
    """Train a small agent for one update of a run of the default length; return its log line and
    its checkpoint."""
    monkeypatch.setattr(train_sokoban, 'Stopper', lambda: StopAt(1))
    argv = arguments(**{**EASY, 'out_dir': out, **settings})
    assert train_sokoban.main(configure(vars(train_sokoban), argv, quiet=True)) == 143
    return read_log(out)[1], load_checkpoint(out / LAST)


def test_agent_settings_reach_the_model(tmp_path, monkeypatch):
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
    _, saved = train_agent_once(tmp_path, monkeypatch, **sizes)
    assert_settings(saved['entries'], sizes | {'radius': -1})


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
def test_first_update_of_an_agent(tmp_path, monkeypatch, value_coef):
    """Adam's rate starts at 4e-4 and falls linearly to 0. Its first step changes entries by at most
    its rate. A gradient whose norm exceeds 1 is clipped to 1."""
    clipped_norms = watch_clipping(monkeypatch, 'clip_grad_norm_')
    record, saved = train_agent_once(tmp_path, monkeypatch, value_coef=value_coef)
    assert record['env_steps'] == 640 and saved['boards']['grid'].shape == (32, 100)
    (group,) = saved['optimizer']['param_groups']
    assert (group['betas'], group['eps'], group['weight_decay']) == ((0.9, 0.999), 1e-6, 0)
    assert clipped_norms == [pytest.approx(min(1.0, record['grad_norm']), rel=1e-3)]
    torch.manual_seed(1337)
    sizes = {name: x for name, x in saved['entries'].items()}
    before = build_agent(AgentConfig(**sizes)).state_dict()
    changes = [(before[name] - x).abs().max().item() for name, x in saved['model'].items()]
    assert 0.5 < max(changes) / 4e-4 < 1.01


def test_schedule_of_an_agent(tmp_path):
    argv = arguments(**{**EASY, 'out_dir': tmp_path, 'total_steps': 4 * 640})
    assert train_sokoban.main(configure(vars(train_sokoban), argv, quiet=True)) == 0
    assert [r.get('lr') for r in read_log(tmp_path)[1:]] == pytest.approx([4e-4, 3e-4, 2e-4, 1e-4])
