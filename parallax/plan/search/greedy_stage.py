"""Choose keep, recompute or offload for the blocks of a pipeline rank by a greedy rule, for thousands of blocks.

Blocks are ordered by recomputation seconds per byte freed. The cheapest blocks are recomputed and the most expensive
ones offloaded, as many of each as the budget needs. If all blocks are equal, this is optimal. With prefix sums a query
takes microseconds. Results are cached by the costs of the blocks, so stages of equal blocks are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cluster import Device, Link
from parallax.plan.cost.allocator import Gaps
from parallax.plan.cost.collective import broadcast_seconds
from parallax.plan.cost.communicators import Beside, connection_bytes
from parallax.plan.cost.stage import BlockLoad, load_block
from parallax.plan.cost.states import (
    OffloadFractions,
    Sizes,
    StateLoad,
    load_states,
    tied_bytes,
)
from parallax.plan.cost.traffic import (
    TIER_FLOOR,
    TIER_SLACK,
    buffer_bytes,
    copying_seconds,
    leaving_bytes,
)
from parallax.plan.plan import EACH_MICRO_BATCH, Directive, Visits
from parallax.plan.profile import ModelProfile
from parallax.plan.search.boundaries import BlockChain
from parallax.plan.search.exact_stage import OFFERED
from parallax.plan.search.request import ROUNDING

Floats = NDArray[np.float64]
Part = tuple[int, int, int]  # start block, stop block, micro-batches in flight
Content = tuple[object, ...]
# Fractions of offloaded states, the resulting costs, and seconds after the last micro-batch.
_States = tuple[OffloadFractions, StateLoad, float]
_Answer = tuple[float, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GreedyStage:
    """The greedy choice for a pipeline rank.

    ``seconds``     seconds per micro-batch
    ``cost``        ``seconds`` plus the seconds after the last micro-batch divided by the number of micro-batches
    ``offload``     the fractions of offloaded states
    ``recomputed``  indices of the recomputed blocks
    ``offloaded``   indices of the offloaded blocks

    Indices count the blocks of all stages of the pipeline rank, from 0.
    """

    seconds: float
    cost: float
    offload: OffloadFractions
    recomputed: tuple[int, ...]
    offloaded: tuple[int, ...]

    def directives(
        self, parts: Sequence[Part], allowed: Sequence[Directive]
    ) -> list[tuple[Directive, ...]]:
        """Return the directives of the blocks, one tuple for each of the ``parts`` (stages)."""
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


@dataclass(frozen=True, slots=True)
class _Sums:
    """The costs of one pipeline rank for each number of recomputed and of offloaded blocks.

    Blocks are recomputed from the start of ``order``, and offloaded from its end.

    ``in_flight``          largest number of micro-batches in flight
    ``order``              the blocks, by recomputation seconds per byte freed
    ``offloaded``          the numbers of offloaded blocks: 0, 1, …
    ``compute``            seconds of forwards and backwards without recomputation and offloading
    ``first``              seconds of the forwards until each block has been visited once
    ``recompute_freed``    entry n: bytes freed if the first n blocks of ``order`` are recomputed
    ``recompute_seconds``  entry n: seconds of recomputing these blocks

    Entry n of each other array is for n offloaded blocks:

    ``offload_seconds``  slowdown of compute by offloading
    ``moved``            bytes offloaded per micro-batch
    ``gone``             bytes offloaded by all micro-batches in flight
    ``largest``          the most bytes offloaded by one block
    ``places``           bytes in the tier
    ``base``             bytes of activations that stay on the device
    ``plain``            workspace bytes without recomputation
    ``both``             workspace bytes with recomputation
    ``kept``             bytes of activations if every block keeps them
    ``buffers``          swap limits to try, each with the seconds that a backward waits under it. A limit for two
                         blocks lets reads overlap with compute. A limit for one block does not.
    """

    in_flight: int
    order: NDArray[np.int64]
    offloaded: NDArray[np.int64]
    compute: float
    first: float
    recompute_freed: Floats
    recompute_seconds: Floats
    offload_seconds: Floats
    moved: Floats
    gone: Floats
    largest: Floats
    places: Floats
    base: Floats
    plain: Floats
    both: Floats
    kept: float
    buffers: tuple[tuple[Floats, Floats], ...]


@dataclass(frozen=True)
class PipelineRankKind:
    """The properties that all pipeline ranks of one kind share.

    ``device``           the device of each rank
    ``link``             the link between the replicas
    ``rows``             rows of each micro-batch on the rank that has the most rows
    ``replicas``         number of replicas
    ``micro_batches``    number of micro-batches in a step
    ``split``            whether the schedule splits backwards
    ``beside``           the largest numbers of ranks of the stages before and after
    ``visits``           how often each block runs in a step (:class:`~parallax.plan.plan.Visits`)
    ``boundaries_held``  number of boundary tensors held (:func:`~parallax.plan.plan.boundaries_held`)
    """

    device: Device
    link: Link
    rows: int
    replicas: int
    micro_batches: int
    split: bool
    beside: Beside | None = None
    visits: Visits = EACH_MICRO_BATCH
    boundaries_held: int = 0


class _Columns:
    """The cost of each block under each directive: seconds, bytes per micro-batch, and workspace bytes of a running
    pass."""

    def __init__(self, chain: BlockChain, kind: PipelineRankKind) -> None:
        how: Any = {
            "speed": kind.device.speed,
            "split": kind.split,
            "exchange_seconds": kind.device.exchange_seconds(kind.replicas),
        }
        loads = {
            d: [load_block(cost, d, kind.rows, **how) for cost in chain.costs] for d in OFFERED
        }

        def column(directive: Directive, of: Callable[[BlockLoad], float]) -> Floats:
            costs = np.array([of(load) for load in loads[directive]], dtype=np.float64)
            return costs[chain.kinds]

        def both(load: BlockLoad) -> float:
            return load.forward_seconds + load.backward_seconds

        self.seconds = column(Directive.KEEP, both)
        self.forward = column(Directive.KEEP, lambda load: load.forward_seconds)
        self.least_sums = [0.0, *(np.cumsum(self.seconds) * ROUNDING).tolist()]
        self.again = column(Directive.RECOMPUTE, lambda load: load.recompute_seconds)
        self.slower = column(Directive.OFFLOAD, both) - self.seconds
        self.moved = column(Directive.OFFLOAD, lambda load: load.moved_bytes)
        self.kept = {d: column(d, lambda load: load.held_bytes) for d in OFFERED}
        once = [
            load_block(cost, Directive.KEEP, kind.rows, shares=True, **how).held_bytes
            for cost in chain.costs
        ]
        self.shared = self.kept[Directive.KEEP] - np.array(once, dtype=np.float64)[chain.kinds]
        self.work = {
            d: column(d, lambda load: max(load.forward_work, load.backward_work)) for d in OFFERED
        }
        inputs = [cost.input.at(kind.rows) for cost in chain.costs]
        leaving = [math.ceil(2 * cost.output.at(kind.rows)) for cost in chain.costs]
        self.inputs = np.array(inputs)[chain.kinds]
        self.entering = np.ceil(2 * self.inputs).astype(np.int64)
        self.leaving = np.array(leaving)[chain.kinds]
        self.leaving[-1] = chain.costs[chain.kinds[-1]].gathered_bytes


class GreedyStages:
    """Chooses directives for all pipeline ranks of one ``kind``.

    ``allowed``      the directives that blocks may have
    ``host_states``  the fractions of offloaded states to try
    ``stated``       cache for the costs of states, shared by kinds that differ only in their rows
    """

    def __init__(
        self,
        profile: ModelProfile,
        chain: BlockChain,
        kind: PipelineRankKind,
        *,
        allowed: Sequence[Directive],
        host_states: Sequence[OffloadFractions],
        stated: dict[tuple[Sizes, Visits], list[_States]],
    ) -> None:
        self._profile, self._chain, self._kind = profile, chain, kind
        self._device, self._stated = kind.device, stated
        self._allowed = [d for d in OFFERED if d in allowed]
        self._host_states = [b for b in host_states if kind.replicas > 1 or not b.sharded] or list(
            host_states
        )
        self._columns = _Columns(chain, kind)
        self._known: dict[Content, GreedyStage | None] = {}
        self._found: dict[tuple[Part, ...], GreedyStage | None] = {}
        self._least: dict[Content, float] = {}

    @property
    def seconds(self) -> Floats:
        """Seconds of forward and backward of each block that keeps its activations."""
        return self._columns.seconds

    def find(self, parts: tuple[Part, ...]) -> GreedyStage | None:
        """Return the fastest choice of blocks to recompute and to offload, for a pipeline rank whose stages are
        ``parts``; None if nothing fits."""
        if parts not in self._found:
            content = self._content(parts)
            if content not in self._known:
                self._known[content] = self._fastest(parts)
            self._found[parts] = self._known[content]
        return self._found[parts]

    def least_seconds(self, start: int, stop: int) -> float:
        """Return a lower bound on the cost of the blocks ``start`` to ``stop`` − 1."""
        return self._columns.least_sums[stop] - self._columns.least_sums[start]

    def least_bytes(self, parts: tuple[Part, ...]) -> float:
        """Return the smallest device memory, in bytes, in which a pipeline rank with the stages ``parts`` runs.

        The result is infinite if the capacity of the offload tier is too small.
        """
        content = self._content(parts)
        if content not in self._least:
            self._least[content] = self._fewest(parts)
        return self._least[content]

    def _content(self, parts: tuple[Part, ...]) -> Content:
        """Return a cache key for the pipeline rank whose stages are ``parts``. Equal keys mean equal costs."""
        blocks = tuple(
            (self._chain.kinds[start:stop].tobytes(), in_flight) for start, stop, in_flight in parts
        )
        ends = tuple((start == 0, stop == len(self._chain.kinds)) for start, stop, _ in parts)
        return blocks, ends, self._sizes(parts), self._rest(parts)

    def _fastest(self, parts: tuple[Part, ...]) -> GreedyStage | None:
        """Return the choice with the least cost over all fractions of offloaded states that fit.

        The cost includes the seconds after the last micro-batch. Of equal choices the first is returned, which offloads
        least.
        """
        sums, best, rest = self._sums(parts), None, self._rest(parts)
        gaps = self._gaps(parts)
        for offload, states, after in self._states(parts):
            after += max(0.0, states.ahead_seconds - sums.first)
            tail = after / self._kind.micro_batches + states.adding_seconds
            if best is not None and max(sums.compute, states.streaming_seconds) + tail >= best.cost:
                continue
            free = self._device.memory_bytes - states.device_bytes - rest
            free_bytes = gaps.capacity(free) - self._boundary(parts)
            tier = self._device.tier_bytes - states.host_bytes
            found = (
                self._fill(sums, free_bytes, tier, states.streaming_seconds)
                if free_bytes > 0 and tier >= 0
                else None
            )
            if (
                found is not None
                and best is not None
                and not offload.sharded
                and found[0] + tail >= best.cost
            ):
                break  # offloading more states would not pay either
            if found is not None and (best is None or found[0] + tail < best.cost):
                best = GreedyStage(found[0], found[0] + tail, offload, found[1], found[2])
        return best

    def _fewest(self, parts: tuple[Part, ...]) -> float:
        sums, least, static = self._sums(parts), math.inf, self._rest(parts)
        rest = sums.offloaded[::-1]  # every block that is not offloaded is recomputed
        base = np.array([sums.kept, *sums.base[1:]])
        plain = np.where(self._permitted(0 * rest, sums.offloaded), base + sums.plain, np.inf)
        again = np.where(
            self._permitted(rest, sums.offloaded),
            sums.base + sums.both - sums.recompute_freed[rest],
            np.inf,
        )
        passing = np.minimum(plain, again) + sums.largest + self._boundary(parts)
        for _, states, _ in self._states(parts):
            able = passing[sums.places <= self._device.tier_bytes - states.host_bytes].min(
                initial=np.inf
            )
            if able < math.inf:
                least = min(
                    least,
                    static + states.device_bytes + able + self._gaps(parts).lost(able),
                )
        return least

    def _states(self, parts: tuple[Part, ...]) -> list[_States]:
        """Return the costs of parameters, gradients and optimizer states for each fraction of offloaded states."""
        key = sizes, visits = self._sizes(parts), self._kind.visits.at(parts[0][0])
        if key not in self._stated:
            self._stated[key] = [
                self._load(sizes, visits, offload) for offload in self._host_states
            ]
        return self._stated[key]

    def _load(self, sizes: Sizes, visits: Visits, offload: OffloadFractions) -> _States:
        kind = self._kind
        states = load_states(
            self._profile,
            sizes,
            self._device,
            offload,
            kind.replicas,
            split=kind.split,
            visits=visits,
        )
        sent = (
            broadcast_seconds(sizes.trained, self._kind.replicas, self._kind.link)
            if offload.sharded
            else 0.0
        )
        return offload, states, states.update_seconds + sent

    def _rest(self, parts: tuple[Part, ...]) -> int:
        """Return the device bytes of a pipeline rank that directives do not change.

        Parameters, gradients and optimizer states are not included.
        """
        bounds = [(start, stop) for start, stop, _ in parts]
        connections = connection_bytes(
            self._profile, self._device, bounds, self._kind.replicas, self._kind.beside
        )
        return self._buffer_bytes(parts) + self._device.fixed_bytes + connections

    def _gaps(self, parts: tuple[Part, ...]) -> Gaps:
        inputs = [float(self._columns.inputs[start:stop].max()) for start, stop, _ in parts]
        return Gaps.of(self._device, max(inputs))

    def _sizes(self, parts: tuple[Part, ...]) -> Sizes:
        chain, shared, tied = self._chain, self._profile.shared, self._profile.ties
        block, parameter, untied = (
            max(int(of[a:b].max()) for a, b, _ in parts)
            for of in (chain.block_bytes, chain.largest_bytes, chain.untied_bytes)
        )
        parameters = _unique(chain.parameter_sums, shared, parts)
        trained = _unique(chain.trained_sums, tied, parts)
        return Sizes(
            parameters,
            block,
            parameter,
            trained,
            parameters - sum(tied_bytes(shared, start, stop) for start, stop, _ in parts),
            trained - sum(tied_bytes(tied, start, stop) for start, stop, _ in parts),
            untied,
        )

    def _buffer_bytes(self, parts: tuple[Part, ...]) -> int:
        return sum(
            int(self._chain.buffer_sums[stop] - self._chain.buffer_sums[start])
            for start, stop, _ in parts
        )

    def _boundary(self, parts: tuple[Part, ...]) -> int:
        leaving = [int(self._columns.leaving[stop - 1]) for _, stop, _ in parts]
        entering = [int(self._columns.entering[start]) for start, _, _ in parts if start > 0]
        if self._kind.boundaries_held:  # a column has the bytes of two tensors
            return math.ceil(self._kind.boundaries_held / 2) * max(*leaving, *entering)
        return sum(entering) + sum(leaving)

    def _sums(self, parts: tuple[Part, ...]) -> _Sums:
        """Return the costs of a pipeline rank for each number of recomputed and of offloaded blocks, as prefix sums."""
        blocks = np.concatenate([np.arange(start, stop) for start, stop, _ in parts])
        in_flight_by_block = np.concatenate(
            [np.full(stop - start, in_flight, dtype=np.float64) for start, stop, in_flight in parts]
        )
        keep, again, moved = (
            self._columns.kept[Directive.KEEP][blocks],
            self._columns.again[blocks],
            self._columns.moved[blocks],
        )
        freed = np.maximum(
            0.0, in_flight_by_block * (keep - self._columns.kept[Directive.RECOMPUTE][blocks])
        )
        # Of equal blocks the first are offloaded: their backward is last, so there is most time to prefetch them.
        order = np.lexsort((-np.arange(len(blocks)), again / np.maximum(freed, 1e-9)))
        offloaded = np.arange(len(blocks) + 1)
        gone = _prefixes((in_flight_by_block * moved)[order][::-1])
        work = {
            directive: float(self._columns.work[directive][blocks].max()) for directive in OFFERED
        }
        offloading = max(work[Directive.KEEP], work[Directive.OFFLOAD])
        plain = np.where(offloaded > 0, offloading, work[Directive.KEEP])
        moving, largest = _prefixes(moved[order][::-1]), np.where(offloaded > 0, moved.max(), 0.0)
        return _Sums(
            in_flight=max(in_flight for _, _, in_flight in parts),
            order=order,
            offloaded=offloaded,
            compute=float(self._columns.seconds[blocks].sum()),
            first=self._kind.visits.micro_batches * float(self._columns.forward[blocks].sum()),
            recompute_freed=_prefixes(freed[order]),
            recompute_seconds=_prefixes(again[order]),
            offload_seconds=_prefixes(self._columns.slower[blocks][order][::-1]),
            moved=moving,
            gone=gone,
            largest=largest,
            places=np.where(offloaded > 0, np.ceil(gone * TIER_SLACK) + TIER_FLOOR, 0.0),
            base=float((in_flight_by_block * keep).sum()) - gone,
            plain=plain,
            both=np.maximum(plain, work[Directive.RECOMPUTE]),
            kept=float((in_flight_by_block * keep).sum())
            - sum(n * float(self._columns.shared[a + 1 : b].sum()) for a, b, n in parts),
            buffers=self._swap_buffers(moving, gone, largest, stages=len(parts)),
        )

    def _fill(self, sums: _Sums, free_bytes: float, tier: int, streaming: float) -> _Answer | None:
        """Return the fastest choice within ``free_bytes`` of the device; None if no choice fits.

        The choice is its seconds per micro-batch, the recomputed blocks and the offloaded blocks. ``tier`` is the
        capacity of the offload tier in bytes. Parameter offload occupies the link to the tier for ``streaming`` seconds
        per micro-batch.
        """
        count = len(sums.order)
        if Directive.KEEP in self._allowed and sums.kept + sums.plain[0] <= free_bytes:
            return max(sums.compute, streaming), (), ()
        best, answer = math.inf, None
        for limit, waiting in sums.buffers:
            least = np.maximum(
                1,
                np.searchsorted(
                    sums.recompute_freed, sums.base + limit + sums.both - free_bytes - 1e-6
                ),
            )
            recomputed = np.where(sums.base + limit + sums.plain <= free_bytes, 0, least)
            if Directive.KEEP not in self._allowed:
                recomputed = np.maximum(recomputed, count - sums.offloaded)
            possible = (sums.places <= tier) & (recomputed + sums.offloaded <= count)
            possible &= self._permitted(recomputed, sums.offloaded)
            first = np.minimum(recomputed, count)
            work = np.where(recomputed > 0, sums.both, sums.plain)
            free = free_bytes - (sums.base - sums.recompute_freed[first] + work)
            leaving = leaving_bytes(sums.moved, sums.in_flight, free)
            copying = streaming + copying_seconds(self._device, leaving)
            computing = (
                sums.compute + sums.recompute_seconds[first] + sums.offload_seconds + waiting
            )
            seconds = np.where(possible, np.maximum(computing, copying), np.inf)
            chosen = int(seconds.argmin())
            if seconds[chosen] < best:
                best = float(seconds[chosen])
                again, last = int(recomputed[chosen]), count - chosen
                answer = best, tuple(sums.order[:again].tolist()), tuple(sums.order[last:].tolist())
        return answer

    def _swap_buffers(
        self, moved: Floats, gone: Floats, largest: Floats, *, stages: int
    ) -> tuple[tuple[Floats, Floats], ...]:
        nothing = np.zeros_like(moved)
        if Directive.OFFLOAD not in self._allowed:
            return ((nothing, nothing),)
        if stages > 1:  # each has a limit of its own, of one block at least
            return ((moved, nothing),)
        read = self._device.read
        waiting = np.where(moved > 0, read.latency_seconds + moved / read.bytes_per_second, 0.0)
        return (buffer_bytes(largest, gone), nothing), (largest, waiting)

    def _permitted(
        self, recomputed: NDArray[np.int64], offloaded: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return, for each pair of a number of recomputed and of offloaded blocks, whether the allowed directives
        permit it."""
        permitted = np.ones(len(offloaded), dtype=np.bool_)
        if Directive.RECOMPUTE not in self._allowed:
            permitted &= recomputed == 0
        if Directive.OFFLOAD not in self._allowed:
            permitted &= offloaded == 0
        if Directive.KEEP not in self._allowed:
            permitted &= recomputed + offloaded == len(offloaded) - 1
        return permitted


def _unique(
    sums: NDArray[np.int64], ties: Sequence[tuple[int, tuple[int, ...]]], parts: tuple[Part, ...]
) -> int:
    """Return the bytes of the parameters of all ``parts`` (stages).

    ``sums`` are prefix sums of the bytes of parameters over the blocks, and ``ties`` has the parameters that several
    blocks share. If several blocks of one stage share a parameter, it counts once for this stage.
    """
    total = 0
    for start, stop, _ in parts:
        total += int(sums[stop] - sums[start])
        for size, users in ties:
            total -= size * max(0, sum(start <= user < stop for user in users) - 1)
    return total


def _prefixes(values: Floats) -> Floats:
    """Return prefix sums: the sums of the first 0, 1, … values."""
    return np.concatenate([[0.0], np.cumsum(values)])
