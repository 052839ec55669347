"""In a copy of the project with a patch in it: three updates of every path beside the patched plain
equations, in float64, and decoding beside them. python run.py [--inductor] model|agents
'{settings}'. Prints the plain losses."""

import ast
import functools
import sys

import torch
from reference import assert_close, make, tokens

import kernels
import sample
import unroll
from convlstm import AgentConfig, build_agent
from model import GPT, RecurrentGPT


def trained(model, loss_of, path, updates=3):
    """Loss of each update and gradients of the last."""
    if hasattr(model.config, 'mode'):  # an agent
        model.config.mode = 'plain' if path == 'plain' else 'fast'
        kernels.fused.enabled = path == 'compiled'
    else:
        model.config.path = path
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for i in range(updates):
        loss = loss_of(model, i)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads


def same(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9, msg=lambda x: f'{what}: {x}')


def models(settings):
    def loss_of(model, i):
        nonlocal state
        loss, state = model(tokens(2, 7, seed=i), tokens(2, 7, seed=i + 10), state if i else None)
        return loss

    for sizes in ({'n_expert': 3}, {'n_expert': 3, 'share_kv': False, 'n_layer': 1}):
        state, found = None, {}
        for path in ('plain', 'fast', 'compiled'):
            model = make(RecurrentGPT, **sizes | settings)
            found[path] = trained(model, loss_of, path)
            same(found[path], found['plain'], path)
        print(*found['plain'][0])
        decode(model, tokens(2, 11))
    model, x = make(GPT, n_expert=2, **settings), tokens(2, 6)
    of_both = {'levels.0.a', 'levels.0.b', *dict(model.named_parameters())}
    if not found['plain'][1].keys() <= of_both:
        return  # a patch of the recurrent model alone
    compiled = trained(model, lambda model, i: model(x, x)[0], 'compiled')
    model = make(GPT, n_expert=2, **settings)
    same(compiled, trained(model, lambda model, i: model(x, x)[0], 'fast'), 'GPT')
    decode(model, tokens(2, 11))


def decode(model, x):
    model.config.path = 'plain'
    with torch.no_grad():
        expected, _ = model(x, state=model.init_state(2))
    for compile in (False, True):
        decoder = sample.Decoder(model, 2, compile=compile)
        for t in range(x.size(1)):
            decoder.step(x[:, t])
            assert_close(decoder.logits, expected[:, t], what=f'decoder, token {t}')


def agents(settings):
    for arch, residual in (('convlstm', 'expert'), ('convglu', 'expert'), ('convglu', 'shared')):
        sizes = {'arch': arch, 'residual': residual, 'n_layer': 2, 'n_expert': 3, 'n_embd': 8}
        found = {}
        for path in ('plain', 'fast', 'compiled'):
            torch.manual_seed(0)
            agent = build_agent(AgentConfig(head_dim=16, **sizes, **settings)).double()
            obs = torch.randint(5, (3, 2, 10, 10, 2), dtype=torch.uint8)
            # the first steps start episodes, and so does a step inside the unroll, on one board
            start = torch.tensor([[True, True], [False, True], [False, False]])

            def loss_of(agent, i, obs=obs, start=start):
                logits, value, _ = agent(obs, start, agent.init_state(2))
                return logits.square().mean() + (value - i).square().mean()

            found[path] = trained(agent, loss_of, path)
            same(found[path], found['plain'], path)
        print(*found['plain'][0])


if __name__ == '__main__':
    torch.set_num_threads(1)
    *options, what, settings = sys.argv[1:]
    if not options:  # Inductor's C++ compiler takes minutes; what it is given is the same
        compile = torch.compile
        torch.compile = lambda f, **more: compile(f, **more | {'backend': 'aot_eager'})
        once = functools.cache(lambda f: torch.compile(f, fullgraph=True, dynamic=False))
        for module in (kernels, unroll, sample):
            module.compiled = once
    {'model': models, 'agents': agents}[what](ast.literal_eval(settings))
    print('all paths agree')
