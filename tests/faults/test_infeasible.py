"""Models, and single blocks, larger than all there is: one line with the smallest fix; it helps, and less does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import one_line

Called = Callable[..., tuple[int, str, str]]
DEVICES = 2
GPT = [
    *("cluster=dgx_a100", f"cluster.devices={DEVICES}", "trainer.global_batch=8"),
    *("model=transformer", "model.heads=8", "model.sequence=128"),
]
ALL_TIERS = ["model.layers=8", "model.hidden=1024"]
ONE_BLOCK = ["model.layers=2", "model.hidden=4096"]


def refused(called: Called, here: Path, *settings: str) -> str:
    code, _, err = called("plan", *GPT, *settings)
    assert code == 2
    assert list(here.glob("plan*")) == []
    return one_line(err)


@pytest.mark.parametrize(
    "settings",
    [
        [*ALL_TIERS, "cluster.host_memory=1GiB", "cluster.device_memory=800MiB"],
        [*ONE_BLOCK, "cluster.device_memory=1GiB"],
    ],
    ids=["all tiers", "one block"],
)
def test_more_memory_of_the_devices(here: Path, called: Called, settings: list[str]) -> None:
    line = refused(called, here, *settings)
    found = re.search(
        r"these changes fit: cluster.device_memory=(\d+)MiB \([\d,]+ bytes more\)", line
    )
    assert found, line
    less = refused(called, here, *settings, f"cluster.device_memory={int(found[1]) - 1}MiB")
    assert f"cluster.device_memory={found[1]}MiB" in less
    code, _, err = called("plan", *GPT, *settings, f"cluster.device_memory={found[1]}MiB")
    assert (code, err) == (0, "")


@pytest.mark.faults
def test_more_of_the_requested_tier(here: Path, called: Called) -> None:
    """Optimizer states are requested on a host whose memory is too small, and the rest does not fit the devices."""
    requested = [*ALL_TIERS, "plan.optimizer=host"]
    line = refused(
        called, here, *requested, "cluster.host_memory=1GiB", "cluster.device_memory=800MiB"
    )
    found = re.fullmatch(
        r"parallax: 512.0 MiB per device in tier host cannot hold the bytes that must be offloaded; these changes fit: "
        r"cluster.host_memory=(\d+)MiB (cluster.device_memory=\d+MiB) \((\d+)MiB per device, [\d,]+ bytes more\)",
        line,
    )
    assert found, line
    memory = found[2]
    assert int(found[1]) == DEVICES * int(found[3])
    refused(called, here, *requested, memory, f"cluster.host_memory={int(found[1]) - DEVICES}MiB")
    code, _, err = called("plan", *GPT, *requested, memory, f"cluster.host_memory={found[1]}MiB")
    assert (code, err) == (0, "")
