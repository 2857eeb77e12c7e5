"""The failing rank, located from the last status of each rank."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parallax.plan.plan import Coordinate
from parallax.plan.schedule import Action, Kind
from parallax.runtime.failure.report import (
    FailureKind,
    FailureReport,
    RankStatus,
    complaint,
    name,
    root_cause,
    speaker,
    speaks,
)

LIMIT = 60.0
LONG, SHORT = 61.0, 59.0


def seen(
    kind: Kind | None, step: int = 3, seconds: float = LONG, silent: float = 0.0
) -> RankStatus:
    micro = -1 if kind in (Kind.REDUCE, Kind.UPDATE) else 2
    return RankStatus(Action(kind, 0, micro) if kind else None, step, seconds, silent)


NO_VERDICT = [
    ("everybody works", [seen(Kind.FORWARD, seconds=SHORT), seen(Kind.BACKWARD, seconds=1.0)]),
    (
        "a deep pipeline waits",
        [seen(Kind.FORWARD, seconds=SHORT), *[seen(Kind.RECEIVE_ACTIVATION, seconds=400.0)] * 3],
    ),
    ("all save a checkpoint", [seen(None, seconds=900.0)] * 3),
    (
        "one has just gone on",
        [seen(Kind.RECEIVE_GRADIENT, seconds=0.1), seen(Kind.REDUCE, seconds=400.0)],
    ),
]


@pytest.mark.parametrize(
    "ranks", [ranks for _, ranks in NO_VERDICT], ids=[text for text, _ in NO_VERDICT]
)
def test_no_rank_is_at_fault(ranks: list[RankStatus]) -> None:
    assert root_cause(ranks, LIMIT) is None


def outside(
    phase: str = "loading data", seconds: float = LONG, idle: float = LONG, *, waits: bool = False
) -> RankStatus:
    return RankStatus(seconds=seconds, phase=phase, idle_seconds=idle, waits=waits)


OUTSIDE = [
    ("one works, the others wait", [outside(seconds=900.0, idle=0.0), outside(waits=True)], None),
    ("one has just begun", [outside(seconds=1.0), outside(waits=True)], None),
    ("one sleeps, the others wait", [outside(waits=True, seconds=99.0), outside()], 1),
    (
        "one has worked for too long",
        [outside(seconds=3601.0, idle=0.0), outside(seconds=9e9, waits=True)],
        0,
    ),
    ("all wait for each other", [outside(waits=True), outside(waits=True, seconds=99.0)], 1),
    ("before any phase is reported", [RankStatus(seconds=9e9), RankStatus(seconds=9e9)], None),
]


@pytest.mark.parametrize(
    ("ranks", "rank"), [case[1:] for case in OUTSIDE], ids=[case[0] for case in OUTSIDE]
)
def test_outside_of_steps_the_rank_without_a_sign_of_life_is_named(
    ranks: list[RankStatus], rank: int | None
) -> None:
    assert root_cause(ranks, LIMIT, 3600.0) == (None if rank is None else (rank, FailureKind.HANGS))


LOCATED = [
    (
        "one computes",
        [seen(Kind.RECEIVE_GRADIENT, seconds=70.0), seen(Kind.BACKWARD), seen(Kind.REDUCE)],
        1,
    ),
    (
        "one waits for its swapped data",
        [seen(Kind.FETCH), seen(Kind.RECEIVE_ACTIVATION, seconds=70.0)],
        0,
    ),
    (
        "one loads rows",
        [seen(Kind.RECEIVE_ACTIVATION), seen(None, seconds=62.0), seen(Kind.UPDATE)],
        1,
    ),
    ("one is a step behind", [seen(Kind.RECEIVE_ACTIVATION, step=4), seen(Kind.UPDATE, step=3)], 1),
    (
        "a message was lost",
        [seen(Kind.RECEIVE_GRADIENT, seconds=61.0), seen(Kind.RECEIVE_ACTIVATION, seconds=65.0)],
        1,
    ),
]


@pytest.mark.parametrize(
    ("ranks", "rank"), [case[1:] for case in LOCATED], ids=[case[0] for case in LOCATED]
)
def test_the_one_that_keeps_the_others_waiting(ranks: list[RankStatus], rank: int) -> None:
    assert root_cause(ranks, LIMIT) == (rank, FailureKind.HANGS)


def test_silence_explains_everything_else() -> None:
    ranks = [seen(Kind.FORWARD), seen(None, seconds=0.0, silent=LONG), seen(Kind.REDUCE)]
    assert root_cause(ranks, LIMIT) == (1, FailureKind.SILENT)


def test_the_texts_of_failure_reports() -> None:
    ranks = [seen(Kind.RECEIVE_GRADIENT), seen(Kind.BACKWARD)]
    assert "".join(complaint(ranks, 1, FailureKind.HANGS, LIMIT)) == (
        "has been in backward of micro-batch 2, step 3, for 61 s while rank 0 waits in receive_gradient of micro-batch "
        "2, step 3; the limit is 60 s (trainer.watchdog_seconds; 0 sets none)"
    )
    assert complaint([seen(None), seen(Kind.UPDATE)], 0, FailureKind.HANGS, LIMIT)[0] == (
        "has been outside of a step, after step 3, for 61 s"
    )
    assert complaint([seen(None, silent=LONG)], 0, FailureKind.SILENT, LIMIT)[0].endswith(
        "is gone), last seen after step 3"
    )
    assert name(3, None) == "rank 3"
    assert name(3, Coordinate(1, 0)) == "rank 3 (stage 1, replica 0)"
    assert name(3, Coordinate(1, 0), Action(Kind.FORWARD, 5, 0)) == "rank 3 (stage 5, replica 0)", (
        "one of several of that rank"
    )


def test_what_travels_comes_back() -> None:
    for each in (seen(Kind.UPDATE, seconds=2.5), seen(None), RankStatus(), outside(waits=True)):
        assert RankStatus.from_list(json.loads(json.dumps(each.to_list()))) == each
    verdict = FailureReport(
        1, FailureKind.LOST, "rank 1", "ended without a report", ", last seen after step 3"
    )
    assert FailureReport.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    assert verdict.text == "rank 1 ended without a report, last seen after step 3"
    assert FailureReport(0, FailureKind.RAISED, "", "wrong input").text == "wrong input"


@pytest.mark.parametrize(
    ("hosts", "failed", "gone", "named"),
    [
        ("aabb", 2, {2}, 3),  # beside it
        ("aabb", 2, {2, 3}, 0),  # its host has gone
        ("aabb", 1, {1}, 0),
        ("aaa", 2, {2}, 0),
    ],
)
def test_the_process_that_reports_for_a_dead_rank_is_still_alive(
    hosts: str, failed: int, gone: set[int], named: int
) -> None:
    report = FailureReport(failed, FailureKind.LOST, "", "")
    present = [rank for rank in range(len(hosts)) if rank not in gone]
    assert speaker(report, hosts, present) == named
    reported = replace(report, speaker=named)
    assert [rank for rank in present if speaks(reported, rank, hosts)] == [named]


@pytest.mark.parametrize(
    ("how", "failed", "speaking"),
    [
        (FailureKind.PARTITIONED, 2, [0, 3]),
        (FailureKind.LOST, 0, [1, 2]),
        (FailureKind.PARTITIONED, 0, [1, 2]),
    ],
)
def test_each_host_speaks_where_none_reaches_all(
    how: FailureKind, failed: int, speaking: list[int]
) -> None:
    report = FailureReport(failed, how, "", "")
    assert [r for r in range(4) if r != failed and speaks(report, r, "aabb")] == speaking


def test_a_node_is_named_where_there_are_several() -> None:
    assert name(1, None, node="b") == "rank 1 on b"
    assert name(1, Coordinate(0, 2), node="b") == "rank 1 (stage 0, replica 2) on b"
