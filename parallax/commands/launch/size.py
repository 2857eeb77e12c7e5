"""The size of a job: nodes, and ranks on each."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from parallax.config import RunConfig
from parallax.errors import ConfigError
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.run.job import plan_run


@dataclass(frozen=True)
class JobSize:
    """``nodes`` with the same number of ranks and devices each."""

    nodes: int
    processes: int
    gpus: int


def job_size(parsed: argparse.Namespace, config: RunConfig) -> JobSize:
    """Return the size on the command line, otherwise the size of the plan for a cluster of the catalog."""
    nodes, gpus, processes = (
        count_of(f"--{key.replace('_', '-')}", getattr(parsed, key))
        for key in ("nodes", "gpus_per_node", "processes_per_node")
    )
    if nodes or gpus or processes:
        ranks = processes or gpus
        if not ranks:
            raise ConfigError("--nodes: how many ranks on each? add --gpus-per-node N")
        return JobSize(nodes or 1, ranks, gpus or 0)
    if not isinstance(config.cluster, CatalogClusterConfig):
        raise ConfigError(
            "parallax launch: how many ranks? add --nodes N --gpus-per-node N, or cluster=NAME of a cluster to plan for"
        )
    return _planned(config)


def _planned(config: RunConfig) -> JobSize:
    planned = plan_run(config, Path.cwd(), lambda text: None)
    ranks, sizes = planned.plan.world_size, {len(node.devices) for node in planned.cluster.nodes}
    nodes = -(-ranks // max(sizes))
    if len(sizes) > 1 or ranks % nodes:
        raise ConfigError(
            f"the plan has {ranks} ranks on nodes of {', '.join(map(str, sorted(sizes)))} devices: a job has the same "
            "number on each; say --nodes and --gpus-per-node, or change cluster.devices"
        )
    each = ranks // nodes
    on_gpus = not any(device.kind.startswith("cpu") for device in planned.cluster.devices)
    return JobSize(nodes, each, each if on_gpus else 0)


def count_of(option: str, value: int | None) -> int | None:
    """Return the number given to ``option``; raise :class:`ConfigError` below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{option}={value}: accepted are whole numbers from 1")
    return value
