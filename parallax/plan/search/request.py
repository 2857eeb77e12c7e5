"""The search request: the devices in order, the micro-batch sizes and shapes to try, and a formula for a step's time.

With M micro-batches, and t seconds of a pipeline rank per micro-batch, a step takes about::

    M · max t + ramp · (Σ t − max t)

The slowest pipeline rank works all the time, and the others fill and drain the pipeline (GPipe, Huang et al. 2019). The
``ramp`` is 1 for GPipe and 1F1B, and 1/v for interleaved schedules with v stages per pipeline rank (Narayanan et al.
2021). For zero-bubble schedules it excludes the weight gradients, as long as there are enough of them to fill the
bubble (Qi et al. 2024, table 2). A step never takes less than all work divided by the cores that share it. All-reduce
and update follow the last micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from parallax.errors import ConfigError, check_count
from parallax.plan.cluster import Cluster, Device, Link
from parallax.plan.config import AUTO, PlanConfig
from parallax.plan.cost.collective import link_among
from parallax.plan.cost.communicators import Beside
from parallax.plan.cost.states import ALL_ON_DEVICE, SHARDED, OffloadFractions, Sizes, load_states
from parallax.plan.microbatches import balanced_sizes, sizes
from parallax.plan.plan import (
    Directive,
    StagePlan,
    Visits,
    boundaries_held,
    visits_of,
)
from parallax.plan.profile import ModelProfile
from parallax.plan.rows import fewest_rows, micro_batch_count
from parallax.plan.schedule import Schedule
from parallax.plan.schedule.double_buffered import DOUBLE_BUFFERED
from parallax.plan.schedule.gpipe import GPIPE
from parallax.plan.schedule.one_forward import ONE_FORWARD_ONE_BACKWARD
from parallax.plan.search.contradiction import check_counted_loss
from parallax.plan.search.exact_stage import StageSetting
from parallax.plan.task import PlanTask
from parallax.plan.updates import Updates

ROUNDING = 1 - 1e-9  # keeps a lower bound below the exact value despite rounding errors
ORDERS_TRIED = 24  # permutations of the kinds of devices that are tried
EXACT_PLACES = 256  # blocks × devices up to which every pipeline is evaluated
MANY = 24  # pipeline ranks up to which every number is tried
FEW_ENOUGH = 128  # pipeline ranks beyond which only numbers that divide the devices are tried
# Fractions of offloaded states that are tried.
OPTIMIZER_FRACTIONS = (
    OffloadFractions(0.25),
    OffloadFractions(0.5),
    OffloadFractions(0.75),
    OffloadFractions(1.0),
)
PARAMETER_FRACTIONS = (OffloadFractions(1.0, 0.5), OffloadFractions(1.0, 1.0))
FORWARD_FRACTIONS = tuple(OffloadFractions(parameters=each / 8) for each in range(1, 9))

Score = tuple[float, float]  # predicted step seconds, and the same if every rank had its own cores
WORST: Score = (math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Shape:
    """The pipelines that have the same schedule, micro-batch size, number of pipeline ranks and stages per pipeline
    rank.

    ``bound`` is a lower bound on the score (:meth:`Request.score`) of each of these pipelines.
    """

    schedule: Schedule
    microbatch: int
    pipeline_ranks: int
    interleave: int = 1
    bound: Score = field(default=(0.0, 0.0), compare=False)

    @property
    def split(self) -> bool:
        """Whether the weight-gradient pass runs separately (split backward)."""
        return self.schedule.splits

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        return self.schedule.stages_of(pipeline_rank, self.pipeline_ranks, self.interleave)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete pipeline and its score, the step's time by the formula of this module.

    ``order`` lists the devices by pipeline rank.
    """

    score: Score
    shape: Shape
    stages: tuple[StagePlan, ...]
    order: tuple[int, ...]

    def same(self, other: Candidate) -> bool:
        """Return whether both candidates describe the same plan."""
        return (self.shape, self.stages, self.order) == (other.shape, other.stages, other.order)


