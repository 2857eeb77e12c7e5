"""Launch a prepared run on this machine, and plan again if its steps differ from the prediction.

A process that has measured on an accelerator occupies device memory until it ends: the device context and cached
blocks. The ranks need this memory, and the launcher runs as long as its ranks. So the launcher replaces itself by a new
process with the same process id::

    parallax train ── measures, plans, prepares ── execv: parallax train --run-dir ── ranks
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from parallax import config as configuration
from parallax.common.signals import exit_on_request, handling_requests
from parallax.common.terminal import safe_console
from parallax.common.trust import class_paths
from parallax.common.units import format_seconds
from parallax.config import RunConfig
from parallax.errors import ConfigError, ParallaxError
from parallax.machine.accelerators import accelerator_named, unset_variables
from parallax.machine.host import coalescing_variables, huge_page_variables
from parallax.machine.local import choose_devices
from parallax.plan.config import AUTO
from parallax.plan.plan import Plan
from parallax.report import plan_table
from parallax.run.feedback import correct, drop_contradicted
from parallax.run.job import local_cluster, plan_run
from parallax.run.preflight import check_start
from parallax.run.prepare import PreparedRun, write_run
from parallax.run.processes.agent import Agent, SignalForwarder
from parallax.run.processes.rank import ON_DRIFT
from parallax.run.resume import STORED, load_stored, read_stored
from parallax.run.sweep.points import summary_of
from parallax.run.working import working
from parallax.train.loop import OnDrift
from parallax.train.stop import Drifted

# Freed memory that a plan expects malloc to keep, from which ranks are started with coalescing_variables. Below it,
# time counts more: steps of a classifier with three layers of 16 took 233 to 264 µs instead of 225.
_FREED_BYTES = 16 * 2**20
_AFRESH = "PARALLAX_AFRESH"  # set in a process that has replaced one that planned


def launch(run: PreparedRun, *, own_process: bool) -> int:
    """Train on this machine and return the exit code. With ``plan.replan=auto``, a run whose steps differ from the
    prediction stops once at a checkpoint, and resumes under a plan made with its measurements. ``own_process``: this
    process belongs to the command, so it may be replaced by a new one."""
    first = OnDrift.STOP if run.config.plan.replan == AUTO else OnDrift.IGNORE
    on_drift = OnDrift(os.environ.pop(ON_DRIFT, first))
    check_start(run)
    forwarder = SignalForwarder()
    with handling_requests(forwarder, signal.SIGQUIT):
        code = _start(run, on_drift, forwarder, own_process)
        stops = code == 0 and on_drift is OnDrift.STOP
        if stops and (reason := _drifted(run.directory)):
            again = _replanned(run, reason, safe_console())
            code = _start(again, OnDrift.NOTE, forwarder, own_process)
        if code == 0 and (message := _contradicted(run)):
            safe_console().print(message, highlight=False, markup=False, soft_wrap=True)
    if forwarder.first and own_process:
        exit_on_request(code)  # later requests are handled as well
    return code


def _drifted(directory: Path) -> str:
    """Return why the run stopped for a new plan; empty if it did not."""
    summary = _summary(directory)
    return str(summary["drift"]) if summary.get("ended") == Drifted.name else ""


def _contradicted(run: PreparedRun) -> str:
    """Return a message if the run's measured steps contradict the cached profile of its model, else ""."""
    return drop_contradicted(run.directory, run.config, _summary(run.directory))


def _slow_ranks(directory: Path) -> dict[int, float]:
    """Return, for each rank that the run found to be slow, how many times as long as expected it computes."""
    found = _summary(directory).get("stragglers", [])
    return {int(each["rank"]): float(each["factor"]) for each in found}


def _summary(directory: Path) -> dict[str, Any]:
    """Return the summary of a run; empty if it wrote none."""
    try:
        return summary_of(directory) or {}
    except ConfigError:
        return {}


