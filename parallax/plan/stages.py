"""The best way to fit one stage: keep, recompute or offload each of its blocks.

Least seconds per micro-batch subject to the device budget and the tier's room, exact by Pareto fronts: choices for
the first blocks are dropped only when another is no worse in every quantity that the later blocks or the final
comparison can see. Fronts are shared by stages that hold equal blocks in the same order, wherever those stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cluster import Device
from parallax.plan.cost import BlockLoad, StageLoad, load_block, load_stage
from parallax.plan.plan import Directive, StagePlan
from parallax.plan.profile import ModelProfile

FRONT = 10_000  # choices kept for all blocks together; beyond it the search is no longer exact and says so
TIER_SLACK = 1.25  # places in a tier are rounded up, and rows of uneven micro-batches differ by one
TIER_FLOOR = 2**20

Kinds = tuple[int, ...]  # equal blocks have equal numbers
Floats = NDArray[np.float64]
_SECONDS, _KEPT, _MOVED, _LARGEST, _WORK = range(5)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage that fits: seconds per micro-batch (stalls included), seconds after the last one, peak bytes, and
    bytes offloaded per micro-batch (of equally fast choices the one that moves least is taken)."""

    plan: StagePlan
    seconds: float
    tail_seconds: float
    peak_bytes: int
    moved_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class _Front:
    """Choices for a run of blocks: one row each of (seconds, kept, moved, largest moved, work) and of directives."""

    columns: Floats
    directives: NDArray[np.int8]
    exact: bool

    def pick(self, rows: NDArray[np.intp]) -> _Front:
        return replace(self, columns=self.columns[rows], directives=self.directives[rows])


