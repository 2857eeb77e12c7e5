"""Plan a model: for this machine, where its blocks are measured, or for machines of the catalog."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from parallax.common.units import plural
from parallax.machine.accelerators import own_device, set_ranks_devices
from parallax.machine.host import keep_freed_memory, use_one_arena
from parallax.machine.local import (
    ClusterConfig,
    DeviceChoice,
    choose_devices,
    chosen_kind,
    offload_tier,
    processes_of,
)
from parallax.machine.probes import TOGETHER
from parallax.model.describe import Chain
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.cache import profile_path, store_cached
from parallax.model.profiling.measure import measure
from parallax.model.profiling.offloads import Offloader
from parallax.nodes.places import Nodes
from parallax.nodes.together import broadcast_result
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.cluster import Cluster
from parallax.plan.config import AUTO, PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.contradiction import Question, check_question
from parallax.plan.search.search import search
from parallax.plan.simulation.predict import Forecast
from parallax.plan.task import PlanTask
from parallax.plan.updates import Updates
from parallax.run.nodes import (
    join_nodes,
    measured_cluster,
    node_devices,
    share_devices,
    swap_folder,
)
from parallax.run.stepping import stepped_by
from parallax.runtime.batch import Rows
from parallax.runtime.health.row_check import RowCheck
from parallax.runtime.optim.config import Group, OptimizerConfig, as_config
from parallax.runtime.optim.groups import GroupSummary, ParameterGroups
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.scaling import LossScale
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.swap.config import SwapConfig
from parallax.swap.offload_benchmark import OffloadBenchmarks

MEASURED_ROWS = 4

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Planned:
    """A plan, the profile and the cluster from which it was made, and ``forecast``, the prediction of a step under the
    plan. ``remarks``: messages for the user about the devices. ``groups``: the optimizer's parameter groups; empty if
    the plan was made without the model."""

    plan: Plan
    forecast: Forecast
    profile: ModelProfile
    cluster: Cluster
    remarks: tuple[str, ...] = ()
    groups: tuple[GroupSummary, ...] = ()


def settle(choice: DeviceChoice) -> None:
    """Configure this process like a rank on the devices ``choice``: the number of threads, and the allocator."""
    torch.set_num_threads(choice.threads)
    if choice.kind == "cpu":
        use_one_arena()  # before another thread gets an arena


def settled(cluster: ClusterConfig, plan: PlanConfig) -> DeviceChoice:
    """Configure this process like a rank (:func:`settle`), and return the devices that ``plan`` may use."""
    count = _given(cluster, plan)
    return _settled(cluster, min(count, plan.ranks or count))


def _settled(cluster: ClusterConfig, count: int) -> DeviceChoice:
    choice = choose_devices(dataclasses.replace(cluster, devices=count))
    settle(choice)
    if choice.kind == "cpu":
        keep_freed_memory()  # a rank does this after it has created its weights
    return choice


def _given(cluster: ClusterConfig, plan: PlanConfig) -> int:
    """Return the number of devices that a plan may use. For this machine, the result is at least the number that
    ``plan`` requests."""
    alone = [each for each in (plan.stages, plan.replicas) if isinstance(each, int)]
    return choose_devices(cluster, at_least=plan.ranks or max([1, *alone])).count


def plan_model(
    chain: Chain,
    loss: Loss,
    batch: Rows,
    *,
    cluster: ClusterConfig | None = None,
    plan: PlanConfig | None = None,
    swap: SwapConfig | None = None,
    precision: PrecisionConfig | None = None,
    optimizer: OptimizerConfig | Callable[[Sequence[Group]], Optimizer] | None = None,
    averages: bool = False,
    replicas: ReplicasConfig | None = None,
    updates: str = Updates.SYNCHRONOUS,
    skips: bool = False,
    microbatch: int | str = "auto",
    gather_loss: bool = False,
    name: str = "model",
    profile: ModelProfile | None = None,
    present: Cluster | None = None,
    scratch: Path | None = None,
    task: PlanTask = PlanTask.TRAINING,
    progress: Callable[[str], None] = lambda text: None,
) -> Planned:
    """Measure ``chain`` on this machine and return the best plan of ``task`` for global batches like ``batch``.
    ``optimizer``: settings, or a function from parameter groups to an optimizer. ``skips``: steps may be skipped.
    ``profile`` replaces the measurement. ``present``: the cluster of several nodes. Raises :class:`InfeasiblePlan`.
    """
    cluster, swap, plan = cluster or ClusterConfig(), swap or SwapConfig(), plan or PlanConfig()
    batch = RowCheck(chain.dtype).of(batch, "the batch to plan with")
    plan.check_task(task)
    requested: dict[str, Any] = {"microbatch": microbatch}
    requested["gather_loss"] = gather_loss and task is not PlanTask.INFERENCE
    used = check_model(
        chain, len(batch), cluster=cluster, plan=plan, swap=swap, present=present, **requested
    )
    choice = _settled(cluster, used if present is None else len(present.nodes[0].devices))
    profile = profile or measure_model(
        chain,
        loss,
        batch,
        choice,
        precision=precision,
        swap=swap,
        gather_loss=gather_loss,
        shared_norms=replicas is not None and replicas.shares_norms,
        name=name,
        scratch=scratch,
        progress=progress,
    )
    progress(f"measuring the machine{_measured_once(choice)}")
    found = present or measured_cluster(cluster, choice, swap, scratch)
    progress(f"searching plans for {plural(len(found.devices), 'device')}")
    profile, groups = _stepped(profile, chain, optimizer, choice, task, averages, replicas, updates)
    profile = _overlapping(profile, precision, skips)
    requested |= {"global_batch": len(batch), "swap": swap.offloads, "task": task}
    requested |= {"updates": Updates(updates), "spare": not (present or _started(cluster))}
    best, forecast = search(profile, found, plan, progress=progress, **requested)
    unused = _unused(len(found.devices) if present else _given(cluster, plan), used)
    remarks = filter(None, (unused, _processes(choice, best, present)))
    return Planned(best, forecast, profile, found.first(best.world_size), tuple(remarks), groups)


def _measured_once(choice: DeviceChoice) -> str:
    """Return what takes longest in measuring the machine for the first time, as text for the progress."""
    if choice.kind != "cpu" or choice.count == 1:
        return ""
    return f": up to {min(choice.count, TOGETHER)} processes at once; it is kept for later plans"


def _processes(choice: DeviceChoice, plan: Plan, present: Cluster | None) -> str:
    """Return a message about the processes of this machine; empty if all nodes of the run are ``present``."""
    if present:
        return ""
    return processes_of(dataclasses.replace(choice, count=plan.world_size))


def _stepped(
    profile: ModelProfile,
    chain: Chain,
    optimizer: OptimizerConfig | Callable[[Sequence[Group]], Optimizer] | None,
    choice: DeviceChoice,
    task: PlanTask,
    averages: bool,
    replicas: ReplicasConfig | None,
    updates: str,
) -> tuple[ModelProfile, tuple[GroupSummary, ...]]:
    """Return the profile with the costs of the optimizer, and the optimizer's parameter groups. If the task does not
    train, return the profile unchanged and no groups."""
    if not task.trains:
        return profile, ()
    config = AdamWConfig() if optimizer is None else as_config(optimizer)
    groups = tuple(ParameterGroups.of(config, chain.model).summaries())
    device = own_device(choice.kind)
    delays = Updates(updates).delays
    costs = stepped_by(
        profile, config, chain, device, averages=averages, replicas=replicas, delays=delays
    )
    return costs, groups


def _overlapping(
    profile: ModelProfile, precision: PrecisionConfig | None, skips: bool
) -> ModelProfile:
    """Return ``profile`` without overlapping steps if a step may be skipped."""
    drains = LossScale(precision or PrecisionConfig(), int(skips)).skips
    return dataclasses.replace(profile, continues=profile.continues and not drains)


def as_planned(cluster: ClusterConfig, requested: PlanConfig, plan: Plan) -> ClusterConfig:
    """Return the settings of ``cluster`` for the ranks of ``plan``, with as many devices as the plan uses. On a CPU,
    each device keeps the number of threads with which it was measured, even if the plan uses fewer devices."""
    counted = dataclasses.replace(cluster, devices=plan.world_size)
    if requested.ranks is not None or cluster.threads != AUTO or chosen_kind(cluster) != "cpu":
        return counted
    most = min(_given(cluster, requested), plan.global_batch * plan.stages[-1].stop)
    if plan.world_size >= most:
        return counted
    threads = choose_devices(dataclasses.replace(cluster, devices=most)).threads
    return dataclasses.replace(counted, threads=threads)


def _unused(given: int, used: int) -> str:
    """Return a message about devices that the plan does not use: it uses ``used`` of ``given`` devices. Empty if it
    uses all."""
    if used == given:
        return ""
    return (
        f"using {used} of {given} devices: plan.stages, plan.replicas and the rows of a batch leave no work for the "
        "others"
    )


def _started(cluster: ClusterConfig) -> bool:
    """Whether the ranks are already running, so that the plan must use one device for each."""
    return dist.is_initialized() and cluster.devices == dist.get_world_size()


def check_model(
    chain: Chain,
    rows: int,
    *,
    cluster: ClusterConfig,
    plan: PlanConfig,
    swap: SwapConfig,
    microbatch: int | str,
    gather_loss: bool,
    present: Cluster | None = None,
) -> int:
    """Return how many devices a plan of ``chain`` for ``rows`` rows may use.

    If no plan can satisfy the settings, :class:`InfeasiblePlan` or :class:`ConfigError` is raised before anything is
    measured; see :func:`~parallax.plan.search.contradiction.check_question`. ``present``: the cluster of the run's
    nodes, if there are several.
    """
    return check_question(
        Question(
            config=plan,
            blocks=len(chain.blocks),
            devices=len(present.devices) if present else _given(cluster, plan),
            rows=rows,
            microbatch=microbatch,
            swap=swap.offloads,
            fixed=present is not None or _started(cluster),
            model=type(chain.model).__name__,
            gather_loss=gather_loss,
        )
    )


def measure_model(
    chain: Chain,
    loss: Loss,
    batch: Rows,
    choice: DeviceChoice,
    *,
    precision: PrecisionConfig | None = None,
    swap: SwapConfig | None = None,
    gather_loss: bool = False,
    shared_norms: bool = False,
    name: str = "model",
    scratch: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Return the profile of ``chain``, measured on the devices of ``choice`` with the first rows of ``batch``.
    ``gather_loss``: measure the loss once over all rows of the batch. ``shared_norms``: replicas share the statistics
    of BatchNorms. ``scratch``: the folder of swap files."""
    conditions = _conditions(
        chain, batch, choice, precision, swap, gather_loss, shared_norms, scratch
    )
    found = measure(chain, loss, **conditions, name=name, progress=progress)
    return dataclasses.replace(found, reads=tuple(block.reads for block in chain.blocks))


