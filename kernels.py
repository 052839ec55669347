"""
What the models' paths share: products, RoPE, the layout of heads, head and loss in slices of
rows, compiled pieces, CUDA graphs, and the choice between a piece of the model and a Triton kernel
that stands in for it (triton_kernels.py).

Shape letters as in model.py. `dt` is the dtype of matrix products
(bf16 under autocast); states, norms, softmax and sums stay in the state's dtype, `wide`.
"""

import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F

EPS = 1e-6  # of every RMSNorm and of the routed aggregations' denominators
ROPE_BASE = 10000.0
SOFTCAP = 15.0  # logits are SOFTCAP * tanh(x / SOFTCAP), in fp32
# head and loss: logits held at a time, 64 MiB in fp32; on a GPU 512 MiB in bf16
LOGITS_PER_SLICE = {'cpu': 2**24, 'cuda': 2**28}


class Heads(NamedTuple):
    """How queries, keys and values lie in a level: E experts, G key-value heads of each, R queries
    a key-value head, head size K; whether experts share one cache."""

    E: int
    G: int
    R: int
    K: int
    shared: bool

    @property
    def C(self) -> int:
        """Cache heads."""
        return self.G if self.shared else self.E * self.G

    @property
    def M(self) -> int:
        """Query heads a cache head."""
        return self.E * self.R if self.shared else self.R


def by_expert(o: torch.Tensor, h: Heads) -> torch.Tensor:
    """Attended values (B*C, M, K) -> (E, B, H*K), perhaps a view."""
    o = o.reshape(-1, *((h.G, h.E, h.R, h.K) if h.shared else (h.E, h.G, h.R, h.K)))
    return (o.permute(2, 0, 1, 3, 4) if h.shared else o.transpose(0, 1)).flatten(2)


def by_cache_head(o: torch.Tensor, h: Heads) -> torch.Tensor:
    """The inverse of by_expert: (E, B, H*K) -> (B*C, M, K)."""
    o = o.unflatten(2, (h.G, h.R, h.K))
    o = o.permute(1, 2, 0, 3, 4) if h.shared else o.transpose(0, 1)
    return o.reshape(-1, h.M, h.K)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of matrix products for x: autocast's where it is on, else x's own."""
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


def softcap(x: torch.Tensor) -> torch.Tensor:
    return SOFTCAP * torch.tanh(x / SOFTCAP)


def rope_table(n: int, K: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of slots 0..n-1: (n, K) each, in like's dtype (at least fp32) and on its
    device."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    freq = ROPE_BASE ** (-torch.arange(0, K, 2, device=like.device, dtype=dtype) / K)
    angle = torch.arange(n, device=like.device, dtype=dtype)[:, None] * freq
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (..., K), pairing dimension j with j + K/2. cos, sin broadcast over it; -sin rotates
    back."""
    x = x.to(cos.dtype)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


def window_mask(count: torch.Tensor, T: int, W: int) -> torch.Tensor:
    """(B, 1, T, W + T) bool: token t of a chunk may look at slots t+1 .. t+W of the cached W and
    the new T, if filled."""
    slot, t = (torch.arange(n, device=count.device) for n in (W + T, T))
    t = t[:, None]
    band = (slot > t) & (slot <= t + W)  # (T, W + T)
    return (band & (slot >= (W - count)[:, None, None])).unsqueeze(1)


class Norm(torch.autograd.Function):
    """RMSNorm with its backward in closed form: eagerly autograd's would be a dozen passes."""

    @staticmethod
    def forward(ctx, x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = length.square_().div_(x.size(-1)).add_(EPS).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx, g):
        y, r = ctx.saved_tensors
        along = (g * y).sum(-1, keepdim=True)
        return torch.addcmul(g, y, along, value=-1 / y.size(-1)).mul_(r)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Parameter-free, over the last dimension."""
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if eager and not x.is_cuda and not torch._C._are_functorch_transforms_active():
        return Norm.apply(x)
    return F.rms_norm(x, (x.size(-1),), eps=EPS)


def gate_weights(a: torch.Tensor, name: str) -> torch.Tensor:
    """Routed aggregations' coefficients of h_i from the gates a (..., E): aggregate in model.py."""
    if name == 'softmax_mean':
        return a / (a.sum(-1, keepdim=True) + EPS)
    if name == 'softmax_l2':
        return a / (a.square().sum(-1, keepdim=True) + EPS).sqrt()
    raise ValueError(f'aggregation = {name!r}: not known')


