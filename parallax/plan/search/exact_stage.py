"""Choose keep, recompute or offload for each block of one stage.

The choice has the least seconds per micro-batch within the device budget and the capacity of the offload tier. It is
exact, by Pareto fronts: a choice for the first blocks is dropped only if another choice is no worse in every quantity
that the later blocks or the final comparison use. Stages with equal blocks in the same order share fronts, even if they
are at different places in the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cluster import Device, Link
from parallax.plan.cost.allocator import Gaps
from parallax.plan.cost.collective import broadcast_seconds
from parallax.plan.cost.communicators import Beside
from parallax.plan.cost.stage import BlockLoad, StageLoad, load_block, load_stage
from parallax.plan.cost.states import ALL_ON_DEVICE, OffloadFractions
from parallax.plan.cost.traffic import (
    TIER_FLOOR,
    TIER_SLACK,
    buffer_bytes,
    copying_seconds,
    leaving_bytes,
    tier_places,
)
from parallax.plan.plan import EACH_MICRO_BATCH, Directive, StagePlan, Visits
from parallax.plan.profile import NOTHING, ModelProfile
from parallax.plan.search.boundaries import block_kinds

FRONT = 480_000  # choices kept times blocks squared, above which the search is marked as inexact
MOST_BOUNDS = 40  # bounds that are tried on a block's workspace, and on its offloaded bytes
LEAST_FRONT = 100  # choices that are always kept

Kinds = tuple[int, ...]  # equal blocks have equal numbers
Floats = NDArray[np.float64]
TIE = 1 + 1e-9  # tolerates another order of summation
OFFERED = (Directive.OFFLOAD, Directive.RECOMPUTE, Directive.KEEP)
# Of equal choices the first is kept. Offload comes first: early activations wait longest for their backward.
_SECONDS, _KEPT, _MOVED, _LARGEST, _WORK = range(5)


@dataclass(frozen=True, slots=True)
class StageSetting:
    """The conditions under which a stage runs.

    ``replicas``         number of replicas
    ``rows``             rows of each micro-batch on the rank that has the most rows
    ``in_flight``        micro-batches between forward and backward at one time
    ``link``             link between the replicas; None if nothing is sent
    ``split``            whether the schedule runs weight-gradient passes separately
    ``beside``           the largest numbers of ranks of the stages before and after
    ``visits``           how often each block runs in a step (:class:`~parallax.plan.plan.Visits`)
    ``boundaries_held``  number of boundary tensors held (:func:`~parallax.plan.plan.boundaries_held`)
    """

    replicas: int
    rows: int
    in_flight: int
    link: Link | None = None
    split: bool = False
    beside: Beside | None = None
    visits: Visits = EACH_MICRO_BATCH
    boundaries_held: int = 0

    def load(
        self,
        profile: ModelProfile,
        device: Device,
        start: int,
        directives: tuple[Directive, ...],
        offload: OffloadFractions,
    ) -> StageLoad:
        """Return the cost, under these conditions, of the stage that begins at block ``start`` and has these
        ``directives``.

        ``offload`` has the fractions of the stage's states that are offloaded.
        """
        return load_stage(
            profile,
            start,
            directives,
            self.rows,
            device=device,
            offload=offload,
            replicas=self.replicas,
            split=self.split,
            beside=self.beside,
            visits=self.visits,
            boundaries_held=self.boundaries_held,
        )


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage that fits its device.

    ``seconds``        seconds per micro-batch, with stalls
    ``tail_seconds``   seconds after the last micro-batch, without the all-reduce of gradients
    ``peak_bytes``     peak of the device memory
    ``moved_bytes``    bytes offloaded per micro-batch. Among equally fast choices, the search prefers the one with the
                       fewest.
    ``trained_bytes``  bytes of the trained parameters
    ``load``           all costs of the stage
    """

    plan: StagePlan
    seconds: float
    tail_seconds: float
    peak_bytes: int
    moved_bytes: int
    trained_bytes: int
    load: StageLoad


