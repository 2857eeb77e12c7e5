"""Check that each host has the memory and disk space that a prepared run needs, according to its plan, profile and
checkpoints."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import parallax
from parallax.common.units import format_bytes
from parallax.errors import PlanError, UnfitHostError, printable
from parallax.machine.local import chosen_kind
from parallax.machine.preflight.needs import FolderNeeds, HostNeeds, RankNeeds
from parallax.machine.preflight.start import check_host
from parallax.nodes.fitness import Elastic, from_hosts
from parallax.nodes.places import Nodes
from parallax.nodes.together import all_gather_result
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.tier import tier_named
from parallax.run.job import local_cluster
from parallax.run.nodes import swap_folder
from parallax.run.prepare import PreparedRun
from parallax.runtime.checkpoint import PART_BYTES, list_checkpoints, step_of


def check_start(run: PreparedRun) -> None:
    """Raise :class:`PreflightError` if this host has less memory or disk than all ranks of ``run`` need."""
    check_host(host_needs(run, range(run.plan.world_size)))


def check_start_together(run: PreparedRun, nodes: Nodes) -> None:
    """Check that each node has enough memory and disk for its own ranks. Every rank of torch's default group must call
    this function. Raises :class:`~parallax.errors.UnfitHostError` if some hosts have too little and others do not."""
    mine = [rank for rank, host in enumerate(nodes.hosts) if host == nodes.hosts[nodes.rank]]
    where = f"node {printable(nodes.name(nodes.rank))}"

    def check() -> None:
        if mine[0] == nodes.rank:
            check_host(dataclasses.replace(host_needs(run, mine), process_bytes=0), where)

    from_hosts(check, nodes)


def check_versions(nodes: Nodes) -> None:
    """Raise :class:`~parallax.errors.UnfitHostError` if ranks have different versions of Python, torch, numpy or
    Parallax, on which a run's numbers and files depend. Every rank of torch's default group must call this function."""
    first = Elastic.gather(nodes).measure(nodes)
    found = all_gather_result(versions)
    why: dict[str, str] = {}
    for rank, theirs in enumerate(found):
        names = [name for name in theirs if theirs[name] != found[first].get(name)]
        if names:
            other, mine = (
                ", ".join(f"{name} {each.get(name)}" for name in names)
                for each in (theirs, found[first])
            )
            text = (
                f"rank {rank} on {printable(nodes.name(rank))} has {other}, and rank {first} on "
                f"{printable(nodes.name(first))} has {mine}: install the same versions on all hosts"
            )
            why.setdefault(nodes.hosts[rank], text)
    if why:
        raise UnfitHostError(next(iter(why.values())), why)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries in this process, by name."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "parallax": parallax.__version__,
        "torch": torch.__version__.partition("+")[0],  # the suffix names the build, such as +cu126
        "numpy": np.__version__,
    }


def host_needs(run: PreparedRun, ranks: Sequence[int]) -> HostNeeds:
    """Return the memory and disk space that ``ranks`` need. All of them are on one host."""
    plan = run.plan
    on_cpu = chosen_kind(local_cluster(run.config)) == "cpu"
    tier = tier_named(plan.tier)
    own = [
        RankNeeds(
            memory_bytes=(plan.prediction.ranks[rank].peak_bytes if on_cpu else 0)
            + (offloaded_bytes(plan, rank) if tier.in_ram else 0),
            reserved=on_cpu,
        )
        for rank in ranks
    ]
    folders = list(_checkpoints(run, ranks))
    if not tier.in_ram and tier.exists:
        folders += _swap_files(run, ranks)
    return HostNeeds(
        ranks=tuple(own),
        world=plan.world_size,
        accelerators=0 if on_cpu else len(ranks),
        folders=tuple(folders),
    )


def offloaded_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes in the offload tier that are predicted for ``rank``."""
    stages = [plan.stages[index] for index in plan.stages_of(plan.coordinate(rank).pipeline_rank)]
    given = sum(each.tier_bytes + each.state_bytes + each.streamed_bytes for each in stages)
    return min(given, plan.prediction.ranks[rank].tier_peak_bytes)


def _swap_files(run: PreparedRun, ranks: Sequence[int]) -> list[FolderNeeds]:
    each = [offloaded_bytes(run.plan, rank) for rank in ranks]
    if not sum(each):
        return []
    return [
        FolderNeeds(
            folder=swap_folder(run.config.swap, run.directory / "swap"),
            size=sum(each),
            largest_bytes=max(each),
            what=f"the swap files of {len(each)} rank(s)",
            remedy="set swap.directory to a larger disk, or cluster.disk to what may be used",
        )
    ]


def _checkpoints(run: PreparedRun, ranks: Sequence[int]) -> list[FolderNeeds]:
    """Return the disk space that checkpoints will need: the bytes of all checkpoints to keep and of one that is being
    written, less the bytes of existing files. If there are several hosts, only the files of ``ranks`` count. Return an
    empty list if the size of a checkpoint is unknown."""
    folder = run.config.checkpoint.folder(run.directory, run.config.name)
    profile, there = _profile(run.directory), list_checkpoints(folder)
    pipeline_ranks = {run.plan.coordinate(rank).pipeline_rank for rank in ranks}
    whole = checkpoint_bytes(profile) if profile is not None else 0
    one = whole * len(pipeline_ranks) // run.plan.pipeline_ranks
    kept = run.config.checkpoint.keep or len(there) + 1
    kept += run.config.checkpoint.best
    most = min(kept + 1, len(there) + _saves_to_come(run, there))
    # Files of an interrupted save are removed before the next save begins.
    size = most * one - sum(_folder_bytes(path) for path in folder.glob("*step-*"))
    if size <= 0:
        return []
    return [
        FolderNeeds(
            folder=folder,
            size=size,
            largest_bytes=min(one // len(pipeline_ranks), PART_BYTES),
            what=f"checkpoints ({most} at once, of {format_bytes(one)} each, less what is there)",
            remedy="keep fewer (checkpoint.keep), or set checkpoint.directory to a larger disk",
        )
    ]


def _saves_to_come(run: PreparedRun, there: Sequence[Path]) -> int:
    """Return the number of checkpoints that this start of the run will write: the periodic ones and one at the end.
    ``there``: the existing checkpoints; the run resumes after the step of the last one."""
    trainer = run.config.trainer
    done = (step_of(there[-1]) or 0) if there and trainer.resume == "auto" else 0
    steps, every = trainer.steps, trainer.checkpoint_every
    if done >= steps:
        return 0
    regular = steps // every - done // every if every else 0
    return regular + (not every or steps % every != 0)


def checkpoint_bytes(profile: ModelProfile) -> int:
    """Return the bytes of one checkpoint: trained parameters, optimizer states and master weights. Frozen parameters
    are not counted, because checkpoints may leave them out."""
    trained = profile.unique_trained_bytes(range(len(profile.blocks)))
    return round((1 + profile.optimizer_bytes + profile.master_bytes) * trained)


def _profile(directory: Path) -> ModelProfile | None:
    try:
        return Inputs.load(inputs_path(directory / "plan.yaml")).profile
    except PlanError:  # the ranks do not need the file
        return None


def _folder_bytes(folder: Path) -> int:
    found = 0
    for path in folder.glob("*"):
        try:
            found += os.lstat(path).st_size
        except OSError:
            continue
    return found
