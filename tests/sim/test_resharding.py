"""Checkpoints between a CPU and a simulated accelerator, in both directions. Only workers have that device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from parallax.runtime.checkpoint import checkpoint_name
from tests.distributed.pool import Pool

HALF, WHOLE = 2, 4
OFFLOADED = {"optimizer_offload": 1.0}
STREAMED = {"optimizer_offload": 1.0, "parameter_offload": 0.6}
NEAR = {
    "fp32": 2e-5,
    "bf16": 3e-2,
}  # kernels of buckets, and of whole tensors, round alike; sums of rows do not


def _go_on(*arguments: Any) -> Any:
    from tests.sim.resharding import go_on

    return go_on(*arguments)


def joined(parts: list[Any], place: int) -> dict[str, Tensor]:
    assert not any(part[0] for part in parts), parts[0][0]
    return {name: value for part in parts for name, value in load(part[place]).items()}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("cpu", (1, 1), OFFLOADED, "fp32"), ("sim", (2,), {"shard": True}, "fp32")),
        (("sim", (1,), STREAMED, "fp32"), ("cpu", (1, 1), {}, "fp32")),
        (("sim", (1, 1), OFFLOADED, "bf16"), ("cpu", (1,), {}, "fp32")),
        (("cpu", (2,), {"shard": True}, "fp32"), ("sim", (1,), STREAMED, "bf16")),
    ],
    ids=["down", "up", "up, wider", "down, narrower"],
)
def test_a_checkpoint_does_not_know_the_device(
    sim_pool: Pool, tmp_path: Path, before: Any, after: Any
) -> None:
    folder = tmp_path / "first"
    first = sim_pool.run(_go_on, sum(before[1]), *before, folder, None, HALF)
    saved = folder / checkpoint_name(HALF)
    rest = sim_pool.run(_go_on, sum(after[1]), *after, tmp_path / "rest", saved, WHOLE - HALF)
    due, found = joined(first, 2), joined(rest, 1)
    for name in {name for name in {**due, **found} if not name.startswith("master ")}:
        one, other = (
            each.get(name.replace("weight ", "master ", 1), each[name]) for each in (due, found)
        )
        assert one.dtype is other.dtype, name
        assert torch.equal(one, other), name
    whole = sim_pool.run(_go_on, sum(before[1]), *before, tmp_path / "whole", saved, WHOLE - HALF)
    wide = NEAR["bf16" if "bf16" in (before[3], after[3]) else "fp32"]
    assert rest[0][3] == pytest.approx(whole[0][3], abs=wide)
    assert whole[0][3][0] < first[0][3][0], "it learns"
