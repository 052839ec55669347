"""bench.py: reports hold what they promise, a failing variant does not end the others, suite first goes on where it stopped;
baselines.py: the LSTM and the Transformer are what they say they are."""

import csv
import json
import math
import pathlib
import shlex
import signal
import subprocess
import sys

import forks
import numpy as np
import pytest

import bench
from configurator import configure, read_script
from model import ModelConfig, build_model

ROOT = pathlib.Path(__file__).parents[1]
SMALL = shlex.split('--rounds=2 --seconds=0.01 --threads=1 --device=cpu --n_envs=2 --unroll=3')
SIZES = shlex.split('--cells=(1,2,4,2) --n_embd=128 --block_size=4')
SETTINGS = read_script(bench.__file__)[0]


def run(tmp_path, *words, status=0):
    """python bench.py -> the report, its table, the output."""
    command = [sys.executable, 'bench.py', *SMALL, *words, f'--out={tmp_path}/a/b.json']
    done = forks.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    table = (tmp_path / 'a' / 'b.md').read_text()
    assert table.strip() in done.stdout
    return json.loads((tmp_path / 'a' / 'b.json').read_text()), table, done.stdout


def refused(monkeypatch, capsys, *words):
    """The one line of a user's mistake."""
    for name, value in SETTINGS.items():  # configure changes them
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(sys, 'argv', ['bench.py', *words])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1
    return error


def median(report, name):
    return report['yardsticks'][name]['median']


def test_a_suite(tmp_path):
    """What every suite promises: a header that lets it be repeated, yardsticks, turns, figures, the table also as a file."""
    report, table, out = run(tmp_path, *SIZES, '--paths=fast,gpt_bf16')
    kept = 'device torch python threads commit command date config dtype memory'
    assert set(kept.split()) <= set(report) and median(report, 'copy') > 1e7
    turns = [
        line.split(': ')[0]
        for line in out.splitlines()
        if line.startswith('round ') and '/' in line
    ]
    labels = 'yardsticks', '(1,2,4,2) fast', '(1,2,4,2) gpt_bf16'
    assert turns == [f'round {n}/2  {label}' for n in range(3) for label in labels]
    assert '(1,2,4,2): ok; 1 of 1 done' in out or '1 of 1 done' in out
    lines = [line for line in table.splitlines() if line.startswith('|')]
    assert len(lines) == 4 and len({line.count('|') for line in lines}) == 1
    assert '1.00x' in lines[2] and 'head alone, ms' in lines[0]
    fast, gpt = report['results']
    assert [fast[k] for k in 'LECBTDV'] == [1, 2, 4, 2, 4, 128, 256]
    assert [gpt[k] for k in 'LECBTDV'] == [2, 1, 4, 1, 8, 128, 256]  # 8 tokens a chunk, both
    assert (fast['dtype'], gpt['dtype']) == ('float32', 'bfloat16')
    for r in (fast, gpt):
        assert r['status'] == 'ok' and 0 < r['memory_bytes'] < 2**30 and r['first_run_s'] > 0
        rates = 8 / np.array(r['seconds']['chunk'])
        assert len(rates) == 2 and r['tokens_per_s']['median'] == pytest.approx(np.median(rates))
        model = build_model(bench.model_config(r), r is fast)
        flops, rate = sum(model.flops_per_token().values()), median(report, f'matmul {r["dtype"]}')
        assert r['share_of_matmul'] == pytest.approx(3 * flops * np.median(rates) / rate)
    chunk, head = (np.array(fast['seconds'][part]) for part in ('chunk', 'head'))
    assert fast['step_ms']['median'] == pytest.approx(1000 * np.median((chunk - head) / 4))
    flops = build_model(bench.model_config(fast), True).flops_per_token()['core']
    want = 3000 * flops * 2 / median(report, 'matmul float32')
    assert fast['step_ms_at_matmul_rate'] == pytest.approx(want) and 'step_ms' not in gpt


@pytest.mark.parametrize('suite, paths, part, amount', [
    ('train', 'fast,gpt', 'update', 16), ('decode', 'fast,ring', 'token', 2), ('sokoban', 'fast,plain_recompute', 'update', 6),
    ('baselines', 'lstm,fast', 'chunk', 8)])  # fmt: skip
