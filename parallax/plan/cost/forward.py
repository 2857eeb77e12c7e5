"""Predict the costs of evaluation and inference, which run forwards only: seconds, and peak device bytes of each rank.

:func:`task_costs` turns the profile of a model's training into a profile of its forwards. The search and the simulator
then use this profile. A forward without an autograd graph saves nothing: a block's tensors are freed when the block
ends, except its outputs. Parameters have no gradients, optimizer states or full-precision copies, as if all were
frozen. The device memory also includes::

    workspace     of the block that needs most: its input, its output, the tensors that it would save in training, and
                  its temporary tensors. A loss adds what it would save in training, and copies of the outputs for
                  metrics. If one parameter that is read from a file is larger than all this, its bytes count instead.
    boundary      the stage's input; messages in transit to and from its peers; outputs gathered for one loss
    activations   in an inference, the outputs of the last stage, of all rows of the batch
    staging       the blocks whose offloaded parameters are on the device at one time
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from parallax.common.units import format_bytes
from parallax.errors import InfeasiblePlan
from parallax.plan.cluster import Cluster, Device
from parallax.plan.cost.communicators import beside
from parallax.plan.cost.offload_tier import with_offload_bytes
from parallax.plan.cost.peak import with_kept
from parallax.plan.cost.stage import StageLoad, load_planned, passing_bytes, rank_gaps, rank_memory
from parallax.plan.edge import Edge
from parallax.plan.lists import evaluation_actions
from parallax.plan.plan import (
    Directive,
    Pipeline,
    Plan,
    Prediction,
    RankPrediction,
    StagePlan,
    StagePrediction,
)
from parallax.plan.profile import NOTHING, BlockCost, ModelProfile
from parallax.plan.schedule import Kind
from parallax.plan.task import PlanTask
from parallax.plan.updates import Updates

# Outputs that wait on the device for their copies to the host, where messages are staged through it.
_STAGED = 4
# Metrics copy a micro-batch's outputs: without ignored targets, as probabilities, as class numbers of 8 bytes each
# (twice the bytes of fp32), and once more while they compute.
_METRIC_COPIES = 5


def task_costs(profile: ModelProfile, task: PlanTask) -> ModelProfile:
    """Return the costs of a step of ``task``.

    For training this is ``profile`` itself, otherwise a profile of the model's forwards with all parameters frozen.
    """
    if task.trains:
        return profile
    *blocks, last = [_forward_cost(cost) for cost in profile.blocks]
    if task is PlanTask.INFERENCE:
        last = replace(last, by_loss=last.output, gathered_bytes=0, gathered_work=0)
        last = replace(last, gathered_seconds=0.0)
    else:
        loss = profile.blocks[-1].by_loss.plus(last.output.scaled(_METRIC_COPIES))
        last = replace(last, forward_work=last.forward_work.plus(loss))
    return replace(
        profile,
        blocks=(*blocks, last),
        ties=(),
        frozen_ties=profile.shared,
        optimizer_bytes=0.0,
        optimizer_seconds=0.0,
        gradient_bytes=0.0,
        master_bytes=0.0,
        gathered_rows=0 if task is PlanTask.INFERENCE else profile.gathered_rows,
    )


def _forward_cost(cost: BlockCost) -> BlockCost:
    work = cost.forward_work.plus(cost.input).plus(cost.moved).plus(cost.stays)
    return replace(
        cost,
        frozen_bytes=cost.parameter_bytes,
        largest_bytes=max(cost.largest_parameter_bytes, cost.frozen_bytes),
        backward_seconds=NOTHING,
        weight_seconds=NOTHING,
        split_seconds=NOTHING,
        offload_seconds=NOTHING,
        skipped_seconds=NOTHING,
        received_seconds=NOTHING,
        norms=0,
        norm_seconds=NOTHING,
        moved=NOTHING,
        shared=NOTHING,
        stays=NOTHING,
        by_loss=NOTHING,
        forward_work=work,
        backward_work=NOTHING,
        deferred=NOTHING,
        split_work=NOTHING,
    )


def forward_plan(profile: ModelProfile, cluster: Cluster, plan: Plan) -> Plan:
    """Return ``plan`` reduced to forwards, without saved activations, optimizer states and times.

    The prediction is the peak memory of a forward over ``plan.global_batch`` rows. Raises :class:`InfeasiblePlan` if a
    rank does not fit its device in ``cluster``.
    """
    costs = task_costs(profile, PlanTask.INFERENCE)
    kept = [_without_training(stage) for stage in plan.stages]
    stages = with_offload_bytes(costs, kept, plan.pipeline_ranks)
    plan = replace(
        plan,
        task=PlanTask.INFERENCE,
        stages=stages,
        gather_loss=False,
        local_steps=0,
        local_groups=0,
        fragments=1,
        fragment_delay=0,
        staleness=0,
        updates=Updates.SYNCHRONOUS,
        alternatives=(),
    )
    ranks: dict[int, RankPrediction] = {}
    fullest = []
    for pipeline_rank in range(plan.pipeline_ranks):
        found = []
        for rank in plan.ranks(pipeline_rank):
            device = cluster.devices[rank]
            loads = _loads(costs, plan, pipeline_rank, device)
            terms = forward_memory(costs, plan, loads, device)
            terms, returns_freed = with_kept(terms, device, terms["workspace"])
            found.append(terms)
            ranks[rank] = RankPrediction(
                peak_bytes=sum(terms.values()),
                budget_bytes=device.memory_bytes,
                tier_peak_bytes=sum(load.host_state_bytes for load in loads.values()),
                offloaded_bytes=0,
                stall_seconds=0.0,
                returns_freed=returns_freed,
            )
            _check(rank, ranks[rank], plan, device)
        most = max(found, key=lambda terms: sum(terms.values()))
        fullest.append(StagePrediction(memory=most, seconds={}))
    prediction = Prediction(
        step_seconds=0.0,
        bubble=0.0,
        ranks=tuple(ranks[rank] for rank in range(plan.world_size)),
        stages=tuple(fullest),
    )
    return replace(plan, prediction=prediction)


def _check(rank: int, found: RankPrediction, plan: Plan, device: Device) -> None:
    """Raise :class:`InfeasiblePlan` if a rank does not fit its device, or its parameters do not fit the
    offload tier."""
    for needed, given, where, remedy in (
        (found.peak_bytes, device.memory_bytes, "device memory", "plan.parameters=host"),
        (found.tier_peak_bytes, device.tier_bytes, f"tier {device.tier}", "plan.parameters=device"),
    ):
        if needed > given:
            raise InfeasiblePlan(
                f"rank {rank}: a forward of {plan.microbatch} row(s) at a time needs {format_bytes(needed)} of "
                f"{format_bytes(given)} of {where}: use fewer rows (trainer.microbatch), more devices "
                f"(cluster.devices), or {remedy}"
            )


def _loads(
    costs: ModelProfile, plan: Plan, pipeline_rank: int, device: Device
) -> dict[int, StageLoad]:
    return {
        stage: load_planned(
            costs,
            plan.stages[stage],
            _rows(plan, stage),
            device=device,
            split=False,
            beside=beside(plan, stage),
            visits=plan.visits(stage),
            boundaries_held=plan.boundaries_held,
        )
        for stage in plan.stages_of(pipeline_rank)
    }


def forward_memory(
    costs: ModelProfile, plan: Pipeline, loads: Mapping[int, StageLoad], device: Device
) -> dict[str, int]:
    """Return the device bytes of a rank that runs forwards only, by term.

    ``costs`` are the costs of the forwards (:func:`task_costs`), from which the ``loads`` of the stages were computed.
    """
    total = rank_memory([(load, 0, 0) for load in loads.values()])
    found = [_passing(costs, plan, stage, load, device) for stage, load in loads.items()]
    total["boundary"] += sum(passing["boundary"] for passing in found)
    total["activations"] = sum(passing["activations"] for passing in found)
    total["workspace"] = max(passing["workspace"] for passing in found)  # one block runs at a time
    total["communicators"] = 0  # replicas exchange nothing
    total["loss"] = 0  # kept outputs are among the activations
    total["allocator"] = rank_gaps(loads.values()).lost(passing_bytes(total))
    return total


def _passing(
    costs: ModelProfile, plan: Pipeline, stage: int, load: StageLoad, device: Device
) -> dict[str, int]:
    """Return the memory terms, in bytes, in which a forward of a stage differs from training.

    ``boundary`` has the model's inputs and the messages that wait for their receiver. The messages in transit are not
    included, because training counts them as well.
    """
    planned, rows = plan.stages[stage], _rows(plan, stage)
    blocks = costs.blocks[planned.start : planned.stop]
    work = max(cost.forward_work.at(rows) + cost.output.at(rows) for cost in blocks)
    work = max(work, *(cost.gathered_work for cost in blocks))
    if device.kind == "cpu":  # elsewhere a parameter is read into the host's memory
        work = max(work, *(cost.largest_bytes for cost in blocks))
    leaving = plan.leaving(stage)
    count = plan.micro_batches(plan.global_batch)
    kept = count * blocks[-1].by_loss.at(rows) if leaving is None else 0.0
    given = blocks[0].input.at(rows) if stage == 0 else 0.0
    waiting = 0 if leaving is None or plan.boundaries_held else _most_waiting(plan, leaving)
    return {
        "activations": math.ceil(kept),
        "boundary": math.ceil(given + waiting * load.output_bytes),
        "workspace": math.ceil(work),
    }


def _most_waiting(plan: Pipeline, edge: Edge) -> int:
    """Return the largest number of messages on ``edge`` that wait for their receiver.

    On an edge inside one pipeline rank, messages wait until the receiving stage runs. On other edges, the channel
    limits how many messages the sender may be ahead.
    """
    if not plan.is_local(edge):
        return max(plan.messages_ahead(edge.sender), _STAGED)
    now = most = 0
    count = plan.micro_batches(plan.global_batch)
    for action in evaluation_actions(plan, plan.pipeline_rank(edge.sender), count):
        if action.kind is Kind.FORWARD:
            now += (action.stage == edge.sender) - (action.stage == edge.receiver)
            most = max(most, now)
    return most


def _without_training(stage: StagePlan) -> StagePlan:
    return StagePlan(
        start=stage.start,
        stop=stage.stop,
        replicas=stage.replicas,
        directives=(Directive.KEEP,) * len(stage.directives),
        parameter_offload=stage.parameter_offload,
        bucket_bytes=stage.bucket_bytes,
        inputs_ahead=stage.inputs_ahead,
    )


def _rows(plan: Pipeline, stage: int) -> int:
    """Return the largest number of rows of a micro-batch on one rank of ``stage``."""
    return -(-plan.microbatch // plan.stages[stage].replicas)
