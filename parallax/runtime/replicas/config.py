"""The ``replicas`` settings: when and how replicas exchange gradients or weights, and over which rows BatchNorms
compute statistics."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import ConfigError, PlanError, check_choice, check_count, check_positive
from parallax.model.layers.norms import BATCHNORM
from parallax.plan.config import AUTO, PlanConfig
from parallax.plan.plan import Plan
from parallax.runtime.replicas.compress import COMPRESSIONS, SHORT
from parallax.swap.optimizer.outer import OuterRule

SYNCHRONOUS, LOCAL, ASYNCHRONOUS = "synchronous", "local", "asynchronous"
_OF_LOCAL = (
    "sync_every",
    "groups",
    "fragments",
    "fragment_delay",
    "outer_lr",
    "outer_momentum",
    "outer_compress",
)


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """How the replicas of a stage exchange gradients or weights, and over which rows BatchNorms compute statistics.

    ``mode``: the exchange between the replicas of a stage: synchronous, local or asynchronous. With synchronous, they
        sum their gradients in every step, which is exact. With local, each replica takes the steps of a round alone,
        with its own rows. At the end of the round, all replicas get the mean of their weights (local SGD), or an outer
        optimizer steps their weights by the mean change (DiLoCo). This sends fewer bytes over slow links, but the loss
        differs from that of synchronous replicas. With asynchronous, replicas do not wait for each other. Each sends
        its gradients to the first replica, which has the weights and the optimizer states, and gets the newest weights
        back. A slow replica then does not slow the others down, but the loss differs from that of synchronous replicas,
        and a run is not reproducible.
    ``staleness``: the largest number of updates between the weights with which an asynchronous replica computes a
        gradient, and the update that uses this gradient; 0 is synchronous.
    ``sync_every``: the number of steps in a round.
    ``groups``: the number of groups of replicas that step together, such as those of one host: the replicas of a group
        sum their gradients in every step. With auto, each replica steps alone.
    ``outer_lr``, ``outer_momentum``: the learning rate and the Nesterov momentum of the outer optimizer, which is SGD.
        With 1 and 0, all replicas take the mean; DiLoCo uses 0.7 and 0.9.
    ``outer_compress``: the number format in which the changes of the weights are exchanged: none, or fp16 or bf16 for
        half the bytes.
    ``fragments``: the number of parts of the model. Each part, a fragment, is exchanged once in a round, at another
        step than the others, so that fewer bytes are exchanged at one time.
    ``fragment_delay``: the number of steps that run while a fragment is exchanged. When the exchange ends, each replica
        keeps the progress of these steps. So the exchange overlaps with compute, but needs memory for two copies of the
        fragment.

    ``compress``: the form in which gradients are summed over the replicas of a stage. none is exact. fp16 and bf16
    halve the size of all-reduces (fp16 loses gradients below 6e-8). powersgd approximates each matrix by a product of
    two matrices of rank ``powersgd_rank``, and adds the error to the next step's gradients. It starts at the third step
    of a run, and again at the third step after a resume, because checkpoints do not hold the error. It suits long runs
    whose time is dominated by all-reduces.

    ``batchnorm``: the rows over which a BatchNorm computes statistics. replica uses the replica's rows of each
    micro-batch. sync uses the rows of all replicas, at the cost of two small all-reduces for each BatchNorm and
    micro-batch. frozen computes none: running statistics stay unchanged while weight and bias train. Except for frozen,
    results depend on the size of a micro-batch, which trainer.microbatch fixes; for replica they also depend on the
    number of replicas.
    """

    mode: str = SYNCHRONOUS
    staleness: int = 1
    sync_every: int = 50
    groups: int | str = AUTO
    fragments: int = 1
    fragment_delay: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    outer_compress: str = "none"
    compress: str = "none"
    powersgd_rank: int = 1
    batchnorm: str = "replica"

    @property
    def shares_norms(self) -> bool:
        """Whether replicas share the statistics of BatchNorms."""
        return self.batchnorm == "sync"

    def __post_init__(self) -> None:
        check_choice("replicas.mode", self.mode, [SYNCHRONOUS, LOCAL, ASYNCHRONOUS])
        check_positive("replicas.staleness", self.staleness, zero=True)
        check_positive("replicas.sync_every", self.sync_every)
        check_count("replicas.groups", self.groups)
        check_positive("replicas.fragments", self.fragments)
        check_positive("replicas.fragment_delay", self.fragment_delay, zero=True)
        check_positive("replicas.outer_lr", self.outer_lr)
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"replicas.outer_momentum={self.outer_momentum}: accepted are numbers in [0, 1)"
            )
        check_choice("replicas.outer_compress", self.outer_compress, ["none", *SHORT])
        self._check_mode()
        check_choice("replicas.compress", self.compress, COMPRESSIONS)
        check_positive("replicas.powersgd_rank", self.powersgd_rank)
        check_choice("replicas.batchnorm", self.batchnorm, BATCHNORM)

    def _check_mode(self) -> None:
        """Raise :class:`ConfigError` if settings contradict ``mode``."""
        if self.staleness != ReplicasConfig.staleness and self.mode != ASYNCHRONOUS:
            raise ConfigError(
                f"replicas.staleness={self.staleness}: with replicas.mode={self.mode}, weights are never stale; use "
                "replicas=asynchronous"
            )
        if self.asynchronous:
            self._check_asynchronous()
        if self.mode == LOCAL:
            for key, most in (
                ("fragments", self.sync_every),
                ("fragment_delay", self.sync_every - 1),
            ):
                if getattr(self, key) > most:
                    raise ConfigError(
                        f"replicas.{key}={getattr(self, key)}: at most {most} in rounds of {self.sync_every} steps "
                        "(replicas.sync_every)"
                    )
            if self.compress != "none":
                raise ConfigError(
                    f"replicas.compress={self.compress}: local replicas exchange no gradients; use "
                    "replicas.compress=none replicas.outer_compress=bf16"
                )
            if self.batchnorm == "sync":
                raise ConfigError(
                    "replicas.batchnorm=sync: local replicas exchange nothing within a round; use "
                    "replicas.batchnorm=replica"
                )
            return
        changed = [key for key in _OF_LOCAL if getattr(self, key) != getattr(ReplicasConfig, key)]
        if changed:
            raise ConfigError(
                f"replicas.{changed[0]}={getattr(self, changed[0])}: replicas.mode={self.mode} takes no local steps; "
                "use replicas=local"
            )

    def _check_asynchronous(self) -> None:
        if self.compress != "none":
            raise ConfigError(
                f"replicas.compress={self.compress}: asynchronous replicas send whole gradients; use "
                "replicas.compress=none, or replicas.staleness=0"
            )
        if self.batchnorm == "sync":
            raise ConfigError(
                "replicas.batchnorm=sync: asynchronous replicas do not wait for the rows of others; use "
                "replicas.batchnorm=replica, or replicas.staleness=0"
            )

    def check_beside(self, *, gather_loss: bool, delays: bool, scales: bool = False) -> None:
        """Raise :class:`ConfigError` for other settings that need the same weights on all replicas in every step."""
        found = {
            "trainer.gather_loss=true": (gather_loss, "trainer.gather_loss=false"),
            "trainer.updates=delayed": (delays, "trainer.updates=synchronous"),
            "a scaled loss": (scales, "precision=bf16 precision.loss_scale=auto"),
        }
        for what, (is_set, remedy) in found.items() if self.asynchronous else ():
            if is_set:
                raise ConfigError(
                    f"{what}: asynchronous replicas compute with weights of different versions, and cannot run with "
                    f"it; use {remedy}, or replicas.staleness=0"
                )
        if self.mode == LOCAL and gather_loss:
            raise ConfigError(
                "trainer.gather_loss=true: the rows of all replicas have one loss, and with replicas.mode=local each "
                "replica steps by itself; use trainer.gather_loss=false, or replicas=default"
            )
        if self.mode == LOCAL and delays:
            raise ConfigError(
                "trainer.updates=delayed: with replicas.mode=local, replicas have different weights within a "
                "round, and no older version of them is kept; use trainer.updates=synchronous, or replicas=default"
            )

    @property
    def outer(self) -> OuterRule | None:
        """The rule by which a round of local steps ends; None if replicas sum gradients in every step."""
        if self.mode != LOCAL:
            return None
        return OuterRule(self.outer_lr, self.outer_momentum, self.outer_compress != "none")

    @property
    def asynchronous(self) -> bool:
        """Whether replicas do not wait for each other. With a staleness of 0 they are synchronous."""
        return self.mode == ASYNCHRONOUS and self.staleness > 0

    @property
    def staleness_bound(self) -> int:
        """The staleness that a plan allows; 0 if replicas are not asynchronous."""
        return self.staleness if self.asynchronous else 0

    @property
    def local_steps(self) -> int:
        """The local steps of a round; 0 if replicas sum gradients in every step."""
        return self.sync_every if self.mode == LOCAL else 0

    @property
    def local_groups(self) -> int:
        """The groups of replicas that take local steps; 0 if each replica steps alone, and without local steps."""
        return 0 if self.mode != LOCAL or self.groups == AUTO else int(self.groups)

    @property
    def exchanged(self) -> float:
        """The bytes that local replicas exchange for each byte of weights, in the type in which they are stepped."""
        return 1.0 if self.outer_compress == "none" else SHORT[self.outer_compress].itemsize / 4

    def check_requested(self, plan: PlanConfig) -> None:
        """Run :meth:`check` before planning, as far as the planner's settings already determine the plan."""
        counts = plan.replicas if isinstance(plan.replicas, list | tuple) else [plan.replicas]
        if self.asynchronous and plan.parameters == "host":
            raise ConfigError(
                "plan.parameters=host: asynchronous replicas exchange parameters that are on the device; use "
                "plan.parameters=device, or replicas.staleness=0"
            )
        if (self.mode == LOCAL or self.asynchronous) and len(set(counts)) > 1:
            raise ConfigError(
                f"plan.replicas={list(counts)}: replicas.mode={self.mode} needs equally many replicas of every stage; "
                f"use plan.replicas={max(1, sum(map(int, counts)) // len(counts))}, or plan.replicas=auto"
            )
        if self.asynchronous and plan.shard == "optimizer":
            raise ConfigError(
                "plan.shard=optimizer: the first of asynchronous replicas has all optimizer states; use "
                "plan.shard=none, or replicas.staleness=0"
            )
        if self.mode == LOCAL and plan.shard == "optimizer" and not self.local_groups:
            raise ConfigError(
                "plan.shard=optimizer: replicas that step alone have all optimizer states; use plan.shard=none, or "
                "replicas.groups with several replicas in a group"
            )
        if self.local_groups and counts[0] != AUTO and int(str(counts[0])) % self.local_groups:
            raise ConfigError(
                f"replicas.groups={self.groups}: plan.replicas={counts[0]} cannot be divided into so many groups; use "
                f"plan.replicas={self.local_groups}, or plan.replicas=auto"
            )
        if self.compress != "powersgd" or not any(
            isinstance(count, int) and count > 1 for count in counts
        ):
            return
        self._check_whole(
            plan.schedule if all(schedule.splits for schedule in plan.schedules) else "",
            plan.parameters == "host",
        )

    def check(self, plan: Plan, *, drops: bool = False) -> None:
        """Raise :class:`PlanError` if ``plan`` cannot run with these settings.

        PowerSGD needs all gradients of a backward at the same time, on the device of every replica, and it allows no
        skipped steps. ``drops`` is True if steps may be skipped.
        """
        most = max(stage.replicas for stage in plan.stages)
        planned = plan.local_steps, plan.local_groups, plan.fragments, plan.fragment_delay
        wanted = self.local_steps, self.local_groups, self.fragments, self.fragment_delay
        if planned != wanted:
            raise PlanError(
                f"the plan is for {_rounds(*planned)}, and replicas.mode={self.mode} is for {_rounds(*wanted)}: plan "
                "again with these settings"
            )
        if plan.staleness != self.staleness_bound:
            raise PlanError(
                f"the plan is for replicas with a staleness of {plan.staleness}, and replicas.mode={self.mode} has one "
                f"of {self.staleness_bound}: plan again with these settings"
            )
        if self.compress != "powersgd" or most == 1:
            return
        if drops:
            raise PlanError(
                "replicas.compress=powersgd adds each step's compression error to the next step's gradients, so it "
                "cannot run with trainer.nonfinite=skip, which drops some: use replicas.compress=bf16"
            )
        last = -(-plan.global_batch // plan.micro_batches(plan.global_batch))
        if last < most:
            raise PlanError(
                f"replicas.compress=powersgd cannot run where {last} rows of a micro-batch leave some of {most} "
                f"replicas without any: use replicas.compress=bf16, or plan with trainer.microbatch={most}"
            )
        offloads = any(stage.parameter_offload for stage in plan.stages)
        self._check_whole(plan.schedule.name if plan.schedule.splits else "", offloads)

    def _check_whole(self, split: str, offloads: bool) -> None:
        """Raise :class:`PlanError` if PowerSGD cannot have all gradients of a backward at once on the device.
        ``split``: the name of the schedule if it splits backwards, else "". ``offloads``: whether parameters are
        offloaded."""
        if split or offloads:
            why = f"the backwards of {split} are split" if split else "parameters are offloaded"
            raise PlanError(
                f"replicas.compress=powersgd cannot run where {why}: use replicas.compress=bf16, or plan with "
                f"{'plan.schedule=1f1b' if split else 'plan.parameters=device'}"
            )


def _rounds(local_steps: int, groups: int, fragments: int, delay: int) -> str:
    if not local_steps:
        return "gradients summed in every step"
    who = f"{groups} groups" if groups else "each replica"
    parts = f", fragments={fragments}" if fragments > 1 else ""
    late = f", fragment_delay={delay}" if delay else ""
    return f"rounds of {local_steps} local steps of {who}{parts}{late}"
