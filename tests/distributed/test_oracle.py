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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from parallax.model.describe import parameter_names
from parallax.model.gpt import GPT
from parallax.model.materialise import materialise
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.distributed.test_transparency import make_batch, make_chain
from tests.plans import make_plan

ROWS, MICRO_BATCHES = 8, 4  # its shapes are static: every micro-batch has the same rows
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Found = tuple[float, dict[str, Tensor]]


def ours(schedule: str, stages: int) -> Found:
    chain = make_chain("gpt", torch.float32)
    plan = make_plan(
        chain,
        replicas=(1,) * stages,
        schedule=schedule,
        global_batch=ROWS,
        microbatch=ROWS // MICRO_BATCHES,
    )
    engine = Engine.build(chain, plan, loss=GPT.loss)
    loss = engine.gradients(make_batch(ROWS))
    gradients = {name: tensor.grad.clone() for name, tensor in engine.parameters.items()}
    engine.close()
    return loss, gradients


def theirs(schedule: str, stages: int) -> Found:
    chain, batch, stage = make_chain("gpt", torch.float32), make_batch(ROWS), dist.get_rank()
    cut = make_plan(chain, replicas=(1,) * stages).stages[stage]
    blocks = nn.Sequential(*materialise(chain, cut.start, cut.stop, torch.device("cpu")))
    last = stage == stages - 1
    runner = SCHEDULES[schedule](
        PipelineStage(blocks, stage, stages, torch.device("cpu")),
        n_microbatches=MICRO_BATCHES,
        # it adds up the losses of micro-batches, and ours is the mean over all rows
        loss_fn=lambda logits, targets: GPT.loss(logits, targets) / MICRO_BATCHES,
        scale_grads=False,
    )
    losses: list[Tensor] = []
    inputs = batch.inputs(0, ROWS) if stage == 0 else ()
    runner.step(*inputs, target=batch.targets(0, ROWS) if last else None, losses=losses)
    names = parameter_names(chain, range(cut.start, cut.stop))
    gradients = {
        name: blocks[index - cut.start].get_parameter(inner).grad
        for name, (index, inner) in names.items()
    }
    return sum(loss.item() for loss in losses), copy.deepcopy(gradients)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_equal_the_oracles(pool: Pool, schedule: str, stages: int) -> None:
    found, expected = (
        pool.run(ours, stages, schedule, stages),
        pool.run(theirs, stages, schedule, stages),
    )
    (loss,) = {loss for loss, _ in found}
    assert abs(loss - expected[-1][0]) <= 1e-6 * loss
    sums: dict[str, Tensor] = {}
    for _, gradients in expected:  # it does not know ties: their gradients are added up here
        for name, gradient in gradients.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
    seen = set()
    for _, gradients in found:
        for name, gradient in gradients.items():
            error = (gradient - sums[name]).norm() / sums[name].norm()
            assert error <= 1e-6, f"{name}: {error}"
            seen.add(name)
    assert seen == set(sums)
