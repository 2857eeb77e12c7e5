"""What an allocator loses beside transient bytes, and the transient bytes that fit beside what it loses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.plan.analytic.catalog import GAP_LIMIT, GAP_TENSORS, CatalogClusterConfig
from parallax.plan.cost.allocator import Gaps
from parallax.plan.cost.stage import load_stage, passing_bytes, rank_memory
from parallax.plan.plan import Directive
from tests.unit.plan_fakes import block, cluster, profile

SHARES = st.floats(0, 0.9)
BYTES = st.integers(0, 2**40)


@given(share=SHARES, limit=st.floats(0, 2), most=BYTES, transient=BYTES, spare=BYTES)
def test_what_fits_is_what_is_not_lost(
    share: float, limit: float, most: int, transient: int, spare: int
) -> None:
    gaps = Gaps(share, most, limit)
    assert gaps.lost_each(np.array([transient])) == [gaps.lost(transient)]
    held = transient + gaps.lost(transient)
    assert gaps.capacity(held) == pytest.approx(transient, abs=1, rel=1e-9)
    more = gaps.more(transient, spare)
    assert transient + more + gaps.lost(transient + more) == pytest.approx(
        held + spare, abs=2, rel=1e-9
    )


def test_holes_are_so_many_tensors_but_no_more_than_a_share_of_what_is_freed() -> None:
    device = cluster(1, gap_tensors=10.0, gap_limit=0.5).devices[0]
    cost = block(moved=100, input=10, output=0)
    for blocks, lost in ((1, 50), (4, 100)):
        load = load_stage(profile([cost] * blocks), 0, (Directive.KEEP,) * blocks, 1, device=device)
        memory = load.memory(1, 0)
        assert memory["allocator"] == lost
        assert sum(memory.values()) == load.peak_bytes(1, 0)


def test_stages_of_one_rank_share_their_holes() -> None:
    device = cluster(1, gap_tensors=10.0, gap_limit=0.5).devices[0]
    loads = [
        load_stage(
            profile([block(moved=1000, input=size, output=0)]),
            0,
            (Directive.KEEP,),
            1,
            device=device,
        )
        for size in (10, 20)
    ]
    assert rank_memory([(load, 1, 0) for load in loads])["allocator"] == 200


def test_a_model_with_large_tensors_between_blocks_loses_a_share() -> None:
    """A device of the catalog refused 32 images that a V100 of 32 GB trains: it counted 113 tensors between two blocks,
    each larger than what a block of a convolutional net saves."""
    device = CatalogClusterConfig(device="v100", devices=1).build(dtype="fp32").devices[0]
    net = profile([block(moved=2**28, input=2**29, output=2**29)] * 16)
    memory = load_stage(net, 0, (Directive.KEEP,) * 16, 1, device=device).memory(1, 0)
    assert memory["allocator"] == pytest.approx(GAP_LIMIT * passing_bytes(memory), abs=1)
    assert memory["allocator"] < GAP_TENSORS * 2**29 / 10
