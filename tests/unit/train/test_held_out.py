"""The held-out loss is the mean over all held-out rows, or counted targets, whatever batches they come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import ConfigError, DataError
from parallax.model.describe import describe
from parallax.model.factory.mlp import MLPConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.train import evaluation
from parallax.train.data.text import TextDataConfig
from parallax.train.evaluation import Evaluated, HeldOut
from parallax.train.loop import TrainerConfig
from tests.plans import make_plan

BATCH = 4


def data(rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=random), torch.randint(0, 5, (rows,), generator=random)


class Slices:
    """Held-out rows as slices, with what a source does behind the last."""

    def __init__(self, rows: int, behind: str, counted: bool = False) -> None:
        self._inputs, self._targets = data(rows)
        self._behind = behind
        self.requested: list[int] = []
        if counted:
            self.validation_rows = rows

    def validation(self, index: int, rows: int) -> TensorRows:
        self.requested.append(index)
        part = slice(index * rows, (index + 1) * rows)
        if index * rows >= len(self._inputs):
            if self._behind == "stop":
                raise StopIteration
            if self._behind == "index":
                raise IndexError(index)
            if self._behind == "own":
                raise RuntimeError("behind a short batch, whatever it raises")
        if self._behind == "again":
            places = torch.arange(part.start, part.stop) % len(self._inputs)
            return TensorRows(self._inputs[places], self._targets[places])
        return TensorRows(self._inputs[part], self._targets[part])

    def batch(self, rows: int) -> TensorRows:
        return self.validation(0, rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class CountedLoss:
    """Of class 0 nothing is counted."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, ignore_index=0, reduction="sum")

    def count(self, targets: Tensor) -> int:
        return int((targets != 0).sum())


def evaluated(
    source: Any, most: int | None, loss: Any = nn.functional.cross_entropy
) -> tuple[Evaluated, Callable[[Tensor, Tensor], float], list[tuple[int, int | None]]]:
    chain = describe(lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 5)))
    engine = Engine.build(chain, make_plan(chain, global_batch=BATCH), loss=loss)
    reported: list[tuple[int, int | None]] = []

    def progress(done: int, count: int | None) -> bool:
        reported.append((done, count))
        return True

    def whole(inputs: Tensor, targets: Tensor) -> float:
        rows = TensorRows(inputs, targets)
        return engine.evaluate(rows)

    found = HeldOut(engine, source, BATCH, most).evaluate(progress)
    assert found is not None
    return found, whole, reported


@pytest.mark.sampled
@pytest.mark.parametrize(
    "loss", [nn.functional.cross_entropy, CountedLoss()], ids=["mean", "count"]
)
@pytest.mark.parametrize("rows", [4, 8, 9, 11])
@pytest.mark.parametrize(
    ("behind", "counted"),
    [("stop", False), ("index", False), ("empty", False), ("again", True), ("empty", True)],
)
def test_all_held_out_rows_count_alike(behind: str, counted: bool, rows: int, loss: Any) -> None:
    source = Slices(rows, behind, counted)
    found, whole, reported = evaluated(source, None, loss)
    assert found.loss == pytest.approx(whole(*data(rows)), rel=1e-6)
    assert (found.batches, found.truncated) == (-(-rows // BATCH), False)
    assert reported[-1] == (found.batches, found.batches if counted else None)


def test_what_a_source_raises_behind_a_short_batch_is_the_end() -> None:
    found, whole, _ = evaluated(Slices(9, "own"), None)
    assert found.loss == pytest.approx(whole(*data(9)), rel=1e-6)
    with pytest.raises(RuntimeError, match="behind a short batch"):
        evaluated(Slices(8, "own"), None)


def test_rows_that_begin_again_are_not_counted_twice() -> None:
    source = Slices(8, "again")
    found, whole, _ = evaluated(source, None)
    assert source.requested == [0, 1, 2]
    assert (found.batches, found.loss) == (2, pytest.approx(whole(*data(8)), rel=1e-6))


@pytest.mark.parametrize(("most", "batches"), [(1, 1), (2, 2), (7, 3)])
def test_at_most_so_many_batches(most: int, batches: int) -> None:
    for counted in (False, True):
        found, whole, _ = evaluated(Slices(9, "again" if counted else "stop", counted), most)
        inputs, targets = data(9)
        rows = min(9, BATCH * most)
        assert found.batches == batches
        assert found.loss == pytest.approx(whole(inputs[:rows], targets[:rows]), rel=1e-6)


def test_a_source_without_an_end_is_limited_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Slices):
        def validation(self, index: int, rows: int) -> TensorRows:
            inputs, targets = data(rows)
            return TensorRows(inputs + index, targets)

    monkeypatch.setattr(evaluation, "MOST_BATCHES", 5)
    found, _, _ = evaluated(Endless(4, ""), None)
    assert (found.batches, found.truncated) == (5, True)


def test_a_source_without_held_out_rows_is_one_line() -> None:
    with pytest.raises(DataError, match="above zero"):
        evaluated(Slices(0, "empty"), None)


def test_text_says_how_many_rows_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 251)) * 4)
    config = TextDataConfig(path=str(tmp_path), validation=0.2)
    assert config.indexed(MLPConfig(sequence=9), 1).validation_rows == 20


@pytest.mark.parametrize("value", ["auto", None, 1, 30])
def test_accepted_numbers_of_batches(value: Any) -> None:
    assert TrainerConfig(eval_batches=value).eval_batches == value


@pytest.mark.parametrize("value", [0, -1, "all", 1.5])
def test_other_numbers_of_batches_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.eval_batches="):
        TrainerConfig(eval_batches=value)
