"""Run one rank of a training, in a process that torchrun or Parallax's launcher has started."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from parallax.common.signals import exit_code, stopped_by
from parallax.common.terminal import safe_console
from parallax.config import RunConfig
from parallax.errors import ConfigError, PlanError, printable
from parallax.machine.accelerators import device_sensors, limit_device_memory, select_device
from parallax.model.describe import Chain
from parallax.nodes.fitness import from_hosts
from parallax.nodes.places import Nodes
from parallax.nodes.together import all_gather_result
from parallax.plan.config import AUTO
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.profile import ModelProfile
from parallax.report import placement, save_placement, summary_table, transports_text
from parallax.run.job import (
    build_chain,
    build_loss,
    check_devices,
    local_cluster,
    open_source,
    tokens_per_row,
)
from parallax.run.nodes import node_devices, share_devices
from parallax.run.planning import Loss, settle
from parallax.run.preflight import check_start_together, check_versions
from parallax.run.prepare import PreparedRun
from parallax.run.processes.elastic import leaving_out_unfit
from parallax.run.processes.process import as_rank
from parallax.run.processes.together import compare, compare_rows, prepare_together, read_together
from parallax.run.resume import Trusts
from parallax.runtime.engine import Engine
from parallax.runtime.failure.exit_report import (
    EXIT_REPORT,
    failure_of,
    follows,
    send_report,
)
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.runtime.failure.watch import Watch
from parallax.train.callbacks import build_callbacks
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.source import Source, seed_generators
from parallax.train.loop import OnDrift, train
from parallax.train.monitor import load_loggers
from parallax.train.status import RankStatusFile

ON_DRIFT = "PARALLAX_ON_DRIFT"  # the launcher's setting for its ranks
_COMPILING = 2  # steps that may compile: training, and another after an evaluation
# No action lasts longer than its step, and predictions may be off by this factor.
_STEPS_IN_ONE_ACTION = 2


def run_rank(overrides: Sequence[str], directory: Path | None, trusts: Trusts) -> NoReturn:
    """Train as one rank and end the process. If no ``directory`` is prepared, rank 0 prepares one for all ranks.
    ``trusts`` checks the class paths in a directory that another user may have prepared."""

    def work(watch: Watch, held: contextlib.ExitStack) -> int:
        with watch.phase("planning"):
            nodes = Nodes.gather()
            with leaving_out_unfit(overrides, nodes, watch):
                check_versions(nodes)
                if directory is None:
                    run = prepare_together(overrides, nodes, held)
                else:
                    run = read_together(directory, nodes, held, trusts)
                    from_hosts(lambda: check_devices(run.config), nodes)
                    share_devices(local_cluster(run.config), nodes, select=True)
                watch.limit(*limits(run), run.directory)
                _check_world(run)
                compare(run)
                check_start_together(run, nodes)
        return _train(run, nodes, watch)

    as_rank(work)


def _check_world(run: PreparedRun) -> None:
    """Raise :class:`PlanError` if the number of ranks differs from the plan's."""
    started, planned = dist.get_world_size(), run.plan.world_size
    if started != planned:
        raise PlanError(
            f"{started} rank(s) were started, and the plan in {run.directory} is for {planned}: start {planned} "
            f"(torchrun --nproc-per-node={planned} on one host), or plan for {started} with name={run.config.name} "
            f"cluster.devices={started} and without --run-dir"
        )


def _opened_source(run: PreparedRun, nodes: Nodes) -> Source:
    """Return the run's data source after the ranks have compared their rows. Rank 0 prints remarks on the data."""
    source = open_source(run.config)
    compare_rows(source, nodes)
    if isinstance(source, IndexedSource):
        source.start()
    if dist.get_rank() == 0:
        for remark in getattr(source, "remarks", ()):
            print(remark, flush=True)
    return source


def _train(run: PreparedRun, nodes: Nodes, watch: Watch) -> int:
    """Build the engine, train, and report how the run has ended; return the exit code."""
    choice = node_devices(local_cluster(run.config), nodes)
    settle(choice)
    device = select_device(choice.kind, int(os.environ.get("LOCAL_RANK", "0")))
    limit_device_memory(device, run.plan.allocator_bytes(dist.get_rank()))
    profile = _profile_of(run)
    status = _status_file(run, nodes, device, profile)
    watch.beat_for(status)
    with watch.phase("loading data"):
        source = _opened_source(run, nodes)
    if dist.get_rank() == 0:
        load_loggers(run.config.logger)
    with watch.phase("building the callbacks"):
        callbacks = build_callbacks(run.config.callbacks)
    with watch.phase("building the model"):
        chain, loss = build_chain(run.config), build_loss(run.config)
    with watch.phase("building the engine"):
        engine = _build_engine(run, chain, loss, device)
    _place(run, nodes, engine.transports)
    watch.attend(engine, run.plan, patient_steps=_COMPILING if run.config.compile else 0)
    watch.serve()
    # Building has drawn random numbers, different ones on each rank.
    seed_generators(run.config.seed)
    try:
        summary = train(
            engine,
            source,
            run.config.trainer,
            run.config.logger,
            run.directory,
            tokens_per_row=tokens_per_row(run.config),
            on_drift=_on_drift(run.config),
            checkpoints=run.config.checkpoint.folder(run.directory, run.config.name),
            checkpoint=run.config.checkpoint,
            debug=run.config.debug,
            watchdog=watch,
            parameters=asdict(run.config),
            callbacks=callbacks,
            status=status,
            utilization=None if profile is None else profile.utilization,
        )
        status.end(str(summary["ended"]))
    except Exception as caught:
        error = _in_run_directory(caught, run.directory)
        if not follows(error):
            # The others need not wait for this rank's cleanup.
            watch.claim(failure_of(error, watch))
        if error is caught:
            raise
        raise error from None
    finally:
        with watch.phase("closing the engine"):
            engine.close()
            if isinstance(source, IndexedSource):
                source.close()
    return _end(run, nodes, summary)


