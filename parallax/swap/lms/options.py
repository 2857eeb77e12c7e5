"""The checked arguments of ``parallax.swap``, with device, offload tier and folder determined."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.common.signals import uninterrupted
from parallax.errors import ConfigError
from parallax.machine.accelerators import known_kinds
from parallax.machine.device import copies_for, no_delay
from parallax.machine.host import available_memory
from parallax.plan.tier import NONE, Tier, check_tier, choose_tier
from parallax.swap.activations.policy import Policy
from parallax.swap.lms.limit import held_tensors
from parallax.swap.stores.forks import call_after_fork
from parallax.swap.stores.remedies import SCOPE
from parallax.swap.stores.slots import SlotMap, StoreSlot
from parallax.swap.stores.store import Pending, Store
from parallax.swap.stores.tiers import StoreRequest, check_tier_opens, open_store
from parallax.swap.verify import Delays

_HOST_LIMITS = 4  # capacity of a host tier with tier_bytes=auto, in limits
_SLAB_BYTES = 2**28  # pinned at one time, because few loops use the whole capacity


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked arguments of :func:`swap`. None stands for auto.

    ``limit``, ``tier_bytes``, ``minimum_bytes`` and ``piece_bytes`` are in bytes.
    """

    limit: int | None
    policy: Policy
    device: torch.device
    tier: Tier
    directory: Path
    tier_bytes: int | None
    threads: int
    minimum_bytes: int
    piece_bytes: int
    parameters: bool
    verify: bool

    def __post_init__(self) -> None:
        if self.tier_bytes is not None and self.tier_bytes < self.minimum_bytes:
            raise ConfigError(
                f"tier_bytes={self.tier_bytes}: smaller than the smallest tensor that is offloaded "
                f"(minimum_bytes={self.minimum_bytes}); raise tier_bytes"
            )

    def check_tier(self) -> None:
        """Raise :class:`SwapError` if the offload tier could not be opened later, in the middle of a step."""
        check_tier_opens(self.tier, self.directory, SCOPE)

    def open_store(self, limit: int, parameter_bytes: int = 0) -> Store:
        """Open a store in the offload tier.

        ``limit`` is the limit of device memory in bytes. The store also has capacity for ``parameter_bytes`` of
        weights, with their gradients and optimizer states.
        """
        delay = Delays() if self.verify else no_delay
        return open_store(
            StoreRequest(
                tier=self.tier,
                capacity=self.tier_bytes or self._usual_bytes(limit + parameter_bytes),
                copies=copies_for(self.device, delay, SCOPE.pinning),
                directory=self.directory,
                threads=self.threads,
                delay=delay,
                remedies=SCOPE,
                slab_bytes=_SLAB_BYTES,
            )
        )

    def _usual_bytes(self, limit: int) -> int:
        """Return the capacity of the offload tier, in bytes, for ``tier_bytes=auto``. ``limit`` is the limit of device
        memory.
        """
        free = self.tier.free_bytes(self.directory, available_memory())
        return min(free // 2, _HOST_LIMITS * limit) if self.tier.in_ram else free * 8 // 10


def device_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> torch.device:
    """Return the device of the model and the optimizers. Raises an error if they are on several devices."""
    found = {tensor.device for tensor in held_tensors(model, optimizers)}
    if len(found) > 1 or {device.type for device in found} - {"cpu", *known_kinds()}:
        names = ", ".join(sorted(str(device) for device in found))
        raise ConfigError(
            f"model {type(model).__name__} is on {names}: swap limits one device, which may be: cpu,  "
            f"{', '.join(known_kinds())}"
        )
    return found.pop() if found else torch.device("cpu")


def tier_for(tier: str, device: torch.device) -> Tier:
    """Return the offload tier named ``tier`` for ``device``."""
    check_tier("tier", str(tier), without=NONE)
    return choose_tier("tier", tier, device_is_ram=device.type == "cpu")


def usual_folder() -> Path:
    """Return the default folder for swap files: in ``/var/tmp`` if possible, because ``/tmp`` is often in memory."""
    large = Path("/var/tmp")
    base = (
        large
        if "TMPDIR" not in os.environ and os.access(large, os.W_OK)
        else Path(tempfile.gettempdir())
    )
    return base / f"parallax-swap-{os.getuid()}"


class LazyStore:
    """A store that is opened at the first write. Without offloading there is no file, thread or pinned memory."""

    def __init__(self, tier: str, open_store: Callable[[], Store]) -> None:
        self.tier, self.slots = tier, SlotMap(0, "the unopened tier")
        self._open: Callable[[], Store] | None = open_store
        self._store: Store | None = None
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock in a forked child, because another thread of the parent may have held it."""
        self._lock = threading.Lock()

    @property
    def waste_bytes(self) -> int:
        return self._store.waste_bytes if self._store is not None else 0

    @uninterrupted()
    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        with self._lock:
            if self._open is not None:
                self._store, self._open = self._open(), None
                self.slots = self._store.slots
        assert self._store is not None
        return self._store.write(data)

    @uninterrupted()
    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        assert self._store is not None
        return self._store.read(slot, target)

    @uninterrupted()
    def free(self, slot: StoreSlot) -> None:
        assert self._store is not None
        self._store.free(slot)

    @uninterrupted()
    def close(self) -> None:
        with self._lock:
            self._open = None
            if self._store is not None:
                self._store.close()
