"""From a plan to processes, and from a process's environment to its rank."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from rich.console import Console

from parallax import config as configuration
from parallax.common.events import EventLog
from parallax.common.lock import locked
from parallax.common.signals import exit_code, heeding, interrupt, stopped_by
from parallax.common.terminal import safe_console
from parallax.common.trust import class_paths, remember
from parallax.common.units import format_seconds
from parallax.config import RunConfig
from parallax.errors import ConfigError, ParallaxError, PlanError, printable
from parallax.machine.device import select_device
from parallax.machine.local import ClusterConfig, choose_devices
from parallax.mesh import start_processes, stop_processes
from parallax.plan.config import AUTO
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.report import plan_table, summary_table
from parallax.run.agent import Agent
from parallax.run.feedback import correct
from parallax.run.job import (
    build_chain,
    build_loss,
    local_cluster,
    open_source,
    plan_run,
    tokens_per_row,
)
from parallax.run.planning import Planned, settle
from parallax.run.resume import STORED, load_stored, read_stored, settings
from parallax.run.working import working
from parallax.runtime.engine import Engine
from parallax.runtime.failure.exit_report import LAST_WORDS, depart, follows, leave, say, verdict_on
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.runtime.failure.watch import Watch
from parallax.train.loop import PREDICTED_EVENTS, OnDrift, TrainerConfig, train
from parallax.train.monitor import load_curves

RUNS = Path("runs")
Trusts = Callable[
    [Path, Mapping[str, str]], None
]  # given a file and the class paths in it, key by key
_PREPARING = ".preparing-"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_COMPILING = 2  # steps that may compile: training, and another after an evaluation
_STEPS_IN_ONE_ACTION = (
    2  # no action takes longer than its step; predictions are not better than that
)


@dataclass(frozen=True)
class PreparedRun:
    """A prepared run directory: the resolved configuration and the plan that every rank reads."""

    directory: Path
    config: RunConfig
    plan: Plan

    @classmethod
    def read(cls, directory: Path, trusts: Trusts = lambda file, found: None) -> PreparedRun:
        """Read what :func:`prepare` wrote. ``trusts`` raises where the class paths of the file must not be imported."""
        text = read_stored(directory)
        trusts(directory / STORED, class_paths(text))
        config, plan = load_stored(directory / STORED, text), Plan.load(directory / "plan.yaml")
        return cls(directory, _counted(config, plan.world_size), plan)

    def fingerprints(self) -> tuple[str, str]:
        """What ranks compare at their first barrier."""
        return configuration.fingerprint(self.config), self.plan.hash()


def prepare(overrides: Sequence[str], console: Console, held: contextlib.ExitStack) -> PreparedRun:
    """Compose, plan, and write the run directory, which ``held`` locks until it is closed. A directory of the same name
    is continued from its last checkpoint, which any plan can load, with its own settings under what is typed."""
    with working(console, "planning") as work:
        found = settings(overrides, RUNS)
        config = found.config
        work.limit(config.trainer)
        local_cluster(config)
        name = config.name if config.name != "auto" else _free_name()
        config, directory = replace(config, name=name), RUNS / name
        if config.trainer.resume == "never" and (directory / "checkpoints").exists():
            refused = f"{directory} holds checkpoints; choose another name, or resume=auto"
            raise ConfigError(f"trainer.resume=never: {refused}")
        held.enter_context(locked(directory))
        if found.changed is not None:
            changed = f", but {'; '.join(found.changed)}" if found.changed else ""
            console.print(
                f"{directory} goes on with its own settings{changed}", highlight=False, markup=False
            )
        planned = plan_run(config, directory / "swap", work)
    _write(directory, config, planned)
    remember(directory, class_paths(configuration.dump(config)))
    console.print(plan_table(planned.plan, planned.profile))
    return PreparedRun(directory, _counted(config, planned.plan.world_size), planned.plan)


def _free_name() -> str:
    """The time, and a number where runs begin in one second."""
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = (now, *(f"{now}-{number}" for number in range(2, 1000)))
    return next((name for name in names if not (RUNS / name).exists()), now)


def _counted(config: RunConfig, devices: int) -> RunConfig:
    """The settings with the number of devices that the plan uses, which ranks share the cores by."""
    cluster = config.cluster
    return (
        replace(config, cluster=replace(cluster, devices=devices))
        if isinstance(cluster, ClusterConfig)
        else config
    )


def _write(directory: Path, config: RunConfig, planned: Planned) -> None:
    """What the ranks read, and what `simulate` and `calibrate` need later: all of it, or nothing is changed."""
    try:
        for left in directory.glob(f"{_PREPARING}*"):
            shutil.rmtree(left)  # of a process that was killed meanwhile
        with tempfile.TemporaryDirectory(dir=directory, prefix=_PREPARING) as name:
            folder = Path(name)
            (folder / STORED).write_text(configuration.dump(config), encoding="utf-8")
            (folder / "profile.json").write_text(planned.profile.to_json() + "\n", encoding="utf-8")
            planned.plan.save(folder / "plan.yaml")
            Inputs(planned.profile, planned.cluster).save(inputs_path(folder / "plan.yaml"))
            with EventLog(folder / PREDICTED_EVENTS) as events:
                events.extend(list(planned.forecast.spans))
            _set_aside(directory, planned.plan)
            for path in folder.iterdir():
                path.replace(directory / path.name)
    except OSError as error:
        where = printable(str(error.filename or directory))
        raise ConfigError(
            f"cannot write the run directory {directory}: {where}: {error.strerror}; make room or make it writable, or "
            "choose another name"
        ) from error


def _set_aside(directory: Path, plan: Plan) -> None:
    """Where a run goes on under another plan, put the old one and what it measured into a folder of their own: spans
    of two plans in one file would be taken for one."""
    try:
        old = Plan.load(directory / "plan.yaml")
    except PlanError:
        return
    if old.decisions() == plan.decisions():
        return
    folder = directory / f"before-{old.hash()}"
    folder.mkdir(exist_ok=True)
    for pattern in ("plan.*", "profile*.json", "events-*.jsonl"):
        for path in directory.glob(pattern):
            path.replace(folder / path.name)


def launch(run: PreparedRun) -> int:
    """Train on this machine; the exit code. With ``plan.replan=auto`` a run whose steps are not as predicted stops at
    a checkpoint, once, and goes on under a plan that is made with what it measured."""
    replans = run.config.plan.replan == AUTO
    with heeding(interrupt):
        code = _start(run, OnDrift.STOP if replans else OnDrift.IGNORE)
        if code == 0 and replans and (reason := _drifted(run.directory)):
            code = _start(_replanned(run, reason, safe_console()), OnDrift.NOTE)
    return code


def _drifted(directory: Path) -> str:
    """Why the run stopped early; empty where it did not."""
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(summary["drift"]) if summary.get("ended") == "drift" else ""


def _replanned(run: PreparedRun, reason: str, console: Console) -> PreparedRun:
    """The run under the plan that is best by its own measurements; the old one where no other can be had."""
    console.print(f"planning again: {reason}", highlight=False)
    try:
        with working(console, "planning again") as work:
            work.limit(run.config.trainer)
            found = correct(run.directory, run.config, run.plan, work)
            planned = plan_run(run.config, run.directory / "swap", work, profile=found.profile)
    except ParallaxError as error:
        console.print(f"going on with the old plan: {error}", highlight=False, markup=False)
        return run
    times = (
        found.first_seconds,
        found.measured_seconds,
        found.second_seconds,
        planned.plan.prediction.step_seconds,
    )
    first, measured, second, new = map(format_seconds, times)
    console.print(
        f"the old plan was predicted at {first} per step and measured at {measured}; by what was measured it takes "
        f"{second}, the new one {new}",
        highlight=False,
    )
    _write(run.directory, load_stored(run.directory / STORED, read_stored(run.directory)), planned)
    console.print(plan_table(planned.plan, planned.profile))
    return PreparedRun(run.directory, run.config, planned.plan)


def _start(run: PreparedRun, on_drift: OnDrift) -> int:
    """Start the processes that the plan needs; the exit code."""
    told = rank_environment(run) | {"PARALLAX_ON_DRIFT": on_drift.value}
    return Agent(run.config.name, run.directory, run.plan.world_size).start(told)


def rank_environment(run: PreparedRun) -> dict[str, str]:
    """Environment variables of every rank, unless the user has set them."""
    wanted = {"OMP_NUM_THREADS": str(choose_devices(local_cluster(run.config)).threads)}
    wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # with gloo, restarts find stale keys otherwise
    )
    return {key: value for key, value in wanted.items() if key not in os.environ}


def work(overrides: Sequence[str], directory: Path | None, trusts: Trusts) -> NoReturn:
    """What one rank under torchrun does, with which its process ends. Without a prepared directory, rank 0 prepares one
    for all. ``trusts`` is asked about the class paths of one that somebody else has prepared.

    After an exception the process ends without more ado: leaving the world in order would wait for the others.
    """
    watch: Watch | None = None
    held = contextlib.ExitStack()  # what ends with the process, however it ends
    try:
        if sys.platform == "linux":  # no rank is left over when the launcher is killed
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if not faulthandler.is_enabled():
            faulthandler.enable(
                all_threads=False
            )  # a crash in compiled code says where it was called from
        _meet()
        watch = Watch.start(say)
        usual = TrainerConfig()  # until the run says otherwise
        watch.limit(usual.watchdog_seconds, usual.phase_seconds)
        with watch.phase("planning"):
            if directory is None:
                run = _prepare_for_all(overrides, held)
            else:
                run = _read_for_all(directory, held, trusts)
            watch.limit(*_limits(run), run.directory)
            _compare(run)
        stopped = _train(run, watch)
        watch.close()
        stop_processes()
        held.close()
    except (Exception, KeyboardInterrupt) as error:
        leave(error, watch)
    depart(
        exit_code(stopped) if stopped and LAST_WORDS not in os.environ else 0
    )  # our launcher knows


def _meet() -> None:
    """Join the other ranks; where that fails, it is for an address or a port that the user can change."""
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(key, "0").isdecimal():
            raise ConfigError(
                f"{key}={printable(os.environ[key])}: accepted is a whole number, as torchrun sets it"
            )
    try:
        start_processes(os.environ.get("PARALLAX_RENDEZVOUS"))
    except (dist.DistError, ValueError) as error:
        address, port = (os.environ.get(key, "(not set)") for key in ("MASTER_ADDR", "MASTER_PORT"))
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])
        raise ConfigError(
            f"the ranks cannot meet at MASTER_ADDR={address} MASTER_PORT={port}: {reason}; choose a free port and an "
            "address that all of them reach"
        ) from error


def _prepare_for_all(overrides: Sequence[str], held: contextlib.ExitStack) -> PreparedRun:
    """Rank 0 composes and plans once; the others read what it wrote, or end as it did."""
    sized = [f"cluster.devices={dist.get_world_size()}", *overrides]
    return PreparedRun.read(_told_by_first(lambda: prepare(sized, safe_console(), held).directory))


def _read_for_all(directory: Path, held: contextlib.ExitStack, trusts: Trusts) -> PreparedRun:
    """A directory that is prepared. Under the user's own torchrun rank 0 locks it for all, and every rank asks whether
    to trust it; a launcher of ours has done both."""
    if "PARALLAX_RENDEZVOUS" in os.environ:
        return PreparedRun.read(directory)
    run = PreparedRun.read(directory, trusts)
    _told_by_first(lambda: held.enter_context(locked(directory)))
    return run


def _told_by_first(call: Callable[[], Any]) -> Any:
    """What ``call`` gives on rank 0, on every rank; or its error."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told = [call(), None]
        except ParallaxError as error:
            told = [type(error), str(error)]
    dist.broadcast_object_list(told)
    found, failure = told
    if failure is not None:
        raise found(failure)
    return found