def remember_profile(
    profile: ModelProfile,
    chain: Chain,
    loss: Loss,
    batch: Rows,
    choice: DeviceChoice,
    *,
    precision: PrecisionConfig,
    swap: SwapConfig,
    gather_loss: bool,
    shared_norms: bool,
) -> Path:
    """Cache ``profile``, so that :func:`measure_model` with the same other arguments returns it. Return the cache
    file."""
    path = profile_path(
        chain,
        loss,
        **_conditions(chain, batch, choice, precision, swap, gather_loss, shared_norms),
    )
    store_cached(profile, path)
    return path


def _conditions(
    chain: Chain,
    batch: Rows,
    choice: DeviceChoice,
    precision: PrecisionConfig | None,
    swap: SwapConfig | None,
    gather_loss: bool,
    shared_norms: bool,
    scratch: Path | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of :func:`~parallax.model.profiling.measure.measure`, except model and loss."""

    def sample(count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return chain.arguments(batch.inputs(0, count)), batch.targets(0, count)

    return {
        "sample": sample,
        "rows": tuple(1 << n for n in range(len(batch).bit_length())),
        "device": own_device(choice.kind),
        "precision": precision or PrecisionConfig(),
        "minimum_bytes": (swap or SwapConfig()).smallest_bytes(choice.kind),
        "offloader": _offloader(choice, swap or SwapConfig(), scratch),
        "gathered": len(batch) if gather_loss else 0,
        "shared_norms": shared_norms,
    }


def _offloader(choice: DeviceChoice, swap: SwapConfig, scratch: Path | None) -> Offloader | None:
    """Return an offloader like that of a run's ranks; None if the settings have no offload tier."""
    tier = offload_tier(choice, swap.tier)
    return OffloadBenchmarks(tier.name, swap, swap_folder(swap, scratch)) if tier.exists else None


def plan_catalog(
    profile: ModelProfile,
    cluster: CatalogClusterConfig,
    *,
    dtype: str,
    plan: PlanConfig,
    swap: SwapConfig,
    global_batch: int,
    microbatch: int | str = "auto",
    gather_loss: bool = False,
    updates: str = Updates.SYNCHRONOUS,
    task: PlanTask = PlanTask.TRAINING,
    progress: Callable[[str], None] = lambda text: None,
) -> Planned:
    """Return the best plan of ``task`` for the machines of ``cluster``, which are not present, and its prediction.

    ``profile``: the costs of the model on these machines. ``dtype``: the number format of the model's matrix products.
    The other arguments are those of :func:`~parallax.plan.search.search.search`. The search includes schedules and
    tiers that the runtime does not implement. Raises :class:`InfeasiblePlan` if no plan fits.
    """
    gathers = gather_loss and task is not PlanTask.INFERENCE
    parameters = sum(block.parameters for block in profile.blocks)
    weight_bytes = (
        round(sum(block.parameter_bytes for block in profile.blocks) / max(1, parameters)) or 4
    )
    given = cluster.build(
        dtype=dtype, tier=swap.tier, weight_bytes=weight_bytes, trains=task.trains
    )
    used = check_question(
        Question(
            config=plan,
            blocks=len(profile.blocks),
            devices=len(given.devices),
            rows=global_batch,
            microbatch=microbatch,
            swap=swap.offloads,
            gather_loss=gathers,
        )
    )
    plan.check_task(task)
    found = given.first(used)
    progress(f"searching plans for {plural(used, 'device')}")
    best, forecast = search(
        profile,
        found,
        plan,
        global_batch=global_batch,
        microbatch=microbatch,
        swap=swap.offloads,
        gather_loss=gathers,
        updates=Updates(updates),
        spare=True,
        task=task,
        progress=progress,
    )
    unused = _unused(len(given.devices), used)
    return Planned(best, forecast, profile, found, (unused,) if unused else ())


def plan_together(
    chain: Chain, loss: Loss, batch: Rows, *, cluster: ClusterConfig | None = None, **options: Any
) -> Plan:
    """Return the same plan on all ranks of an initialised torch.distributed, on one node or several. Rank 0 plans for
    as many devices as there are ranks, and sends the plan or its error to the others. Options are those of
    :func:`plan_model`."""
    sized = dataclasses.replace(cluster or ClusterConfig(), devices=dist.get_world_size())
    nodes = Nodes.gather()
    share_devices(sized, nodes, select=False)
    try:
        return _plan_together(chain, loss, batch, sized, nodes, options)
    finally:
        set_ranks_devices(None)  # later plans may be for this process alone


def _plan_together(
    chain: Chain,
    loss: Loss,
    batch: Rows,
    sized: ClusterConfig,
    nodes: Nodes,
    options: dict[str, Any],
) -> Plan:
    if nodes.several:
        swap, scratch = options.get("swap") or SwapConfig(), options.get("scratch")
        options["present"] = join_nodes(sized, swap, nodes, scratch).cluster

    def planned() -> dict[str, Any]:
        return plan_model(chain, loss, batch, cluster=sized, **options).plan.to_dict()

    found = Plan.from_dict(broadcast_result(planned))
    settle(node_devices(sized, nodes))
    return found
