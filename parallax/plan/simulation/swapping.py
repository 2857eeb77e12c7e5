"""The simulated swap manager of one rank.

Saved tensors are offloaded immediately. A forward waits while the swap limit is reached. A fetch cancels the writes
that have not begun, and prefetches up to the limit. The rules are those of ``swap/activations/manager.py``, with
numbers of bytes in place of tensors, and work on the simulated tier in place of copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from parallax.common.units import format_bytes
from parallax.errors import BudgetExceeded
from parallax.plan.cluster import Device
from parallax.plan.simulation.fluid import Resource, Routine, Signal, Simulator

PIECES = 8  # a backward frees its activations tensor by tensor, here in equal pieces
Key = tuple[int, int, int, int]  # step, stage, micro-batch, block within the stage


class Held:
    """The offloaded activations of one block for one micro-batch."""

    __slots__ = ("changed", "size", "state", "wanted")

    def __init__(self, size: float) -> None:
        self.size = size
        # "queued" for writing; then "stored", "reading", "read"; or "spared": the write was cancelled.
        self.state = "queued"
        self.changed = Signal()
        self.wanted = False


class SimulatedSwap:
    """The offloaded activations of one simulated rank.

    ``stalled`` is the seconds that the rank's compute waited, ``written`` the bytes written to the tier, and ``peak``
    the largest number of bytes in the tier.
    """

    def __init__(
        self,
        simulator: Simulator,
        tier: Resource,
        device: Device,
        limit: float,
        *,
        carry: Callable[[int], None],
        name: str,
    ) -> None:
        self.stalled = self.written = self.peak = 0.0
        self._simulator, self._tier, self._device = simulator, tier, device
        self._limit, self._carry, self._name = limit, carry, name
        self._resident = self._stored = 0.0
        self._held: dict[Key, Held] = {}
        self._fetching: deque[Held] = deque()
        self._queue: deque[Held] = deque()
        self._copying = False
        self._brought = Held(0.0)  # the activations of the running backward

    def offload(self, key: Key, size: float) -> Routine:
        """Wait until the saved activations of the block ``key``, of ``size`` bytes, fit the limit. Then start to write
        them."""
        yield from self._make_room(size)
        self._resident += size
        held = Held(size)
        self._held[key] = held
        self._copy(held)

    def fetch(self, step: int, stage: int, micro: int) -> None:
        """Start to prefetch the activations of micro-batch ``micro`` of ``stage`` in ``step``, last block first.

        Writes of these activations that have not begun are cancelled, so that nothing needs to be read.
        """
        wanted = step, stage, micro
        mine = [held for key, held in self._held.items() if key[:3] == wanted]
        for held in reversed(mine):
            if held.state == "queued" and held in self._queue and held is not self._queue[0]:
                self._queue.remove(held)
                held.state = "spared"
                self._simulator.set(held.changed)
                self._store(-held.size)
                self.written -= held.size
            elif held.state == "queued":
                held.wanted = True
            elif held.state == "stored":
                self._fetching.append(held)
        self._pump()

    def bring(self, key: Key) -> Routine:
        """Wait until a block's activations are on the device, where they then stay until :meth:`release`."""
        held = self._held.pop(key)
        start = self._simulator.now
        if held.state == "queued":
            held.wanted = True
            yield held.changed
        if held.state == "stored":
            yield from self._make_room(held.size)
            start = self._simulator.now
            self._read(held)
        if held.state == "reading":
            yield held.changed
        self.stalled += self._simulator.now - start
        self._brought = held

    def release(self, share: float) -> None:
        """Free a fraction ``share`` of the activations of the block that :meth:`bring` waited for last.

        The freed memory is used to prefetch.
        """
        held = self._brought
        self._resident -= held.size * share
        if held.state != "spared":
            self._store(-held.size * share)
        self._pump()

    def stream(self, read: float, written: float) -> Signal:
        """Start to read ``read`` bytes of parameters and to write ``written`` bytes of gradients while the rank
        computes.

        Return the signal that is set when both transfers are complete.
        """
        seconds = self._device.read.seconds(read) + self._device.write.seconds(written)
        if not seconds:
            return self._simulator.work(seconds, self._tier)
        ended = Signal()
        self._simulator.spawn(lambda: f"parameters of {self._name}", self._stream(seconds, ended))
        return ended

    def _stream(self, seconds: float, ended: Signal) -> Routine:
        self._carry(1)
        yield self._simulator.work(seconds, self._tier)
        self._carry(-1)
        self._simulator.set(ended)

    def streamed(self, streaming: Signal, adding: float = 0.0) -> Routine:
        """Wait at the end of a pass until its parameter transfers are complete, which sets the signal ``streaming``.

        Then wait for ``adding`` seconds, in which a backward adds its gradients to stored ones.
        """
        start = self._simulator.now
        yield streaming
        if adding:
            yield self._simulator.timer(adding)
        self.stalled += self._simulator.now - start

    def _store(self, count: float) -> None:
        self._stored += count
        self.peak = max(self.peak, self._stored)

    def _make_room(self, size: float) -> Routine:
        """Wait until ``size`` more bytes fit the swap limit.

        First this waits for queued writes, then it evicts prefetched activations. Raises :class:`BudgetExceeded` if
        the bytes do not fit even then.
        """
        start = self._simulator.now
        while self._resident + size > self._limit * (1 + 1e-9):
            writing = next((h for h in self._queue if h.state == "queued" and not h.wanted), None)
            early = next(
                (h for h in reversed(list(self._held.values())) if h.state in ("spared", "read")),
                None,
            )
            if writing is not None:
                yield writing.changed
            elif early is not None:
                self._give_up(early)
            else:
                raise BudgetExceeded(
                    f"{self._name}: {format_bytes(size)} must fit a swap limit of "
                    f"{format_bytes(self._limit)} of which {format_bytes(self._resident)} are in use"
                )
        self.stalled += self._simulator.now - start

    def _give_up(self, held: Held) -> None:
        self._fetching.appendleft(held)
        if held.state == "read":
            held.state = "stored"
            self._resident -= held.size
        else:
            held.state, held.wanted, held.changed = "queued", False, Signal()
            self._copy(held)

    def _pump(self) -> None:
        while self._fetching and self._fetching[0].state != "queued":
            held = self._fetching[0]
            if held.state == "stored":
                if self._resident + held.size > self._limit:
                    return
                self._read(held)
            self._fetching.popleft()

    def _read(self, held: Held) -> None:
        held.state, held.changed = "reading", Signal()
        self._resident += held.size
        self._copy(held)

    def _copy(self, held: Held) -> None:
        """Queue a write or read of ``held`` behind this rank's earlier transfers."""
        if held.state == "queued":
            self._store(held.size)
            self.written += held.size
        self._queue.append(held)
        if not self._copying:
            self._copying = True
            self._simulator.spawn(lambda: f"copies of {self._name}", self._copies())

    def _copies(self) -> Routine:
        self._carry(1)
        while self._queue:
            held = self._queue[0]
            link = self._device.read if held.state == "reading" else self._device.write
            yield self._simulator.work(link.seconds(held.size), self._tier)
            self._queue.popleft()
            if held.state == "reading" or held.wanted:
                held.state = "read"
            else:
                held.state = "stored"
                self._resident -= held.size
            self._simulator.set(held.changed)
        self._copying = False
        self._carry(-1)
