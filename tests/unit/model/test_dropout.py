"""Masks that belong to rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.model.layers.dropout import Draws, RowDropout, has_dropout
from parallax.model.layers.row_noise import RUN, RowNoise

Call = Callable[[Tensor], Tensor]
CALLS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), (6, 40)),
    "torch": (lambda x: torch.dropout(x, 0.3, train=True), (6, 40)),
    "multiple": (lambda x: F.dropout(x, 0.3), (24, 10)),
    "channels 1": (lambda x: F.dropout1d(x, 0.3), (6, 40, 3)),
    "channels 2": (lambda x: F.dropout2d(x, 0.3), (6, 40, 3, 2)),
    "channels 3": (lambda x: F.dropout3d(x, 0.3), (6, 40, 3, 2, 2)),
    "alpha": (lambda x: F.alpha_dropout(x, 0.3, True), (6, 40)),
    "alpha channels": (lambda x: F.feature_alpha_dropout(x, 0.3, True), (6, 40, 3)),
    "in place": (lambda x: F.dropout(x, 0.3, True, True), (6, 40)),
    "module": (nn.Dropout(0.3), (6, 40)),
}


def drop(call: Call, x: Tensor, first: int, rows: int, step: int = 0, block: int = 0) -> Tensor:
    with RowDropout(Draws(RowNoise(torch.device("cpu")), 7, step, first, rows, block)) as mode:
        found = call(x.clone())
    assert mode.drew
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_row_is_dropped_from_alike_wherever_it_is(name: str) -> None:
    call, shape = CALLS[name]
    x = torch.randn(shape)
    per_row = shape[0] // 6
    whole = drop(call, x, 10, 6)
    for low, high in [(0, 1), (1, 3), (3, 6)]:
        part = drop(call, x[low * per_row : high * per_row], 10 + low, high - low)
        assert torch.equal(part, whole[low * per_row : high * per_row])
    assert not torch.equal(whole, drop(call, x, 11, 6))
    assert not torch.equal(whole, drop(call, x, 10, 6, step=1))
    assert not torch.equal(whole, drop(call, x, 10, 6, block=1))


@pytest.mark.parametrize("name", [name for name in CALLS if "channels" not in name])
def test_it_drops_as_much_as_torch_does(name: str) -> None:
    call, _ = CALLS[name]
    x = torch.randn(100, 1000)
    found = drop(call, x, 0, 100)
    scale = ((1.7580993408473766**2 * 0.3 + 1) * 0.7) ** -0.5 if "alpha" in name else 1 / 0.7
    shift = 1.7580993408473766 * scale * 0.3 if "alpha" in name else 0.0
    kept = (found - (x * scale + shift)).abs() < 1e-5
    assert abs(float(kept.float().mean()) - 0.7) < 0.01
    dropped = found[~kept]
    assert torch.allclose(dropped, dropped[0].expand_as(dropped))
    if "alpha" in name:
        assert abs(float(found.mean())) < 0.02
        assert abs(float(found.var()) - 1) < 0.02
    else:
        assert dropped[0] == 0


def test_whole_channels() -> None:
    found = drop(lambda x: F.dropout2d(x, 0.5), torch.ones(6, 40, 3, 3), 0, 6)
    sums = found.sum((2, 3))
    assert bool(((sums == 0) | (sums == 18)).all())
    assert bool((sums == 0).any())


def test_calls_of_a_block_differ_and_gradients_follow() -> None:
    x = torch.ones(4, 50, dtype=torch.float64, requires_grad=True)
    with RowDropout(Draws(RowNoise(torch.device("cpu")), 7, 0, 0, 4, 0)):
        first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, first)


def test_what_is_left_as_it_is() -> None:
    x = torch.ones(5, 8)
    with RowDropout(Draws(RowNoise(torch.device("cpu")), 7, 0, 0, 4, 0)) as mode:
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not mode.drew
        torch.manual_seed(0)
        found = F.dropout(x, 0.5)  # 5 is no multiple of 4 rows
        assert mode.drew
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(x, 0.5))


def test_types_are_kept() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        assert drop(lambda x: F.dropout(x, 0.3), torch.ones(4, 8, dtype=dtype), 0, 4).dtype is dtype
        assert (
            drop(lambda x: F.alpha_dropout(x, 0.3, True), torch.ones(4, 8, dtype=dtype), 0, 4).dtype
            is dtype
        )


def test_modules_that_drop() -> None:
    assert has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.1))))
    assert not has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


@pytest.mark.parametrize("dimension", [1, 2])
def test_rows_of_a_nested_tensor_are_dropped_from_alike(dimension: int) -> None:
    lengths = [3, 5, 1, 4]
    rows = [torch.randn(length, 40) for length in lengths]
    if dimension == 2:
        rows = [row.t().contiguous() for row in rows]

    def dropped(low: int, high: int) -> list[Tensor]:
        x = torch.nested.nested_tensor(rows[low:high], layout=torch.jagged, requires_grad=True)
        found = drop(lambda x: F.dropout(x, 0.3), x, 10 + low, high - low)
        found.values().sum().backward()  # type: ignore[operator]
        assert x.grad is not None
        return list(found.detach().unbind())

    whole = dropped(0, 4)
    for low, high in [(0, 1), (1, 3), (3, 4)]:
        assert all(torch.equal(a, b) for a, b in zip(dropped(low, high), whole[low:high]))
    kept = torch.cat([row.flatten() for row in whole]) != 0
    assert 0.55 < float(kept.float().mean()) < 0.85


def test_kernels_do_not_grow_with_rows() -> None:
    """Each row had one of its own, and the seeding of a generator."""

    def kernels(x: Tensor) -> int:
        noise = RowNoise(torch.device("cpu"))
        with RowDropout(Draws(noise, 7, 0, 0, 2, 0)):
            F.dropout(x[:2], 0.3)  # fixed numbers are made
        with Kernels() as counted, RowDropout(Draws(noise, 7, 0, 0, len(x), 0)):
            F.dropout(x, 0.3)
        return counted.count

    few, many = kernels(torch.randn(2, 5000)), kernels(torch.randn(200, 5000))
    assert few == many <= 12


class Kernels(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def choices(rows: int, count: int, p: float = 0.5, step: int = 0) -> Tensor:
    keys = [(3, step, row, 0, 1) for row in range(rows)]
    return RowNoise(torch.device("cpu")).kept(keys, count, p)


def test_choices_have_no_pattern() -> None:
    """Shares, pairs and triples: of neighbours, of rows, of runs, of steps, and of places over many runs."""
    kept = choices(64, 32 * RUN)
    assert abs(float(kept.float().mean()) - 0.5) < 0.001
    signs = kept.float() * 2 - 1
    for dimension in (0, 1):
        of_each = float(signs.mean(dimension).std())
        assert of_each == pytest.approx(signs.shape[dimension] ** -0.5, rel=0.3)
    by_run = signs.view(64, 32, RUN)
    pairs = [
        signs[:, 1:] * signs[:, :-1],
        signs[1:] * signs[:-1],
        by_run[:, 1:] * by_run[:, :-1],
        signs * (choices(64, 32 * RUN, step=1).float() * 2 - 1),
    ]
    triples = [
        signs[:, 2:] * signs[:, 1:-1] * signs[:, :-2],
        signs[2:] * signs[1:-1] * signs[:-2],
        by_run[:, 2:] * by_run[:, 1:-1] * by_run[:, :-2],
    ]
    for products in (*pairs, *triples):
        assert abs(float(products.mean())) < 5 * products.numel() ** -0.5
    places = signs.view(-1, RUN)[:, :200]
    correlations = (places.T @ places / len(places)).triu(1)
    assert float(correlations.abs().max()) < 6 * len(places) ** -0.5


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.9])
def test_bytes_of_choices_are_as_frequent_as_they_should_be(p: float) -> None:
    kept = choices(50, 40_000, p).view(-1, 8)
    ones = kept.sum(1)
    for number in range(9):
        share = math.comb(8, number) * (1 - p) ** number * p ** (8 - number)
        expected = share * len(kept)
        assert abs(int((ones == number).sum()) - expected) < 5 * max(1.0, expected) ** 0.5


def test_choices_are_written_down() -> None:
    """A resumed run has the masks of an uninterrupted one."""
    found = choices(3, 2 * RUN + 5, 0.3)
    assert found.sum(1).tolist() == WRITTEN
    assert "".join("01"[kept] for kept in found[1, RUN : RUN + 40].tolist()) == PIECE


WRITTEN, PIECE = [1449, 1413, 1411], "1110111110110111100101001011110011111110"
