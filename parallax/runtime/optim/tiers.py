"""The stores below one rank: how large each must be, and their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from parallax.machine.device import CopyEngine
from parallax.model.describe import Chain
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.plan.tier import tier_named
from parallax.runtime.stage import first_below
from parallax.swap.config import SwapConfig
from parallax.swap.parameters.streamed import StreamedParameters
from parallax.swap.stores.store import Store

_PAGE = 4096  # bytes; every place in a store begins at one


class Tiers:
    """Opens stores below one rank, and closes them."""

    def __init__(self, tier: str, config: SwapConfig, scratch: Path, copies: CopyEngine) -> None:
        self._tier, self._config, self._scratch, self._copies = tier, config, scratch, copies
        self._opened: list[Store] = []

    def open_store(self, capacity: int) -> Store:
        """A store in the plan's tier."""
        store = self._config.open_store(self._tier, capacity, self._copies, self._scratch)
        self._opened.append(store)
        return store

    def open_states(self, capacity: int) -> Store | None:
        """A store for optimizer states; none where they are stepped where they lie."""
        return None if tier_named(self._tier).steps else self.open_store(capacity)

    def open_stream(
        self,
        chain: Chain,
        indices: Sequence[int],
        share: float,
        blocks: Iterable[Iterable[nn.Parameter]],
    ) -> StreamedParameters:
        """A store for ``share`` of the parameters of ``indices``, which ``blocks`` gives, and for their gradients. New
        ones are written before the old are given up."""
        described = [list(chain.blocks[index].module.parameters()) for index in indices]
        sizes = [
            sum(parameter.numel() for parameter in block) * chain.dtype.itemsize
            for block in described
        ]
        first = first_below(sizes, share)
        chunks = sum(
            size // STATE_BUCKET_BYTES + 1 + len(b)
            for size, b in zip(sizes[first:], described[first:])
        )
        # With gradients; of two bytes there are full-precision masters.
        copies = 4 if chain.dtype.itemsize == 2 else 2
        capacity = copies * (sum(sizes[first:]) + _PAGE * chunks) + 2 * max(sizes[first:])
        return StreamedParameters(blocks, self.open_store(capacity), verify=self._config.verify)

    def close(self) -> None:
        """Give everything back."""
        for store in self._opened:
            store.close()
