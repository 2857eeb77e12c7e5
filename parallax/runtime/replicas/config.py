"""The ``replicas`` settings: how gradients are compressed, and over which rows BatchNorms compute statistics."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import PlanError, check_choice, check_positive
from parallax.model.layers.norms import BATCHNORM
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.runtime.replicas.compress import COMPRESSIONS


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """``compress``: the form in which gradients are summed over the replicas of a stage. none is exact. fp16 and bf16
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

    compress: str = "none"
    powersgd_rank: int = 1
    batchnorm: str = "replica"

    def __post_init__(self) -> None:
        check_choice("replicas.compress", self.compress, COMPRESSIONS)
        check_positive("replicas.powersgd_rank", self.powersgd_rank)
        check_choice("replicas.batchnorm", self.batchnorm, BATCHNORM)

    def check_requested(self, plan: PlanConfig) -> None:
        """Run :meth:`check` before planning, as far as the planner's settings already determine the plan."""
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
        """Raise :class:`PlanError` if ``plan`` cannot run with these settings.

        PowerSGD needs all gradients of a backward at the same time, on the device of every replica, and it allows no
        skipped steps. ``drops`` is True if steps may be skipped.
        """
        most = max(stage.replicas for stage in plan.stages)
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
