"""A recipe that is killed with SIGKILL and resumed under other plans trains as in one process that is not."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.commands import MODULE, running, start, wait_for, weights
from tests.recipes import RECIPES
from tests.recipes.loops import STEPS
from tests.recipes.waiting import WAIT
from tests.results import read_metrics

Called = Callable[..., tuple[int, str, str]]
SETTINGS = [
    "callbacks=[tests.recipes.waiting:Waits]",
    "trainer.checkpoint_every=2",
    "checkpoint.asynchronous=false",
    "trainer.eval_every=0",
    "cluster.kind=cpu",
    "logger=none",
]
ALONE = ["cluster.devices=1", "plan.stages=1", "plan.replicas=1"]
REPLICAS = ["cluster.devices=2", "plan.stages=1", "plan.replicas=2"]
STAGES = ["cluster.devices=2", "plan.stages=2", "plan.replicas=1"]
OFFLOADED = ["plan.optimizer=host", "plan.parameters=host", "swap.minimum_bytes=1"]
CLOSE = 1e-10  # relative difference in fp64


def kill_all(here: Path, last: int, *arguments: str) -> None:
    """Start a command that trains on two ranks; kill all of its processes when ``last`` steps are done."""
    WAIT.write_text(str(last))
    process = start([*MODULE, "train", *arguments])
    wait_for(lambda: len([*here.glob("waits-*")]) == 2 or process.poll() is not None, "two ranks")
    assert process.poll() is None, process.communicate()
    others = running(here)
    process.kill()
    for each in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: running(here) == [], "the end of all processes")
    for path in (WAIT, *here.glob("waits-*")):
        path.unlink()


def check_recipe(here: Path, called: Called, name: str) -> None:
    """Kill a run with replicas and, resumed in stages, again; it ends with offloaded states and weights."""
    settings = [*RECIPES[name].overrides(here, "fp64"), *SETTINGS]
    code, _, err = called("train", "name=alone", *settings, *ALONE)
    assert code == 0, err
    kill_all(here, 3, "name=killed", *settings, *REPLICAS)
    kill_all(here, 5, "name=killed", *STAGES)
    code, _, err = called("train", "name=killed", *STAGES, *OFFLOADED)
    assert code == 0, err
    compare(Path("runs/killed"), Path("runs/alone"))


def compare(run: Path, alone: Path) -> None:
    losses, expected = (
        {e["step"]: e["loss"] for e in read_metrics(folder / "metrics.jsonl") if "loss" in e}
        for folder in (run, alone)
    )
    assert [*losses] == [*expected] == [*range(1, STEPS + 1)]
    assert losses == pytest.approx(expected, rel=CLOSE)
    found, of_alone = weights(run), weights(alone)
    assert found.keys() == of_alone.keys()
    for name, weight in found.items():
        other = of_alone[name].double()
        assert float((weight.double() - other).norm()) <= CLOSE * max(0.1, float(other.norm())), (
            name
        )


@pytest.mark.faults
def test_a_recipe_that_is_killed_trains_as_one_that_is_not(
    here: Path, called: Called, request: pytest.FixtureRequest
) -> None:
    """Of one recipe, which the seed of the tests chooses."""
    name = [*RECIPES][request.config.option.seed % len(RECIPES)]
    print(name)
    check_recipe(here, called, name)


@pytest.mark.faults
@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe(here: Path, called: Called, name: str) -> None:
    check_recipe(here, called, name)
