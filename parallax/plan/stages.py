"""The best way to fit one stage: keep, recompute or offload each of its blocks.

Least seconds per micro-batch subject to the device budget and the tier's room, exact by Pareto fronts: choices for
the first blocks are dropped only when another is no worse in every quantity that the later blocks or the final
comparison can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from parallax.plan.cluster import Device
from parallax.plan.cost import StageLoad, load_block, load_stage
from parallax.plan.plan import Directive, StagePlan
from parallax.plan.profile import ModelProfile

FRONT = 2000  # states kept per block; beyond it the search is no longer exact and says so
TIER_SLACK = 1.25  # places in a tier are rounded up, and rows of uneven micro-batches differ by one
TIER_FLOOR = 2**20


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage that fits: seconds per micro-batch (stalls included), seconds after the last one, peak bytes, and
    bytes offloaded per micro-batch (of equally fast choices the one that moves least is taken)."""

    plan: StagePlan
    seconds: float
    tail_seconds: float
    peak_bytes: float
    moved_bytes: float
    exact: bool


@dataclass(frozen=True, slots=True)
class _State:
    kept: float
    moved: float
    largest: float
    work: float
    seconds: float
    directives: tuple[Directive, ...]

    def no_worse(self, other: _State) -> bool:
        return (
            self.kept <= other.kept
            and self.moved <= other.moved
            and self.largest <= other.largest
            and self.work <= other.work
            and self.seconds <= other.seconds
        )


class StageFitter:
    """Fits stages of one profile on one kind of device; remembers what it was asked."""

    def __init__(self, profile: ModelProfile, device: Device, *, allowed: Sequence[Directive]) -> None:
        self._profile, self._device, self._allowed = profile, device, tuple(allowed)
        self.fit = lru_cache(maxsize=None)(self._fit)

    def _fit(self, start: int, stop: int, replicas: int, rows: int, in_flight: int) -> StageChoice | None:
        """The best choice for blocks ``start`` to ``stop`` with ``rows`` rows per micro-batch on each replica and
        ``in_flight`` micro-batches at once; None where nothing fits."""
        plain = (Directive.KEEP,) * (stop - start)
        if Directive.KEEP in self._allowed:
            choice = self._judge(start, plain, replicas, rows, in_flight, exact=True)
            if choice is not None:
                return choice
        states, exact = self._front(start, stop, rows)
        choices = [self._judge(start, s.directives, replicas, rows, in_flight, exact=exact) for s in states]
        fitting = [choice for choice in choices if choice is not None]
        return min(fitting, key=lambda choice: (choice.seconds, choice.moved_bytes), default=None)

    def least_bytes(self, start: int, stop: int, rows: int, in_flight: int) -> float:
        """The smallest device memory in which the stage runs at all."""
        states, _ = self._front(start, stop, rows)
        return min(self._needed(self._load(start, s.directives, rows), in_flight) for s in states)

    def _load(self, start: int, directives: tuple[Directive, ...], rows: int) -> StageLoad:
        return load_stage(self._profile, start, directives, rows, reserve=self._device.reserve_bytes)

    def _needed(self, load: StageLoad, in_flight: int) -> float:
        return load.peak_bytes(in_flight, load.smallest_swap_limit)

    def _judge(
        self, start: int, directives: tuple[Directive, ...], replicas: int, rows: int, in_flight: int, *, exact: bool
    ) -> StageChoice | None:
        load = self._load(start, directives, rows)
        needed, budget = self._needed(load, in_flight), self._device.memory_bytes
        moved = load.moved_bytes
        below = in_flight * moved * TIER_SLACK + TIER_FLOOR if moved else 0.0
        if needed > budget or below > self._device.tier_bytes:
            return None
        room = budget - (needed - load.smallest_swap_limit)
        limit = min(room, in_flight * moved)
        copying = self._device.write.seconds(moved) + self._device.read.seconds(moved)
        stage = StagePlan(
            start=start,
            stop=start + len(directives),
            replicas=replicas,
            directives=directives,
            swap_limit_bytes=int(limit),
            tier_bytes=int(below),
        )
        stall = max(0.0, copying - load.compute_seconds)
        return StageChoice(
            plan=stage,
            seconds=load.compute_seconds + stall,
            tail_seconds=load.update_seconds,
            peak_bytes=load.peak_bytes(in_flight, limit),
            moved_bytes=moved,
            exact=exact,
        )

    @lru_cache(maxsize=None)  # noqa: B019 - the fitter lives as long as one search
    def _front(self, start: int, stop: int, rows: int) -> tuple[list[_State], bool]:
        """Pareto-optimal directives of a stage. Of equal states the first found stays, and offload is tried first
        on early blocks: their activations wait longest."""
        exact = True
        front = [_State(0.0, 0.0, 0.0, 0.0, 0.0, ())]
        for cost in self._profile.blocks[start:stop]:
            grown = []
            for directive in (d for d in (Directive.OFFLOAD, Directive.RECOMPUTE, Directive.KEEP) if d in self._allowed):
                load = load_block(cost, directive, rows)
                for state in front:
                    grown.append(
                        replace(
                            state,
                            kept=state.kept + load.kept_bytes,
                            moved=state.moved + load.moved_bytes,
                            largest=max(state.largest, load.moved_bytes),
                            work=max(state.work, load.forward_work, load.backward_work),
                            seconds=state.seconds + load.forward_seconds + load.backward_seconds,
                            directives=(*state.directives, directive),
                        )
                    )
            front = _undominated(grown)
            if len(front) > FRONT:
                front, exact = sorted(front, key=lambda s: s.kept + s.largest)[:FRONT], False
        return front, exact


def _undominated(states: list[_State]) -> list[_State]:
    """States that no other is at least as good as in everything; the first of equal ones."""
    ordered = sorted(states, key=lambda s: (s.seconds, s.kept, s.moved, s.largest, s.work))
    front: list[_State] = []
    for state in ordered:
        if not any(better.no_worse(state) for better in front):
            front.append(state)
    return front