def _end(run: PreparedRun, nodes: Nodes, summary: Mapping[str, Any]) -> int:
    """Report how the run has ended; return the exit code."""
    stopped, saved = int(summary["stopped"]), summary["steps"] > 0
    # After success, torchrun on each host waits for torchrun on the others, also for one that a signal has ended.
    code = exit_code(stopped, saved=saved and not nodes.several) if stopped else 0
    if dist.get_rank() == 0:
        _report_end(run, summary, code)
    if stopped:
        dist.barrier()  # a rank that ends with an error code ends the others
    return code


def _profile_of(run: PreparedRun) -> ModelProfile | None:
    """Return the profile from which the plan was made; None if it is not stored beside the plan."""
    path = inputs_path(run.directory / "plan.yaml")
    return Inputs.load(path).profile if path.is_file() else None


def _status_file(
    run: PreparedRun, nodes: Nodes, device: torch.device, profile: ModelProfile | None
) -> RankStatusFile:
    """Return this rank's status file, which ``parallax top`` reads."""
    return RankStatusFile(
        run.directory,
        run.plan,
        dist.get_rank(),
        run.config.trainer.steps,
        profile=profile,
        tokens_per_row=tokens_per_row(run.config),
        ranks_here=nodes.local_count,
        sensors=device_sensors(device),
    )


def _place(run: PreparedRun, nodes: Nodes, transports: Mapping[str, str]) -> None:
    """On rank 0, write to the run directory on which node each rank runs, and which transports the ranks use. Print the
    transports if there are several nodes."""
    by_edge = {
        edge: transport
        for found in all_gather_result(lambda: transports)
        for edge, transport in found.items()
    }
    if nodes.rank != 0:
        return
    names = [nodes.name(rank) for rank in range(len(nodes.of))]
    with contextlib.suppress(OSError):  # a full disk is reported by required files
        save_placement(run.directory, placement(run.plan, names, by_edge))
    if nodes.several and by_edge:
        console = safe_console()
        console.print(f"messages: {transports_text(by_edge)}", highlight=False, soft_wrap=True)


def _build_engine(run: PreparedRun, chain: Chain, loss: Loss, device: torch.device) -> Engine:
    config = run.config
    return Engine.build(
        chain,
        run.plan,
        loss=loss,
        steps=config.trainer.steps,
        device=device,
        optimizer=config.optimizer,
        schedule=config.schedule,
        ema=config.ema,
        updates=config.trainer.updates,
        precision=config.precision,
        swap=config.swap,
        replicas=config.replicas,
        compile=config.compile,
        scratch=run.directory / "swap",
        nonfinite_skips=config.trainer.nonfinite_skips,
        metrics=config.metrics_config,
    )


def _report_end(run: PreparedRun, summary: Mapping[str, Any], code: int) -> None:
    for line in summary["unwritten"]:
        print(f"parallax: {printable(line)}; the run continued without it", file=sys.stderr)
    if summary["stopped"]:
        _report_stopped(run, summary, code)
    else:
        # A run that was complete before has no figures of this start.
        if summary["steps_of_start"] or not summary["steps"]:
            safe_console().print(summary_table(summary))
        safe_console().print(f"results: {run.directory}", soft_wrap=True)


def _report_stopped(run: PreparedRun, summary: Mapping[str, Any], code: int) -> None:
    """Print the last message of a stopped run. Under Parallax's launcher, send the message to the launcher instead."""
    number, step = int(summary["stopped"]), summary["steps"]
    ours = EXIT_REPORT in os.environ
    remark = "" if ours else f"; the same command with name={run.config.name} continues"
    saved = f"after step {step} of {run.config.trainer.steps}, which is saved"
    what, who = saved if step else "before the first step", stopped_by(number)
    send_report(FailureReport(0, FailureKind.STOPPED, who, what, remark, code, saved=step > 0))


def _in_run_directory(error: Exception, directory: Path) -> Exception:
    """Return a :class:`ConfigError` if ``error`` is an OSError for a file in the run's directory, otherwise ``error``
    itself."""
    name = error.filename if isinstance(error, OSError) else None
    if (
        not isinstance(error, OSError)
        or not isinstance(name, str)
        or directory not in Path(name).parents
    ):
        return error
    return ConfigError(f"cannot open {name}: {error.strerror}; make the run directory writable")


def limits(run: PreparedRun) -> tuple[float, float, float]:
    """Return the limits in seconds of an action, of a phase, and of saving after a request to end."""
    trainer = run.config.trainer
    slow = _STEPS_IN_ONE_ACTION * run.plan.prediction.step_seconds
    action = trainer.watchdog_seconds and max(trainer.watchdog_seconds, slow)
    return action, trainer.phase_seconds, trainer.grace_seconds


def _on_drift(config: RunConfig) -> OnDrift:
    """Return the reaction to drift (steps slower or faster than predicted) that the launcher has set. Without
    Parallax's launcher, drift is only reported, or ignored if ``plan.replan`` is not auto. If steps are recorded for
    debugging, which makes them slow, drift is ignored."""
    if config.debug.record != "off":
        return OnDrift.IGNORE
    usual = OnDrift.NOTE if config.plan.replan == AUTO else OnDrift.IGNORE
    return OnDrift(os.environ.get(ON_DRIFT, usual))