class Request:
    """The input of a search, for one order of the devices.

    ``profile`` has the costs of a step of ``task`` (:func:`~parallax.plan.cost.forward.task_costs`). Evaluation and
    inference are tried under GPipe only, unless the user configured a schedule, because all orders of forwards are
    equally fast.

    ``order`` lists the devices in the order in which pipelines use them; None means ascending order. ``swap`` says
    whether plans may offload. ``gather_loss`` restricts the search to schedules under which one loss can be computed
    over all rows. ``idle`` permits replicas without rows. Use it if the ranks have already started, and no plan has
    rows for all of them. ``updates`` is recorded in the plan.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        config: PlanConfig,
        *,
        global_batch: int,
        microbatch: int | str = AUTO,
        swap: bool = True,
        gather_loss: bool = False,
        idle: bool = False,
        order: tuple[int, ...] | None = None,
        updates: Updates = Updates.SYNCHRONOUS,
        task: PlanTask = PlanTask.TRAINING,
    ) -> None:
        check_count("trainer.microbatch", microbatch)
        if global_batch == AUTO:
            raise ConfigError("trainer.global_batch=auto: accepted are whole numbers above 0")
        check_count("trainer.global_batch", global_batch)
        self.profile, self.cluster, self.config = profile, cluster, config
        self.global_batch, self.microbatch, self.gather_loss = global_batch, microbatch, gather_loss
        self.swap, self.idle, self.updates = swap, idle, updates
        self.microbatches, self.task = sizes(global_batch, microbatch), task
        free = config.schedule == AUTO and config.interleave in (AUTO, 1)
        self.schedules = [GPIPE] if free and not task.trains else config.schedules
        if free and task.trains and profile.continues:
            self.schedules = [*self.schedules, DOUBLE_BUFFERED]
        self.order = order or tuple(range(len(cluster.devices)))
        self.devices = tuple(cluster.devices[rank] for rank in self.order)
        self._powers = list(accumulate((device.speed for device in self.devices), initial=0.0))
        self._slowest = min(device.speed for device in self.devices)
        self._fastest = max(device.speed for device in self.devices)
        self._capacity = sum(node.capacity for node in cluster.nodes)
        self._sums = lru_cache(maxsize=None)(self._find_sums)
        self.device = lru_cache(maxsize=None)(self._find_device)
        self.link = lru_cache(maxsize=None)(self._find_link)
        if not self.allowed:
            raise ConfigError("plan.activations=offload needs a tier: swap.tier is none")
        self._check_schedule()
        check_counted_loss(profile, global_batch, gather_loss=gather_loss)

    def _check_schedule(self) -> None:
        """Raise :class:`ConfigError` if the profile lacks something that the configured schedule needs: steps that may
        overlap, or separate seconds of weight-gradient passes."""
        requested, config = self.schedules, self.config
        if config.schedule == DOUBLE_BUFFERED.name and not self.profile.continues:
            raise ConfigError(
                f"plan.schedule={config.schedule}: a step begins before the update of the last one, which needs "
                "trainer.updates=delayed, trainer.nonfinite=stop, and a loss that is not scaled, as with "
                "precision=mixed_bf16; use these, or plan.schedule=1f1b"
            )
        splits = config.schedule != AUTO and any(schedule.splits for schedule in requested)
        if splits and self.task.trains and not self._weight_share:
            raise ConfigError(
                f"plan.schedule={config.schedule}: the profile of {self.profile.model} does not measure the gradients "
                "of parameters separately; use plan.schedule=1f1b, or measure it again"
            )

    def changed(self, **changes: object) -> Request:
        """Return the same request with some arguments of its constructor changed."""
        fields = {
            "profile": self.profile,
            "cluster": self.cluster,
            "config": self.config,
            "global_batch": self.global_batch,
            "microbatch": self.microbatch,
            "swap": self.swap,
            "gather_loss": self.gather_loss,
            "idle": self.idle,
            "order": self.order,
            "updates": self.updates,
            "task": self.task,
            **changes,
        }
        return Request(**fields)  # type: ignore[arg-type]

    def orders(self) -> list[Request]:
        """Return one request for each order of the kinds of devices.

        The order matters, because the first stages run on the first kind.
        """
        kinds = list(dict.fromkeys(self.cluster.devices))
        ranks = [
            [rank for rank, device in enumerate(self.cluster.devices) if device == kind]
            for kind in kinds
        ]
        permutations = itertools.islice(itertools.permutations(ranks), ORDERS_TRIED)
        return [self.changed(order=tuple(itertools.chain(*parts))) for parts in permutations]

    @cached_property
    def allowed(self) -> list[Directive]:
        """The directives (keep, offload, recompute) that blocks may have. Evaluation and inference allow only keep,
        because they save nothing."""
        if not self.task.trains:
            return [Directive.KEEP]
        wanted = (
            list(Directive)
            if self.config.activations == AUTO
            else [Directive(self.config.activations)]
        )
        return [d for d in wanted if d is not Directive.OFFLOAD or self.swap]

    @cached_property
    def host_states(self) -> tuple[OffloadFractions, ...]:
        """The fractions of offloaded states that may be tried, smallest first."""
        if not self.task.trains:
            return self._forward_states
        able = self.swap and all(device.host_update_seconds > 0 for device in self.devices)
        optimizer, parameters = self.config.optimizer, self.config.parameters
        if not able:
            if "host" in (optimizer, parameters):
                raise ConfigError(
                    "plan.optimizer=host needs a host that can step: use a cluster with host memory"
                )
            return self._on_device
        if self.config.shard == "optimizer":
            return self._on_device
        if parameters == "host":
            return (OffloadFractions(1.0, 1.0),)
        may = parameters == AUTO and optimizer != "device" and not self.profile.staleness
        streamed = PARAMETER_FRACTIONS if may else ()
        if optimizer == "host":
            return (OffloadFractions(1.0), *streamed)
        return (*self._on_device, *(OPTIMIZER_FRACTIONS if optimizer == AUTO else ()), *streamed)

    @property
    def _forward_states(self) -> tuple[OffloadFractions, ...]:
        """The fractions of parameters that evaluation and inference may offload.

        No optimizer steps these parameters, so any tier is possible.
        """
        parameters = self.config.parameters
        if parameters == "host" and not self.swap:
            raise ConfigError("plan.parameters=host needs a tier: swap.tier is none")
        if parameters == "host":
            return FORWARD_FRACTIONS[-1:]
        if parameters == "device" or not self.swap:
            return (ALL_ON_DEVICE,)
        return (ALL_ON_DEVICE, *FORWARD_FRACTIONS)

    @property
    def _on_device(self) -> tuple[OffloadFractions, ...]:
        """The choices to try if no state is offloaded: unsharded optimizer states, states sharded over the replicas, or
        both, as ``plan.shard`` says. If each replica steps alone, states are never sharded."""
        if self.even and not self.profile.local_groups:
            return (ALL_ON_DEVICE,)
        return {"none": (ALL_ON_DEVICE,), "optimizer": (SHARDED,)}.get(
            self.config.shard, (ALL_ON_DEVICE, SHARDED)
        )

    @property
    def even(self) -> bool:
        """Whether every stage must have equally many replicas: replicas that take local steps or are asynchronous are
        whole pipelines."""
        return self.profile.local_steps + self.profile.staleness > 0

    def visits(self, shape: Shape) -> Visits:
        """Return how often each block of ``shape`` is visited in a step.

        If a stage may have several blocks, each visit computes one micro-batch.
        """
        alone = shape.pipeline_ranks * shape.interleave == len(self.profile.blocks)
        return visits_of(shape.schedule, self.count(shape), alone=alone, task=self.task)

    def boundaries_held(self, shape: Shape) -> int:
        """Return the number of boundary tensors that a rank holds at one time."""
        return boundaries_held(shape.schedule, shape.pipeline_ranks, self.count(shape))

    @property
    def small(self) -> bool:
        """Whether the request is small enough to evaluate every pipeline."""
        return len(self.profile.blocks) * len(self.devices) <= EXACT_PLACES

    @property
    def mixed(self) -> bool:
        """Whether there are several kinds of devices."""
        return len(set(self.devices)) > 1

    def count(self, shape: Shape) -> int:
        return micro_batch_count(self.global_batch, shape.microbatch)

    def shapes(self) -> Iterator[Shape]:
        """Yield every pipeline shape that uses every device, with a lower bound on its score."""
        blocks, devices = len(self.profile.blocks), len(self.devices)
        for schedule, pipeline_ranks in itertools.product(
            self.schedules, self.pipeline_rank_counts()
        ):
            for microbatch, interleave in itertools.product(
                self.sizes(pipeline_ranks, schedule), self._interleaves(schedule, pipeline_ranks)
            ):
                for grouped in self._groups(schedule, microbatch):
                    shape = Shape(grouped, microbatch, pipeline_ranks, interleave)
                    if not self._allows(shape):
                        continue
                    bound = self.bound(shape, pipeline_ranks, blocks, devices, 0.0, 0.0, 0.0, 0.0)
                    yield replace(shape, bound=bound)

    def sizes(self, pipeline_ranks: int, schedule: Schedule | None = None) -> list[int]:
        """Return the micro-batch sizes to try, in rows.

        A configured size is the only one. For auto, the sizes are the batch and its repeated halves, and those that
        divide rows evenly (:mod:`parallax.plan.microbatches`) over the pipeline rank with the most or with the fewest
        replicas. If the schedule groups micro-batches, the number of pipeline ranks must divide the number of
        micro-batches.
        """
        if self.microbatch != AUTO:
            return self.microbatches
        step, replicas = (
            pipeline_ranks if schedule is not None and schedule.grouped else 1,
            set(self._even_replicas(pipeline_ranks)),
        )
        found = {
            size for count in replicas for size in balanced_sizes(self.global_batch, count, step)
        }
        return sorted(found.union(self.microbatches), reverse=True)

    def _even_replicas(self, pipeline_ranks: int) -> tuple[int, int]:
        """Return the fewest and the most replicas of a pipeline rank if replicas are as even as possible."""
        return len(self.devices) // pipeline_ranks, -(-len(self.devices) // pipeline_ranks)

    def _interleaves(self, schedule: Schedule, pipeline_ranks: int) -> Sequence[int]:
        if not schedule.has_virtual_stages:
            return (1,)
        blocks, grouped = len(self.profile.blocks), schedule.grouping is not None
        requested = self.config.interleaves(schedule)
        if grouped and self.config.interleave == AUTO:  # a virtual stage for each block
            requested = (blocks // pipeline_ranks,)
        return [
            each
            for each in requested
            if each > 1 and (grouped or pipeline_ranks > 1) and each * pipeline_ranks <= blocks
        ]

    def _groups(self, schedule: Schedule, microbatch: int) -> list[Schedule]:
        """Return a variant of ``schedule`` for each number of micro-batches per group to try: all micro-batches, half
        of them, and so on, down to two or three.

        If the number is configured, only this number is tried. A schedule without groups is returned as it is.
        """
        if schedule.grouping is None:
            return [schedule]
        if self.config.group != AUTO:
            return [schedule.with_group(int(self.config.group))]
        found, size = [schedule], micro_batch_count(self.global_batch, microbatch)
        while size > 3:
            size = -(-size // 2)
            found.append(schedule.with_group(size))
        return found

    def _allows(self, shape: Shape) -> bool:
        """Return whether a pipeline shape is valid.

        Zero-bubble schedules split the backward, so the profile must have separate measurements of the weight-gradient
        passes. Interleaving assigns micro-batches in groups of the number of pipeline ranks, so this number must divide
        the number of micro-batches (Narayanan et al. 2021, section 2.2).
        """
        if self.gather_loss and not shape.schedule.forwards_first(
            shape.pipeline_ranks, self.count(shape), shape.interleave
        ):
            return False
        if shape.pipeline_ranks == 1 and self.config.schedule == AUTO:
            # All schedules are equal here, and this one has the fewest micro-batches in flight.
            plain = self.gather_loss or not self.task.trains
            return shape.schedule is (GPIPE if plain else ONE_FORWARD_ONE_BACKWARD)
        if shape.split and self.task.trains:
            return shape.pipeline_ranks == 1 or self._weight_share > 0
        if shape.schedule.continues and not 1 < shape.pipeline_ranks <= self.count(shape):
            return False
        grouped = shape.schedule.grouped and shape.interleave > 1
        return not grouped or self.count(shape) % shape.pipeline_ranks == 0

    def executes(self, shape: Shape, stages: Sequence[StagePlan]) -> bool:
        """Return whether ``stages`` can run in ``shape``. A schedule whose steps overlap allows no offloading and no
        sharded states."""
        if not shape.schedule.continues:
            return True
        return not any(s.offloads or s.optimizer_offload or s.shard_optimizer for s in stages)

    @cached_property
    def _weight_share(self) -> float:
        """The fraction of forward and backward seconds in which parameter gradients are computed."""
        rows = self.microbatches[-1]
        total = sum(
            b.forward_seconds.at(rows) + b.backward_seconds.at(rows) for b in self.profile.blocks
        )
        return (
            sum(b.weight_seconds.at(rows) for b in self.profile.blocks) / total
            if total > 0
            else 0.0
        )

    @property
    def loss_seconds(self) -> float:
        """Seconds of the loss over all rows, for which every rank waits; 0 if each micro-batch has its own loss."""
        return self.profile.blocks[-1].gathered_seconds / self._fastest

    def ramp(self, shape: Shape) -> float:
        """Return the time to fill and drain the pipeline, as a fraction of the seconds per micro-batch of all pipeline
        ranks except the slowest."""
        return shape.schedule.ramp.left(self._weight_share, shape.interleave)

    def score(self, shape: Shape, slowest: float, total: float, tail: float, work: float) -> Score:
        """Return two predictions of the seconds of a step: one for ranks that share the cores of their node, and one as
        if every rank had its own cores.

        The formula is in the docstring of this module.

        ``slowest``  seconds per micro-batch of the slowest pipeline rank
        ``total``    sum of the seconds per micro-batch over all pipeline ranks
        ``tail``     seconds after the last micro-batch
        ``work``     sum of the seconds per micro-batch over all replicas of all pipeline ranks
        """
        micro_batches = self.count(shape)
        pipelined = micro_batches * slowest + self.ramp(shape) * (total - slowest)
        if shape.split:  # weight-gradient passes can fill the bubble of the rest, but no more
            rest = (micro_batches - 1) * slowest / shape.interleave + total
            pipelined = max(pipelined, (1 - self._weight_share) * rest)
        tail += self.loss_seconds
        return max(pipelined, micro_batches * work / self._capacity) + tail, pipelined + tail

    def bound(
        self,
        shape: Shape,
        pipeline_ranks: int,
        stop: int,
        left: int,
        slowest: float,
        total: float,
        tail: float,
        work: float,
    ) -> Score:
        """Return a lower bound on the score of a pipeline whose last stages are chosen.

        The chosen stages have the ``slowest``, ``total``, ``tail`` and ``work`` of :meth:`score`. The bound assumes
        that ``pipeline_ranks`` further pipeline ranks divide the blocks before ``stop`` ideally, on the first ``left``
        devices.
        """
        if pipeline_ranks:
            rest, power = self.seconds(shape.microbatch, 0, stop), self._powers[left]
            slowest = max(slowest, rest / power)
            total += rest / (power - (pipeline_ranks - 1) * self._slowest)
            work += rest / self._fastest
        sharing, alone = self.score(shape, slowest, max(total, slowest), tail, work)
        return sharing * ROUNDING, alone * ROUNDING

    def seconds(self, rows: int, start: int, stop: int) -> float:
        """Return the seconds of the blocks ``start`` to ``stop`` − 1 for a micro-batch of ``rows``, without
        recomputation."""
        sums = self._sums(rows)
        return sums[stop] - sums[start]

    def _find_sums(self, rows: int) -> list[float]:
        costs = self.profile.blocks
        return list(
            accumulate(
                (c.forward_seconds.at(rows) + c.backward_seconds.at(rows) for c in costs),
                initial=0.0,
            )
        )

    def _find_device(self, first: int, stop: int) -> Device:
        """Return a device that stands for the devices ``order[first:stop]``, on which a stage runs: its memory, offload
        tier and speed are the smallest of these devices."""
        kinds = list(dict.fromkeys(self.devices[first:stop]))
        tightest = min(kinds, key=lambda device: device.memory_bytes - device.fixed_bytes)
        return replace(
            self.cluster.while_all_swap(tightest),
            tier_bytes=min(device.tier_bytes for device in kinds),
            speed=min(device.speed for device in kinds),
            gap_share=max(device.gap_share for device in kinds),
            gap_tensors=max(device.gap_tensors for device in kinds),
            gap_limit=max(device.gap_limit for device in kinds),
        )

    def _find_link(self, first: int, stop: int) -> Link:
        """Return the slowest link among the devices ``order[first:stop]``."""
        return link_among(self.order[first:stop], self.cluster)

    def setting(self, shape: Shape, first: int, stop: int, in_flight: int) -> StageSetting:
        """Return the conditions under which a stage runs on the devices ``order[first:stop]`` with ``in_flight``
        micro-batches in flight."""
        replicas = stop - first
        link = self.link(first, stop) if replicas > 1 else None
        rows = -(-shape.microbatch // replicas)
        return StageSetting(
            replicas,
            rows,
            in_flight,
            link,
            shape.split,
            self.beside(shape),
            self.visits(shape),
            self.boundaries_held(shape),
        )

    def beside(self, shape: Shape) -> Beside:
        """Return the largest numbers of ranks that the search assumes for the stages before and after a stage, in
        pipelines of ``shape``.

        Large requests assume nearly even replica counts. If a plan then has more ranks in such a stage, the full
        prediction counts their bytes.
        """
        requested, most = self.config.replicas, len(self.devices) - shape.pipeline_ranks + 1
        if requested != AUTO:
            most = max(requested) if isinstance(requested, list | tuple) else int(requested)
        elif not self.small:
            most = min(most, self._even_replicas(shape.pipeline_ranks)[1] + 1)
        return most, most

    def pipeline_rank_counts(self) -> list[int]:
        """Return the numbers of pipeline ranks to try, each of which has at least one block and one device.

        A large number is tried only if it divides the devices, partitions the blocks evenly, or is among the smallest
        that can hold the states.
        """
        devices, blocks = len(self.devices), len(self.profile.blocks)
        most = min(devices, blocks)
        if self.config.stages != AUTO:
            wanted = {int(self.config.stages)}
        else:
            wanted = {
                count for count in range(1, most + 1) if count <= MANY or devices % count == 0
            }
            more = {
                -(-part // each)
                for part in (blocks, blocks - 1, blocks - 2)
                for each in range(1, MANY)
            }
            more |= {self.least_pipeline_ranks + above for above in range(MANY // 3)}
            wanted |= {count for count in more if count <= FEW_ENOUGH}
        return [
            count for count in sorted(wanted) if 0 < count <= most and self._replicas_fit(count)
        ]

    def _replicas_fit(self, pipeline_ranks: int) -> bool:
        replicas, devices = self.config.replicas, len(self.devices)
        if isinstance(replicas, list | tuple):
            return len(replicas) == pipeline_ranks and sum(replicas) == devices
        groups = self.profile.local_groups or 1
        if replicas == AUTO:
            return not self.even or devices % (pipeline_ranks * groups) == 0
        return int(replicas) * pipeline_ranks == devices and int(replicas) % groups == 0

    def replica_choices(self, shape: Shape, pipeline_rank: int, left: int) -> Sequence[int]:
        """Return the replica counts to try for a pipeline rank if ``left`` devices are not assigned yet.

        Configured counts are the only ones. Otherwise at least one device is left for each earlier pipeline rank, and
        the first pipeline rank uses all remaining devices.
        """
        replicas = self.config.replicas
        if isinstance(replicas, list | tuple):
            return [replicas[pipeline_rank]]
        if replicas != AUTO:
            return [int(replicas)]
        if self.even:
            even = len(self.devices) // shape.pipeline_ranks
            return [even] if self.has_rows(shape, even) else []
        return [
            r
            for r in ([left] if pipeline_rank == 0 else range(1, left - pipeline_rank + 1))
            if self.has_rows(shape, r)
        ]

    def has_rows(self, shape: Shape, replicas: int) -> bool:
        """Return whether each of ``replicas`` replicas has a row of every micro-batch of ``shape``; True if the request
        permits replicas without rows."""
        return self.idle or replicas <= fewest_rows(self.global_batch, self.count(shape))

    @cached_property
    def least_pipeline_ranks(self) -> int:
        """The smallest number of pipeline ranks whose devices can hold parameters, gradients and optimizer states."""
        largest = max(self.devices, key=lambda device: device.memory_bytes - device.fixed_bytes)
        sizes, most = Sizes.of(self.profile, 0, len(self.profile.blocks)), len(self.devices)
        lasting = min(
            load_states(self.profile, sizes, largest, offload, most).lasting_bytes
            for offload in self.host_states
        )
        return math.ceil(lasting / max(1, largest.memory_bytes - largest.fixed_bytes))
