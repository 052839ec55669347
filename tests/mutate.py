"""Shows that the tests see what they are for: changes one thing at a time in a copy of the project, and runs the test that is meant
to notice. One line a mutation; exit status 1 if one survives, is no longer in the source, or breaks more than the tests.

$ python tests/mutate.py                  # all; a minute or two of one core
$ python tests/mutate.py gamma make_run   # those whose file, text or test has one of these words

Every setting of both trainers is changed too, by itself: a new one belongs into a table of test_paper.py.
"""

import ast
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import hypothesis  # noqa: F401  imported once, here: a mutation's own process then starts with it
import numpy  # noqa: F401
import pytest
import torch
import torch._dynamo  # noqa: F401
import torch.distributed  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    '.git', '.venv', 'data', 'out', 'results', 'corpus', '__pycache__', '.*_cache'
)

PAPER = 'tests/test_paper.py'
LOSS = 'tests/test_train_sokoban.py::test_gradient_is_the_losses'
ADVANTAGE = 'tests/test_train_sokoban.py::test_gae_is_the_sum'
FORGETS = 'tests/test_convlstm.py::test_a_start_forgets'
BF16 = 'tests/test_model.py::test_fast_is_close_to_plain_in_fp32_and_bf16'
MUON = 'tests/test_muon.py'

