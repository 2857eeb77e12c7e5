"""How fast a position of the pipeline can be with thousands of blocks: keep, recompute and offload by a greedy rule.

Blocks are ordered by the seconds that recomputing them costs per byte it frees. Recomputation takes from the cheap end,
offloading from the dear end, as many of each as the budget needs; for equal blocks that is the best there is. Sums over
prefixes make one answer a matter of microseconds, and answers are kept by content: stages of equal blocks ask once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cluster import Device
from parallax.plan.cost import Below, gap_bytes, load_block, load_states
from parallax.plan.plan import Directive
from parallax.plan.profile import BlockCost, ModelProfile
from parallax.plan.stages import OFFERED, TIER_FLOOR, TIER_SLACK, buffer_bytes, copying_seconds

Floats = NDArray[np.float64]
Part = tuple[int, int, int]  # blocks start to stop, with so many micro-batches in flight


@dataclass(frozen=True, slots=True)
class Lane:
    """The greedy answer: seconds per micro-batch and after the last, and which blocks of the parts, counted through,
    are recomputed and offloaded. ``below`` are the shares of its states in the tier."""

    seconds: float
    tail_seconds: float
    below: Below
    recomputed: tuple[int, ...]
    offloaded: tuple[int, ...]

    def directives(self, parts: Sequence[Part], allowed: Sequence[Directive]) -> list[tuple[Directive, ...]]:
        """One tuple for each part."""
        plain = Directive.KEEP if Directive.KEEP in allowed else allowed[0]
        flat = [plain] * sum(stop - start for start, stop, _ in parts)
        for index in self.recomputed:
            flat[index] = Directive.RECOMPUTE
        for index in self.offloaded:
            flat[index] = Directive.OFFLOAD
        found, first = [], 0
        for start, stop, _ in parts:
            found.append(tuple(flat[first : first + stop - start]))
            first += stop - start
        return found


class Lanes:
    """All positions of one kind of device whose ranks have ``rows`` rows of each micro-batch. ``kinds`` are those of
    :func:`~parallax.plan.stages.block_kinds`."""

    def __init__(
        self,
        profile: ModelProfile,
        kinds: tuple[tuple[int, ...], list[BlockCost]],
        device: Device,
        rows: int,
        *,
        allowed: Sequence[Directive],
        host_states: Sequence[Below],
    ) -> None:
        self._profile, self._device, self._rows = profile, device, rows
        self._allowed, self._host_states = [d for d in OFFERED if d in allowed], host_states
        numbers, costs = kinds
        self._kinds = np.array(numbers, dtype=np.int32)
        self._loads = {
            directive: [load_block(cost, directive, rows, speed=device.speed) for cost in costs]
            for directive in OFFERED
        }
        self.seconds = self._column(Directive.KEEP, lambda load: load.forward_seconds + load.backward_seconds)
        self._again = self._column(Directive.RECOMPUTE, lambda load: load.recompute_seconds)
        self._moved = self._column(Directive.OFFLOAD, lambda load: load.moved_bytes)
        self._kept = {d: self._column(d, lambda load: load.kept_bytes) for d in OFFERED}
        self._work = {d: self._column(d, lambda load: max(load.forward_work, load.backward_work)) for d in OFFERED}
        self._inputs = np.array([block.input.at(rows) for block in profile.blocks])
        self._entering = np.ceil(2 * self._inputs).astype(np.int64)
        self._leaving = np.array([math.ceil(2 * block.output.at(rows)) for block in profile.blocks])
        self._block_parameters = np.array([block.parameter_bytes for block in profile.blocks])
        self._parameters = np.concatenate([[0], np.cumsum(self._block_parameters)])
        self._buffers = np.cumsum([0, *(block.buffer_bytes for block in profile.blocks)])
        self._known: dict[tuple[object, ...], Lane | None] = {}

    def _column(self, directive: Directive, of) -> Floats:  # type: ignore[no-untyped-def]
        return np.array([of(load) for load in self._loads[directive]], dtype=np.float64)[self._kinds]

    def find(self, parts: tuple[Part, ...]) -> Lane | None:
        """The fastest answer for a position that holds ``parts``; None where nothing fits."""
        parameters = sum(self._parameter_bytes(start, stop) for start, stop, _ in parts)
        buffers = sum(int(self._buffers[stop] - self._buffers[start]) for start, stop, _ in parts)
        ends = tuple((start == 0, stop == len(self._kinds)) for start, stop, _ in parts)
        content = tuple((self._kinds[start:stop].tobytes(), flight) for start, stop, flight in parts)
        key = (content, ends, parameters, buffers)
        if key not in self._known:
            self._known[key] = self._find(parts, parameters, buffers)
        return self._known[key]

    def _find(self, parts: tuple[Part, ...], parameters: int, buffers: int) -> Lane | None:
        gaps = gap_bytes(self._device, max(float(self._inputs[start:stop].max()) for start, stop, _ in parts))
        largest = max(int(self._block_parameters[start:stop].max()) for start, stop, _ in parts)
        for below in self._host_states:
            states = load_states(self._profile, parameters, largest, self._device, below)
            static = states.device_bytes + buffers + self._device.reserve_bytes + gaps
            room = (self._device.memory_bytes - static) / (1 + self._device.gap_share) - self._boundary(parts)
            tier = self._device.tier_bytes - states.host_bytes
            found = self._fill(parts, room, tier, states.streaming_seconds) if room > 0 and tier >= 0 else None
            if found is not None:
                return Lane(found[0], states.update_seconds, below, found[1], found[2])
        return None

    def _parameter_bytes(self, start: int, stop: int) -> int:
        total = int(self._parameters[stop] - self._parameters[start])
        for size, users in self._profile.ties:
            total -= size * max(0, sum(start <= user < stop for user in users) - 1)
        return total

    def _boundary(self, parts: tuple[Part, ...]) -> int:
        entering = sum(int(self._entering[start]) for start, _, _ in parts if start > 0)
        return entering + sum(int(self._leaving[stop - 1]) for _, stop, _ in parts if stop < len(self._kinds))

    def _fill(
        self, parts: tuple[Part, ...], room: float, tier: int, streaming: float
    ) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
        """Seconds per micro-batch, and the blocks recomputed and offloaded, within ``room`` bytes of the device, while
        ``streaming`` seconds of the way to the tier are taken."""
        blocks = np.concatenate([np.arange(start, stop) for start, stop, _ in parts])
        flights = np.concatenate([np.full(stop - start, flight, dtype=np.float64) for start, stop, flight in parts])
        compute = float(self.seconds[blocks].sum())
        keep, work = self._kept[Directive.KEEP][blocks], {d: float(self._work[d][blocks].max()) for d in OFFERED}
        needed = float((flights * keep).sum())
        if Directive.KEEP in self._allowed and needed + work[Directive.KEEP] <= room:
            return max(compute, streaming), (), ()
        again, moved = self._again[blocks], self._moved[blocks]
        freed = np.maximum(0.0, flights * (keep - self._kept[Directive.RECOMPUTE][blocks]))
        gone = flights * moved
        # Of equal blocks the first are offloaded: their backward comes last, which leaves most time to read them.
        count = len(blocks)
        order = np.lexsort((-np.arange(count), again / np.maximum(freed, 1e-9)))
        recompute_freed = np.concatenate([[0.0], np.cumsum(freed[order])])
        recompute_seconds = np.concatenate([[0.0], np.cumsum(again[order])])
        offload_freed = np.concatenate([[0.0], np.cumsum(gone[order][::-1])])
        offload_moved = np.concatenate([[0.0], np.cumsum(moved[order][::-1])])
        offloaded = np.arange(count + 1)
        # What the position needs with so many offloaded, before anything is recomputed.
        base = needed - offload_freed
        plain = np.where(offloaded > 0, max(work[Directive.KEEP], work[Directive.OFFLOAD]), work[Directive.KEEP])
        both = np.maximum(plain, work[Directive.RECOMPUTE])
        places = np.ceil(offload_freed * TIER_SLACK) + TIER_FLOOR
        roomy = (offloaded == 0) | (places <= tier)
        best, answer = math.inf, None
        for limit, read in self._buffers_of(moved, offload_freed, offload_moved):
            least = np.maximum(1, np.searchsorted(recompute_freed, base + limit + both - room - 1e-6))
            recomputed = np.where(base + limit + plain <= room, 0, least)
            if Directive.KEEP not in self._allowed:
                recomputed = np.maximum(recomputed, count - offloaded)
            possible = roomy & (recomputed + offloaded <= count) & self._permitted(recomputed, offloaded)
            again_seconds = recompute_seconds[np.minimum(recomputed, count)]
            copying = streaming + copying_seconds(self._device, offload_moved)
            seconds = np.where(possible, np.maximum(compute + again_seconds + read, copying), np.inf)
            chosen = int(seconds.argmin())
            if seconds[chosen] < best:
                best = float(seconds[chosen])
                answer = best, tuple(order[: int(recomputed[chosen])].tolist()), tuple(order[count - chosen :].tolist())
        return answer

    def _buffers_of(self, moved: Floats, in_flight: Floats, each: Floats) -> list[tuple[Floats, Floats]]:
        """Swap limits for each number of offloaded blocks, and what a backward then waits for: with room for two blocks
        reading overlaps, with room for one it does not."""
        largest = np.where(in_flight > 0, moved.max(), 0.0)
        read = self._device.read
        waiting = np.where(each > 0, read.latency_seconds + each / read.bytes_per_second, 0.0)
        return [(buffer_bytes(largest, in_flight), np.zeros_like(each)), (largest, waiting)]

    def _permitted(self, recomputed: NDArray[np.int64], offloaded: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which numbers of recomputed and offloaded blocks the allowed directives permit."""
        permitted = np.ones(len(offloaded), dtype=np.bool_)
        if Directive.RECOMPUTE not in self._allowed:
            permitted &= recomputed == 0
        if Directive.OFFLOAD not in self._allowed:
            permitted &= offloaded == 0
        return permitted
