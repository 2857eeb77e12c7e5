"""Measure how much offloading slows down a block: its activations are offloaded and read back, as in a run.

The profile stores the additional seconds of the block's forward and backward, without waits for transfers. There are
two causes: hooks and the swap manager's bookkeeping cost time per tensor, and threads that copy share memory, caches
and the interpreter lock with the computing thread.
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
    """Offloads the activations of one block and reads them back, for a caller that measures the block's seconds."""

    def __init__(self, manager: SwapManager, selector: Selector, copies: CopyEngine) -> None:
        self._manager, self._selector, self._micro = manager, selector, 0
        self._copies = copies

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the saved-tensor hooks for one forward of the block. The swap manager counts it as one micro-batch."""
        self._micro += 1
        return offloading(self._manager, self._selector, self._micro)

    def bring_back(self) -> None:
        """Wait until all activations are written, prefetch them, and wait for the device.

        After this, the block's backward waits for no transfer. Raises :class:`SwapError` if a write fails or takes too
        long.
        """
        until = time.monotonic() + _WRITE_SECONDS
        while not self._manager.all_written():
            if time.monotonic() > until:
                raise SwapError(
                    f"measuring offload: a block's activations were not written within {_WRITE_SECONDS:.0f} s"
                )
            time.sleep(1e-4)
        self._manager.fetch(self._micro)
        self._copies.synchronize()

    @property
    def moved_bytes(self) -> int:
        """Bytes of activations in the store now."""
        return self._manager.stored_bytes

    @property
    def stall_seconds(self) -> float:
        """Seconds that the computing thread has waited for transfers so far."""
        return self._manager.stall_seconds


@dataclass(frozen=True)
class OffloadBenchmarks:
    """Creates benchmarks in the offload tier of a run, with its settings.

    Swap files are in a temporary folder in ``directory`` (or its nearest existing parent), because a swap folder
    belongs to one run.
    """

    tier: str
    config: SwapConfig
    directory: Path

    @contextlib.contextmanager
    def of(self, block: nn.Module, moved: int, device: torch.device) -> Iterator[OffloadBenchmark]:
        """A context with the benchmark of ``block``.

        ``moved`` is the bytes of saved activations that may be offloaded.
        """
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