def test_figures_of_the_other_suites(suite, paths, part, amount, tmp_path):
    cell = {'train': '(1,2,4,64)', 'sokoban': '(1,1,4)'}.get(suite, '(1,2,4,2)')
    words = f'--suite={suite} --paths={paths} --cells={cell} --n_embd=128 --block_size=4 --check'
    report, table, out = run(tmp_path, *words.split())
    assert [r['path'] for r in report['results']] == paths.split(',')
    for r in report['results']:
        times = np.array(r['seconds'][part])
        name = bench.metric(r)
        assert name == {'decode': 'ms_per_token', 'sokoban': 'env_steps_per_s'}.get(
            suite, 'tokens_per_s'
        )
        value = r[name]['median']
        assert value == pytest.approx(
            np.median(1000 * times if suite == 'decode' else amount / times)
        )
        if suite in ('train', 'decode'):
            assert 'paper' not in r and (r['B'], r['T']) == ((4, 4) if suite == 'train' else (2, 4))
            steps = value / 4 if suite == 'train' else 1000 / value  # a second
            least = bench.floor(r, median(report, 'matmul float32'), median(report, 'copy'))
            assert r['share_of_roofline'] == pytest.approx(least * steps)
        if suite == 'sokoban':
            macs = (3 if r['path'] == 'fast' else 4) * r['macs_per_step']['executed']
            assert r['share_of_conv'] == pytest.approx(macs * value / median(report, 'conv'))
        if suite == 'baselines':
            both = times + np.array(r['seconds']['optimizer'])
            assert r['tokens_per_s_with_optimizer']['median'] == pytest.approx(np.median(8 / both))
        if suite in ('train', 'sokoban') or r['path'] == 'ring':  # compared with the plain pieces
            assert float(r['check'].rstrip('%')) < 2 and r['check'] in table


def test_suite_kernels(tmp_path):
    """Every twin runs eagerly, Triton's say that they need a GPU; Muon's iteration batched against one by one."""
    report, table, _ = run(tmp_path, *SIZES, '--suite=kernels', '--paths=eager,triton')
    rows = {(r['kernel'], r['path']): r for r in report['results']}
    pieces = ['attention', 'experts', 'loss']
    ways = {('orthogonalize', how) for how in ('one by one', 'batched')}
    assert set(rows) == {(name, path) for name in pieces for path in ('eager', 'triton')} | ways
    for (_, path), r in rows.items():
        assert r['status'] == ('n/a (needs CUDA)' if path == 'triton' else 'ok')
        assert path == 'triton' or r['share_of_roofline'] > 0 and r['us']['median'] > 0
    names = [line.split('|')[1].strip() for line in table.splitlines() if line.startswith('|')][2:]
    assert sorted(names) == sorted([*pieces, 'orthogonalize'] * 2)


def test_why_a_triton_kernel_is_not_timed(monkeypatch):
    cases = [({'error': 'TritonError: x'}, 'TritonError: x'), ({'difference': 0.01}, '')]
    cases += [({'difference': 0.5}, 'wrong by 50.0%'), ({'difference': math.nan}, 'wrong by nan%')]
    for found, message in cases:
        monkeypatch.setattr(bench.kernels, 'compare', lambda run, found=found: found)
        assert bench.why_not(None, True) == message
    assert bench.why_not(None, False) == 'n/a (needs CUDA)'


def test_first_goes_on_where_it_stopped(tmp_path):
    """Steps in processes of their own; the budget stops it, the same line goes on, what is done is not done again; one that fails
    is told and passed by (exit status 1); a report of other code is refused."""
    cells = "('train',1,2,4,64),('decode',1,2,4,2),('train',400,100,4,64),('sokoban',1,1,4)"
    words = ['--suite=first', '--n_embd=128', '--paths=fast,ring', f'--cells={cells}']
    report, _, out = run(tmp_path, *words, '--budget=1')
    assert list(report['steps']) == ['yardsticks', 'train 1 2 4 64'] and 'cells left: 3' in out
    command = shlex.split(out.splitlines()[-1])
    assert command[2:] == [*SMALL, *words, '--budget=1', f'--out={tmp_path}/a/b.json']
    before = report['results']
    assert before[0]['check'] == '0.00%' and before[0]['suite'] == 'train'
    report, table, out = run(tmp_path, *words, '--budget=0', status=1)
    assert 'left' not in out and report['results'][0] == before[0] and len(report['steps']) == 5
    bad = {name: step['status'] for name, step in report['steps'].items() if step['status'] != 'ok'}
    assert list(bad) == ['train 400 100 4 64'] and 'GB free' in bad['train 400 100 4 64']
    assert f'- train 400 100 4 64: {bad["train 400 100 4 64"]}' in table
    assert [r['suite'] for r in report['results']] == [
        'train',
        'decode',
        'decode',
        'train',
        'sokoban',
    ]
    file = tmp_path / 'a' / 'b.json'
    file.write_text(json.dumps({**report, 'commit': 'other'}))
    done = forks.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count('\n') == 1
    assert "commit 'other'" in done.stderr and 'another --out' in done.stderr


