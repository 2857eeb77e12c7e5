"""The advice in error messages of offload tiers, which differs between training by a plan and ``parallax.swap``."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.plan.tier import Tier


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Advice for error messages of offload tiers.

    ``full``       advice for a full tier. Its placeholder ``{key}`` is replaced by the setting in ``cluster`` that
                   limits the tier's capacity, and ``{folder}`` by the field ``folder`` if the tier uses files.
    ``folder``     the text for the placeholder ``{folder}``
    ``directory``  advice for an unusable folder
    ``pinning``    advice for host memory that cannot be pinned
    """

    full: str
    folder: str = ""
    directory: str
    pinning: str

    def when_full(self, tier: Tier) -> str:
        """Return the advice for the case that ``tier`` is full."""
        return self.full.format(key=tier.key, folder="" if tier.in_ram else self.folder)


_LOCKED = "raise the limit of locked memory (ulimit -l)"

ENGINE = Remedies(
    full="raise the tier's capacity (cluster.{key})",
    directory="set swap.directory",
    pinning=f"lower cluster.host_memory, {_LOCKED}, or set swap.tier=disk",
)
SCOPE = Remedies(
    full="raise tier_bytes, {folder}or raise limit to offload less",
    folder="set directory to a folder on a larger disk, ",
    directory="set directory",
    pinning=f"lower tier_bytes, {_LOCKED}, or set tier=disk",
)
