"""Offloading on trial: one block's saved activations go below the device and come back, as they do in a run.

A profile says with it how much longer a block computes where what it saves is offloaded, beside waiting for transfers:
hooks and the manager's books take time for each tensor, and threads that copy share memory, caches and the
interpreter's lock with the thread that computes.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from parallax.common.files import existing_parent
from parallax.errors import ConfigError, SwapError
from parallax.machine.device import CopyEngine, copies_for
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.config import SwapConfig

_ROOM = 16 * 2**20  # bytes in the store beyond two trials: every place begins at a page
_PATIENCE = 10.0  # seconds in which what one block saves has been written, whatever the disk


class Trial:
    """What one block saves, on its way."""

    def __init__(self, manager: SwapManager, selector: Selector, copies: CopyEngine) -> None:
        self._manager, self._selector, self._micro = manager, selector, 0
        self._copies = copies

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which the block runs forward; each time is a micro-batch of its own."""
        self._micro += 1
        return offloading(self._manager, self._selector, self._micro)

    def bring_back(self) -> None:
        """Wait until all that was saved has left, then bring it back, and wait for the device: its waits would be taken
        for work."""
        until = time.monotonic() + _PATIENCE
        while self._manager.resident_bytes > 0:
            if time.monotonic() > until:
                raise SwapError(
                    f"offloading on trial: what a block saved was not written within {_PATIENCE:.0f} s"
                )
            time.sleep(1e-4)
        self._manager.fetch(self._micro)
        self._copies.synchronize()

    @property
    def moved_bytes(self) -> int:
        """Bytes that lie in the store now."""
        return self._manager.stored_bytes

    @property
    def stall_seconds(self) -> float:
        """How long anyone has waited for transfers so far."""
        return self._manager.stall_seconds


@dataclass(frozen=True)
class Trials:
    """Trials in the tier and with the settings that a run would use, below or beside ``directory``: a swap folder
    belongs to one run."""

    tier: str
    config: SwapConfig
    directory: Path

    @contextlib.contextmanager
    def of(self, block: nn.Module, moved: int, device: torch.device) -> Iterator[Trial]:
        """A trial of ``block``, which saves ``moved`` bytes that may leave."""
        room, here = 2 * moved + _ROOM, replace(self.config, directory="auto")
        with self._folder() as folder:
            copies = copies_for(device)
            store = here.open_store(self.tier, room, copies, folder)
            manager = SwapManager(store, limit_bytes=room, policy=here.policy())
            try:
                yield Trial(
                    manager,
                    Selector(
                        [*block.parameters(), *block.buffers()], here.smallest_bytes(device.type)
                    ),
                    copies,
                )
            finally:
                manager.close()

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        above = existing_parent(self.directory)
        try:
            made = tempfile.TemporaryDirectory(prefix="parallax-trial-", dir=above)
        except OSError as error:
            raise ConfigError(
                f"cannot write in {above} ({error.strerror}): name another folder (swap.directory, run directory)"
            ) from error
        with made as name:
            yield Path(name)
