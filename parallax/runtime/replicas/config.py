"""The ``replicas`` settings: compression of gradients and statistics of BatchNorm."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import PlanError, check_choice, check_positive
from parallax.model.layers.norms import BATCHNORM
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.runtime.replicas.compress import COMPRESSIONS


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """``compress``: the form in which gradients are summed over the replicas of a stage. none: exact; fp16, bf16: in
    two bytes, for all-reduces of half the size (fp16 loses gradients below 6e-8); powersgd: matrices as products of
    two of ``powersgd_rank`` columns, with the error added to the next step's gradients. PowerSGD starts with the
    third step, and again with the third after a checkpoint, which does not hold the error; it suits long runs whose
    time is dominated by all-reduces.

    ``batchnorm``: the rows over which a BatchNorm computes statistics. replica: the replica's rows of each micro-batch;
    sync: the rows of all replicas (two more small all-reduces for each BatchNorm and micro-batch); frozen: none,
    running statistics stay unchanged while weight and bias train. Except for frozen, results depend on the rows of a
    micro-batch, and for replica on the number of replicas: set trainer.microbatch to keep them the same.
    """

    compress: str = "none"
    powersgd_rank: int = 1
    batchnorm: str = "replica"

    def __post_init__(self) -> None:
        check_choice("replicas.compress", self.compress, COMPRESSIONS)
        check_positive("replicas.powersgd_rank", self.powersgd_rank)
        check_choice("replicas.batchnorm", self.batchnorm, BATCHNORM)

    def check_requested(self, plan: PlanConfig) -> None:
        """Run :meth:`check` on the planner's settings, as far as they already determine the plan."""
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
        """Raise :class:`PlanError` if ``plan`` cannot run with these settings. PowerSGD needs all gradients of a
        backward at once, on the device of every replica, and no step may be dropped. ``drops``: steps may be skipped.
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
        """Raise :class:`PlanError` for PowerSGD. ``split``: the schedule, if it splits backwards; ``offloads``: whether
        parameters are offloaded."""
        if split or offloads:
            why = f"the backwards of {split} are split" if split else "parameters are offloaded"
            raise PlanError(
                f"replicas.compress=powersgd cannot run where {why}: use replicas.compress=bf16, or plan with "
                f"{'plan.schedule=1f1b' if split else 'plan.parameters=device'}"
            )
