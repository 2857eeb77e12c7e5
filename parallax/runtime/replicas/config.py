"""The keys of ``replicas``: what data-parallel copies of a stage do together."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import PlanError, check_choice, check_positive
from parallax.model.layers.norms import BATCHNORM
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.runtime.replicas.compress import COMPRESSIONS


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """``compress``: in what form gradients are added up over the replicas of a stage. none: as they are; fp16, bf16:
    in two bytes, for all-reduces of half the size (fp16 loses gradients below 6e-8); powersgd: matrices as products of
    two of ``powersgd_rank`` columns, what is lost is added to the next step's gradients. PowerSGD begins with the third
    step, and again with the third after a checkpoint, which does not hold what was lost; it suits long runs whose time
    goes into all-reduces.

    ``batchnorm``: whose rows a BatchNorm's statistics are taken over. replica: of each micro-batch those on the
    replica; sync: all replicas' (two small all-reduces more for each BatchNorm and micro-batch); frozen: nobody's,
    running statistics stay as they are, weight and bias train. But for frozen, results depend on the rows of a
    micro-batch, and for replica on the number of replicas: set trainer.microbatch to keep them the same.
    """

    compress: str = "none"
    powersgd_rank: int = 1
    batchnorm: str = "replica"

    def __post_init__(self) -> None:
        check_choice("replicas.compress", self.compress, COMPRESSIONS)
        check_positive("replicas.powersgd_rank", self.powersgd_rank)
        check_choice("replicas.batchnorm", self.batchnorm, BATCHNORM)

    def check_asked(self, plan: PlanConfig) -> None:
        """:meth:`check` of what is asked of the planner, as far as that says what the plan will be."""
        counts = plan.replicas if isinstance(plan.replicas, list | tuple) else [plan.replicas]
        if self.compress != "powersgd" or not any(
            isinstance(count, int) and count > 1 for count in counts
        ):
            return
        self._check_whole(
            plan.schedule if all(schedule.splits for schedule in plan.schedules) else "",
            plan.parameters == "host",
        )

    def check(self, plan: Plan, *, drops: bool = False) -> None:
        """Refuse what ``plan`` cannot do: PowerSGD needs all gradients of a backward at once, on the device of every
        replica, and all of them to be used. ``drops``: steps may be skipped."""
        most = max(stage.replicas for stage in plan.stages)
        if self.compress != "powersgd" or most == 1:
            return
        if drops:
            raise PlanError(
                "replicas.compress=powersgd adds to each step's gradients what it left out of the last one's, so it "
                "cannot run with trainer.nonfinite=skip, which drops some: use replicas.compress=bf16"
            )
        last = -(-plan.global_batch // plan.micro_batches(plan.global_batch))
        if last < most:
            raise PlanError(
                f"replicas.compress=powersgd cannot run where {last} rows of a micro-batch leave some of {most} "
                f"replicas without any: use replicas.compress=bf16, or plan with trainer.microbatch={most}"
            )
        below = any(stage.parameter_offload for stage in plan.stages)
        self._check_whole(plan.schedule.name if plan.schedule.splits else "", below)

    def _check_whole(self, split: str, below: bool) -> None:
        """``split``: the schedule, where it splits backwards. ``below``: whether parameters live below the device."""
        if split or below:
            why = (
                f"the backwards of {split} are split"
                if split
                else "parameters live below the device"
            )
            raise PlanError(
                f"replicas.compress=powersgd cannot run where {why}: use replicas.compress=bf16, or plan with "
                f"{'plan.schedule=1f1b' if split else 'plan.parameters=device'}"
            )
