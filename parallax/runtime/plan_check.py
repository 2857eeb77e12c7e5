"""Check that a plan fits the model, and that the runtime supports it. The planner can make plans that the runtime does
not support."""

from __future__ import annotations

from dataclasses import replace

from parallax.errors import PlanError
from parallax.model.describe import Chain
from parallax.plan.plan import Plan
from parallax.plan.schedule import named


def accepted(plan: Plan, chain: Chain) -> Plan:
    """Return ``plan``, with its schedule looked up by name. Raises :class:`PlanError` for a plan of another model, or
    with features that the runtime lacks."""
    plan = replace(plan, schedule=named(plan.schedule.name, plan.schedule.group))
    if plan.blocks != len(chain.blocks) or plan.fingerprint != chain.fingerprint():
        raise PlanError(
            f"the plan is for {plan.blocks} blocks of {plan.model} ({plan.fingerprint}), the model has "
            f"{len(chain.blocks)} ({chain.fingerprint()}): plan again for this model"
        )
    check_gathering(plan, plan.global_batch)
    return plan


def check_training(plan: Plan, chain: Chain) -> None:
    """Raise :class:`PlanError` unless the plan and the chain are for training."""
    if not plan.task.trains:
        raise PlanError(f"the plan is for {plan.task}, without memory for training: plan again")
    if not chain.trains:
        raise PlanError(
            "the chain was recorded in evaluation alone, and training computes something else: describe the model "
            "without task"
        )


def check_updates(plan: Plan, updates: str | None, *, skips: bool) -> None:
    """Raise :class:`PlanError` if the run's ``updates`` differ from those of the plan; None means those of the plan.

    Also raise it if steps of the plan overlap and ``skips`` says that a step may be skipped, because the next step
    begins before that is decided.
    """
    if updates not in (None, plan.updates):
        raise PlanError(
            f"the plan is for trainer.updates={plan.updates}, and the run has trainer.updates={updates}, which needs "
            f"memory for another number of versions of the weights: plan again, or use trainer.updates={plan.updates}"
        )
    if plan.schedule.continues and skips:
        raise PlanError(
            f"the plan has plan.schedule={plan.schedule}, under which a step begins before the update of the last one: "
            "use trainer.nonfinite=stop precision.loss_scale=auto without fp16, or plan with plan.schedule=1f1b"
        )


def check_gathering(plan: Plan, rows: int) -> None:
    """Raise :class:`PlanError` if the plan gathers the loss over a batch of ``rows`` rows, but its schedule runs a
    backward before all forwards are complete."""
    count = plan.micro_batches(rows)
    if plan.gather_loss and not plan.schedule.forwards_first(
        plan.pipeline_ranks, count, plan.interleave
    ):
        raise PlanError(
            f"the plan computes the loss of all rows at once, and {plan.schedule} runs backward before all {count} "
            f"micro-batches of {rows} rows have run forward: plan with trainer.gather_loss=true plan.schedule=gpipe"
        )


def shared_between_ranks(chain: Chain, plan: Plan) -> dict[str, list[int]]:
    """Return the pipeline ranks that hold each parameter, for the parameters that several pipeline ranks hold.

    The result maps names of parameters to lists of pipeline ranks, in the order in which they first use the parameter.
    """
    shared = {}
    for name, users in chain.ties.items():
        stages = [
            s
            for i, _ in users
            for s, stage in enumerate(plan.stages)
            if stage.start <= i < stage.stop
        ]
        pipeline_ranks = list(dict.fromkeys(plan.pipeline_rank(stage) for stage in stages))
        if len(pipeline_ranks) > 1:
            shared[name] = pipeline_ranks
    return shared
