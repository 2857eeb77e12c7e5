"""``parallax launch``: a run, or all points of a sweep, as a job of a batch system."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.commands.options import RUNS, add_overrides
from parallax.commands.plan.what_if import alternative
from parallax.common.terminal import safe_console
from parallax.config import RunConfig
from parallax.errors import ConfigError, printable
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.tier import AUTO
from parallax.run.job import plan_run
from parallax.run.prepare import free_name
from parallax.run.resume import settings
from parallax.run.slurm.job import LOG, SlurmJob
from parallax.run.working import working

EXAMPLES = """examples:
  parallax launch --slurm --nodes 4 --gpus-per-node 8 --time 12:00:00 name=deeper model.layers=96 trainer.steps=1000
  parallax launch --slurm --dry cluster=dgx_h100 cluster.nodes=4 trainer.steps=1000   as many nodes as the plan needs
  parallax launch --slurm --nodes 1 --gpus-per-node 1 --cpus-per-node 8 --array optimizer.lr=1e-4,3e-4 \\
      seed=1,2 name=rates trainer.steps=1000                                    four runs: rates-0 to rates-3
  parallax launch --slurm --nodes 2 --processes-per-node 4 --sbatch=--partition=cpu trainer.steps=1000
"""


@dataclass(frozen=True)
class JobSize:
    """The size of a job: the number of nodes, and the numbers of ranks and devices of each node."""

    nodes: int
    processes: int
    gpus: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--slurm", action="store_true", help="as a job of Slurm, by sbatch")
    parser.add_argument("--dry", action="store_true", help="print the batch script, submit nothing")
    counts = {
        "--nodes": "nodes (default: as many as a plan for cluster=NAME needs)",
        "--gpus-per-node": "devices of each, with a rank for each",
        "--processes-per-node": "ranks of each node (default: its devices)",
        "--cpus-per-node": "cores of each node (default: whole nodes)",
    }
    for option, text in counts.items():
        parser.add_argument(option, type=int, metavar="N", help=text)
    parser.add_argument("--time", default="", help="time limit, in sbatch's format")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, such as --sbatch=--partition=gpu; may be repeated",
    )
    parser.add_argument(
        "--array",
        nargs="+",
        default=[],
        metavar="key=a,b",
        help="one run for each combination of these values, as a job array",
    )
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Submit or print the job; return the exit code. The settings of every run are checked before the job is queued."""
    if not parsed.slurm:
        raise ConfigError("parallax launch: for which batch system? accepted is --slurm")
    console = safe_console(stderr=parsed.dry)
    axes = [alternative(text, "--array") for text in parsed.array]
    overrides = [
        *parsed.overrides,
        *(f"{k}={v}" for axis in axes if len(axis) == 1 for k, v in axis),
    ]
    points = _points([axis for axis in axes if len(axis) > 1])
    config = settings(overrides, RUNS).config
    for index, point in enumerate(points):
        named = [f"name={config.name}-{index}"] if config.name != AUTO else []
        _check(settings([*_unnamed(overrides), *point, *named], RUNS).config)
    _check(config)
    with working(console, "planning"):
        size = job_size(parsed, config)
    job = SlurmJob(
        name=free_name() if config.name == AUTO else config.name,
        settings=_trained(overrides, config),
        nodes=size.nodes,
        processes=size.processes,
        gpus=size.gpus,
        cpus=count_of("--cpus-per-node", parsed.cpus_per_node) or 0,
        time=parsed.time,
        grace_seconds=config.trainer.grace_seconds,
        options=parsed.sbatch,
        points=points,
    )
    if parsed.dry:
        print(job.script(Path.cwd(), RUNS), end="")
        return 0
    number = job.submit(Path.cwd(), RUNS)
    what = f"{len(points)} runs" if points else "one run"
    console.print(
        f"job {number}: {what} on {job.nodes} node(s) with {job.processes} rank(s) each, from "
        f"{RUNS / job.runs[0]}, with its output in {RUNS / job.runs[0] / LOG}",
        f"`scancel --signal=USR1 {number}` saves and queues it again, `scancel {number}` ends it",
        highlight=False,
        markup=False,
        sep="\n",
        soft_wrap=True,
    )
    return 0


def job_size(parsed: argparse.Namespace, config: RunConfig) -> JobSize:
    """Return the size given on the command line. If none is given, return the size that the plan for the catalog
    cluster needs."""
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
    """Return the number given to ``option``; raise :class:`ConfigError` if it is below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{option}={value}: accepted are whole numbers from 1")
    return value


def _points(axes: Sequence[Sequence[tuple[str, str]]]) -> list[list[str]]:
    """Return the settings of each task of a job array: one task for each combination of one (key, value) pair from each
    of ``axes``. Return an empty list if there are no axes, so that the job is not an array. Raises :class:`ConfigError`
    for a key such as ``cluster.nodes``, because all tasks use the same number of nodes and devices."""
    for key, _ in (pair for axis in axes for pair in axis[:1]):
        if key in ("cluster", "cluster.nodes", "cluster.devices", "name"):
            raise ConfigError(
                f"--array {key}: the tasks of an array have the same nodes, and names of their own; start them one by "
                "one"
            )
    return (
        [[f"{key}={value}" for key, value in pairs] for pairs in itertools.product(*axes)]
        if axes
        else []
    )


def _check(config: RunConfig) -> None:
    config.trainer.check_steps()
    if config.trainer.resume == "never":
        raise ConfigError(
            "trainer.resume=never: a job that is queued again resumes from its checkpoint; leave that out, and choose "
            "a new name"
        )


def _unnamed(overrides: Sequence[str]) -> list[str]:
    return [word for word in overrides if _key(word) != "name"]


def _trained(overrides: Sequence[str], config: RunConfig) -> list[str]:
    """Return the overrides for the ranks of the job.

    They are ``overrides`` without the run's name. If ``config`` has a catalog cluster, the settings of the cluster are
    replaced by its memory budget alone, because ranks find their own devices.
    """
    others = _unnamed(overrides)
    if not isinstance(config.cluster, CatalogClusterConfig):
        return others
    kept = [word for word in others if _key(word).split(".")[0] != "cluster"]
    return [*kept, f"cluster.device_memory={config.cluster.device_memory}"]


def _key(word: str) -> str:
    return printable(word.lstrip("+~").partition("=")[0])
