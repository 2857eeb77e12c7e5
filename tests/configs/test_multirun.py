"""Which points a command line means, and that Hydra's launchers and sweepers get them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from parallax.config.multirun import Multirun, hydra_tree, plain
from parallax.config.options import searchpath
from parallax.config.printed import settings_text
from parallax.errors import ConfigError, ParallaxError


def points(*overrides: str) -> list[str]:
    """Each point in one line."""
    found = Multirun.read(overrides).points
    assert found is not None
    return [" ".join(map(plain, point)) for point in found]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=1,2", "swap=off"], ["seed=1 swap=off", "seed=2 swap=off"]),
        (["seed=range(1,4)"], ["seed=1", "seed=2", "seed=3"]),
        (["model=glob(*p*,exclude=[t*,h*])"], ["model=gpt", "model=mlp"]),
        (["model=choice(mlp,gpt)"], ["model=mlp", "model=gpt"]),
        (["seed=sort(3,1)"], ["seed=1", "seed=3"]),
        (["plan.replicas=[1],[1,1]"], ["plan.replicas=[1]", "plan.replicas=[1,1]"]),
        (["data.path='a b','c,d'"], ["data.path='a b'", "data.path='c,d'"]),
        (["seed=1,2", "seed=3"], ["seed=3"]),
        (["seed=1,1,2"], ["seed=1", "seed=2"]),
        (["+model.kwargs.x=1,2", "model=custom"], ["model.kwargs.x=1 model=custom", "model.kwargs.x=2 model=custom"]),
        ([], [""]),
    ],
    ids=str,
)  # fmt: skip
def test_points(overrides: list[str], expected: list[str]) -> None:
    assert points(*overrides) == expected


def test_what_differs_and_what_is_alike() -> None:
    requested = Multirun.read(["seed=1,2", "swap=off", "name=x", "hydra.job.name=y"])
    assert (requested.name, requested.alike, requested.in_turn) == ("x", frozenset({"swap"}), True)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("modle=gpt,mlp", "did you mean 'model'?"),
        ("name=a,b", "one folder name for the sweep"),
        ("name=a/b", "the name of a point is made of"),
        ("name=../a", "one folder name"),
        ("hydra.sweep.dir=/x", "runs/SWEEP/POINT; accepted is name=SWEEP"),
        ("model=gtp", "model=gtp: unknown option; accepted are custom, gpt, huggingface"),
        ("hydra/launcher=basik", "hydra/launcher=basik: "),
        ("hydra.launcher.nope=3", "'hydra.launcher.nope'"),
        ("hydra/launcher=basic,basic", "Sweeping over Hydra's configuration is not supported"),
        ("trainer.steps=interval(1,2)", "INTERVAL_SWEEP"),
        ("trainer.steps=1,(2", "cannot be read"),
        ("hydra.searchpath=[/nowhere/at/all]", "there is no such folder"),
        ("hydra.searchpath=[pkg://os]", "accepted is a list of folders"),
    ],
)
def test_refused_in_one_line(word: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Multirun.read([word])
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of somebody's own options: an experiment with the sweep in it, a group that is no group of ours."""
    for name, text in {
        "experiment/several": "hydra: {sweeper: {params: {seed: '1,2', shape: 'small,large'}}}\ntrainer: {steps: 3}",
        "shape/small": "model: {layers: 1}",
        "shape/large": "model: {layers: 9}",
    }.items():
        (tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    return tmp_path


def test_a_sweep_in_a_file(own: Path) -> None:
    found = points(searchpath(own), "experiment=several", "seed=7")
    assert found == [f"seed=7 shape={shape} experiment=several" for shape in ("small", "large")]


@pytest.mark.slow
def test_jobs_of_the_basic_launcher(own: Path) -> None:
    requested = Multirun.read([searchpath(own), "experiment=several"])
    jobs: list[str] = []

    def job(overrides: list[str]) -> float:
        jobs.append(" ".join(overrides))
        return 0.0

    assert requested.points is not None
    requested.check(requested.points)
    requested.launch(own / "out", job, requested.points[1:])
    assert jobs == points(searchpath(own), "experiment=several")[1:]
    assert [path.name for path in (own / "out").iterdir()] == [], "no folder or log of Hydra's"
    assert not GlobalHydra.instance().is_initialized()


def test_a_launcher_or_job_that_fails_says_so_in_one_line(tmp_path: Path) -> None:
    def job(overrides: list[str]) -> float:
        raise OSError(f"disk full for\n{overrides}")

    with pytest.raises(ParallaxError) as caught:
        Multirun.read(["seed=1"]).launch(tmp_path / "out", job, [["seed=1"]])
    assert str(caught.value) == "disk full for ['seed=1']"


class Halving(Sweeper):
    """A sweeper that looks where the last answer was smaller."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def setup(self, *, hydra_context, task_function, config) -> None:  # type: ignore[no-untyped-def]
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> int:
        number = 0
        while self.low < self.high:
            middle = (self.low + self.high) // 2
            batch = [[*arguments, f"++trainer.steps={each}"] for each in (middle, middle + 1)]
            one, two = (
                each.return_value for each in self.launcher.launch(batch, initial_job_idx=number)
            )
            number += 2
            self.low, self.high = (middle + 1, self.high) if two < one else (self.low, middle)
        return self.low


@pytest.mark.slow
def test_a_sweeper_that_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-ins are classes of the package ``hydra_plugins``, and options of the group ``hydra/sweeper``."""
    target = "hydra_plugins.halving.Halving"
    monkeypatch.setitem(sys.modules, "hydra_plugins.halving", sys.modules[__name__])
    known = dict(Plugins.instance().class_name_to_class)
    monkeypatch.setattr(Plugins.instance(), "class_name_to_class", {**known, target: Halving})
    (tmp_path / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "hydra" / "sweeper" / "halving.yaml").write_text(
        f"# @package hydra.sweeper\n_target_: {target}\nlow: 1\nhigh: 16\n"
    )
    requested = Multirun.read([searchpath(tmp_path), "hydra/sweeper=halving", "seed=3"])
    assert (requested.points, requested.alike) == (None, {"seed"})
    tried: list[int] = []

    def job(overrides: list[str]) -> float:
        assert overrides[0] == "seed=3"
        tried.append(int(overrides[1].removeprefix("trainer.steps=")))
        return float((tried[-1] - 11) ** 2)

    requested.launch(tmp_path / "out", job, [])
    assert 11 in tried
    assert len(tried) == 8


# ---- --cfg


def test_settings_as_text() -> None:
    text = settings_text(["model.layers=3", "trainer.steps=${seed}"], "job", resolve=False, package=None)  # fmt: skip
    assert "layers: 3" in text
    assert "steps: ${seed}" in text
    assert "hydra" not in text
    assert "steps: 1\n" in settings_text(["trainer.steps=${seed}"], "job", resolve=True, package="trainer")  # fmt: skip
    assert settings_text([], "job", resolve=True, package="model.layers") == "8\n"
    found = settings_text(["hydra/launcher=basic"], "hydra", resolve=False, package="hydra.launcher")  # fmt: skip
    assert found.splitlines()[0] == "# @package hydra.launcher"
    both = settings_text([], "all", resolve=True, package=None)
    assert both.startswith("hydra:")
    assert "\nmodel:" in both
    for overrides, package in ((["modle=gpt"], None), ([], "modle")):
        with pytest.raises(ConfigError, match="did you mean 'model'"):
            settings_text(overrides, "job", resolve=False, package=package)


def test_settings_of_ones_own_options(own: Path) -> None:
    overrides = [searchpath(own), "shape=small", "hydra/launcher=basic"]
    for cfg in ("job", "all"):
        assert settings_text(overrides, cfg, resolve=False, package="model.layers") == "1\n"


def test_hydras_own_settings_are_resolved() -> None:
    assert "${" in str(hydra_tree(["hydra.job.name=x"]))
    assert "${" not in str(hydra_tree(["hydra.job.name=x"], resolve=True))