def test_first_interrupted(tmp_path):
    """Ctrl-C keeps what is there, and leaves no process."""
    words = ['--suite=first', '--n_embd=128', "--cells=('decode',1,2,4,2),('decode',1,2,8,2)"]
    command = [sys.executable, '-u', 'bench.py', *SMALL, *words, f'--out={tmp_path}/a.json']
    command.remove('-u')
    with forks.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith('decode 1 2 4 2: ok'):
                break
        process.send_signal(signal.SIGINT)
        error = process.communicate()[1]
    assert process.returncode == 130 and 'what was finished is written' in error
    report = json.loads((tmp_path / 'a.json').read_text())
    assert list(report['steps']) == ['yardsticks', 'decode 1 2 4 2'] and len(report['results']) == 3


def test_steps_of_a_gpu():
    """The order that was asked for, each cell once, the rest of the tests last."""
    config = {**SETTINGS, 'device': 'cuda:0', 'dtype': 'bfloat16', 'suite': 'first'}
    steps = list(bench.plan_first(config))
    cells = ['2 8 64', '1 16 64', '4 4 128', '8 2 256', '2 8 2048', '16 1 256']
    decode = ['2 8 128', '2 8 2048', '1 16 128', '1 16 2048']
    want = ['smoke', *(f'train {cell}' for cell in cells), *(f'decode {cell}' for cell in decode)]
    assert steps[:14] == [*want, 'sokoban 1 1 128', 'sokoban 4 1 64', 'kernels 2 8']
    assert len(steps) == len(set(steps)) and steps[-1].startswith('tests test_')
    assert len([name for name in steps if name.startswith('train')]) == 60
    assert all(rows for rows in bench.plan_first(config).values())


MAKE = """
import json, os, signal, sys, time, torch, bench
def part(): return {'update': lambda: None}
def fine(row, config): return part(), {'tokens': 1, 'pid': os.getpid()}
def large(row, config): return {'update': lambda: torch.empty(2**60)}, {}
def killed(row, config): os.kill(os.getpid(), signal.SIGKILL)
def broken(row, config): raise RuntimeError('no compiler\\nmany more lines')
def slow(row, config): time.sleep(600)
def wrong(row, config):
    ones = torch.ones(2, 2)
    return part(), {'tokens': 1, 'check': lambda: {'w': (1.5 * ones, ones), 'b': (ones[0], ones[0])}}
def lost(row, config): return part(), {'tokens': 1, 'check': lambda: torch.empty(2**60)}
bench.MAKERS |= {name: globals()[name] for name in sys.argv[2].split()}
config = {'device': sys.argv[1], 'threads': 1, 'rounds': 1, 'seconds': 0, 'check': True}
begin, pool, late = bench.begin, {}, time.perf_counter() + 5
bench.begin = lambda config: begin({**config, 'device': 'cpu'})
bench.MAKERS['train'] = lambda row, config: bench.MAKERS[row['what']](row, config)
records = {}
for name in sys.argv[2].split():
    until = late if name == 'slow' else float('inf')
    group = {name: {'suite': 'train', 'what': name}}
    records |= bench.measure(group, config, pool, until)
    if config['device'] == 'cpu': bench.end(pool)
bench.end(pool)
print(json.dumps(records))
"""


def measured(device, *names):
    command = [sys.executable, '-c', MAKE, device, ' '.join(names)]
    done = forks.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_variants_that_fail():
    """Each costs itself alone; the reason is told; a gradient that differs does not count."""
    found = measured('cpu', 'large', 'killed', 'broken', 'slow', 'wrong', 'lost', 'fine')
    status = {name: record['status'] for name, record in found.items()}
    assert status == {'large': 'OOM', 'killed': 'OOM', 'broken': 'failed: RuntimeError: no compiler', 'slow': 'failed: late',
                      'wrong': 'differs by 50.0% in w', 'lost': 'ok', 'fine': 'ok'}  # fmt: skip
    assert found['lost']['check'] == 'OOM' and found['wrong']['check'] == '50.00%'
    row = {
        'suite': 'train',
        'L': 1,
        'E': 1,
        'D': 1,
        'C': 1,
        'B': 1,
        'T': 1,
        'V': 1,
        'path': 'fast',
        'dtype': 'float32',
        'model': 'x',
    }
    rows = [bench.derive(record, {**row, 'cell': name}, {})[0] for name, record in found.items()]
    lines = bench.table(rows).splitlines()
    assert len({line.count('|') for line in lines}) == 1 and '| OOM |' in lines[2]
    assert '| differs by 50.0% in w |' in lines[6] and 'tokens_per_s' in rows[4]


