"""The recipe, as the paper and the design give it, against what the trainers really do: defaults,
config files, a plan's rows, sizes, optimizers, schedules, losses. Every expected value is written
here by hand and none is read from the code."""

import copy
import csv
import math

import numpy as np
import pytest
import torch

import data_fineweb
import sweep
import train_lm
import train_sokoban
from configurator import configure, read_config, read_script
from convlstm import AgentConfig, build_agent
from model import ModelConfig, build_model
from muon import Muon
from test_sweep import sized
from test_train import ROOT, shards, table


# ---- defaults ----

LM = table("""
tokenizer='gpt2' tokens_per_step=131072 max_iters=10000 warmup_iters=100 val_streams=512
recurrent=True n_layer=2 n_expert=8 n_embd=768 n_head=0 n_kv_head=0 window=128 block_size=64
aggregation='sqrt_sum' share_kv=True residual='expert' learning_rate=2e-2 embedding_lr=0.2
head_lr=0.004 scalar_lr=2e-2 momentum=0.95 weight_decay=0.01 betas=(0.8,0.95) grad_clip=1.0
final_lr_ratio=0.01
""")
LM_OURS = table("""
val_tokens=10485760 router_dim=64 adam_eps=1e-10 eval_interval=1000 log_interval=1 batch_size=0
mode='fast' data_dir='data/fineweb' out_dir='out/lm' arch='experts' baseline_lr=0.0
""")  # where paper and design are silent
AGENT = table("""
split='unfiltered-train' env='torch' n_envs=32 arch='convlstm' recurrent=True n_layer=4 n_expert=1
n_embd=64 aggregation='sqrt_sum' radius=-1 residual='expert' total_steps=50000000 unroll=20
gamma=0.97 gae_lambda=0.97 entropy_coef=0.01 value_coef=1.0 learning_rate=4e-4 adam_eps=1e-6
grad_clip=1.0
""")
AGENT_OURS = table("""
router_dim=64 head_dim=256 eval_split='unfiltered-valid' eval_games=512 eval_interval=1000
log_interval=50 n_levels=100000 n_boxes=4 max_moves=120 levels_dir='' download=False levels=''
path='fast' best=False reuse=True out_dir='out/sokoban'
""")
BOTH = table("""
seed=1337 resume=False overwrite=False eval_only=False plot=False tensorboard=False wandb=False
device='auto' dtype='auto' compile=True graphs=True threads=0
wandb_project='parallel-experts' init_from=''
""")
RECIPES = {'train_lm.py': LM | LM_OURS | BOTH, 'train_sokoban.py': AGENT | AGENT_OURS | BOTH}


@pytest.mark.parametrize('script', RECIPES)
def test_defaults(script):
    """A new setting is not seen here: add it to a table above."""
    defaults, expected = read_script(ROOT / script)[0], RECIPES[script]
    assert {name: defaults[name] for name in expected} == expected
    assert all(type(defaults[name]) is type(value) for name, value in expected.items())


# ---- config files and plans ----

LEVELS = (1, 2, 4, 8, 16)
TEXT = {  # config file: plan, recurrent, blocks, window, chunk
    'small_L2': ('lm-small', True, 16, 128, 64),
    'small_nonrecurrent_L2': ('lm-small', False, 16, 128, 256),
    'small_long_L2': ('lm-small-long', True, 16, 1024, 64),
    'small_long_nonrecurrent_L2': ('lm-small-long', False, 16, 1024, 2048),
    'medium_L2': ('lm-medium', True, 32, 128, 64),
    'medium_nonrecurrent_L2': ('lm-medium', False, 32, 128, 256),
}
STUDY = """warmup_iters=17 max_iters=168 learning_rate=0.04 embedding_lr=1.6 head_lr=0.032
    scalar_lr=0.16"""
OURS = {  # our own small runs: what they change of the recipe but for sizes
    'demo': 'warmup_iters=20 max_iters=200',
    'tiny_lm': STUDY,
    'tiny_nonrecurrent': f'{STUDY} recurrent=False',
    'sokoban_demo': 'learning_rate=1e-3 n_envs=64 unroll=10 total_steps=2000000',
    'sokoban_tiny': 'learning_rate=1e-3 n_envs=64 unroll=10 total_steps=1152000',
}
SIZES = """tokenizer tokens_per_step val_streams split arch n_layer n_expert n_embd n_head window
    block_size"""


def settings_of(name):
    """Of a config file."""
    script = 'train_sokoban.py' if name.startswith('sokoban') else 'train_lm.py'
    defaults = read_script(ROOT / script)[0]
    settings = dict(defaults)
    read_config(str(ROOT / 'config' / f'{name}.py'), settings, defaults)
    return settings


