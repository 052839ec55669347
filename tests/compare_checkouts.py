"""
The speed and memory of two checkouts of this project in one process, in turns, on one thread, by
CPU time: forward and backward of a chunk of the recurrent model, bytes, d = 256, W = 128, T = 64,
B = 16.

$ python tests/compare_checkouts.py OTHER OUT.json --paths=fast,compiled --dtypes=fp32,bf16 \\
    --cells='1,16;2,8;4,4;16,1' --rounds=8
"""

import importlib
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

NAMES = 'model', 'unroll', 'kernels', 'decode', 'triton_kernels'
HERE = Path(__file__).resolve().parent.parent


def load(folder):
    """That checkout's model.py, with modules of its own."""
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    module = importlib.import_module('model')
    sys.path.pop(0)
    for name in NAMES:
        sys.modules.pop(name, None)
    return module


def make_chunk(module, L, E, path, dtype):
    torch.manual_seed(0)
    config = module.ModelConfig(256, L, E, 256, window=128, block_size=64, path=path)
    model = module.build_model(config, True)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 and not p.any():
                p.normal_(0, 0.02)
    x, y = torch.randint(256, (2, 16, 64))
    amp = {'fp32': False, 'bf16': True}[dtype]
    with torch.autocast('cpu', torch.bfloat16, enabled=amp):
        carried = [model.init_state(16)]

    def chunk():
        model.zero_grad(set_to_none=True)
        with torch.autocast('cpu', torch.bfloat16, enabled=amp):
            loss, carried[0] = model(x, y, carried[0])
        loss.backward()

    return chunk


def most():
    """The most memory that this process held, in MB."""
    return int(re.search(r'VmHWM:\s*(\d+)', Path('/proc/self/status').read_text())[1]) / 1024


def peak(folder, cell, path, dtype):
    """MB that three chunks add to the process's peak, in a process of its own."""
    code = f"""import sys; sys.path.insert(0, {str(HERE / 'tests')!r})
import compare_checkouts as c, torch; torch.set_num_threads(1)
m = c.load({str(folder)!r}); before = c.most()
chunk = c.make_chunk(m, {cell[0]}, {cell[1]}, {path!r}, {dtype!r})
for _ in range(3): chunk()
print(c.most() - before)"""
    options = {'capture_output': True, 'text': True, 'check': True}
    return float(subprocess.run([sys.executable, '-c', code], **options).stdout.split()[-1])


def main():
    other, out, *options = sys.argv[1:]
    given = dict(option[2:].split('=', 1) for option in options)
    torch.set_num_threads(1)
    folders, rows = {'other': other, 'this': HERE}, []
    modules = {name: load(folder) for name, folder in folders.items()}
    cells = [[int(x) for x in cell.split(',')] for cell in given['cells'].split(';')]
    paths, dtypes = given['paths'].split(','), given['dtypes'].split(',')
    for path, dtype, (L, E) in itertools.product(paths, dtypes, cells):
        chunks = {name: make_chunk(m, L, E, path, dtype) for name, m in modules.items()}
        times = {name: [] for name in modules}
        for chunk in chunks.values():
            chunk()
        for i in range(int(given['rounds'])):
            for name in sorted(modules, reverse=i % 2 == 1):
                start = time.process_time()
                chunks[name]()
                times[name].append(time.process_time() - start)
        row = {'path': path, 'dtype': dtype, 'L': L, 'E': E, 'seconds': times}
        for word, of in (('medians', statistics.median), ('minima', min)):
            row[f'ratio_of_{word}'] = of(times['this']) / of(times['other'])
        if path == 'fast':
            peaks = {name: peak(folder, (L, E), path, dtype) for name, folder in folders.items()}
            row['peak_mb'] = peaks
        rows.append(row)
        print({k: v for k, v in row.items() if k != 'seconds'}, flush=True)
        found = {'torch': torch.__version__, 'options': given, 'results': rows}
        Path(out).write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
    main()