def test_one_process_on_a_gpu():
    """Variants one after another in one process, also from call to call; after one that fails, in another. (They use the CPU.)"""
    found = measured('cuda:0', 'fine', 'killed', 'wrong')
    assert [found[name]['status'][:7] for name in found] == ['ok', 'OOM', 'differs']


def test_floor_is_that_of_the_plan():
    """Against the hard floors calculated for an H100 of 800 TFLOP/s and 3 TB/s (1000 tokens/s; ms a token), d = 768, E = 16/L."""
    train = {1: (913, 913, 772, 477, 145, 75), 2: (913, 864, 642, 381, 111, 57), 4: (778, 644, 480, 272, 76, 39),
             8: (514, 427, 319, 173, 46, 23)}  # fmt: skip
    decode = {
        1: (0.096, 0.112),
        2: (0.097, 0.129),
        4: (0.099, 0.162),
        8: (0.103, 0.229),
        16: (0.112, 0.363),
    }

    def floor(suite, L, E, C, B, model='recurrent'):
        row = {
            'suite': suite,
            'model': model,
            'L': L,
            'E': E,
            'C': C,
            'B': B,
            'T': C,
            'D': 768,
            'V': 50304,
        }
        return bench.floor({**row, 'path': 'fast', 'dtype': 'bfloat16'}, 800e12, 3e12)

    for L, line in train.items():
        for C, want in zip(bench.CONTEXTS['train'], line, strict=True):
            got = 32.768 / C / floor('train', L, 16 // L, C, 32768 // C)
            assert got == pytest.approx(want, rel=0.25 if (L, C) == (8, 32) else 0.13), (L, C)
    for L, line in decode.items():
        for C, want in zip((128, 2048), line, strict=True):
            assert 1000 * floor('decode', L, 16 // L, C, 16) == pytest.approx(want, rel=0.07), (
                L,
                C,
            )
    small = ModelConfig(256, 16, 1, 384, window=256, block_size=256)  # at half the width
    flops = 4 * build_model(small, False).flops_per_token()['core'] + 2 * 768 * 50304
    share = 128 / floor('train', 16, 1, 256, 128, 'transformer') / (800e12 / 3 / flops)
    assert 0.8 < share < 1.05


def test_paper_tables():
    """The constants are the paper's files, where they are at hand."""
    folder = ROOT.parent / 'shared' / 'paper'
    if not folder.exists():
        pytest.skip(
            f"{folder} does not exist: bench.py's tables are not compared with the paper's files"
        )
    for suite, name in (('train', 'training_ktokens_per_s'), ('decode', 'latency_ms_per_token')):
        with open(folder / f'{name}_4xH100.csv') as file:
            head, *lines = csv.reader(file)
        k = head.index('E') + 1  # what stands before is the row's name
        for line in lines:
            who = ' '.join(['paper', suite, *(['16'] if suite == 'decode' else []), *line[:k]])
            ours = ['OOM' if word == 'OOM' else float(word) for word in bench.FIGURES[who].split()]
            assert ours == ['OOM' if word == 'OOM' else float(word) for word in line[k:]]
        assert len(lines) == len([who for who in bench.FIGURES if who.startswith(f'paper {suite}')])


def test_paper_cells():
    """On a GPU: every cell of both tables, the streams of one of 4 GPUs, the paper's figures; none at other sizes."""
    config = {**SETTINGS, 'device': 'cuda:0', 'dtype': 'bfloat16', 'suite': 'train'}

    def rows(suite, **changes):
        groups = bench.plan({**config, **changes}, suite)
        return [row for group in groups.values() for row in group.values()]

    all_rows = rows('train')
    assert len(all_rows) == 60
    for r in all_rows:
        assert r['path'] == ('compiled' if r['E'] > 1 else 'gpt_compiled')
        assert r['B'] * r['C'] * 4 == r['tokens_per_update'] and r['T'] == r['C']
        assert 'paper' in bench.published(r)
    papers = {(r['tokens_per_update'], r['L'], r['C']): bench.published(r) for r in all_rows}
    assert papers[131072, 1, 128] == {'paper': 87375, 'target': 430000, 'modelled': 363000}
    assert (
        papers[262144, 16, 2048] == {'paper': 267875} and papers[131072, 8, 128]['paper'] == 'OOM'
    )
    assert papers[131072, 16, 64] == {'paper': pytest.approx(256850)}
    assert len(rows('train', cells=((2, 8), (4, 4, 64), (1, 16, 32, 262144)))) == 12 + 2 + 1
    assert bench.published({**all_rows[0], 'D': 384}) == {}
    assert bench.published({**all_rows[0], 'tokens_per_update': 65536}) == {}
    rings = {
        (r['model'], r['L'], r['C']): bench.published(r)
        for r in rows('decode')
        if r['path'].endswith('ring')
    }
    assert len(rings) == 12 and rings['recurrent', 8, 128] == {'paper': 0.815, 'target': 0.199}
    assert rings['transformer', 16, 2048] == {'paper': 0.670, 'target': 0.555}
    row = next(r for r in rows('decode') if (r['path'], r['L'], r['C']) == ('ring', 8, 128))
    done = bench.derive({'status': 'ok', 'seconds': {'token': [0.0005]}}, row, {})[0]
    assert done['over_paper'] == pytest.approx(0.815 / 0.5) and done[
        'over_target'
    ] == pytest.approx(0.398)


def report_file(path, suite, rows, **changes):
    report = {'suite': suite, 'device': 'X', 'dtype': 'float32', 'commit': 'abc', 'torch': '2', 'threads': 2, 'command': 'old', 'results': rows}  # fmt: skip
    path.write_text(json.dumps({**report, **changes}))
    return str(path)


def result(L, name, value, **changes):
    figures = {name: dict.fromkeys(('median', 'min', 'max'), value)}
    return {'path': 'fast', 'L': L, 'E': 1, 'C': 8, 'B': 2, 'status': 'ok', **figures, **changes}


def test_compare(tmp_path, monkeypatch, capsys):
    """Also reports that are older than a row's suite."""
    a = [
        result(1, 'tokens_per_s', 100),
        result(2, 'tokens_per_s', 50),
        result(4, 'tokens_per_s', 7),
    ]
    b = [
        result(2, 'tokens_per_s', 75),
        result(1, 'tokens_per_s', 250, suite='train'),
        result(4, 'x', 1, status='OOM'),
    ]
    a, b = (report_file(tmp_path / f'{n}.json', 'train', rows) for n, rows in (('a', a), ('b', b)))
    c, d, e = (report_file(tmp_path / f'{n}.json', 'decode', [result(L, 'ms_per_token', x)])
               for n, L, x in (('c', 1, 3.0), ('d', 1, 2.0), ('e', 8, 1)))  # fmt: skip

    def lines(*words):
        for name, value in SETTINGS.items():
            monkeypatch.setattr(bench, name, value)
        monkeypatch.setattr(sys, 'argv', ['bench.py', *words])
        bench.main()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]

    found = lines('--compare', a, b)
    assert [line.split('|')[-2].strip() for line in found[2:]] == [
        '1.50x',
        '2.50x',
        '',
    ] and '| OOM |' in found[4]
    assert lines(f'--compare={c},{d}')[2].endswith('| 1.50x |')
    (tmp_path / 'f.json').write_text('[]')
    for pair, message in ((f'{a},{c}', 'of suite'), (f'{a},nowhere.json', 'cannot be read'), (f'{c},{e}', 'no row in common'),
                          (a, 'two files'), (f'{a},{tmp_path}/f.json', 'no report')):  # fmt: skip
        assert message in refused(monkeypatch, capsys, f'--compare={pair}')


