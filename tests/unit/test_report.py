"""Plans, traces and tables as they are shown."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console, RenderableType

from parallax.commands.plan.what_if import Outcome, what_if_table
from parallax.commands.simulate import simulation_table
from parallax.common.events import Span
from parallax.common.units import format_bytes, format_seconds
from parallax.errors import ConfigError
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.analytic.efficiency import price
from parallax.plan.analytic.hardware import DEVICE_KINDS
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.config import PlanConfig
from parallax.plan.cost.estimate import estimate
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.search import search
from parallax.report import (
    COLOURS,
    chrome_trace,
    estimate_table,
    memory_table,
    occupancy_png,
    plan_table,
    profile_table,
    swap_tables,
)
from parallax.report.occupancy import DEVICE, LIMIT, TIER, Occupancy, computed, fullest
from parallax.report.swap import SwapRecord, swapped_ranks, worst_of_stages
from parallax.swap.statistics import MicroStatistics, SwapStatistics
from tests.unit import plan_fakes as fakes

MIB = 2**20
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
        Span(0, 3, "fetch", 0, 0, 10.5, 10.5),
        Span(1, 3, "receive_activation", 1, 0, 10.0, 10.6, 0.6),
        Span(1, 3, "update", 1, -1, 11.0, 11.25),
    ]


def test_a_trace_has_a_process_per_rank_and_three_tracks() -> None:
    trace = chrome_trace(spans())
    json.dumps(trace, allow_nan=False)
    names = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    ]
    assert [(event["pid"], event["args"]["name"]) for event in names] == [
        (0, "rank 0, stage 0"),
        (1, "rank 1, stage 1"),
    ]
    tracks = [
        event
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["pid"] == 1
    ]
    assert [(event["tid"], event["args"]["name"]) for event in tracks] == [
        (0, "compute"),
        (1, "send"),
        (2, "swap"),
    ]


def test_a_trace_is_in_microseconds_from_the_first_span() -> None:
    events = [event for event in chrome_trace(spans())["traceEvents"] if event["ph"] != "M"]
    forward, wait, fetch, receive, update = events
    assert (forward["ph"], forward["name"], forward["ts"], forward["dur"]) == (
        "X",
        "forward 0",
        0.0,
        500_000.0,
    )
    assert (forward["pid"], forward["tid"]) == (0, 0)
    assert (wait["name"], wait["ts"], wait["dur"], wait["tid"]) == ("wait", 0.0, 125_000.0, 0)
    assert (fetch["ph"], fetch["tid"], fetch["ts"]) == ("i", 2, 500_000.0)
    assert (receive["pid"], receive["tid"]) == (1, 1)
    assert (update["name"], update["tid"], update["args"]["step"]) == ("update", 0, 3)


def test_a_simulated_step_as_a_trace(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, _, found = planned
    events = chrome_trace(found)["traceEvents"]
    forwards = [event for event in events if event.get("cat") == "forward"]
    assert len(forwards) == 4 * plan.micro_batches(plan.global_batch)
    for rank in range(4):  # what computes on one rank does not overlap
        mine = sorted(
            (e["ts"], e["dur"])
            for e in events
            if e["pid"] == rank and e["ph"] == "X" and e["tid"] == 0
        )
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in pairwise(mine))


def test_no_spans_are_no_trace_events() -> None:
    assert chrome_trace([])["traceEvents"] == []


# ---- tables


def test_alike_stages_share_a_row(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, profile, _ = planned
    shown = text(plan_table(plan, profile))
    assert "transformer: " in shown
    assert f"{MODEL.parameters:,} parameters in 8 blocks" in shown, "a tied matrix counts once"
    runs = [
        key
        for key, _ in itertools.groupby(plan.stages, key=lambda s: (s.stop - s.start, s.replicas))
    ]
    assert shown.count("keep") == len(runs)
    assert "1f1b, 4 micro-batches of 4 rows predicted: " in shown
    assert text(plan_table(plan)).startswith("transformer: 8 blocks")


def test_terms_add_up_in_the_table(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, _, _ = planned
    shown = text(memory_table(plan))
    for stage in plan.prediction.stages:
        assert format_bytes(sum(stage.memory.values())) in shown
        assert format_bytes(stage.memory["parameters"]) in shown
        assert format_seconds(stage.seconds["forward"]) in shown
    assert "master" not in shown, "a term that is zero everywhere is left out"


def test_of_many_pipeline_ranks_the_fullest_are_shown(
    planned: tuple[Plan, ModelProfile, tuple[Span, ...]],
) -> None:
    plan, _, _ = planned
    stage, rank = plan.stages[0], plan.prediction.ranks[0]
    stages = tuple(
        replace(
            stage,
            start=i,
            stop=i + 1,
            replicas=1,
            directives=stage.directives[:1],
            inputs_ahead=stage.inputs_ahead and i == 0,
        )
        for i in range(20)
    )
    terms = tuple(
        replace(plan.prediction.stages[0], memory={"parameters": 1000 + (i * 7) % 20}, seconds={})
        for i in range(20)
    )
    long = replace(
        plan, stages=stages, prediction=replace(plan.prediction, ranks=(rank,) * 20, stages=terms)
    )
    shown = text(memory_table(long))
    assert shown.count("stage ") == 8
    assert "12 more stages are in the plan file" in shown
    assert "1019 B" in shown, "the fullest"


def test_simulated_ranks(planned: tuple[Plan, ModelProfile, tuple[Span, ...]]) -> None:
    plan, _, _ = planned
    shown = text(simulation_table(plan, plan.prediction.ranks, plan.prediction.stages))
    assert format_bytes(plan.prediction.ranks[3].peak_bytes) in shown
    assert "forward backward" in shown


def test_profile_shows_alike_blocks_once(
    planned: tuple[Plan, ModelProfile, tuple[Span, ...]],
) -> None:
    _, profile, _ = planned
    shown = text(profile_table(profile, 2))
    assert "layer 0 … layer 5 (6 alike)" in shown
    assert shown.startswith("transformer on a100-80, fp32, analytic; for 2 rows")
    assert format_seconds(profile.blocks[1].backward_seconds.at(2)) in shown


def test_untrained_parameters_are_reported() -> None:
    parts = [
        fakes.block("a", parameters=1000, parameter_bytes=4000, frozen_bytes=3000),
        fakes.block("b", parameters=10, parameter_bytes=40, frozen_bytes=40),
    ]
    shown = text(profile_table(fakes.profile(parts), 2))
    assert "1,010 parameters (250 trained); for each byte that is trained 1 of gradients" in shown
    assert "(250 trained) in 1 blocks" not in text(plan_table(fakes.plan()))
    assert "1,010 parameters (250 trained) in 3 blocks" in text(
        plan_table(fakes.plan(), fakes.profile(parts))
    )


def test_estimate_shows_keep_and_recompute() -> None:
    found = estimate(MODEL.work("bf16"), global_batch=4)
    shown = text(estimate_table(found))
    assert f"{MODEL.parameters:,} parameters in bf16" in shown
    assert (
        f"sum {format_bytes(sum(found.keep.values()))} {format_bytes(sum(found.recompute.values()))}"
        in shown
    )
    assert (
        "a plan counts reserve, allocator, context, communicators, connections in a device's budget"
        in shown
    )
    assert "300.0 MiB to 800.0 MiB" in shown


def test_alternatives_side_by_side() -> None:
    fits = Outcome(
        settings={"cluster.devices": "4"},
        fits=True,
        devices=4,
        replicas=(1, 3),
        schedule="1f1b",
        microbatch=2,
        step_seconds=0.25,
        rows_per_second=16.0,
        tokens_per_second=4096.4,
        cost_per_step=0.000694,
        cost_per_hour=10.0,
    )
    no = Outcome(settings={"cluster.devices": "1"}, fits=False, reason="too little")
    shown = text(what_if_table([fits, no]))
    assert "4 yes 2 × [1, 3] 1f1b 2 250 ms 4,096 0.000694 10" in shown
    assert "1 no" in shown
    assert "tokens/s" in shown
    models = [replace(each, settings=each.settings | {"model": "mlp"}) for each in (fits, no)]
    assert text(what_if_table(models)) == shown
    assert "cost" not in text(what_if_table([no]))
    images = replace(fits, tokens_per_second=0.0)
    for outcomes in ([no], [no, images], [fits, images]):
        shown = text(what_if_table(outcomes))
        assert "rows/s" in shown
        assert "tokens/s" not in shown
        assert "4,096" not in shown


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (2.5, "2.50 s"),
        (123.4, "123 s"),
        (4000, "4000 s"),
        (0.0999, "99.9 ms"),
        (3e-6, "3.00 µs"),
    ],
)
def test_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


# ---- what the swap did


def statistics(out: int = 6 * MIB, stalled: float = 0.25) -> SwapStatistics:
    """A step of two micro-batches."""
    return SwapStatistics(
        bytes_out=out,
        bytes_in=4 * MIB,
        stall_seconds=stalled,
        transfer_seconds=1.0,
        high_water=3 * MIB,
        tier_high_water=5 * MIB,
        limit_bytes=4 * MIB,
        pinned_waste_bytes=MIB // 2,
        micro={
            1: MicroStatistics(2 * MIB, 2 * MIB, 0.25),
            0: MicroStatistics(4 * MIB, 2 * MIB, 0.0),
        },
        decisions={"smaller than swap.minimum_bytes": (7, 1024), "moved": (12, 6 * MIB)},
    )


def swapped(rank: int, stage: int, *steps: SwapStatistics) -> dict[str, Any]:
    record = SwapRecord()
    for step in steps:
        record.add(step)
    return {
        "rank": rank,
        "stage": stage,
        "replica": 0,
        "swap": json.loads(json.dumps(record.summary())),
    }


def test_a_record_has_means_over_the_steps_and_the_last_in_detail() -> None:
    found = swapped(0, 0, statistics(out=2 * MIB, stalled=0.0), statistics())["swap"]
    assert (found["bytes_out_per_step"], found["bytes_in_per_step"]) == (4 * MIB, 4 * MIB)
    assert (found["stall_seconds_per_step"], found["overlap"]) == (0.125, 0.875)
    assert (found["device_high_water_bytes"], found["limit_bytes"]) == (3 * MIB, 4 * MIB)
    assert (found["tier_high_water_bytes"], found["pinned_waste_bytes"]) == (5 * MIB, MIB // 2)
    last = found["last_step"]
    assert (last["bytes_out"], last["overlap"]) == (6 * MIB, 0.75)
    assert [micro["micro"] for micro in last["micro_batches"]] == [0, 1]
    assert last["micro_batches"][1] == {
        "micro": 1,
        "bytes_out": 2 * MIB,
        "bytes_in": 2 * MIB,
        "stall_seconds": 0.25,
    }
    assert last["decisions"]["moved"] == {"tensors": 12, "bytes": 6 * MIB}


def test_a_stage_that_does_not_swap_has_no_record() -> None:
    record = SwapRecord()
    assert record.summary() is None
    record.add(SwapStatistics())
    assert record.summary() is None
    assert swapped(0, 0, SwapStatistics(decisions={"smaller than swap.minimum_bytes": (1, 8)}))[
        "swap"
    ], "it says why not"
    assert swapped_ranks({"ranks": [{"rank": 0, "swap": None}, {"rank": 1}]}) == []
    assert swapped_ranks({}) == []


def test_the_replica_that_stalled_most_is_reported() -> None:
    ranks = [
        swapped(0, 0, statistics(stalled=0.1)),
        swapped(1, 0, statistics(stalled=0.5)),
        swapped(2, 1, statistics()),
    ]
    assert [rank["rank"] for rank in worst_of_stages(ranks)] == [1, 2]
    shown = text(swap_tables(ranks))
    assert "0 0 6.0 MiB 4.0 MiB 100 ms 90% 4.0 MiB 75% 5.0 MiB 512.0 KiB" in shown
    assert "0 1 0 4.0 MiB 2.0 MiB 0 s" in shown, "its first micro-batch"
    assert "0 1 all 6.0 MiB 4.0 MiB 500 ms 50%" in shown
    assert "1 2 moved 12 6.0 MiB 1 2 smaller than swap.minimum_bytes 7 1.0 KiB" in shown, (
        "largest first"
    )
    assert "0 0 all" not in shown
    assert "waste" in shown
    assert "waste" not in text(
        swap_tables([swapped(0, 0, replace(statistics(), pinned_waste_bytes=0))])
    )


def test_long_tables_say_what_they_leave_out() -> None:
    many = swapped(
        0, 0, replace(statistics(), micro={micro: MicroStatistics() for micro in range(50)})
    )
    assert "11 more rows with --json" in text(swap_tables([many]))


def occupancy(stage: int = 0, high: int = 3 * MIB) -> Occupancy:
    return Occupancy(
        rank=stage,
        stage=stage,
        replica=0,
        step=7,
        limit_bytes=4 * MIB,
        samples=(
            (99.5, 0, 0),
            (100.5, high, 0),
            (101.0, high, 2 * MIB),
            (102.5, MIB, 2 * MIB),
            (103.5, 0, 0),
        ),
        spans=(
            Span(stage, 6, "forward", stage, 0, 100.0, 102.0),
            Span(stage, 6, "backward", stage, 0, 102.0, 104.0, 0.5),
        ),
    )


def test_occupancy_is_what_was_written(tmp_path: Path) -> None:
    occupancy().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["swap-rank0.json"]
    assert Occupancy.load(tmp_path, 0) == occupancy()
    with pytest.raises(
        ConfigError, match=r"swap-rank1.json is missing: rank 1 wrote it on its own host"
    ):
        Occupancy.load(tmp_path, 1)
    for damaged in (
        "{",
        "[]",
        '{"samples": [], "spans": [{"rnk": 0}]}',
        '{"samples": [], "spans": []}',
    ):
        (tmp_path / "swap-rank1.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"cannot read .*swap-rank1.json"):
            Occupancy.load(tmp_path, 1)


def test_only_computing_actions_are_drawn_below_the_curves() -> None:
    assert [span.kind for span in computed(spans())] == ["forward", "update"]


def inked(image: np.ndarray, colour: str) -> np.ndarray:
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    found: np.ndarray = (image == wanted).all(axis=2)
    return found


def test_a_picture_has_the_curves_the_limit_and_the_actions(tmp_path: Path) -> None:
    occupancy_png([occupancy(), occupancy(stage=1, high=MIB)], tmp_path / "swap.png")
    assert [path.name for path in tmp_path.iterdir()] == ["swap.png"]
    image = (matplotlib.image.imread(tmp_path / "swap.png")[:, :, :3] * 255).round().astype(int)
    assert image.shape == (900, 1600, 3)
    upper, lower, right = image[:430, :800], image[430:820, :800], image[:430, 800:]
    for panel in (upper, lower):
        assert inked(panel, LIMIT).sum() > 200
        assert inked(panel, COLOURS["forward"]).sum() > 500
        assert inked(panel, COLOURS["backward"]).sum() > 500
    assert not inked(right, LIMIT).any()
    assert inked(right, TIER).sum() > 300
    curve, limit = (np.nonzero(inked(upper, colour))[0].min() for colour in (DEVICE, LIMIT))
    assert limit < curve, "3 MiB are below 4 MiB"


def test_a_picture_has_the_fullest_stages(tmp_path: Path) -> None:
    steps = [occupancy(stage, high=(stage % 4 + 1) * MIB) for stage in range(12)]
    assert [step.stage for step in fullest(steps)] == [2, 3, 6, 7, 10, 11]
    occupancy_png([replace(occupancy(), samples=(), spans=())], tmp_path / "swap.png")
    assert (tmp_path / "swap.png").is_file()
