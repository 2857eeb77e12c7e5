"""The whole example of docs/python.md and the examples beside it run as written, on two ranks under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints
from tests.distributed.pool import ROOT
from tests.faults.commands import TORCHRUN, call

pytestmark = pytest.mark.faults
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples"


def on_two_ranks(*arguments: str) -> str:
    """What a script prints."""
    code, out, err = call(*arguments, launcher=[*TORCHRUN, "--standalone"])
    assert code == 0, out + err
    return out


def test_the_example_of_the_page_runs_as_written(here: Path) -> None:
    (body,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert "\ntorchrun --standalone --nproc-per-node=2 train.py\n" in PAGE
    (here / "train.py").write_text(body)
    *epochs, last = on_two_ranks("train.py").splitlines()
    losses = [re.fullmatch(r"epoch (\d): loss (\S+), validation (\S+)", line) for line in epochs]
    validations = [float(found[3]) for found in losses if found is not None]
    assert len(validations) == 3
    assert validations[-1] < 0.6 * validations[0]
    found = re.fullmatch(r"epoch (\d), step (\d+): accuracy (\d+)%", last)
    assert found is not None
    best = validations.index(min(validations))
    assert (int(found[1]), int(found[2])) == (best, 16 * (best + 1))
    assert int(found[3]) >= 75


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("lightning_habits", "torchmetrics"),
        # Importing transformers in three processes and tracing its model take half a minute of a core.
        pytest.param("trainer_habits", "transformers", marks=pytest.mark.thorough),
    ],
)
def test_examples_in_the_habits_of_other_libraries_run(here: Path, name: str, library: str) -> None:
    pytest.importorskip(library)
    out = on_two_ranks(str(EXAMPLES / f"{name}.py"), "out")
    accuracies = [float(text) for text in re.findall(r"'accuracy': ([\d.]+)", out)]
    saved = [CheckpointReader(path).state for path in list_checkpoints(here / "out")]
    assert [state["epoch"] for state in saved] == list(range(1, len(accuracies) + 1))
    assert [state.get("metrics", state)["accuracy"] for state in saved] == accuracies
    assert accuracies[-1] > 0.85


def test_a_loop_of_ones_own_resumes_and_stops_early(here: Path) -> None:
    script = str(EXAMPLES / "own_loop.py")
    first = on_two_ranks(script, "out").splitlines()
    assert 2 < len(first) < 20
    before, last = list_checkpoints(here / "out")
    assert CheckpointReader(last).state["since"] == 2
    last.rename(here / "apart")
    assert on_two_ranks(script, "out").splitlines() == first[-1:], "the last epoch is as before"
    assert CheckpointReader(before).state["epoch"] == len(first) - 1
