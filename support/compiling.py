"""Three ways to run a function faster: compiled (`fused`), by a Triton kernel in its place
(`has_override`), and as a CUDA graph (`graphed`). If one fails, the plain function runs."""

import ast
import contextlib
import functools
import gc
import hashlib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator

from support.script import first_line, print0

import torch
from torch import Tensor

# Fuse products with sums, as Triton does by default before 3.10; 3.9 warns if this is not set.
os.environ.setdefault('TRITON_DEFAULT_FP_FUSION', '1')

# ---- compiled functions ------------------------------------------------------------------------


@functools.cache
def compiled(f: Callable) -> Callable:
    """Return f compiled, separately for each set of argument shapes."""
    name = 'TORCHINDUCTOR_CACHE_DIR'
    capability = os.environ.get('ATEN_CPU_CAPABILITY')
    if capability and name not in os.environ:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

        # Inductor's cache would hand kernels for AVX-512 to a process limited to AVX2, which
        # compute NaN or crash. So a limited process has a cache of its own.
        os.environ[name] = f'{default_cache_dir()}_{capability}'
    torch._dynamo.config.recompile_limit = 256  # beyond the limit, a function would run eagerly
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(f, dynamic=False)


def fused(f: Callable) -> Callable:
    """Decorate a function of tensors: while `fused.enabled`, calls run it compiled, as about one
    kernel in the forward and one in the backward; otherwise unchanged. This is the only switch for
    compilation."""

    @functools.wraps(f)
    def call(*args, **kwargs):
        if fused.enabled and not torch.compiler.is_compiling():
            return compiled(f)(*args, **kwargs)
        return f(*args, **kwargs)

    return call


fused.enabled = False


# ---- Triton overrides --------------------------------------------------------------------------
# A function decorated with @has_override may be replaced by a function of the same arguments in
# kernels.py, its Triton override. The override runs only where it is enabled (`use_overrides`), and
# while the code of every function that it replaces is the code that it was written for.

registered: dict[str, Callable] = {}  # overrides by name, filled by kernels.py
# Variants of kernels that no GPU has measured: 'tile', 'stores', 'split' (kernels.py). Only
# bench.py adds names.
candidates: set[str] = set()
_enabled: list[frozenset] = [frozenset()]


def has_override(name: str) -> Callable:
    """Decorate a function for which kernels.py may register an override of this name. An override
    that cannot take some arguments returns NotImplemented for them. None takes float64, in which
    models are checked, because kernels calculate in fp32."""

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            result = NotImplemented
            if name in _enabled[-1] and name in registered and not torch.compiler.is_compiling():
                if not any(getattr(x, 'dtype', None) == torch.float64 for x in args):
                    result = registered[name](*args, **kwargs)
            return function(*args, **kwargs) if result is NotImplemented else result

        return call

    return decorate


def source_hash(sources: Iterable[str | bytes]) -> str:
    """Return a hash of the code in source texts. Comments, docstrings and layout do not change
    it."""
    trees = [ast.parse(source) for source in sources]
    have_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, have_docstring) and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256('\n'.join(map(ast.unparse, trees)).encode()).hexdigest()[:16]


def code_hash(functions: tuple) -> str:
    """Return the `source_hash` of functions or classes."""
    return source_hash(textwrap.dedent(inspect.getsource(f)) for f in functions)


def enabled_overrides() -> frozenset:
    """Return the names that the innermost `use_overrides` has enabled."""
    return _enabled[-1]


@contextlib.contextmanager
def use_overrides(names: frozenset) -> Iterator[None]:
    """Enable the overrides of these names, and no others, within a with statement."""
    _enabled.append(frozenset(names))
    try:
        yield
    finally:
        _enabled.pop()


# ---- CUDA graphs -------------------------------------------------------------------------------

captures: dict[str, str] = {}  # by name of a graph: '' if it was captured, or why it was not
refused_pools: set[tuple] = set()  # memory in which CUDA may refuse any further capture


