"""Searches stages × replicas × micro-batch × schedule × directives for the least predicted step time that fits.

A pipeline of stages with t_s seconds per micro-batch takes about (M − 1)·max t_s + Σ t_s (GPipe, Huang et al. 2019),
and never less than all its work over the cores that share it. Built from the last stage to the first, because under
1F1B the micro-batches in flight depend on how many stages follow. Partial pipelines are dropped only when another is
no worse in max, sum and tail: exact for this formula. The best are then simulated, action by action; the simulation
has the last word on time and on memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallax.errors import BudgetExceeded, ConfigError, InfeasiblePlan, check_choice, check_positive
from parallax.plan.cluster import Cluster
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.rows import micro_batch_count
from parallax.plan.schedule import ORDERS, in_flight
from parallax.plan.simulate import Simulation, simulate
from parallax.plan.stages import StageChoice, StageFitter
from parallax.units import format_bytes

AUTO = "auto"
SIMULATED = 12  # candidates that are simulated, best formula first


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What the planner is told; ``auto`` leaves the choice to it.

    ``stages``: pipeline stages. ``replicas``: a number for every stage, or one per stage such as ``[1, 2]``.
    ``schedule``: gpipe or 1f1b. ``activations``: force keep, offload or recompute on every block.
    """

    stages: int | str = AUTO
    replicas: int | str | list[int] = AUTO
    schedule: str = AUTO
    activations: str = AUTO

    def __post_init__(self) -> None:
        check_choice("plan.schedule", self.schedule, [AUTO, *ORDERS])
        check_choice("plan.activations", self.activations, [AUTO, *Directive])
        if self.stages != AUTO:
            check_positive("plan.stages", whole("plan.stages", self.stages))
        counts = self.replicas if isinstance(self.replicas, list | tuple) else [self.replicas]
        for count in counts:
            if count != AUTO:
                check_positive("plan.replicas", whole("plan.replicas", count))


