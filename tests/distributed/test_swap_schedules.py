"""Offloaded tensors are restored exactly for every backward: in order, interleaved, and split."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.distributed.test_transparency import MODELS, ROWS, make_batch, make_chain
from tests.distributed.test_varying import in_turn
from tests.plans import DRAINING, make_plan, stages_each

Found = tuple[float, dict[str, Tensor], int]


def gradients(schedule: str, replicas: tuple[int, ...]) -> list[Found]:
    """Kept, offloaded, and offloaded with sums checked and transfers held up: loss, gradients, bytes moved."""
    chain = make_chain("gpt", torch.float32)
    interleave = stages_each(schedule, len(replicas))
    variants = [("keep", False), ("offload", False), ("offload", True)]
    found = []
    for directive, verify in variants:
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine.build(
                chain,
                make_plan(
                    chain,
                    replicas=replicas,
                    schedule=schedule,
                    directive=directive,
                    interleave=interleave,
                    swap_limit=60000,
                ),
                loss=MODELS["gpt"][1],
                swap=SwapConfig(minimum_bytes=1, verify=verify),
                scratch=Path(folder) / "swap",
            )
            # A first round, so that the one compared runs on re-used state.
            engine.gradients(make_batch(ROWS))
            loss = engine.gradients(make_batch(ROWS))
            moved = engine._manager.take_statistics().bytes_out if engine._manager else 0
            found.append(
                (loss, {name: g.clone() for name, g in engine.gradients_by_name.items()}, moved)
            )
            engine.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "replicas"), in_turn(DRAINING, [(1, 1), (2, 1)]), ids=str)
def test_swap_is_bit_identical_under_every_schedule(
    pool: Pool, schedule: str, replicas: tuple[int, ...]
) -> None:
    for (loss, kept, none), *swapped in pool.run(gradients, sum(replicas), schedule, replicas):
        assert none == 0
        for same_loss, same, moved in swapped:
            assert same_loss == loss
            assert moved > 0
            assert same.keys() == kept.keys()
            assert all(torch.equal(same[name], gradient) for name, gradient in kept.items())