@pytest.mark.parametrize('device', ['cpu', 'cuda:0'])
def test_budget_and_append(device, tmp_path, monkeypatch, capsys):
    """What began is finished and written; the command that is told measures the rest, and only that; rows stay, and are replaced; a
    report of another commit is refused. On a GPU the yardsticks are apart. The same twin beside each cell has a row each."""
    groups, file = [], tmp_path / 'r.json'

    def fine(group, *_):
        groups.append([label.split()[-1] for label in group])
        done = {'status': 'ok', 'seconds': {'chunk': [2.0]}, 'tokens': 4, 'flops_per_token': 1}
        return {label: done for label in group if label != 'yardsticks'}

    monkeypatch.setattr(bench, 'measure', fine)
    same = {
        'device': 'X',
        'dtype': 'float32',
        'threads': 1,
        'torch': '2',
        'commit': 'abc',
        'command': 'new',
    }
    monkeypatch.setattr(bench, 'header', lambda config: dict(same))
    argv = ['bench.py', '--cells=(2,2),(4,1),(3,1,8)', '--n_embd=128', '--append=False']
    monkeypatch.setattr(sys, 'argv', argv)
    config = {**SETTINGS, 'n_embd': 128, 'paths': 'fast,gpt', 'out': str(file)} | {
        'device': device,
        'dtype': 'float32',
    }

    def rows(**changes):
        assert bench.run_suite({**config, **changes}) == 0
        return json.loads(file.read_text())['results'], capsys.readouterr().out

    found, out = rows(cells=((2, 2), (4, 1), (3, 1, 8)), budget=1e-9)
    assert len(found) == 2 and 'cells left: 2' in out
    command = shlex.split(out.splitlines()[-1])
    assert command[:4] == ['python', 'bench.py', '--n_embd=128', '--append=True']
    cells = configure(dict(vars(bench)), command[2:], quiet=True)['cells']
    assert cells == ((4, 1, 128, 16), (3, 1, 8, 16))
    found, out = rows(cells=cells, append=True)
    assert [(r['cell'][:4], r['path'], r['L'], r['E']) for r in found] == [
        ('(2,2', 'fast', 2, 2), ('(2,2', 'gpt', 4, 1), ('(4,1', 'fast', 4, 1), ('(4,1', 'gpt', 4, 1), ('(3,1', 'fast', 3, 1), ('(3,1', 'gpt', 3, 1)]  # fmt: skip
    assert 'left' not in out and groups == ([['yardsticks', 'fast', 'gpt']] * 3 if device == 'cpu' else
        [['yardsticks'], ['fast', 'gpt'], ['yardsticks'], ['fast', 'gpt'], ['fast', 'gpt']])  # fmt: skip
    found[0]['tokens_per_s']['median'] = 9
    report_file(file, 'cpu', found, **same, results=found)
    found, _ = rows(cells=((2, 2),), append=True)
    assert len(found) == 6 and found[0]['tokens_per_s']['median'] == 2  # measured again
    report_file(file, 'cpu', found, **{**same, 'commit': 'other'})
    with pytest.raises(SystemExit):
        rows(append=True)
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and "commit 'other'" in error
    assert len(rows(cells=((2, 2),))[0]) == 2