def _replanned(run: PreparedRun, reason: str, console: Console) -> PreparedRun:
    """Return the run with the plan that is best according to its own measurements; if planning fails, return the run
    with the old plan. ``reason``: why the run is planned again, for the user."""
    console.print(f"planning again: {reason}", highlight=False, soft_wrap=True)
    try:
        with working(console, "planning again") as work:
            work.limit(run.config.trainer)
            found = correct(run.directory, run.config, run.plan, work, _slow_ranks(run.directory))
            planned = plan_run(
                run.config,
                run.directory / "swap",
                work,
                profile=found.profile,
                present=found.cluster if found.slow else None,
                verified=True,
            )
    except ParallaxError as error:
        console.print(f"continuing with the old plan: {error}", highlight=False, markup=False)
        return run
    times = (
        found.first_seconds,
        found.measured_seconds,
        found.second_seconds,
        planned.plan.prediction.step_seconds,
    )
    first, measured, second, new = map(format_seconds, times)
    console.print(
        f"the old plan was predicted at {first} per step and measured at {measured}; with the measurements it needs "
        f"{second}, the new one {new}",
        highlight=False,
    )
    for rank, factor in found.slow.items():
        held = [_blocks_of(plan, rank) for plan in (run.plan, planned.plan)]
        console.print(
            f"rank {rank} counts as {factor:.1f} times slower: it had {held[0]}, and now has {held[1]}",
            highlight=False,
        )
    write_run(
        run.directory, load_stored(run.directory / STORED, read_stored(run.directory)), planned
    )
    console.print(plan_table(planned.plan, planned.profile))
    return PreparedRun(run.directory, run.config, planned.plan)


def _blocks_of(plan: Plan, rank: int) -> str:
    """Return the blocks that ``rank`` holds, as text."""
    if rank >= plan.world_size:
        return "nothing"
    stage = plan.stages[plan.coordinate(rank).pipeline_rank]
    among = f" with {stage.replicas - 1} other(s)" if stage.replicas > 1 else ""
    return f"blocks {stage.start}..{stage.stop - 1}{among}"


def _start(
    run: PreparedRun, on_drift: OnDrift, forwarder: SignalForwarder, own_process: bool
) -> int:
    """Start the ranks of the run, wait for them, and return the exit code.

    ``on_drift``: the reaction to steps slower or faster than predicted. ``forwarder`` handles requests to end.
    ``own_process``: this process may be replaced by a new one.
    """
    kind = choose_devices(local_cluster(run.config)).kind
    if uses_accelerator(kind) and own_process:
        _start_afresh(run, on_drift)
    environment = rank_environment(run) | {ON_DRIFT: on_drift.value}
    config, directory = run.config, run.directory
    agent = Agent(
        config.name,
        directory,
        run.plan.world_size,
        config.trainer.max_restarts,
        config.checkpoint.folder(directory, config.name),
        libraries=_libraries(config) if kind == "cpu" else (),
    )
    return agent.start(environment, forwarder)


def _libraries(config: RunConfig) -> tuple[str, ...]:
    """Return the modules that the fork server should import for the ranks. Modules are returned only for ranks on CPUs,
    because a module may query devices at import, and a process that has queried devices cannot be forked."""
    curves = ("tensorboard.summary",) if "tensorboard" in config.logger.to else ()
    return (*curves, *config.model.libraries)


def uses_accelerator(kind: str) -> bool:
    """Return whether this process has used an accelerator of the given kind, such as ``cuda``, and would keep memory
    there that its ranks need.

    The result is False in a process that :func:`start_afresh` has started, even if this process has queried a device's
    properties, which torch counts as a use of the device.
    """
    afresh = os.environ.pop(_AFRESH, "")
    return not afresh and kind != "cpu" and accelerator_named(kind).in_use


def start_afresh(command: Sequence[str], environment: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by ``python -m parallax COMMAND``, which has not used an accelerator. ``environment``: added
    variables."""
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [sys.executable, "-m", "parallax", *command]
    added = {**(environment or {}), _AFRESH: "1"}
    os.execve(sys.executable, arguments, {**os.environ, **added})


def _start_afresh(run: PreparedRun, on_drift: OnDrift) -> NoReturn:
    """Replace this process by one that launches the run without a device context."""
    named = [f"{key}={path}" for key, path in class_paths(configuration.dump(run.config)).items()]
    command = ["train", "--run-dir", str(run.directory), *named]
    start_afresh(command, {ON_DRIFT: on_drift.value})


def rank_environment(run: PreparedRun) -> dict[str, str]:
    """Return environment variables for every rank. Variables that the user has set are left out."""
    choice = choose_devices(local_cluster(run.config))
    threads = {} if os.environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(choice.threads)}
    if choice.kind != "cpu":
        return threads | unset_variables(choice.kind)
    prediction = run.plan.prediction
    if any(rank.returns_freed for rank in prediction.ranks):
        return threads | huge_page_variables()
    if any(stage.memory.get("allocator", 0) >= _FREED_BYTES for stage in prediction.stages):
        return threads | coalescing_variables()
    return threads
