"""How a store is opened in each tier, and how a tier of one's own becomes known.

A tier is what the planner, the machine and messages have to know of a place (:class:`parallax.plan.tier.Tier`), and a
function that opens a store there. Both are registered together, so a new tier is one file::

    FAST = Tier(name="fast", key="disk", shared=True, ...)

    def open_fast(asked: StoreRequest) -> Store:
        return DiskStore(Path("/fast"), asked.capacity, asked.copies, threads=asked.threads, tier=FAST)

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
    """What a store of one rank is opened with: its ``capacity`` in bytes, who copies, and for tiers of files the
    ``directory``, how many ``threads`` write and as many read, and by what ``delay`` transfers are held up.
    ``remedies``: what whoever reads its errors can set. ``slab_bytes``: of memory, what is allocated at one time; 0:
    all of it at once, for who knows what he needs."""

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
    """A tier that has no files in it."""


class _Opener(NamedTuple):
    open: OpenStore
    check: CheckFolder


def open_store(asked: StoreRequest) -> Store:
    """The store; raises :class:`PlanError` for a tier that holds nothing."""
    if asked.tier.name not in _OPENERS:
        raise PlanError(
            f"tier {printable(asked.tier.name)} holds nothing, and the plan puts data there: plan with swap.tier=auto"
        )
    return _OPENERS[asked.tier.name].open(asked)


def register_tier(tier: Tier, opener: OpenStore, check: CheckFolder = _any_folder) -> None:
    """Make a tier of one's own known as ``swap.tier=name``, and in plans. ``opener`` opens the store of one rank;
    ``check`` raises :class:`SwapError` where it could not, before anything moves.

    Raises :class:`PlanError` where the name is taken.
    """
    if tier.name in TIERS or tier.name == AUTO:
        raise PlanError(f"tier {printable(tier.name)}: there is one of that name; choose another")
    TIERS[tier.name] = tier
    _OPENERS[tier.name] = _Opener(opener, check)


def check_tier_opens(tier: Tier, directory: Path, remedies: Remedies) -> None:
    """Raise :class:`SwapError` now where files in ``directory`` could not be opened later, in the middle of a step."""
    _OPENERS[tier.name].check(directory, remedies)


def open_host(asked: StoreRequest) -> Store:
    """In host memory."""
    return HostStore(
        asked.capacity,
        asked.copies,
        asked.remedies,
        tier=asked.tier,
        slab_bytes=asked.slab_bytes,
    )


def open_disk(asked: StoreRequest) -> Store:
    """In files."""
    return DiskStore(
        asked.directory,
        asked.capacity,
        asked.copies,
        threads=asked.threads,
        delay=asked.delay,
        remedies=asked.remedies,
        tier=asked.tier,
    )


_OPENERS: dict[str, _Opener] = {
    HOST.name: _Opener(open_host, _any_folder),
    DISK.name: _Opener(open_disk, check_directory),
}
