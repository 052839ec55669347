"""Shows that the tests see what they are for: changes one thing at a time in a copy of the project,
and runs the test that is meant to notice. One line a mutation; exit status 1 if one survives or
breaks more than the test. Files are changed in the form that ast.unparse gives them; a text that
does not stand there once ends it at the start. Every setting of both trainers is changed too: a new
one belongs into a table of test_paper.py.

$ python tests/mutate.py                 # all; a few minutes of one core
$ python tests/mutate.py gamma test_adam # those whose file, text or test has one of these words
"""

import ast
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import read_script  # noqa: E402

LEFT_OUT = '.git .venv data out results/cpu* corpus __pycache__ .*_cache'.split()
LOW = "torch.is_autocast_enabled('cpu')"
# file, test file and how a test begins; then lines "old -> new" of ast.unparse's text
MUTATIONS = r"""
muon test_paper::who_optimizes_what
    (s['n_embd'] / 768) ** (-0.5) -> (s['n_embd'] / 768) ** 0.5
    'head': s['head_lr'] * width -> 'head': s['head_lr']
    'scalars': s['scalar_lr'] -> 'scalars': s['scalar_lr'] * width
    groups['matrices'], s['learning_rate'] -> groups['matrices'], s['learning_rate'] * width
    'momentum': s['momentum'] -> 'momentum': 0.9
    'weight_decay': s['weight_decay'] -> 'weight_decay': 0.0
    'weight_decay': 0.0} -> 'weight_decay': 0.01}
    betas=s['betas'] -> betas=(0.9, 0.95)
    eps=s['adam_eps'] -> eps=1e-08
    nesterov=True, ns_steps=5 -> nesterov=False, ns_steps=5
    nesterov=True, ns_steps=5 -> nesterov=True, ns_steps=4
train_lm test_paper::updates_of_a_language_model
    group['peak_lr'] * rate(run.step) -> group['peak_lr'] * rate(run.step + 1)
    lr_at(step, max_iters, warmup_iters -> lr_at(step, max_iters, 0
    warmup_iters, final_lr_ratio) -> warmup_iters, 0.0)
    parameters(), grad_clip -> parameters(), 2 * grad_clip
    (x.numel() / tokens_per_step) -> (x.numel() / tokens_per_step) ** 2 * 2
train_lm test_paper::language_model_settings_arrive
    block_size, V, recurrent -> block_size, V, not recurrent
    VOCAB[config['tokenizer']] -> VOCAB['gpt2']
model test_paper::who_optimizes_what
    p.dim() >= 2 and (not -> p.dim() >= 2 and 'router' not in n and (not
model test_paper::heads_of_language_models
    D // 96 if D % 192 == 0 else -> D // 48 if D % 192 == 0 else
    vocab_size: int = 50304 -> vocab_size: int = 50257
muon test_paper::updates_of_a_language_model
    max(1, out_features / in_features) -> max(1, in_features / out_features)
    (step + 1 - warmup_iters) / max -> (step - warmup_iters) / max
    return (step + 1) / warmup_iters -> return step / warmup_iters
    0.5 * (1 + math.cos(math.pi * progress)) -> (1 - progress)
muon test_muon
    update * w > 0 -> update * w < 0
    if nesterov else -> if not nesterov else
train_sokoban test_paper::updates_of_an_agent
    eps=adam_eps, -> eps=1e-8,
    torch.optim.Adam( -> torch.optim.AdamW(
    math.ceil(total_steps / (n_envs * unroll)) -> math.ceil(total_steps / n_envs)
    1 - run.step / run.updates -> 1
    grad_clip or math.inf -> math.inf
train_sokoban test_paper::agent_settings_arrive
    config[name] for name in MODEL} -> config[name] for name in MODEL if name != 'recurrent'}
train_sokoban test_train_sokoban::gradient_is_the_losses
    -(chosen * advantage).mean() -> -(chosen * (advantage - advantage.mean())).mean()
    (value - target).square() -> (value - target).abs()
train_sokoban test_train_sokoban::gradient_is_the_losses
    + value_coef * value_loss -> + value_loss
    - entropy_coef * entropy -> - 0.01 * entropy
    (loss / run.world).backward() -> (2 * loss / run.world).backward()
    (run.env.observe(), run.env.steps == 0) -> (run.env.observe(), run.env.steps < 0)
    gamma * goes_on * following -> gamma * following
    gamma * gae_lambda * goes_on -> gamma * gae_lambda
    'obs': obs, 'start': start} -> 'obs': obs, 'start': torch.zeros_like(start)}
    _, last, _ = run.model.act(w, obs, start, state) -> last = value.detach()
    act(w, obs, start, state)\n    batch -> act(w, obs, start, run.state)\n    batch
    torch.cat([value[1:], last[None]]) -> torch.cat([value[1:], value[-1:]])
train_sokoban test_train_sokoban::returns_are_blank_until_every_board_has
    run.step * unroll >= TIME_LIMIT -> run.step > 0
convlstm test_paper::agents_begin_as_the_design_says
    self.bias[l].data[:, 1] = 1 -> self.bias[l].data[:, 2] = 1
    \nZ = 32 -> \nZ = 16
convlstm test_convlstm::equals_reference
    return 1 - start.to( -> return 1 - 0 * start.to(
probe_sokoban test_probe::the_first_20_steps_alone_set_the_threshold
    (data.step < first, [], -> (data.step >= 0, [],
probe_sokoban test_probe::levels_that_all_solve
    return np.all([its.solved -> return np.any([its.solved
probe_sokoban test_probe::the_causal_check_steers_at_the_cell_and
    x[each, cell] += part -> x[each, cell.flip(0)] += part
    (direction[way], other) -> (direction[way], cell)
figures test_sweep::ablations_are_drawn_with_standard_errors
    deviation / math.sqrt(n), n) -> deviation, n)
    math.hypot(e, base_error) -> e
    panels[0], with_errors(mine) -> panels[0], mine
    differences(mine, x) -> differences(mine, min(mine))
figures test_figures::a_runs_page_has_the_logs_numbers
    {x:.5g} -> {x:.2g}
figures test_figures::a_sweeps_page
    <{tag}>{html.escape(text)}</{tag}> -> <{tag}>{text}</{tag}>
sweep test_sweep::tuning_goes_on_beyond_an_edge
    factor = 2.0 -> factor = 1.0
    range(FURTHER) -> range(FURTHER + 1)
sweep test_sweep::language_models_cost_16_blocks
    DEAR * W if -> 2 * W if
sweep test_sweep::each_cell_is_tuned_with_seed_1_and_its
    if row.seed > 1 or not tune] -> if row.seed > 0]
    + bool(tune) for -> for
    np.mean(best[0] < best[1]) -> np.mean(best[0] <= best[1])
    (DRAWS, len(v))).mean(1) -> (DRAWS, 1)).mean(1)
    ddof=1 -> ddof=0
model test_model::recurrent_in_fp32_and_bf16
    w = {name: p for name, -> w = {name: p + (name == 'a') * LOW * (p - p.detach()) for name,
    w = {name: p for name, -> w = {name: p - 2 * (name == 'b') * LOW * (p - p.detach()) for name,
    w = {name: p for name, -> w = {name: p + (name == 'up') * LOW * (p - p.detach()) for name,
config/small_L2 test_paper::language_models_of_the_paper
    n_expert = 8 -> n_expert = 4
    n_layer = 2 -> n_layer = 2\nlearning_rate = 1e-2
config/small_long_nonrecurrent_L2 test_paper::language_models_of_the_paper
    window = 1024 -> window = 128
    recurrent = False -> recurrent = True
config/sokoban_small_nonrecurrent_L4 test_paper::agents_of_the_paper
    recurrent = False -> recurrent = True
    n_embd = 64 -> n_embd = 64\ngamma = 0.99
config/demo test_paper::config_files_of_our_own
    warmup_iters = 20 -> warmup_iters = 20\nembedding_lr = 0.1
"""


