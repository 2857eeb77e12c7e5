"""Tiers: where bytes live that are not on a device, and all that anybody has to know of such a place.

A plan names its tier, and so does a device in a file. Whoever needs more than the name asks the :class:`Tier` of that
name here, so that nobody compares names: the planner (who shares the way there, where an optimizer steps), the machine
(how fast it is, how much it holds) and whoever opens a store there (:mod:`parallax.swap.stores.tiers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parallax.common.files import disk_free_bytes
from parallax.errors import ConfigError, PlanError, check_choice, printable

AUTO = "auto"
ROOM_KEYS = ("host_memory", "disk")  # keys of `cluster` that say what tiers may hold


class Bandwidths(Protocol):
    """Bytes per second that a machine was measured at, see :class:`parallax.machine.probes.Probes`."""

    @property
    def directory(self) -> str:
        """Where swap files would be."""

    @property
    def disk_write(self) -> float:
        """To a file, through the page cache."""

    @property
    def disk_read(self) -> float:
        """From a file, through the page cache."""

    @property
    def host_write(self) -> float:
        """From a device to pinned memory of its host."""

    @property
    def host_read(self) -> float:
        """From pinned memory of its host to a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier.

    ``name``: what ``swap.tier``, plans and devices call it.
    ``key``: which key of ``cluster`` says how many bytes of a node it may hold; errors name it.
    ``shared``: the ranks of a node share its bandwidth; otherwise each device has a way of its own to its host.
    ``steps``: an optimizer steps in it, on states that stay where they are; elsewhere they come up to be stepped.
    ``copied_by_threads``: threads of the rank move the bytes, which takes cores from it; otherwise the device does.
    ``in_ram``: its bytes are in the RAM of the host, so it serves no device that is RAM itself.
    ``link``: which link of the catalog leads there; empty is the device's link to its host.
    ``bandwidth``: bytes per second of a write and of a read on a machine that was measured.
    ``free_bytes``: what it could hold now, of a folder for swap files and the free bytes of the RAM.
    """

    name: str
    key: str
    shared: bool
    steps: bool
    copied_by_threads: bool
    in_ram: bool
    link: str = ""
    bandwidth: Callable[[Bandwidths], tuple[float, float]]
    free_bytes: Callable[[Path, int], int]

    def __post_init__(self) -> None:
        if self.key not in ("", *ROOM_KEYS):
            raise ConfigError(
                f"tier {printable(self.name)}: key={printable(self.key)}; accepted are {', '.join(ROOM_KEYS)}"
            )

    @property
    def exists(self) -> bool:
        """Whether anything can be put there."""
        return bool(self.key)


HOST = Tier(
    name="host",
    key="host_memory",
    shared=False,
    steps=True,
    copied_by_threads=False,
    in_ram=True,
    bandwidth=lambda found: (found.host_write, found.host_read),
    free_bytes=lambda folder, memory: memory,
)
DISK = Tier(
    name="disk",
    key="disk",
    shared=True,
    steps=False,
    copied_by_threads=True,
    in_ram=False,
    link="disk",
    bandwidth=lambda found: (found.disk_write, found.disk_read),
    free_bytes=lambda folder, memory: disk_free_bytes(folder),
)
NONE = Tier(
    name="none",
    key="",
    shared=False,
    steps=False,
    copied_by_threads=False,
    in_ram=False,
    bandwidth=DISK.bandwidth,  # of a link that carries nothing
    free_bytes=lambda folder, memory: 0,
)

TIERS: dict[str, Tier] = {tier.name: tier for tier in (HOST, DISK, NONE)}
"""By name."""


def tier_named(name: str) -> Tier:
    """The tier that a plan or a device names; raises :class:`PlanError` where nobody has registered it."""
    if name not in TIERS:
        raise PlanError(
            f"tier {printable(name)} is not known here: known are {', '.join(TIERS)}; call parallax.register_tier"
        )
    return TIERS[name]


def usual_tier(*, device_is_ram: bool) -> Tier:
    """What ``auto`` means: the host's memory, or the disk where the device itself is RAM (a CPU)."""
    return DISK if device_is_ram else HOST


def choose_tier(key: str, asked: str, *, device_is_ram: bool) -> Tier:
    """The tier of the setting ``key``. Raises :class:`ConfigError` where there is none of that name, or where it would
    put what the device offloads into the same RAM."""
    check_tier(key, asked)
    if asked == AUTO:
        return usual_tier(device_is_ram=device_is_ram)
    found = TIERS[asked]
    if device_is_ram and found.in_ram:
        raise ConfigError(
            f"{key}={found.name}: on a CPU the RAM is the device itself; use {key}={DISK.name}"
        )
    return found


def check_tier(key: str, asked: str, *, without: Tier | None = None) -> None:
    """Raise :class:`ConfigError` unless ``asked`` is auto or the name of a tier other than ``without``."""
    check_choice(key, asked, [AUTO, *(name for name, tier in TIERS.items() if tier is not without)])
