"""Plans, traces and tables as they are shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console, RenderableType

from parallax.events import Span
from parallax.plan.catalog import CatalogClusterConfig
from parallax.plan.efficiency import price
from parallax.plan.estimate import estimate
from parallax.plan.hardware import DEVICE_KINDS
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.request import PlanConfig
from parallax.plan.search import search
from parallax.plan.transformer import TransformerConfig
from parallax.report import chrome_trace, estimate_table, memory_table, plan_table, profile_table
from parallax.report.simulation import simulation_table
from parallax.report.what_if import Outcome, what_if_table
from parallax.units import format_bytes, format_seconds

MODEL = TransformerConfig(layers=6, hidden=128, heads=2, vocabulary=512, sequence=64)


def text(shown: RenderableType, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(shown)
    return " ".join(console.export_text().split())


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, ModelProfile, tuple[Span, ...]]:
    profile = price(MODEL.work("fp32"), DEVICE_KINDS["a100-80"])
    cluster = CatalogClusterConfig(devices=4).build(dtype="fp32")
    config = PlanConfig(stages=4, schedule="1f1b", activations="keep")
    plan, simulation = search(profile, cluster, config, global_batch=16, microbatch=4)
    return plan, profile, simulation.spans


# ---- traces


def spans() -> list[Span]:
    return [
        Span(0, 3, "forward", 0, 0, 10.0, 10.5, 0.125),
        Span(0, 3, "offload", 0, 0, 10.5, 10.5),
        Span(1, 3, "receive_activation", 1, 0, 10.0, 10.6, 0.6),
        Span(1, 3, "update", 1, -1, 11.0, 11.25),
    ]


def test_a_trace_has_a_process_per_rank_and_three_tracks() -> None:
    trace = chrome_trace(spans())
    json.dumps(trace, allow_nan=False)
    names = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in names] == [
        (0, "rank 0, stage 0"),
        (1, "rank 1, stage 1"),
    ]
    tracks = [event for event in trace["traceEvents"] if event["name"] == "thread_name" and event["pid"] == 1]
    assert [(event["tid"], event["args"]["name"]) for event in tracks] == [(0, "compute"), (1, "send"), (2, "swap")]


def test_a_trace_is_in_microseconds_from_the_first_span() -> None:
    events = [event for event in chrome_trace(spans())["traceEvents"] if event["ph"] != "M"]
    forward, wait, offload, receive, update = events
    assert (forward["ph"], forward["name"], forward["ts"], forward["dur"]) == ("X", "forward 0", 0.0, 500_000.0)
    assert (forward["pid"], forward["tid"]) == (0, 0)
    assert (wait["name"], wait["ts"], wait["dur"], wait["tid"]) == ("wait", 0.0, 125_000.0, 0)
    assert (offload["ph"], offload["tid"], offload["ts"]) == ("i", 2, 500_000.0)
    assert (receive["pid"], receive["tid"]) == (1, 1)
    assert (update["name"], update["tid"], update["args"]["step"]) == ("update", 0, 3)


def test_a_simulated_step_as_a_trace(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, _, found = planned
    events = chrome_trace(found)["traceEvents"]
    forwards = [event for event in events if event.get("cat") == "forward"]
    assert len(forwards) == 4 * plan.micro_batches(plan.global_batch)
    for rank in range(4):  # what computes on one rank does not overlap
        mine = sorted((e["ts"], e["dur"]) for e in events if e["pid"] == rank and e["ph"] == "X" and e["tid"] == 0)
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in pairwise(mine))


def test_no_spans_are_no_trace_events() -> None:
    assert chrome_trace([])["traceEvents"] == []


# ---- tables


def test_alike_stages_share_a_row(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, profile, _ = planned
    shown = text(plan_table(plan, profile))
    assert "transformer: " in shown
    assert f"{sum(b.parameters for b in profile.blocks):,} parameters in 8 blocks" in shown
    runs = {(s.stop - s.start, s.replicas) for s in plan.stages}
    assert shown.count("keep") == len(runs)
    assert "1f1b, 4 micro-batches of 4 row(s)" in shown
    assert text(plan_table(plan)).startswith("transformer: 8 blocks")


def test_terms_add_up_in_the_table(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, _, _ = planned
    shown = text(memory_table(plan))
    for stage in plan.prediction.stages:
        assert format_bytes(sum(stage.memory.values())) in shown
        assert format_bytes(stage.memory["parameters"]) in shown
        assert format_seconds(stage.seconds["forward"]) in shown
    assert "master" not in shown, "a term that is zero everywhere is left out"


def test_of_many_positions_the_fullest_are_shown(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, _, _ = planned
    stage, rank = plan.stages[0], plan.prediction.ranks[0]
    stages = tuple(replace(stage, start=i, stop=i + 1, replicas=1, directives=stage.directives[:1]) for i in range(20))
    terms = tuple(
        replace(plan.prediction.stages[0], memory={"parameters": 1000 + (i * 7) % 20}, seconds={}) for i in range(20)
    )
    long = replace(plan, stages=stages, prediction=replace(plan.prediction, ranks=(rank,) * 20, stages=terms))
    shown = text(memory_table(long))
    assert shown.count("stage ") == 8
    assert "12 more stages are in the plan file" in shown
    assert "1019 B" in shown, "the fullest"


def test_simulated_ranks(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, _, _ = planned
    shown = text(simulation_table(plan, plan.prediction.ranks, plan.prediction.stages))
    assert format_bytes(plan.prediction.ranks[3].peak_bytes) in shown
    assert "forward backward" in shown


def test_profile_shows_alike_blocks_once(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    _, profile, _ = planned
    shown = text(profile_table(profile, 2))
    assert "layer 0 … layer 5 (6 alike)" in shown
    assert shown.startswith("transformer on a100-80, fp32, analytic; for 2 row(s)")
    assert format_seconds(profile.blocks[1].backward_seconds.at(2)) in shown


def test_estimate_shows_both_ways() -> None:
    found = estimate(MODEL.work("bf16"), global_batch=4)
    shown = text(estimate_table(found))
    assert f"{MODEL.parameters:,} parameters in bf16" in shown
    assert f"sum {format_bytes(sum(found.keep.values()))} {format_bytes(sum(found.recompute.values()))}" in shown


def test_alternatives_side_by_side() -> None:
    fits = Outcome(
        settings={"cluster.devices": "4"},
        fits=True,
        devices=4,
        replicas=(1, 3),
        schedule="1f1b",
        microbatch=2,
        step_seconds=0.25,
        tokens_per_second=4096.4,
        cost_per_step=0.000694,
        cost_per_hour=10.0,
    )
    no = Outcome(settings={"cluster.devices": "1"}, fits=False, reason="too little")
    shown = text(what_if_table([fits, no]))
    assert "4 yes 2 × [1, 3] 1f1b 2 250 ms 4,096 0.000694 10" in shown
    assert "1 no" in shown
    assert "cost" not in text(what_if_table([no]))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (2.5, "2.50 s"), (123.4, "123 s"), (4000, "4000 s"), (0.0999, "99.9 ms"), (3e-6, "3.00 µs")],
)
def test_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected
