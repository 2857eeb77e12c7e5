"""Open the stores of one rank's offload tier (host memory or disk), each with the capacity that the plan assigns to
it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from parallax.common.units import format_bytes
from parallax.errors import PlanError
from parallax.machine.device import CopyEngine
from parallax.model.describe import Chain
from parallax.plan.plan import STATE_BUCKET_BYTES, StagePlan
from parallax.plan.tier import tier_named
from parallax.runtime.stage import first_offloaded, offloadable
from parallax.swap.config import SwapConfig
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import Store

# Every slot of a store begins at a page; a plan counts bytes of data.
PAGE_BYTES = 4096


class Tiers:
    """Opens stores in the offload ``tier`` for the ``stages`` of one rank on ``device``.

    ``trains`` is False for a rank that only runs forwards. ``divides`` is True if the rank's optimizer may step parts
    of a parameter. ``scratch`` is the folder of swap files.

    Raises :class:`PlanError` if a store needs more bytes than the plan assigns to it. Then the plan was made for
    another model, optimizer or precision, or it was edited.
    """

    def __init__(
        self,
        tier: str,
        stages: Sequence[StagePlan],
        config: SwapConfig,
        scratch: Path,
        copies: CopyEngine,
        device: torch.device,
        *,
        trains: bool = True,
        divides: bool = True,
    ) -> None:
        self._tier, self._stages, self._trains = tier, stages, trains
        self._config, self._scratch, self._copies = config, scratch, copies
        self._device, self._divides = device, divides
        self._opened: list[Store] = []

    def open_activations(self) -> Store:
        """Open the store for offloaded activations."""
        return self._open(sum(stage.tier_bytes for stage in self._stages if stage.offloads))

    def open_states(self, needed: int, slots: int) -> Store | None:
        """Open a store with ``slots`` slots for ``needed`` bytes of optimizer states.

        Return None if the optimizer steps the states directly in the memory of the tier.
        """
        given = sum(stage.state_bytes for stage in self._stages)
        self._check("the optimizer's states", needed, given)
        return None if tier_named(self._tier).steps else self._open(given + PAGE_BYTES * slots)

    def open_stream(
        self,
        chain: Chain,
        indices: Sequence[int],
        share: float,
        blocks: Iterable[Iterable[nn.Parameter]],
    ) -> OffloadedParameters:
        """Open a store for the offloaded parameters of the blocks ``indices``. ``share``: the fraction of these blocks'
        parameters to offload. ``blocks`` yields the parameters to offload, block by block. In training the store also
        holds the gradients and, for one block at a time, new values beside the old ones."""
        described = [
            offloadable(chain, index, chain.blocks[index].module, self._device) for index in indices
        ]
        sizes = [_bytes(block, chain.dtype) for block in described]
        trained = [
            _bytes([p for p in b if p.requires_grad and self._trains], chain.dtype)
            for b in described
        ]
        first = first_offloaded(sizes, share)
        chunks = sum(
            size // STATE_BUCKET_BYTES + 1 + len(b)
            for size, b in zip(sizes[first:], described[first:])
        )
        # Trained parameters have gradients, and those of two bytes have full-precision masters.
        more = 3 if chain.dtype.itemsize == 2 else 1
        needed = sum(sizes[first:]) + more * sum(trained[first:])
        needed += max(sizes[first:], default=0) + max(trained[first:], default=0)
        given = sum(stage.streamed_bytes for stage in self._stages)
        self._check("offloaded parameters", needed, given)
        store = self._open(given + (1 + more) * chunks * PAGE_BYTES)
        return OffloadedParameters(blocks, store, split=self._divides, verify=self._config.verify)

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def _open(self, capacity: int) -> Store:
        store = self._config.open_store(self._tier, capacity, self._copies, self._scratch)
        self._opened.append(store)
        return store

    def _check(self, what: str, needed: int, given: int) -> None:
        if needed > given:
            blocks = " and ".join(f"{stage.start}..{stage.stop - 1}" for stage in self._stages)
            raise PlanError(
                f"blocks {blocks}: {what} need {format_bytes(needed)} ({needed} bytes) of tier {self._tier}, and the "
                f"plan gives them {format_bytes(given)} ({given} bytes): plan again for this model, optimizer and "
                "precision"
            )


def _bytes(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> int:
    return sum(parameter.numel() for parameter in parameters) * dtype.itemsize