def rows_of(plan, only, monkeypatch):
    """{(recurrent, L, E, d): settings}."""
    monkeypatch.chdir(ROOT)
    rows = sized(f'--plan={plan}', f'--only={only}', '--seeds=1')
    return {(r.recurrent, r.L, r.E, r.d): sweep.config_of(r) for r in rows}


@pytest.mark.parametrize('name', TEXT)
def test_language_models_of_the_paper(name, monkeypatch):
    """The file, and the family's rows in a sweep, are the recipe at their own sizes."""
    plan, recurrent, blocks, window, chunk = TEXT[name]
    own = {'recurrent': recurrent, 'window': window, 'block_size': chunk}
    rows = rows_of(plan, 'd=768', monkeypatch)
    for L in (*LEVELS, 32) if plan == 'lm-medium' else LEVELS:
        sizes = own | {'n_layer': L, 'n_expert': blocks // L, 'out_dir': f'out/{name}'}
        found = rows[recurrent, L, blocks // L, 768]
        expected = RECIPES['train_lm.py'] | sizes
        if L == 2:
            assert settings_of(name).items() >= expected.items()
        assert found.items() >= (expected | {'seed': 1}).items(), L


@pytest.mark.parametrize('budget', ['small', 'medium', 'large'])
def test_agents_of_the_paper(budget, monkeypatch):
    """All rows with a solve rate in the paper, and the two config files."""
    rows, n = rows_of(f'sokoban-{budget}', 'model=convlstm', monkeypatch), 0
    with open(ROOT / 'results' / 'paper' / 'sokoban_solve_rates.csv') as file:
        for row in csv.DictReader(file):
            if row['budget'] == budget:
                recurrent, sizes = row['variant'] == 'recurrent', [int(row[k]) for k in 'LEd']
                own = dict(zip(('n_layer', 'n_expert', 'n_embd'), sizes, strict=True))
                own |= {'recurrent': recurrent, 'seed': 1}
                found, n = rows[recurrent, *sizes], n + 1
                assert found.items() >= (RECIPES['train_sokoban.py'] | own).items()
    assert n == 10
    for name, recurrent in (('sokoban_small_L4', True), ('sokoban_small_nonrecurrent_L4', False)):
        own = {'recurrent': recurrent, 'out_dir': f'out/{name}'}
        assert settings_of(name).items() >= (RECIPES['train_sokoban.py'] | own).items()


@pytest.mark.parametrize('name', OURS)
def test_config_files_of_our_own(name):
    """The small runs keep the paper's optimizer, schedule and loss but for what is named above."""
    recipe = AGENT if name.startswith('sokoban') else LM
    kept = {key: value for key, value in recipe.items() if key not in SIZES.split()}
    assert settings_of(name).items() >= (kept | table(OURS[name])).items()


# ---- language models: sizes, optimizers, schedule ----


@pytest.mark.parametrize(
    'given, H, G, K',
    [((384,), 4, 2, 96), ((768,), 8, 4, 96), ((128,), 2, 1, 64), ((100, 5), 5, 5, 20)],
)
def test_heads_of_language_models(given, H, G, K):
    """Of 96, or 64, half as many for keys and values, or as many where their number is odd."""
    c = ModelConfig(**dict(zip(('n_embd', 'n_head'), given, strict=False)))
    assert (c.n_head, c.n_kv_head, c.head_dim, c.vocab_size) == (H, G, K, 50304)


def test_sizes_of_language_models():
    """V, FFN of 4 D, embedding and head untied."""
    assert data_fineweb.VOCAB == {'gpt2': 50304, 'bytes': 256}
    sizes = ModelConfig(vocab_size=11, n_layer=1, n_expert=3, n_embd=192)
    model = build_model(sizes, recurrent=True)
    found = {name.split('.')[-1]: tuple(p.shape) for name, p in model.named_parameters()}
    assert found == table("""
        embedding=(11,192) head=(11,192) a=() b=() wq=(3,192,192) wk=(3,96,192) wv=(3,96,192)
        wo=(3,192,192) up=(3,768,192) down=(3,192,768)""")


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp('text')
    shards(folder, val_000000=3000)
    tokens = np.random.default_rng(0).integers(0, 256, 3000)  # nothing to learn: long gradients
    data_fineweb.write_shard(str(folder / 'fineweb_train_000001.bin'), tokens.astype(np.uint16))
    return folder


def made(script, settings):
    argv = [f'--{key}={value}' for key, value in settings.items()]
    return script.make_run(configure(vars(script), argv, quiet=True))


def lm_run(text, **settings):
    """A run of the defaults, but for its size, with weights that all matter."""
    small = table("""tokenizer='bytes' tokens_per_step=128 n_layer=1 n_expert=2 n_embd=192
        val_tokens=96 val_streams=3 device='cpu' dtype='float32' threads=1""")
    small |= {'data_dir': text, **settings}
    run = made(train_lm, small)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return run


@pytest.mark.parametrize('recurrent', [True, False])
def test_language_model_settings_arrive(text, recurrent):
    """Each setting in its own place; whole rows of block_size tokens; validation in streams."""
    sizes = table("""n_layer=3 n_expert=2 n_embd=48 n_head=6 n_kv_head=3 window=7 block_size=16
        aggregation='softmax_mean' router_dim=5""")
    sizes |= {'share_kv': not recurrent, 'residual': 'expert' if recurrent else 'shared'}
    run = lm_run(text, recurrent=recurrent, seed=5, **sizes)
    assert vars(run.model.config) == sizes | {'vocab_size': 256, 'path': 'fast'}
    assert type(run.model).__name__ == ('RecurrentGPT' if recurrent else 'GPT')
    assert run.loader.carries is recurrent
    x, y, _ = run.loader.next()
    assert x.shape == y.shape == (8, 16) and run.val[0].shape == (3, 32)


AT_192 = {'embedding': 0.4, 'head': 0.008}  # (192 / 768)^-0.5 = 2 times the rates at 768
AT_768 = {'embedding': 0.2, 'head': 0.004}
MUON = table('wq=1 wk=1 wv=1 wo=1 up=2 down=1 router_q=1 router_k=1')  # sqrt(max(1, out / in))
ADAM = ('a', 'b', 'router_q_bias', 'router_k_bias', 'expert_embedding')


@pytest.mark.parametrize('n_embd, rates', [(192, AT_192), (768, AT_768)])
def test_who_optimizes_what(text, n_embd, rates):
    """Muon the core's and the router's matrices, AdamW the rest: their settings and peak rates."""
    run = lm_run(text, n_embd=n_embd, n_expert=1, aggregation='softmax_l2')
    muon, adamw = run.optimizers
    assert type(muon) is Muon and type(adamw) is torch.optim.AdamW
    names, found = {id(p): name.split('.')[-1] for name, p in run.model.named_parameters()}, {}
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            for p in group['params']:
                assert names[id(p)] not in found
                found[names[id(p)]] = optimizer, group['peak_lr']
    expected = {name: (adamw, rate) for name, rate in rates.items()}
    expected |= {name: (muon, 0.02) for name in MUON} | {name: (adamw, 0.02) for name in ADAM}
    assert found == {name: (o, pytest.approx(rate)) for name, (o, rate) in expected.items()}
    of_muon = table('momentum=0.95 nesterov=True ns_steps=5 weight_decay=0.01')
    of_adamw = table('betas=(0.8,0.95) eps=1e-10 weight_decay=0.0 amsgrad=False')
    for optimizer, wanted in ((muon, of_muon), (adamw, of_adamw)):
        for group in optimizer.param_groups:
            assert {key: group[key] for key in wanted} == wanted


# update: fraction of every peak; 100 of warm-up, half a cosine to 1/100 over 9,900
SCHEDULE = {0: 0.01, 49: 0.5, 99: 1.0, 5049: 0.505, 9999: 0.01}
SCHEDULE[2574] = 0.01 + 0.99 * (1 + math.sqrt(0.5)) / 2


def norm_of(tensors):
    return torch.cat([x.flatten() for x in tensors]).norm().item()


@pytest.mark.parametrize('recurrent', [True, False])
def test_updates_of_a_language_model(text, recurrent):
    """Real updates at some steps of the default schedule, optimizers fresh each time: loss and
    gradient are the batch's mean; above a norm of 1 the gradient is clipped to it; AdamW's first
    step is its rate in every entry, Muon's is nearly orthogonal and as long as rate times
    sqrt(max(1, out / in))."""
    sizes = {'tokens_per_step': 512, 'block_size': 16}
    run = lm_run(text, recurrent=recurrent, aggregation='softmax_l2', **sizes)
    clipped = set()
    for step, fraction in SCHEDULE.items():
        with torch.no_grad():
            run.model.head.normal_(std=1.0 if step == 99 else 1e-3)
        model, loader = copy.deepcopy(run.model), copy.deepcopy(run.loader)
        x, y, reset = loader.next()
        exact, _ = model(x, y, None if reset or not recurrent else run.state)
        exact.backward()
        for optimizer in run.optimizers:
            optimizer.state.clear()
        run.step = step
        loss, norm, _ = train_lm.train_update(run, False)
        length = norm_of(p.grad for p in model.parameters())
        assert (loss, norm) == (pytest.approx(exact.item(), rel=1e-4), pytest.approx(length, 1e-3))
        left = norm_of(p.grad for p in run.model.parameters())
        assert left == pytest.approx(min(1.0, length), rel=1e-3)
        clipped.add(length > 1)
        for group in (group for optimizer in run.optimizers for group in optimizer.param_groups):
            assert group['lr'].item() == pytest.approx(group['peak_lr'] * fraction, rel=1e-5)
        after = dict(run.model.named_parameters())
        for name, before in model.named_parameters():
            change, name = (before - after[name]).detach(), name.split('.')[-1]
            if name in MUON:
                longest = torch.linalg.matrix_norm(change, 2) / (0.02 * fraction * MUON[name])
                assert 0.7 < longest.min() and longest.max() < 1.4, name
            elif name != 'router_k_bias':  # its gradient is zero but for rounding
                rate = AT_192.get(name, 0.02) * fraction
                assert change.abs().max().item() == pytest.approx(rate, rel=2e-3), name
    assert clipped == {True, False}


# ---- agents: sizes, optimizer, loss, schedule ----


def agent_run(**settings):
    """A run of the defaults, but for its size, on easy levels; its policy has some opinion."""
    small = table("""arch='convglu' n_layer=1 n_embd=4 head_dim=8 device='cpu' dtype='float32'
        threads=1 compile=False split='generated' eval_split='generated' n_levels=20 eval_games=4
        n_boxes=1 max_moves=6""")
    run = made(train_sokoban, small | settings)
    with torch.no_grad():
        run.model.logits.weight.mul_(100)
    return run


def test_agent_settings_arrive():
    sizes = table("""arch='convglu' recurrent=False n_layer=3 n_expert=2 n_embd=6
        aggregation='softmax_mean' router_dim=5 residual='shared' head_dim=7""")
    run = agent_run(**sizes)
    assert vars(run.model.config) == sizes | {'radius': -1, 'dtype': 'float32', 'path': 'fast'}
    assert agent_run(arch='convlstm', n_expert=4, radius=2).model.config.radius == 2


def test_agents_begin_as_the_design_says():
    """32 channels of the observation, forget gates open by 1, a nearly uniform policy."""
    agent = build_agent(AgentConfig(n_layer=2, n_expert=3, n_embd=8))
    assert agent.encoder.shape == (32, 6, 3, 3)
    for gain, bias in zip(agent.gain, agent.bias, strict=True):
        assert gain.shape == bias.shape == (3, 4, 8) and (gain == 1).all()
        assert (bias[:, 1] == 1).all() and not bias[:, [0, 2, 3]].any()
    assert agent.logits.weight.abs().max() < 0.02 and not agent.logits.bias.any()


def test_updates_of_an_agent():
    """Adam's rate is 4e-4, annealed linearly to 0 over 78,125 updates; its first step is its rate
    in every entry; a gradient longer than 1 is clipped to 1."""
    run, clipped = agent_run(), set()
    (group,) = run.optimizer.param_groups
    assert type(run.optimizer) is torch.optim.Adam
    assert [id(p) for p in group['params']] == [id(p) for p in run.model.parameters()]
    wanted = table('betas=(0.9,0.999) eps=1e-6 weight_decay=0 amsgrad=False maximize=False')
    assert {key: group[key] for key in wanted} == wanted
    assert run.env.N == 32 and run.updates == 78125  # 50,000,000 / (32 x 20)
    for step, rate in ((0, 4e-4), (15625, 3.2e-4), (39062.5, 2e-4), (62500, 8e-5)):
        run.step = step
        run.optimizer.state.clear()
        with torch.no_grad():
            run.model.value.bias.fill_(3.0 if step else 0.0)
        before = [p.detach().clone() for p in run.model.parameters()]
        stats, games, _ = train_sokoban.update(run, False)
        assert games.shape == (20, 3, 32)
        assert group['lr'].item() == pytest.approx(rate, rel=1e-5)
        left = norm_of(p.grad for p in run.model.parameters())
        assert left == pytest.approx(min(1.0, stats['grad_norm']), rel=1e-3)
        clipped.add(bool(stats['grad_norm'] > 1))
        pairs = zip(before, run.model.parameters(), strict=True)
        assert 0.5 < max((a - p).abs().max().item() for a, p in pairs) / rate < 1.01
    assert True in clipped
