"""One action list, two interpreters: what blocks run, in which order, is what the schedule's picture shows.

Neither the executor nor the simulator is used, because both read the same list: the blocks themselves record what they
compute and for which rows.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.plan.schedule import SCHEDULES
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.plans import make_plan

ROWS = 2  # of a micro-batch
WIDTH = 4
SEEN: list[str] = []  # cells of a picture: F, B or W and the number of the micro-batch


class _Gradient(Tensor):
    """A weight's gradient that records each product added by a weight-gradient pass."""

    letter: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.addmm_:
            SEEN.append(args[0].letter + _micro(args[2]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Watched(nn.Linear):
    """Gives its input back, in which the first number of each row is the row's own. Small letters for a pipeline rank's
    second stage."""

    def __init__(self, stage: int, pipeline_ranks: int) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.letters = "fbw" if stage >= pipeline_ranks else "FBW"

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        forward, backward, weight = self.letters
        micro = _micro(x)
        if not isinstance(self.weight.grad, _Gradient):
            self.weight.grad = torch.zeros_like(self.weight).as_subclass(_Gradient)
            self.weight.grad.letter = weight
        SEEN.append(forward + micro)
        y = x + super().forward(x)
        y.register_hook(lambda _: SEEN.append(backward + micro))
        return y


def _micro(rows: Tensor) -> str:
    return str(int(rows[0, 0]) // ROWS)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def job(schedule: str, pipeline_ranks: int, micro_batches: int, interleave: int) -> list[str]:
    """What the blocks of this rank did in one step."""
    count = pipeline_ranks * interleave

    def build() -> nn.Module:
        return nn.Sequential(*(Watched(stage, pipeline_ranks) for stage in range(count)))

    rows = ROWS * micro_batches
    numbers = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, WIDTH).contiguous()
    chain = describe(build, seed=3)
    plan = make_plan(
        chain,
        schedule=schedule,
        replicas=(1,) * pipeline_ranks,
        interleave=interleave,
        global_batch=rows,
        microbatch=ROWS,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(chain, plan, loss=loss, scratch=Path(folder) / "swap")
        SEEN.clear()
        engine.gradients(TensorRows(numbers, torch.zeros(rows, WIDTH)))
        engine.close()
    return list(SEEN)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_blocks_run_as_the_schedule_is_drawn(pool: Pool, schedule: str) -> None:
    picture = re.findall(r"stage \d \| (.+)", SCHEDULES[schedule].ordering.__doc__ or "")
    drawn = [[cell for cell in row.split() if cell != ".."] for row in picture]
    pipeline_ranks, cells = len(drawn), [cell for row in drawn for cell in row]
    micro_batches = 1 + max(int(cell[1:]) for cell in cells)
    interleave = 2 if any(cell.islower() for cell in cells) else 1
    assert (
        pool.run(job, pipeline_ranks, schedule, pipeline_ranks, micro_batches, interleave) == drawn
    )
