"""NumPy arrays and lists as rows, class indices of few bits, and rows whose type changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parallax.errors import DataError
from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows, as_tensors
from parallax.runtime.engine import Engine
from parallax.runtime.failure.exit_report import may_pass
from parallax.runtime.health.row_check import RowCheck
from tests.plans import make_plan

ROWS, WIDTH, CLASSES = 4, 3, 5
INPUTS = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) / 7
TARGETS = torch.tensor([0, 3, 1, 4])


class OwnRows:
    """Rows of a source's own class, which gives anything."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return ROWS

    def inputs(self, start: int, stop: int) -> Any:
        return (self._inputs[start:stop],)

    def targets(self, start: int, stop: int) -> Any:
        return self._targets[start:stop]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    chain = describe(build)
    plan = make_plan(chain, global_batch=ROWS, microbatch=2)
    engine = Engine.build(chain, plan, loss=nn.functional.cross_entropy, scratch=tmp_path)
    yield engine
    engine.close()


def plain_loss() -> Tensor:
    return nn.functional.cross_entropy(build()(INPUTS), TARGETS)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (INPUTS, TARGETS.to(torch.int32)),
        (INPUTS, TARGETS.to(torch.uint8)),
        (INPUTS.numpy(), TARGETS.numpy()),
        (INPUTS.double().numpy(), TARGETS.to(torch.int32).numpy()),
        (np.asarray(INPUTS, order="F")[:], TARGETS.numpy().astype(">i4")),
        (INPUTS.tolist(), TARGETS.tolist()),
        ([*INPUTS.numpy().tolist()], list(TARGETS.numpy())),
    ],
)
@pytest.mark.parametrize("kind", [TensorRows, OwnRows])
def test_rows_that_are_no_tensors_of_torchs_types_train_alike(
    engine: Engine, inputs: Any, targets: Any, kind: Any
) -> None:
    batch = kind(inputs, targets)
    assert len(batch) == ROWS
    assert engine.evaluate(batch) == pytest.approx(plain_loss().item(), rel=1e-5)
    assert engine.step(batch).loss == pytest.approx(plain_loss().item(), rel=1e-5)


def test_rows_of_another_type_later_are_refused_in_one_line(engine: Engine) -> None:
    engine.step(TensorRows(INPUTS, TARGETS))
    with pytest.raises(DataError, match=r"inputs\[0\] are torch.float64 and the model is") as found:
        engine.step(TensorRows(INPUTS.double(), TARGETS))
    assert str(found.value).isprintable()
    assert not may_pass(found.value)
    engine.step(TensorRows(INPUTS, TARGETS))  # nothing is broken


def test_rows_of_another_type_than_the_model_are_refused_in_one_line(engine: Engine) -> None:
    with pytest.raises(DataError, match=r"inputs\[0\] are torch.float64 and the model is") as found:
        engine.step(TensorRows(INPUTS.double(), TARGETS))
    assert str(found.value).isprintable()


def test_float64_of_numpy_stays_in_a_model_of_fp64() -> None:
    array = INPUTS.double().numpy()
    assert as_tensors("inputs", array, ROWS, torch.float64).dtype is torch.float64
    batch = RowCheck(torch.float64).of(TensorRows(array, TARGETS), "the batch")
    assert batch.inputs(1, 3)[0].dtype is torch.float64
    assert batch.inputs(1, 3)[0].tolist() == array[1:3].tolist()


def test_lists_that_are_no_rows_stay_in_a_batch_of_tensors() -> None:
    batch = TensorRows({"x": INPUTS, "size": [7, 7], "ids": [1, 2, 3, 4]}, TARGETS)
    assert batch.inputs(0, 2)["size"] == [7, 7]
    assert batch.inputs(1, 3)["ids"].tolist() == [2, 3]


def test_what_is_no_list_of_rows_stays() -> None:
    rows = [torch.ones(2), torch.ones(3)]
    assert as_tensors("inputs", {"rows": rows, "size": [7, 7, 7]}, 2, torch.float32) == {
        "rows": rows,
        "size": [7, 7, 7],
    }


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.array([["a", "b"]] * ROWS), "inputs are a NumPy array of type <U1"),
        ([[1, 2], [1], [3], [4]], "holds rows of several lengths"),
        ("text", "hold no rows; accepted are tensors"),
        (None, "hold no rows; accepted are tensors"),
    ],
)
def test_rows_that_cannot_be_tensors_are_refused_in_one_line(inputs: Any, message: str) -> None:
    targets = TARGETS if isinstance(inputs, list | np.ndarray) else None
    with pytest.raises(DataError, match=message) as found:
        RowCheck().of(TensorRows(inputs, targets), "the batch").inputs(0, ROWS)  # type: ignore[arg-type]
    assert str(found.value).isprintable()


@pytest.mark.parametrize(
    ("call", "passes"),
    [
        (lambda: torch.ones(2) @ torch.ones(3), False),
        (lambda: torch.ones(2, 2) @ torch.ones(2, 2).double(), False),
        (lambda: nn.functional.cross_entropy(INPUTS, TARGETS.int()[:ROWS] % WIDTH), False),
        (lambda: torch.ones(2, 3) + torch.ones(2, 2), False),
        (lambda: nn.Linear(2, 2)(torch.ones(3)), False),
        (lambda: nn.Conv2d(3, 3, 3)(torch.ones(1, 2, 8, 8)), False),
        (lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: device unavailable")), True),
    ],
)
def test_mistakes_that_torch_finds_are_not_started_again(call: Any, passes: bool) -> None:
    with pytest.raises(RuntimeError) as found:
        call()
    assert may_pass(found.value) == passes
