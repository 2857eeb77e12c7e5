"""Whose fault it is that no plan fits."""

from __future__ import annotations

import contextlib

import pytest

from parallax.errors import InfeasiblePlan, UnfitHostError
from parallax.nodes.places import Nodes
from parallax.run.nodes import Joined
from parallax.run.processes.together import _name_smallest_host
from tests.unit.plan.simulated import nodes

MIB = 2**20
NODES = Nodes(0, ("a", "b", "c"), (0, 0, 1, 2), ("a", "a", "b", "c"))


@pytest.mark.parametrize(
    ("megabytes", "unfit"),
    [
        ((100, 50, 100), ["b"]),
        ((100, 60, 50), ["c"]),  # the others may be too little, too: one at a time
        ((40, 100, 100), ["a"]),
        ((100, 95, 91), []),  # what is free differs a little
        ((100, 100, 100), []),
    ],
)
def test_the_host_with_the_least_memory_is_unfit(
    megabytes: tuple[int, int, int], unfit: list[str]
) -> None:
    joined = Joined(nodes(2, 1, 1), (), tuple(each * MIB for each in megabytes))
    error = InfeasiblePlan("no plan fits 50.0 MiB per device")
    expected = pytest.raises(UnfitHostError) if unfit else contextlib.nullcontext()
    with expected as caught:
        _name_smallest_host(error, joined, NODES)
    found = caught.value.why if caught is not None else {}
    assert [*found] == unfit
    for host, why in found.items():
        assert f"{host} has {min(megabytes)}.0 MiB for each device" in why
        assert why.endswith(f"up to {max(megabytes)}.0 MiB; with it no plan fits: {error}")