def evaluate_stage(
    profile: ModelProfile,
    device: Device,
    start: int,
    directives: tuple[Directive, ...],
    where: StageSetting,
    offload: OffloadFractions,
) -> StageChoice | None:
    """Return the stage that starts at block ``start``, has these ``directives`` and runs under the conditions
    ``where``; None if the stage does not fit its device.

    ``offload`` has the fractions of the stage's states that are offloaded.
    """
    load = where.load(profile, device, start, directives, offload)
    budget, least, moved = device.memory_bytes, load.smallest_swap_limit, load.moved_bytes
    slot_bytes = tier_places(where.in_flight * moved) if moved else 0
    peak = load.peak_bytes(where.in_flight, least)
    if peak > budget or slot_bytes + load.host_state_bytes > device.tier_bytes:
        return None
    passing = load.passing_bytes(where.in_flight, least)
    free_bytes = least + load.gaps.more(passing, budget - peak)
    limit = _largest_limit(load, where.in_flight, free_bytes, budget)
    stage = StagePlan(
        start=start,
        stop=start + len(directives),
        replicas=where.replicas,
        directives=directives,
        swap_limit_bytes=limit,
        tier_bytes=slot_bytes,
        optimizer_offload=offload.optimizer,
        parameter_offload=offload.parameters,
        shard_optimizer=offload.sharded,
        bucket_bytes=device.bucket_bytes,
    )
    leaving = leaving_bytes(moved, where.in_flight, free_bytes)
    copying = float(copying_seconds(device, leaving)) + load.states.streaming_seconds
    buffered = limit >= buffer_bytes(least, where.in_flight * moved)
    waiting = 0.0 if buffered else device.read.seconds(moved)
    spreading = 0.0
    if offload.sharded and where.link is not None:
        spreading = broadcast_seconds(load.trained_bytes, where.replicas, where.link)
    return StageChoice(
        plan=stage,
        seconds=max(load.compute_seconds + waiting, copying) + load.states.adding_seconds,
        tail_seconds=load.update_seconds + spreading,
        peak_bytes=load.peak_bytes(where.in_flight, limit),
        moved_bytes=moved,
        trained_bytes=load.trained_bytes,
        load=load,
    )


def _largest_limit(load: StageLoad, in_flight: int, free_bytes: float, budget: int) -> int:
    """Return the largest swap limit, in bytes, with which the stage fits ``budget``.

    ``free_bytes`` is an estimate of the result. The exact result differs by a few bytes, because the predicted peak
    rounds up the bytes that the allocator loses to gaps.
    """
    least, all_moved = load.smallest_swap_limit, in_flight * load.moved_bytes
    limit = min(math.floor(free_bytes), all_moved)
    while limit > least and load.peak_bytes(in_flight, limit) > budget:
        limit -= 1
    while limit < all_moved and load.peak_bytes(in_flight, limit + 1) <= budget:
        limit += 1
    return limit


@dataclass(frozen=True, slots=True)
class _Front:
    """The Pareto-optimal choices of directives for a run of blocks.

    ``columns``     one row per choice, with five columns: seconds; bytes kept; bytes offloaded; the most bytes
                    offloaded by one block; bytes of workspace
    ``directives``  one row per choice, with the directive of each block, as an index into the allowed directives
    ``exact``       whether no choice was left out
    """

    columns: Floats
    directives: NDArray[np.int8]
    exact: bool

    def pick(self, rows: NDArray[np.intp]) -> _Front:
        return replace(self, columns=self.columns[rows], directives=self.directives[rows])


class _Base(NamedTuple):
    """The costs of a stage that do not depend on directives.

    ``static``             device bytes that are held during the whole step
    ``boundary``           device bytes of tensors in transit from and to other stages
    ``host``               bytes in the offload tier
    ``streaming_seconds``  seconds for which parameter offload occupies the link to the tier
    ``gaps``               the bytes that the allocator loses to gaps
    """

    static: int
    boundary: int
    host: int
    streaming_seconds: float
    gaps: Gaps