def test_timed():
    calls = []
    assert (
        bench.timed(lambda: calls.append(1) or 0.25, 10, 'cpu') == 0.25 and len(calls) == 1
    )  # timed itself
    assert 0 < bench.timed(lambda: calls.append(1), 10, 'cpu') < 1 and len(calls) == 11


@pytest.mark.parametrize('argument, message', [
    ('--suite=speed', 'expected one of cpu, baselines, train'), ('--cells=(1,),', 'is not (L, E, C, B)'), ('--cells=((1,2,3,0),)', 'is not (L, E, C, B)'),
    ('--paths=fast,slow', 'expected some of'), ('--paths=ring', 'expected some of'), ('--suite=kernels --paths=fast', 'expected some of'),
    ('--rounds=0', 'at least 1'), ('--budget=-1', 'at least 0'), ('--n_embd=100', 'set n_head'), ('--dtype=float16', 'dtype'),
    ('--device=tpu', 'device'), ('--suite=train --cells=(1,1,4,100)', 'not a whole number'), ('--compare=a.json', 'two files'), ('--compare', 'two files'),
    ('--suite=kernels --paths=eager_bf16', 'expected some of'), ('--out=table.md --append=True', 'name the JSON'), ('--arch=gru', 'expected one of'),
    ('--suite=sokoban --cells=(1,1)', 'is not (L, E, d)'), ('--suite=first --cells=(2,8)', 'is no suite'), ('--suite=first --paths=slow', 'expected some of'),
    ("--suite=first --cells=('speed',2,8),", 'is no suite'), ('--rouns=1', "did you mean 'rounds'"),
])  # fmt: skip
def test_refuses(argument, message, monkeypatch, capsys):
    assert message in refused(monkeypatch, capsys, *argument.split())
