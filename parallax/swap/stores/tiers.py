"""Open a store in each offload tier, and register custom tiers.

A tier consists of properties for the planner, for machine checks and for messages (:class:`parallax.plan.tier.Tier`),
and of a function that opens a store. Both are registered together, so a new tier is one file::

    FAST = Tier(name="fast", key="disk", shared=True, ...)

    def open_fast(request: StoreRequest) -> Store:
        return DiskStore(Path("/fast"), request.capacity, request.copies, threads=request.threads, tier=FAST)

    register_tier(FAST, open_fast)                # in every process that plans or trains
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from parallax.errors import PlanError, printable
from parallax.machine.device import CopyEngine
from parallax.plan.tier import AUTO, DISK, HOST, TIERS, Tier
from parallax.swap.stores.files import check_directory
from parallax.swap.stores.remedies import Remedies
from parallax.swap.stores.store import DiskStore, HostStore, Store


@dataclass(frozen=True, kw_only=True)
class StoreRequest:
    """Arguments for opening the store of one rank.

    ``capacity``    bytes of the store
    ``copies``      copy engine of the device
    ``directory``   folder for files; used by tiers of files only
    ``threads``     threads that write files, and number of further threads that read; used by tiers of files only
    ``delay``       function that returns the seconds to wait before a transfer; used by tiers of files only
    ``remedies``    advice in error messages
    ``slab_bytes``  bytes of memory to allocate at one time; 0 allocates all at once
    """

    tier: Tier
    capacity: int
    copies: CopyEngine
    directory: Path
    threads: int
    delay: Callable[[], float]
    remedies: Remedies
    slab_bytes: int = 0


OpenStore = Callable[[StoreRequest], Store]
CheckFolder = Callable[[Path, Remedies], None]


def _any_folder(directory: Path, remedies: Remedies) -> None:
    """Accept any folder, for tiers without files."""


class _Opener(NamedTuple):
    open: OpenStore
    check: CheckFolder


def open_store(request: StoreRequest) -> Store:
    """Open the store that ``request`` describes. Raises :class:`PlanError` for a tier that cannot hold data."""
    if request.tier.name not in _OPENERS:
        raise PlanError(
            f"tier {printable(request.tier.name)} holds no data, but the plan offloads to it: plan again with "
            "swap.tier=auto"
        )
    return _OPENERS[request.tier.name].open(request)


def register_tier(tier: Tier, opener: OpenStore, check: CheckFolder = _any_folder) -> None:
    """Register a custom tier, so that ``swap.tier`` and plans can name it.

    ``opener`` opens the store of one rank. ``check`` is called with a folder before any data is offloaded, and raises
    :class:`SwapError` if a store could not be opened in this folder. Raises :class:`PlanError` if the name is taken.
    """
    if tier.name in TIERS or tier.name == AUTO:
        raise PlanError(f"tier {printable(tier.name)}: the name is taken; choose another")
    TIERS[tier.name] = tier
    _OPENERS[tier.name] = _Opener(opener, check)


def check_tier_opens(tier: Tier, directory: Path, remedies: Remedies) -> None:
    """Raise :class:`SwapError`, with advice from ``remedies``, if a store in ``tier`` could not be opened in
    ``directory`` later, in the middle of a step."""
    _OPENERS[tier.name].check(directory, remedies)


def open_host(request: StoreRequest) -> Store:
    """Open a store in host memory."""
    return HostStore(
        request.capacity,
        request.copies,
        request.remedies,
        tier=request.tier,
        slab_bytes=request.slab_bytes,
    )


def open_disk(request: StoreRequest) -> Store:
    """Open a store in a file."""
    return DiskStore(
        request.directory,
        request.capacity,
        request.copies,
        threads=request.threads,
        delay=request.delay,
        remedies=request.remedies,
        tier=request.tier,
    )


_OPENERS: dict[str, _Opener] = {
    HOST.name: _Opener(open_host, _any_folder),
    DISK.name: _Opener(open_disk, check_directory),
}
