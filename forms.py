"""The choice of Triton forms (triton_kernels.py): those that agree in a trial and are faster."""

import copy
from collections.abc import Callable

from configurator import first_line

import torch

from decode import Decoder
from graphs import enabled_forms, registered, using
from model import LanguageModel, State, randomize
from recompute import release
from unroll import GROUP

FORMS = ('attention', 'experts', 'loss')  # tried in this order, each beside those chosen before


def choose_forms(model: torch.nn.Module, B: int, amp: torch.dtype) -> list[str]:
    """Choose the Triton forms with which a model on a GPU runs B streams, set `model.forms`, and
    return a line about each. What is tried is a training chunk, or in evaluation mode the decoding
    of a token. amp: dtype of matrix products."""
    weight = model.head
    has_forms = isinstance(model, LanguageModel) and (model.recurrent or not model.training)
    if not weight.is_cuda or weight.dtype != torch.float32 or not has_forms:
        return []
    with torch.cuda.device_of(weight), torch.autocast('cuda', amp, enabled=amp != torch.float32):
        model.forms, lines = choose(lambda: make_trial(model, B))
    release()  # blocks that were made without forms
    return lines


def choose(make_trial: Callable, names: tuple[str, ...] = FORMS) -> tuple[frozenset, list[str]]:
    """Return the names of the forms to use, and a line about each.

    make_trial() returns a function trial(exact), which runs once on random inputs and parameters
    and returns outputs and gradients. trial(True) runs in higher precision: errors are measured
    against it. A form is used if it is 5% faster, because a smaller gain may be noise, and if the
    error of each result is at most three times that without forms, plus 0.001."""
    chosen, lines = frozenset(), []
    try:
        import triton_kernels  # noqa: F401  registers the forms; a hack may have broken it

        trial = make_trial()
        exact = trial(True)

        def measure(names: frozenset) -> tuple[torch.Tensor, float]:
            """Return the errors of the results with these forms, and the device time."""
            with using(names):
                return relative_errors(trial(False), exact), cuda_seconds(lambda: trial(False))

        plain, fastest = measure(chosen)
    except Exception as error:  # noqa: BLE001  a trial must never end a run
        return chosen, [f'Triton forms not used: {first_line(error)}']
    for name in names:
        if name not in registered:
            lines.append(f'{name}: Triton form not used: a function that it replaces was edited')
            continue
        try:
            errors, seconds = measure(chosen | {name})
        except Exception as error:  # noqa: BLE001  a form must never end a run
            lines.append(f'{name}: Triton form not used: {first_line(error)}')
            continue
        agrees = bool((plain.isfinite() & (errors <= 3 * plain + 1e-3)).all())
        used = agrees and seconds < 0.95 * fastest
        speed = f'{1e6 * seconds:.0f} us, without it {1e6 * fastest:.0f} us'
        error = f'largest error {errors.max():.2%}, without it {plain.max():.2%}'
        lines.append(f'{name}: Triton form {"used" if used else "not used"}: {speed}; {error}')
        if used:
            chosen, fastest = chosen | {name}, seconds
    return chosen, lines


def make_trial(model: LanguageModel, B: int) -> Callable[[bool], list[torch.Tensor]]:
    """Return the function trial(exact) that `choose` needs, for B streams with full windows. It
    runs on a copy of the model with random weights. exact: whether to run without autocast."""
    model = randomize(copy.deepcopy(model))
    device = model.head.device
    amp = torch.is_autocast_enabled(device.type)
    random = torch.Generator().manual_seed(1)
    x, y = torch.randint(len(model.head), (2, B, GROUP + 1), generator=random).to(device)
    empty = model.init_state(B)
    s, k, v = (torch.randn(t.shape, generator=random).to(t) for t in empty[:3])
    state = State(s, k, v, torch.full_like(empty.count, model.config.window))

    def run_chunk(exact: bool) -> list[torch.Tensor]:
        """Run a chunk of two groups of tokens forward and backward; return the loss, the new state
        and all gradients."""
        model.forms = enabled_forms()
        with torch.enable_grad(), torch.autocast(device.type, enabled=amp and not exact):
            loss, new = model(x, y, state)
        parameters = list(model.parameters())  # a hack may leave some of them unused
        grads = torch.autograd.grad(loss.objective, parameters, materialize_grads=True)
        return [loss.objective.detach(), *new[:3], *grads]

    if model.training:
        return run_chunk
    products = torch.bfloat16 if amp else torch.float32
    decoders = [Decoder(model, B, dtype) for dtype in (products, torch.float32)]
    for decoder in decoders:
        decoder.load(state)

    @torch.no_grad()
    def run_token(exact: bool) -> list[torch.Tensor]:
        """Decode a token; return the logits, s, and the new keys and values."""
        model.forms = enabled_forms()
        decoder = decoders[exact]
        decoder.position.start(state.count)  # not `load`, which would count as time of the token
        decoder.s.copy_(state.s)
        decoder.token.copy_(x[:, 0])
        decoder.run_token()
        entries = (decoder.keys[:, :, 0], decoder.values[:, :, 0])
        return [t.clone() for t in (decoder.logits, decoder.s, *entries)]

    return run_token


def relative_errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    """Return the relative error of each tensor of `found`, infinity where it has a NaN. Errors are
    divided by the exact tensor's norm, but at least by 1e-5 of the largest norm, because smaller
    tensors are zero but for rounding."""
    norms = torch.stack([x.double().norm() for x in exact])
    pairs = zip(found, exact, strict=True)
    errors = torch.stack([(a.double() - b.double()).norm() for a, b in pairs])
    return (errors / norms.clamp(min=1e-5 * norms.max())).nan_to_num(nan=torch.inf)


def cuda_seconds(run: Callable[[], object]) -> float:
    """Return the device time of run() in seconds. A CUDA graph replays it, as in training, so that
    launches from Python do not count."""
    import triton.testing

    return triton.testing.do_bench_cudagraph(run, rep=20) / 1e3
