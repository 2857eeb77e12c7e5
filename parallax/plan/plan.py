"""The plan: the planner's decisions and their predicted costs. The planner writes it, and the runtime executes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from parallax.common.documents import LARGEST_NUMBER, check_flat, read_text
from parallax.common.typed import convert_exactly
from parallax.common.units import format_bytes
from parallax.errors import PlanError, printable
from parallax.plan.cluster import LEAST_BUCKET_BYTES
from parallax.plan.edge import Edge, chain
from parallax.plan.profile import summing
from parallax.plan.rows import micro_batch_count, micro_batch_rows, replica_rows
from parallax.plan.schedule import Schedule, named
from parallax.plan.task import PlanTask
from parallax.plan.updates import Updates

VERSION = 3
# The same safe subset of YAML as safe_dump and safe_load; plans of a thousand ranks take seconds without the C library.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MOST_MOVES = 2**22  # micro-batches × stages of one step: actions are listed one by one
_MOST_BYTES = 8 * 2**20  # of a plan's file: a plan of 40,000 ranks

# Bytes of parameters that are stepped at one time where their states are offloaded.
STATE_BUCKET_BYTES = 2 * 2**20
# Bytes of weights of a bucket that is stepped on the device: gradients of two bytes are widened, and new weights
# broadcast, bucket by bucket.
UPDATE_BUCKET_BYTES = 32 * 2**20


# Terms of a rank's bytes that the allocator of tensors does not contain.
BESIDE_ALLOCATOR = ("context", "communicators", "connections")


class Directive(StrEnum):
    """The treatment of a block's saved activations: keep them on the device, offload them, or recompute them."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A stage: blocks ``start`` to ``stop`` (exclusive) on ``replicas`` ranks, with one directive (keep, offload or
    recompute activations) per block.

    ``swap_limit_bytes``   largest bytes of offloaded activations that may be on the device at one time
    ``tier_bytes``         largest bytes of activations in the offload tier
    ``optimizer_offload``  offloaded fraction of the optimizer states and master copies, which the host steps
    ``state_bytes``        largest bytes of these states and copies in the tier
    ``parameter_offload``  offloaded fraction of the parameters that only one block uses, and of their gradients. They
                           are fetched to the device block by block, for every forward and backward.
    ``streamed_bytes``     largest bytes of these parameters, gradients and master copies in the tier
    ``shard_optimizer``    each replica holds and steps only its shard of the states on the device
    ``bucket_bytes``       bytes of the buckets in which replicas sum gradients
    ``inputs_ahead``       copy inputs to the device while the previous micro-batch computes (first stage only)
    """

    start: int
    stop: int
    replicas: int
    directives: tuple[Directive, ...]
    swap_limit_bytes: int = 0
    tier_bytes: int = 0
    state_bytes: int = 0
    streamed_bytes: int = 0
    optimizer_offload: float = 0.0
    parameter_offload: float = 0.0
    shard_optimizer: bool = False
    bucket_bytes: int = LEAST_BUCKET_BYTES
    inputs_ahead: bool = False

    def __post_init__(self) -> None:
        for name in ("shard_optimizer", "inputs_ahead"):
            found = getattr(self, name)
            if not isinstance(found, bool):
                shown = printable(str(found))
                raise PlanError(f"plan: {name}={shown}: accepted are true and false")
        _check_numbers(self, float, "optimizer_offload", "parameter_offload")
        _check_numbers(self, int, "start", "stop", "replicas", "swap_limit_bytes")
        _check_numbers(self, int, "tier_bytes", "state_bytes", "streamed_bytes", "bucket_bytes")
        if self.bucket_bytes < LEAST_BUCKET_BYTES:
            raise PlanError(
                f"plan: bucket_bytes={self.bucket_bytes}: at least {LEAST_BUCKET_BYTES}, or leave it out"
            )
        if self.inputs_ahead and self.start > 0:
            raise PlanError(
                f"plan: inputs_ahead of the stage that begins with block {self.start}: only the first one takes the "
                "model's inputs"
            )

    @property
    def offloads(self) -> bool:
        return Directive.OFFLOAD in self.directives


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """The prediction for one rank in one step.

    ``peak_bytes``       peak of the device memory
    ``budget_bytes``     the bytes that the rank may hold on its device
    ``tier_peak_bytes``  peak of the bytes in the offload tier
    ``offloaded_bytes``  bytes of activations written to the offload tier
    ``stall_seconds``    seconds that the rank waits for swapped data
    ``returns_freed``    the peak is near the budget, so the allocator returns freed memory to the system at once
    """

    peak_bytes: int
    budget_bytes: int
    tier_peak_bytes: int
    offloaded_bytes: int
    stall_seconds: float
    returns_freed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.returns_freed, bool):
            raise PlanError(
                f"plan: returns_freed={printable(str(self.returns_freed))}: accepted are true and false"
            )
        _check_numbers(
            self, int, "peak_bytes", "budget_bytes", "tier_peak_bytes", "offloaded_bytes"
        )
        _check_numbers(self, float, "stall_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """The prediction for one pipeline rank, for the replica that needs the most memory.

    ``memory`` has the bytes of each kind of data at the memory peak
    (:meth:`parallax.plan.cost.stage.StageLoad.memory`). ``seconds`` divides the seconds of a step into forward,
    backward, recompute, stall (waiting for swapped data), reduce (only the part that does not overlap with compute),
    update and idle.
    """

    memory: dict[str, int]
    seconds: dict[str, float]

    def __post_init__(self) -> None:
        for name, values in (("memory", self.memory), ("seconds", self.seconds)):
            for key, value in values.items():
                if not isinstance(value, int | float) or not 0 <= value <= LARGEST_NUMBER:
                    raise PlanError(
                        f"plan: {name}.{printable(f'{key!s:.40}')}={printable(f'{value!r:.40}')}: numbers from 0 to "
                        f"{LARGEST_NUMBER:.0e}"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The simulator's prediction for a plan.

    ``bubble`` is the fraction of the step in which the pipeline is idle, from 0 to 1. ``ranks`` has one entry for each
    rank. ``stages`` has one entry for each pipeline rank: its memory by kind of data, and its seconds by kind of work.
    """

    step_seconds: float
    bubble: float
    ranks: tuple[RankPrediction, ...]
    stages: tuple[StagePrediction, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self, float, "step_seconds", "bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was not chosen: its description, its predicted step seconds, and the reason why it was not chosen."""

    description: str
    step_seconds: float
    reason: str

    def __post_init__(self) -> None:
        _check_numbers(self, float, "step_seconds")


class Coordinate(NamedTuple):
    """The coordinate of one rank: pipeline rank, replica, and tensor rank.

    The tensor rank is always 0, because no plan shards tensors within a replica.
    """

    pipeline_rank: int
    replica: int
    tensor_rank: int = 0


class Visits(NamedTuple):
    """How often a block runs in a step.

    A visit is a run of consecutive micro-batches that one block computes. Offloaded parameters of the block are fetched
    once per visit.

    ``micro_batches``  number of micro-batches per visit
    ``again``          the block is visited several times in a step, so offloaded gradients are read back to be summed
    ``backward``       a backward follows, which fetches offloaded parameters again
    ``continues``      passes of the next step precede the update, with weights of their own
    ``accumulates``    backwards of the next step precede the update, so there is a second set of gradients
    """

    micro_batches: int = 1
    again: bool = True
    backward: bool = True
    continues: bool = False
    accumulates: bool = False

    def at(self, start: int) -> Visits:
        """Return the visits of a stage that begins with the block ``start``. The first stage accumulates no gradients
        of the next step before the update."""
        return self if start else self._replace(accumulates=False)


EACH_MICRO_BATCH = Visits()


def visits_of(
    schedule: Schedule, micro_batches: int, *, alone: bool, task: PlanTask = PlanTask.TRAINING
) -> Visits:
    """Return the :class:`Visits` of a block in a step of ``micro_batches``, when the pipeline runs ``task``.

    ``alone`` is True if the stage has only this block. Then a visit computes all micro-batches that the schedule lets
    the stage compute in a row. In a stage of several blocks, each micro-batch passes all blocks before the next one
    begins, so a visit computes a single micro-batch.
    """
    run = schedule.run_length(micro_batches) if alone else 1
    continues = schedule.continues and task.trains
    return Visits(run, run < micro_batches, task.trains, continues, continues)


def boundaries_held(schedule: Schedule, pipeline_ranks: int, micro_batches: int) -> int:
    """Return the largest number of boundary tensors that a rank holds at one time, for schedules with groups.

    A boundary tensor is the output of one stage and the input of the next one. If stages compute groups of
    micro-batches, all tensors of a group wait for the next stage, and three more are in transit. With several pipeline
    ranks the number is twice as large. The result is 0 for schedules without groups, in which every edge has its own
    tensors.
    """
    if schedule.grouping is None:
        return 0
    held = schedule.run_length(micro_batches) + 3
    return held if pipeline_ranks == 1 else 2 * held


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The part of a plan that is simulated: stages in the order of the data, and the schedule of their micro-batches.

    There are ``len(stages) / interleave`` pipeline ranks, each with ``interleave`` virtual stages of equal replica
    counts. The ``schedule`` maps stages to pipeline ranks. ``placement`` lists the ranks by pipeline rank and, within a
    pipeline rank, by replica; an empty tuple means ascending order. A pipeline whose ``task`` is not training runs only
    the forwards of its schedule.
    """

    schedule: Schedule
    global_batch: int
    microbatch: int
    stages: tuple[StagePlan, ...]
    interleave: int = 1
    placement: tuple[int, ...] = ()
    task: PlanTask = PlanTask.TRAINING

    @property
    def pipeline_ranks(self) -> int:
        return len(self.stages) // self.interleave

    @property
    def world_size(self) -> int:
        return sum(stage.replicas for stage in self.stages[: self.pipeline_ranks])

    def micro_batches(self, rows: int) -> int:
        """Return the number of micro-batches, at most ``rows``, into which a batch of ``rows`` rows is divided."""
        return min(rows, micro_batch_count(rows, self.microbatch))

    def overlaps(self, micro_batches: int) -> bool:
        """Return whether a step of ``micro_batches`` micro-batches may begin before the previous step has ended."""
        return self.schedule.continues and self.task.trains and micro_batches >= self.pipeline_ranks

    def pipeline_rank(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        return self.schedule.pipeline_rank_of(stage, self.pipeline_ranks)

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in the order of the data."""
        return self.schedule.stages_of(pipeline_rank, self.pipeline_ranks, self.interleave)

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage, replica by replica."""
        return self._ranks[self.pipeline_rank(stage)]

    def coordinate(self, rank: int) -> Coordinate:
        if rank not in self._coordinates:
            raise PlanError(f"rank {rank}: the plan has ranks 0 to {self.world_size - 1}")
        return self._coordinates[rank]

    def edges(self) -> tuple[Edge, ...]:
        """Return the edges between stages. Every stage except the last sends to the next one."""
        return self._edges

    def entering(self, stage: int) -> Edge | None:
        """Return the edge into ``stage``; None for the first stage, which receives the model's inputs."""
        return self._entering.get(stage)

    def leaving(self, stage: int) -> Edge | None:
        """Return the edge out of ``stage``; None for the last stage, which computes the loss."""
        return self._leaving.get(stage)

    def visits(self, stage: int) -> Visits:
        """Return how often each block of ``stage`` runs in a step (:class:`Visits`)."""
        alone = self.stages[stage].stop - self.stages[stage].start == 1
        count = self.micro_batches(self.global_batch)
        return visits_of(self.schedule, count, alone=alone, task=self.task)

    @property
    def boundaries_held(self) -> int:
        """Return the number of boundary tensors that a rank holds at one time (see :func:`boundaries_held`)."""
        count = self.micro_batches(self.global_batch)
        return boundaries_held(self.schedule, self.pipeline_ranks, count)

    def is_local(self, edge: Edge) -> bool:
        """Return whether both stages of ``edge`` are on one pipeline rank, so that nothing is sent."""
        return self.pipeline_rank(edge.sender) == self.pipeline_rank(edge.receiver)

    def messages_ahead(self, sender: int) -> int:
        """Return how many unreceived messages stage ``sender`` may have sent before its next send blocks.

        This is one more than the largest number of micro-batches in flight on the stage. If the schedule keeps all
        micro-batches in flight, it is the number of stages instead.
        """
        if self.schedule.holds_all:
            return len(self.stages)
        most = self.micro_batches(self.global_batch)
        return 1 + self.schedule.in_flight(len(self.stages), sender, most, self.interleave)

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each pipeline rank, replica by replica."""
        order, found, first = self.placement or range(self.world_size), [], 0
        for stage in self.stages[: self.pipeline_ranks]:
            found.append(tuple(order[first : first + stage.replicas]))
            first += stage.replicas
        return tuple(found)

    @cached_property
    def _coordinates(self) -> dict[int, Coordinate]:
        return {
            rank: Coordinate(pipeline_rank, replica)
            for pipeline_rank, ranks in enumerate(self._ranks)
            for replica, rank in enumerate(ranks)
        }

    @cached_property
    def _edges(self) -> tuple[Edge, ...]:
        return chain([stage.stop for stage in self.stages])

    @cached_property
    def _entering(self) -> dict[int, Edge]:
        return {edge.receiver: edge for edge in self._edges}

    @cached_property
    def _leaving(self) -> dict[int, Edge]:
        return {edge.sender: edge for edge in self._edges}


@dataclass(frozen=True, kw_only=True)
class Plan(Pipeline):
    """A pipeline with the planner's other decisions and the prediction. The constructor also accepts the name of a
    schedule.

    ``model``          name of the model
    ``fingerprint``    hash of the model, equal to that of the profile (:class:`~parallax.plan.profile.ModelProfile`)
    ``gather_loss``    the last stage gathers the outputs of all micro-batches and replicas and computes one loss of the
                       whole batch; otherwise each micro-batch of each replica has its own loss
    ``updates``        whether gradients are those of the newest weights, or of weights one version older, which every
                       stage holds beside the newest
    ``tier``           name of the offload tier (:mod:`parallax.plan.tier`)
    ``candidates``     number of plans that the search compared
    ``exact``          no plan is better under the search's cost model
    ``bound_seconds``  lower bound on the step of any plan; used if ``exact`` is false
    ``alternatives``   the runners-up
    ``spare_devices``  number of unused devices of the cluster; with them the step would not be shorter
    ``version``        version of the plan's format; other versions are refused

    Settings of the replicas:

    ``local_steps``      number of steps of a round of local steps, after which replicas exchange weights; 0 if replicas
                         sum their gradients in every step
    ``local_groups``     with local steps, number of groups of replicas; the replicas of a group sum their gradients in
                         every step. 0 if each replica steps alone
    ``fragments``        with local steps, number of parts of the weights that are exchanged at different steps of a
                         round
    ``fragment_delay``   number of local steps that run while one part is exchanged
    ``exchanged_bytes``  with local steps or asynchronous replicas, the bytes per step that a replica of the pipeline
                         exchanges with the others
    ``staleness``        the updates by which the weights of asynchronous replicas may be older than the newest; 0 if
                         replicas are not asynchronous
    """

    model: str
    fingerprint: str
    tier: str
    prediction: Prediction
    candidates: int = 0
    exact: bool = True
    bound_seconds: float = 0.0
    gather_loss: bool = False
    local_steps: int = 0
    local_groups: int = 0
    fragments: int = 1
    fragment_delay: int = 0
    exchanged_bytes: float = 0.0
    staleness: int = 0
    updates: Updates = Updates.SYNCHRONOUS
    alternatives: tuple[Alternative, ...] = ()
    spare_devices: int = 0
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise PlanError(
                f"plan version {self.version}: this Parallax reads version {VERSION}; plan again"
            )
        if not isinstance(self.schedule, Schedule):
            object.__setattr__(self, "schedule", named(self.schedule))
        if self.task not in list(PlanTask):
            raise PlanError(
                f"plan: task={printable(str(self.task))}: accepted are {', '.join(PlanTask)}"
            )
        object.__setattr__(self, "task", PlanTask(self.task))
        if self.updates not in list(Updates):
            raise PlanError(
                f"plan: updates={printable(str(self.updates))}: accepted are {', '.join(Updates)}"
            )
        object.__setattr__(self, "updates", Updates(self.updates))
        _check_numbers(self, int, "global_batch", "microbatch", "candidates", "interleave")
        _check_numbers(self, int, "spare_devices", "local_steps", "local_groups", "staleness")
        _check_numbers(self, int, "fragments", "fragment_delay")
        _check_numbers(self, float, "bound_seconds", "exchanged_bytes")
        texts = self.model, self.fingerprint, self.tier, self.schedule.name
        if not all(isinstance(text, str) for text in texts):
            raise PlanError("a plan's model, fingerprint, schedule and tier must be strings")
        if not isinstance(self.gather_loss, bool):
            found = printable(str(self.gather_loss))
            raise PlanError(f"plan: gather_loss={found}: accepted are true and false")
        if self.global_batch < 1 or self.microbatch < 1 or not self.stages:
            raise PlanError("a plan needs rows, micro-batches of 1 row or more, and a stage")
        self._check_stages()
        if self.interleave < 1 or len(self.stages) % self.interleave:
            raise PlanError(
                f"{len(self.stages)} stages cannot be split into {self.interleave} virtual stages per pipeline rank"
            )
        for index, stage in enumerate(self.stages):
            if stage.replicas != self.stages[self.pipeline_rank(index)].replicas:
                raise PlanError(
                    f"stage {index} has {stage.replicas} replicas, its pipeline rank has another number"
                )
        self._check_local_steps()
        self._check_overlap()
        self._check_staleness()
        moves = self.micro_batches(self.global_batch) * len(self.stages)
        if moves > MOST_MOVES:
            raise PlanError(
                f"{self.micro_batches(self.global_batch)} micro-batches through {len(self.stages)} stages are {moves} "
                f"passes, at most {MOST_MOVES} are accepted: use more rows per micro-batch (trainer.microbatch)"
            )
        self._check_prediction()

    def _check_local_steps(self) -> None:
        if not self.local_steps:
            return
        replicas = self.stages[0].replicas
        sharded = any(stage.shard_optimizer for stage in self.stages) and self.summing(0) == 1
        uneven = any(stage.replicas != replicas for stage in self.stages)
        if sharded or uneven or self.gather_loss or replicas % (self.local_groups or 1):
            raise PlanError(
                "local steps need equally many replicas of every stage and in every group, which have a loss of their "
                "own, and optimizer states that no other group holds: plan again"
            )

    def _check_overlap(self) -> None:
        """Raise :class:`PlanError` if steps overlap under the schedule, but the plan has no delayed updates, too few
        micro-batches, a loss of the whole batch, local steps, or offloaded or sharded tensors."""
        if not (self.schedule.continues and self.task.trains):
            return
        moved = any(s.offloads or s.optimizer_offload or s.shard_optimizer for s in self.stages)
        few = not self.overlaps(self.micro_batches(self.global_batch))
        if not self.updates.delays or moved or few or self.gather_loss or self.local_steps:
            raise PlanError(
                f"schedule {self.schedule}, under which steps overlap, needs delayed updates, at least as many "
                "micro-batches as stages, a loss of each micro-batch, and all tensors on the device, not sharded: plan "
                "again"
            )

    def _check_staleness(self) -> None:
        if not self.staleness:
            return
        uneven = len({stage.replicas for stage in self.stages}) > 1
        alone = any(stage.shard_optimizer or stage.parameter_offload for stage in self.stages)
        if uneven or alone or self.gather_loss or self.local_steps or self.updates.delays:
            raise PlanError(
                "asynchronous replicas need equally many replicas of every stage, parameters on the device, states "
                "that are not sharded, and a loss of each micro-batch: plan again"
            )

    def _check_stages(self) -> None:
        expected = 0
        for index, stage in enumerate(self.stages):
            if stage.start != expected or stage.stop <= stage.start:
                raise PlanError(
                    f"stage {index} holds blocks {stage.start}..{stage.stop}; it must start at {expected}"
                )
            if stage.replicas < 1 or len(stage.directives) != stage.stop - stage.start:
                raise PlanError(
                    f"stage {index} needs one replica or more, and one directive for each of its blocks"
                )
            expected = stage.stop

    def _check_prediction(self) -> None:
        if len(self.prediction.ranks) != self.world_size:
            raise PlanError(
                f"the plan has {self.world_size} ranks but predictions for {len(self.prediction.ranks)}"
            )
        if len(self.prediction.stages) not in (0, self.pipeline_ranks):
            raise PlanError(
                f"the plan has {self.pipeline_ranks} pipeline ranks but terms for {len(self.prediction.stages)}"
            )
        if self.placement and sorted(self.placement) != list(range(self.world_size)):
            raise PlanError(f"the placement must name each of {self.world_size} ranks once")
        for rank, found in enumerate(self.prediction.ranks):
            if found.peak_bytes > found.budget_bytes:
                raise PlanError(
                    f"rank {rank} would need {format_bytes(found.peak_bytes)} of {format_bytes(found.budget_bytes)}: "
                    "the plan exceeds its budget; plan again"
                )

    def summing(self, stage: int) -> int:
        """Return how many replicas of ``stage`` sum their gradients with each other in every step: all, those of one
        group with local steps, or one if the replicas are asynchronous."""
        alone = self.local_steps + self.staleness > 0
        return summing(self.stages[stage].replicas, alone, self.local_groups)

    @property
    def blocks(self) -> int:
        return self.stages[-1].stop

    def rows_of(self, rank: int) -> int:
        """Return how many rows of a global batch a rank computes.

        The result is 0 if the rank's replica gets no row of any micro-batch because there are more replicas than rows.
        """
        pipeline_rank, replica, _ = self.coordinate(rank)
        replicas, count = self.stages[pipeline_rank].replicas, self.micro_batches(self.global_batch)
        rows = 0
        for micro in range(count):
            first, stop = micro_batch_rows(self.global_batch, count, micro)
            low, high = replica_rows(stop - first, replicas, replica)
            rows += high - low
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for YAML and JSON."""
        named_first = {"model": self.model, "fingerprint": self.fingerprint}
        plain = {**named_first, **asdict(self), "schedule": self.schedule.name}
        if self.schedule.group:
            plain["group"] = self.schedule.group
        data: dict[str, Any] = json.loads(json.dumps(plain))
        if not self.spare_devices:  # the hash of older plans stays the same
            del data["spare_devices"]
        if self.task.trains:
            del data["task"]
        if not self.local_steps:
            del data["local_steps"], data["local_groups"]
        if not self.local_steps or (self.fragments, self.fragment_delay) == (1, 0):
            del data["fragments"], data["fragment_delay"]
        if not self.staleness:
            del data["staleness"]
        if not self.local_steps + self.staleness:
            del data["exchanged_bytes"]
        if not self.updates.delays:
            del data["updates"]
        for rank in data["prediction"]["ranks"]:
            if not rank["returns_freed"]:
                del rank["returns_freed"]
        for stage in data["stages"]:
            if not stage["inputs_ahead"]:  # the hash of older plans stays the same
                del stage["inputs_ahead"]
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Return the plan from data that :meth:`to_dict` returned. Raises :class:`PlanError` for other data."""
        try:
            fields = dict(data)
            if "version" not in fields:  # the last key of the file
                raise KeyError("it has no version, so it is truncated")
            stages = tuple(
                StagePlan(**{**s, "directives": tuple(Directive(d) for d in s["directives"])})
                for s in fields.pop("stages")
            )
            found = dict(fields.pop("prediction"))
            ranks = tuple(RankPrediction(**rank) for rank in found.pop("ranks"))
            terms = tuple(StagePrediction(**terms) for terms in found.pop("stages"))
            placement = tuple(int(rank) for rank in fields.pop("placement"))
            alternatives = convert_exactly(
                tuple[Alternative, ...], fields.pop("alternatives"), "alternatives"
            )
            prediction = Prediction(ranks=ranks, stages=terms, **found)
            group = convert_exactly(int, fields.pop("group", 0), "group")
            fields["schedule"] = named(fields["schedule"], group)
            return cls(
                stages=stages,
                prediction=prediction,
                placement=placement,
                alternatives=alternatives,
                **fields,
            )
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            raise PlanError(
                f"not a plan file: {printable(str(error))}; write one with `parallax plan`"
            ) from error

    def allocator_bytes(self, rank: int) -> int:
        """Return the limit of a rank's allocator: the rank's budget without the device memory outside the allocator."""
        return self.prediction.ranks[rank].budget_bytes - self._beside_allocator(rank)

    def allocator_peak_bytes(self, rank: int) -> int:
        """Return the predicted peak of a rank's allocator: the rank's peak without the device memory outside the
        allocator."""
        return self.prediction.ranks[rank].peak_bytes - self._beside_allocator(rank)

    def _beside_allocator(self, rank: int) -> int:
        prediction = self.prediction.stages
        memory = prediction[self.coordinate(rank).pipeline_rank].memory if prediction else {}
        return sum(memory.get(term, 0) for term in BESIDE_ALLOCATOR)

    def hash(self) -> str:
        """Return a hash that is equal for equal plans on every rank."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the plan as YAML, with the hash in the first line."""
        text = yaml.dump(
            self.to_dict(), Dumper=_DUMPER, sort_keys=False, default_flow_style=None, width=110
        )
        path.write_text(f"# parallax plan {self.hash()}\n{text}", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        try:
            text = read_text(path, _MOST_BYTES)
            check_flat(text, _LOADER)
            data = yaml.load(text, Loader=_LOADER)
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise PlanError(
                f"cannot read plan {printable(str(path))}: {printable(reason)}; write one with `parallax plan`"
            ) from error
        return cls.from_dict(data)

    def decisions(self) -> dict[str, Any]:
        """Return the fields that the runtime executes, without the predictions and the results of the search."""
        names = (
            "task",
            "fingerprint",
            "schedule",
            "global_batch",
            "microbatch",
            "stages",
            "interleave",
            "placement",
            "gather_loss",
            "local_steps",
            "local_groups",
            "fragments",
            "fragment_delay",
            "staleness",
            "updates",
            "tier",
        )
        return {name: value for name, value in self.to_dict().items() if name in names}

    def diff(self, other: Plan) -> list[str]:
        """Return one line ``key: value in this plan -> value in other`` for each difference."""
        mine, theirs = dict(_flatten("", self.to_dict())), dict(_flatten("", other.to_dict()))
        return [
            f"{key}: {mine.get(key, '(none)')} -> {theirs.get(key, '(none)')}"
            for key in [*mine, *(k for k in theirs if k not in mine)]
            if mine.get(key) != theirs.get(key)
        ]

    @property
    def rows_per_second(self) -> float:
        """Return the predicted rows per second; 0 without a prediction of seconds."""
        seconds = self.prediction.step_seconds
        return self.global_batch / seconds if seconds > 0 else 0.0

    @property
    def gap(self) -> float:
        """Return the fraction by which the predicted step exceeds the lower bound; 0 without a bound."""
        return (
            self.prediction.step_seconds / self.bound_seconds - 1 if self.bound_seconds > 0 else 0.0
        )


def _check_numbers(owner: object, kind: type, *names: str) -> None:
    """Raise :class:`PlanError` unless the fields ``names`` of ``owner`` are finite numbers ≥ 0.

    If ``kind`` is ``int``, they must be whole numbers.
    """
    accepted = (int,) if kind is int else (int, float)
    for name in names:
        value = getattr(owner, name)
        if type(value) not in accepted or not 0 <= value <= LARGEST_NUMBER:
            wanted = "whole numbers" if kind is int else "numbers"
            shown = printable(f"{value!r:.40}")
            raise PlanError(
                f"plan: {name}={shown}: accepted are {wanted} from 0 to {LARGEST_NUMBER:.0e}"
            )


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else key, inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flatten(f"{prefix}[{index}]", inner)
    else:
        yield prefix, value
