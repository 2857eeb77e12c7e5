"""Masks that belong to rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.model.layers.dropout import Draws, RowDropout, has_dropout

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
    with RowDropout(Draws(torch.Generator(), 7, step, first, rows, block)) as mode:
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
    with RowDropout(Draws(torch.Generator(), 7, 0, 0, 4, 0)):
        first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, first)


def test_what_is_left_as_it_is() -> None:
    x = torch.ones(5, 8)
    with RowDropout(Draws(torch.Generator(), 7, 0, 0, 4, 0)) as mode:
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
