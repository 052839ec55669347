"""Rows of text that a model reads in chunks, with the state that it carries from chunk to chunk.

Training, validation, scoring and the prompt of a sample do the same thing: B rows advance T tokens
at a time, and the state of each row passes to its next chunk. A `Stream` is the one place for it.
It owns the inputs, the targets and the state, at addresses that never move, so that a chunk can be
a CUDA graph.

Shapes: B rows, T tokens per chunk, R rows per micro-batch.
"""

from collections.abc import Callable

from support.script import UserError, print0

import torch
import torch.distributed as dist
from torch import Tensor

from support.compiling import fused, graphed
from support.ranks import Throttle, keeping_buffers, out_of_memory, release_memory, run_compiled

# Most tokens of a micro-batch. GPU: the share of each of the paper's four GPUs in an update. CPU:
# more would not be faster.
MOST_TOKENS = {'cuda': 32768, 'cpu': 4096}
SCORE_CHUNK = 128  # tokens of a chunk in validation; more would only cost RecurrentGPT memory


def most_rows(B: int, T: int, device: torch.device) -> int:
    """Return the number of rows, at most B, of a micro-batch of at most MOST_TOKENS tokens."""
    return min(B, max(1, MOST_TOKENS.get(device.type, MOST_TOKENS['cpu']) // T))


def divisor(B: int, most: int) -> int:
    """Return the largest divisor of B that is at most `most`."""
    return max(n for n in range(1, most + 1) if B % n == 0)


class Stream:
    """B rows of one model. carries: whether state passes from chunk to chunk; a non-recurrent model
    in training carries none, and each of its chunks is a sequence by itself.

    The model has `head`, a tensor on its device; `init_state(B)`, the state, a tuple of tensors,
    and `stream_dims`, the dimension of each that counts rows; `forward` and `core` as in
    model.LanguageModel; `fits_one_graph(state, T)`, whether a chunk can be one CUDA graph;
    `cuda_graphs`, whether the parts of another chunk are; and `release()`, which frees memory that
    it keeps between chunks."""

    def __init__(
        self,
        model: torch.nn.Module,
        B: int,
        T: int,
        rows: int = 0,
        *,
        compute_dtype: torch.dtype = torch.float32,
        carries: bool = True,
        may_shrink: bool = False,
        graphs: dict | None = None,
    ):
        """rows: R, a divisor of B; 0 = those that fit, which `choose_rows` finds.
        compute_dtype: dtype of matrix products; may_shrink: whether B may be reduced to R, for
        texts that are scored; graphs: a dict for CUDA graphs, None = run eagerly."""
        self.model, self.B, self.T, self.graphs = model, B, T, graphs
        self.device = model.head.device
        self.carries, self.may_shrink = carries, may_shrink
        is_wide = compute_dtype == torch.float32
        self.autocast = torch.autocast(self.device.type, compute_dtype, enabled=not is_wide)
        self.dims = model.stream_dims if carries else ()  # the row dimension of each state tensor
        self.state = ()
        sums_dtype = torch.float32 if self.device.type == 'mps' else torch.float64  # mps has none
        self.sums = torch.zeros(2, dtype=sums_dtype, device=self.device)  # of `score`
        self.memory = 0  # bytes that a chunk takes on a GPU, as found by `choose_rows`
        most = most_rows(B, T, self.device)
        self.set_rows(rows or (most if may_shrink else divisor(B, most)))
        if rows:
            self.allocate()

    def set_rows(self, rows: int) -> None:
        """Set the rows of a micro-batch, and free its memory."""
        self.x = self.y = self.part = None
        self.rows = rows
        if self.may_shrink:
            self.B, self.state = rows, ()

    def allocate(self) -> None:
        """Allocate the inputs, the targets and the state of a micro-batch and, in the first call,
        the state of all B rows."""
        self.x, self.y = torch.zeros(2, self.rows, self.T, dtype=torch.int64, device=self.device)
        with self.autocast:  # keys and values of the state take its dtype
            if self.carries and not self.state:
                self.check_state_size()
                self.state = self.model.init_state(self.B)
            self.part = self.state
            if self.carries and self.rows < self.B:
                self.part = self.model.init_state(self.rows)

    def check_state_size(self) -> None:
        """Raise UserError if the state of all rows, which stays on the GPU, would take more than
        three quarters of its memory."""
        if self.device.type != 'cuda' or self.may_shrink:
            return
        most = torch.cuda.mem_get_info(self.device)[1] * 3 / 4
        world = dist.get_world_size() if dist.is_initialized() else 1
        rows = self.B * world
        row_size = sum(t.nbytes for t in self.model.init_state(1))
        if self.B * row_size > most:
            fitting = [
                n for n in range(world, rows) if rows % n == 0 and rows / n * row_size <= most
            ]
            gpus = min(fitting, default=rows)
            raise UserError(
                f'the state of {rows} streams takes {rows * row_size / 1e9:.0f} GB, which needs '
                f'{gpus} GPUs like this one (torchrun --nproc_per_node={gpus}): or choose a '
                'smaller window or n_layer, or fewer tokens_per_step'
            )

    def reset(self, rows: Tensor | None = None) -> None:
        """Set the state of all rows, or of the rows with these numbers, to the initial one."""
        if not self.state:
            return
        with self.autocast:
            initial = self.model.init_state(1 if rows is None else len(rows))
        for t, x, dim in zip(self.state, initial, self.dims, strict=True):
            t.copy_(x) if rows is None else t.index_copy_(dim, rows, x)

    # ---- chunks

    def run(self, name: str, chunk: Callable, x: Tensor, y: Tensor) -> None:
        """Call chunk(x, y, state) for every micro-batch of the tokens x and targets y, (B, T) each,
        as a CUDA graph of this name; `chunk` replaces the state in place. Smaller batches run
        eagerly, and so do chunks for which the model captures graphs itself."""
        if self.device.type == 'cuda' and x.is_cpu:
            x, y = x.pin_memory(), y.pin_memory()  # copies to the GPU are then asynchronous
        for first in range(0, len(x), self.rows):
            part_x, part_y = x[first : first + self.rows], y[first : first + self.rows]
            if part_x.shape != self.x.shape:  # the end of the texts, or the last of them
                rows = [
                    t.narrow(dim, first, len(part_x))
                    for t, dim in zip(self.state, self.dims, strict=True)
                ]
                state = getattr(self.state, '_make', tuple)(rows)
                chunk(part_x.to(self.device), part_y.to(self.device), state)
                continue
            whole = [
                t.narrow(dim, first, self.rows)
                for t, dim in zip(self.state, self.dims, strict=True)
            ]
            copies = self.part is not self.state
            if copies:
                torch._foreach_copy_(list(self.part), whole)
            self.x.copy_(part_x, non_blocking=True)
            self.y.copy_(part_y, non_blocking=True)
            graphs = self.graphs if self.model.fits_one_graph(self.part, self.T) else None
            graphed(graphs, name, chunk, self.x, self.y, self.part)
            if copies:
                torch._foreach_copy_(whole, list(self.part))

    @torch.no_grad()
    def score(self, x: Tensor, y: Tensor, report: Callable[[str], None] = print0) -> Tensor:
        """Return [summed loss in nats, number of tokens], in fp64 (on mps in fp32), of texts x and
        their targets y, (N, n) each, read from an empty state, B texts at a time. Neither B nor T
        changes the result. report: prints a line of progress."""
        self.sums.zero_()
        is_due = Throttle()
        for first in range(0, len(x), self.B):
            self.reset()
            for t in range(0, x.size(1), self.T):
                rows, columns = slice(first, first + self.B), slice(t, t + self.T)
                self.run('score', self.score_chunk, x[rows, columns], y[rows, columns])
                if is_due():
                    report(f'    {self.sums[1]:,.0f} of {x.numel():,} tokens read')
        return self.sums.clone()

    def score_chunk(self, x: Tensor, y: Tensor, state: tuple) -> None:
        """Add the summed loss and the number of tokens of a micro-batch to `sums`."""
        with torch.no_grad(), self.autocast:
            result, new = self.model(x, y, state)
        self.sums[0].add_(result.cross_entropy.to(self.sums.dtype) * x.numel())
        self.sums[1].add_(x.numel())
        copy_state(state, new)

    @torch.no_grad()
    def read(self, x: Tensor, report: Callable[[str], None] = print0) -> None:
        """Advance the state over tokens x (B, n) without a loss."""
        is_due = Throttle()
        for t in range(0, x.size(1), self.T):
            with self.autocast:
                _, new = self.model.core(x[:, t : t + self.T], self.state)
            copy_state(self.state, new)
            if is_due():
                report(f'    {min(t + self.T, x.size(1)):,} of {x.size(1):,} tokens read')

    # ---- the rows of a micro-batch, by trial

    def choose_rows(
        self, chunk: Callable, fixed: bool = False, spare: int = 0, share: float = 1.0
    ) -> None:
        """Halve the rows of a micro-batch until chunk(x, y, state) runs in the memory of every
        rank, and reset the state. If a rank cannot compile it, all ranks run uncompiled.

        fixed: whether the user has chosen the rows; spare: bytes of a GPU that must stay free;
        share: the share of the others that may be used. Raises UserError if the rows that the user
        has chosen, or even a single row, do not fit."""
        while True:
            was_compiled = fused.enabled
            fits = self.runs_in_memory(chunk, spare, share)
            # 2: fits; 1: try fewer; 0: there are no fewer. Ranks may have different numbers of
            # rows, and agree by one reduction per attempt.
            verdict = 2.0 if fits else float(self.rows > 1)
            agreed = torch.tensor([verdict, fused.enabled], device=self.device)
            if dist.is_initialized():
                dist.all_reduce(agreed, dist.ReduceOp.MIN)
            verdict, all_compile = agreed.tolist()
            if was_compiled and not all_compile:
                if fused.enabled:  # otherwise run_compiled has said why
                    print0('compile = True does not work on another rank; running uncompiled')
                    fused.enabled = False
                self.model.release()
                continue
            if verdict == 2:
                return self.reset()
            if verdict == 0 or fixed:
                tried = f'batch_size = {self.rows}' if fixed else 'one row'
                advice = 'choose a smaller model or block_size, or a device with more memory'
                if fixed:
                    advice = '--batch_size=0 finds the most that fit'
                raise UserError(f'{tried} of {self.T} tokens does not fit in memory: {advice}')
            half = max(1, self.rows // 2)
            self.set_rows(half if self.may_shrink else divisor(self.B, half))

    def runs_in_memory(self, chunk: Callable, spare: int, share: float) -> bool:
        """Return whether a micro-batch runs without the memory running out, and note the memory
        that it takes, which is that of its graph. On a GPU it must leave `spare` bytes, room for
        the optimizers' moments and, where there are CUDA graphs, a twentieth of the memory for NCCL
        and fragmentation. Of what is free beside these it may use `share`."""
        on_gpu, has_graphs = self.device.type == 'cuda', self.model.cuda_graphs
        fits, reserved = False, None
        # A graph that a trial captures could not be freed if it does not fit.
        self.model.cuda_graphs = False
        try:
            if on_gpu:
                release_memory()
                size = spare + 8 * sum(p.numel() for p in self.model.parameters())
                free, total = torch.cuda.mem_get_info(self.device)
                if self.graphs is not None:
                    size += total // 20
                size += int((1 - share) * max(0, free - size))
                size -= size % 2**21  # whole segments: a tensor in a rest would pin all of it
                reserved = torch.empty(size, dtype=torch.uint8, device=self.device)
            if self.x is None:
                self.allocate()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_reserved(self.device)
            with keeping_buffers(self.model):
                run_compiled(lambda: chunk(self.x, self.y, self.part))
            if on_gpu:
                self.memory = torch.cuda.max_memory_reserved(self.device) - before
            fits = True
        except Exception as error:
            if not out_of_memory(error):
                raise
        # The error, which kept the tensors of its frames, is gone here.
        del reserved
        self.model.cuda_graphs = has_graphs
        self.model.release()
        if on_gpu:
            torch.cuda.empty_cache()  # or what is allocated next would pin that of `reserved`
            torch.cuda.reset_peak_memory_stats(self.device)  # a trial is not the run
        return fits


def copy_state(state: tuple, new: tuple | None) -> None:
    """Copy a new state over the tensors of `state`, () if none is carried, without its history in
    autograd."""
    if state:
        torch._foreach_copy_(list(state), [t.detach() for t in new])
