"""Fused batched-expert operations below the models: linears, RMSNorm, RoPE, head and loss, compiled
functions, CUDA graphs, and the choice between a function and its Triton form (triton_kernels.py).

Matrix products are computed in `dtype` (bfloat16 under autocast); states, norms, softmax and sums
stay in the dtype of the state, called `wide` (fp32 in training).
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

from configurator import first_line

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of every RMSNorm and of the denominators of routed aggregations
ROPE_BASE = 10000.0
SOFTCAP = 15.0  # logits are SOFTCAP * tanh(x / SOFTCAP), in fp32
# Head and loss run in slices of rows. Logits per slice: 64 MiB in fp32 on a CPU, 512 MiB in bf16 on
# a GPU.
LOGITS_PER_SLICE = {'cpu': 2**24, 'cuda': 2**28}


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's where it is enabled, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def bf16_is_fast(device: str | torch.device) -> bool:
    """Return whether the device multiplies matrices in bfloat16 faster than in float32.

    A CPU does with AMX or AVX512-BF16 instructions; others emulate bfloat16, up to 40 times slower
    than float32. ATEN_CPU_CAPABILITY=avx2 in the environment, torch's switch that turns AVX-512
    off, counts as a CPU without them. Everything that picks bfloat16 by itself asks here."""
    if torch.device(device).type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.cpu.get_cpu_capability() in ('DEFAULT', 'NO AVX', 'AVX2'):
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


# ---- compiled functions ------------------------------------------------------------------------


@functools.cache
def compiled(f: Callable, pdl: bool = False) -> Callable:
    """Compile f once per process, for every set of shapes that it meets. pdl: launch its kernels by
    programmatic dependent launch, so that a kernel starts while the one before it drains."""
    if capability := os.environ.get('ATEN_CPU_CAPABILITY'):
        # Inductor's cache would hand kernels for AVX-512 to a process limited to AVX2, which
        # compute NaN or crash. So a limited process has a cache of its own.
        directory = os.path.join(tempfile.gettempdir(), f'torchinductor_{os.getuid()}_{capability}')
        os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', directory)
    torch._dynamo.config.recompile_limit = 256  # beyond the limit, a function would run eagerly
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(f, dynamic=False, options={'triton.enable_pdl': True} if pdl else None)


def fused(f: Callable) -> Callable:
    """Decorate a function of tensors: it is compiled (one kernel each way) while `fused.enabled`,
    and called unchanged otherwise. This is the only switch for compilation."""

    @functools.wraps(f)
    def call(*args):
        if fused.enabled and not torch.compiler.is_compiling():
            return compiled(f, 'pdl' in enabled_forms())(*args)
        return f(*args)

    return call


fused.enabled = False


def may_run_uncompiled(error: Exception) -> bool:
    """Return whether what raised this error in compiled functions may work without compilation: the
    compiler is missing or fails, or a compiled kernel cannot be launched. Out of memory does not
    count."""
    if not fused.enabled or isinstance(error, torch.OutOfMemoryError):
        return False
    kinds = (torch._dynamo.exc.TorchDynamoException, RuntimeError)
    return isinstance(error, kinds) or type(error).__module__.startswith('triton.')


# ---- Triton forms ------------------------------------------------------------------------------
# A function decorated with @has_triton_form may be replaced by a drop-in of triton_kernels.py. The
# drop-in runs only where it is enabled (`using`), where it suits the arguments, and while the
# source of every function that it replaces is the one it was written for. `choose_forms` picks
# those that agree in values and gradients, and are faster.


class Form:
    """The Triton form that may stand in for a function."""

    triton: Callable | None = None
    suits: Callable | None = None
    problem = 'not registered'

    def register(self, triton: Callable, suits: Callable, replaces: tuple, source: str) -> None:
        """triton: the drop-in; suits(*args): whether it can run on these arguments; replaces: all
        functions whose work it does; source: source_hash(replaces) of the ones it was written for.
        If the source has changed, the form stays unused."""
        if source_hash(replaces) == source:
            self.triton, self.suits = triton, suits
        else:
            self.problem = 'a function that it replaces was edited'


forms: dict[str, Form] = {}
_enabled: list[frozenset] = [frozenset()]


def has_triton_form(name: str) -> Callable:
    """Decorate a function for which triton_kernels.py may register a drop-in."""

    def decorate(function):
        form = forms[name] = Form()

        @functools.wraps(function)
        def call(*args):
            enabled = name in enabled_forms() and not torch.compiler.is_compiling()
            if enabled and form.triton and form.suits(*args):
                return form.triton(*args)
            return function(*args)

        return call

    return decorate


def source_hash(functions: tuple) -> str:
    """Return a hash of the functions' source, comments and layout included."""
    text = ''.join(inspect.getsource(inspect.unwrap(f)) for f in functions)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def enabled_forms() -> frozenset:
    return _enabled[-1]