class ExactStageFitter:
    """Chooses directives for stages of one profile on one kind of device, and caches the results.

    ``exact`` becomes False if some choices could not be evaluated. ``host_states`` are the fractions of offloaded
    states to try, smallest first.
    """

    def __init__(
        self,
        profile: ModelProfile,
        device: Device,
        *,
        allowed: Sequence[Directive],
        host_states: Sequence[OffloadFractions] = (ALL_ON_DEVICE,),
    ) -> None:
        self._profile, self._device, self._host_states = profile, device, host_states
        self._allowed = [directive for directive in OFFERED if directive in allowed]
        self._kinds, self._costs = block_kinds(profile)
        self._shares = any(cost.shared != NOTHING for cost in self._costs)
        self.exact = True
        self._most = max(LEAST_FRONT, FRONT // len(self._kinds) ** 2)
        self.effort = 0
        self.fit = lru_cache(maxsize=None)(self._fit)
        self._base = lru_cache(maxsize=None)(self._find_base)
        self._options = lru_cache(maxsize=None)(self._find_options)
        self._front = lru_cache(maxsize=None)(self._find_front)
        self._leanest = lru_cache(maxsize=None)(self._find_leanest)

    def _fit(self, start: int, stop: int, where: StageSetting) -> tuple[StageChoice, ...]:
        """Return the choices for a stage of the blocks ``start`` to ``stop`` − 1 under the conditions ``where``; an
        empty tuple if nothing fits.

        A choice is omitted if another one is better both per micro-batch and at the end of the step.
        """
        found: list[StageChoice] = []
        for offload in self._host_states:
            if offload.sharded and where.replicas == 1 and found:
                continue  # one replica has nothing to shard
            choice = self._fastest(start, stop, where, offload)
            if (
                offload.sharded
                and choice is not None
                and any(other.seconds <= choice.seconds * TIE for other in found)
            ):
                continue  # sharded parameters are broadcast after each step, so sharding only pays for memory
            if choice is not None and not any(_no_worse(other, choice) for other in found):
                found = [other for other in found if not _no_worse(choice, other)] + [choice]
                all_kept = set(choice.plan.directives) == {Directive.KEEP}
                if offload == ALL_ON_DEVICE and all_kept:
                    break  # offloading cannot improve on this
        return tuple(found)

    def _fastest(
        self, start: int, stop: int, where: StageSetting, offload: OffloadFractions
    ) -> StageChoice | None:
        """Return the choice of directives for the blocks ``start`` to ``stop`` − 1 with the least seconds per
        micro-batch.

        The result is None if nothing fits.
        """
        if Directive.KEEP in self._allowed:
            choice = self._evaluate(start, (Directive.KEEP,) * (stop - start), where, offload)
            if choice is not None:
                return choice
        kinds, exchange = self._kinds[start:stop], self._exchange_seconds(where)
        lean = self._leanest(kinds, where.rows, where.split, exchange)
        if not self._fits(lean, start, stop, where, offload).any():
            return None
        front = self._front(kinds, where.rows, where.split, exchange)
        self.exact &= front.exact
        # A truncated front may have lost the only choice that fits.
        for choices in (front, lean):
            fitting = self._fits(choices, start, stop, where, offload) & self._fits_tier(
                choices, start, stop, where, offload
            )
            if fitting.any():
                found = choices.pick(np.flatnonzero(fitting))
                moved = found.columns[:, _MOVED]
                largest = found.columns[:, _LARGEST]
                spare = self._device.memory_bytes - self._needed(found, start, stop, where, offload)
                base = self._base(start, stop, where, offload)
                passing = base.boundary + _passing(found, where.in_flight, largest)
                free_bytes = largest + base.gaps.more(passing, spare)
                leaving = leaving_bytes(moved, where.in_flight, free_bytes)
                copying = copying_seconds(self._device, leaving) + base.streaming_seconds
                waiting = self._waiting(found, start, stop, where, offload)
                seconds = np.maximum(found.columns[:, _SECONDS] + waiting, copying)
                best = int(np.lexsort((moved, seconds))[0])
                return self._evaluate(start, self._named(found.directives[best]), where, offload)
        return None

    def least_bytes(self, start: int, stop: int, where: StageSetting) -> float:
        """Return the smallest device memory, in bytes, in which a stage of the blocks ``start`` to ``stop`` − 1 runs.

        The result is infinite if the offload tier is too small.
        """
        return min(self._least(start, stop, where, offload) for offload in self._host_states)

    def _least(
        self, start: int, stop: int, where: StageSetting, offload: OffloadFractions
    ) -> float:
        kinds, exchange = self._kinds[start:stop], self._exchange_seconds(where)
        lean = self._leanest(kinds, where.rows, where.split, exchange)
        smallest = self._needed(lean, start, stop, where, offload).argmin()
        if not self._fits_tier(lean, start, stop, where, offload)[smallest]:
            front = self._front(kinds, where.rows, where.split, exchange)
            lean = replace(lean, columns=np.vstack([lean.columns, front.columns]))
        fits_tier = self._fits_tier(lean, start, stop, where, offload)
        needed = np.where(fits_tier, self._needed(lean, start, stop, where, offload), np.inf)
        return float(needed.min())

    def _evaluate(
        self,
        start: int,
        directives: tuple[Directive, ...],
        where: StageSetting,
        offload: OffloadFractions,
    ) -> StageChoice | None:
        return evaluate_stage(self._profile, self._device, start, directives, where, offload)

    def _fits(
        self, front: _Front, start: int, stop: int, where: StageSetting, offload: OffloadFractions
    ) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = (
            self._needed(front, start, stop, where, offload) <= self._device.memory_bytes
        )
        return fits

    def _waiting(
        self, front: _Front, start: int, stop: int, where: StageSetting, offload: OffloadFractions
    ) -> Floats:
        """Return, for each choice in ``front``, the seconds per micro-batch that a backward waits for offloaded
        activations.

        The backward waits if no memory is free to prefetch them. Otherwise the seconds are 0.
        """
        moved, largest = front.columns[:, _MOVED], front.columns[:, _LARGEST]
        free_bytes = buffer_bytes(largest, where.in_flight * moved)
        buffered = (
            self._needed(front, start, stop, where, offload, free_bytes)
            <= self._device.memory_bytes
        )
        read = self._device.read
        seconds = np.where(moved > 0, read.latency_seconds + moved / read.bytes_per_second, 0.0)
        waiting: Floats = np.where(buffered, 0.0, seconds)
        return waiting

    def _needed(
        self,
        front: _Front,
        start: int,
        stop: int,
        where: StageSetting,
        offload: OffloadFractions,
        limit: Floats | None = None,
    ) -> Floats:
        """Return the device bytes of each choice in ``front`` for a stage of the blocks ``start`` to ``stop`` − 1, by
        the same sum as :meth:`StageLoad.peak_bytes`.

        ``limit`` has the swap limit of each choice. Without ``limit``, the smallest possible swap limits are used.
        """
        base = self._base(start, stop, where, offload)
        limit = front.columns[:, _LARGEST] if limit is None else limit
        passing = base.boundary + _passing(front, where.in_flight, limit)
        needed: Floats = base.static + passing + base.gaps.lost_each(passing)
        return needed

    def _fits_tier(
        self, front: _Front, start: int, stop: int, where: StageSetting, offload: OffloadFractions
    ) -> NDArray[np.bool_]:
        moved = front.columns[:, _MOVED]
        slot_bytes = np.where(
            moved > 0, np.ceil(where.in_flight * moved * TIER_SLACK) + TIER_FLOOR, 0
        )
        fits: NDArray[np.bool_] = (
            slot_bytes + self._base(start, stop, where, offload).host <= self._device.tier_bytes
        )
        return fits

    def _named(self, directives: NDArray[np.int8]) -> tuple[Directive, ...]:
        return tuple(self._allowed[d] for d in directives)

    def _find_base(
        self, start: int, stop: int, where: StageSetting, offload: OffloadFractions
    ) -> _Base:
        """Return the costs of a stage that do not depend on directives."""
        load = load_stage(
            self._profile,
            start,
            (Directive.KEEP,) * (stop - start),
            where.rows,
            device=self._device,
            offload=offload,
            replicas=where.replicas,
            split=where.split,
            beside=where.beside,
        )
        return _Base(
            load.static_bytes,
            load.boundary_bytes,
            load.host_state_bytes,
            load.states.streaming_seconds,
            load.gaps,
        )

    def _exchange_seconds(self, where: StageSetting) -> float | None:
        """Return the seconds in which replicas exchange statistics of a BatchNorm; None if they do not."""
        if not any(cost.norms for cost in self._costs):
            return None  # so that stages of different numbers of replicas share their choices
        return self._device.exchange_seconds(where.replicas)

    def _find_options(self, kind: int, rows: int, split: bool, exchange: float | None) -> Floats:
        """Return the costs of a block of this ``kind``, one row per allowed directive, with the columns of
        :class:`_Front`: first those after a block with another directive, then those after one with the same directive,
        which saves some of the tensors already.
        """
        how: Any = {"speed": self._device.speed, "split": split, "exchange_seconds": exchange}
        cost = self._costs[kind]
        return np.array(
            [
                [_columns(load_block(cost, d, rows, shares=shares, **how)) for d in self._allowed]
                for shares in (False, True)
            ]
        )

    def _find_front(self, kinds: Kinds, rows: int, split: bool, exchange: float | None) -> _Front:
        """Return the Pareto-optimal choices of directives for consecutive blocks of these ``kinds``, with ``rows`` rows
        per micro-batch. ``split`` is True if the schedule splits backwards. ``exchange``: the seconds in which replicas
        exchange statistics of a BatchNorm; None if they do not."""
        if not kinds:
            return _Front(np.zeros((1, 5)), np.zeros((1, 0), np.int8), True)
        before = self._front(kinds[:-1], rows, split, exchange)
        grown = []
        size = len(before.columns)
        for index, (other, same) in enumerate(
            zip(*self._options(kinds[-1], rows, split, exchange), strict=True)
        ):
            shares = (before.directives[:, -1:] == index).any(axis=1)
            option = np.where(shares[:, None], same, other)
            sums = before.columns[:, : _MOVED + 1] + option[:, : _MOVED + 1]
            grown.append(
                np.hstack([sums, np.maximum(before.columns[:, _LARGEST:], option[:, _LARGEST:])])
            )
        directives = np.hstack(
            [
                np.tile(before.directives, (len(grown), 1)),
                np.repeat(np.arange(len(grown), dtype=np.int8), size)[:, None],
            ]
        )
        front = _Front(np.vstack(grown), directives, before.exact)
        alike = [np.arange(len(front.columns))]
        if self._shares:  # what the next block costs depends on the directive of this one
            alike = [np.flatnonzero(directives[:, -1] == d) for d in range(len(grown))]
        front = front.pick(
            np.concatenate([each[_undominated(front.columns[each])] for each in alike])
        )
        self.effort += len(front.columns)
        if len(front.columns) > self._most:  # keep an even selection by size
            by_bytes = np.argsort(
                front.columns[:, _KEPT] + front.columns[:, _LARGEST], kind="stable"
            )
            chosen = by_bytes[np.linspace(0, len(by_bytes) - 1, self._most).astype(np.intp)]
            front = replace(front.pick(np.sort(chosen)), exact=False)
        return front

    def _find_leanest(self, kinds: Kinds, rows: int, split: bool, exchange: float | None) -> _Front:
        """Return choices of directives that keep few bytes on the device.

        For each pair of bounds, one on workspace bytes and one on the bytes that one block offloads, the result has the
        choice within both bounds that keeps the fewest bytes. So it includes the smallest choice for any number of
        micro-batches in flight.
        """
        each = np.array([self._options(kind, rows, split, exchange) for kind in kinds])
        options, sharing = each[:, 0], each[:, 1]
        found: dict[tuple[int, ...], Floats] = {}
        for work in self._bounds(options[:, :, _WORK]):
            for largest in self._bounds(options[:, :, _LARGEST]):
                allowed = (options[:, :, _WORK] <= work) & (options[:, :, _LARGEST] <= largest)
                if allowed.any(axis=1).all():
                    best = np.where(allowed, options[:, :, _KEPT], np.inf).argmin(axis=1)
                    at = np.arange(len(kinds)), best
                    same = np.diff(best, prepend=-1) == 0
                    chosen = np.where(same[:, None], sharing[at], options[at])
                    found[tuple(best)] = np.hstack(
                        [chosen[:, : _MOVED + 1].sum(0), chosen[:, _LARGEST:].max(0)]
                    )
        return _Front(np.array(list(found.values())), np.array(list(found), np.int8), True)

    def _bounds(self, values: Floats) -> Floats:
        """Return the bounds to try: all distinct ``values``, or a selection of them that includes the largest."""
        found = np.unique(values)
        if len(found) > MOST_BOUNDS:
            self.exact = False
            found = found[np.linspace(0, len(found) - 1, MOST_BOUNDS).astype(np.intp)]
        return found


def _columns(load: BlockLoad) -> tuple[float, ...]:
    work = max(load.forward_work, load.backward_work)
    return (
        load.forward_seconds + load.backward_seconds,
        load.held_bytes,
        load.transferred_bytes,
        load.moved_bytes,
        work,
    )


def _passing(front: _Front, in_flight: int, limit: Floats) -> Floats:
    """Return the transient bytes of each choice in ``front``, without those of the boundary.

    ``in_flight`` is the number of micro-batches in flight, and ``limit`` has the swap limit of each choice.
    """
    passing: Floats = in_flight * front.columns[:, _KEPT] + limit + front.columns[:, _WORK]
    return passing


def _no_worse(one: StageChoice, other: StageChoice) -> bool:
    return one.seconds <= other.seconds and one.tail_seconds <= other.tail_seconds


def _undominated(columns: Floats) -> NDArray[np.intp]:
    """Return the indices of the rows that no other row dominates. A row dominates another if no column of it is larger.

    Of equal rows, the first is returned.
    """
    left = np.lexsort(columns.T[::-1])
    others = np.ascontiguousarray(columns[left].T)
    front = []
    while len(left):  # in lexical order no later row dominates the first
        front.append(left[0])
        better = (others[1:] < others[1:, :1]).any(axis=0)  # the first column is sorted
        left, others = left[better], others[:, better]
    return np.array(front, dtype=np.intp)