def _compare(run: PreparedRun) -> None:
    """The first barrier: every rank has read the same configuration and the same plan."""
    mine = (run.fingerprints(), configuration.dump(run.config), run.plan.to_dict())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, (fingerprints, text, plan) in enumerate(found):
        if fingerprints != found[0][0]:
            first = configuration.load(found[0][1])
            lines = configuration.differences(first, configuration.load(text))
            lines += Plan.from_dict(found[0][2]).diff(Plan.from_dict(plan))
            raise PlanError(f"rank {rank} read another run than rank 0: {'; '.join(lines[:5])}")


def _train(run: PreparedRun, watch: Watch) -> int:
    """Build, train, report; the signal that ended it early, or 0."""
    choice = choose_devices(local_cluster(run.config))
    settle(choice)
    device = select_device(choice.kind, int(os.environ.get("LOCAL_RANK", "0")))
    with watch.phase("loading data"):
        source = open_source(run.config)
    if dist.get_rank() == 0:
        load_curves(run.config.logger)
    with watch.phase("building the model"):
        chain, loss = build_chain(run.config), build_loss(run.config)
    with watch.phase("building the engine"):
        engine = Engine.build(
            chain,
            run.plan,
            loss=loss,
            steps=run.config.trainer.steps,
            device=device,
            optimizer=run.config.optimizer,
            precision=run.config.precision,
            swap=run.config.swap,
            replicas=run.config.replicas,
            compile=run.config.compile,
            scratch=run.directory / "swap",
        )
    trainer, logger = run.config.trainer, run.config.logger
    watch.attend(engine, run.plan, patient_steps=_COMPILING if run.config.compile else 0)
    watch.serve()
    try:
        tokens = tokens_per_row(run.config)
        summary = train(
            engine,
            source,
            trainer,
            logger,
            run.directory,
            tokens_per_row=tokens,
            on_drift=_on_drift(run.config),
            debug=run.config.debug,
            onlooker=watch,
        )
    except Exception as caught:
        error = _in_run_directory(caught, run.directory)
        if not follows(error):
            watch.claim(
                verdict_on(error, watch)
            )  # the others need not wait for this rank to tidy up
        if error is caught:
            raise
        raise error from None
    finally:
        with watch.phase("closing the engine"):
            engine.close()
    stopped = int(summary["stopped"])
    if dist.get_rank() == 0:
        for line in summary["unwritten"]:
            print(f"parallax: {line}; the run went on without it", file=sys.stderr)
        if stopped:
            _tell_stopped(run, summary)
        else:
            safe_console().print(summary_table(summary))
            safe_console().print(f"results: {run.directory}", soft_wrap=True)
    if stopped:
        dist.barrier()  # a rank that leaves with an error code ends the others
    return stopped


