"""Test ranks.py: standard output that fails, gradients in one buffer, errors as one line."""

import contextlib
import io
import os
import platform
import signal
import sys
import zlib
from functools import partial

from support.script import UserError

import pytest
import torch
from processes import run, run_ranks, start
from small_runs import assert_refused, lm_arguments

from support import compiling, ranks
from support.ranks import Gradients
from support.run_folder import is_finished
from support.signals import Stopper

# ---- standard output that cannot be written


@pytest.mark.parametrize(
    'print_line', [ranks.print0, partial(compiling.report_refusal, 'update')], ids=['line', 'graph']
)
def test_standard_output_that_cannot_be_written_loses_no_update(print_line):
    """A full disk, or a terminal that is gone, stops nothing. A run that nobody reads any more gets
    SIGTERM, at which it saves and stops. Standard error goes to the same place."""
    reader, pipe = os.pipe()
    os.close(reader)
    for output, stop in ((os.open('/dev/full', os.O_WRONLY), None), (pipe, signal.SIGTERM)):
        child = os.fork()
        if child == 0:
            try:
                stopper = Stopper()
                os.dup2(output, 1)
                sys.stdout = sys.stderr = open(1, 'w', closefd=False)
                for line in ('one', 'two'):
                    print_line(line)
                os._exit(0 if stopper.signal == stop else 1)
            finally:  # never return into pytest
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_what_only_reports_may_fail(capsys):
    ranks.attempt('loss.png', lambda: 1 / 0)
    error = 'warning: loss.png: ZeroDivisionError: division by zero\n'
    assert capsys.readouterr().err == error


# ---- ranks and gradients


def share(folder):
    """Share the settings of a rank, with a folder of its own; return the error."""
    rank, _, _ = ranks.join_ranks('cpu', 1)
    try:
        ranks.share_settings({'seed': rank, 'out_dir': f'{folder}/{rank}'})
    except UserError as error:
        return str(error)
    finally:
        ranks.leave_ranks()


def test_ranks_with_runs_of_their_own_are_refused(tmp_path):
    """As programs that the ranks of another program start."""
    for line in run_ranks(2, share, str(tmp_path)):
        assert line.startswith('out_dir: the ranks have 0, 1: give all ranks the same')


def print_differences():
    """Compare the weights of ranks, equal at first; return what is printed."""
    rank, _, _ = ranks.join_ranks('cpu', 1)
    model, printed = torch.nn.Linear(2, 1), io.StringIO()
    model.register_parameter('none', torch.nn.Parameter(torch.zeros(0)))
    ranks.share_weights(model)
    with contextlib.redirect_stdout(printed):
        ranks.compare_weights(model)
        printed.write('|')
        model.bias.data += 1e-3 * rank
        ranks.compare_weights(model)
    ranks.leave_ranks()
    return printed.getvalue()


def test_ranks_whose_weights_differ_are_named():
    first, second = run_ranks(2, print_differences)
    assert second == '|' and first.startswith('|warning: the weights of the ranks differ')


ADDRESS = {'MASTER_ADDR': 'localhost', 'MASTER_PORT': '29517'}
LEFT_BEHIND = [  # in the environment of a process that torchrun has not started
    {'RANK': '2'},
    {'RANK': 'x'},
    {'WORLD_SIZE': '4'},
    {'RANK': '3', 'WORLD_SIZE': '2', 'LOCAL_RANK': '1'},
    {'RANK': '1', 'WORLD_SIZE': '2', **ADDRESS},
]


