"""Whether two trainings are the same, and whether a model begins as its factory begins it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.zoo.training import Trained

EXACT, ROUNDED = 1e-9, 1e-5
DRAWS, SIGMAS, SPECTRUM = 4, 6.0, 4.0
Found = tuple[float, str]
"""How far it is off, and where."""


# ---- training --------------------------------------------------------------------------------------


def difference(piped: Trained, plain: Trained) -> Found:
    """The largest relative difference of losses, gradients, and of what parameters and buffers have become."""
    losses = [
        (abs(a - b) / max(abs(b), 1e-6), f"loss of step {i}")
        for i, (a, b) in enumerate(zip(piped.losses, plain.losses))
    ]
    found = [_not_a_number_first(losses)]
    for step, (mine, theirs) in enumerate(zip(piped.gradients, plain.gradients)):
        gone = sorted(set(theirs) - set(mine))
        zeros = {n: torch.zeros_like(mine[n]) for n in set(mine) - set(theirs)}
        if gone:
            found.append((math.inf, f"step {step} has no gradient of {gone[0]}"))
        found.append(_apart(mine, {**theirs, **zeros}, f"gradient of step {step}"))
    missing = sorted(set(plain.after) - set(piped.after))
    if missing:
        found.append((math.inf, f"{missing[0]} is nowhere"))
    found.append(_apart(piped.after, plain.after, "value after the steps"))
    return _not_a_number_first(found)


def _apart(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str) -> Found:
    """Tensors by name, each against its size, the small ones against a thousandth of the whole."""
    names = [name for name in mine if name in theirs]
    floating = [theirs[n] for n in names if _floats(theirs[n])]
    whole = math.sqrt(sum(float(t.abs().pow(2).sum()) for t in floating))
    found: list[Found] = [(0.0, what)]
    for name in names:
        a, b = mine[name], theirs[name]
        where = f"{what}: {name}"
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append((math.inf, where))
        elif not _floats(b):
            found.append((0.0 if torch.equal(a, b) else math.inf, where))
        elif not torch.equal(a, b):
            error = float((a - b).abs().pow(2).sum().sqrt())
            size = max(float(b.abs().pow(2).sum().sqrt()), 1e-3 * whole, 1e-12)
            found.append((error / size, where))
    return _not_a_number_first(found)


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _not_a_number_first(found: Sequence[Found]) -> Found:
    return max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0])


def finite(trained: Trained) -> bool:
    """Whether all losses and all parameters are numbers."""
    values = [value for value in trained.after.values() if _floats(value)]
    return all(map(math.isfinite, trained.losses)) and all(bool(v.isfinite().all()) for v in values)


@contextlib.contextmanager
def short_floats() -> Iterator[list[torch.dtype]]:
    """Collects the number formats of saved tensors that are less precise than double."""
    seen: list[torch.dtype] = []

    def look(tensor: Tensor) -> Tensor:
        if _floats(tensor) and tensor.dtype not in (torch.float64, torch.complex128):
            seen.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        yield seen


# ---- initial values --------------------------------------------------------------------------------


def initial(build: Callable[[], nn.Module], mine: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """What is wrong with the initial values ``mine``, by name; nothing where they could be the factory's.

    The factory is called a few times. What it makes the same each time must be that; what it draws must have mean,
    spread and singular values as its draws do, within their sampling error; tensors that it makes equal must be equal.
    """
    draws = []
    for seed in range(DRAWS):
        torch.manual_seed(1000 + seed)
        model = build()
        model = model.double() if dtype == torch.float64 else model
        draws.append(
            {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
        )
    persistent = set(model.state_dict())
    for name in draws[0]:
        if name not in mine:
            if name in persistent:
                return f"{name} is nowhere"
            continue
        wrong = _wrong([draw[name] for draw in draws], mine[name])
        if wrong:
            return f"{name}: {wrong}"
    return _unequal(draws, mine)


def _wrong(draws: list[Tensor], mine: Tensor) -> str:
    """Return the reason why ``mine`` is not another draw of the factory; "" if it may be one."""
    if mine.shape != draws[0].shape:
        return f"shape {tuple(mine.shape)}, not {tuple(draws[0].shape)}"
    if mine.dtype != draws[0].dtype:
        return f"type {mine.dtype}, not {draws[0].dtype}"
    stacked = torch.stack(draws)
    constant = (stacked == stacked[0]).all(0)
    exact = ROUNDED if _floats(mine) else 0.0
    if not torch.allclose(mine[constant], stacked[0][constant], rtol=exact, atol=exact):
        off = (mine[constant] - stacked[0][constant]).abs().max().item()
        return f"constant values are off by {off:.3g}"
    if bool(constant.all()) or not _floats(mine):
        return ""
    if mine.is_complex():
        mine, stacked, constant = (
            torch.view_as_real(mine),
            torch.view_as_real(stacked),
            constant.unsqueeze(-1).expand(*constant.shape, 2),
        )
    return _unlike(stacked[:, ~constant].double(), mine[~constant].double()) or _spectrum(
        stacked, mine
    )


def _unlike(drawn: Tensor, mine: Tensor) -> str:
    """Mean and spread against those of the draws, each of which has as many values."""
    count = mine.numel()
    mean, spread = drawn.mean(), drawn.std()
    if not bool(mine.isfinite().all()):
        return "not finite"
    tails = ((drawn - mean).pow(4).mean() / spread.pow(4)).clamp(min=1.0, max=100.0)
    more = math.sqrt(1 + 1 / DRAWS)
    # Values of one tensor may be drawn together: the draws' own means say how far those scatter.
    scatter = drawn.mean(1).std() if count > 1 else spread
    few = 1 + 20 / (count * DRAWS - 1)  # the spread of a few values is itself a guess
    tolerance = SIGMAS * more * few * max(float(spread) / math.sqrt(count), float(scatter))
    if abs(float(mine.mean() - mean)) > tolerance:
        return f"mean {float(mine.mean()):.3g}, drawn are {float(mean):.3g} ± {tolerance:.1g}"
    if count < 8:
        return ""
    share = float(mine.std() / spread)
    tolerance = SIGMAS * more * math.sqrt(float(tails - 1 + 2 / count) / (4 * count)) + 0.02
    if not 1 - tolerance <= share <= 1 + tolerance:
        return f"spread is {share:.2f} of the drawn"
    return ""


def _spectrum(stacked: Tensor, mine: Tensor) -> str:
    """Singular values tell an orthogonal matrix from a random one of the same spread."""
    if mine.dim() < 2 or mine.flatten(1).shape[1] < 4 or mine.shape[0] < 4 or mine.numel() > 10**5:
        return ""

    def width(matrix: Tensor) -> float:
        values = torch.linalg.svdvals(matrix.flatten(1).double())
        return float(values.std() / values.mean())

    drawn, found = [width(each) for each in stacked], width(mine)
    if found > SPECTRUM * max(drawn) + 1e-6 or found < min(drawn) / SPECTRUM - 1e-6:
        return (
            f"singular values spread by {found:.3g} of their mean, those drawn by {max(drawn):.3g}"
        )
    return ""


def _unequal(draws: list[dict[str, Tensor]], mine: Mapping[str, Tensor]) -> str:
    """Tensors that the factory makes as copies of each other."""
    first: dict[bytes, str] = {}
    for name, value in draws[0].items():
        if name not in mine or value.numel() < 4 or torch.equal(value, draws[1][name]):
            continue
        key = repr(tuple(value.shape)).encode() + value.cpu().contiguous().numpy().tobytes()
        other = first.setdefault(key, name)
        if other != name and not torch.equal(mine[name], mine[other]):
            return f"{name} is no copy of {other}, which the factory makes it"
    return ""