# (file, old text, new text, test): the old text stands once in the file
MUTATIONS = [
    # what the language models' trainer does with its settings
    ('train_lm.py', '(n_embd / 768) ** -0.5', '(n_embd / 768) ** 0.5', PAPER),
    ('train_lm.py', '(n_embd / 768) ** -0.5', '(n_embd / 512) ** -0.5', PAPER),
    ('train_lm.py', '(n_embd / 768) ** -0.5', '1.0', PAPER),
    ('train_lm.py', "('head', head_lr * width)", "('head', head_lr)", PAPER),
    ('train_lm.py', "('scalars', scalar_lr)", "('scalars', scalar_lr * width)", PAPER),
    ('train_lm.py', 'lr=learning_rate, momentum', 'lr=learning_rate * width, momentum', PAPER),
    ('train_lm.py', 'momentum=momentum, ', 'nesterov=False, momentum=momentum, ', PAPER),
    ('train_lm.py', 'momentum=momentum, ', 'ns_steps=4, momentum=momentum, ', PAPER),
    ('train_lm.py', 'weight_decay=weight_decay)', 'weight_decay=0.0)', PAPER),
    ('train_lm.py', 'weight_decay=0.0, fused', 'weight_decay=0.01, fused', PAPER),
    ('train_lm.py', 'betas=betas, ', '', PAPER),
    ('train_lm.py', 'eps=adam_eps, ', '', PAPER),
    ('train_lm.py', "group['peak_lr'] * rate(run.step)", "group['peak_lr']", PAPER),
    (
        'train_lm.py',
        "group['peak_lr'] * rate(run.step)",
        "group['peak_lr'] * rate(run.step + 1)",
        PAPER,
    ),
    (
        'train_lm.py',
        'for group in (g for optimizer in run.optimizers for g',
        'for group in (g for optimizer in run.optimizers[:1] for g',
        PAPER,
    ),
    (
        'train_lm.py',
        '    for optimizer in run.optimizers:\n',
        '    for optimizer in run.optimizers[:1]:\n',
        PAPER,
    ),
    (
        'train_lm.py',
        '    for optimizer in run.optimizers:\n',
        '    for optimizer in run.optimizers[1:]:\n',
        PAPER,
    ),
    ('train_lm.py', 'lr_at(step, max_iters, warmup_iters', 'lr_at(step, max_iters, 0', PAPER),
    ('train_lm.py', 'warmup_iters, final_lr_ratio)', 'warmup_iters, 0.0)', PAPER),
    (
        'train_lm.py',
        'parameters(), grad_clip, run.norm',
        'parameters(), 2 * grad_clip, run.norm',
        PAPER,
    ),
    ('train_lm.py', '    if grad_clip:\n', '    if not grad_clip:\n', PAPER),
    (
        'train_lm.py',
        '(x.numel() / tokens_per_step)',
        '(x.numel() / tokens_per_step) ** 2 * 2',
        PAPER,
    ),
    (
        'train_lm.py',
        'tokens_per_step // block_size  #',
        'tokens_per_step // block_size // 2  #',
        PAPER,
    ),
    (
        'train_lm.py',
        'StreamLoader if recurrent else SequenceLoader',
        'SequenceLoader if recurrent else StreamLoader',
        PAPER,
    ),
    (
        'train_lm.py',
        'n_head, n_kv_head, window, block_size,',
        'n_head, n_kv_head, block_size, window,',
        PAPER,
    ),
    (
        'train_lm.py',
        'n_layer, n_expert, n_embd, n_head',
        'n_expert, n_layer, n_embd, n_head',
        PAPER,
    ),
    ('train_lm.py', 'aggregation, share_kv, residual,', 'aggregation, True, residual,', PAPER),
    ('train_lm.py', 'aggregation, share_kv, residual,', "aggregation, share_kv, 'expert',", PAPER),
    (
        'train_lm.py',
        'build_model(model_config, recurrent)',
        'build_model(model_config, True)',
        PAPER,
    ),
    ('data_fineweb.py', "'gpt2': 50304", "'gpt2': 50257", PAPER),
    ('model.py', "and not name.endswith('expert_embedding')]", ']', PAPER),
    (
        'model.py',
        'p.dim() >= 2 and not name',
        "p.dim() >= 2 and 'router' not in name and not name",
        PAPER,
    ),
    ('model.py', 'D // 96 if D % 192 == 0 else', 'D // 48 if D % 192 == 0 else', PAPER),
    (
        'model.py',
        'self.n_head // 2 if self.n_head % 2 == 0',
        'self.n_head if self.n_head % 2 == 0',
        PAPER,
    ),
    ('model.py', 'vocab_size: int = 50304', 'vocab_size: int = 50257', PAPER),
    # Muon and the schedule
    ('muon.py', 'lr=0.02, momentum=0.95', 'lr=0.01, momentum=0.95', PAPER),
    ('muon.py', 'momentum=0.95, nesterov', 'momentum=0.9, nesterov', PAPER),
    ('muon.py', 'nesterov=True, ns_steps=5', 'nesterov=False, ns_steps=5', PAPER),
    ('muon.py', 'nesterov=True, ns_steps=5', 'nesterov=True, ns_steps=4', PAPER),
    ('muon.py', 'ns_steps=5, weight_decay=0.01', 'ns_steps=5, weight_decay=0.0', PAPER),
    ('muon.py', 'max(1, out_features / in_features)', 'max(1, in_features / out_features)', PAPER),
    ('muon.py', 'max(1, out_features / in_features)', '1', PAPER),
    ('muon.py', 'part * weights > 0', 'part * weights < 0', MUON),
    ('muon.py', 'torch.where(part * weights > 0, weights, 0)', 'weights', MUON),
    ('muon.py', "if group['nesterov'] else buffers", "if not group['nesterov'] else buffers", MUON),
    ('muon.py', '(step + 1 - warmup_iters) / max', '(step - warmup_iters) / max', PAPER),
    ('muon.py', 'return (step + 1) / warmup_iters', 'return step / warmup_iters', PAPER),
    ('muon.py', '0.5 * (1 + math.cos(math.pi * progress))', '(1 - progress)', PAPER),
    # the agents' trainer
    ('train_sokoban.py', 'eps=adam_eps, ', '', PAPER),
    ('train_sokoban.py', 'torch.optim.Adam(', 'torch.optim.AdamW(', PAPER),
    ('train_sokoban.py', '(1 - run.step / run.updates))', '1)', PAPER),
    ('train_sokoban.py', 'grad_clip or math.inf', 'math.inf', PAPER),
    (
        'train_sokoban.py',
        'math.ceil(total_steps / (n_envs * unroll))',
        'math.ceil(total_steps / n_envs)',
        PAPER,
    ),
    (
        'train_sokoban.py',
        'B, make_env = n_envs // world,',
        'B, make_env = n_envs // world // 2,',
        PAPER,
    ),
    (
        'train_sokoban.py',
        'n_layer, n_expert, n_embd, aggregation',
        'n_expert, n_layer, n_embd, aggregation',
        PAPER,
    ),
    ('train_sokoban.py', 'radius, residual, head_dim, dt', '-1, residual, head_dim, dt', PAPER),
    ('train_sokoban.py', 'AgentConfig(kind, recurrent, ', 'AgentConfig(kind, True, ', PAPER),
    ('train_sokoban.py', 'carried = gamma * gae_lambda', 'carried = gamma', PAPER),
    ('train_sokoban.py', 'delta = reward + gamma * goes_on', 'delta = reward + goes_on', PAPER),
    ('train_sokoban.py', '+ value_coef * value_loss', '+ 0.5 * value_loss', PAPER),
    ('train_sokoban.py', '+ value_coef * value_loss', '+ value_loss', LOSS),
    ('train_sokoban.py', '- entropy_coef * entropy', '+ entropy_coef * entropy', PAPER),
    ('train_sokoban.py', '- entropy_coef * entropy', '- 0.01 * entropy', LOSS),
    (
        'train_sokoban.py',
        '-(chosen * advantage).mean()',
        '-(chosen * (advantage - advantage.mean())).mean()',
        PAPER,
    ),
    ('train_sokoban.py', '(value - target).square()', '(value - target).abs()', PAPER),
    (
        'train_sokoban.py',
        '(loss / run.world).backward()',
        '(2 * loss / run.world).backward()',
        LOSS,
    ),
    ('convlstm.py', 'self.bias[l][:, 1] = 1', 'self.bias[l][:, 2] = 1', PAPER),
    ('convlstm.py', '\nZ = 32 ', '\nZ = 16 ', PAPER),
    # where an episode ends inside a rollout, the state is zero and no value is carried over
    (
        'train_sokoban.py',
        "step['done']\n        run.start",
        "torch.zeros_like(step['done'])\n        run.start",
        LOSS,
    ),
    ('train_sokoban.py', 'run.start.copy_(start)', 'run.start.zero_()', LOSS),
    (
        'train_sokoban.py',
        "'obs': obs, 'start': start}",
        "'obs': obs, 'start': torch.zeros_like(start)}",
        LOSS,
    ),
    ('train_sokoban.py', 'gamma * goes_on * following', 'gamma * following', LOSS),
    ('train_sokoban.py', 'gamma * goes_on * following', 'gamma * following', ADVANTAGE),
    ('train_sokoban.py', 'gamma * gae_lambda * goes_on', 'gamma * gae_lambda', LOSS),
    ('convlstm.py', 'return 1 - start.to(', 'return 1 - 0 * start.to(', LOSS),
    ('convlstm.py', 'return 1 - start.to(', 'return 1 - 0 * start.to(', FORGETS),
    # the value of what comes after the last step
    (
        'train_sokoban.py',
        '            _, last, _ = ',
        '            last = 0 * run.model.act(w, obs, start, state)[1]\n            _, _, _ = ',
        LOSS,
    ),
    (
        'train_sokoban.py',
        '            _, last, _ = ',
        '            last = value.detach()\n            _, _, _ = ',
        LOSS,
    ),
    (
        'train_sokoban.py',
        'run.model.act(w, obs, start, state)\n    return',
        'run.model.act(w, obs, start, run.state)\n    return',
        LOSS,
    ),
    (
        'train_sokoban.py',
        'torch.cat([value[1:], last[None]])',
        'torch.cat([value[1:], value[-1:]])',
        LOSS,
    ),
    # in bf16 alone: a scalar's gradient, and a matrix's
    (
        'model.py',
        "{'a': level.a,",
        "{'a': level.a + torch.is_autocast_enabled('cpu') * (level.a - level.a.detach()),",
        BF16,
    ),
    (
        'model.py',
        "'b': level.b,",
        "'b': level.b - 2 * torch.is_autocast_enabled('cpu') * (level.b - level.b.detach()),",
        BF16,
    ),
    (
        'model.py',
        "'up': level.up,",
        "'up': level.up + torch.is_autocast_enabled('cpu') * (level.up - level.up.detach()),",
        BF16,
    ),
    # config files
    ('config/small_L2.py', 'n_expert = 8', 'n_expert = 4', PAPER),
    ('config/small_L16.py', 'n_layer = 16', 'n_layer = 8', PAPER),
    ('config/small_gpt_L4.py', 'block_size = 256', 'block_size = 64', PAPER),
    ('config/small_gpt_L1.py', 'recurrent = False', 'recurrent = True', PAPER),
    ('config/small_long_L8.py', 'window = 1024', 'window = 128', PAPER),
    ('config/small_long_gpt_L2.py', 'block_size = 2048', 'block_size = 1024', PAPER),
    ('config/medium_L32.py', 'n_layer = 32', 'n_layer = 16', PAPER),
    ('config/medium_gpt_L8.py', 'n_embd = 768', 'n_embd = 384', PAPER),
    ('config/medium_L4.py', 'n_layer = 4', 'n_layer = 4\nlearning_rate = 1e-2', PAPER),
    ('config/sokoban_small_L2.py', 'n_embd = 64', 'n_embd = 32', PAPER),
    ('config/sokoban_large_L8.py', 'n_expert = 7', 'n_expert = 8', PAPER),
    ('config/sokoban_large_ff_L1.py', 'recurrent = False\n', '', PAPER),
    ('config/sokoban_medium_ff_L4.py', 'n_layer = 4', 'n_layer = 4\ngamma = 0.99', PAPER),
    ('config/demo.py', 'warmup_iters = 20', 'warmup_iters = 20\nembedding_lr = 0.1', PAPER),
    ('config/sokoban_demo.py', 'learning_rate = 1e-3', 'learning_rate = 4e-4', PAPER),
]


