"""Operations that the models are built from: linears, RMSNorm, RoPE, head and loss; compiled
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
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

from configurator import first_line

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = 1e-6  # in every RMSNorm and in the denominators of routed aggregations
ROPE_BASE = 10000.0
SOFTCAP = 15.0  # bound of the logits, see `softcap`
# Logits in memory at a time, because head and loss run in slices of rows: 64 MiB in fp32 on a CPU
# (and on Apple's GPUs), 512 MiB in bf16 on a GPU.
LOGITS_PER_SLICE = {'cpu': 2**24, 'cuda': 2**28}


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's where it is enabled, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def bf16_is_fast(device: str | torch.device) -> bool:
    """Return whether the device multiplies matrices in bfloat16 faster than in float32.

    CPUs with AMX or AVX512-BF16 instructions do; others emulate bfloat16, up to 40 times slower
    than float32. With ATEN_CPU_CAPABILITY=avx2 in the environment, torch's switch that turns
    AVX-512 off, a CPU counts as one without them."""
    if torch.device(device).type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.cpu.get_cpu_capability() in ('DEFAULT', 'NO AVX', 'AVX2'):
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


# ---- compiled functions ------------------------------------------------------------------------


@functools.cache
def compiled(f: Callable, pdl: bool = False) -> Callable:
    """Return f compiled, separately for each set of argument shapes. pdl: kernels use programmatic
    dependent launch, by which the next kernel is set up while this one still runs."""
    name = 'TORCHINDUCTOR_CACHE_DIR'
    capability = os.environ.get('ATEN_CPU_CAPABILITY')
    if capability and name not in os.environ:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

        # Inductor's cache would hand kernels for AVX-512 to a process limited to AVX2, which
        # compute NaN or crash. So a limited process has a cache of its own.
        os.environ[name] = f'{default_cache_dir()}_{capability}'
    torch._dynamo.config.recompile_limit = 256  # beyond the limit, a function would run eagerly
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(f, dynamic=False, options={'triton.enable_pdl': True} if pdl else None)


def fused(f: Callable) -> Callable:
    """Decorate a function of tensors: while `fused.enabled`, calls run it compiled, as about one
    kernel in the forward and one in the backward; otherwise unchanged. This is the only switch for
    compilation."""

    @functools.wraps(f)
    def call(*args):
        if fused.enabled and not torch.compiler.is_compiling():
            return compiled(f, 'pdl' in enabled_forms())(*args)
        return f(*args)

    return call


fused.enabled = False


# ---- Triton forms ------------------------------------------------------------------------------
# A function decorated with @has_triton_form may be replaced by its Triton form, a function of the
# same arguments in triton_kernels.py. The form runs only where it is enabled (`using`), where it
# suits the arguments, and while the source of every function that it replaces is the one it was
# written for. `choose_forms` picks forms that agree in values and gradients, and are faster.


class Form:
    """The Triton form of one function."""

    triton: Callable | None = None  # None: cannot be used, because of `problem`
    suits: Callable | None = None
    problem = 'not registered'

    def register(self, triton: Callable, suits: Callable, replaces: tuple, source: str) -> None:
        """Set the form, unless the source of a function that it replaces has changed.

        triton: called instead of the function; suits(*args): whether it can run on these arguments;
        replaces: all functions whose work it does; source: source_hash(replaces) when it was
        written."""
        if source_hash(replaces) == source:
            self.triton, self.suits = triton, suits
        else:
            self.problem = 'a function that it replaces was edited'


forms: dict[str, Form] = {}
_enabled: list[frozenset] = [frozenset()]


def has_triton_form(name: str) -> Callable:
    """Decorate a function for which triton_kernels.py may register a form of this name."""

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
    """Return the names that the innermost `using` has enabled."""
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
    """Import triton_kernels, which registers its forms, and return it, or None where triton is not
    installed."""
    if importlib.util.find_spec('triton') is None:
        return None
    import triton_kernels

    return triton_kernels


def errors(found: list, exact: list) -> list[float]:
    """Return the relative error of each tensor of `found`, infinity where it has a NaN. Errors are
    divided by the exact tensor's norm, but at least by 1e-5 of the largest norm, because smaller
    tensors are zero but for rounding."""
    norms = [b.double().norm().item() for b in exact]
    least = 1e-5 * max(norms)
    relative = []
    for a, b, size in zip(found, exact, norms, strict=True):
        error = (a.double() - b.double()).norm().item() / max(size, least)
        relative.append(math.inf if math.isnan(error) else error)
    return relative


def choose_forms(
    names: tuple[str, ...], make_trial: Callable, seconds: Callable
) -> tuple[frozenset, list[str]]:
    """Return the names of the Triton forms to use, and a line about each.

    make_trial() returns a function trial(exact), which runs once on random inputs and parameters,
    and returns outputs and all gradients. trial(True) runs in higher precision: errors are measured
    against it. seconds(run) returns the time of run(). A form is used if it is 5% faster, and if the
    error of each result is at most three times that without forms, plus 0.001. Forms are tried in
    turn, each together with those chosen before it. A form whose trial raises an exception is not
    used. None is used if the trial without forms or the import of triton_kernels raises one."""
    lines = []
    usable = []
    try:
        if triton_module() is None:
            return frozenset(), ['Triton is not installed: its forms are not used']
        for name in names:
            if name in forms and forms[name].triton is None:
                lines.append(f'{name}: Triton form not used: {forms[name].problem}')
            else:
                usable.append(name)
        trial = make_trial()
        exact, plain = trial(True), trial(False)
        plain_errors = errors(plain, exact)
        fastest = seconds(lambda: trial(False))
    except Exception as error:  # noqa: BLE001  a trial must never end a run
        return frozenset(), [*lines, f'Triton forms not used: {first_line(error)}']
    chosen = frozenset()
    for name in usable:
        try:
            with using(chosen | {name}):
                form_errors = errors(trial(False), exact)
                time = seconds(lambda: trial(False))
        except Exception as error:  # noqa: BLE001  a form must never end a run
            lines.append(f'{name}: Triton form not used: {first_line(error)}')
            continue
        pairs = zip(form_errors, plain_errors, strict=True)
        agrees = all(math.isfinite(plain) and form <= 3 * plain + 1e-3 for form, plain in pairs)
        used = agrees and time < 0.95 * fastest  # a smaller gain may be noise
        speed = f'{1e6 * time:.0f} us, without it {1e6 * fastest:.0f} us'
        error = f'largest error {max(form_errors):.2%}, without it {max(plain_errors):.2%}'
        lines.append(f'{name}: Triton form {"used" if used else "not used"}: {speed}; {error}')
        if used:
            chosen, fastest = chosen | {name}, time
    return chosen, lines


def cuda_seconds(run: Callable[[], object]) -> float:
    """Return the device time of run() in seconds. A CUDA graph replays it, as in training, so that
    launches from Python do not count."""
    import triton.testing

    return triton.testing.do_bench_cudagraph(run, rep=20) / 1e3


# ---- norms, RoPE, head layout ------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """RMSNorm with a closed-form backward, for a CPU; autograd would take a dozen passes over x."""

    @staticmethod
    def forward(ctx, x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = length.square_().div_(x.size(-1)).add_(EPS).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        along = (dy * y).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1 / y.size(-1)).mul_(r)


def norm(x: Tensor) -> Tensor:
    """Apply a parameter-free RMSNorm over the last dimension."""
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # by torch.func, which cannot transform an autograd.Function without setup_context
    transformed = torch._C._are_functorch_transforms_active()
    if eager and not x.is_cuda and not transformed:
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
    # x.roll(K // 2, -1), in a form that compiles to loads of whole vectors
    swapped = x.unflatten(-1, (2, -1)).roll(1, -2).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)


class Heads(NamedTuple):
    """Layout of the attention heads of a layer."""

    E: int  # experts
    G: int  # key-value heads per expert
    R: int  # query heads per key-value head
    K: int  # head size
    shared: bool  # all experts share one cache

    @property
    def C(self) -> int:
        """Return the number of key-value heads in the cache."""
        return self.G if self.shared else self.E * self.G

    @property
    def M(self) -> int:
        """Return the number of query heads per key-value head in the cache."""
        return self.E * self.R if self.shared else self.R


def to_experts(x: Tensor, heads: Heads) -> Tensor:
    """Rearrange attended values (B*C, M, K) into rows per expert, (E, B, H*K); possibly a view."""
    E, G, R, K, shared = heads
    if shared:
        return x.reshape(-1, G, E, R, K).permute(2, 0, 1, 3, 4).flatten(2)
    return x.reshape(-1, E, G, R, K).transpose(0, 1).flatten(2)


def to_cache_heads(x: Tensor, heads: Heads) -> Tensor:
    """Rearrange rows per expert (E, B, H*K) into (B*C, M, K): the inverse of to_experts."""
    x = x.unflatten(2, (heads.G, heads.R, heads.K))  # (E, B, G, R, K)
    x = x.permute(1, 2, 0, 3, 4) if heads.shared else x.transpose(0, 1)
    return x.reshape(-1, heads.M, heads.K)


def in_window(t: Tensor, slot: Tensor, W: int) -> Tensor:
    """Return whether token t of a chunk, which has slot W + t, sees a slot: the last W slots up to
    and including that one."""
    return (slot > t) & (slot <= t + W)


def window_mask(count: Tensor, T: int, W: int) -> Tensor:
    """Return which of W cached and T new slots each new token sees, (B, 1, T, W + T) bool: token t
    sees those of slots t + 1 .. t + W that are filled. Of the cached slots, the last `count` (B,)
    are filled."""
    slot = torch.arange(W + T, device=count.device)
    t = torch.arange(T, device=count.device)[:, None]
    band = in_window(t, slot, W)  # (T, W + T)
    return (band & (slot >= (W - count)[:, None, None])).unsqueeze(1)


# ---- aggregation -------------------------------------------------------------------------------


def gate_weights(gates: Tensor, aggregation: str) -> Tensor:
    """Return the coefficients (..., E) of the experts' outputs in a routed aggregation. Raises
    ValueError for an unknown name."""
    if aggregation == 'softmax_mean':
        return gates / (gates.sum(-1, keepdim=True) + EPS)
    if aggregation == 'softmax_l2':
        return gates / (gates.square().sum(-1, keepdim=True) + EPS).sqrt()
    raise ValueError(f'aggregation = {aggregation!r}: unknown')


# ---- linears -----------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w^T: (N, out) for x (N, in) and w (out, in), or (E, N, out) for stacks of E."""
    if w.dim() == 2:
        return F.linear(x, w)
    if w.size(0) == 1:  # bmm would copy, and indexing would make a full-size zero gradient
        return F.linear(x.squeeze(0), w.squeeze(0)).unsqueeze(0)
    if x.size(1) == 1 and not w.is_cuda and w.dtype != torch.bfloat16:
        return torch.bmm(w, x.mT).mT  # 1.5 times as fast for single rows on a CPU
    return torch.bmm(x, w.mT)


