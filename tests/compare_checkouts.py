"""
The speed and memory of two checkouts of this project in one process, in turns, on one thread, by CPU time: forward and backward of a chunk of the recurrent
model, bytes, d = 256, W = 128, T = 64, B = 16.

$ python tests/compare_checkouts.py OTHER OUT.json --paths=fast,compiled --dtypes=fp32,bf16 --cells='1,16;2,8;4,4;16,1' --rounds=8
"""

import importlib
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
    code = (
        f'import sys; sys.path.insert(0, {str(HERE / "tests")!r}); import compare_checkouts as c, torch; torch.set_num_threads(1)\n'
        f'm = c.load({str(folder)!r}); before = c.most()\n'
        f'chunk = c.make_chunk(m, {cell[0]}, {cell[1]}, {path!r}, {dtype!r})\n'
        'for _ in range(3): chunk()\n'
        'print(c.most() - before)'
    )
    return float(
        subprocess.run(
            [sys.executable, '-c', code], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    )


def main():
    other, out, *options = sys.argv[1:]
    given = dict(option[2:].split('=', 1) for option in options)
    torch.set_num_threads(1)
    modules, rows = {'other': load(other), 'this': load(HERE)}, []
    folders = {'other': other, 'this': HERE}
    for path in given['paths'].split(','):
        for dtype in given['dtypes'].split(','):
            for cell in ([int(x) for x in cell.split(',')] for cell in given['cells'].split(';')):
                chunks, times = (
                    {name: make_chunk(m, *cell, path, dtype) for name, m in modules.items()},
                    {name: [] for name in modules},
                )
                for name in modules:
                    chunks[name]()
                for i in range(int(given['rounds'])):
                    for name in sorted(modules, reverse=i % 2 == 1):
                        start = time.process_time()
                        chunks[name]()
                        times[name].append(time.process_time() - start)
                row = {'path': path, 'dtype': dtype, 'L': cell[0], 'E': cell[1], 'seconds': times}
                row['ratio_of_medians'] = statistics.median(times['this']) / statistics.median(
                    times['other']
                )
                row['ratio_of_minima'] = min(times['this']) / min(times['other'])
                if path == 'fast':
                    row['peak_mb'] = {
                        name: peak(folder, cell, path, dtype) for name, folder in folders.items()
                    }
                rows.append(row)
                print({k: v for k, v in row.items() if k != 'seconds'}, flush=True)
                Path(out).write_text(
                    json.dumps(
                        {'torch': torch.__version__, 'options': given, 'results': rows}, indent=1
                    )
                    + '\n'
                )


if __name__ == '__main__':
    main()
