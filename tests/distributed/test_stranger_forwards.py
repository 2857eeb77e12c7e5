"""Outputs of a chain for inference are those of ``model.eval()``, bit for bit, whatever the model returns and however
it differs from training; what cannot be so is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import DescribeError, PlanError
from parallax.model.block import flatten, leaves
from parallax.model.describe import Chain, describe
from parallax.model.precision import PrecisionConfig
from parallax.plan.task import PlanTask
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.forward import ForwardEngine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.strangers import ROWS, STRANGERS, Layers

PART = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def part_of(name: str, first: int, rows: int, dtype: torch.dtype = torch.float32) -> Any:
    """Rows of the inputs of a model; those of every call are its own."""

    def of(tensor: Tensor) -> Tensor:
        part = tensor[first : first + rows].clone()
        return part.to(dtype) if part.is_floating_point() else part

    given = STRANGERS[name].rows()
    return (
        {k: of(v) for k, v in given.items()} if isinstance(given, dict) else tuple(map(of, given))
    )


def chain_of(name: str, task: PlanTask, dtype: torch.dtype = torch.float32) -> Chain:
    return describe(
        STRANGERS[name],
        seed=3,
        dtype=dtype,
        sample=lambda rows: part_of(name, 0, rows, dtype),
        task=task,
    )


def outputs(
    name: str, stages: int, offloaded: float, precision: str, scratch: Path
) -> tuple[list[tuple[int, Any]], dict[str, Tensor]]:
    """This rank's parts of the outputs, and its weights."""
    dtype = DTYPES[precision]
    chain = chain_of(name, PlanTask.INFERENCE, dtype)
    plan = make_plan(
        chain,
        replicas=(1,) * stages,
        global_batch=ROWS,
        microbatch=PART,
        parameter_offload=offloaded,
    )
    engine = ForwardEngine.build(
        chain,
        plan,
        precision=PrecisionConfig(parameters=precision, compute=precision),
        swap=SwapConfig(minimum_bytes=1),
        scratch=scratch,
    )
    rows = TensorRows(part_of(name, 0, ROWS, dtype), torch.zeros(ROWS))
    found = [(first, list(leaves(results))) for first, results in engine.predict(rows)]
    weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    engine.close()
    return found, weights


def own_outputs(
    name: str, weights: dict[str, Tensor], first: int, dtype: torch.dtype
) -> list[tuple[Any, Any]]:
    model: nn.Module = STRANGERS[name]().to(dtype).eval()
    model.load_state_dict(weights, strict=False)
    given = part_of(name, first, PART, dtype)
    with torch.no_grad():
        found = model(**given) if isinstance(given, dict) else model(*given)
    return list(leaves(found))


CASES = [
    # Messages in bf16 are covered by tests of the transport.
    pytest.param(
        *(name, stages, offloaded, precision),
        marks=[pytest.mark.slow] if (stages, precision) == (2, "bf16") else [],
    )
    for name in STRANGERS
    for stages, offloaded in ((1, 1.0), (2, 0.0))
    for precision in DTYPES
    if not (name == "Complex" and precision == "bf16")  # torch has no such Fourier transform
    and not (name == "Images" and offloaded)  # weights of other strides stay on the device
    and not (name == "Recurrent" and stages == 2)  # a strided tensor is sent as a contiguous one
    and not (name == "Forces" and stages == 2)  # the graph of a derivative is in one block
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "stages", "offloaded", "precision"), CASES)
def test_outputs_are_the_models_own(
    pool: Pool, tmp_path: Path, name: str, stages: int, offloaded: float, precision: str
) -> None:
    ranks = pool.run(outputs, stages, name, stages, offloaded, precision, tmp_path / "swap")
    weights = {key: value for _, held in ranks for key, value in held.items()}
    parts = sorted((part for found, _ in ranks for part in found), key=lambda part: part[0])
    assert [first for first, _ in parts] == [0, PART]
    for first, found in parts:
        expected = own_outputs(name, weights, first, DTYPES[precision])
        assert [path for path, _ in found] == [path for path, _ in expected]
        for (path, value), (_, due) in zip(found, expected):
            if not isinstance(due, Tensor):
                assert value == due, path
                continue
            assert (value.dtype, value.shape) == (due.dtype, due.shape), path
            assert torch.equal(value, due), (path, (value - due).abs().max())


@pytest.mark.parametrize("name", ["SoftmaxInEvaluation", "HeadOfTraining", "NoiseInTraining"])
def test_a_model_that_differs_in_evaluation_is_recorded_so_for_forwards_alone(name: str) -> None:
    for task in (PlanTask.EVALUATION, PlanTask.INFERENCE):
        chain = chain_of(name, task)
        with pytest.raises(PlanError, match="recorded in evaluation alone"):
            Engine.build(chain, make_plan(chain), loss=lambda outputs, targets: outputs.sum())
    chain = chain_of(name, PlanTask.TRAINING)
    engine = ForwardEngine.build(chain, make_plan(chain, global_batch=ROWS, microbatch=PART))
    with pytest.raises(DescribeError, match="computes something else in evaluation"):
        engine.predict(TensorRows(part_of(name, 0, ROWS), torch.zeros(ROWS)))
    engine.close()


@pytest.mark.slow
def test_layers_with_fused_kernels_are_divided_for_training_only() -> None:
    blocks = {task: len(chain_of("Encoder", task).blocks) for task in PlanTask}
    assert blocks[PlanTask.TRAINING] == blocks[PlanTask.EVALUATION] > 5
    assert blocks[PlanTask.INFERENCE] == 5
    assert len(chain_of("PaddedPlainEncoder", PlanTask.INFERENCE).blocks) == 5
    assert len(chain_of("PaddedEncoder", PlanTask.INFERENCE).blocks) <= 3


class Selected(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y[y > 0]


class KeepsCount(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) * self.calls


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Selected, "Selected cannot be partitioned"), (KeepsCount, "is kept from one forward")],
)
def test_others_are_refused_in_one_line(model: type[nn.Module], reason: str) -> None:
    def sample(rows: int) -> Any:
        return flatten(Layers.rows())[0][0][:rows]

    with pytest.raises(DescribeError, match=reason) as raised:
        describe(model, sample=sample, task=PlanTask.INFERENCE)
    assert "\n" not in str(raised.value)
