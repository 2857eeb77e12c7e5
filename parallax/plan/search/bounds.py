"""Lower bounds on the seconds of a step, for all pipelines of a shape that have nearly equal replica counts.

A shape is a schedule, a micro-batch size, and a number of pipeline ranks. In the formulas, M is the number of
micro-batches, t_p is the seconds of pipeline rank p per micro-batch, and Σ is the sum of t_p over all pipeline ranks.

Pipeline rank p begins after the first micro-batch has passed the earlier ranks. It computes for ``M · t_p`` seconds and
waits for gradients of the later ranks. The step ends after the last gradient has passed back through the earlier ranks.
So this holds for every p::

    step >= Σ + t_p · (M − 1 − forwards of p that fit into its first wait · forward's fraction of t_p)

The expression in parentheses is called the *weight* of p. It is largest for the last pipeline rank and smallest for the
first. A partition of the blocks is bounded by its largest product weight · t_p. The bound for a shape therefore needs
the smallest value that this largest product has in any partition.
:class:`~parallax.plan.search.greedy.GreedySearch` finds that value by partitioning the blocks. Before it is known,
pipeline ranks are assumed to be as even as the weights allow. No rank updates before all ranks have reduced their
gradients, so the seconds of the update are added.

These bounds on the terms are valid for every partition and for every directive (keep, offload, recompute):

* **The slowest pipeline rank** takes no less than the mean of all pipeline ranks, no less than the slowest block, and
  no less than the ⌈blocks / pipeline ranks⌉ fastest blocks, since some pipeline rank has as many. If a pipeline rank
  was shown to need more seconds to fit its memory, that number is used.
* **Σ** includes all blocks, for the rank with the most rows. Blocks that cannot keep their activations are recomputed,
  or offloaded in parallel with computing. The messages of one micro-batch through the pipeline are added.
* **A limit on the micro-batches in flight** slows the pipeline down: each micro-batch is in flight for at least Σ
  seconds, so a step needs at least ``M / in flight · Σ`` (Little 1961, "A proof for the queuing formula L = λW").
* **Weight-gradient passes** of a zero-bubble schedule can be deferred only for blocks that keep their activations. All
  these activations must fit the memory of the pipeline ranks beside parameters, gradients and optimizer states.
* **The work done once per step** is the loss over all rows, if there is one, and the optimizer's update. The update is
  that of a rank with an average share of the parameters, with the fastest choice of offloaded states.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cost.allocator import Gaps
from parallax.plan.cost.stage import BlockLoad, load_block
from parallax.plan.cost.states import Sizes, load_states
from parallax.plan.cost.traffic import copying_seconds
from parallax.plan.plan import Directive
from parallax.plan.profile import BlockCost
from parallax.plan.search.boundaries import block_kinds, even_boundaries
from parallax.plan.search.request import ROUNDING, Request, Shape


@dataclass(frozen=True, slots=True)
class _Rows:
    """The costs of all blocks on the rank that has the most rows.

    ``forward_share``  the largest fraction of a block's seconds that its forward takes
    ``seconds``        seconds of all blocks
    ``weight``         seconds of the weight-gradient passes of all blocks
    ``largest``        seconds of the slowest block
    ``cheapest``       entry n: seconds of the n fastest blocks
    ``sums``           entry n: seconds of the first n blocks
    ``message_bytes``  bytes of the smallest message between two blocks

    The remaining fields describe the kind of block that takes the most seconds in total:

    ``common``   the load of a block of this kind
    ``cost``     the cost of this kind
    ``count``    the number of blocks of this kind
    ``again``    seconds to recompute one block of this kind
    ``copying``  seconds to offload one block of this kind and to prefetch it
    """

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
    """The terms of the bounds of one pipeline shape, in seconds. All are lower bounds, except ``deferred`` and
    ``saved``.

    ``total``          all pipeline ranks, for one micro-batch
    ``slowest``        the slowest pipeline rank, for one micro-batch
    ``path``           latency of one micro-batch through all pipeline ranks
    ``update``         the optimizer's update and the loss over all rows
    ``deferred``       upper bound on weight-gradient passes that can be deferred
    ``saved``          upper bound on the part of the filling and draining that these passes overlap with
    ``ramp``           filling and draining the pipeline if all pipeline ranks are equally slow
    ``forward_share``  the largest fraction of a block's seconds that its forward takes (not in seconds)
    """

    total: float
    slowest: float
    path: float
    update: float
    deferred: float
    saved: float
    ramp: float
    forward_share: float


class StepBound:
    """Computes lower bounds on the step seconds of the pipeline shapes of one search request."""

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
        """Return a lower bound on the step seconds of every pipeline of ``shape`` with nearly equal replica counts.

        ``least_cost`` is a known lower bound on the cost of the slowest pipeline rank. The cost is the rank's seconds
        per micro-batch, plus the seconds after the last micro-batch divided by the number of micro-batches.
        ``least_weighted`` is a known lower bound on the largest product of cost and weight (:meth:`weights`).
        """
        terms, micro_batches, fullness = (
            self._terms(shape),
            self.request.count(shape),
            self._fullness(shape),
        )
        least_cost, least_weighted = fullness * least_cost, fullness * least_weighted
        work = max(micro_batches * terms.slowest + terms.update, micro_batches * least_cost)
        if shape.interleave > 1:
            return float(max(work, self._virtual_stages(shape) + terms.update) * ROUNDING)
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
        return float(max(work, max(0.0, terms.path - terms.saved) + slowest, queued) * ROUNDING)

    def _virtual_stages(self, shape: Shape) -> float:
        """Return a lower bound on the step seconds of a shape with several virtual stages per pipeline rank.

        The stage boundaries are known, because virtual stages always have nearly equal seconds. A pipeline rank begins
        after the first stages of the earlier ranks have run forward. After the pipeline rank's last backward, these
        first stages still run backward. If backwards are split, these last backwards may overlap with weight-gradient
        passes of the pipeline rank. The result is 0 if there are several kinds of devices.
        """
        if self.request.mixed:
            return 0.0
        rows = self._rows(self._mean_rows(shape), shape.split)
        boundaries = even_boundaries(rows.sums, shape.pipeline_ranks * shape.interleave)
        stages = [
            rows.sums[stop] - rows.sums[start] for start, stop in itertools.pairwise(boundaries)
        ]
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
        """Return an estimate of the step seconds of ``shape``, to order shapes before they are evaluated.

        The estimate assumes that all pipeline ranks are equally slow. It is the seconds of a pipeline rank for all
        micro-batches, the seconds to fill and drain the pipeline, and the update; at least the lower bound
        (:meth:`seconds`).
        """
        terms, micro_batches = self._terms(shape), self.request.count(shape)
        return max(micro_batches * terms.slowest + terms.ramp + terms.update, self.seconds(shape))

    def weighs(self, shape: Shape) -> bool:
        """Return whether the :meth:`weights` of the pipeline ranks of ``shape`` differ."""
        return shape.schedule.searched and shape.interleave == 1

    def weights(self, shape: Shape) -> list[float]:
        """Return the weight of each pipeline rank, as a fraction of the weight of the last pipeline rank.

        A rank's weight is the number of seconds by which the step lengthens per second of the rank's micro-batch.
        """
        if not self.weighs(shape):
            return [1.0] * shape.pipeline_ranks
        waits = self._waits(shape, self._terms(shape).forward_share)
        return [wait / waits[-1] for wait in waits]

    def ceiling(self, shape: Shape, most_seconds: float) -> float:
        """Return the largest cost of the slowest pipeline rank with which a step of ``shape`` may take
        ``most_seconds``.

        The cost is in seconds per micro-batch. The result assumes that all pipeline ranks are about equally slow: it
        divides the seconds that remain after filling and draining the pipeline by the number of micro-batches.
        """
        terms, micro_batches = self._terms(shape), self.request.count(shape)
        if not shape.schedule.searched or most_seconds == math.inf:
            return most_seconds / micro_batches
        return max(0.0, most_seconds - terms.ramp) / micro_batches

    def weighted_ceiling(self, shape: Shape, most_seconds: float) -> float:
        """Return the largest product of cost and weight of a pipeline rank with which a step can take ``most_seconds``.

        The cost is in seconds per micro-batch, and :meth:`weights` has the weights. Unlike the result of
        :meth:`ceiling`, this one is valid for every pipeline of ``shape``.
        """
        terms = self._terms(shape)
        wait = self._waits(shape, terms.forward_share)[-1]
        rest = most_seconds - max(0.0, terms.path - terms.saved)
        return max(0.0, rest / wait / self._fullness(shape))

    def _terms(self, shape: Shape) -> _Terms:
        replicas, pipeline_ranks = self._replicas(shape), shape.pipeline_ranks
        rows = self._rows(self._mean_rows(shape), shape.split)
        least = -(-len(self.request.profile.blocks) // pipeline_ranks)
        total, deferred = self._total(shape, rows, replicas), self._deferred(shape, rows, replicas)
        slowest = max(total / pipeline_ranks, rows.largest, float(rows.cheapest[least]))
        path = total + self._messages(shape, rows)
        saved = (
            shape.schedule.ramp.weight_savings * deferred * (pipeline_ranks - 1) / pipeline_ranks
        )
        return _Terms(
            total=total,
            slowest=slowest,
            path=path,
            update=self._update(pipeline_ranks, replicas),
            deferred=deferred,
            saved=saved,
            ramp=max(0.0, (path - slowest) / shape.interleave - saved),
            forward_share=rows.forward_share,
        )

    def _waits(self, shape: Shape, forward_share: float) -> list[float]:
        """Return, for each pipeline rank, by how many seconds the step lengthens per second of the rank's micro-batch.

        This is the number of micro-batches minus one, because the latency of one micro-batch through the pipeline is
        counted separately. The forwards that the rank can run while its first micro-batch passes the later ranks are
        subtracted, each as the fraction ``forward_share`` of a micro-batch.
        """
        micro_batches, pipeline_ranks = self.request.count(shape), shape.pipeline_ranks
        ahead = shape.schedule.ramp.ahead
        hidden = [
            min(ahead * (pipeline_ranks - 1 - p), micro_batches - 1) for p in range(pipeline_ranks)
        ]
        return [max(micro_batches - 1 - count * forward_share, 1e-9) for count in hidden]

    def _mean_rows(self, shape: Shape) -> float:
        """Return the rows of a micro-batch on the rank that has the most rows, averaged over all micro-batches.

        Micro-batches differ by one row if their number does not divide the batch.
        """
        replicas, count = self._replicas(shape), self.request.count(shape)
        fewest, more = divmod(self.request.global_batch, count)
        return (
            (count - more) * -(-fewest // replicas) + more * -(-(fewest + 1) // replicas)
        ) / count

    def _fullness(self, shape: Shape) -> float:
        """Return a lower bound on the cost of an average micro-batch, as a fraction of the cost of the largest one."""
        return self._mean_rows(shape) / -(-shape.microbatch // self._replicas(shape))

    def _replicas(self, shape: Shape) -> int:
        """Return the replica count of the pipeline rank that has the most replicas."""
        requested = self.request.config.replicas
        if isinstance(requested, list | tuple):
            return max(int(count) for count in requested)
        return -(-len(self.request.devices) // shape.pipeline_ranks)

    def _messages(self, shape: Shape, rows: _Rows) -> float:
        """Return a lower bound on the seconds that the messages of one micro-batch take between pipeline ranks.

        The messages are the activations of the forward and, in training, the gradients of the backward.
        """
        cluster = self.request.cluster
        fast = max((cluster.local, cluster.remote), key=lambda link: link.bytes_per_second)
        ways = 2 if self.request.task.trains else 1
        return ways * (shape.pipeline_ranks - 1) * fast.seconds(rows.message_bytes)

    def _in_flight(self, shape: Shape) -> int:
        """Return the largest number of micro-batches in flight in a pipeline of ``shape``."""
        micro_batches = self.request.count(shape)
        if not shape.schedule.searched or not self.request.task.trains:
            return micro_batches
        return shape.schedule.in_flight(shape.pipeline_ranks, 0, micro_batches)

    def _deferred(self, shape: Shape, rows: _Rows, replicas: int) -> float:
        """Return an upper bound on the seconds of weight-gradient passes that all ranks together can defer, per
        micro-batch.

        ``replicas`` is the replica count of the pipeline rank with the most replicas.
        """
        if not shape.split:
            return 0.0
        allowed = self.request.allowed
        if Directive.KEEP not in allowed:
            return 0.0
        common = rows.count * rows.common.weight_seconds
        return rows.weight - common + common * self._kept_share(shape, rows, replicas)

    def _total(self, shape: Shape, rows: _Rows, replicas: int) -> float:
        """Return a lower bound on the seconds of all blocks for one micro-batch.

        Of the kind of block that takes the most seconds in total, the blocks that cannot keep their activations are
        recomputed, or offloaded in parallel with computing.
        """
        allowed = self.request.allowed
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
        """Return the largest fraction of blocks that can keep their activations, of the kind of block that takes the
        most seconds in total.

        On each pipeline rank, the activations must fit beside the rank's own parameters. Summed over all pipeline
        ranks, they must fit beside all parameters.
        """
        held = rows.common.held_bytes
        if held <= 0 or not shape.schedule.searched:
            return 1.0
        device, pipeline_ranks, micro_batches = (
            self._device,
            shape.pipeline_ranks,
            self.request.count(shape),
        )
        free = device.memory_bytes - device.fixed_bytes
        work = min(rows.common.forward_work, rows.common.backward_work)
        free_bytes = Gaps.of(device, rows.cost.input.at(1)).capacity(free) - work
        if free_bytes <= 0:
            return 0.0
        in_flight = shape.schedule.least_in_flight(pipeline_ranks, micro_batches)
        static = self._static(replicas)
        apart = float((free_bytes / (in_flight * held + static / rows.count)).sum())
        together = (pipeline_ranks * free_bytes - static) / (float(in_flight.min()) * held)
        return min(1.0, max(0.0, min(apart, together)) / rows.count)

    def _static(self, replicas: int) -> float:
        """Return a lower bound on the device bytes of parameters, gradients and states of all blocks of one kind: the
        kind that takes the most seconds in total. States may be sharded over ``replicas`` replicas."""
        profile, (parameters, trained) = self.request.profile, self._common_bytes
        states = profile.optimizer_bytes + profile.master_bytes
        return min(
            (1 - offload.parameters) * (parameters + trained * profile.gradient_bytes)
            + (1 - offload.optimizer) * trained * states / (replicas if offload.sharded else 1)
            for offload in self.request.host_states
        )

    def _parameters(self, numbers: tuple[int, ...]) -> tuple[int, int]:
        """Return lower bounds on the bytes of two sets, for the kind of block that takes the most seconds in total: all
        parameters of these blocks, and all trained ones.

        ``numbers`` has the kind of each block. Parameters that several blocks share are not counted at all.
        """
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
            load_block(cost, Directive.KEEP, rows, speed=self._speed, split=split, shares=True)
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
            self._costs[common],
            Directive.OFFLOAD,
            rows,
            speed=self._speed,
            split=split,
            shares=True,
        ).transferred_bytes

    def _find_update(self, pipeline_ranks: int, replicas: int) -> float:
        """Return the seconds of the work that a step does once: the optimizer's update and the loss over all rows.

        The update is that of a rank that has 1/``pipeline_ranks`` of the parameters, with the fastest choice of
        offloaded states. States may be sharded over ``replicas`` replicas.
        """
        profile = self.request.profile
        every = range(len(profile.blocks))
        whole, trained = profile.unique_parameter_bytes(every), profile.unique_trained_bytes(every)
        parameters, stepped = whole // pipeline_ranks, trained // pipeline_ranks
        sizes = Sizes(parameters, 0, 0, stepped, parameters, stepped, 0)
        found = []
        for offload in self.request.host_states:
            states = load_states(profile, sizes, self._device, offload, replicas)
            found.append(states.update_seconds)
        return min(found, default=math.inf) + self.request.loss_seconds
