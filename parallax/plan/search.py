"""Searches stages × replicas × micro-batch × schedule × directives for the least predicted step time that fits.

A pipeline of stages with t_s seconds per micro-batch takes about (M − 1)·max t_s + Σ t_s (GPipe, Huang et al. 2019),
and never less than all its work over the cores that share it. Built from the last stage to the first, because under
1F1B the micro-batches in flight depend on how many stages follow. Partial pipelines are dropped only when another is
no worse in max, sum, tail and work, or when even their ideal completion is no better than what is already at hand:
exact for this formula. The best are then simulated, action by action; the simulation has the last word on time and
on memory.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from parallax.errors import BudgetExceeded, ConfigError, InfeasiblePlan, check_choice, check_count
from parallax.plan.cluster import Cluster
from parallax.plan.cost import ring_bytes
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.rows import micro_batch_count
from parallax.plan.schedule import ORDERS, in_flight
from parallax.plan.simulate import Simulation, simulate
from parallax.plan.stages import StageChoice, StageFitter
from parallax.units import format_bytes

AUTO = "auto"
SIMULATED = 12  # candidates that are simulated, best formula first

Score = tuple[float, float]  # predicted step seconds; the same if every rank had cores of its own
WORST: Score = (math.inf, math.inf)
ROUNDING = 1 - 1e-9  # a bound must stay below what it bounds


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
        check_count("plan.stages", self.stages)
        for count in self.replicas if isinstance(self.replicas, list | tuple) else [self.replicas]:
            check_count("plan.replicas", count)


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
class _Shape:
    """Pipelines that are searched together. No pipeline of the shape has a score below ``bound``."""

    schedule: str
    microbatch: int
    stages: int
    bound: Score = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Candidate:
    score: Score
    schedule: str
    microbatch: int
    stages: tuple[StagePlan, ...]


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
    best: tuple[Simulation, _Candidate] | None = None
    refused: list[str] = []
    for candidate in request.candidates(SIMULATED):
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
    return _plan(request, chosen, simulation), simulation


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
        # The device with the least room bounds every stage; kinds are told apart by a later, heterogeneous search.
        tightest = min(cluster.devices, key=lambda device: device.memory_bytes - device.reserve_bytes)
        self.device = replace(tightest, tier_bytes=min(device.tier_bytes for device in cluster.devices))
        allowed = list(Directive) if config.activations == AUTO else [Directive(config.activations)]
        self.allowed = [d for d in allowed if d is not Directive.OFFLOAD or swap]
        if not self.allowed:
            raise ConfigError("plan.activations=offload needs a tier: swap.tier is none")
        self.fitter = StageFitter(profile, self.device, allowed=self.allowed)
        self.schedules = list(ORDERS) if config.schedule == AUTO else [config.schedule]
        self.compared = 0
        self._seconds = {rows: self._sums(rows) for rows in self._all_rows()}

    def candidates(self, most: int) -> list[_Candidate]:
        """The ``most`` best pipelines by the formula, best first. A first look at pipelines that keep everything is
        cheap, and says how good the others must be."""
        limit = WORST
        if Directive.KEEP in self.allowed:
            plain = StageFitter(self.profile, self.device, allowed=[Directive.KEEP])
            limit = _worst(self._best(plain, most, limit), most)
        return self._best(self.fitter, most, limit)

    def _best(self, fitter: StageFitter, most: int, limit: Score) -> list[_Candidate]:
        best: list[_Candidate] = []
        self.compared = 0
        for shape in sorted(self._shapes(), key=lambda shape: shape.bound):
            limit = min(limit, _worst(best, most))
            if shape.bound >= limit:
                break
            for partial in self._pipelines(fitter, shape, limit):
                plans = tuple(choice.plan for choice in partial.stages)
                score = self._score(shape, partial.slowest, partial.total, partial.tail, partial.work)
                insort(best, _Candidate(score, shape.schedule, shape.microbatch, plans), key=lambda c: c.score)
                self.compared += 1
        return best[:most]

    def infeasible(self, refused: Sequence[str]) -> InfeasiblePlan:
        """Why nothing fits, and the smallest change that was verified to."""
        devices, blocks = len(self.cluster.devices), len(self.profile.blocks)
        if not self._stage_counts():
            return InfeasiblePlan(
                f"plan.stages={self.config.stages} with plan.replicas={self.config.replicas} does not use {devices} "
                f"device(s) and {blocks} block(s): every stage needs a block and a device, and every device a stage; "
                f"set cluster.devices{self._devices_asked()}, or leave plan.replicas=auto"
            )
        needed = self._least_memory()
        if math.isinf(needed):
            return InfeasiblePlan(
                f"{format_bytes(self.device.tier_bytes)} per device in tier {self.device.tier} cannot hold what must "
                "be offloaded: use plan.activations=auto, a smaller trainer.microbatch, or a larger tier"
            )
        fixes = [f"cluster.device_memory={math.ceil(needed / 2**20)}MiB"]
        smaller = [m for m in _sizes(self.global_batch, AUTO) if m < min(self.microbatches)]
        for rows in smaller:
            if self._with(self.config, microbatches=[rows]).candidates(1):
                fixes.append(f"trainer.microbatch={rows}")
                break
        if len(self.allowed) < len(Directive) and self._with(PlanConfig(), swap=True).candidates(1):
            fixes.append("plan=auto swap=auto")
        detail = f" ({refused[0]})" if refused else ""
        return InfeasiblePlan(
            f"no plan fits {format_bytes(self.device.memory_bytes)} per device{detail}: the best needs "
            f"{format_bytes(needed)} on its fullest; what fits: {', or '.join(fixes)}"
        )

    def _with(
        self, config: PlanConfig, *, microbatches: Sequence[int] | None = None, swap: bool | None = None
    ) -> _Request:
        swap = Directive.OFFLOAD in self.allowed if swap is None else swap
        microbatches = self.microbatches if microbatches is None else microbatches
        return _Request(self.profile, self.cluster, config, self.global_batch, microbatches, swap)

    def _least_memory(self) -> float:
        """The smallest budget in which some pipeline of the asked shape runs: min over shapes of max over stages."""
        return min((self._least_peak(shape) for shape in self._shapes()), default=math.inf)

    def _least_peak(self, shape: _Shape) -> float:
        best = {(len(self.profile.blocks), len(self.cluster.devices)): 0.0}
        for stage in reversed(range(shape.stages)):
            flight = in_flight(shape.schedule, shape.stages, stage, self._count(shape))
            grown: dict[tuple[int, int], float] = {}
            for (stop, left), peak in best.items():
                for replicas in self._replica_choices(shape, stage, left):
                    rows = -(-shape.microbatch // replicas)
                    for start in [0] if stage == 0 else range(stage, stop):
                        needed = max(peak, self.fitter.least_bytes(start, stop, rows, flight))
                        place = start, left - replicas
                        grown[place] = min(grown.get(place, math.inf), needed)
            best = grown
        return best.get((0, 0), math.inf)

    def _shapes(self) -> Iterator[_Shape]:
        blocks, devices = len(self.profile.blocks), len(self.cluster.devices)
        for schedule in self.schedules:
            for microbatch in self.microbatches:
                for stages in self._stage_counts():
                    shape = _Shape(schedule, microbatch, stages)
                    bound = self._bound(shape, stages, blocks, devices, 0.0, 0.0, 0.0, 0.0)
                    yield replace(shape, bound=bound)

    def _count(self, shape: _Shape) -> int:
        return _count(self.global_batch, shape.microbatch)

    def _score(self, shape: _Shape, slowest: float, total: float, tail: float, work: float) -> Score:
        concurrent = sum(node.concurrent for node in self.cluster.nodes)
        count = self._count(shape)
        pipelined = (count - 1) * slowest + total
        return max(pipelined, count * work / concurrent) + tail, pipelined + tail

    def _bound(
        self,
        shape: _Shape,
        stages: int,
        stop: int,
        left: int,
        slowest: float,
        total: float,
        tail: float,
        work: float,
    ) -> Score:
        """The score if ``stages`` more stages split blocks 0 to ``stop`` ideally over ``left`` devices."""
        if stages:
            rest = self._seconds[shape.microbatch][stop]
            slowest, total = max(slowest, rest / left), total + rest / (left - stages + 1)
            work += rest
        sharing, alone = self._score(shape, slowest, total, tail, work)
        return sharing * ROUNDING, alone * ROUNDING

    def _pipelines(self, fitter: StageFitter, shape: _Shape, limit: Score) -> list[_Partial]:
        """Undominated pipelines over all devices that may score below ``limit``, built from the last stage on."""
        fronts = {(len(self.profile.blocks), len(self.cluster.devices)): [_Partial(0.0, 0.0, 0.0, 0.0, ())]}
        for stage in reversed(range(shape.stages)):
            flight = in_flight(shape.schedule, shape.stages, stage, self._count(shape))
            grown: dict[tuple[int, int], list[_Partial]] = {}
            for (stop, left), partials in fronts.items():
                for replicas in self._replica_choices(shape, stage, left):
                    rows = -(-shape.microbatch // replicas)
                    sums = self._seconds[rows]
                    for start in [0] if stage == 0 else range(stage, stop):
                        place, least = (start, left - replicas), sums[stop] - sums[start]
                        hopeful = [p for p in partials if self._hope(shape, stage, place, p, least, replicas) < limit]
                        choice = fitter.fit(start, stop, replicas, rows, flight) if hopeful else None
                        if choice is None:
                            continue
                        front = grown.setdefault(place, [])
                        for partial in hopeful:
                            if self._hope(shape, stage, place, partial, choice.seconds, replicas) < limit:
                                _insert(front, self._prepend(choice, partial))
            fronts = grown
        return fronts.get((0, 0), [])

    def _hope(
        self, shape: _Shape, stage: int, place: tuple[int, int], after: _Partial, seconds: float, replicas: int
    ) -> Score:
        """The best score with a stage of ``seconds`` before the stages of ``after``."""
        slowest, work = max(seconds, after.slowest), seconds * replicas + after.work
        return self._bound(shape, stage, *place, slowest, seconds + after.total, after.tail, work)

    def _prepend(self, choice: StageChoice, partial: _Partial) -> _Partial:
        replicas = choice.plan.replicas
        link = self.cluster.local if len(self.cluster.nodes) == 1 else self.cluster.remote
        reduce = link.seconds(ring_bytes(choice.parameter_bytes, replicas))
        return _Partial(
            max(choice.seconds, partial.slowest),
            choice.seconds + partial.total,
            max(choice.tail_seconds + reduce, partial.tail),
            choice.seconds * replicas + partial.work,
            (choice, *partial.stages),
        )

    def _sums(self, rows: int) -> list[float]:
        """Seconds of the first n blocks for a micro-batch of ``rows``, when nothing is computed twice."""
        costs = self.profile.blocks
        return list(accumulate((c.forward_seconds.at(rows) + c.backward_seconds.at(rows) for c in costs), initial=0.0))

    def _all_rows(self) -> set[int]:
        devices = len(self.cluster.devices)
        return {-(-microbatch // replicas) for microbatch in self.microbatches for replicas in range(1, devices + 1)}

    def _stage_counts(self) -> list[int]:
        """Numbers of stages that can use every device: at least one block and one device for each."""
        most = min(len(self.cluster.devices), len(self.profile.blocks))
        wanted = range(1, most + 1) if self.config.stages == AUTO else [int(self.config.stages)]
        return [stages for stages in wanted if stages <= most and self._replicas_fit(stages)]

    def _devices_asked(self) -> str:
        """``=N`` where stages and replicas say how many devices they mean."""
        stages, replicas = self.config.stages, self.config.replicas
        if isinstance(replicas, list | tuple):
            return f"={sum(replicas)}"
        return f"={stages * replicas}" if isinstance(stages, int) and isinstance(replicas, int) else ""

    def _replicas_fit(self, stages: int) -> bool:
        replicas, devices = self.config.replicas, len(self.cluster.devices)
        if isinstance(replicas, list | tuple):
            return len(replicas) == stages and sum(replicas) == devices
        return replicas == AUTO or int(replicas) * stages == devices

    def _replica_choices(self, shape: _Shape, stage: int, left: int) -> Sequence[int]:
        """Replica counts of a stage that leave at least one device for each earlier stage, and none after the first.
        A replica without a row of any micro-batch is worth nothing where larger micro-batches can be had."""
        replicas = self.config.replicas
        choices: Sequence[int]
        if isinstance(replicas, list | tuple):
            choices = [replicas[stage]]
        elif replicas != AUTO:
            choices = [int(replicas)]
        else:
            choices = [left] if stage == 0 else range(1, left - stage + 1)
        largest = max(self.microbatches)
        return [r for r in choices if r <= shape.microbatch or shape.microbatch == largest]


def _worst(best: Sequence[_Candidate], most: int) -> Score:
    """What a candidate must beat to be among the ``most`` best."""
    return best[most - 1].score if len(best) >= most else WORST


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


def _plan(request: _Request, chosen: _Candidate, simulation: Simulation) -> Plan:
    profile, devices = request.profile, request.cluster.devices
    ranks = tuple(
        RankPrediction(
            peak_bytes=trace.peak_bytes,
            budget_bytes=device.memory_bytes,
            tier_peak_bytes=trace.tier_peak_bytes,
            offloaded_bytes=trace.offloaded_bytes,
            stall_seconds=round(trace.stall_seconds, 6),
        )
        for trace, device in zip(simulation.ranks, devices)
    )
    return Plan(
        model=profile.model,
        fingerprint=profile.fingerprint,
        schedule=chosen.schedule,
        global_batch=request.global_batch,
        microbatch=chosen.microbatch,
        stages=chosen.stages,
        tier=devices[0].tier,
        prediction=Prediction(
            step_seconds=round(simulation.step_seconds, 6), bubble=round(simulation.bubble, 6), ranks=ranks
        ),
        candidates=request.compared,
        exact=request.fitter.exact,
    )
