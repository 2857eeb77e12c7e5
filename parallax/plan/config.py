"""The configuration group ``plan``: constraints on the planner."""

from __future__ import annotations

from dataclasses import dataclass, fields

from parallax.errors import ConfigError, check_choice, check_count
from parallax.plan.plan import Directive
from parallax.plan.schedule import SCHEDULES, Schedule
from parallax.plan.schedule.own import resolve_schedule
from parallax.plan.task import PlanTask

AUTO = "auto"
_OF_TRAINING = "activations", "optimizer", "shard"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Constraints on the planner; ``auto`` lets the planner choose.

    ``stages``: number of pipeline stages; if each device has several virtual stages, the number of pipeline ranks.
    ``replicas``: a number for every stage, or one per stage such as ``[1, 2]``.
    ``schedule``: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, breadth-first, 2bw with ``trainer.updates=delayed``, or
        one of your own as ``package.module:function`` (:func:`parallax.register_schedule`).
    ``interleave``: virtual stages per pipeline rank, for a schedule that supports several.
    ``group``: with the breadth-first schedule, the number of micro-batches that each block computes before the next
        block begins. Offloaded weights are read once per group.
    ``activations``: keep, offload or recompute, forced on every block.
    ``optimizer``: where the optimizer states are stored: ``device``, or ``host`` for the offload tier.
    ``parameters``: where the parameters and their gradients are stored: ``device``, or ``host`` for the offload tier.
    ``shard``: ``optimizer`` shards the optimizer states on the device over a stage's replicas; ``none`` stores all of
        them on every replica.
    ``replan``: ``auto`` plans again, at most once, if measured steps differ from the prediction by more than a fifth.
        The new plan takes effect at the next checkpoint.
    """

    stages: int | str = AUTO
    replicas: int | str | list[int] = AUTO
    schedule: str = AUTO
    interleave: int | str = AUTO
    group: int | str = AUTO
    activations: str = AUTO
    optimizer: str = AUTO
    parameters: str = AUTO
    shard: str = AUTO
    replan: str = "off"

    def __post_init__(self) -> None:
        if ":" not in self.schedule:
            check_choice("plan.schedule", self.schedule, [AUTO, *SCHEDULES])
        check_choice("plan.activations", self.activations, [AUTO, *Directive])
        check_choice("plan.optimizer", self.optimizer, [AUTO, "device", "host"])
        check_choice("plan.parameters", self.parameters, [AUTO, "device", "host"])
        if self.parameters == "host" and self.optimizer == "device":
            freed = " plan.shard=none" if self.shard == "optimizer" else ""
            raise ConfigError(
                "plan.parameters=host: offloaded parameters need offloaded optimizer states; use "
                f"plan.optimizer=host{freed}, or plan.parameters=device"
            )
        check_choice("plan.shard", self.shard, [AUTO, "none", "optimizer"])
        if self.shard == "optimizer" and "host" in (self.optimizer, self.parameters):
            resident = " plan.parameters=device" if self.parameters == "host" else ""
            raise ConfigError(
                "plan.shard=optimizer: only optimizer states on the device can be sharded, and this run offloads them; "
                f"use plan.optimizer=device{resident}, or plan.shard=none"
            )
        check_choice("plan.replan", self.replan, ["off", AUTO])
        check_count("plan.stages", self.stages)
        check_count("plan.interleave", self.interleave)
        check_count("plan.group", self.group)
        schedule = SCHEDULES.get(self.schedule)
        if self.group != AUTO and (schedule is None or schedule.grouping is None):
            raise ConfigError(
                f"plan.group={self.group}: only plan.schedule=breadth-first computes groups of micro-batches; use "
                "plan.schedule=breadth-first, or plan.group=auto"
            )
        for count in self.replicas if isinstance(self.replicas, list | tuple) else [self.replicas]:
            check_count("plan.replicas", count)
        self._check_interleave()
        self._check_overlap()

    def _check_overlap(self) -> None:
        schedule = SCHEDULES.get(self.schedule)
        moved = {
            "activations": "offload",
            "optimizer": "host",
            "parameters": "host",
            "shard": "optimizer",
        }
        for key, value in moved.items() if schedule is not None and schedule.continues else ():
            if getattr(self, key) == value:
                raise ConfigError(
                    f"plan.{key}={value}: under plan.schedule={self.schedule}, in which steps overlap, each device "
                    f"holds all tensors of its stage; use plan.{key}=auto, or plan.schedule=1f1b"
                )

    def _check_interleave(self) -> None:
        if AUTO in (self.schedule, self.interleave):
            return
        schedule, each = SCHEDULES.get(self.schedule), int(self.interleave)
        if (schedule is None and each != 1) or (schedule is not None and not schedule.allows(each)):
            has = 1 if schedule is None else schedule.interleaves[0]  # your own has one
            raise ConfigError(
                f"plan.interleave={each}: plan.schedule={self.schedule} has {has} {'stage' if has == 1 else 'stages'} "
                "per device; use plan.interleave=auto, or plan.schedule=auto"
            )

    def check_task(self, task: PlanTask) -> None:
        """Raise :class:`ConfigError` if ``task`` is not training and a constraint is set that only training can
        satisfy."""
        for key in _OF_TRAINING if not task.trains else ():
            if (value := getattr(self, key)) != AUTO:
                raise ConfigError(
                    f"plan.{key}={value}: a plan with task={task} runs forwards only, which save no activations and "
                    f"have no optimizer; use plan.{key}=auto"
                )

    @property
    def ranks(self) -> int | None:
        """Return the number of devices that the configured stages and replicas need; None if they do not determine it.

        A list of replicas determines it alone. Otherwise neither stages nor replicas may be auto.
        """
        if isinstance(self.replicas, list | tuple):
            return sum(self.replicas)
        if AUTO in (self.stages, self.replicas):
            return None
        return int(self.stages) * int(self.replicas)

    @property
    def freed(self) -> str:
        """Return the command-line options that reset every constraint to auto.

        The option ``plan=auto`` alone does not override constraints that the user typed. So the result names each
        constraint that is not auto.
        """
        changed = [key.name for key in fields(self) if getattr(self, key.name) != key.default]
        return " ".join(f"plan.{name}=auto" for name in changed if name != "replan") or "plan=auto"

    def load_schedule(self) -> None:
        """Import the user's own schedule, if the configuration names one, to raise its errors before any other work."""
        if self.schedule != AUTO:
            resolve_schedule(self.schedule)

    @property
    def schedules(self) -> list[Schedule]:
        """Return the schedules to try. A user's own schedule is imported unless it is registered already."""
        if self.schedule != AUTO:
            return [resolve_schedule(self.schedule)]
        tried = [schedule for schedule in SCHEDULES.values() if schedule.searched]
        if self.interleave == AUTO:
            return tried
        each = int(self.interleave)
        return [s for s in tried if s.has_virtual_stages == (each > 1) and s.allows(each)]

    @property
    def has_virtual_stages(self) -> bool:
        """Return whether the configuration requests several stages per device."""
        schedule = SCHEDULES.get(self.schedule)
        return self.interleave not in (AUTO, 1) or (
            schedule is not None and schedule.has_virtual_stages
        )

    def interleaves(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the numbers of stages per device to try with ``schedule``."""
        return schedule.interleaves if self.interleave == AUTO else (int(self.interleave),)
