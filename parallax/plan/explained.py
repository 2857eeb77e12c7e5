"""Explain a plan in sentences with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallax.common.units import format_bytes, format_seconds, plural
from parallax.plan.plan import Directive, Plan, StagePlan


def explain(plan: Plan, remarks: Sequence[str] = ()) -> list[str]:
    """Return sentences with numbers that explain ``plan``. ``remarks`` come before the reasons for the planner's
    choice."""
    pipeline_ranks = [
        _explain_pipeline_rank(plan, pipeline_rank) for pipeline_rank in range(plan.pipeline_ranks)
    ]
    return [_explain_shape(plan), *pipeline_ranks, *remarks, *explain_choice(plan)]


def _explain_shape(plan: Plan) -> str:
    micro = plan.micro_batches(plan.global_batch)
    each = f", {plan.interleave} virtual stages per pipeline rank" if plan.interleave > 1 else ""
    once = "the loss is computed once, of all rows; " if plan.gather_loss else ""
    groups = plan.stages[0].replicas // plan.summing(0)
    if plan.staleness and groups > 1:
        once += (
            f"{groups} replicas train on one state without waiting for each other, with weights of at most "
            f"{plural(plan.staleness, 'update')} before; each exchanges {format_bytes(round(plan.exchanged_bytes))} "
            "per share with the first, which alone has optimizer states: the others need less memory than predicted, "
            "and the time is that of equally fast replicas; "
        )
    elif groups > 1:
        one = "replicas" if plan.summing(0) == 1 else f"groups of {plan.summing(0)} replicas"
        once += (
            f"each of {groups} {one} takes {plural(plan.local_steps, 'step')} by itself, then they exchange weights, "
            f"{_fragments(plan)}{format_bytes(round(plan.exchanged_bytes))} per step; "
        )
    if plan.updates.delays:
        once += "updates are delayed by one step, with two versions of the weights; "
    if not plan.task.trains:
        once += (
            f"{plan.task} runs forwards only: a batch takes {format_seconds(plan.prediction.step_seconds)}, "
            f"{plan.rows_per_second:.4g} rows/s; "
        )
    rows = plural(plan.global_batch, "row")
    return (
        f"{rows} run as {plural(micro, 'micro-batch')} of up to {plural(plan.microbatch, 'row')} "
        f"through {plural(len(plan.stages), 'stage')} under {plan.schedule}{each}; {once}"
        f"{plan.prediction.bubble:.0%} of the time is bubble."
    )


def _fragments(plan: Plan) -> str:
    parts = f"one of {plan.fragments} fragments at a time, " if plan.fragments > 1 else ""
    beside = plan.fragment_delay and f"during {plural(plan.fragment_delay, 'more step')}, "
    return parts + (beside or "")


def _explain_pipeline_rank(plan: Plan, pipeline_rank: int) -> str:
    """Return a sentence on the memory and time of one pipeline rank, largest terms first."""
    stages = [plan.stages[stage] for stage in plan.stages_of(pipeline_rank)]
    rank = plan.prediction.ranks[plan.ranks(pipeline_rank)[0]]
    chosen = [directive for stage in stages for directive in stage.directives]
    doing = ", ".join(f"{d} {chosen.count(d)}" for d in Directive if d in chosen)
    blocks = " and ".join(_blocks(stage) for stage in stages)
    saved = f"activations: {doing}; " if plan.task.trains else ""
    text = (
        f"stage {pipeline_rank}: {blocks} on {plural(stages[0].replicas, 'replica')}; {saved}peak "
        f"{format_bytes(rank.peak_bytes)} of {format_bytes(rank.budget_bytes)}"
    )
    if plan.prediction.stages:
        terms = plan.prediction.stages[pipeline_rank]
        memory = [f"{name} {format_bytes(size)}" for name, size in _largest(terms.memory)]
        seconds = [f"{name} {format_seconds(value)}" for name, value in _largest(terms.seconds)]
        text += f" ({', '.join(memory)}); {', '.join(seconds)}"
    if rank.offloaded_bytes:
        moved = format_bytes(rank.offloaded_bytes)
        text += (
            f"; {moved} to {plan.tier} per step, {format_seconds(rank.stall_seconds)} not hidden"
        )
    offloaded = {
        "the optimizer states": max(stage.optimizer_offload for stage in stages),
        "the parameters": max(stage.parameter_offload for stage in stages),
    }
    text += "".join(
        f"; {share:.0%} of {what} in {plan.tier}" for what, share in offloaded.items() if share
    )
    return text + (
        "; optimizer states are sharded over replicas." if stages[0].shard_optimizer else "."
    )


def _blocks(stage: StagePlan) -> str:
    one = stage.stop - stage.start == 1
    return f"block {stage.start}" if one else f"blocks {stage.start}–{stage.stop - 1}"


def explain_choice(plan: Plan) -> list[str]:
    """Return sentences that compare the plan with the runners-up, and a bound on how much faster any plan can be."""
    compared = f"{plan.candidates} candidates compared by predicted step time"
    if plan.exact:
        lines = [f"{compared}; none that was left out can be faster by the planner's formula."]
    elif plan.bound_seconds > 0:
        least = (
            f"by the planner's formula none can take less than {format_seconds(plan.bound_seconds)}"
        )
        lines = [
            f"{compared}, not all there are; {least}, so this one is at most {plan.gap:.1%} above the best."
        ]
    else:
        lines = [f"{compared}, not all there are: a better plan may exist."]
    return lines + [
        f"not chosen: {o.description}: {format_seconds(o.step_seconds)}, {o.reason}."
        for o in plan.alternatives
    ]


def _largest(terms: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and values of the three largest terms that are not zero."""
    return sorted(((k, v) for k, v in terms.items() if v), key=lambda term: -term[1])[:3]
