"""Shows that the tests see what they are for: changes one thing at a time in a copy of the project,
and runs the test that is meant to notice. One line a mutation; exit status 1 if one survives, is no
longer in the source, or breaks more than the test.

$ python tests/mutate.py                 # all; a few minutes of one core
$ python tests/mutate.py gamma test_adam # those whose file, text or test has one of these words

Every setting of both trainers is changed too, by itself: a new one belongs into a table of
test_paper.py.
"""

import ast
import contextlib
import io
import itertools
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
SECONDS = itertools.count(1)
LEFT_OUT = shutil.ignore_patterns(
    '.git', '.venv', 'data', 'out', 'results', 'corpus', '__pycache__', '.*_cache'
)

PAPER = 'tests/test_paper.py'
FILES = f'{PAPER}::test_config_files_of_the_paper'
FILES_OURS = f'{PAPER}::test_config_files_of_our_own'
SIZES = f'{PAPER}::test_sizes_of_language_models'
ARRIVE = f'{PAPER}::test_language_model_settings_arrive'
WHO = f'{PAPER}::test_who_optimizes_what'
UPDATES = f'{PAPER}::test_updates_of_a_language_model'
MUON_DEFAULTS = f'{PAPER}::test_defaults_of_muon'
BEGIN = f'{PAPER}::test_agents_begin_as_the_design_says'
AGENT_ARRIVE = f'{PAPER}::test_agent_settings_arrive'
ADAM = f'{PAPER}::test_adam'
ROLLOUT = f'{PAPER}::test_rollout_and_loss'
AGENT_UPDATES = f'{PAPER}::test_updates_of_an_agent'
LOSS = 'tests/test_train_sokoban.py::test_gradient_is_the_losses'
ADVANTAGE = 'tests/test_train_sokoban.py::test_gae_is_the_sum'
FORGETS = 'tests/test_convlstm.py::test_a_start_forgets'
BLANKS = (
    'tests/test_train_sokoban.py::test_returns_are_blank_until_every_board_has_ended_an_episode'
)
THRESHOLD = 'tests/test_probe.py::test_the_first_20_steps_alone_set_the_threshold'
ALL_SOLVE = 'tests/test_probe.py::test_levels_that_all_solve'
CAUSAL = (
    'tests/test_probe.py::'
    'test_the_causal_check_steers_at_the_cell_and_its_control_is_another_free_one'
)
ERRORS = 'tests/test_sweep.py::test_standard_errors_and_differences_by_hand'
DRAWN = 'tests/test_sweep.py::test_ablations_are_drawn_with_standard_errors'
PLANS = 'tests/test_sweep.py::test_ablation_plans'
DEAR = 'tests/test_sweep.py::test_language_models_cost_16_blocks'
LOW = "torch.is_autocast_enabled('cpu')"
BF16 = 'tests/test_model.py::test_recurrent_in_fp32_and_bf16'
MUON = 'tests/test_muon.py'