def _tell_stopped(run: PreparedRun, summary: Mapping[str, Any]) -> None:
    """Where no launcher of ours goes on, this is the last line."""
    number, step = int(summary["stopped"]), summary["steps"]
    ours = LAST_WORDS in os.environ
    remark = "" if ours else f"; the same command with name={run.config.name} continues"
    what = f"after step {step} of {run.config.trainer.steps}, which is saved"
    say(FailureReport(0, FailureKind.STOPPED, stopped_by(number), what, remark, exit_code(number)))


def _in_run_directory(error: Exception, directory: Path) -> Exception:
    """What cannot be opened in the run's directory is no fault of the program."""
    name = error.filename if isinstance(error, OSError) else None
    if (
        not isinstance(error, OSError)
        or not isinstance(name, str)
        or directory not in Path(name).parents
    ):
        return error
    return ConfigError(f"cannot open {name}: {error.strerror}; make the run directory writable")


def _limits(run: PreparedRun) -> tuple[float, float]:
    """Seconds that an action, and that anything else may take."""
    trainer = run.config.trainer
    slow = _STEPS_IN_ONE_ACTION * run.plan.prediction.step_seconds
    return trainer.watchdog_seconds and max(trainer.watchdog_seconds, slow), trainer.phase_seconds


def _on_drift(config: RunConfig) -> OnDrift:
    """What the launcher asked for; ranks that were started by another can only say so. Steps that are recorded take
    longer than any plan says."""
    if config.debug.record != "off":
        return OnDrift.IGNORE
    usual = OnDrift.NOTE if config.plan.replan == AUTO else OnDrift.IGNORE
    return OnDrift(os.environ.get("PARALLAX_ON_DRIFT", usual))
