"""How long to train is the user's to say: a run without is refused in one line, before anything is measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallax import cli
from parallax.errors import ConfigError
from parallax.machine import local
from parallax.machine.local import ClusterConfig
from parallax.plan.config import PlanConfig
from parallax.run.planning import as_planned
from parallax.train.loop import TrainerConfig

MESSAGE = "parallax: trainer.steps: a run needs the number of steps to train for; add trainer.steps=N, for example"


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["train", "model=mlp", "name=run"],
        ["train", "trainer.steps=0"],
        ["train", "-m", "seed=1,2"],
        ["launch", "--slurm", "--nodes", "1", "--gpus-per-node", "1", "--dry"],
    ],
    ids=" ".join,
)
def test_a_run_without_a_number_of_steps_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(MESSAGE)
    assert list(tmp_path.iterdir()) == []


def test_planning_needs_no_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "cluster=dgx_a100", "model=transformer", "model.layers=4"]) == 0
    assert cli.main(["estimate", "model=transformer", "model.layers=4"]) == 0
    assert "trainer.steps" not in capfd.readouterr().err


def test_a_number_of_steps_is_not_below_zero() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.steps=-1: accepted are numbers"):
        TrainerConfig(steps=-1)


@pytest.mark.parametrize(
    ("cluster", "requested", "ranks", "expected"),
    [
        ({}, {}, 8, (8, "auto")),
        ({}, {}, 2, (2, 1)),
        ({"devices": 4}, {}, 2, (2, 2)),
        ({"threads": 3}, {}, 2, (2, 3)),
        ({}, {"stages": 1, "replicas": 2}, 2, (2, "auto")),
    ],
)
def test_ranks_have_the_threads_that_they_were_measured_with(
    monkeypatch: pytest.MonkeyPatch,
    cluster: dict[str, Any],
    requested: dict[str, Any],
    ranks: int,
    expected: tuple[int, int | str],
) -> None:
    """Where the planner leaves devices out, the others do not get their threads: the plan did not count on them."""
    monkeypatch.setattr(local, "usable_cores", lambda: 8.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan: Any = SimpleNamespace(world_size=ranks, global_batch=16, stages=[SimpleNamespace(stop=4)])
    found = as_planned(ClusterConfig(kind="cpu", **cluster), PlanConfig(**requested), plan)
    assert (found.devices, found.threads) == expected


def test_a_plan_by_hand_may_use_fewer_devices_than_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each point of a sweep over devices has a plan, and so has each that a refusal once advised."""
    monkeypatch.chdir(tmp_path)
    base = ["plan", "cluster=dgx_a100", "model=transformer", "model.layers=4"]
    for overrides, used in (
        (["cluster.devices=3", "plan=single"], "using 1 of 3 devices"),
        (["cluster.devices=3", "plan.stages=1", "plan.replicas=2"], "using 2 of 3 devices"),
        (["cluster.devices=3", "plan.replicas=[1,1]"], "using 2 of 3 devices"),
        (["cluster.devices=1"], ""),
        (["cluster.devices=2"], ""),
    ):
        assert cli.main([*base, *overrides]) == 0
        out = capfd.readouterr().out
        assert used in out if used else "using" not in out
