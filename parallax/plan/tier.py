"""Offload tiers: memory or disk for offloaded data, and their properties.

Plans and device files give a tier by its name. All other properties come from the :class:`Tier` of that name, so that
no code compares names: the planner reads ``shared`` and ``steps``, the machine reads ``bandwidth`` and ``free_bytes``,
and stores are opened by tier (:mod:`parallax.swap.stores.tiers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parallax.common.files import disk_free_bytes
from parallax.errors import ConfigError, PlanError, check_choice, printable

AUTO = "auto"
ROOM_KEYS = ("host_memory", "disk")  # keys of `cluster` that limit the bytes of tiers


class Bandwidths(Protocol):
    """Measured bandwidths of a machine, in bytes per second (see :class:`parallax.machine.probes.Probes`)."""

    @property
    def directory(self) -> str:
        """The folder for swap files."""

    @property
    def disk_write(self) -> float:
        """Bytes per second of writes to a file, through the page cache."""

    @property
    def disk_read(self) -> float:
        """Bytes per second of reads from a file, through the page cache."""

    @property
    def host_write(self) -> float:
        """Bytes per second of copies from a device to pinned memory of its host."""

    @property
    def host_read(self) -> float:
        """Bytes per second of copies from pinned memory of the host to its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The properties of one offload tier.

    ``name``               the tier's name in ``swap.tier``, plans and devices
    ``key``                the setting in ``cluster`` that limits the tier's bytes on a node, named in errors; empty if
                           the tier cannot hold bytes
    ``shared``             the ranks of a node share the tier's bandwidth; otherwise each device has its own link to its
                           host
    ``steps``              an optimizer can step states in the tier; otherwise states are fetched to the device to be
                           stepped
    ``copied_by_threads``  threads of the rank copy the bytes and use the rank's cores; otherwise the device copies
    ``in_ram``             the bytes are in the RAM of the host, so a device that is RAM itself cannot offload to this
                           tier
    ``link``               the catalog's link to the tier; empty means the device's link to its host
    ``bandwidth``          function that returns the bytes per second of a write and of a read on a measured machine
    ``free_bytes``         function that returns the tier's free bytes, given the folder for swap files and the free
                           bytes of RAM
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
        """Return whether the tier can hold bytes. Only the tier ``none`` cannot."""
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
    bandwidth=DISK.bandwidth,  # unused: the link carries nothing
    free_bytes=lambda folder, memory: 0,
)

TIERS: dict[str, Tier] = {tier.name: tier for tier in (HOST, DISK, NONE)}
"""All registered tiers, by name."""


def tier_named(name: str) -> Tier:
    """Return the tier of this name. Raises :class:`PlanError` if none is registered."""
    if name not in TIERS:
        raise PlanError(
            f"tier {printable(name)} is not registered; registered are {', '.join(TIERS)}; call parallax.register_tier"
        )
    return TIERS[name]


def usual_tier(*, device_is_ram: bool) -> Tier:
    """Return the tier that ``auto`` means: host memory, or the disk if the device itself is RAM (a CPU)."""
    return DISK if device_is_ram else HOST


def choose_tier(key: str, requested: str, *, device_is_ram: bool) -> Tier:
    """Return the tier that the setting ``key`` requests.

    Raises :class:`ConfigError` for an unknown name, and for a tier in RAM if the device itself is RAM.
    """
    check_tier(key, requested)
    if requested == AUTO:
        return usual_tier(device_is_ram=device_is_ram)
    found = TIERS[requested]
    if device_is_ram and found.in_ram:
        raise ConfigError(
            f"{key}={found.name}: on a CPU the RAM is the device itself; use {key}={DISK.name}"
        )
    return found


def check_tier(key: str, requested: str, *, without: Tier | None = None) -> None:
    """Raise :class:`ConfigError` unless ``requested`` is auto or the name of a tier other than ``without``.

    The error names the setting ``key``.
    """
    check_choice(
        key, requested, [AUTO, *(name for name, tier in TIERS.items() if tier is not without)]
    )
