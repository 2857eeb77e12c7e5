"""What the reader of a tier's error can set, in the words of whoever opened the tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """``host_room``, ``disk_room``: a tier that is full. ``directory``: a folder that does not serve. ``pinning``: host
    memory that cannot be had."""

    host_room: str
    disk_room: str
    directory: str
    pinning: str


_LOCKED = "raise the limit of locked memory (ulimit -l)"

ENGINE = Remedies(
    host_room="give the tier more room (cluster.host_memory)",
    disk_room="give the tier more room (cluster.disk)",
    directory="set swap.directory",
    pinning=f"lower cluster.host_memory, {_LOCKED}, or set swap.tier=disk",
)
SCOPE = Remedies(
    host_room="raise tier_bytes, or raise limit so that less has to move",
    disk_room="raise tier_bytes, set directory to a folder on a larger disk, or raise limit so that less has to move",
    directory="set directory",
    pinning=f"lower tier_bytes, {_LOCKED}, or set tier=disk",
)
