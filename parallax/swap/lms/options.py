"""What a scope was asked for, resolved: its device, its tier, its folder, and the store that these mean."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from parallax.errors import ConfigError
from parallax.machine.accelerators import known_kinds
from parallax.machine.device import copies_for, no_delay
from parallax.machine.host import available_memory
from parallax.plan.tier import NONE, Tier, check_tier, choose_tier
from parallax.swap.activations.policy import Policy
from parallax.swap.lms.limit import held_tensors
from parallax.swap.stores.remedies import SCOPE
from parallax.swap.stores.store import Store
from parallax.swap.stores.tiers import StoreRequest, check_tier_opens, open_store
from parallax.swap.verify import Delays

_HOST_LIMITS = 4  # a host tier left at auto may hold so many times the limit
_SLAB_BYTES = 2**28  # of it is pinned at one time: few loops need all that they may have


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :func:`swap` was asked for; None: auto."""

    limit: int | None
    policy: Policy
    device: torch.device
    tier: Tier
    directory: Path
    tier_bytes: int | None
    threads: int
    minimum_bytes: int
    piece_bytes: int
    verify: bool

    def __post_init__(self) -> None:
        if self.tier_bytes is not None and self.tier_bytes < self.minimum_bytes:
            raise ConfigError(
                f"tier_bytes={self.tier_bytes}: smaller than the smallest tensor that moves "
                f"(minimum_bytes={self.minimum_bytes}); raise tier_bytes"
            )

    def check_tier(self) -> None:
        """Raise :class:`SwapError` now where the tier could not be opened later, in the middle of a step."""
        check_tier_opens(self.tier, self.directory, SCOPE)

    def open_store(self, limit: int) -> Store:
        """The tier below ``device``, whose limit is ``limit``."""
        delay = Delays() if self.verify else no_delay
        return open_store(
            StoreRequest(
                tier=self.tier,
                capacity=self.tier_bytes or self._usual_bytes(limit),
                copies=copies_for(self.device, delay, SCOPE.pinning),
                directory=self.directory,
                threads=self.threads,
                delay=delay,
                remedies=SCOPE,
                slab_bytes=_SLAB_BYTES,
            )
        )

    def _usual_bytes(self, limit: int) -> int:
        """What the tier may hold where nobody says."""
        free = self.tier.free_bytes(self.directory, available_memory())
        return min(free // 2, _HOST_LIMITS * limit) if self.tier.in_ram else free * 8 // 10


def device_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> torch.device:
    """The one device that all of it is on."""
    found = {tensor.device for tensor in held_tensors(model, optimizers)}
    if len(found) > 1 or {device.type for device in found} - {"cpu", *known_kinds()}:
        names = ", ".join(sorted(str(device) for device in found))
        raise ConfigError(
            f"model {type(model).__name__} is on {names}: swap keeps the limit of one device: cpu, "
            f"{', '.join(known_kinds())}"
        )
    return found.pop() if found else torch.device("cpu")


def tier_for(tier: str, device: torch.device) -> Tier:
    """The tier below ``device`` that was asked for by name; it must hold something."""
    check_tier("tier", str(tier), without=NONE)
    return choose_tier("tier", tier, device_is_ram=device.type == "cpu")


def usual_folder() -> Path:
    """Beside the system's other temporary files that may be large: ``/tmp`` is often memory itself."""
    large = Path("/var/tmp")
    base = (
        large
        if "TMPDIR" not in os.environ and os.access(large, os.W_OK)
        else Path(tempfile.gettempdir())
    )
    return base / f"parallax-swap-{os.getuid()}"