def settings_changed(script: str) -> list[tuple[str, str, str, str]]:
    """A mutation for each setting of a script: another value of the same type."""
    source = (ROOT / script).read_text()
    block = source[: source.index('\ndef ')]
    found = []
    for name, text in re.findall(r'^([a-z]\w*) = (.*?) +#', block, re.MULTILINE):
        other = another(ast.literal_eval(text))
        found.append(
            (script, f'\n{name} = {text} ', f'\n{name} = {other!r} ', f'{PAPER}::test_defaults')
        )
    return found


def another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (another(value[0]), *value[1:])
    return {int: lambda: value + 1, float: lambda: value * 0.9, str: lambda: value + '_'}[
        type(value)
    ]()


def run_tests(copy: Path, tests: list[str]) -> tuple[int, str]:
    """pytest in a process of its own that starts with torch imported. -> its exit status and the last line it printed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(copy)
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = pytest.main(['-q', '-x', '--no-header', '-p', 'no:cacheprovider', *tests])
        os.write(writer, text.getvalue().strip().splitlines()[-1].encode()[:300])
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, 'rb') as file:
        last = file.read().decode(errors='replace')
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), last


def try_one(copy: Path, mutation: tuple[str, str, str, str]) -> str:
    """What became of a mutation; the copy is as it was afterwards. pytest's status is 1 where tests failed, and another where
    they could not run."""
    file, old, new, test = mutation
    path = copy / file
    source = path.read_text()
    if source.count(old) != 1:
        return f'STALE: the text stands {source.count(old)} times in the file'
    path.write_text(source.replace(old, new))
    status, last = run_tests(copy, [test])
    path.write_text(source)
    if status == 1:
        return 'noticed'
    return 'SURVIVES' if status == 0 else f'BREAKS the tests instead: {last}'


def main() -> int:
    sys.dont_write_bytecode = True  # a mutation may keep a file's size and second
    sys.path.remove(str(Path(__file__).parent))  # the copy's tests, not these
    torch.set_num_threads(1)
    mutations = settings_changed('train_lm.py') + settings_changed('train_sokoban.py') + MUTATIONS
    words = sys.argv[1:]
    mutations = [
        m for m in mutations if not words or any(word in part for part in m for word in words)
    ]
    bad, start = 0, time.time()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / 'copy'
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        status, last = run_tests(copy, sorted({m[3] for m in mutations}))
        if status != 0:
            print(f'error: the tests fail before anything is changed: {last}')
            return 1
        for mutation in mutations:
            result = try_one(copy, mutation)
            bad += result != 'noticed'
            file, old, new, test = mutation
            print(f'{result}: {file}: {old.strip()!r} -> {new.strip()!r} ({test})', flush=True)
    print(f'{len(mutations)} mutations, {bad} not noticed, {time.time() - start:.0f} s')
    return int(bad > 0)


if __name__ == '__main__':
    sys.exit(main())