def read_mutations() -> list[tuple[str, str, str, str]]:
    """(file, old text, new text, test) of the table, and of each setting another value."""
    found = []
    for line in MUTATIONS.strip().replace('LOW', LOW).splitlines():
        if not line.startswith(' '):
            file, test = line.split()
            test, _, begin = test.partition('::')
            text = (ROOT / f'tests/{test}.py').read_text()
            names = re.findall(rf'^def (test_{begin}\w*)', text, re.M)
            if begin and len(names) != 1:
                sys.exit(f'STALE: {test}.py: {len(names)} tests begin with test_{begin}')
            test = f'tests/{test}.py' + f'::{names[0]}' * bool(begin)
        else:
            old, new = line.strip().replace(r'\n', '\n').split(' -> ')
            found.append((f'{file}.py', old, new, test))
    for file in ('train_lm.py', 'train_sokoban.py'):
        for name, value in read_script(ROOT / file)[0].items():
            old, new = (f'\n{name} = {x!r}\n' for x in (value, another(value)))
            found.append((file, old, new, 'tests/test_paper.py::test_defaults'))
    return found


def another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (another(value[0]), *value[1:])
    if isinstance(value, str):
        return value + '_'
    return value + 1 if isinstance(value, int) or value == 0 else value * 0.9


def run_tests(copy: Path, tests: list[str]) -> tuple[int, str]:
    """pytest in a process of its own -> its exit status and the last line it printed."""
    words = ['-m', 'pytest', '-qx', '-p', 'no:cacheprovider', '-p', 'pytest_timeout', *tests]
    done = forks.run([sys.executable, *words], cwd=copy, capture_output=True, text=True)
    return done.returncode, done.stdout.strip().splitlines()[-1][:300]


def main() -> int:
    mutations, words = read_mutations(), sys.argv[1:]
    sources = {m[0]: f'\n{ast.unparse(ast.parse((ROOT / m[0]).read_text()))}\n' for m in mutations}
    stale = [m for m in mutations if sources[m[0]].count(m[1]) != 1]
    for file, old, _, _ in stale:
        print(f'STALE: {file}: stands {sources[file].count(old)} times: {old.strip()}')
    if stale:
        return 1
    mutations = [m for m in mutations if not words or any(w in part for part in m for w in words)]
    if not mutations:
        sys.exit(f'no mutation has one of these words: {" ".join(words)}')
    # no compiled files: equal sizes in one second would look compiled already
    env = {'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
    os.environ |= env | {'OMP_NUM_THREADS': '1'}
    bad, start = 0, time.time()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / 'copy'
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for file, source in sources.items():
            (copy / file).write_text(source)
        status, last = run_tests(copy, sorted({m[3] for m in mutations}))
        if status != 0:
            sys.exit(f'error: the tests fail before anything is changed: {last}')
        for file, old, new, test in mutations:
            (copy / file).write_text(sources[file].replace(old, new))
            status, last = run_tests(copy, [test])  # 1: tests failed; another: they could not run
            (copy / file).write_text(sources[file])
            result = {0: 'SURVIVES', 1: 'noticed'}.get(status, f'BREAKS the tests instead: {last}')
            bad += status != 1
            print(f'{result}: {file}: {old.strip()!r} -> {new.strip()!r} ({test})', flush=True)
    print(f'{len(mutations)} mutations, {bad} not noticed, {time.time() - start:.0f} s')
    return int(bad > 0)


if __name__ == '__main__':
    sys.exit(main())