@contextlib.contextmanager
def using(names: frozenset) -> Iterator[None]:
    """Enable the forms of these names, and no others, within a with statement. Two names are ways
    to run rather than forms: 'split' (triton_kernels.product) and 'pdl' (see `compiled`)."""
    _enabled.append(frozenset(names))
    try:
        yield
    finally:
        _enabled.pop()


@functools.cache
def triton_module() -> ModuleType | None:
    """Import triton_kernels.py, which registers its forms; None where triton is not installed."""
    if importlib.util.find_spec('triton') is None:
        return None
    import triton_kernels

    return triton_kernels


def errors(found: list, exact: list) -> list[float]:
    """Return the relative differences of two lists of tensors, NaN where one has a NaN. Tensors
    that are zero but for rounding count relative to the largest of all."""
    least = 1e-5 * max(b.double().norm().item() for b in exact)
    return [
        (a.double() - b.double()).norm().item() / max(b.double().norm().item(), least)
        for a, b in zip(found, exact, strict=True)
    ]


def choose_forms(names: list, trial: Callable, seconds: Callable) -> tuple[frozenset, list[str]]:
    """Return the names of the Triton forms to use, and a line about each.

    trial(exact): run once, on random inputs and parameters, and return outputs and all gradients;
    exact: in higher precision, to judge by. A form agrees if each of its results is at most three
    times as far from the exact ones as the function's own (plus a thousandth). seconds(run): the
    time of run(). Forms are tried in turn, each beside those chosen before it; any exception in a
    trial means that the form is not used."""
    chosen, lines = frozenset(), []
    if triton_module() is None:
        return chosen, ['Triton is not installed: its forms are not used']
    exact, own, fastest = trial(True), None, None
    for name in names:
        if name in forms and forms[name].triton is None:
            lines.append(f'{name}: Triton form not used: {forms[name].problem}')
            continue
        if own is None:
            own, fastest = errors(trial(False), exact), seconds(lambda: trial(False))
        try:
            with using(chosen | {name}):
                found, time = errors(trial(False), exact), seconds(lambda: trial(False))
        except Exception as error:  # noqa: BLE001  a form must never end a run
            reason = str(error).splitlines()[:1]
            lines.append(f'{name}: Triton form not used: {type(error).__name__}: {"".join(reason)}')
            continue
        agrees = all(a <= 3 * b + 1e-3 for a, b in zip(found, own, strict=True))
        used = agrees and time < fastest
        speed = f'{1e6 * time:.0f} us, without it {1e6 * fastest:.0f} us'
        error = f'largest error {max(found):.2%}, without it {max(own):.2%}'
        lines.append(f'{name}: Triton form {"used" if used else "not used"}: {speed}; {error}')
        if used:
            chosen, fastest = chosen | {name}, time
    return chosen, lines


def cuda_seconds(run: Callable[[], object]) -> float:
    """Return the device time of run(), replayed as a CUDA graph, so that launches from Python do
    not count, as they do not in training."""
    import triton.testing

    return triton.testing.do_bench_cudagraph(run, rep=20) / 1e3


# ---- norms, RoPE, head layout ------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """RMSNorm with a closed-form backward; eager autograd would take a dozen passes over x."""

    @staticmethod
    def forward(ctx, x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = length.square_().div_(x.size(-1)).add_(EPS).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        along = (dy * y).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1 / y.size(-1)).mul_(r)


def norm(x: Tensor) -> Tensor:
    """Apply a parameter-free RMSNorm over the last dimension."""
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if eager and not x.is_cuda and not torch._C._are_functorch_transforms_active():
        return RMSNorm.apply(x)
    return F.rms_norm(x, (x.size(-1),), eps=EPS)


