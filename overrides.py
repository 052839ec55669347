"""Which Triton overrides (kernels.py) a model uses: those that agree with what they replace."""

from collections.abc import Callable, Iterable
from functools import partial

from support.script import first_line

import torch

from support import ranks
from support.compiling import registered, use_overrides


def choose_overrides(
    model: torch.nn.Module,
    rows: Iterable[int],
    compute_dtype: torch.dtype,
    allowed: Iterable[str] | None = None,
) -> list[str]:
    """Choose the Triton overrides that a language model on a GPU uses in training or, in evaluation
    mode, in decoding, and set `model.overrides`. Rank 0 decides for all. Return lines that say what
    is used, and what is not and why.

    rows: numbers of streams that the model will run, such as those of training and of validation;
    each is tried, or as many as there is memory for.
    compute_dtype: of matrix products; allowed: the names that may be used, None = all. The
    non-recurrent model has no overrides in training, where whole sequences make products large."""
    if not model.head.is_cuda or model.training and not model.recurrent:
        return []
    model.overrides, lines = frozenset(), []
    if ranks.is_first():
        try:
            import kernels  # only here: it needs triton, which may be missing or broken

            names = kernels.OVERRIDES if allowed is None else sorted(allowed)
            if not model.training:
                names = [name for name in names if name != 'loss']  # decoding computes none
            if model.training and compute_dtype == torch.float32:
                names = [name for name in names if name == 'loss']
                lines.append('Triton overrides of products are not used: they lack TF32')
            make_trial = partial(kernels.make_trial, model, compute_dtype=compute_dtype)
            for B in dict.fromkeys(rows):  # kernels choose tiles by the number of rows
                if not names:
                    break
                with torch.cuda.device_of(model.head):
                    agreeing, found = find_in_memory(make_trial, B, names)
                names = [name for name in names if name in agreeing]
                lines += found
            model.overrides = frozenset(names)
        except Exception as error:  # noqa: BLE001  a trial must never end a run
            lines = [f'Triton overrides cannot be used: {first_line(error)}']
    model.overrides = ranks.from_first(model.overrides)
    if model.overrides:
        import kernels  # noqa: F401  registers them on the other ranks, too
    model.release()  # segments that were made without overrides
    ranks.release_memory()
    torch.cuda.reset_peak_memory_stats(model.head.device)  # what follows is not the trials'
    found = ', '.join(sorted(model.overrides)) or 'none'
    if allowed is not None:
        found += f' (at most those of the start: {", ".join(sorted(allowed)) or "none"})'
    return [f'Triton overrides in use: {found}', *lines]


def find_in_memory(
    make_trial: Callable[[int], Callable], B: int, names: Iterable[str]
) -> tuple[frozenset, list[str]]:
    """Return what `find_agreeing` finds in the trial make_trial(B) of B streams, or of a half, a
    quarter, ... of them that fits in memory."""
    while True:
        ranks.release_memory()
        try:
            return find_agreeing(make_trial(B), names)
        except RuntimeError as error:  # in fp32 a trial may take more memory than training does
            if B == 1 or not ranks.out_of_memory(error):
                raise
        B //= 2


def find_agreeing(trial: Callable, names: Iterable[str]) -> tuple[frozenset, list[str]]:
    """Return which overrides of these names agree with the functions that they replace, and a line
    about each that is left out.

    trial(exact) runs once on random inputs and parameters, with the overrides that are enabled, and
    returns outputs and gradients. trial(True) runs in higher precision: errors are measured against
    it. An override agrees if, together with those accepted before it, the error of each result is
    at most three times that without overrides, plus 0.001. Speed is no criterion, so that results
    do not depend on timing."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')  # no TF32
    try:
        exact = trial(True)
    finally:
        torch.set_float32_matmul_precision(precision)

    def errors_with(names: frozenset) -> torch.Tensor:
        with use_overrides(names):
            return relative_errors(trial(False), exact)

    agreeing, lines = frozenset(), []
    plain = errors_with(agreeing)
    for name in names:
        if name not in registered:
            reason = 'a function that it replaces was edited'
        else:
            try:
                errors = errors_with(agreeing | {name})
            except Exception as error:  # noqa: BLE001  an override must never end a run
                if ranks.out_of_memory(error):
                    raise
                reason = first_line(error)
            else:
                if (plain.isfinite() & (errors <= 3 * plain + 1e-3)).all():
                    agreeing |= {name}
                    continue
                reason = f'largest error {errors.max():.2%}, without it {plain.max():.2%}'
        lines.append(f'Triton override {name!r} is not used: {reason}')
    return agreeing, lines


def relative_errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    """Return the relative error of each tensor of `found`, infinity where it has a NaN. Errors are
    divided by the exact tensor's norm, but at least by 1e-5 of the largest norm, because smaller
    tensors hold only rounding errors."""
    norms = torch.stack([x.double().norm() for x in exact])
    pairs = zip(found, exact, strict=True)
    errors = torch.stack([(a.double() - b.double()).norm() for a, b in pairs])
    return (errors / norms.clamp(min=1e-5 * norms.max())).nan_to_num(nan=torch.inf)
