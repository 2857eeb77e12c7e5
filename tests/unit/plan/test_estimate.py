"""Memory estimates against the planner's own arithmetic and against every other partition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.cost.estimate import ANY_DEVICE, estimate, stage_counts, without_seconds
from parallax.plan.cost.stage import load_stage
from parallax.plan.plan import Directive
from parallax.plan.profile import ModelProfile
from parallax.plan.schedule import SCHEDULES

MODEL = TransformerConfig(layers=6, hidden=64, heads=2, vocabulary=1024, sequence=64)


def peak(
    profile: ModelProfile, directive: Directive, start: int, stop: int, rows: int, in_flight: int
) -> int:
    return load_stage(
        profile, start, [directive] * (stop - start), rows, device=ANY_DEVICE
    ).peak_bytes(in_flight, 0)


def test_terms_by_hand() -> None:
    found = estimate(MODEL.work("bf16"), global_batch=8, microbatch=2)
    parameters = MODEL.parameters
    assert found.parameters == parameters
    assert (found.rows, found.micro_batches) == (2, 4)
    assert found.keep["parameters"] == found.keep["gradients"] == 2 * parameters
    assert (found.keep["optimizer"], found.keep["master"]) == (8 * parameters, 4 * parameters)
    assert found.keep["loss"] == 2 * 64 * 1024 * 4, "logits in full precision"
    saved = sum(block.moved.at(2) + block.stays.at(2) for block in MODEL.work("bf16").blocks)
    assert found.keep["activations"] == pytest.approx(saved, abs=len(found.keep) + 8)
    assert found.recompute["activations"] < found.keep["activations"]
    assert found.recompute["workspace"] > found.keep["workspace"], (
        "one block's activations at a time"
    )


@pytest.mark.parametrize("directive", [Directive.KEEP, Directive.RECOMPUTE])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_partition_needs_less(stages: int, directive: Directive) -> None:
    rows, micro_batches = 2, 4
    profile = without_seconds(MODEL.work("fp32"))
    blocks = len(profile.blocks)
    in_flight_by_stage = [
        SCHEDULES["1f1b"].in_flight(stages, stage, micro_batches) for stage in range(stages)
    ]
    least = min(
        max(
            peak(profile, directive, a, b, rows, in_flight)
            for a, b, in_flight in zip(bounds, bounds[1:], in_flight_by_stage)
        )
        for inner in itertools.combinations(range(1, blocks), stages - 1)
        for bounds in [(0, *inner, blocks)]
    )
    found = estimate(MODEL.work("fp32"), global_batch=8, microbatch=rows)
    (need,) = [need for need in found.pipelines if need.stages == stages]
    mine = need.keep_bytes if directive is Directive.KEEP else need.recompute_bytes
    assert least <= mine <= 1.01 * least


def test_one_stage_is_one_device() -> None:
    found = estimate(MODEL.work("fp32"), global_batch=4)
    assert found.rows == 4
    assert found.pipelines[0].stages == 1
    assert found.pipelines[0].keep_bytes == sum(found.keep.values())
    assert found.pipelines[0].recompute_bytes == sum(found.recompute.values())


def test_all_but_what_is_named_is_what_a_plan_counts() -> None:
    """A device's context is in a plan's budget; it was once reported on top of it, and counted as 0 bytes."""
    device = replace(ANY_DEVICE, reserve_bytes=10, context_bytes=100, gap_share=0.1)
    profile = without_seconds(MODEL.work("fp32"))
    directives = [Directive.KEEP] * len(profile.blocks)
    counted = load_stage(profile, 0, directives, 4, device=device).memory(1, 0)
    found = estimate(MODEL.work("fp32"), global_batch=4)
    assert {*found.keep, *found.uncounted} == {*counted} - {"swap"}
    assert {term: counted[term] for term in found.keep} == found.keep
    assert counted["context"] == 100


def test_stage_counts() -> None:
    assert stage_counts(1) == [1]
    assert stage_counts(8) == [1, 2, 4, 8]
    assert stage_counts(10) == [1, 2, 4, 8, 10]
