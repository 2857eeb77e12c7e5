"""What the reader of a tier's error can set, in the words of whoever opened the tier."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.plan.tier import Tier


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """``room``: for a tier that is full, with the ``{key}`` of ``cluster`` that says what it may hold; ``folder`` is
    said before its last words of a tier of files. ``directory``: a folder that does not serve. ``pinning``: host
    memory that cannot be had."""

    room: str
    folder: str = ""
    directory: str
    pinning: str

    def more_room(self, tier: Tier) -> str:
        """For ``tier``, which is full."""
        return self.room.format(key=tier.key, folder="" if tier.in_ram else self.folder)


_LOCKED = "raise the limit of locked memory (ulimit -l)"

ENGINE = Remedies(
    room="give the tier more room (cluster.{key})",
    directory="set swap.directory",
    pinning=f"lower cluster.host_memory, {_LOCKED}, or set swap.tier=disk",
)
SCOPE = Remedies(
    room="raise tier_bytes, {folder}or raise limit so that less has to move",
    folder="set directory to a folder on a larger disk, ",
    directory="set directory",
    pinning=f"lower tier_bytes, {_LOCKED}, or set tier=disk",
)
