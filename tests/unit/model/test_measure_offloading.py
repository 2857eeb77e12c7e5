"""What offloading a block takes is tried while it is measured."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallax.errors import ConfigError, SwapError
from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling import measure as module
from parallax.plan.profile import ModelProfile
from parallax.swap.config import SwapConfig
from parallax.swap.offload_benchmark import OffloadBenchmark, OffloadBenchmarks
from tests.unit.model.test_measure import (
    CPU,
    WIDE,
    Both,
    _fresh,
    chain_of,
    linear,
    profile_of,
    sample,
)

__all__ = ["_fresh"]


class Counting:
    """OffloadBenchmarks of a run on disk, counted."""

    tier = "disk"

    def __init__(self, folder: Path) -> None:
        self.trials = OffloadBenchmarks("disk", SwapConfig(minimum_bytes=1), folder)
        self.moved: list[int] = []

    def of(
        self, block: nn.Module, moved: int, device: torch.device
    ) -> contextlib.AbstractContextManager[OffloadBenchmark]:
        self.moved.append(moved)
        return self.trials.of(block, moved, device)


def test_offloading_is_tried_for_each_kind_of_block_that_may_offload(tmp_path: Path) -> None:
    """Steps that offload took a fifth longer than the same steps without, and the planner thought it was free."""
    offloader = Counting(tmp_path)
    found = profile_of(chain_of(linear(), Both, Both), offloader=offloader)
    assert [cost.offload_seconds.at(4) >= 0 for cost in found.blocks] == [True] * 3
    high, low = (sorted(offloader.moved[part]) for part in (slice(0, 3), slice(3, 6)))
    assert high == [2 * moved for moved in low]
    assert ModelProfile.from_json(found.to_json()) == found
    assert list(tmp_path.glob("parallax-benchmark-*")) == []


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_tier_too_small_for_a_block_is_logged_and_the_block_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallax.swap.stores.store.os.pwrite", full)
    output: list[str] = []
    found = profile_of(chain_of(Both), offloader=Counting(tmp_path), progress=output.append)
    assert found.blocks[0].forward_seconds.at(4) > 0
    assert found.blocks[0].offload_seconds.at(4) == 0
    assert any("the cost of offloading was not measured: cannot write" in text for text in output)


def test_a_failed_write_is_raised_while_its_end_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait went on for ten seconds, and then its length was named as the cause."""
    monkeypatch.setattr("parallax.swap.stores.store.os.pwrite", full)
    benchmarks = OffloadBenchmarks("disk", SwapConfig(minimum_bytes=1), tmp_path)
    block, rows = nn.Linear(WIDE, WIDE), torch.randn(4, WIDE)
    with benchmarks.of(block, 1 << 20, CPU) as benchmark:
        with benchmark.saving():
            out = block(rows)  # saves one tensor, so no later one reports the failure
        with pytest.raises(SwapError, match="cannot write"):
            benchmark.bring_back()
        del out


def test_where_nothing_may_be_offloaded_nothing_is_tried() -> None:
    assert profile_of(chain_of(Both)).blocks[0].offload_seconds.at(4) == 0


def test_a_profile_without_a_trial_is_not_one_with_it(tmp_path: Path) -> None:
    chain = describe(chain_of(Both))
    conditions: dict[str, Any] = {"device": CPU, "precision": PrecisionConfig(), "minimum_bytes": 1}
    paths = {
        module.profile_path(chain, F.mse_loss, sample, (2, 4), **conditions, offloader=offloader)
        for offloader in (None, Counting(tmp_path))
    }
    assert len(paths) == 2


def test_a_trial_moves_what_a_block_saves_and_changes_no_gradient(tmp_path: Path) -> None:
    block = Both()
    rows = torch.randn(4, WIDE, requires_grad=True)
    plain = torch.autograd.grad(block(rows).sum(), [rows, *block.parameters()])
    with OffloadBenchmarks("disk", SwapConfig(minimum_bytes=1), tmp_path).of(
        block, 1 << 20, CPU
    ) as benchmark:
        for _ in range(2):
            with benchmark.saving():
                out = block(rows)
            benchmark.bring_back()
            assert benchmark.moved_bytes > 0
            found = torch.autograd.grad(out.sum(), [rows, *block.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(plain, found))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with (
        pytest.raises(
            ConfigError, match=r"cannot write in .* \(Permission denied\): name another folder"
        ),
        OffloadBenchmarks("disk", SwapConfig(), tmp_path).of(Both(), 1, CPU),
    ):
        pass