def graphed(
    graphs: dict | None,
    name: str,
    function: Callable,
    *args: object,
    needs: str = '',
    generator: torch.Generator | None = None,
) -> object:
    """Call function(*args) as a CUDA graph; with graphs = None, just call it.

    The first three calls run eagerly. The fourth captures the graph; it and all later calls replay
    it: arguments are read from, and results lie in, the same memory every time. If a capture fails,
    the reason is printed, and from then on that function runs eagerly.

    graphs: a dict that holds graphs by name; they share memory, so that one may read another's
    results, and must always be called in the same order. needs: the name of the graph whose results
    are among `args`; without that graph they lie elsewhere in each call, and `function` runs
    eagerly, too. generator: the random number generator of `function`, unless that is torch's
    default. Release the loss of an eager call before the next one: a capture fails on autograd
    nodes that another stream has created."""
    if graphs is None:
        return function(*args)
    calls, graph, result = graphs.get(name, (0, None, None))  # calls: the eager ones
    if graph is None and calls == 3:
        if needs and graphs[needs][1] is None:
            report_refusal(name, f'it needs the graph of {needs!r}')
        else:
            pools = [g.pool() for _, g, _ in graphs.values() if g is not None]
            pool = next((pool for pool in pools if pool not in refused_pools), None)
            graph, result = capture(name, function, args, pool, generator)
            graphs[name] = calls, graph, result
    if graph is None:  # one of the first calls, or the capture failed
        result = function(*args)
        graphs[name] = calls + 1, None, None
        return result
    graph.replay()
    return result


def capture(
    name: str,
    function: Callable,
    args: tuple,
    pool: tuple | None,
    generator: torch.Generator | None,
) -> tuple[torch.cuda.CUDAGraph | None, object]:
    """Capture function(*args). Return the graph, and the result that each replay overwrites; if the
    capture fails, print why and return (None, None). pool: the memory of other graphs to share."""
    pool = pool or torch.cuda.graph_pool_handle()
    gc.collect()  # an error's frames may hold autograd nodes of another stream
    try:
        with capturing(pool, generator) as graph:
            result = function(*args)
    except RuntimeError as error:
        report_refusal(name, first_line(error.__context__ or error))
        end_refused(pool, generator)
        return None, None
    captures.setdefault(name, '')
    return graph, result


@contextlib.contextmanager
def capturing(
    pool: tuple | None, generator: torch.Generator | None
) -> Iterator[torch.cuda.CUDAGraph]:
    """Yield a graph that captures what is called within a with statement. pool: None = memory of
    its own."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None and torch.__version__ < (2, 14):  # later versions do it themselves
        graph.register_generator_state(generator)
    stream = capture_stream(torch.cuda.current_device())
    # After an error the stream of the capture would stay the current one: the outer block sets it
    # back. thread_local: other threads load data meanwhile.
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(graph, pool, stream, capture_error_mode='thread_local'):
            yield graph


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a GPU. PyTorch's own is one for all GPUs, and a capture
    on another GPU than its own would be empty."""
    return torch.cuda.Stream(device)


def end_refused(pool: tuple, generator: torch.Generator | None) -> None:
    """Undo what a refused capture leaves behind before PyTorch 2.14. Allocators still record into
    its pool; that of pinned memory cannot be stopped, so that no later capture may use the pool.
    Generators stay in capture mode, and refuse to draw, until another capture ends: an empty one
    follows."""
    refused_pools.add(pool)
    with contextlib.suppress(RuntimeError):  # raised if the pool is not recording
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with contextlib.suppress(RuntimeError), capturing(None, generator):
        torch.zeros(1, device='cuda')


def report_refusal(name: str, reason: str) -> None:
    """Note, and print on rank 0, why there is no CUDA graph of this name."""
    if captures.get(name) == reason:  # a long chunk has several graphs of one name
        return
    captures[name] = reason
    print0(f'no CUDA graph of {name!r}: it runs eagerly, slower ({reason})')


def can_capture(x: Tensor) -> bool:
    """Return whether a CUDA graph can be captured now: x is on a GPU, and no capture is running."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()
