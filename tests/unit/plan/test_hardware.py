"""The tables of devices and links: complete, sane against each other, and clear about unknown names."""

from __future__ import annotations

import math

import pytest

from parallax.errors import ConfigError
from parallax.plan.analytic.hardware import (
    DEVICE_KINDS,
    DTYPES,
    LINK_KINDS,
    DeviceKind,
    LinkKind,
    device_kind,
    link_kind,
)


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=DEVICE_KINDS)
def test_devices_are_complete(kind: DeviceKind) -> None:
    assert DEVICE_KINDS[kind.name] is kind
    assert set(kind.flops) == set(DTYPES)
    assert all(0 < kind.peak(dtype) < math.inf for dtype in DTYPES)
    assert 0 < kind.context_bytes < kind.memory_bytes / 4
    assert {kind.host_link, kind.device_link} <= set(LINK_KINDS)
    assert any(character.isdigit() for character in kind.source), "a source has a year"


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=DEVICE_KINDS)
def test_narrow_numbers_are_not_slower(kind: DeviceKind) -> None:
    assert kind.peak("fp64") <= kind.peak("fp32") <= kind.peak("tf32") <= kind.peak("fp16")


@pytest.mark.parametrize("kind", LINK_KINDS.values(), ids=LINK_KINDS)
def test_links_are_complete(kind: LinkKind) -> None:
    assert LINK_KINDS[kind.name] is kind
    assert 0 < kind.bytes_per_second <= kind.raw_bytes_per_second < math.inf
    assert 0 < kind.latency_seconds < 1e-3
    assert kind.source
    assert kind.link().seconds(1e9) == pytest.approx(
        kind.latency_seconds + 1e9 / kind.bytes_per_second
    )


def test_published_figures() -> None:
    assert device_kind("a100-80").peak("bf16") == 312e12
    assert device_kind("h200").bytes_per_second == 4.8e12
    assert link_kind("nvlink3").raw_bytes_per_second == 300e9
    assert [LINK_KINDS[f"pcie{n}"].raw_bytes_per_second for n in (3, 4, 5)] == [
        15.75e9,
        31.5e9,
        63e9,
    ]


def test_devices_without_nvlink_talk_over_the_host() -> None:
    assert {name for name, kind in DEVICE_KINDS.items() if kind.device_link == kind.host_link} == {
        "l4",
        "rtx4090",
    }


def test_unknown_names_get_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"device kind=a100-8.*did you mean 'a100-80'"):
        device_kind("a100-8")
    with pytest.raises(ConfigError, match=r"link kind=nvlink9.*did you mean 'nvlink"):
        link_kind("nvlink9")
    with pytest.raises(ConfigError, match=r"dtype=fp8"):
        device_kind("h100").peak("fp8")


def test_figures_that_cannot_be_are_refused() -> None:
    known = {name: getattr(DEVICE_KINDS["l4"], name) for name in DeviceKind.__dataclass_fields__}
    with pytest.raises(ConfigError, match="must fit the memory"):
        DeviceKind(**{**known, "context_bytes": known["memory_bytes"]})
    with pytest.raises(ConfigError, match="flops must name"):
        DeviceKind(**{**known, "flops": {"fp32": 1.0}})
    with pytest.raises(ConfigError, match=r"reached=1\.5"):
        LinkKind(
            name="x", raw_bytes_per_second=1.0, reached=1.5, latency_seconds=0.0, source="none"
        )
