"""Peaks of memory and of the offload tier, against sums that can be done by hand and against what is proved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.plan.cluster import Link
from parallax.plan.cost.stage import load_planned
from parallax.plan.plan import Directive, boundaries_held
from parallax.plan.profile import Affine
from parallax.plan.schedule import SCHEDULES
from tests.unit.plan.simulated import nodes, run
from tests.unit.plan_fakes import block, profile, stages


def test_peak_bytes_by_hand() -> None:
    """Two stages, 1F1B, two micro-batches of one row."""
    blocks = [
        block(
            parameter_bytes=100,
            buffer_bytes=7,
            moved=10,
            stays=1,
            output=4,
            forward_work=5,
            backward_work=20,
        ),
        block(
            parameter_bytes=200,
            moved=30,
            stays=2,
            input=4,
            output=3,
            forward_work=50,
            backward_work=6,
        ),
    ]
    result = run(
        blocks,
        stages([0, 1, 2]),
        schedule="1f1b",
        rows=2,
        micro=2,
        optimizer_bytes=2.0,
        reserve=1000,
    )
    # Two in flight, the second's backward has not begun.
    first = 100 * 4 + 7 + 1000 + 2 * 4 + 2 * 11 + 20 + 4
    # What a forward saves comes beside its work.
    second = 200 * 4 + 1000 + 2 * 4 + max(32 + 50 + 3, 32 + 6 + 3)
    assert [rank.peak_bytes for rank in result.ranks] == [first, second]
    moved = run(
        blocks,
        stages([0, 1, 2], directive="offload", limit=60),
        schedule="1f1b",
        rows=2,
        micro=2,
        reserve=1000,
    )
    assert moved.ranks[0].peak_bytes == 100 * 4 + 7 + 1000 + 8 + 60 + max(
        1 + 5 + 4 + 10, 2 * 1 + 20 + 4
    )
    again = run(
        blocks,
        stages([0, 1, 2], directive="recompute"),
        schedule="gpipe",
        rows=2,
        micro=2,
        reserve=1000,
    )
    assert again.ranks[1].peak_bytes == 200 * 4 + 1000 + 8 + max(
        2 * 4 + 50 + 3 + 32, 2 * 4 + 6 + 3 + 32
    )


def test_states_on_the_host_count_in_its_tier_and_in_the_update() -> None:
    link = Link(bytes_per_second=10)
    machines = nodes(1, write=link, read=link, host_update_seconds=0.5)
    part = replace(stages([0, 1])[0], optimizer_offload=0.5)
    result = run(
        [block(parameter_bytes=100)],
        [part],
        rows=1,
        micro=1,
        machines=machines,
        optimizer_seconds=0.02,
    )
    rank = result.ranks[0]
    assert rank.memory["optimizer"] == 100
    assert rank.memory["staging"] == 100  # on the disk, they come up to be stepped
    # A share is rounded up to whole parameters, and here may be one.
    assert rank.tier_peak_bytes == 200
    assert rank.seconds["update"] == pytest.approx(50 * 0.02 + 50 * 0.5)
    # Two bytes of states for each of weights are read and written, and the only block's forward waits for them.
    assert rank.seconds["stall"] == pytest.approx(2 * 50 / 10 + 2 * 50 / 10)


@pytest.mark.parametrize(("speed", "stall"), [(1000.0, 0.4), (10.0, 40.0)])
def test_a_forward_waits_for_states_that_the_disk_has_not_passed_yet(
    speed: float, stall: float
) -> None:
    """States pass block by block while the next forward runs, so the only block's forward waits for all of them."""
    link = Link(bytes_per_second=speed)
    machines = nodes(1, write=link, read=link)
    part = replace(stages([0, 1])[0], optimizer_offload=1.0)
    result = run(
        [block(parameter_bytes=100)],
        [part],
        rows=4,
        micro=4,
        machines=machines,
    )
    assert result.ranks[0].seconds["stall"] == pytest.approx(stall)
    assert result.step_seconds == pytest.approx(4 * 3 + stall)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(
        [(name, each) for name in SCHEDULES for each in (1, 2, 3) if SCHEDULES[name].allows(each)]
    ),
    pipeline_ranks=st.integers(1, 4),
    micro=st.integers(1, 9),
    rows=st.integers(1, 14),
    data=st.data(),
    gap=st.sampled_from([0.0, 0.07]),
)
def test_no_rank_peaks_above_what_is_proved(
    kind: tuple[str, int],
    pipeline_ranks: int,
    micro: int,
    rows: int,
    data: st.DataObject,
    gap: float,
) -> None:
    """What a stage load promises for the micro-batches in flight holds for the list that runs."""
    schedule, interleave = kind
    size = -(-rows // min(micro, rows))
    micro, count = -(-rows // size), pipeline_ranks * interleave  # fewer where rows do not divide
    sizes = st.integers(0, 40)
    drawn = [
        block(
            moved=data.draw(sizes),
            stays=data.draw(sizes),
            by_loss=data.draw(sizes),
            input=data.draw(sizes),
            output=data.draw(sizes),
            forward_work=data.draw(sizes),
            backward_work=data.draw(sizes),
            deferred=data.draw(sizes),
            split_work=data.draw(sizes),
            weight_seconds=0.5,
        )
        for _ in range(2 * count)
    ]
    directive = st.sampled_from(list(Directive))
    parts = [
        replace(part, directives=(data.draw(directive), data.draw(directive)))
        for part in stages(range(0, 2 * count + 1, 2), limit=40 * rows)
    ]
    machines = nodes(pipeline_ranks, gap_share=gap, reserve_bytes=17)
    result = run(
        drawn,
        parts,
        schedule=schedule,
        rows=rows,
        micro=micro,
        machines=machines,
        interleave=interleave,
    )
    for pipeline_rank, rank in enumerate(result.ranks):
        bound = 0
        for index, stage in enumerate(
            SCHEDULES[schedule].stages_of(pipeline_rank, pipeline_ranks, interleave)
        ):
            part = parts[stage]
            device, split = machines.devices[pipeline_rank], SCHEDULES[schedule].splits
            load = load_planned(
                profile(drawn),
                part,
                size,
                device=device,
                split=split,
                boundaries_held=boundaries_held(SCHEDULES[schedule], pipeline_ranks, micro),
            )
            in_flight = SCHEDULES[schedule].in_flight(count, stage, micro, interleave)
            limit = part.swap_limit_bytes if part.offloads else 0
            bound += load.peak_bytes(in_flight, limit) - (17 if index else 0)
        assert sum(rank.memory.values()) == rank.peak_bytes <= bound
        assert rank.memory["reserve"] == 17


def test_what_a_split_backward_holds_by_hand() -> None:
    """ZB-H1 on two stages, one row a micro-batch: the second stage defers weight-gradient passes by one micro-batch.

    ::

        stage 1 | F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    """
    parts = [block(moved=100, deferred=30, split_work=7, backward_work=5, weight_seconds=1.0)] * 2
    result = run(parts, stages([0, 1, 2]), schedule="zb-h1")
    assert result.ranks[1].memory["activations"] == 30 + 100
    assert result.ranks[1].memory["workspace"] == 7
    unknown = run(
        [replace(part, deferred=Affine()) for part in parts], stages([0, 1, 2]), schedule="zb-h1"
    )
    assert unknown.ranks[1].memory["activations"] == 200


def test_replicas_that_share_states_step_a_part_and_send_it() -> None:
    """A step moves three copies of a parameter and two of each of two states; four more passes are over gradients."""
    parts = [block(parameter_bytes=1000, largest_bytes=100)]
    link = Link(bytes_per_second=100, latency_seconds=1)
    fields = {
        "optimizer_bytes": 2.0,
        "optimizer_seconds": 0.011,
        "rows": 2,
        "micro": 1,
        "machines": nodes(2, local=link),
    }
    plain = run(parts, stages([0, 1], [2]), **fields)
    shared = run(
        parts, [replace(part, shard_optimizer=True) for part in stages([0, 1], [2])], **fields
    )
    assert plain.ranks[0].memory["optimizer"] == 2000
    # One may get half of the largest parameter more.
    assert shared.ranks[0].memory["optimizer"] == 2000 // 2 + 100
    stepped = 11 * (4 + 7 * 0.55) / 11
    broadcast = 2 * 1 + 1000 / 100
    assert plain.ranks[0].seconds["update"] == pytest.approx(11)
    assert shared.ranks[0].seconds["update"] == pytest.approx(stepped + broadcast)
    alone = run(
        parts,
        [replace(part, shard_optimizer=True) for part in stages([0, 1])],
        **{**fields, "machines": nodes(1)},
    )
    assert alone.ranks[0].memory["optimizer"] == 2000


def test_what_is_not_trained_has_neither_gradients_nor_states() -> None:
    link = Link(bytes_per_second=1, latency_seconds=0)
    parts = [block(parameter_bytes=1000, frozen_bytes=900, largest_bytes=50)]
    fields = {
        "optimizer_bytes": 2.0,
        "master_bytes": 1.0,
        "optimizer_seconds": 0.01,
        "rows": 2,
        "micro": 1,
        "machines": nodes(2, local=link),
    }
    plain = run(parts, stages([0, 1], [2]), **fields).ranks[0]
    held = ("parameters", "gradients", "optimizer", "master")
    assert [plain.memory[term] for term in held] == [1000, 100, 200, 100]
    assert plain.seconds["update"] == pytest.approx(100 * 0.01)
    small = [block(parameter_bytes=100, largest_bytes=50)]
    alike = run(small, stages([0, 1], [2]), **fields).ranks[0]
    assert plain.seconds == alike.seconds
    assert plain.seconds["reduce"] > 90
    nothing = [block(parameter_bytes=1000, frozen_bytes=1000)]
    still = run(nothing, stages([0, 1], [2]), **fields).ranks[0]
    assert [still.memory[term] for term in held] == [1000, 0, 0, 0]
    offloaded = [
        replace(part, optimizer_offload=1.0, parameter_offload=1.0) for part in stages([0, 1])
    ]
    gone = run(parts, offloaded, **{**fields, "machines": nodes(1)}).ranks[0]
    assert [gone.memory[term] for term in held] == [0, 0, 0, 0]
    assert gone.memory["staging"] == 1000 + 100 + 300, (
        "the block, its gradients, states that are stepped"
    )
    # Weights, gradients, two states and a master; of the block, what is new beside what is old; pages.
    assert gone.tier_peak_bytes <= 1000 + 100 + 300 + 1000 + 100 + (1000 + 100 + 300) // 128
    half = [replace(part, parameter_offload=0.5) for part in offloaded]
    parted = run(parts, half, **{**fields, "machines": nodes(1)}).ranks[0]
    assert parted.memory["parameters"] == 500
    assert parted.memory["gradients"] == 100, "all that is trained may be in the other half"


def test_replicas_hold_one_copy_of_the_offloaded_states() -> None:
    parts, kept = [block(parameter_bytes=12800, largest_bytes=128)], []
    for replicas in (1, 2, 4):
        offloaded = [replace(part, optimizer_offload=1.0) for part in stages([0, 1], [replicas])]
        kept.append(
            run(parts, offloaded, rows=4, micro=1, machines=nodes(replicas))
            .ranks[0]
            .tier_peak_bytes
        )
    states = [25600, 25600 // 2 + 128, 25600 // 4 + 192]
    assert kept == [size + size // 128 for size in states]