def whole(key: str, value: int | str) -> int:
    """``value`` as a whole number, or :class:`ConfigError` that says what ``key`` accepts."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={value}: accepted are auto or a whole number")
    return value


@dataclass(frozen=True, slots=True)
class _Partial:
    """The last stages of a pipeline: what the formula needs to know of them."""

    slowest: float
    total: float
    tail: float
    work: float
    stages: tuple[StageChoice, ...]

    def no_worse(self, other: _Partial) -> bool:
        return (
            self.slowest <= other.slowest
            and self.total <= other.total
            and self.tail <= other.tail
            and self.work <= other.work
        )


@dataclass(frozen=True, slots=True)
class _Candidate:
    estimate: float
    schedule: str
    microbatch: int
    stages: tuple[StagePlan, ...]
    exact: bool


def search(
    profile: ModelProfile,
    cluster: Cluster,
    config: PlanConfig,
    *,
    global_batch: int,
    microbatch: int | str = AUTO,
    swap: bool = True,
) -> tuple[Plan, Simulation]:
    """The best plan that uses every device of ``cluster``, and its simulated step.

    ``microbatch`` is in rows; auto tries the halvings of the batch. Raises :class:`InfeasiblePlan`, with the
    smallest change found that fits, where nothing does.
    """
    request = _Request(profile, cluster, config, global_batch, _sizes(global_batch, microbatch), swap)
    candidates = sorted(request.candidates(), key=lambda candidate: candidate.estimate)
    best: tuple[Simulation, _Candidate] | None = None
    refused: list[str] = []
    for candidate in candidates[:SIMULATED]:
        try:
            simulation = simulate(
                profile,
                cluster,
                candidate.stages,
                schedule=candidate.schedule,
                rows=global_batch,
                micro_batches=_count(global_batch, candidate.microbatch),
            )
        except BudgetExceeded as error:
            refused.append(str(error))
            continue
        budgets = [device.memory_bytes for device in cluster.devices]
        over = [r for r, trace in enumerate(simulation.ranks) if trace.peak_bytes > budgets[r]]
        if over:
            refused.append(f"rank {over[0]} peaks at {format_bytes(simulation.ranks[over[0]].peak_bytes)}")
        elif best is None or simulation.step_seconds < best[0].step_seconds:
            best = simulation, candidate
    if best is None:
        raise request.infeasible(refused)
    simulation, chosen = best
    return _plan(profile, cluster, global_batch, chosen, simulation, len(candidates)), simulation


class _Request:
    """One call of :func:`search`."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        config: PlanConfig,
        global_batch: int,
        microbatches: Sequence[int],
        swap: bool,
    ) -> None:
        self.profile, self.cluster, self.config = profile, cluster, config
        self.global_batch, self.microbatches = global_batch, microbatches
        # The smallest device bounds every stage; kinds are told apart by a later, heterogeneous search.
        self.device = min(cluster.devices, key=lambda device: device.memory_bytes)
        allowed = list(Directive) if config.activations == AUTO else [Directive(config.activations)]
        self.allowed = [d for d in allowed if d is not Directive.OFFLOAD or swap]
        if not self.allowed:
            raise ConfigError("plan.activations=offload needs a tier: swap.tier is none")
        self.fitter = StageFitter(profile, self.device, allowed=self.allowed)
        self.schedules = list(ORDERS) if config.schedule == AUTO else [config.schedule]
        self.replica_lists = list(self._replica_lists())

    def candidates(self) -> Iterator[_Candidate]:
        """Every undominated pipeline of every shape."""
        for schedule in self.schedules:
            for microbatch in self.microbatches:
                count = _count(self.global_batch, microbatch)
                for stages in self._stage_counts():
                    for partial in self._pipelines(schedule, microbatch, stages):
                        yield _Candidate(
                            self._estimate(partial, count),
                            schedule,
                            microbatch,
                            tuple(choice.plan for choice in partial.stages),
                            all(choice.exact for choice in partial.stages),
                        )

    def infeasible(self, refused: Sequence[str]) -> InfeasiblePlan:
        """Why nothing fits, and the smallest change that was verified to."""
        devices, blocks = len(self.cluster.devices), len(self.profile.blocks)
        if not self.replica_lists:
            return InfeasiblePlan(
                f"plan.stages={self.config.stages} with plan.replicas={self.config.replicas} does not use {devices} "
                f"device(s) and {blocks} block(s): every stage needs a block and a device, and every device a stage; "
                f"set cluster.devices, or leave plan.replicas=auto"
            )
        needed = self._least_memory()
        fixes = [f"cluster.device_memory={math.ceil(needed / 2**20)}MiB"]
        smaller = [m for m in self._halvings() if m < min(self.microbatches)]
        for rows in smaller:
            if next(iter(self._with(microbatches=[rows]).candidates()), None) is not None:
                fixes.append(f"trainer.microbatch={rows}")
                break
        if len(self.allowed) < len(Directive):
            free = _Request(
                self.profile, self.cluster, PlanConfig(), self.global_batch, self.microbatches, swap=True
            )
            if next(iter(free.candidates()), None) is not None:
                fixes.append("plan=auto swap=auto")
        detail = f" ({refused[0]})" if refused else ""
        return InfeasiblePlan(
            f"no plan fits {format_bytes(self.device.memory_bytes)} per device{detail}: the best needs "
            f"{format_bytes(needed)} on its fullest; what fits: {', or '.join(fixes)}"
        )

    def _with(self, *, microbatches: Sequence[int]) -> _Request:
        swap = Directive.OFFLOAD in self.allowed
        return _Request(self.profile, self.cluster, self.config, self.global_batch, microbatches, swap)

    def _least_memory(self) -> float:
        """The smallest budget in which some pipeline of the asked shape runs: min over shapes of max over stages."""
        least = math.inf
        for schedule in self.schedules:
            for microbatch in self.microbatches:
                count = _count(self.global_batch, microbatch)
                for replicas in self.replica_lists:
                    if self._idle(max(replicas), microbatch):
                        continue
                    least = min(least, self._least_peak(schedule, microbatch, count, replicas))
        return least

    def _least_peak(self, schedule: str, microbatch: int, count: int, replicas: Sequence[int]) -> float:
        blocks, stages = len(self.profile.blocks), len(replicas)
        best = {blocks: 0.0}
        for stage in reversed(range(stages)):
            rows, flight = -(-microbatch // replicas[stage]), in_flight(schedule, stages, stage, count)
            grown: dict[int, float] = {}
            for stop, peak in best.items():
                for start in range(stage, stop):
                    needed = max(peak, self.fitter.least_bytes(start, stop, rows, flight))
                    grown[start] = min(grown.get(start, math.inf), needed)
            best = grown
        return best.get(0, math.inf)

    def _estimate(self, partial: _Partial, count: int) -> float:
        concurrent = sum(node.concurrent for node in self.cluster.nodes)
        pipelined = (count - 1) * partial.slowest + partial.total
        return max(pipelined, count * partial.work / concurrent) + partial.tail

    def _pipelines(self, schedule: str, microbatch: int, stages: int) -> list[_Partial]:
        """Undominated pipelines of ``stages`` stages over all devices, built from the last stage on."""
        blocks, devices = len(self.profile.blocks), len(self.cluster.devices)
        count = _count(self.global_batch, microbatch)
        fronts = {(blocks, devices): [_Partial(0.0, 0.0, 0.0, 0.0, ())]}
        for stage in reversed(range(stages)):
            flight = in_flight(schedule, stages, stage, count)
            grown: dict[tuple[int, int], list[_Partial]] = {}
            for (stop, left), partials in fronts.items():
                for replicas in self._replica_choices(stages, stage, left):
                    if self._idle(replicas, microbatch):
                        continue
                    rows = -(-microbatch // replicas)
                    for start in [0] if stage == 0 else range(stage, stop):
                        choice = self.fitter.fit(start, stop, replicas, rows, flight)
                        if choice is not None:
                            front = grown.setdefault((start, left - replicas), [])
                            for partial in partials:
                                _insert(front, self._prepend(choice, partial))
            fronts = grown
        return fronts.get((0, 0), [])

    def _prepend(self, choice: StageChoice, partial: _Partial) -> _Partial:
        replicas = choice.plan.replicas
        link = self.cluster.local if len(self.cluster.nodes) == 1 else self.cluster.remote
        size = self.profile.unique_parameter_bytes(range(choice.plan.start, choice.plan.stop))
        reduce = link.seconds(2 * (replicas - 1) / replicas * size)
        return _Partial(
            max(choice.seconds, partial.slowest),
            choice.seconds + partial.total,
            max(choice.tail_seconds + reduce, partial.tail),
            choice.seconds * replicas + partial.work,
            (choice, *partial.stages),
        )

    def _stage_counts(self) -> list[int]:
        return sorted({len(replicas) for replicas in self.replica_lists})

    def _replica_choices(self, stages: int, stage: int, left: int) -> set[int]:
        """Replica counts of a stage that leave at least one device for each earlier stage."""
        fitting = (r for r in self.replica_lists if len(r) == stages and sum(r[: stage + 1]) == left)
        return {replicas[stage] for replicas in fitting}

    def _idle(self, replicas: int, microbatch: int) -> bool:
        """Whether a replica would have no row of any micro-batch, though the planner could choose larger ones."""
        return replicas > microbatch and len(self.microbatches) > 1

    def _replica_lists(self) -> Iterator[tuple[int, ...]]:
        devices, blocks = len(self.cluster.devices), len(self.profile.blocks)
        counts = range(1, min(devices, blocks) + 1) if self.config.stages == AUTO else [int(self.config.stages)]
        for stages in counts:
            if stages > min(devices, blocks):
                continue
            replicas = self.config.replicas
            if isinstance(replicas, list | tuple):
                if len(replicas) == stages and sum(replicas) == devices:
                    yield tuple(replicas)
            elif replicas != AUTO:
                if int(replicas) * stages == devices:
                    yield (int(replicas),) * stages
            else:
                yield from _compositions(devices, stages)

    def _halvings(self) -> list[int]:
        return _sizes(self.global_batch, AUTO)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as ``parts`` numbers of at least one."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def _insert(front: list[_Partial], new: _Partial) -> None:
    if not any(old.no_worse(new) for old in front):
        front[:] = [old for old in front if not new.no_worse(old)] + [new]


def _count(rows: int, microbatch: int) -> int:
    return min(rows, micro_batch_count(rows, microbatch))


def _sizes(global_batch: int, microbatch: int | str) -> list[int]:
    """Rows per micro-batch to try: the one asked for, or the batch's halvings down to one row."""
    if microbatch != AUTO:
        return [min(global_batch, int(microbatch))]
    sizes = [global_batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _plan(
    profile: ModelProfile,
    cluster: Cluster,
    global_batch: int,
    chosen: _Candidate,
    simulation: Simulation,
    candidates: int,
) -> Plan:
    ranks = tuple(
        RankPrediction(
            peak_bytes=trace.peak_bytes,
            budget_bytes=device.memory_bytes,
            tier_peak_bytes=trace.tier_peak_bytes,
            offloaded_bytes=trace.offloaded_bytes,
            stall_seconds=round(trace.stall_seconds, 6),
        )
        for trace, device in zip(simulation.ranks, cluster.devices)
    )
    return Plan(
        model=profile.model,
        fingerprint=profile.fingerprint,
        schedule=chosen.schedule,
        global_batch=global_batch,
        microbatch=chosen.microbatch,
        stages=chosen.stages,
        tier=cluster.devices[0].tier,
        prediction=Prediction(
            step_seconds=round(simulation.step_seconds, 6), bubble=round(simulation.bubble, 6), ranks=ranks
        ),
        candidates=candidates,
        exact=chosen.exact,
    )
