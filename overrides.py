"""Which Triton overrides (kernels.py) a model uses: those that agree with what they replace."""

import copy
from collections.abc import Callable, Iterable

from support.script import first_line

import torch

from decode import Decoder
from model import LanguageModel, State, randomize
from support import ranks
from support.compiling import enabled_overrides, registered, use_overrides
from support.random_states import continuing_from, get_random_states
from unroll import GROUP


def choose_overrides(
    model: torch.nn.Module,
    B: int,
    compute_dtype: torch.dtype,
    allowed: Iterable[str] | None = None,
) -> list[str]:
    """Choose the Triton overrides that a language model on a GPU uses for B streams, or as many as
    a trial has memory for, in training or, in evaluation mode, in decoding, and set
    `model.overrides`. Rank 0 decides for all. Return lines that say what is used, and what is not
    and why.

    compute_dtype: of matrix products; allowed: the names that may be used, None = all. The
    non-recurrent model has no overrides in training, where whole sequences make products large."""
    can_override = isinstance(model, LanguageModel) and (model.recurrent or not model.training)
    if not model.head.is_cuda or not can_override:
        return []
    model.overrides, lines = frozenset(), []
    if ranks.is_first():
        try:
            import kernels  # only here: it needs triton, which may be missing or broken

            names = kernels.OVERRIDES if allowed is None else sorted(allowed)
            model.overrides, lines = find_in_memory(model, B, compute_dtype, names)
        except Exception as error:  # noqa: BLE001  a trial must never end a run
            lines = [f'Triton overrides cannot be used: {first_line(error)}']
    model.overrides = ranks.from_first(model.overrides)
    if model.overrides:
        import kernels  # noqa: F401  registers them on the other ranks, too
    model.release()  # segments that were made without overrides
    found = ', '.join(sorted(model.overrides)) or 'none'
    if allowed is not None:
        found += f' (at most those of the start: {", ".join(sorted(allowed)) or "none"})'
    return [f'Triton overrides in use: {found}', *lines]


def find_in_memory(
    model: LanguageModel, B: int, compute_dtype: torch.dtype, names: Iterable[str]
) -> tuple[frozenset, list[str]]:
    """Return what `find_agreeing` finds for B streams, or for a half, a quarter, ... of them
    whose trial fits in memory."""
    while True:
        try:
            return find_agreeing(make_trial(model, B, compute_dtype), names)
        except torch.OutOfMemoryError:  # in fp32 a trial may take more than training does
            if B == 1:
                raise
        ranks.release_memory()
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
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  an override must never end a run
                reason = first_line(error)
            else:
                if (plain.isfinite() & (errors <= 3 * plain + 1e-3)).all():
                    agreeing |= {name}
                    continue
                reason = f'largest error {errors.max():.2%}, without it {plain.max():.2%}'
        lines.append(f'Triton override {name!r} is not used: {reason}')
    return agreeing, lines


def make_trial(
    model: LanguageModel, B: int, compute_dtype: torch.dtype
) -> Callable[[bool], list[torch.Tensor]]:
    """Return the function trial(exact) of `find_agreeing` for a language model and B streams with
    full windows: a training chunk or, in evaluation mode, the decoding of a token. It runs on a
    copy of the model with random weights. exact: whether all products are in fp32."""
    model = randomize(copy.deepcopy(model))
    device, is_wide = model.head.device, compute_dtype == torch.float32
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randint(len(model.head), (2, B, GROUP + 1), generator=rng).to(device)
    with torch.autocast(device.type, compute_dtype, enabled=not is_wide):
        empty = model.init_state(B)  # keys and values in the dtype of products
    s, k, v = (torch.randn(t.shape, generator=rng).to(t) for t in empty[:3])
    state = State(s, k, v, torch.full_like(empty.count, model.config.window))
    random_states = get_random_states(device)  # so that a dropout drops the same in every call

    def run_chunk(exact: bool) -> list[torch.Tensor]:
        """Run a chunk of two groups of tokens forward and backward; return the loss, the new state
        and all gradients."""
        model.overrides = enabled_overrides()
        enabled = not (is_wide or exact)
        autocast = torch.autocast(device.type, compute_dtype, enabled=enabled)
        with continuing_from(random_states, device), torch.enable_grad(), autocast:
            loss, new = model(x, y, state)
        parameters = list(model.parameters())  # a hack may leave some of them unused
        grads = torch.autograd.grad(loss.objective, parameters, materialize_grads=True)
        return [loss.objective.detach(), *new[:3], *grads]

    if model.training:
        return run_chunk
    decoders = [Decoder(model, B, dtype) for dtype in (compute_dtype, torch.float32)]

    @torch.no_grad()
    def run_token(exact: bool) -> list[torch.Tensor]:
        """Decode a token; return the logits, s, and the new keys and values."""
        model.overrides = enabled_overrides()
        decoder = decoders[exact]
        decoder.load(state)
        decoder.token.copy_(x[:, 0])
        decoder.run_token()
        entries = (decoder.keys[:, :, 0], decoder.values[:, :, 0])
        return [t.clone() for t in (decoder.logits, decoder.s, *entries)]

    return run_token


def relative_errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    """Return the relative error of each tensor of `found`, infinity where it has a NaN. Errors are
    divided by the exact tensor's norm, but at least by 1e-5 of the largest norm, because smaller
    tensors hold only rounding errors."""
    norms = torch.stack([x.double().norm() for x in exact])
    pairs = zip(found, exact, strict=True)
    errors = torch.stack([(a.double() - b.double()).norm() for a, b in pairs])
    return (errors / norms.clamp(min=1e-5 * norms.max())).nan_to_num(nan=torch.inf)
