"""Which devices the ranks of several nodes have, told from each other."""

from __future__ import annotations

import pytest

from parallax.machine.accelerators import RanksDevices
from parallax.nodes.places import Nodes


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ([("cuda", "a"), ("cuda", "b"), ("cuda", "c")], RanksDevices("cuda", 2, 3)),
        ([("cuda", "a"), ("cuda", "a"), ("cuda", "c")], RanksDevices("cuda", 1, 2)),
        ([("cuda", "a"), ("xpu", "b"), ("cuda", "c")], None),
        ([("cuda", "a"), ("cuda", ""), ("cuda", "c")], None),
        ([("", "")] * 3, None),
        ([], None),
    ],
    ids=["one each", "two share one", "two kinds", "one without a name", "CPUs", "nobody asked"],
)
def test_devices_of_ranks(devices: list[tuple[str, str]], found: RanksDevices | None) -> None:
    nodes = Nodes(0, ("a", "b"), (0, 0, 1), ("a", "a", "b"), tuple(devices))
    assert nodes.ranks_devices == found
