"""What no even pipeline of a shape can do better than: seconds of a step, before and after it was looked at closely.

A pipeline rank p with t seconds per micro-batch begins when the first micro-batch has come through those before it,
works ``M · t``, waits for what comes back from those after it, and ends before the last gradient has gone back through
those before it::

    step >= Σ of all pipeline ranks
            + t_p · (M − 1 − forwards of p that fit into its first wait · forward's share of t_p)

for every p. What stands behind t_p is its *weight*: most for the last pipeline rank, least for the first. How little
the most of weight times t can be over all cuts is found by cutting the blocks so
(:class:`~parallax.plan.search.greedy.GreedySearch`); before that, pipeline ranks are taken to be as even as the weights
allow. No rank updates before all have reduced their gradients, so an update comes on top.

The parts cannot be less than these, whatever is cut where and whatever becomes of activations:

* **max t**: the mean of all pipeline ranks; the largest block; the ⌈blocks / pipeline ranks⌉ cheapest blocks, since
  some pipeline rank has as many. Where one was shown to need more to fit its memory, that.
* **Σ**: all blocks, for as many rows as the fullest rank has; what of them cannot keep its activations is computed
  again or copied beside the computing; and the messages of a micro-batch that passes through.
* **M micro-batches, of which so many are in flight at most**: each is there for Σ at least, so the step takes
  ``M / in flight`` times that (Little 1961, "A proof for the queuing formula L = λW").
* **Weight halves** of a zero-bubble schedule: only blocks that keep their activations can put them off. What all
  pipeline ranks together can keep is what their memory leaves beside parameters and what training adds to them.
* **Once**: a loss of all rows, where there is one, and the update of the mean share of the parameters, by whichever
  way is fastest.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cost.stage import BlockLoad, gap_bytes, load_block
from parallax.plan.cost.states import Sizes, load_states
from parallax.plan.cost.traffic import copying_seconds
from parallax.plan.plan import Directive
from parallax.plan.profile import BlockCost
from parallax.plan.search.cuts import block_kinds, even_cuts
from parallax.plan.search.request import ROUNDING, Request, Shape


@dataclass(frozen=True, slots=True)
class _Rows:
    """All blocks for so many rows on the fullest rank: the largest share of forward in any, their seconds in all, those
    of the weight halves, and the least seconds of so many blocks. ``common`` is the kind of block that takes most of
    them, there are ``count`` of it; one takes ``again`` seconds to compute again, ``copying`` to leave and
    come back."""

    forward_share: float
    seconds: float
    weight: float
    largest: float
    cheapest: NDArray[np.float64]
    sums: list[float]
    common: BlockLoad
    cost: BlockCost
    count: int
    message_bytes: float
    again: float
    copying: float


@dataclass(frozen=True)
class _Terms:
    """Of a shape, in seconds: all pipeline ranks for one micro-batch (``total``), what the ``slowest`` takes
    at least, the way of one micro-batch through all of them (``path``), the mean share's ``update``, the weight halves
    that can be put off (``deferred``) and what they save at most of the ramp (``halves``); the least ``ramp`` of
    pipeline ranks that are equally slow."""

    total: float
    slowest: float
    path: float
    update: float
    deferred: float
    halves: float
    ramp: float
    forward_share: float


class StepBound:
    """Lower bounds of the shapes of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._numbers, self._costs = block_kinds(request.profile)
        self._counts = Counter(self._numbers)
        self._common_bytes = self._parameters(self._numbers)
        self._speed = max(device.speed for device in request.devices)
        self._device = max(
            request.devices, key=lambda device: device.memory_bytes - device.fixed_bytes
        )
        self._rows = lru_cache(maxsize=None)(self._find_rows)
        self._update = lru_cache(maxsize=None)(self._find_update)

    def seconds(self, shape: Shape, least_cost: float = 0.0, least_weighted: float = 0.0) -> float:
        """No even pipeline of ``shape`` takes less; ``least_cost`` is what is known of the slowest pipeline rank:
        seconds per micro-batch, its part of what comes after the last one included; ``least_weighted`` of the one that
        is slowest by :meth:`weights`."""
        terms, micro_batches, fullness = (
            self._terms(shape),
            self.request.count(shape),
            self._fullness(shape),
        )
        least_cost, least_weighted = fullness * least_cost, fullness * least_weighted
        work = max(micro_batches * terms.slowest + terms.update, micro_batches * least_cost)
        if shape.interleave > 1:
            return float(max(work, self._dealt(shape) + terms.update) * ROUNDING)
        if not shape.schedule.searched:
            return float(work * ROUNDING)
        waits = self._waits(shape, terms.forward_share)
        even = (
            max(waits[0] * terms.slowest, terms.total / sum(1 / wait for wait in waits))
            + terms.update
        )
        slowest = max(even, waits[0] * least_cost, waits[-1] * least_weighted)
        queued = (
            micro_batches / self._in_flight(shape) * (terms.path - terms.deferred) + terms.update
        )
        return float(max(work, max(0.0, terms.path - terms.halves) + slowest, queued) * ROUNDING)

    def _dealt(self, shape: Shape) -> float:
        """Of several virtual stages per pipeline rank, whose cuts are known: a pipeline rank begins when the first
        stages of those before it have had their forward, and these have their backward after its last one, which weight
        halves of the pipeline rank may run beside."""
        if self.request.mixed:
            return 0.0
        rows = self._rows(self._mean_rows(shape), shape.split)
        cuts = even_cuts(rows.sums, shape.pipeline_ranks * shape.interleave)
        stages = [rows.sums[stop] - rows.sums[start] for start, stop in itertools.pairwise(cuts)]
        before = itertools.accumulate(
            [0.0 if shape.split else each for each in stages[: shape.pipeline_ranks - 1]],
            initial=0.0,
        )
        work = [
            self.request.count(shape) * sum(stages[stage] for stage in shape.stages_of(p))
            for p in range(shape.pipeline_ranks)
        ]
        return max(first + rest for first, rest in zip(before, work))

    def likely(self, shape: Shape) -> float:
        """What a pipeline of ``shape`` takes whose pipeline ranks are equally slow, as far as that is known before it
        is looked at: ``M · max + ramp · (Σ − max)``."""
        terms, micro_batches = self._terms(shape), self.request.count(shape)
        return max(micro_batches * terms.slowest + terms.ramp + terms.update, self.seconds(shape))

    def weighs(self, shape: Shape) -> bool:
        """Whether the pipeline ranks of ``shape`` are known to weigh anything."""
        return shape.schedule.searched and shape.interleave == 1

    def weights(self, shape: Shape) -> list[float]:
        """What a second of each pipeline rank's micro-batch costs a step, in seconds of the last one's."""
        if not self.weighs(shape):
            return [1.0] * shape.pipeline_ranks
        waits = self._waits(shape, self._terms(shape).forward_share)
        return [wait / waits[-1] for wait in waits]

    def ceiling(self, shape: Shape, most_seconds: float) -> float:
        """What the slowest pipeline rank may cost per micro-batch in a pipeline of ``shape`` that takes up to
        ``most_seconds``, all pipeline ranks being about equally slow: then a step takes ``M · max + ramp · (Σ −
        max)``."""
        terms, micro_batches = self._terms(shape), self.request.count(shape)
        if not shape.schedule.searched or most_seconds == math.inf:
            return most_seconds / micro_batches
        return max(0.0, most_seconds - terms.ramp) / micro_batches

    def weighted_ceiling(self, shape: Shape, most_seconds: float) -> float:
        """What the pipeline rank that is slowest by :meth:`weights` may cost per micro-batch in any pipeline that takes
        up to ``most_seconds``."""
        terms = self._terms(shape)
        wait = self._waits(shape, terms.forward_share)[-1]
        rest = most_seconds - max(0.0, terms.path - terms.halves)
        return max(0.0, rest / wait / self._fullness(shape))

    def _terms(self, shape: Shape) -> _Terms:
        replicas, pipeline_ranks = self._replicas(shape), shape.pipeline_ranks
        rows = self._rows(self._mean_rows(shape), shape.split)
        least = -(-len(self.request.profile.blocks) // pipeline_ranks)
        total, deferred = self._total(shape, rows, replicas), self._deferred(shape, rows, replicas)
        slowest = max(total / pipeline_ranks, rows.largest, float(rows.cheapest[least]))
        path = total + self._messages(shape, rows)
        halves = shape.schedule.ramp.halves * deferred * (pipeline_ranks - 1) / pipeline_ranks
        return _Terms(
            total=total,
            slowest=slowest,
            path=path,
            update=self._update(pipeline_ranks, replicas),
            deferred=deferred,
            halves=halves,
            ramp=max(0.0, (path - slowest) / shape.interleave - halves),
            forward_share=rows.forward_share,
        )

    def _waits(self, shape: Shape, forward_share: float) -> list[float]:
        """For each pipeline rank how many of its micro-batches' seconds a step has besides the way of one through all
        pipeline ranks: all but one, less the forwards that can run while the first is on its way through those
        above."""
        micro_batches, pipeline_ranks = self.request.count(shape), shape.pipeline_ranks
        ahead = shape.schedule.ramp.ahead
        hidden = [
            min(ahead * (pipeline_ranks - 1 - p), micro_batches - 1) for p in range(pipeline_ranks)
        ]
        return [max(micro_batches - 1 - count * forward_share, 1e-9) for count in hidden]

    def _mean_rows(self, shape: Shape) -> float:
        """Rows of a micro-batch on the fullest rank, the mean over all: micro-batches of a batch that they do not
        divide differ by a row."""
        replicas, count = self._replicas(shape), self.request.count(shape)
        fewest, more = divmod(self.request.global_batch, count)
        return (
            (count - more) * -(-fewest // replicas) + more * -(-(fewest + 1) // replicas)
        ) / count

    def _fullness(self, shape: Shape) -> float:
        """What of the cost of a micro-batch with most rows the mean one costs at least."""
        return self._mean_rows(shape) / -(-shape.microbatch // self._replicas(shape))

    def _replicas(self, shape: Shape) -> int:
        """Of the pipeline rank that has most."""
        asked = self.request.config.replicas
        if isinstance(asked, list | tuple):
            return max(int(count) for count in asked)
        return -(-len(self.request.devices) // shape.pipeline_ranks)

    def _messages(self, shape: Shape, rows: _Rows) -> float:
        """Seconds that a micro-batch spends between pipeline ranks, up and down."""
        cluster = self.request.cluster
        fast = max((cluster.local, cluster.remote), key=lambda link: link.bytes_per_second)
        return 2 * (shape.pipeline_ranks - 1) * fast.seconds(rows.message_bytes)

    def _in_flight(self, shape: Shape) -> int:
        """The most micro-batches that a pipeline has under way."""
        micro_batches = self.request.count(shape)
        if not shape.schedule.searched:
            return micro_batches
        return shape.schedule.in_flight(shape.pipeline_ranks, 0, micro_batches)

    def _deferred(self, shape: Shape, rows: _Rows, replicas: int) -> float:
        """The most seconds of weight halves of one micro-batch that all pipeline ranks together can put off."""
        if not shape.split:
            return 0.0
        allowed = self.request.allowed_in(shape)
        if Directive.KEEP not in allowed:
            return 0.0
        common = rows.count * rows.common.weight_seconds
        return rows.weight - common + common * self._kept_share(shape, rows, replicas)

    def _total(self, shape: Shape, rows: _Rows, replicas: int) -> float:
        """Seconds of all blocks for one micro-batch: what of the common ones cannot stay is computed again, or copied
        beside the computing of all."""
        allowed = self.request.allowed_in(shape)
        gone = 1.0 - (self._kept_share(shape, rows, replicas) if Directive.KEEP in allowed else 0.0)
        again, copied = rows.count * rows.again, rows.count * rows.copying
        if Directive.RECOMPUTE in allowed and Directive.OFFLOAD in allowed:
            return max(
                rows.seconds,
                (rows.seconds + again * gone) / (1 + again / copied) if copied > 0 else 0.0,
            )
        if Directive.RECOMPUTE in allowed:
            return rows.seconds + again * gone
        return max(rows.seconds, copied * gone if Directive.OFFLOAD in allowed else 0.0)

    def _kept_share(self, shape: Shape, rows: _Rows, replicas: int) -> float:
        """The most of the common blocks whose activations can stay: on each pipeline rank beside their own parameters,
        and on all together beside those of all."""
        held = rows.common.held_bytes
        if held <= 0 or not shape.schedule.searched:
            return 1.0
        device, pipeline_ranks, micro_batches = (
            self._device,
            shape.pipeline_ranks,
            self.request.count(shape),
        )
        free = device.memory_bytes - device.fixed_bytes - gap_bytes(device, rows.cost.input.at(1))
        room = free / (1 + device.gap_share) - min(
            rows.common.forward_work, rows.common.backward_work
        )
        if room <= 0:
            return 0.0
        flights = shape.schedule.least_flights(pipeline_ranks, micro_batches)
        static = self._static(replicas)
        apart = float((room / (flights * held + static / rows.count)).sum())
        together = (pipeline_ranks * room - static) / (float(flights.min()) * held)
        return min(1.0, max(0.0, min(apart, together)) / rows.count)

    def _static(self, replicas: int) -> float:
        """The fewest bytes on the device for the parameters of the common blocks."""
        profile, (parameters, trained) = self.request.profile, self._common_bytes
        states = profile.optimizer_bytes + profile.master_bytes
        return min(
            (1 - below.parameters) * (parameters + trained * profile.gradient_bytes)
            + (1 - below.optimizer) * trained * states / (replicas if below.sharded else 1)
            for below in self.request.host_states
        )

    def _parameters(self, numbers: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of parameters of the common blocks, and of those that are trained, each that is shared counted once
        and given away."""
        common, profile = self._common(), self.request.profile
        costs = [cost for number, cost in zip(numbers, profile.blocks) if number == common]
        parameters = sum(cost.parameter_bytes for cost in costs)
        trained = sum(cost.trained_bytes for cost in costs)
        return (
            max(0, parameters - sum(size * len(users) for size, users in profile.shared)),
            max(0, trained - sum(size * len(users) for size, users in profile.ties)),
        )

    def _common(self) -> int:
        def seconds(number: int) -> float:
            cost = self._costs[number]
            return self._counts[number] * (cost.forward_seconds.at(1) + cost.backward_seconds.at(1))

        return max(self._counts, key=seconds)

    def _find_rows(self, rows: float, split: bool) -> _Rows:
        loads = [
            load_block(cost, Directive.KEEP, rows, speed=self._speed, split=split)
            for cost in self._costs
        ]
        each = np.array([load.forward_seconds + load.backward_seconds for load in loads])
        counts = np.array([self._counts[number] for number in range(len(loads))])
        ordered = np.sort(np.repeat(each, counts))
        common = self._common()
        inner = [cost.output.at(rows) for cost in self._costs]
        return _Rows(
            forward_share=max(
                (load.forward_seconds / t for load, t in zip(loads, each) if t > 0), default=0.0
            ),
            seconds=float(ordered.sum()),
            weight=float((counts * np.array([load.weight_seconds for load in loads])).sum()),
            largest=float(ordered[-1]),
            cheapest=np.concatenate([[0.0], np.cumsum(ordered)]),
            sums=[0.0, *np.cumsum(each[list(self._numbers)]).tolist()],
            common=loads[common],
            cost=self._costs[common],
            count=self._counts[common],
            message_bytes=min(inner, default=0.0),
            again=load_block(
                self._costs[common], Directive.RECOMPUTE, rows, speed=self._speed, split=split
            ).recompute_seconds,
            copying=float(
                copying_seconds(self._device, np.array(float(self._moved(common, rows, split))))
            ),
        )

    def _moved(self, common: int, rows: float, split: bool) -> int:
        return load_block(
            self._costs[common], Directive.OFFLOAD, rows, speed=self._speed, split=split
        ).moved_bytes

    def _find_update(self, pipeline_ranks: int, replicas: int) -> float:
        """Seconds of the update of the mean share of the parameters, by whichever way is fastest, and of a loss of all
        rows: what a step has once."""
        profile = self.request.profile
        every = range(len(profile.blocks))
        whole, trained = profile.unique_parameter_bytes(every), profile.unique_trained_bytes(every)
        sizes = Sizes(whole // pipeline_ranks, 0, 0, trained // pipeline_ranks)
        found = []
        for below in self.request.host_states:
            states = load_states(profile, sizes, self._device, below, replicas)
            found.append(states.update_seconds)
        return min(found, default=math.inf) + self.request.loss_seconds