def rope_table(n: int, K: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (n, K) each, of positions 0 .. n - 1, on the device of `like` and in its
    dtype (at least fp32). The sine carries the sign of each half: see `rotate`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = ROPE_BASE ** (-torch.arange(0, K, 2, device=like.device, dtype=dtype) / K)
    angle = torch.arange(n, device=like.device, dtype=dtype)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x (..., K), pairing dimension j with j + K/2; cos and sin broadcast over x. The
    result has the dtype of cos. rotate(x, cos, -sin) is the inverse."""
    x = x.to(cos.dtype)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


class Heads(NamedTuple):
    """Layout of attention heads in a layer."""

    E: int  # experts
    G: int  # key-value heads per expert
    R: int  # query heads per key-value head
    K: int  # head size
    shared: bool  # all experts share one cache

    @property
    def C(self) -> int:
        """Number of key-value heads in the cache."""
        return self.G if self.shared else self.E * self.G

    @property
    def M(self) -> int:
        """Number of query heads per key-value head in the cache."""
        return self.E * self.R if self.shared else self.R


def to_experts(x: Tensor, heads: Heads) -> Tensor:
    """Rearrange attended values (B*C, M, K) into rows per expert (E, B, H*K); possibly a view."""
    E, G, R, K, shared = heads
    if shared:
        return x.reshape(-1, G, E, R, K).permute(2, 0, 1, 3, 4).flatten(2)
    return x.reshape(-1, E, G, R, K).transpose(0, 1).flatten(2)


def to_cache_heads(x: Tensor, heads: Heads) -> Tensor:
    """Invert to_experts: (E, B, H*K) -> (B*C, M, K)."""
    x = x.unflatten(2, (heads.G, heads.R, heads.K))  # (E, B, G, R, K)
    x = x.permute(1, 2, 0, 3, 4) if heads.shared else x.transpose(0, 1)
    return x.reshape(-1, heads.M, heads.K)


def window_mask(count: Tensor, T: int, W: int) -> Tensor:
    """Return which of the W cached and T new slots each new token sees, (B, 1, T, W + T) bool:
    token t sees slots t + 1 .. t + W, as far as they are filled (count (B,) of the W are)."""
    slot = torch.arange(W + T, device=count.device)
    t = torch.arange(T, device=count.device)[:, None]
    band = (slot > t) & (slot <= t + W)  # (T, W + T)
    return (band & (slot >= (W - count)[:, None, None])).unsqueeze(1)


# ---- aggregation -------------------------------------------------------------------------------


def gate_weights(gates: Tensor, aggregation: str) -> Tensor:
    """Return the coefficients (..., E) of the experts' outputs in a routed aggregation."""
    if aggregation == 'softmax_mean':
        return gates / (gates.sum(-1, keepdim=True) + EPS)
    if aggregation == 'softmax_l2':
        return gates / (gates.square().sum(-1, keepdim=True) + EPS).sqrt()
    raise ValueError(f'aggregation = {aggregation!r}: not known')


# ---- linears -----------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply x (N, in) by w (out, in) transposed -> (N, out); or stacks of both: (E, N, in) by
    (E, out, in) -> (E, N, out). x (N, in) with a stacked w is read by all E."""
    if w.dim() == 2:
        return F.linear(x, w)
    if w.size(0) == 1:  # bmm would copy, and indexing would make a full-size zero gradient
        return F.linear(x.squeeze(0), w.squeeze(0)).unsqueeze(0)
    if x.size(1) == 1 and not w.is_cuda and w.dtype != torch.bfloat16:
        return torch.bmm(w, x.mT).mT  # 1.5 times as fast for single rows on a CPU
    return torch.bmm(x, w.mT)


class Linear:
    """y = x W^T without bias, batched over experts where W is (E, out, in). Autograd makes the
    gradient of W at every call; unroll.DeferredLinear makes it once for all calls."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        """weight: (out, in) or (E, out, in); dtype: of the product."""
        self.weight = weight
        self.w = weight.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.w)


def matmul_into(a: Tensor, b: Tensor, wide: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Return a @ b (matrices or stacks of them) in the dtype `wide`; with `total`, add it to that
    in place. On a GPU the fp32 accumulator is kept; elsewhere bf16 products are rounded first."""
    stacked = a.dim() == 3
    if a.is_cuda and a.dtype != wide:
        if total is None:
            return (torch.bmm if stacked else torch.mm)(a, b, out_dtype=wide)
        add = torch.baddbmm if stacked else torch.addmm
        return add(total, a, b, out_dtype=wide, out=total)
    if total is None:
        return (a @ b).to(wide)
    if a.dtype != wide:
        return total.add_(a @ b)
    return total.baddbmm_(a, b) if stacked else total.addmm_(a, b)


# ---- head and loss -----------------------------------------------------------------------------


class Loss(NamedTuple):
    """Mean losses per token, in nats."""

    objective: Tensor  # what training minimizes
    cross_entropy: Tensor  # what is reported


def softcap(x: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(x / SOFTCAP)


@fused
def losses(logits: Tensor, targets: Tensor, config: object) -> tuple[Tensor, Tensor]:
    """Return the training objective and the cross-entropy of logits (N, V) before the soft-cap and
    targets (N,), summed over rows, in nats. config: the model's, for settings of the objective."""
    scores = softcap(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    cross_entropy = F.cross_entropy(scores, targets, reduction='sum')
    objective = cross_entropy  # terms that only training sees, such as a z-loss, are added here
    return objective, cross_entropy


@has_triton_form('loss')
def slice_loss(
    logits: Tensor, targets: Tensor, scale: float, config: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return objective and cross-entropy, summed over rows, and `scale` times the gradient of the
    objective with respect to the logits, in their dtype."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        objective, cross_entropy = losses(logits, targets, config)
        (grad,) = torch.autograd.grad(objective, logits, torch.full_like(objective, scale))
    return objective.detach(), cross_entropy.detach(), grad


def rows_per_slice(N: int, V: int, device: str) -> int:
    """Return how many of N rows have their logits in memory at a time; device: 'cpu' or 'cuda'."""
    least = -(-N * V // LOGITS_PER_SLICE[device])  # slices
    # prefer slices of equal size: a shorter last one would be compiled separately
    slices = next((n for n in range(least, 2 * least) if N % n == 0), least)
    return -(-N // slices)


class HeadLoss(torch.autograd.Function):
    """Head and mean loss in slices of rows, so that few logits exist at a time. The forward makes
    the gradients."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, config):
        N, rows = len(x), rows_per_slice(len(x), len(weight), x.device.type)
        w = weight.to(dtype)
        objective, cross_entropy = torch.zeros(2, dtype=x.dtype, device=x.device).unbind()
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for i in range(0, N, rows):
            x_i = x[i : i + rows].to(dtype)
            part, reported, d = slice_loss(x_i @ w.t(), targets[i : i + rows], 1 / N, config)
            objective += part
            cross_entropy += reported
            dx[i : i + rows] = d @ w
            matmul_into(d.t(), x_i, dw.dtype, dw)
        ctx.save_for_backward(dx, dw)
        cross_entropy = cross_entropy / N
        ctx.mark_non_differentiable(cross_entropy)
        return objective / N, cross_entropy

    @staticmethod
    def backward(ctx, g, _):
        dx, dw = ctx.saved_tensors
        return g * dx, g * dw, None, None, None


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, config: object) -> Loss:
    """Return the mean losses of x @ weight.T against targets. x (N, D), weight (V, D), targets (N,)
    int64. Without gradients both are the cross-entropy."""
    dtype, N = compute_dtype(x), len(x)
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return Loss(*HeadLoss.apply(x, weight, targets, dtype, config))
        w, rows = weight.to(dtype), rows_per_slice(N, len(weight), x.device.type)
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for x_i, targets_i in zip(x.split(rows), targets.split(rows), strict=True):
            total += losses(x_i.to(dtype) @ w.t(), targets_i, config)[1]
        return Loss(total / N, total / N)


# ---- CUDA graphs -------------------------------------------------------------------------------


def graphed(
    graphs: dict | None,
    name: str,
    function: Callable,
    *args: object,
    generator: torch.Generator | None = None,
) -> object:
    """Call function(*args) as a CUDA graph.

    The first three calls run eagerly; the fourth is captured, and it and all later calls replay the
    graph: arguments are read from, and results lie in, the same memory every time. If the capture
    fails, one line says why, and all calls run eagerly.

    graphs: where they are kept, by name; graphs of one dict share memory and must be called in the
    same order again and again, so that one may read another's activations. generator: what function
    draws from, unless that is torch's own. Nothing may keep the loss of an eager call alive: its
    gradient nodes belong to another stream. With graphs = None, function is simply called."""
    if graphs is None:
        return function(*args)
    calls, graph, result = graphs.get(name, (0, None, None))
    if graph is None and calls >= 3:
        pool = next((g.pool() for _, g, _ in graphs.values() if g is not None), None)
        graph, result = capture(name, function, args, pool, generator)
        calls = calls if graph else -math.inf  # never again
        graphs[name] = calls, graph, result
    if graph is None:
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
    """Capture function(*args): return the graph and where its results will lie, or print why there
    is no graph and return (None, None)."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    try:
        # After an error the stream of the capture would stay the current one: the outer block sets
        # it back. thread_local: other threads load data meanwhile.
        with torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(graph, pool=pool, capture_error_mode='thread_local'):
                result = function(*args)
    except RuntimeError as error:
        cause = first_line(error.__context__ or error)
        if os.environ.get('RANK', '0') == '0':
            print(f'no CUDA graph of {name!r}: training is slower ({cause})', flush=True)
        return None, None
    return graph, result


def can_capture(x: Tensor) -> bool:
    """Return whether a CUDA graph can be captured here; within a capture, work joins that graph."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()
