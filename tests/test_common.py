"""Test common.py: standard output that fails, gradients in one buffer, errors as one line."""

import errno
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
import torch
from processes import ROOT
from small_runs import assert_refused

import common
import graphs
from common import Gradients
from run import Stopper

# ---- standard output that cannot be written


def save_after_the_terminal_closes(path):
    """Wait for SIGHUP, print to a terminal that is gone, and write the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stopper = Stopper()
    os.write(1, b'ready')
    while stopper.signal is None:
        time.sleep(0.01)
    sys.stdout = open(1, 'w', closefd=False)
    for _ in range(2):
        common.print0('a line of the log')
    path.write_text(str(int(stopper.signal)))


def test_an_update_is_saved_though_the_terminal_is_closed(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        try:
            signal.alarm(600)
            save_after_the_terminal_closes(tmp_path / 'saved')
            os._exit(0)
        finally:  # never return into pytest
            os._exit(1)
    os.read(terminal, 100)
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / 'saved').read_text() == str(int(signal.SIGHUP))


PRINT = """
import sys
from common import print0
from run import Stopper
stopper = Stopper()
for _ in range(2):
    print0('a line')
print(stopper.signal, file=sys.stderr)
"""


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_a_full_disk_behind_standard_output_stops_nothing():
    with open('/dev/full', 'w') as full:
        command = [sys.executable, '-c', PRINT]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    warning = f'warning: standard output is switched off: {os.strerror(errno.ENOSPC)}\n'
    assert (done.returncode, done.stderr) == (0, f'{warning}None\n')


def test_a_run_that_nobody_reads_stops_as_after_sigterm():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, '-c', PRINT]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 0 and done.stderr.endswith(f'{int(signal.SIGTERM)}\n'), done.stderr


def test_what_only_reports_may_fail(capsys):
    def draw():
        raise ValueError('no such font')

    common.attempt('loss.png', draw)
    assert capsys.readouterr().err == 'warning: loss.png: ValueError: no such font\n'


# ---- gradients


def test_gradients_lie_in_one_buffer():
    """Every .grad is a view of the buffer, even if zero_grad() has dropped it."""
    model = torch.nn.Linear(5, 3)
    grads = Gradients(model.parameters(), n_extra=2)
    model(torch.ones(2, 5)).sum().backward()
    grads.extra.copy_(torch.tensor([7.0, 8.0]))
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert grads.norm().item() == pytest.approx(flat.norm().item())
    assert grads.buffer[:-2].norm().item() == pytest.approx(flat.norm().item())
    assert grads.buffer[-2:].tolist() == [7, 8]
    model.zero_grad(set_to_none=True)
    grads.zero()
    grads.buffer.fill_(1)
    assert all((p.grad == 1).all() for p in model.parameters())


def test_a_weight_that_is_not_finite_is_found():
    model = torch.nn.Linear(5, 3)
    assert common.all_finite(model)
    model.weight.data[1, 2] = torch.inf
    assert not common.all_finite(model)


# ---- compilation and errors


@pytest.mark.parametrize('error', [RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_does_not_switch_compilation_off(monkeypatch, error):
    def call():
        raise error

    monkeypatch.setattr(graphs.fused, 'enabled', True)
    with pytest.raises(RuntimeError, match='DefaultCPUAllocator'):
        common.run_compiled(call)
    assert graphs.fused.enabled


@pytest.mark.parametrize(
    'error, line',
    [
        (torch.OutOfMemoryError('of 80 GB'), 'out of GPU memory: a smaller model'),
        (MemoryError(), 'out of memory: a smaller model'),
        (torch.distributed.DistNetworkError('reset'), 'another rank died'),
    ],
)
def test_errors_that_end_a_script_are_one_line(error, line):
    assert line in common.error_explainer('a smaller model')(error)


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match='shapes'):
        common.error_explainer('a smaller model')(RuntimeError('shapes'))


@pytest.mark.parametrize('name', ['gpu', 'cuda:99', 'cpu:1'])
def test_a_device_that_is_not_there_is_refused(name):
    assert_refused('^device = ', common.pick_device, name)


def test_a_dtype_that_is_not_supported_is_refused():
    assert_refused("^dtype = 'float16': expected", common.pick_dtype, 'float16', 'cpu')
