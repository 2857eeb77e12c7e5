"""Offload micro-benchmark: offloads one block's saved activations and reads them back, as in a run.

From it a profile gets the seconds by which offloading slows a block's computing down, without waits for transfers.
Hooks and the manager's bookkeeping cost time per tensor. Threads that copy share memory, caches and the interpreter's
lock with the computing thread.
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

_SPARE_BYTES = 16 * 2**20  # in the store beyond two micro-batches: every slot begins at a page
_WRITE_SECONDS = 10.0  # limit for writing one block's activations on any disk


class OffloadBenchmark:
    """The benchmark of one block."""

    def __init__(self, manager: SwapManager, selector: Selector, copies: CopyEngine) -> None:
        self._manager, self._selector, self._micro = manager, selector, 0
        self._copies = copies

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the hooks context for the block's forward. Each context counts as one micro-batch of the swap
        manager."""
        self._micro += 1
        return offloading(self._manager, self._selector, self._micro)

    def bring_back(self) -> None:
        """Wait until all activations are written, prefetch them, and synchronize the device, so that later waits are
        not measured as computing."""
        until = time.monotonic() + _WRITE_SECONDS
        while self._manager.resident_bytes > 0:
            if time.monotonic() > until:
                raise SwapError(
                    f"measuring offload: a block's activations were not written within {_WRITE_SECONDS:.0f} s"
                )
            time.sleep(1e-4)
        self._manager.fetch(self._micro)
        self._copies.synchronize()

    @property
    def moved_bytes(self) -> int:
        """Bytes that the store holds now."""
        return self._manager.stored_bytes

    @property
    def stall_seconds(self) -> float:
        """Seconds that training has waited for transfers so far."""
        return self._manager.stall_seconds


@dataclass(frozen=True)
class OffloadBenchmarks:
    """Creates benchmarks in the tier of a run, with its settings. Their swap files are in a temporary folder in
    ``directory`` (or its nearest existing parent), because a swap folder belongs to one run."""

    tier: str
    config: SwapConfig
    directory: Path

    @contextlib.contextmanager
    def of(self, block: nn.Module, moved: int, device: torch.device) -> Iterator[OffloadBenchmark]:
        """A context with the benchmark of ``block``, which saves ``moved`` bytes that may be offloaded."""
        capacity, config = 2 * moved + _SPARE_BYTES, replace(self.config, directory="auto")
        with self._folder() as folder:
            copies = copies_for(device)
            store = config.open_store(self.tier, capacity, copies, folder)
            manager = SwapManager(store, limit_bytes=capacity)
            try:
                yield OffloadBenchmark(
                    manager,
                    Selector(
                        [*block.parameters(), *block.buffers()], config.smallest_bytes(device.type)
                    ),
                    copies,
                )
            finally:
                manager.close()

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        above = existing_parent(self.directory)
        try:
            made = tempfile.TemporaryDirectory(prefix="parallax-benchmark-", dir=above)
        except OSError as error:
            raise ConfigError(
                f"cannot write in {above} ({error.strerror}): name another folder (swap.directory, run directory)"
            ) from error
        with made as name:
            yield Path(name)
