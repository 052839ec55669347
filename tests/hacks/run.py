"""Compare all modes of a patched copy of the project with its plain mode; test_hacks.py starts it.

    PYTHONPATH=.:tests python tests/hacks/run.py [--inductor] models|agents|triton "{settings}"

models and agents train for three updates in float64, and models decode; triton trains for one
update in fp32, with Triton forms run by the interpreter. Prints the losses of the plain mode, by
which the test can tell a patched model from an unpatched one."""

import ast
import functools
import os
import sys

if 'triton' in sys.argv:  # before anything imports triton
    os.environ['TRITON_INTERPRET'] = '1'

import torch
from reference import assert_close, make, tokens
from test_convlstm import boards
from test_model import MODES, fake_graphed, set_mode

import cache
import kernels
import unroll
from convlstm import AgentConfig, build_agent
from decode import Decoder
from model import GPT, RecurrentGPT


def train(model, loss_of, updates=3):
    """Train for some updates; return the loss of each, loss_of(model, i), and the gradients of the
    last."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for i in range(updates):
        loss = loss_of(model, i)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }
        optimizer.step()
    return losses, grads


def assert_same(found, expected, what, rtol=1e-8, atol=1e-9):
    """Assert that two results of `train` are close. what: the name of the first in a message."""
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, msg=lambda message: f'{what}: {message}'
    )


def train_stream(model):
    """Train on three chunks of two streams."""
    state = None

    def loss_of(model, i):
        nonlocal state
        x, y = tokens(2, 7, seed=i), tokens(2, 7, seed=i + 10)
        loss, state = model(x, y, state)
        return loss.objective

    return train(model, loss_of)


def models(settings):
    """Compare all modes of RecurrentGPT and GPT, and the decoder, with the plain mode."""
    unroll.graphed = fake_graphed
    unroll.can_capture = lambda x: True
    cache.BLOCK = 3
    for sizes in ({'n_expert': 3}, {'n_expert': 3, 'share_kv': False, 'n_layer': 1}):
        found = {}
        for mode in MODES:
            model = make(RecurrentGPT, **sizes | settings)
            set_mode(model, mode)
            found[mode] = train_stream(model)
            assert_same(found[mode], found['plain'], mode)
        losses, grads = found['plain']
        print(*losses)
        check_every_weight_learns(grads)
        check_decoder(model)
    gpt_settings = {'n_expert': 2, **settings}
    recurrent_names = parameter_names(make(RecurrentGPT, n_layer=1, **settings))
    gpt_names = parameter_names(make(GPT, n_layer=1, **gpt_settings))
    if not recurrent_names <= gpt_names | {'layers.0.a', 'layers.0.b'}:
        return  # the patch adds parameters to the recurrent model only
    x = tokens(2, 6)
    found = {}
    for mode in ('fast', 'compiled'):
        model = make(GPT, **gpt_settings)
        set_mode(model, mode)
        found[mode] = train(model, lambda model, i: model(x, x)[0].objective)
    assert_same(found['compiled'], found['fast'], 'GPT')
    check_decoder(model)


def parameter_names(model):
    return {name for name, _ in model.named_parameters()}


def check_every_weight_learns(grads):
    """Assert that each parameter gets a gradient in at least one layer. Without this a parameter
    that a patch adds would change the random weights of a model, and so its losses, unused."""
    names = {name.split('.')[-1] for name in grads}
    learning = {name.split('.')[-1] for name, grad in grads.items() if grad.any()}
    assert learning == names, f'no gradient: {names - learning}'


def check_decoder(model):
    """Compare the decoder's logits with the plain mode's, with and without compilation."""
    set_mode(model, 'plain')
    x = tokens(2, 11)
    with torch.no_grad():
        expected, _ = model(x, state=model.init_state(2))
    for compiled in (False, True):
        kernels.fused.enabled = compiled
        decoder = Decoder(model, 2)
        for t in range(x.size(1)):
            decoder.step(x[:, t])
            assert_close(decoder.logits, expected[:, t], what=f'decoder, token {t}')


def triton(settings):
    """Compare training with all Triton forms enabled, in fp32, with the plain mode."""
    kernels.triton_module()
    cache.BLOCK = 4
    cache.GROUP = 3
    found = []
    for forms in (frozenset(), frozenset({'attention', 'experts', 'loss'})):
        model = make(RecurrentGPT, dtype=torch.float32, n_expert=3, n_embd=24, n_head=2, **settings)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.7)  # the rounding of fp32 stays small
        model.forms = forms
        found.append(train(model, lambda model, i: model(*tokens(2, 2, 7))[0].objective, 1))
    plain, with_forms = found
    assert_same(with_forms, plain, 'Triton forms', rtol=1e-3, atol=1e-4)
    print(*plain[0])


def agents(settings):
    """Compare all modes of agents with the plain mode."""
    for arch, residual in (('convlstm', 'expert'), ('convglu', 'expert'), ('convglu', 'shared')):
        sizes = {'arch': arch, 'residual': residual, 'n_layer': 2, 'n_expert': 3, 'n_embd': 8}
        obs, start = boards(T=3, B=2)

        def loss_of(agent, i, obs=obs, start=start):
            logits, value, _ = agent(obs, start, agent.init_state(2))
            return logits.square().mean() + (value - i).square().mean()

        found = {}
        for mode in ('plain', 'fast', 'compiled'):
            torch.manual_seed(0)
            agent = build_agent(AgentConfig(head_dim=16, **sizes, **settings)).double()
            agent.config.mode = 'plain' if mode == 'plain' else 'fast'
            kernels.fused.enabled = mode == 'compiled'
            found[mode] = train(agent, loss_of)
            assert_same(found[mode], found['plain'], mode)
        print(*found['plain'][0])


if __name__ == '__main__':
    torch.set_num_threads(1)
    *options, what, settings = sys.argv[1:]
    torch._dynamo.config.recompile_limit = 256
    if not options:  # stop before Inductor, whose C++ compiler takes minutes
        kernels.compiled = functools.cache(
            lambda f, pdl: torch.compile(f, backend='aot_eager', fullgraph=True, dynamic=False)
        )
    run = {'models': models, 'agents': agents, 'triton': triton}[what]
    run(ast.literal_eval(settings))
    print('all modes agree')
