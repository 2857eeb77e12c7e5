"""How long to train is the user's to say: a run without is refused in one line, before anything is measured."""

from pathlib import Path

import pytest

from parallax import cli
from parallax.errors import ConfigError
from parallax.train.loop import TrainerConfig

SAID = "parallax: trainer.steps: a run needs the number of steps to train for; add trainer.steps=N, for example"


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
    assert line.startswith(SAID)
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


def test_a_plan_by_hand_may_use_fewer_devices_than_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each point of a sweep over devices has a plan, and so has each that a refusal once advised."""
    monkeypatch.chdir(tmp_path)
    base = ["plan", "cluster=dgx_a100", "model=transformer", "model.layers=4"]
    for words, used in (
        (["cluster.devices=3", "plan=single"], "using 1 of 3 devices"),
        (["cluster.devices=3", "plan.stages=1", "plan.replicas=2"], "using 2 of 3 devices"),
        (["cluster.devices=3", "plan.replicas=[1,1]"], "using 2 of 3 devices"),
        (["cluster.devices=1"], ""),
        (["cluster.devices=2"], ""),
    ):
        assert cli.main([*base, *words]) == 0
        out = capfd.readouterr().out
        assert used in out if used else "using" not in out