class StageFitter:
    """Fits stages of one profile on one kind of device; remembers what it was asked. ``exact`` turns false once it
    could not look at every choice."""

    def __init__(self, profile: ModelProfile, device: Device, *, allowed: Sequence[Directive]) -> None:
        self._profile, self._device = profile, device
        # Of equal choices the first stays. Offload comes first: early activations wait longest.
        self._allowed = [d for d in (Directive.OFFLOAD, Directive.RECOMPUTE, Directive.KEEP) if d in allowed]
        costs = [replace(block, name="", parameters=0, parameter_bytes=0, buffer_bytes=0) for block in profile.blocks]
        self._kinds = tuple(costs.index(cost) for cost in costs)
        self._costs = costs
        self.exact = True
        self._most = max(100, FRONT // len(costs))
        self.fit = lru_cache(maxsize=None)(self._fit)
        self._base = lru_cache(maxsize=None)(self._find_base)
        self._options = lru_cache(maxsize=None)(self._find_options)
        self._front = lru_cache(maxsize=None)(self._find_front)
        self._leanest = lru_cache(maxsize=None)(self._find_leanest)

    def _fit(self, start: int, stop: int, replicas: int, rows: int, in_flight: int) -> StageChoice | None:
        """The best choice for blocks ``start`` to ``stop`` with ``rows`` rows per micro-batch on each replica and
        ``in_flight`` micro-batches at once; None where nothing fits."""
        if Directive.KEEP in self._allowed:
            plain = (Directive.KEEP,) * (stop - start)
            choice = self._judge(start, plain, replicas, rows, in_flight)
            if choice is not None:
                return choice
        kinds = self._kinds[start:stop]
        base, budget = self._base(start, stop, rows), self._device.memory_bytes
        lean = self._leanest(kinds, rows)
        if base + _needed(lean, in_flight).min() > budget:
            return None
        front = self._front(kinds, rows)
        self.exact &= front.exact
        for choices in (front, lean):  # a front that was cut may have lost the only choice that fits
            fitting = (base + _needed(choices, in_flight) <= budget) & self._has_room(choices, in_flight)
            if fitting.any():
                found = choices.pick(np.flatnonzero(fitting))
                compute, moved = found.columns[:, _SECONDS], found.columns[:, _MOVED]
                best = int(np.lexsort((moved, np.maximum(compute, self._copying(moved))))[0])
                return self._judge(start, self._named(found.directives[best]), replicas, rows, in_flight)
        return None

    def least_bytes(self, start: int, stop: int, rows: int, in_flight: int) -> float:
        """The smallest device memory in which the stage runs at all, with the tier below as it is; infinite where
        the tier has too little room."""
        kinds = self._kinds[start:stop]
        lean = self._leanest(kinds, rows)
        if not self._has_room(lean, in_flight)[_needed(lean, in_flight).argmin()]:
            front = self._front(kinds, rows)
            lean = replace(lean, columns=np.vstack([lean.columns, front.columns]))
        needed = np.where(self._has_room(lean, in_flight), _needed(lean, in_flight), np.inf)
        return float(self._base(start, stop, rows) + needed.min())

    def _load(self, start: int, directives: tuple[Directive, ...], rows: int) -> StageLoad:
        return load_stage(self._profile, start, directives, rows, device=self._device)

    def _judge(
        self, start: int, directives: tuple[Directive, ...], replicas: int, rows: int, in_flight: int
    ) -> StageChoice | None:
        load = self._load(start, directives, rows)
        needed, budget = load.peak_bytes(in_flight, load.smallest_swap_limit), self._device.memory_bytes
        moved = load.moved_bytes
        below = math.ceil(in_flight * moved * TIER_SLACK) + TIER_FLOOR if moved else 0
        if needed > budget or below > self._device.tier_bytes:
            return None
        room = budget - (needed - load.smallest_swap_limit)
        limit = min(room, in_flight * moved)
        stage = StagePlan(
            start=start,
            stop=start + len(directives),
            replicas=replicas,
            directives=directives,
            swap_limit_bytes=limit,
            tier_bytes=below,
        )
        return StageChoice(
            plan=stage,
            seconds=max(load.compute_seconds, float(self._copying(np.array(moved)))),
            tail_seconds=load.update_seconds,
            peak_bytes=load.peak_bytes(in_flight, limit),
            moved_bytes=moved,
            parameter_bytes=load.parameter_bytes,
        )

    def _copying(self, moved: NDArray[Any]) -> Floats:
        """Seconds to write and to read back ``moved`` bytes."""
        latency = self._device.write.latency_seconds + self._device.read.latency_seconds
        per_byte = 1 / self._device.write.bytes_per_second + 1 / self._device.read.bytes_per_second
        return np.where(moved > 0, latency + moved * per_byte, 0.0)

    def _has_room(self, front: _Front, in_flight: int) -> NDArray[np.bool_]:
        moved = front.columns[:, _MOVED]
        below = np.ceil(in_flight * moved * TIER_SLACK) + TIER_FLOOR
        room: NDArray[np.bool_] = (moved == 0) | (below <= self._device.tier_bytes)
        return room

    def _named(self, directives: NDArray[np.int8]) -> tuple[Directive, ...]:
        return tuple(self._allowed[d] for d in directives)

    def _find_base(self, start: int, stop: int, rows: int) -> float:
        """Bytes of a stage that do not depend on its directives."""
        load = self._load(start, (Directive.KEEP,) * (stop - start), rows)
        return load.static_bytes + load.boundary_bytes

    def _find_options(self, kind: int, rows: int) -> Floats:
        """One row per allowed directive of a block."""
        return np.array([_columns(load_block(self._costs[kind], d, rows)) for d in self._allowed])

    def _find_front(self, kinds: Kinds, rows: int) -> _Front:
        """Pareto-optimal directives of a run of blocks."""
        if not kinds:
            return _Front(np.zeros((1, 5)), np.zeros((1, 0), np.int8), True)
        before = self._front(kinds[:-1], rows)
        grown = []
        for option in self._options(kinds[-1], rows):
            sums = before.columns[:, : _MOVED + 1] + option[: _MOVED + 1]
            grown.append(np.hstack([sums, np.maximum(before.columns[:, _LARGEST:], option[_LARGEST:])]))
        size = len(before.columns)
        directives = np.hstack(
            [
                np.tile(before.directives, (len(grown), 1)),
                np.repeat(np.arange(len(grown), dtype=np.int8), size)[:, None],
            ]
        )
        front = _Front(np.vstack(grown), directives, before.exact)
        front = front.pick(_undominated(front.columns))
        if len(front.columns) > self._most:  # keep some of all sizes
            spread = np.argsort(front.columns[:, _KEPT] + front.columns[:, _LARGEST], kind="stable")
            chosen = spread[np.linspace(0, len(spread) - 1, self._most).astype(np.intp)]
            front = replace(front.pick(np.sort(chosen)), exact=False)
        return front

    def _find_leanest(self, kinds: Kinds, rows: int) -> _Front:
        """For each bound on what one block may need for itself and on what it may move, the directives that keep
        least: among them is the smallest choice for any number of micro-batches in flight."""
        options = np.array([self._options(kind, rows) for kind in kinds])
        found: dict[tuple[int, ...], Floats] = {}
        for work in np.unique(options[:, :, _WORK]):
            for largest in np.unique(options[:, :, _LARGEST]):
                allowed = (options[:, :, _WORK] <= work) & (options[:, :, _LARGEST] <= largest)
                if allowed.any(axis=1).all():
                    best = np.where(allowed, options[:, :, _KEPT], np.inf).argmin(axis=1)
                    chosen = options[np.arange(len(kinds)), best]
                    found[tuple(best)] = np.hstack([chosen[:, : _MOVED + 1].sum(0), chosen[:, _LARGEST:].max(0)])
        return _Front(np.array(list(found.values())), np.array(list(found), np.int8), True)


def _columns(load: BlockLoad) -> tuple[float, ...]:
    work = max(load.forward_work, load.backward_work)
    return load.forward_seconds + load.backward_seconds, load.kept_bytes, load.moved_bytes, load.moved_bytes, work


def _needed(front: _Front, in_flight: int) -> Floats:
    """Bytes on the device beyond what a stage holds under any directives."""
    columns = front.columns
    needed: Floats = in_flight * columns[:, _KEPT] + columns[:, _LARGEST] + columns[:, _WORK]
    return needed


def _undominated(columns: Floats) -> NDArray[np.intp]:
    """Rows that no other is at least as good as in everything; the first of equal ones."""
    left = np.lexsort(columns.T[::-1])
    others = np.ascontiguousarray(columns[left].T)
    front = []
    while len(left):  # in lexical order nothing later is as good as the first
        front.append(left[0])
        better = (others[1:] < others[1:, :1]).any(axis=0)  # the first column is sorted
        left, others = left[better], others[:, better]
    return np.array(front, dtype=np.intp)
