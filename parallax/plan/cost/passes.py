"""Compute the bytes and seconds of one pass of a micro-batch through a stage.

A pass is a forward, a backward, or the weight-gradient pass (W) of a split backward. Only blocks that keep their
activations run W later than the input-gradient pass (B). Recomputed and prefetched activations are not held until then,
so the blocks that recompute or offload run B and W together. Gradients of offloaded parameters are fetched and written
by the pass that computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallax.plan.cost.stage import BlockLoad, StageLoad
from parallax.plan.plan import Directive
from parallax.plan.schedule import Kind


@dataclass(frozen=True, slots=True)
class Pass:
    """A part of a pass: consecutive blocks that compute without interruption.

    ``block`` is the block whose activations are offloaded after this part of a forward, or prefetched before this part
    of a backward; −1 if there is none. ``moved`` is the bytes of these activations. ``exchange`` is the part of
    ``seconds`` in which the rank waits for statistics of other replicas.
    """

    seconds: float
    block: int = -1
    moved: int = 0
    exchange: float = 0.0


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of activations and of workspace.

    ``kept`` is the saved activations, ``loss`` is the part of them that the loss has saved, and ``work`` is the
    workspace of the running block.
    """

    kept: int = 0
    loss: int = 0
    work: int = 0

    @property
    def total(self) -> int:
        return self.kept + self.work


@dataclass(frozen=True, slots=True)
class Rise:
    """The change of a rank's memory by one pass through a stage: ``most`` is the largest increase during the pass, and
    ``left`` the increase that remains at its end. A decrease is negative."""

    most: Bytes
    left: Bytes


@dataclass(frozen=True)
class Passes:
    """The costs of the passes through one stage: seconds, offloaded bytes, and the change of memory.

    ``load`` has the stage's costs. ``directives`` has one directive (keep, offload, recompute) per block. ``split`` is
    True if the schedule splits backwards.
    """

    load: StageLoad
    directives: Sequence[Directive]
    split: bool

    @cached_property
    def weight_seconds(self) -> float:
        """Return the seconds of a separate weight-gradient pass; 0 if there is none."""
        return sum(
            block.weight_seconds
            for index, block in enumerate(self.load.blocks)
            if self._later(index)
        )

    @cached_property
    def streaming(self) -> dict[Kind, tuple[float, float]]:
        """Return, for each kind of pass, the bytes that one pass fetches from the offload tier and the bytes that it
        writes.

        Parameters are fetched, and gradients are written.
        """
        states = self.load.states
        later = states.written_bytes * self._deferred_share
        return {
            Kind.FORWARD: (states.read_bytes, 0.0),
            Kind.BACKWARD: (states.read_bytes, states.written_bytes - later),
            Kind.BACKWARD_WEIGHT: (0.0, later),
        }

    def adding_seconds(self, kind: Kind) -> float:
        """Return the seconds in which a pass of this ``kind`` adds its gradients to those stored in the
        offload tier."""
        share = self._deferred_share
        part = share if kind is Kind.BACKWARD_WEIGHT else 1 - share
        return self.load.states.adding_seconds * part

    @property
    def _deferred_share(self) -> float:
        """Return the fraction of the gradients that a separate weight-gradient pass computes."""
        blocks = self.load.blocks
        later = sum(
            block.trained_bytes
            for index, block in enumerate(blocks)
            if self._later(index) and block.weight_seconds > 0
        )
        return later / max(1, sum(block.trained_bytes for block in blocks))

    @cached_property
    def recomputed(self) -> float:
        """Return the fraction of the backward's seconds that is spent on running forwards again."""
        again = sum(block.recompute_seconds for block in self.load.blocks)
        whole = sum(block.backward_seconds for block in self.load.blocks) - self.weight_seconds
        return again / whole if whole > 0 else 0.0

    @cached_property
    def forward(self) -> tuple[Pass, ...]:
        """Return a forward as parts of consecutive blocks.

        Each part except the last ends with a block that is offloaded.
        """
        runs, seconds, exchange = [], 0.0, 0.0
        for index, block in enumerate(self.load.blocks):
            seconds += block.forward_seconds
            exchange += block.forward_exchange
            if block.transferred_bytes > 0:
                runs.append(Pass(seconds, index, block.transferred_bytes, exchange))
                seconds = exchange = 0.0
        return (*runs, Pass(seconds, exchange=exchange))

    @cached_property
    def backward(self) -> tuple[Pass, ...]:
        """Return a backward as parts of consecutive blocks. Each offloaded block is a separate part."""
        runs, seconds, exchange = [], 0.0, 0.0
        for index, block in reversed(list(enumerate(self.load.blocks))):
            if block.transferred_bytes > 0:
                mine = Pass(
                    block.backward_seconds, index, block.transferred_bytes, block.backward_exchange
                )
                runs += [Pass(seconds, exchange=exchange), mine]
                seconds = exchange = 0.0
            else:
                exchange += block.backward_exchange
                seconds += block.backward_seconds - (
                    block.weight_seconds if self._later(index) else 0.0
                )
        return (*runs, Pass(seconds, exchange=exchange))

    @cached_property
    def rises(self) -> dict[Kind, Rise]:
        """Return, for each kind of pass, how one pass through the stage changes the rank's memory."""
        return {
            kind: self._rise(kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        }

    def _rise(self, kind: Kind) -> Rise:
        most = now = Bytes()
        for index, block in self._visited(kind):
            kept, loss = self._change(kind, index, block)
            after = Bytes(now.kept + kept, now.loss + loss)
            held, work = (
                (after, block.forward_work) if kind is Kind.FORWARD else (now, block.backward_work)
            )
            most = max(most, Bytes(held.kept, held.loss, work), key=lambda found: found.total)
            now = after
        return Rise(most, now)

    def _change(self, kind: Kind, index: int, block: BlockLoad) -> tuple[int, int]:
        """Return by how many bytes the pass of block ``index`` changes the saved activations, and the part of this
        change that the loss has saved. A decrease is negative."""
        if kind is Kind.FORWARD:
            return block.kept_bytes, block.loss_bytes
        if kind is Kind.BACKWARD_WEIGHT:
            return -block.deferred_bytes, 0
        return (
            block.deferred_bytes if self._later(index) else 0
        ) - block.kept_bytes, -block.loss_bytes

    def _visited(self, kind: Kind) -> list[tuple[int, BlockLoad]]:
        blocks = list(enumerate(self.load.blocks))
        if kind is Kind.FORWARD:
            return blocks
        return [pair for pair in reversed(blocks) if kind is Kind.BACKWARD or self._later(pair[0])]

    def _later(self, index: int) -> bool:
        """Return whether the weight-gradient pass of block ``index`` runs separately."""
        return self.split and self.directives[index] is Directive.KEEP