# {(file, test): [(old text, new text)]}: the old text stands once in the file
MUTATIONS = {
    ('train_lm.py', WHO): [
        ('(n_embd / 768) ** -0.5', '(n_embd / 768) ** 0.5'),
        ('(n_embd / 768) ** -0.5', '(n_embd / 512) ** -0.5'),
        ('(n_embd / 768) ** -0.5', '1.0'),
        ("('head', head_lr * width)", "('head', head_lr)"),
        ("('scalars', scalar_lr)", "('scalars', scalar_lr * width)"),
        ('lr=learning_rate, momentum', 'lr=learning_rate * width, momentum'),
        ('momentum=momentum, ', 'nesterov=False, momentum=momentum, '),
        ('momentum=momentum, ', 'ns_steps=4, momentum=momentum, '),
        ('weight_decay=weight_decay)', 'weight_decay=0.0)'),
        ('weight_decay=0.0, fused', 'weight_decay=0.01, fused'),
        ('betas=betas, ', ''),
        ('eps=adam_eps, ', ''),
    ],
    ('train_lm.py', UPDATES): [
        ("group['peak_lr'] * rate(run.step)", "group['peak_lr']"),
        ("group['peak_lr'] * rate(run.step)", "group['peak_lr'] * rate(run.step + 1)"),
        (
            'for group in (g for optimizer in run.optimizers for g',
            'for group in (g for optimizer in run.optimizers[:1] for g',
        ),
        ('    for optimizer in run.optimizers:\n', '    for optimizer in run.optimizers[:1]:\n'),
        ('    for optimizer in run.optimizers:\n', '    for optimizer in run.optimizers[1:]:\n'),
        ('lr_at(step, max_iters, warmup_iters', 'lr_at(step, max_iters, 0'),
        ('warmup_iters, final_lr_ratio)', 'warmup_iters, 0.0)'),
        ('parameters(), grad_clip, run.norm', 'parameters(), 2 * grad_clip, run.norm'),
        ('    if grad_clip:\n', '    if not grad_clip:\n'),
        ('(x.numel() / tokens_per_step)', '(x.numel() / tokens_per_step) ** 2 * 2'),
    ],
    ('train_lm.py', ARRIVE): [
        ('tokens_per_step // block_size  #', 'tokens_per_step // block_size // 2  #'),
        (
            'StreamLoader if recurrent else SequenceLoader',
            'SequenceLoader if recurrent else StreamLoader',
        ),
        ('config[name] for name in names', 'config[name] for name in names[1:]'),
        ('config[name] for name in names', 'config[name] for name in names[:-2]'),
        ('config[name] for name in names', "config[name] for name in names if name != 'share_kv'"),
        ('config[name] for name in names', "config[name] for name in names if name != 'residual'"),
        ("VOCAB[config['tokenizer']]", "VOCAB['gpt2']"),
        ('build_model(sizes, recurrent)', 'build_model(sizes, True)'),
    ],
    ('data_fineweb.py', SIZES): [
        ("'gpt2': 50304", "'gpt2': 50257"),
    ],
    ('model.py', WHO): [
        ("and not n.endswith('expert_embedding')]", ']'),
        ('p.dim() >= 2 and not n.', "p.dim() >= 2 and 'router' not in n and not n."),
    ],
    ('model.py', SIZES): [
        ('D // 96 if D % 192 == 0 else', 'D // 48 if D % 192 == 0 else'),
        ('H // 2 if H % 2 == 0 else H', 'H'),
        ('vocab_size: int = 50304', 'vocab_size: int = 50257'),
    ],
    ('muon.py', MUON_DEFAULTS): [
        ('lr=0.02, momentum=0.95', 'lr=0.01, momentum=0.95'),
        ('momentum=0.95, nesterov', 'momentum=0.9, nesterov'),
        ('nesterov=True, ns_steps=5', 'nesterov=False, ns_steps=5'),
        ('nesterov=True, ns_steps=5', 'nesterov=True, ns_steps=4'),
        ('ns_steps=5, weight_decay=0.01', 'ns_steps=5, weight_decay=0.0'),
    ],
    ('muon.py', UPDATES): [
        ('max(1, out_features / in_features)', 'max(1, in_features / out_features)'),
        ('max(1, out_features / in_features)', '1'),
        ('(step + 1 - warmup_iters) / max', '(step - warmup_iters) / max'),
        ('return (step + 1) / warmup_iters', 'return step / warmup_iters'),
        ('0.5 * (1 + math.cos(math.pi * progress))', '(1 - progress)'),
    ],
    ('muon.py', MUON): [
        ('part * weights > 0', 'part * weights < 0'),
        ('torch.where(part * weights > 0, weights, 0)', 'weights'),
        ("if group['nesterov'] else buffers", "if not group['nesterov'] else buffers"),
    ],
    ('train_sokoban.py', ADAM): [
        ('eps=adam_eps, ', ''),
        ('torch.optim.Adam(', 'torch.optim.AdamW('),
        ('math.ceil(total_steps / (n_envs * unroll))', 'math.ceil(total_steps / n_envs)'),
        ('B, make_env = n_envs // world,', 'B, make_env = n_envs // world // 2,'),
    ],
    ('train_sokoban.py', AGENT_UPDATES): [
        ('(1 - run.step / run.updates))', '1)'),
        ('grad_clip or math.inf', 'math.inf'),
    ],
    ('train_sokoban.py', AGENT_ARRIVE): [
        ('n_layer, n_expert, n_embd, aggregation', 'n_expert, n_layer, n_embd, aggregation'),
        ('radius, residual, head_dim, dt', '-1, residual, head_dim, dt'),
        ('AgentConfig(kind, recurrent, ', 'AgentConfig(kind, True, '),
    ],
    ('train_sokoban.py', ROLLOUT): [
        ('carried = gamma * gae_lambda', 'carried = gamma'),
        ('delta = reward + gamma * goes_on', 'delta = reward + goes_on'),
        ('+ value_coef * value_loss', '+ 0.5 * value_loss'),
        ('- entropy_coef * entropy', '+ entropy_coef * entropy'),
        ('-(chosen * advantage).mean()', '-(chosen * (advantage - advantage.mean())).mean()'),
        ('(value - target).square()', '(value - target).abs()'),
    ],
    ('train_sokoban.py', LOSS): [
        ('+ value_coef * value_loss', '+ value_loss'),
        ('- entropy_coef * entropy', '- 0.01 * entropy'),
        ('(loss / run.world).backward()', '(2 * loss / run.world).backward()'),
        ("step['done']\n        run.start", "torch.zeros_like(step['done'])\n        run.start"),
        ('run.start.copy_(start)', 'run.start.zero_()'),
        ("'obs': obs, 'start': start}", "'obs': obs, 'start': torch.zeros_like(start)}"),
        ('gamma * goes_on * following', 'gamma * following'),
        ('gamma * gae_lambda * goes_on', 'gamma * gae_lambda'),
        (
            '            _, last, _ = ',
            '            last = 0 * run.model.act(w, obs, start, state)[1]\n            _, _, _ = ',
        ),
        ('            _, last, _ = ', '            last = value.detach()\n            _, _, _ = '),
        (
            'run.model.act(w, obs, start, state)\n    return',
            'run.model.act(w, obs, start, run.state)\n    return',
        ),
        ('torch.cat([value[1:], last[None]])', 'torch.cat([value[1:], value[-1:]])'),
    ],
    ('convlstm.py', BEGIN): [
        ('self.bias[l][:, 1] = 1', 'self.bias[l][:, 2] = 1'),
        ('\nZ = 32 ', '\nZ = 16 '),
    ],
    ('train_sokoban.py', ADVANTAGE): [
        ('gamma * goes_on * following', 'gamma * following'),
    ],
    ('convlstm.py', FORGETS): [
        ('return 1 - start.to(', 'return 1 - 0 * start.to('),
    ],
    ('train_sokoban.py', BLANKS): [
        ('run.step * unroll >= TIME_LIMIT', 'run.step > 0'),
    ],
    ('probe_sokoban.py', THRESHOLD): [
        (
            'early, rows, about = data.step < first, [], {}',
            'early, rows, about = data.step >= 0, [], {}',
        ),
    ],
    ('probe_sokoban.py', ALL_SOLVE): [
        ('return np.all([record(', 'return np.any([record('),
    ],
    ('probe_sokoban.py', CAUSAL): [
        ('device=x.device), cell] += part', 'device=x.device), cell.flip(0)] += part'),
        ('direction[way], other)', 'direction[way], cell)'),
        ('    free.scatter_(1, cell, False)\n', ''),
    ],
    ('figures.py', ERRORS): [
        ('deviation / math.sqrt(n), n)', 'deviation, n)'),
        ('math.hypot(e, base_error)', 'e'),
    ],
    ('figures.py', DRAWN): [
        ('line(panels[0], with_errors(mine)', 'line(panels[0], mine'),
        ('differences(mine, x)', 'differences(mine, 0)'),
    ],
    ('sweep.py', PLANS): [
        ('(1, 2, 4, 8, 16, 32, 64)', '(1, 2, 4, 8)'),
    ],
    ('sweep.py', DEAR): [
        ("if dear or not plan.startswith('lm-'):", 'if True:'),
    ],
    ('model.py', BF16): [
        (
            'w = {name: p for name, p in',
            f"w = {{name: p + (name == 'a') * {LOW} * (p - p.detach()) for name, p in",
        ),
        (
            'w = {name: p for name, p in',
            f"w = {{name: p - 2 * (name == 'b') * {LOW} * (p - p.detach()) for name, p in",
        ),
        (
            'w = {name: p for name, p in',
            f"w = {{name: p + (name == 'up') * {LOW} * (p - p.detach()) for name, p in",
        ),
    ],
    ('config/small_L2.py', FILES): [
        ('n_expert = 8', 'n_expert = 4'),
    ],
    ('config/small_L16.py', FILES): [
        ('n_layer = 16', 'n_layer = 8'),
    ],
    ('config/small_gpt_L4.py', FILES): [
        ('block_size = 256', 'block_size = 64'),
    ],
    ('config/small_gpt_L1.py', FILES): [
        ('recurrent = False', 'recurrent = True'),
    ],
    ('config/small_long_L8.py', FILES): [
        ('window = 1024', 'window = 128'),
    ],
    ('config/small_long_gpt_L2.py', FILES): [
        ('block_size = 2048', 'block_size = 1024'),
    ],
    ('config/medium_L32.py', FILES): [
        ('n_layer = 32', 'n_layer = 16'),
    ],
    ('config/medium_gpt_L8.py', FILES): [
        ('n_embd = 768', 'n_embd = 384'),
    ],
    ('config/medium_L4.py', FILES): [
        ('n_layer = 4', 'n_layer = 4\nlearning_rate = 1e-2'),
    ],
    ('config/sokoban_small_L2.py', FILES): [
        ('n_embd = 64', 'n_embd = 32'),
    ],
    ('config/sokoban_large_L8.py', FILES): [
        ('n_expert = 7', 'n_expert = 8'),
    ],
    ('config/sokoban_large_ff_L1.py', FILES): [
        ('recurrent = False\n', ''),
    ],
    ('config/sokoban_medium_ff_L4.py', FILES): [
        ('n_layer = 4', 'n_layer = 4\ngamma = 0.99'),
    ],
    ('config/demo.py', FILES_OURS): [
        ('warmup_iters = 20', 'warmup_iters = 20\nembedding_lr = 0.1'),
    ],
    ('config/sokoban_demo.py', FILES_OURS): [
        ('learning_rate = 1e-3', 'learning_rate = 4e-4'),
    ],
}


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
    """pytest in a process of its own that starts with torch imported. -> its exit status and the
    last line it printed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(copy)
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = pytest.main(['-qx', '-p', 'no:cacheprovider', '-p', 'pytest_timeout', *tests])
        os.write(writer, text.getvalue().strip().splitlines()[-1].encode()[:300])
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, 'rb') as file:
        last = file.read().decode(errors='replace')
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), last


def write(path: Path, source: str) -> None:
    """With a time of its own: Python takes a file of equal size and second for the one it has
    compiled."""
    path.write_text(source)
    second = next(SECONDS)
    os.utime(path, (second, second))


def try_one(copy: Path, mutation: tuple[str, str, str, str]) -> str:
    """What became of a mutation; the copy is as it was afterwards. pytest's status is 1 where
    tests failed, and another where they could not run."""
    file, old, new, test = mutation
    path = copy / file
    source = path.read_text()
    if source.count(old) != 1:
        return f'STALE: the text stands {source.count(old)} times in the file'
    write(path, source.replace(old, new))
    status, last = run_tests(copy, [test])
    write(path, source)
    if status == 1:
        return 'noticed'
    return 'SURVIVES' if status == 0 else f'BREAKS the tests instead: {last}'


def main() -> int:
    sys.path.remove(str(Path(__file__).parent))  # the copy's tests, not these
    os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'  # most of what a small test takes
    torch.set_num_threads(1)
    mutations = settings_changed('train_lm.py') + settings_changed('train_sokoban.py')
    for (file, test), texts in MUTATIONS.items():
        mutations += [(file, old, new, test) for old, new in texts]
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
