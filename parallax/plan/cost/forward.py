"""The peak device bytes of each rank for a plan that runs forwards only, as in evaluation and inference.

A forward without a graph saves nothing: a block's tensors are freed when it ends, except its outputs. Parameters have
no gradients, no optimizer states and no full-precision copies, as if all of them were frozen. Beside them::

    workspace     the largest block: its input, its output, the tensors that it would save in training, and its
                  temporary ones; or one parameter that is read from a file
    boundary      the stage's input; messages in transit to its peers, and from them
    activations   the outputs of the last stage, of all rows of the batch
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
from parallax.plan.cost.stage import StageLoad, load_planned, passing_bytes, rank_memory
from parallax.plan.edge import Edge
from parallax.plan.lists import evaluation_actions
from parallax.plan.plan import (
    Directive,
    Plan,
    Prediction,
    RankPrediction,
    StagePlan,
    StagePrediction,
)
from parallax.plan.profile import NOTHING, ModelProfile
from parallax.plan.schedule import Kind

# Outputs that wait on the device for their copies to the host, where messages are staged through it.
_STAGED = 4
_IN_A_FORWARD = ("input", "output", "forward_work", "moved", "stays")


def forward_plan(profile: ModelProfile, cluster: Cluster, plan: Plan) -> Plan:
    """Return ``plan`` for forwards only: without saved activations, optimizer states and times. Its prediction is the
    peak memory of a forward over ``plan.global_batch`` rows. Raises :class:`InfeasiblePlan` if a rank does not fit its
    device in ``cluster``."""
    frozen = _frozen(profile)
    kept = [_without_training(stage) for stage in plan.stages]
    stages = with_offload_bytes(frozen, kept, plan.pipeline_ranks)
    plan = replace(plan, stages=stages, gather_loss=False, alternatives=())
    ranks: dict[int, RankPrediction] = {}
    fullest = []
    for pipeline_rank in range(plan.pipeline_ranks):
        found = []
        for rank in plan.ranks(pipeline_rank):
            device = cluster.devices[rank]
            loads = _loads(frozen, plan, pipeline_rank, device)
            terms, returns_freed = with_kept(_memory(profile, plan, loads, device), device)
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
    """Raise :class:`InfeasiblePlan` if a rank does not fit its device, or if its parameters do not fit the offload
    tier."""
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
    frozen: ModelProfile, plan: Plan, pipeline_rank: int, device: Device
) -> dict[int, StageLoad]:
    return {
        stage: load_planned(
            frozen,
            plan.stages[stage],
            _rows(plan, stage),
            device=device,
            split=False,
            beside=beside(plan, stage),
        )
        for stage in plan.stages_of(pipeline_rank)
    }


def _memory(
    profile: ModelProfile, plan: Plan, loads: Mapping[int, StageLoad], device: Device
) -> dict[str, int]:
    """Return the device bytes of a rank by term, from the loads of its stages with frozen parameters."""
    total = rank_memory([(load, 0, 0) for load in loads.values()])
    found = [_passing(profile, plan, stage, load, device) for stage, load in loads.items()]
    for term in found[0]:
        sizes = [passing[term] for passing in found]
        total[term] = max(sizes) if term == "workspace" else sum(sizes)  # one block runs at a time
    total["allocator"] = math.ceil(device.gap_share * passing_bytes(total))
    return total


def _passing(
    profile: ModelProfile, plan: Plan, stage: int, load: StageLoad, device: Device
) -> dict[str, int]:
    """Return the device bytes of those terms of a stage that a forward without backward changes."""
    planned, rows = plan.stages[stage], _rows(plan, stage)
    costs = profile.blocks[planned.start : planned.stop]
    work = max(sum(getattr(cost, name).at(rows) for name in _IN_A_FORWARD) for cost in costs)
    if device.kind == "cpu":  # elsewhere a parameter is read into the host's memory
        work = max(work, *(max(cost.largest_parameter_bytes, cost.frozen_bytes) for cost in costs))
    leaving = plan.leaving(stage)
    count = plan.micro_batches(plan.global_batch)
    kept = count * costs[-1].output.at(rows) if leaving is None else 0.0
    given = costs[0].input.at(rows) if stage == 0 else 0.0
    waiting = _most_waiting(plan, leaving) if leaving is not None else 0
    return {
        "activations": math.ceil(kept),
        "boundary": load.boundary_bytes + math.ceil(given + waiting * load.output_bytes),
        "workspace": math.ceil(work),
        "communicators": 0,  # replicas exchange nothing
        "allocator": 0,
    }


def _most_waiting(plan: Plan, edge: Edge) -> int:
    """Return the largest number of messages on ``edge`` that wait for their receiver. On a local edge they wait until
    the receiving stage runs. On other edges the channel limits how many messages the sender may be ahead."""
    if not plan.is_local(edge):
        return max(plan.messages_ahead(edge.sender), _STAGED)
    now = most = 0
    count = plan.micro_batches(plan.global_batch)
    for action in evaluation_actions(plan, plan.pipeline_rank(edge.sender), count):
        if action.kind is Kind.FORWARD:
            now += (action.stage == edge.sender) - (action.stage == edge.receiver)
            most = max(most, now)
    return most


def _frozen(profile: ModelProfile) -> ModelProfile:
    """Return the profile of the same model with all parameters frozen, and without a loss."""
    blocks = tuple(
        replace(
            cost,
            frozen_bytes=cost.parameter_bytes,
            by_loss=NOTHING,
            gathered_bytes=0,
            gathered_work=0,
            gathered_seconds=0.0,
        )
        for cost in profile.blocks
    )
    return replace(profile, blocks=blocks, ties=(), frozen_ties=profile.shared, gathered_rows=0)


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


def _rows(plan: Plan, stage: int) -> int:
    """Return the largest number of rows of a micro-batch on one rank of ``stage``."""
    return -(-plan.microbatch // plan.stages[stage].replicas)
