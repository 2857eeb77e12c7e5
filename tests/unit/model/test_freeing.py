"""What computing costs where freed memory goes back to the system at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallax.machine.host import RETURNED_BYTES, fresh_memory_seconds
from parallax.model.profiling import measure as module
from parallax.model.profiling.allocations import measure_allocations
from tests.unit.model.test_measure import _fresh, chain_of, profile_of

__all__ = ["_fresh"]

ROW = 2 * RETURNED_BYTES  # bytes
FLOATS = ROW // 4


class Scale(nn.Module):
    """Makes one large tensor in its forward, and in its backward one or more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_large_tensors_are_counted_also_where_they_are_freed() -> None:
    cpu = torch.device("cpu")

    def call() -> None:
        for _ in range(3):
            torch.empty(FLOATS)
        torch.empty(16)

    found = measure_allocations(cpu, call)
    assert sorted(found.blocks) == [64, ROW, ROW, ROW]
    assert found.left == 0
    assert ROW <= found.most < 2 * ROW


def test_fresh_pages_cost_time() -> None:
    assert 0 < fresh_memory_seconds() < 1e-6


def test_the_slowdown_is_that_of_the_pages_of_large_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sample(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.ones(rows, FLOATS),), torch.zeros(rows, FLOATS)

    def slowdown(small: float, huge_page: float) -> tuple[float, ...]:
        def seconds(*, huge: bool = False) -> float:
            return huge_page if huge else small

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(small)))
        monkeypatch.setattr(module, "fresh_memory_seconds", seconds)
        return profile_of(chain_of(Scale, Scale), sample=sample).freeing_slowdown

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert set(slowdown(0.0, 0.0)) == {1}
    one, two, *more = slowdown(1.0, 0.0)
    assert one == two > 8 * ROW  # seconds for each byte, over a fraction of a second
    shares = [(each - 1) / (one - 1) for each in more]
    assert shares == pytest.approx([2**-n for n in range(11)])