# ---- products ----


def outputs(x: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (N, in), w (out, in) -> (N, out); or stacks of them, (E, N, in), (E, out, in) -> (E, N,
    out)."""
    if w.dim() == 2:
        return F.linear(x, w)
    if w.size(0) == 1:  # a batch of one costs copies, and indexing it zeros in the backward
        return F.linear(x.squeeze(0), w.squeeze(0)).unsqueeze(0)
    if (
        x.size(1) == 1 and not w.is_cuda and w.dtype != torch.bfloat16
    ):  # 1.5x the speed of the other order
        return torch.bmm(w, x.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(x, w.transpose(1, 2))


def product(
    a: torch.Tensor, b: torch.Tensor, wide: torch.dtype, total: torch.Tensor | None = None
) -> torch.Tensor:
    """a @ b, matrices or stacks of them, in `wide`: added to total, in place, where one is given.
    As the accumulator holds it where the device can give that, else rounded first."""
    stacks = a.dim() == 3
    if a.is_cuda and a.dtype != wide:
        if total is None:
            return (torch.bmm if stacks else torch.mm)(a, b, out_dtype=wide)
        add = torch.baddbmm if stacks else torch.addmm
        return add(total, a, b, out_dtype=wide, out=total)
    if total is None:
        return (a @ b).to(wide)
    if a.dtype != wide:
        return total.add_(a @ b)
    return total.baddbmm_(a, b) if stacks else total.addmm_(a, b)


@functools.cache
def compiled(f: Callable, pdl: bool = False) -> Callable:
    """f compiled, once in a process, for each of the sizes that it meets; pdl: its kernels by
    programmatic dependent launch."""
    torch._dynamo.config.recompile_limit = 256  # past it a piece would run eagerly from then on
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(f, dynamic=False, options={'triton.enable_pdl': True} if pdl else None)


def fused(f: Callable) -> Callable:
    """Decorate a function of tensors: compiled into one kernel each way while `fused.enabled`, and
    called unchanged otherwise. The only switch for compilation: language models, agents and Muon
    all use it."""

    @functools.wraps(f)
    def call(*args, **static):
        if fused.enabled and not torch.compiler.is_compiling():
            return compiled(f)(*args, **static)
        return f(*args, **static)

    return call


fused.enabled = False


# ---- Triton or not: measured, for the sizes at hand ----


@functools.cache
def triton_module() -> ModuleType | None:
    """triton_kernels.py; None where triton is not installed."""
    if importlib.util.find_spec('triton') is None:
        return None
    import triton_kernels

    return triton_kernels


def seconds_of(run: Callable[[], object], repeats: int = 16) -> float:
    """Device time of run(), the least of a few: replays of a CUDA graph of it, so that launches
    from Python do not count, as they do not in training. 16 calls: a run that takes its weights in
    turn has come round at most once, and the L2 holds none of them."""
    for _ in range(2):  # the first compiles
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode='thread_local'):  # other threads load data
        for _ in range(repeats):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) / 1e3 / repeats


@torch.no_grad()
def compare(run: Callable[[bool], tuple | list]) -> dict:
    """Seconds of run(False) and run(True), see by_triton, and the largest relative difference of
    their results (NaN if there is one); why not, where it fails: a kernel that does not compile, or
    asks for more shared memory than the card has, is a TritonError."""
    found = {'compiled': seconds_of(lambda: run(False))}
    try:
        # one after the other: both may lie in one memory
        mine, own = ([x.to(torch.float64, copy=True) for x in run(way)] for way in (True, False))
        pairs = zip(mine, own, strict=True)
        off = [(x - y).norm() / y.norm().clamp(min=1e-30) for x, y in pairs]
        found['difference'] = torch.stack(off).max().item()
        found['triton'] = seconds_of(lambda: run(True))
    except (sys.modules['triton'].TritonError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else ''
        found['error'] = f'{type(error).__name__}: {reason}'
    return found


def made_up(weights: dict, dt: torch.dtype) -> tuple[Callable, Iterator[dict]]:
    """For trials: normal(*shape), and a level's weights with such matrices, in dt, in turn with
    copies of them, like levels: more than a GPU's cache holds, which training streams past it
    too. torch's own generators go on as if nothing were drawn."""
    device, random = weights['wqkv'].device, torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(device)

    sizes = {name: x.shape for name, x in weights.items() if x.dim() > 1}
    some = {name: (normal(*size) * size[-1] ** -0.5).to(dt) for name, size in sizes.items()}
    copies = min(16, 1 + 2**28 // sum(x.nbytes for x in some.values()))
    every = [(name, x.detach()) for name, x in (weights | some).items()]
    # a list: nothing is left to be copied while a trial is timed
    leaves = [{name: x.clone().requires_grad_() for name, x in every} for _ in range(copies)]
    return normal, itertools.cycle(leaves)


chosen: dict[tuple, dict] = {}  # what was measured, by sizes and name


def wins(found: dict) -> bool:
    """The kernel agrees with the model's own piece, and is faster."""
    return found.get('difference', 1) < 0.03 and found.get('triton', math.inf) < found['compiled']


def by_triton(key: tuple, device: torch.device, trials: Callable[[], dict]) -> frozenset:
    """Of trials() = {name: run}, the names whose run(True), a Triton kernel or a way to run, agrees
    with run(False), at first the model's own pieces compiled, in values and gradients, and beats
    it. CUDA only; measured once for a key, by CUDA graphs: so not while another is captured, where
    what was not measured before is not taken."""
    if device.type != 'cuda' or triton_module() is None:
        return frozenset()
    if key not in chosen:
        if torch.cuda.is_current_stream_capturing():
            return frozenset()
        chosen[key] = {name: compare(run) for name, run in trials().items()}
    return frozenset(name for name, found in chosen[key].items() if wins(found))


def chosen_lines() -> list[str]:
    """What was measured and chosen so far, one line a set of sizes; empty where there is no GPU."""

    def told(found):
        if 'error' in found:
            return f'not taken ({found["error"]})'
        mine, own = 1e6 * found['triton'], 1e6 * found['compiled']
        apart = f'{found["difference"]:.1%} apart'
        return f'{"" if wins(found) else "not "}taken ({mine:.0f} against {own:.0f} us, {apart})'

    sets = filter(None, chosen.values())
    return [', '.join(f'{n}: {told(x)}' for n, x in trials.items()) for trials in sets]


# ---- head and loss ----


@functools.cache
def widened(losses: Callable) -> Callable:
    """losses of logits in fp32 at least."""

    def run(logits, targets):
        return losses(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)

    return run


def slice_loss(
    losses: Callable, logits: torch.Tensor, targets: torch.Tensor, grad_scale: float, way: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """losses and its gradient times grad_scale for a slice of rows, logits and gradient in the
    dtype of products. way: 'eager', 'compiled' or 'triton'."""
    if way == 'triton':
        return triton_module().cross_entropy(logits, targets, grad_scale)
    run = compiled(widened(losses)) if way == 'compiled' else widened(losses)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = run(logits, targets)
        return loss.detach(), *torch.autograd.grad(loss, logits, torch.full_like(loss, grad_scale))


def loss_by_triton(
    losses: Callable, rows: int, V: int, dt: torch.dtype, device: torch.device
) -> bool:
    """Whether the Triton kernel stands in for `losses`, for slices of this size."""

    def trials():
        random = torch.Generator(device).manual_seed(0)
        logits = (torch.randn(rows, V, device=device, generator=random) * 5).to(dt)
        targets = torch.randint(V, (rows,), device=device, generator=random)

        def run(triton):
            way = 'triton' if triton else 'compiled'
            return slice_loss(losses, logits.clone(), targets, 1 / rows, way)

        return {'loss': run}

    return dt != torch.float64 and 'loss' in by_triton((losses, rows, V, dt), device, trials)


def rows_per_slice(N: int, V: int, device: str) -> int:
    """Of N rows, how many have their logits at a time; device: 'cpu' or 'cuda'."""
    least = -(-N * V // LOGITS_PER_SLICE[device])  # slices
    # equal ones, if twice as many can be: a last, shorter one would be compiled apart
    slices = next((n for n in range(least, 2 * least) if N % n == 0), least)
    return -(-N // slices)


class HeadLoss(torch.autograd.Function):
    """Mean loss in slices of rows, so that few logits exist at a time; gradients are made in the
    forward."""

    @staticmethod
    def forward(ctx, x, weight, targets, dt, losses, compile):
        N, V = x.size(0), weight.size(0)
        rows, way = rows_per_slice(N, V, x.device.type), 'compiled' if compile else 'eager'
        if compile and loss_by_triton(losses, rows, V, dt, x.device):
            way = 'triton'
        w = weight.to(dt)
        loss = torch.zeros((), dtype=x.dtype, device=x.device)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for i in range(0, N, rows):
            x_i = x[i : i + rows].to(dt)
            loss_i, d = slice_loss(losses, x_i @ w.t(), targets[i : i + rows], 1 / N, way)
            loss += loss_i
            dx[i : i + rows] = d @ w
            product(d.t(), x_i, dw.dtype, dw)
        ctx.save_for_backward(dx, dw)
        return loss / N

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return g * dx, g * dw, None, None, None, None


def head_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    losses: Callable,
    compile: bool = False,
) -> torch.Tensor:
    """Mean over rows of losses(x @ weight.T, targets). x (N, D), weight (V, D), targets (N,) int64;
    losses(logits (rows, V) fp32, targets (rows,)) -> their sum."""
    dt, N = compute_dtype(x), x.size(0)
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return HeadLoss.apply(x, weight, targets, dt, losses, compile)
        w, wide, rows = weight.to(dt), x.dtype, rows_per_slice(N, weight.size(0), x.device.type)
        slices = zip(x.split(rows), targets.split(rows), strict=True)
        return sum(losses((x_i.to(dt) @ w.t()).to(wide), y_i) for x_i, y_i in slices) / N


# ---- CUDA graphs ----


def graphed(
    graphs: dict | None,
    name: str,
    function: Callable,
    *args: object,
    generator: torch.Generator | None = None,
) -> object:
    """function(*args) as a CUDA graph: the first three calls run as they are; the fourth is
    captured, and it and all later calls replay that: the arguments are read from, and the results
    lie in, the same memory every time. graphs: where they are kept, by name; those of one dict
    share memory and must be called in the same order again and again, so that one may use another's
    activations. Nothing may keep an eager call's loss alive: its gradient nodes belong to another
    stream. graphs None: as it is."""
    if graphs is None:
        return function(*args)
    calls, graph, result = graphs.get(name, (0, None, None))
    if graph is None and calls < 3:
        result = function(*args)
        graphs[name] = calls + 1, None, None
        return result
    if graph is None:
        pool = next((g.pool() for _, g, _ in graphs.values() if g is not None), None)
        graph = torch.cuda.CUDAGraph()
        if generator is not None:  # what function draws from, but for torch's own
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode='thread_local'):
            result = function(*args)
        graphs[name] = calls, graph, result
    graph.replay()
    return result
