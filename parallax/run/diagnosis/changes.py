"""Find the cause that costs a run most, and the changes of the settings that are predicted to help."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from parallax.common.units import format_bytes, format_seconds
from parallax.config import RunConfig
from parallax.errors import ParallaxError
from parallax.machine.local import ClusterConfig
from parallax.plan.cluster import Cluster
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Directive, Plan
from parallax.plan.search.search import search
from parallax.plan.tier import AUTO
from parallax.run.diagnosis.fitted import FittedRun, with_host_tier, with_tier_speed
from parallax.run.diagnosis.measured import CHECKPOINT, OTHER

LEAST = 0.05  # share of a step: a cause or a change below it is not worth a line
SLOW_TIER = 0.5  # share of the planned bandwidth, below which a tier is slow
_LONG = 1.5  # factor of the planned seconds, from which computing is slow
_MUCH = 0.1  # share of the time between steps that is worth a remark
_MOST_CHANGES = 2
_READERS_BUSY = 0.8  # share of the step in which workers read all of its rows
_PLENTY = 64  # factor of the budget with which no plan needs to offload
_MARGINS = (1.02, 1.1, 1.3)  # factors of that plan's peak that are tried as budgets
_RARER = 4  # factor of the steps between checkpoints


class Cause(StrEnum):
    """A cause of long steps."""

    INPUT = "slow input"
    RANK = "slow rank"
    COMPUTE = "slow computing"
    BUDGET = "small budget"
    TIER = "slow offload tier"
    LAYOUT = "layout"
    CHECKPOINT = "checkpoints"
    NONE = "nothing in particular"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the settings. ``cause``: the cause of lost time that the change addresses. ``text`` describes the
    change. ``overrides``: the changed settings, as the user must type them. ``seconds``: the predicted time from one
    step to the next with the change."""

    cause: Cause
    text: str
    overrides: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The cause that costs most, with a ``sentence`` about it; the seconds per step that each cause costs; and the
    changes that help. Changes that address this cause come first."""

    cause: Cause
    sentence: str
    costs: dict[str, float]
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True)
class RequestedSettings:
    """The settings that the user requested for the run, which a change modifies. ``device_memory``: the requested
    memory budget. ``swaps``: whether the settings allow offloading. ``workers``: the setting ``data.workers``; None if
    this kind of data has no workers."""

    plan: PlanConfig
    microbatch: int | str = AUTO
    device_memory: int | str = AUTO
    swaps: bool = True
    workers: int | str | None = None
    checkpoint_every: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> RequestedSettings:
        """Return the settings of a stored run."""
        cluster = config.cluster
        return cls(
            plan=config.plan,
            microbatch=config.trainer.microbatch,
            device_memory=cluster.device_memory if isinstance(cluster, ClusterConfig) else AUTO,
            swaps=config.swap.offloads,
            workers=getattr(config.data, "workers", None),
            checkpoint_every=config.trainer.checkpoint_every,
        )


def diagnose(run: FittedRun, requested: RequestedSettings) -> Diagnosis:
    """Return the cause that costs the run most, and the changes of the ``requested`` settings that would help."""
    return _Doctor(run, requested).diagnosis()


class _Doctor:
    """Simulates a run with one cause of long steps removed, and with changed settings."""

    def __init__(self, run: FittedRun, requested: RequestedSettings) -> None:
        self._run, self._requested, self._plan = run, requested, run.plan
        self._measured, self._now = run.measured, run.measured.period

    def diagnosis(self) -> Diagnosis:
        costs = {cause: cost for cause, cost in self._costs().items() if cost > LEAST * self._now}
        cause = max(costs, key=lambda each: costs[each], default=Cause.NONE)
        if cause in (Cause.BUDGET, Cause.TIER):
            cause = self._named(costs)
        changes = sorted(self._changes(costs), key=lambda each: each.seconds)
        most = (1 - LEAST) * self._now
        useful = [each for each in changes if each.seconds < most or not each.overrides]
        against = [each for each in useful if each.cause is cause]
        others = [each for each in useful if each.cause is not cause]
        if cause is Cause.NONE and others:
            cause = others[0].cause
        return Diagnosis(
            cause=cause,
            sentence=self._sentence(cause),
            costs={str(each): cost for each, cost in costs.items()},
            changes=tuple([*against, *others][:_MOST_CHANGES]),
        )

    # ---- causes

    def _costs(self) -> dict[Cause, float]:
        """Return the seconds per step that each cause costs. Causes that the measurements rule out are left out."""
        run, now = self._run, self._now
        found = {Cause.CHECKPOINT: self._measured.mean[CHECKPOINT]}
        waits = max(map(sum, zip(self._measured.read_seconds, self._measured.fetch_seconds)))
        found[Cause.INPUT] = min(now - self._without_input, waits)
        if run.slow:
            cluster = with_tier_speed(run.cluster, run.tier_speed)
            found[Cause.RANK] = now - run.seconds(cluster=cluster)
        if run.computing > _LONG:
            found[Cause.COMPUTE] = now - run.seconds(profile=run.planned)
        if run.tier_speed < SLOW_TIER:
            found[Cause.TIER] = now - run.seconds(cluster=run.cluster.slowed(run.slow))
        if self._lacks_memory and (roomy := self._least_budget) is not None:
            found[Cause.BUDGET] = now - roomy[1]
        return found

    @cached_property
    def _without_input(self) -> float:
        return self._run.seconds(reads=[0.0] * self._plan.world_size, fetch=0.0)

    @property
    def _lacks_memory(self) -> bool:
        """Whether the plan offloads or recomputes anything to save memory."""
        return any(
            stage.optimizer_offload
            or stage.parameter_offload
            or set(stage.directives) != {Directive.KEEP}
            for stage in self._plan.stages
        )

    def _named(self, costs: dict[Cause, float]) -> Cause:
        """Return the cause to report for time that swapping costs. The cause is the slow offload tier if the tier
        explains more than half of this time, because more memory would not repair the tier. Otherwise the cause is the
        memory budget."""
        tier, budget = costs.get(Cause.TIER, 0.0), costs.get(Cause.BUDGET, 0.0)
        return Cause.TIER if 2 * tier > budget else Cause.BUDGET

    def _sentence(self, cause: Cause) -> str:
        run, measured = self._run, self._measured
        if cause is Cause.INPUT:
            waits = [
                read + fetch for read, fetch in zip(measured.read_seconds, measured.fetch_seconds)
            ]
            rank = max(range(len(waits)), key=lambda each: waits[each])
            share = waits[rank] / self._now
            return (
                f"rank {rank} waits for rows {format_seconds(waits[rank])} of a step ({share:.0%})"
            )
        if cause is Cause.RANK:
            rank = max(run.slow, key=lambda each: run.slow[each])
            stage, replica, _ = self._plan.coordinate(rank)
            return (
                f"rank {rank} (stage {stage}, replica {replica}) takes {run.slow[rank]:.1f} times as long for its work "
                "as the other ranks do for theirs"
            )
        if cause is Cause.COMPUTE:
            where = "also on ranks that are not slow" if run.slow else "on all ranks"
            return f"blocks take {run.computing:.1f} times as long as planned, {where}"
        if cause is Cause.TIER:
            planned = run.cluster.devices[0].read.bytes_per_second
            return (
                f"the offload tier, {self._plan.tier}, moves {format_bytes(planned * run.tier_speed)}/s, and the plan "
                f"assumed {format_bytes(planned)}/s"
            )
        if cause is Cause.BUDGET:
            budget = min(rank.budget_bytes for rank in self._plan.prediction.ranks)
            moved = sum(rank.offloaded_bytes for rank in self._plan.prediction.ranks)
            does = (
                f"offloads {format_bytes(moved)} a step" if moved else "computes activations again"
            )
            return f"the plan {does} to stay within {format_bytes(budget)} per device"
        if cause is Cause.CHECKPOINT:
            return f"saving takes {format_seconds(measured.mean[CHECKPOINT])} of a mean step"
        if cause is Cause.LAYOUT:
            return "another division into stages, replicas and micro-batches is faster as measured"
        between = measured.mean[OTHER] / self._now
        return "the steps are as this plan is expected to be" + (
            f"; evaluation and reports take {between:.0%} of the time: set trainer.eval_every or trainer.eval_batches"
            if between > _MUCH
            else ""
        )

    # ---- changes

    def _changes(self, costs: dict[Cause, float]) -> Iterator[Change]:
        if Cause.INPUT in costs:
            yield self._more_workers()
        if Cause.COMPUTE in costs:
            yield Change(
                cause=Cause.COMPUTE,
                text="end other programs on the machine; if there are none, correct the profile by this run",
                overrides=(),
                seconds=self._now - costs[Cause.COMPUTE],
            )
        if Cause.RANK in costs:
            yield from self._around_the_slow()
        swapping = self._named(costs) if {Cause.BUDGET, Cause.TIER} & costs.keys() else Cause.NONE
        if Cause.BUDGET in costs:
            yield from self._more_memory(swapping)
        if swapping is not Cause.NONE:
            yield from self._host_memory(swapping)
            yield from self._recomputing(swapping)
        if Cause.CHECKPOINT in costs:
            yield self._rarer_checkpoints(costs[Cause.CHECKPOINT])
        if not self._run.slow:
            yield from self._other_layout()

    def _more_workers(self) -> Change:
        """Return the change of ``data.workers`` that is enough to read all rows during a step."""
        measured, least = self._measured, self._without_input
        waits = (r + f for r, f in zip(measured.read_seconds, measured.fetch_seconds))
        workers = self._requested.workers
        if workers is None:
            text = "make reading faster: this data has no workers that read ahead"
            return Change(cause=Cause.INPUT, text=text, overrides=(), seconds=least)
        now = workers if isinstance(workers, int) else 0
        reading = (
            now * self._now if now else max(waits)
        )  # workers that are too few read all the time
        count = max(now + 1, math.ceil(reading / (_READERS_BUSY * least)))
        return Change(
            cause=Cause.INPUT,
            text=f"read rows ahead in {count} process{'es' if count > 1 else ''} per rank",
            overrides=(f"data.workers={count}",),
            seconds=max(least, reading / count),
        )

    def _around_the_slow(self) -> Iterator[Change]:
        """Yield the changes that give slow ranks less work, or that leave out the devices of slow ranks."""
        run, ranks = self._run, ", ".join(map(str, self._run.slow))
        if (found := self._searched(run.as_run, self._requested.plan)) is not None:
            text = f"plan again with what was measured, so that rank {ranks} gets less"
            yield self._change(Cause.RANK, text, ["plan.replan=auto"], found, run.as_run)
        left = self._plan.world_size - len(run.slow)
        if left < 1:
            return
        fewer = with_tier_speed(run.cluster.first(left), run.tier_speed)
        freed = replace(self._requested.plan, stages=AUTO, replicas=AUTO)
        if (found := self._searched(fewer, freed)) is not None:
            overrides = [f"cluster.devices={left}", *_shape(found)]
            text = f"leave out the device of rank {ranks}"
            if min(run.slow) < left:  # the first devices are used
                text += ", which must come last (CUDA_VISIBLE_DEVICES)"
            yield self._change(Cause.RANK, text, overrides, found, fewer)

    @cached_property
    def _least_budget(self) -> tuple[str, float, Plan] | None:
        """The smallest of several tested memory budgets under which a step is almost as fast as with unlimited memory:
        the budget as text, the seconds of a step, and the plan. None if no budget is configured, or if no tested budget
        is large enough."""
        if self._requested.device_memory == AUTO:
            return None
        plenty = self._with_memory(None)
        if (best := self._searched(plenty, self._requested.plan)) is None:
            return None
        peak = max(rank.peak_bytes for rank in best.prediction.ranks)
        least = self._seconds(best, plenty)
        for margin in _MARGINS:
            mebibytes = math.ceil(peak * margin / 2**20)
            cluster = self._with_memory(mebibytes * 2**20)
            found = self._searched(cluster, self._requested.plan)
            if found is not None and self._seconds(found, cluster) < (1 + LEAST) * least:
                return f"{mebibytes}MiB", self._seconds(found, cluster), found
        return None

    def _with_memory(self, size: int | None) -> Cluster:
        devices = self._run.as_run.devices
        return self._run.as_run.with_devices(
            replace(each, memory_bytes=size or _PLENTY * each.memory_bytes) for each in devices
        )

    def _more_memory(self, cause: Cause) -> Iterator[Change]:
        if (found := self._least_budget) is not None:
            memory, seconds, _ = found
            yield Change(
                cause=cause,
                text=f"give each device a budget of {memory}, if it has that",
                overrides=(f"cluster.device_memory={memory}",),
                seconds=seconds,
            )

    def _host_memory(self, cause: Cause) -> Iterator[Change]:
        """Yield the change that offloads to host memory, if the host memory is large enough. ``cause``: the cause that
        the change addresses."""
        hosts = with_host_tier(self._run.cluster.slowed(self._run.slow))
        if hosts is None or (found := self._searched(hosts, self._requested.plan)) is None:
            return
        if most := max(rank.tier_peak_bytes for rank in found.prediction.ranks):
            text = f"offload to host memory, {format_bytes(most)} per rank, instead of the tier {self._plan.tier}"
            yield self._change(cause, text, [f"swap.tier={found.tier}"], found, hosts)

    def _recomputing(self, cause: Cause) -> Iterator[Change]:
        """Yield the change that recomputes activations instead of offloading them. ``cause``: the cause that the change
        addresses."""
        if self._requested.plan.activations == Directive.RECOMPUTE:
            return
        config = replace(self._requested.plan, activations=str(Directive.RECOMPUTE))
        if (found := self._searched(self._run.as_run, config)) is not None:
            text = "compute activations again instead of offloading them"
            overrides = ["plan.activations=recompute", *self._resident(found)]
            yield self._change(cause, text, overrides, found, self._run.as_run)

    def _rarer_checkpoints(self, cost: float) -> Change:
        every = _RARER * self._requested.checkpoint_every
        return Change(
            cause=Cause.CHECKPOINT,
            text="save less often",
            overrides=(f"trainer.checkpoint_every={every}",) if every else (),
            seconds=self._now - cost * (1 - 1 / _RARER),
        )

    def _other_layout(self) -> Iterator[Change]:
        """Yield the change to the best plan that the planner finds without the user's constraints, if it differs from
        the run's plan."""
        free = PlanConfig(replan=self._requested.plan.replan)
        found = self._searched(self._run.as_run, free, microbatch=AUTO)
        if found is None or found.decisions() == self._plan.decisions():
            return
        requested, shape = self._requested.plan, _shape(found)
        overrides = [*shape, f"trainer.microbatch={found.microbatch}"]
        overrides += [f"plan.schedule={found.schedule.name}"]
        directives = {directive for stage in found.stages for directive in stage.directives}
        if len(directives) == 1 and any(set(s.directives) != directives for s in self._plan.stages):
            overrides += [f"plan.activations={next(iter(directives))}"]
        elif requested.activations != AUTO:
            overrides += ["plan.activations=auto"]
        kept = ("optimizer", "parameters", "shard", "interleave", "group")
        overrides += self._resident(found)
        named = {each.partition("=")[0] for each in overrides}
        overrides += [
            f"plan.{name}=auto"
            for name in kept
            if getattr(requested, name) != AUTO and f"plan.{name}" not in named
        ]
        replicas = shape[1].partition("=")[2]
        text = f"another layout: stages {found.pipeline_ranks}, replicas {replicas}, schedule {found.schedule}"
        yield self._change(Cause.LAYOUT, text, overrides, found, self._run.as_run)

    def _resident(self, plan: Plan) -> list[str]:
        """Return ``plan.optimizer=device`` and ``plan.parameters=device``, each only if the run's plan offloads these
        tensors and ``plan`` does not. The user must type these settings, because the planner does not use the run's
        measurements."""
        shares = {"optimizer": "optimizer_offload", "parameters": "parameter_offload"}
        return [
            f"plan.{name}=device"
            for name, share in shares.items()
            if any(getattr(stage, share) for stage in self._plan.stages)
            and not any(getattr(stage, share) for stage in plan.stages)
        ]

    def _searched(
        self, cluster: Cluster, config: PlanConfig, *, microbatch: int | str | None = None
    ) -> Plan | None:
        """Return the best plan of the fitted run for ``cluster`` under the plan settings ``config``. ``microbatch``:
        replaces the requested setting; None keeps it. Return None if no plan fits, or if the plan needs a schedule that
        this process has not imported."""
        with contextlib.suppress(ParallaxError):
            return search(
                self._run.profile,
                cluster,
                config,
                global_batch=self._plan.global_batch,
                microbatch=self._requested.microbatch if microbatch is None else microbatch,
                swap=self._requested.swaps,
                gather_loss=self._plan.gather_loss,
            )[0]
        return None

    def _seconds(self, plan: Plan, cluster: Cluster) -> float:
        return self._run.seconds(cluster=cluster, plan=plan, reads=self._reads_of(plan))

    def _reads_of(self, plan: Plan) -> Sequence[float]:
        """Return the seconds of reading rows by rank under ``plan``. The measured seconds of the run's first stage are
        divided evenly among the replicas of the first stage of ``plan``. The last stage is treated in the same way."""
        found = [0.0] * plan.world_size
        ends = {0: 0, len(self._plan.stages) - 1: len(plan.stages) - 1}
        for before, after in ends.items():
            total = sum(self._measured.read_seconds[rank] for rank in self._plan.ranks(before))
            for rank in plan.ranks(after):
                found[rank] += total / len(plan.ranks(after))
        return found

    def _change(
        self, cause: Cause, text: str, overrides: Sequence[str], plan: Plan, cluster: Cluster
    ) -> Change:
        seconds = self._seconds(plan, cluster)
        return Change(cause=cause, text=text, overrides=tuple(overrides), seconds=seconds)


def _shape(plan: Plan) -> list[str]:
    """Return the settings with which the planner must use the number of stages and the replicas of ``plan``, as text to
    type."""
    counts = [stage.replicas for stage in plan.stages[: plan.pipeline_ranks]]
    replicas = str(counts[0]) if len(set(counts)) == 1 else f"[{','.join(map(str, counts))}]"
    return [f"plan.stages={plan.pipeline_ranks}", f"plan.replicas={replicas}"]
