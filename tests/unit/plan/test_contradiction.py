"""Settings that exclude each other are refused from their numbers alone, before anything is measured."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from parallax import cli
from parallax.errors import ConfigError, InfeasiblePlan
from parallax.plan.config import PlanConfig
from parallax.plan.search.contradiction import Question, check_question
from parallax.plan.search.request import Request
from parallax.run import planning
from tests.unit.plan_fakes import block, cluster, profile


def question(
    devices: int,
    blocks: int = 4,
    rows: int = 8,
    microbatch: int | str = "auto",
    fixed: bool = False,
    **settings: Any,
) -> Question:
    return Question(
        config=PlanConfig(**settings),
        fixed=fixed,
        blocks=blocks,
        devices=devices,
        rows=rows,
        microbatch=microbatch,
    )


REFUSED = [
    (
        question(32, stages=100),
        "100 stages for 4 block(s) of the model, and every stage needs one; use plan.stages=4",
    ),
    (
        question(2, stages=3),
        "plan.stages=3 with 2 device(s): every stage needs one; use plan.stages=2",
    ),
    (
        question(3, stages=2, replicas=[1, 2, 3]),
        "one number for each stage; use plan.stages=3 cluster.devices=6",
    ),
    (
        question(3, replicas=[1, 1], fixed=True),
        "plan.replicas=[1,1] uses 2 device(s), and 3 rank(s) were started; use plan.replicas=auto",
    ),
    (
        question(3, replicas=[2, 2]),
        "plan.replicas=[2,2] needs 4 devices, and there are 3; use cluster.devices=4, or plan.replicas=auto",
    ),
    (
        question(3, replicas=4),
        "plan.replicas=4 needs 4 devices, and there are 3; use plan.replicas=auto",
    ),
    (question(5, replicas=[1, 1, 1, 1, 1]), "plan.replicas=[1,1,1,1,1]: 5 stages for 4 block(s)"),
    (
        question(5, stages=3, replicas=2),
        "plan.stages=3 with plan.replicas=2 needs 6 devices, and there are 5; use cluster.devices=6",
    ),
    (question(5, replicas=2, fixed=True), "plan.replicas=2 does not use 5 device(s)"),
    (question(10, replicas=2, fixed=True), "at most 4 stage(s), one for each block of the model"),
    (
        question(2, stages=2, schedule="interleaved", interleave=4),
        "4 to each of 2 makes 8 stages, more than the 4",
    ),
    (question(3, stages=1, interleave=2), "several stages per device need two pipeline ranks"),
    (
        question(3, stages=2, schedule="interleaved"),
        "3 cannot be divided by 2; use cluster.devices=2",
    ),
    (
        question(2, microbatch=8, schedule="interleaved"),
        "2 pipeline ranks do not divide the 1 micro-batch(es)",
    ),
    (
        question(2, stages=2, schedule="zb-v", blocks=3),
        "plan.schedule=zb-v with plan.stages=2 and 2 device(s): 2 to each of 2 makes 4 stages, more than the 3",
    ),
    (question(9, stages=1, replicas=9), "9 replicas share the 8 row(s) of a batch"),
    (question(9, rows=2, fixed=True), "cluster.devices=9 with trainer.global_batch=2"),
]


@pytest.mark.parametrize(
    ("requested", "expected"), REFUSED, ids=[expected[:40] for _, expected in REFUSED]
)
def test_settings_without_a_shape_are_named_with_a_remedy(
    requested: Question, expected: str
) -> None:
    with pytest.raises(InfeasiblePlan, match=re.escape(expected)):
        check_question(requested)


@pytest.mark.parametrize(
    ("requested", "used"),
    [
        (question(3, stages=1, replicas=1), 1),
        (question(3, replicas=1), 3),
        (question(9, replicas=1), 4),
        (question(3, replicas=[1, 1]), 2),
        (question(5, replicas=2), 4),
        (question(10, replicas=2), 8),
        (question(5, stages=2, replicas=2), 4),
        (question(9, rows=2), 8),
        (question(9, rows=2, stages=3), 6),
        (question(9, rows=2, stages=1), 2),
        (question(5), 5),
    ],
    ids=str,
)
def test_a_plan_may_use_fewer_devices_than_there_are(requested: Question, used: int) -> None:
    assert check_question(requested) == used


def test_settings_that_exclude_each_other() -> None:
    for requested, expected in (
        (
            question(2, microbatch=9),
            "trainer.microbatch=9: it is more than the 8 row(s) of a batch",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            check_question(requested)
    nowhere = Question(
        config=PlanConfig(activations="offload"), blocks=4, devices=2, rows=8, swap=False
    )
    with pytest.raises(ConfigError, match=r"swap\.tier is none"):
        check_question(nowhere)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["plan.optimizer=host", "swap=off"], "plan.optimizer=host needs a host tier"),
        (
            ["plan.optimizer=host", "plan.parameters=host", "swap.tier=none"],
            "use swap.tier=auto, or plan.optimizer",
        ),
        (
            ["plan.parameters=host", "swap.tier=none"],
            "plan.parameters=host needs a host tier",
        ),
        (
            ["replicas.compress=powersgd", "plan.replicas=2", "plan.schedule=zb-h2"],
            "where the backwards of zb-h2 are",
        ),
        (
            [
                "model=mlp",
                "replicas.compress=powersgd",
                "plan.replicas=[1,2]",
                "plan.parameters=host",
            ],
            "powersgd cannot run where parameters are offloaded",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_parameters_that_cannot_be_offloaded_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: list[str],
    expected: str,
) -> None:
    def measures(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(planning, "measure", measures)
    assert cli.main(["plan", "cluster.devices=2", "data.max_bytes=64KiB", *typed]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.slow
def test_the_search_has_a_shape_for_exactly_what_is_not_refused() -> None:
    """Stages, replicas, schedules and micro-batches of small pipelines: what is refused early is what the search finds
    no shape for. Too few rows are left out: a replica without rows has a shape."""
    replicas: list[Any] = ["auto", 1, 2, 3, [1], [2, 1], [2, 2], [1, 1, 1]]
    kinds = [
        ("auto", "auto"),
        ("1f1b", "auto"),
        ("interleaved", "auto"),
        ("interleaved", 2),
        ("auto", 4),
        ("zb-v", "auto"),
    ]
    for devices, blocks, stages in itertools.product(
        (1, 2, 3, 4, 6), (1, 4, 9), ("auto", 1, 2, 3, 5)
    ):
        model = profile([block(weight_seconds=0.5)] * blocks)
        for requested, (schedule, interleave), microbatch in itertools.product(
            replicas, kinds, ("auto", 1, 3, 8)
        ):
            config = PlanConfig(
                stages=stages, replicas=requested, schedule=schedule, interleave=interleave
            )
            found = Question(
                config=config, blocks=blocks, devices=devices, rows=8, microbatch=microbatch
            )
            request = Request(
                model, cluster(found.used), config, global_batch=8, microbatch=microbatch
            )
            shapes = [
                s
                for s in request.shapes()
                if request.config.replicas != "auto" or _even(s, found.used)
            ]
            assert bool(shapes) == _accepted(found), found


def _accepted(requested: Question) -> bool:
    try:
        check_question(requested)
    except InfeasiblePlan:
        return False
    return True


def _even(shape: Any, devices: int) -> bool:
    """Every pipeline rank of an interleaved pipeline has the same number of devices."""
    return shape.interleave == 1 or devices % shape.pipeline_ranks == 0


def test_nothing_is_measured_for_what_has_no_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    for name in ("measure_model", "measured_cluster"):
        monkeypatch.setattr(planning, name, measured)
    monkeypatch.chdir(tmp_path)
    for settings in (
        ["plan.stages=100"],
        ["plan.replicas=[1,2,3]", "cluster.devices=3"],
        ["trainer.microbatch=9"],
    ):
        assert cli.main(["train", "experiment=tiny", "data.max_bytes=64KiB", *settings]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert settings[0] in line
        assert "; use " in line
    assert cli.main(["estimate", "experiment=tiny", "trainer.microbatch=9"]) == 2
    assert "it is more than the 8 row(s) of a batch" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