@pytest.mark.parametrize('variables', LEFT_BEHIND, ids=str)
def test_variables_that_torchrun_has_not_set_make_no_rank(data, tmp_path, monkeypatch, variables):
    """The run prints, and writes its folder. A line says that they are ignored."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run(['train_lm.py', *lm_arguments(data, tmp_path, max_iters=1)])
    assert done.returncode == 0, done.stderr
    assert 'in the environment: ignored, torchrun has not set it' in done.stdout
    assert 'done: 1 updates' in done.stdout and is_finished(tmp_path)


def test_a_gpu_is_not_chosen_by_a_variable_that_torchrun_has_not_set(monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '3')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    assert ranks.pick_device('cuda:1') == 'cuda:1'


def test_ranks_that_cannot_be_are_one_line_and_a_wait_is_announced(data, tmp_path):
    """As under torchrun, or in a process that a rank has started."""
    variables = {'LOCAL_RANK': '0', 'WORLD_SIZE': '2', 'TORCHELASTIC_RUN_ID': 'x', **ADDRESS}
    command = ['train_lm.py', *lm_arguments(data, tmp_path, max_iters=1)]
    done = run(command, env=os.environ | variables | {'RANK': '2'})
    assert done.returncode == 2 and done.stderr.startswith('error: RANK = 2, WORLD_SIZE = 2')
    assert done.stderr.count('\n') == 1
    waits = start(command, env=os.environ | variables | {'RANK': '0'})
    assert waits.stderr.readline() == 'rank 0 of 2: waiting for the others at localhost:29517\n'
    waits.kill()
    waits.communicate()


def test_ranks_agree_on_equal_values_only(monkeypatch):
    """The other rank has 4."""
    number = zlib.crc32(repr((4,)).encode())

    def all_reduce(tensor, op):
        tensor.copy_(tensor.minimum(torch.tensor([number, -number])))

    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'all_reduce', all_reduce)
    assert [ranks.agree(value) for value in (3, 4, 5, '4')] == [False, True, False, False]


def test_gradients_lie_in_one_buffer():
    """Every .grad is a view of the buffer, even if zero_grad() has dropped it."""
    model = torch.nn.Linear(5, 3)
    grads = Gradients(model.parameters(), n_extra=2)
    model(torch.ones(2, 5)).sum().backward()
    grads.extra.fill_(7)
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert grads.norm().item() == pytest.approx(flat.norm().item())
    assert grads.buffer.sum().item() == pytest.approx(flat.sum().item() + 14)
    model.zero_grad(set_to_none=True)
    grads.zero()
    grads.buffer.fill_(1)
    assert all((p.grad == 1).all() for p in model.parameters())


# ---- compilation and errors


def test_memory_that_runs_out_does_not_switch_compilation_off(monkeypatch):
    def call():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(compiling.fused, 'enabled', True)
    with pytest.raises(RuntimeError, match='DefaultCPUAllocator'):
        ranks.run_compiled(call)
    assert compiling.fused.enabled


def test_errors_that_end_a_script_are_one_line_and_others_keep_their_traceback():
    @ranks.explain_errors('a smaller model')
    def main(error):
        raise error

    lost = torch.distributed.DistNetworkError('reset')
    out_of_memory = torch.OutOfMemoryError('of 80 GB')
    assert_refused('^out of GPU memory: a smaller model .* of 80 GB', main, out_of_memory)
    for text in ('Triton Error [CUDA]: out of memory', 'cuBLAS: CUBLAS_STATUS_ALLOC_FAILED'):
        assert_refused('^out of GPU memory: a smaller', main, RuntimeError(text))
    assert_refused('^out of memory: a smaller model', main, MemoryError())
    assert_refused('another rank died', main, lost)
    with pytest.raises(RuntimeError, match='shapes'):
        main(RuntimeError('shapes'))


def test_devices_and_dtypes_that_are_not_there_are_refused():
    for name in ('gpu', 'cuda:99'):
        assert_refused('^device = ', ranks.pick_device, name)
    assert_refused("^dtype = 'float16': expected", ranks.pick_dtype, 'float16', 'cpu')


@pytest.mark.parametrize(
    'cpuinfo, name',
    [
        (
            'vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n'
            'vendor_id\t: AuthenticAMD\ncpu family\t: 26\n',
            'CPU AMD EPYC, family 25 model 17',
        ),
        (
            'processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n',
            f'CPU {platform.processor() or platform.machine()}, implementer 0x41 part 0xd4f',
        ),
        ('', f'CPU {platform.processor() or platform.machine()}'),
    ],
)
def test_the_name_of_a_processor_tells_its_generation(monkeypatch, cpuinfo, name):
    monkeypatch.setattr(ranks.pathlib.Path, 'read_text', lambda path: cpuinfo)
    assert ranks.device_name('cpu') == name


def test_a_dtype_that_is_slow_here_is_named(monkeypatch, capsys):
    """As of a run that another processor has started."""
    for is_fast in (True, False):
        monkeypatch.setattr(ranks, 'bf16_is_fast', lambda device, is_fast=is_fast: is_fast)
        assert ranks.pick_dtype('bfloat16', 'cpu') == torch.bfloat16
    assert ranks.pick_dtype('auto', 'cpu') == torch.float32
    assert capsys.readouterr().err.count('warning: ') == 1
