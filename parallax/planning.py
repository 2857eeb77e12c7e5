"""From a resolved configuration to a plan for this machine: describe, measure, search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from parallax.config import RunConfig
from parallax.errors import ConfigError, DescribeError
from parallax.machine import (
    DeviceChoice,
    build_cluster,
    choose_devices,
    existing_parent,
    measure_probes,
    return_freed_memory,
)
from parallax.model.describe import Chain, as_tuple, build_on_meta, describe
from parallax.model.measure import measure
from parallax.model.registry import CustomModelConfig
from parallax.plan.cluster import Cluster
from parallax.plan.plan import Directive, Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search import search
from parallax.plan.simulate import Simulation
from parallax.train.data import Source, TextDataConfig, build_source
from parallax.units import format_bytes

BYTES = 256  # values that a byte can have: what a model of text must know
MEASURED_ROWS = 4
DEFAULT_SEQUENCE = 256

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Planned:
    """A plan with everything it was made from."""

    plan: Plan
    simulation: Simulation
    profile: ModelProfile
    cluster: Cluster


def build_chain(config: RunConfig) -> Chain:
    """The model of ``config`` as a chain of blocks."""
    names = config.model.blocks if isinstance(config.model, CustomModelConfig) else ()
    return describe(config.model.build, seed=config.seed, dtype=config.precision.parameter_dtype, blocks=names)


def build_loss(config: RunConfig) -> Loss:
    """The model's own ``loss(outputs, targets)``, or cross-entropy over the last dimension of its outputs."""
    own = getattr(build_on_meta(config.model.build), "loss", None)
    return own if callable(own) else cross_entropy


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy: class scores in the last dimension of ``outputs``, classes in ``targets``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sequence_length(config: RunConfig) -> int:
    """Bytes in a row of text."""
    if isinstance(config.model, CustomModelConfig):
        return int(config.model.kwargs.get("sequence", DEFAULT_SEQUENCE))
    return config.model.sequence


def open_source(config: RunConfig, *, quiet: bool = True) -> Source:
    """The rows of ``config``."""
    vocabulary = getattr(config.model, "vocabulary", BYTES)
    if isinstance(config.data, TextDataConfig) and vocabulary < BYTES:
        raise ConfigError(f"model.vocabulary={vocabulary}: text needs {BYTES}, one for each value of a byte")
    return build_source(config.data, sequence_length(config), config.seed, quiet=quiet)


def settle(choice: DeviceChoice) -> None:
    """Make this process compute, and hold memory, as the ranks of a run do."""
    torch.set_num_threads(choice.threads)
    if choice.exact:
        return_freed_memory()


def make_plan(config: RunConfig, scratch: Path, progress: Callable[[str], None]) -> Planned:
    """Measure the model of ``config`` on this machine and search its plan. ``scratch``: where swap files would go."""
    chain, source = build_chain(config), open_source(config, quiet=False)
    choice = choose_devices(config.cluster)
    settle(choice)
    rows = source.validation(0, MEASURED_ROWS)

    def sample(count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return as_tuple(rows.inputs(0, count)), rows.targets(0, count)

    try:
        profile = measure(
            chain,
            build_loss(config),
            sample,
            (MEASURED_ROWS // 2, MEASURED_ROWS),
            device=torch.device(choice.kind),
            precision=config.precision,
            minimum_bytes=config.swap.minimum_bytes,
            name=config.model.name,
            allocator="exact" if choice.exact else "default",
            progress=progress,
        )
    except NotImplementedError as error:
        raise DescribeError(f"the model cannot be measured: {error}") from error
    folder = scratch if config.swap.directory == "auto" else Path(config.swap.directory)
    probes = measure_probes(existing_parent(folder))
    cluster = build_cluster(config.cluster, tier=config.swap.tier, probes=probes)
    progress(f"searching plans for {len(cluster.devices)} device(s)")
    plan, simulation = search(
        profile,
        cluster,
        config.plan,
        global_batch=config.trainer.global_batch,
        microbatch=config.trainer.microbatch,
        swap=config.swap.tier != "none",
    )
    return Planned(plan, simulation, profile, cluster)


def plan_table(plan: Plan, profile: ModelProfile) -> Table:
    """The plan for people: a row per stage, the prediction in the caption."""
    prediction = plan.prediction
    table = Table(
        title=f"{plan.model}: {sum(block.parameters for block in profile.blocks):,} parameters in {plan.blocks} blocks",
        caption=(
            f"{plan.schedule}, {plan.micro_batches(plan.global_batch)} micro-batches of {plan.microbatch} row(s); "
            f"predicted: {prediction.step_seconds:.3f} s per step, bubble {prediction.bubble:.0%}"
        ),
    )
    for heading in ("stage", "blocks", "replicas", "activations", "peak of budget", f"to {plan.tier} per step"):
        table.add_column(heading, justify="left" if heading == "activations" else "right")
    for index, stage in enumerate(plan.stages):
        ranks = [prediction.ranks[rank] for rank in plan.ranks(index)]
        counts = [f"{d} {stage.directives.count(d)}" for d in Directive if d in stage.directives]
        first, last = profile.blocks[stage.start].name, profile.blocks[stage.stop - 1].name
        fullest = max(ranks, key=lambda rank: rank.peak_bytes / rank.budget_bytes)
        table.add_row(
            str(index),
            first if stage.stop - stage.start == 1 else f"{first} … {last}",
            str(stage.replicas),
            ", ".join(counts),
            f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.budget_bytes)}",
            format_bytes(sum(rank.offloaded_bytes for rank in ranks)),
        )
    return table