class Linear:
    """y = x W^T without bias, batched over experts where W is (E, out, in). Autograd computes a
    gradient of W for every call; unroll.DeferredLinear computes one for many calls."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        """weight: (out, in) or (E, out, in); dtype: of the product."""
        self.weight = weight
        self.w = weight.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.w)


def matmul_into(a: Tensor, b: Tensor, wide: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Return the product a @ b of matrices, or of stacks of them, in the dtype `wide`. If there is
    a `total` of that dtype, add the product to it in place and return it.

    On a GPU, products of bf16 matrices stay in fp32; elsewhere they are rounded to bf16 first."""
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

    objective: Tensor  # minimized by training
    cross_entropy: Tensor  # reported


def softcap(x: Tensor) -> Tensor:
    """Return SOFTCAP * tanh(x / SOFTCAP), which lies between -SOFTCAP and SOFTCAP."""
    return SOFTCAP * torch.tanh(x / SOFTCAP)


@fused
def losses(logits: Tensor, targets: Tensor, config: object) -> tuple[Tensor, Tensor]:
    """Return the training objective and the cross-entropy, summed over rows, in nats. logits (N, V)
    are those before the soft-cap (`scores`, after it, are what LanguageModel returns as logits);
    targets (N,); config: the model's, for settings of the objective."""
    scores = softcap(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    cross_entropy = F.cross_entropy(scores, targets, reduction='sum')
    # Add terms that only training sees, such as a z-loss of the scores, here, summed over rows: the
    # caller divides by their number.
    objective = cross_entropy
    return objective, cross_entropy


@has_triton_form('loss')
def slice_loss(
    logits: Tensor, targets: Tensor, scale: float, config: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return objective and cross-entropy as `losses`, and `scale` times the gradient of the
    objective with respect to the logits, in their dtype."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        objective, cross_entropy = losses(logits, targets, config)
        (grad,) = torch.autograd.grad(objective, logits, torch.full_like(objective, scale))
    return objective.detach(), cross_entropy.detach(), grad


def rows_per_slice(N: int, V: int, device: str) -> int:
    """Return the number of rows per slice of N rows; device: 'cpu', 'cuda' or 'mps'."""
    min_slices = math.ceil(N * V / LOGITS_PER_SLICE.get(device, LOGITS_PER_SLICE['cpu']))
    # prefer slices of equal size: a shorter last one would be compiled separately
    for slices in range(min_slices, 2 * min_slices):
        if N % slices == 0:
            return N // slices
    return math.ceil(N / min_slices)


class HeadLoss(torch.autograd.Function):
    """Compute head and mean losses in slices of rows, so that few logits exist at a time. The
    forward computes the gradients too, while it has the logits."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, config):
        N = len(x)
        rows = rows_per_slice(N, len(weight), x.device.type)
        w = weight.to(dtype)
        objective, cross_entropy = torch.zeros(2, dtype=x.dtype, device=x.device).unbind()
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for i in range(0, N, rows):
            x_i, targets_i = x[i : i + rows].to(dtype), targets[i : i + rows]
            logits = x_i @ w.t()
            objective_i, cross_entropy_i, dlogits = slice_loss(logits, targets_i, 1 / N, config)
            objective += objective_i
            cross_entropy += cross_entropy_i
            dx[i : i + rows] = dlogits @ w
            matmul_into(dlogits.t(), x_i, dw.dtype, total=dw)
        ctx.save_for_backward(dx, dw)
        cross_entropy = cross_entropy / N
        ctx.mark_non_differentiable(cross_entropy)
        return objective / N, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _):
        dx, dw = ctx.saved_tensors
        return g * dx, g * dw, None, None, None


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, config: object) -> Loss:
    """Return the mean losses of the logits x @ weight^T. x (N, D), weight (V, D), targets (N,)
    int64. Where no gradient is wanted, both losses are the cross-entropy."""
    N = len(x)
    dtype = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return Loss(*HeadLoss.apply(x, weight, targets, dtype, config))
        w = weight.to(dtype)
        rows = rows_per_slice(N, len(weight), x.device.type)
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for x_i, targets_i in zip(x.split(rows), targets.split(rows), strict=True):
            _, cross_entropy = losses(x_i.to(dtype) @ w.t(), targets_i, config)
            total += cross_entropy
        return Loss(total / N, total / N)


# ---- CUDA graphs -------------------------------------------------------------------------------


def graphed(
    graphs: dict | None,
    name: str,
    function: Callable,
    *args: object,
    generator: torch.Generator | None = None,
) -> object:
    """Call function(*args) as a CUDA graph; with graphs = None, just call it.

    The first three calls run eagerly. The fourth captures the graph; it and all later calls replay
    it: arguments are read from, and results lie in, the same memory every time. If the capture
    fails, the reason is printed, and all calls run eagerly.

    graphs: a dict that holds graphs by name; they share memory, so that one may read another's
    activations, and must always be called in the same order. generator: the random number generator
    of `function`, unless that is torch's default. No caller may keep the loss of an eager call
    alive: its autograd nodes belong to another stream."""
    if graphs is None:
        return function(*args)
    calls, graph, result = graphs.get(name, (0, None, None))  # calls: the eager ones
    if graph is None and calls == 3:
        pool = next((g.pool() for _, g, _ in graphs.values() if g is not None), None)
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
        rank = f'rank {os.environ["RANK"]}: ' if os.environ.get('RANK', '0') != '0' else ''
        print(f'{rank}no CUDA graph of {name!r}: it runs eagerly, slower ({cause})', flush=True)
        return None, None
    return graph, result


def capturing(x: Tensor) -> bool:
    """Return whether work on x is now captured into a CUDA graph rather than run."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def can_capture(x: Tensor) -> bool:
    """Return whether a CUDA graph can be captured now: x is on a GPU, and no capture is running."""
    return x.is_cuda and not capturing(x)
