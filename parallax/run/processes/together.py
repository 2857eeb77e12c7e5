"""Prepare a run on all of its ranks, on one or several nodes, under the user's own torchrun.

Rank 0 composes the settings and plans for the cluster of all nodes. The other ranks read the files in the run
directory. If nodes do not share that directory, the files are sent to each node, which has its own directory::

    node a    runs/NAME   config, plan, profile ──sent──>   node b    runs/NAME   the same
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parallax import config as configuration
from parallax.common.lock import locked
from parallax.common.terminal import safe_console
from parallax.common.units import format_bytes
from parallax.config import RunConfig
from parallax.errors import DataError, InfeasiblePlan, PlanError, UnfitHostError, printable
from parallax.nodes.fitness import Elastic, from_hosts
from parallax.nodes.places import Nodes, find_directory_groups
from parallax.nodes.together import all_gather_result, broadcast_result
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.run.job import check_devices, local_cluster, profile_run
from parallax.run.nodes import Joined, join_nodes, share_devices
from parallax.run.prepare import RUNS, PreparedRun, prepare, run_files, write_files
from parallax.run.processes.elastic import patience_seconds, present_settings
from parallax.run.resume import Trusts, settings
from parallax.train.data.source import Source

_COMPARED_ROWS = 4  # rows for which kinds of devices are compared
_CLEARLY_LESS = 0.9  # fraction of another host's memory; free memory differs a little between hosts


def prepare_together(
    overrides: Sequence[str], nodes: Nodes, held: contextlib.ExitStack
) -> PreparedRun:
    """Return the prepared run. Rank 0 composes the settings and plans. The other ranks read the files that rank 0
    writes, or raise rank 0's error. Directories stay locked until ``held`` is closed."""
    sized = present_settings(overrides, nodes)
    config = configuration.load(
        broadcast_result(lambda: configuration.dump(_checked(settings(sized, RUNS).config)))
    )
    from_hosts(lambda: check_devices(config), nodes)
    share_devices(local_cluster(config), nodes, select=True)
    joined = _join(config, nodes) if nodes.several else None
    present = None if joined is None else joined.cluster
    patience = patience_seconds()
    try:
        directory = broadcast_result(
            lambda: prepare(sized, safe_console(), held, present, patience).directory
        )
    except InfeasiblePlan as error:
        if joined is not None and Elastic.gather(nodes).least:
            _name_smallest_host(error, joined, nodes)
        raise
    return _distributed(directory, nodes, held)


def read_together(
    directory: Path, nodes: Nodes, held: contextlib.ExitStack, trusts: Trusts
) -> PreparedRun:
    """Return a run that is already prepared. Under the user's own torchrun, rank 0 locks the directory for all ranks,
    and checks that the user trusts the class paths in it. Parallax's launcher has already done both."""
    if "PARALLAX_RENDEZVOUS" in os.environ:
        return PreparedRun.read(directory)
    if not nodes.several:
        run = PreparedRun.read(directory, trusts)
        broadcast_result(lambda: held.enter_context(locked(directory)))
        return run

    def check() -> None:
        PreparedRun.read(directory, trusts)
        held.enter_context(locked(directory))

    broadcast_result(check)
    return _distributed(directory, nodes, held)


def compare(run: PreparedRun) -> None:
    """Raise :class:`PlanError` unless every rank has read the same settings and the same plan. All ranks must call this
    function."""
    mine = run.fingerprints(), configuration.dump(run.config), run.plan.to_dict()
    found = all_gather_result(lambda: mine)
    for rank, (fingerprints, text, plan) in enumerate(found):
        if fingerprints != found[0][0]:
            first = configuration.load(found[0][1])
            lines = configuration.differences(first, configuration.load(text))
            lines += Plan.from_dict(found[0][2]).diff(Plan.from_dict(plan))
            raise PlanError(f"rank {rank} read a different run from rank 0: {'; '.join(lines[:5])}")


def compare_rows(source: Source, nodes: Nodes) -> None:
    """Raise :class:`DataError` unless the sources of all ranks have the same ``fingerprint`` of their rows. Sources
    without a fingerprint are not compared. All ranks must call this function. Each rank opens the source on its own
    host, where files may differ."""
    mine = str(getattr(source, "fingerprint", ""))
    for rank, found in enumerate(prints := all_gather_result(lambda: mine)):
        if found != prints[0]:
            which = " and ".join(printable(str(each))[:16] for each in (found, prints[0]))
            raise DataError(
                f"rank {rank} on {printable(nodes.name(rank))} reads different rows from rank 0 on "
                f"{printable(nodes.name(0))} ({which}): put the same files there, or name a folder that both "
                "see (data.*)"
            )


def _distributed(directory: Path, nodes: Nodes, held: contextlib.ExitStack) -> PreparedRun:
    """Return the run that ``directory`` holds. Nodes that do not see this directory create their own copy."""
    groups = find_directory_groups(directory, nodes)
    files = broadcast_result(lambda: {} if groups.shared else run_files(directory))

    def write() -> None:
        if groups.leads and not groups.sees_rank_0:
            held.enter_context(locked(directory, patience_seconds()))
            write_files(directory, files)

    all_gather_result(write)
    return PreparedRun.read(directory)


def _name_smallest_host(error: InfeasiblePlan, joined: Joined, nodes: Nodes) -> None:
    """Raise :class:`UnfitHostError` if one host has clearly less memory per device than another. The planner assumes
    the memory of the smallest host for every device, so that host may be why no plan fits."""
    least = min(joined.device_bytes)
    if least < _CLEARLY_LESS * max(joined.device_bytes):
        rank = nodes.first(joined.device_bytes.index(least))
        most = format_bytes(max(joined.device_bytes))
        text = (
            f"{printable(nodes.name(rank))} has {format_bytes(least)} for each device, and other hosts up to {most}; "
            f"with it no plan fits: {error}"
        )
        raise UnfitHostError(text, {nodes.hosts[rank]: text}) from error


def _join(config: RunConfig, nodes: Nodes) -> Joined:
    """Return the cluster of all nodes, with device speeds relative to rank 0's. If nodes have different kinds of
    devices, the first node of each kind measures how long a few rows take."""
    joined = join_nodes(local_cluster(config), config.swap, nodes, RUNS)
    kinds = joined.kinds
    if len(set(kinds)) == 1:
        return joined
    measures = nodes.leads and kinds.index(kinds[nodes.mine]) == nodes.mine
    seconds = all_gather_result(lambda: _step_seconds(config, nodes) if measures else 0.0)
    return joined.at_speeds([seconds[nodes.first(kinds.index(kind))] for kind in kinds])


def _checked(config: RunConfig) -> RunConfig:
    """Return ``config``, after checking that it sets the number of steps and that the requested devices are
    available."""
    config.trainer.check_steps()
    local_cluster(config)
    return config


def _step_seconds(config: RunConfig, nodes: Nodes) -> float:
    """Return the seconds that a device of this node needs for forward and backward of a few rows."""
    cluster = replace(local_cluster(config), devices=nodes.local_count)
    return _computing(profile_run(replace(config, cluster=cluster), lambda text: None))


def _computing(profile: ModelProfile) -> float:
    return sum(
        block.forward_seconds.at(_COMPARED_ROWS) + block.backward_seconds.at(_COMPARED_ROWS)
        for block in profile.blocks
    )
