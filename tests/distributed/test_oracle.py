"""torch.distributed.pipelining as oracle: the same blocks, rows and schedule give the same gradients.

It shares neither transport nor executor with ours, only autograd, and it is no dependency of the runtime.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
)

from parallax.model.describe import Chain, parameter_names
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.materialise import materialise
from parallax.plan.plan import Plan
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.distributed.test_transparency import make_batch
from tests.plans import described, make_plan

ROWS, MICRO_BATCHES = 8, 4  # its shapes are static: every micro-batch has the same rows
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
MODEL = GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=64)
Found = tuple[float, list[tuple[str, Tensor]]]  # of a rank; a tied parameter may be there twice


def make_chain() -> Chain:
    return described(MODEL.build, seed=3, dtype=torch.float32)


def planned(chain: Chain, schedule: str, pipeline_ranks: int) -> Plan:
    each = 2 if schedule == "zb-v" else 1
    return make_plan(
        chain,
        replicas=(1,) * pipeline_ranks,
        schedule=schedule,
        global_batch=ROWS,
        microbatch=ROWS // MICRO_BATCHES,
        interleave=each,
    )


def ours(schedule: str, pipeline_ranks: int) -> Found:
    chain = make_chain()
    plan = planned(chain, schedule, pipeline_ranks)
    engine = Engine.build(chain, plan, loss=GPT.loss)
    loss = engine.gradients(make_batch(ROWS))
    gradients = [(name, tensor.grad.clone()) for name, tensor in engine.parameters.items()]
    engine.close()
    return loss, gradients


def theirs(schedule: str, pipeline_ranks: int) -> Found:
    chain, batch, rank = make_chain(), make_batch(ROWS), dist.get_rank()
    plan, device = planned(chain, schedule, pipeline_ranks), torch.device("cpu")
    partitions = {stage: plan.stages[stage] for stage in plan.stages_of(rank)}
    parts = {
        stage: nn.Sequential(*materialise(chain, partition.start, partition.stop, device))
        for stage, partition in partitions.items()
    }
    count = len(plan.stages)
    held = [PipelineStage(part, stage, count, device) for stage, part in parts.items()]
    last = count - 1 in parts
    runner = SCHEDULES[schedule](
        held if plan.interleave > 1 else held[0],
        n_microbatches=MICRO_BATCHES,
        # it adds up the losses of micro-batches, and ours is the mean over all rows
        loss_fn=lambda logits, targets: GPT.loss(logits, targets) / MICRO_BATCHES,
        scale_grads=False,
    )
    losses: list[Tensor] = []
    inputs = batch.inputs(0, ROWS) if rank == 0 else ()
    runner.step(*inputs, target=batch.targets(0, ROWS) if last else None, losses=losses)
    gradients = [
        (name, copy.deepcopy(parts[stage][index - partition.start].get_parameter(inner).grad))
        for stage, partition in partitions.items()
        for name, (index, inner) in parameter_names(
            chain, range(partition.start, partition.stop)
        ).items()
    ]
    return sum(loss.item() for loss in losses), gradients


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline_ranks", [2, 3])
def test_gradients_equal_the_oracles(pool: Pool, schedule: str, pipeline_ranks: int) -> None:
    found, expected = (
        pool.run(ours, pipeline_ranks, schedule, pipeline_ranks),
        pool.run(theirs, pipeline_ranks, schedule, pipeline_ranks),
    )
    (loss,) = {loss for loss, _ in found}
    assert abs(loss - max(theirs for theirs, _ in expected)) <= 1e-6 * loss
    sums: dict[str, Tensor] = {}
    for _, gradients in expected:  # it does not know ties: their gradients are added up here
        for name, gradient in gradients:
            sums[name] = sums[name] + gradient if name in sums else gradient
    seen = set()
    for _, gradients in found:
        for name, gradient in gradients:
            error = (gradient - sums[name]).norm() / sums[name].norm()
            assert error <= 1e-6, f"{name}: {error}"
            seen.add(name)
    assert seen == set(sums)
