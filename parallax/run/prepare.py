"""Prepare the directory of a run: its configuration, plan and all other files that ranks read, before they start."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from parallax import config as configuration
from parallax.common.events import EventLog
from parallax.common.lock import locked
from parallax.common.trust import class_paths, remember
from parallax.config import RunConfig
from parallax.errors import ConfigError, PlanError, printable
from parallax.machine.host import node_name
from parallax.machine.local import ClusterConfig
from parallax.plan.cluster import Cluster
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.plan.task import PlanTask
from parallax.report import placement_table, plan_table, tell_noise
from parallax.report.recipe import print_recipe
from parallax.run.job import local_cluster, plan_run, with_steps
from parallax.run.planning import Planned, as_planned
from parallax.run.resume import STORED, StoredRun, Trusts, check_model_of, settings
from parallax.run.sweep.points import SWEEP
from parallax.run.working import working
from parallax.train.callbacks import check_callbacks
from parallax.train.record import PREDICTED_EVENTS

RUNS = Path("runs")
_PREPARING = ".preparing-"


@dataclass(frozen=True)
class PreparedRun:
    """A run directory that is ready for the ranks, with the settings and the plan that every rank reads."""

    directory: Path
    config: RunConfig
    plan: Plan

    @classmethod
    def read(cls, directory: Path, trusts: Trusts = lambda file, found: None) -> PreparedRun:
        """Read a directory that :func:`prepare` has written. ``trusts(file, class_paths)`` raises an error if the class
        paths in a file must not be imported."""
        config = StoredRun.read(directory, trusts).config
        plan = Plan.load(directory / "plan.yaml")
        return cls(directory, _counted(config, plan), plan)

    def fingerprints(self) -> tuple[str, str]:
        """Return the hashes of settings and plan, which ranks compare at their first barrier."""
        return configuration.fingerprint(self.config), self.plan.hash()


def prepare(
    overrides: Sequence[str],
    console: Console,
    held: contextlib.ExitStack,
    present: Cluster | None = None,
    patience_seconds: float = 0.0,
) -> PreparedRun:
    """Compose the settings, plan, and write the run directory, which stays locked until ``held`` is closed. If the
    directory exists, the run resumes from its last checkpoint, possibly under another plan, with its stored settings
    changed by ``overrides``.

    ``present``: the cluster of all nodes of the run, if there are several nodes; this process is on the first node.
    ``patience_seconds``: how long to wait if another process has locked the directory.
    """
    with working(console, "planning") as work:
        found = settings(overrides, RUNS)
        config = found.config
        work.limit(config.trainer)
        local_cluster(config)
        _check_trains(config)
        name = config.name if config.name != "auto" else free_name()
        check_name(name)
        config.trainer.check_steps()
        config.logger.check_packages()
        check_callbacks(config.callbacks)
        config, directory = replace(with_steps(config), name=name), RUNS / name
        saved = config.checkpoint.folder(directory, config.name)
        if config.trainer.resume == "never" and saved.exists():
            refused = f"{saved.parent} holds checkpoints; choose another name, or resume=auto"
            raise ConfigError(f"trainer.resume=never: {refused}")
        held.enter_context(locked(directory, patience_seconds))
        if not saved.is_relative_to(directory):
            held.enter_context(locked(saved, patience_seconds))  # runs of one name in other folders
        if found.changed is not None:
            _say_resumed(console, directory, found.changed, found.rate)
        planned = plan_run(
            config,
            directory / "swap",
            work,
            present=present,
            verified=True,
            accept=partial(check_model_of, saved),
        )
    tell_noise(console, planned.profile)
    write_run(directory, config, planned)
    remember(directory, class_paths(configuration.dump(config)))
    console.print(plan_table(planned.plan, planned.profile))
    print_recipe(console, config.optimizer, config.schedule, planned.groups, config.trainer.steps)
    if len(planned.cluster.nodes) > 1:
        console.print(placement_table(planned.plan, planned.cluster))
    for line in planned.remarks:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return PreparedRun(directory, _counted(config, planned.plan), planned.plan)


def _say_resumed(console: Console, directory: Path, changed: list[str], rate: str) -> None:
    but = f", but {'; '.join(changed)}" if changed else ""
    for line in filter(None, (f"{directory} resumes with its own settings{but}", rate)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _check_trains(config: RunConfig) -> None:
    if config.task != PlanTask.TRAINING:
        raise ConfigError(
            f"task={config.task}: parallax train trains; leave it out, or plan with `parallax plan "
            f"task={config.task}`"
        )


def check_name(name: str) -> None:
    """Raise :class:`ConfigError` if no run can have this name: the name is that of a sweep, or it has the form
    FOLDER/NAME although FOLDER is not a sweep."""
    parent, _, point = name.rpartition("/")
    if parent and not (RUNS / parent / SWEEP).is_file():
        raise ConfigError(
            f"name={name}: accepted is a folder name, or SWEEP/POINT, and {RUNS / parent} is no sweep"
        )
    if not parent and (RUNS / point / SWEEP).is_file():
        raise ConfigError(
            f"name={name}: {RUNS / name} is a sweep; add -m, or name one of its points, {name}/POINT"
        )


def free_name() -> str:
    """Return the current time as a run name, with a number added if another run began in the same second."""
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = (now, *(f"{now}-{number}" for number in range(2, 1000)))
    return next((name for name in names if not (RUNS / name).exists()), now)


def _counted(config: RunConfig, plan: Plan) -> RunConfig:
    """Return the settings with ``cluster.devices`` set to the number of devices that the plan uses. Ranks divide the
    cores of the host by this number."""
    cluster = config.cluster
    return (
        replace(config, cluster=as_planned(cluster, config.plan, plan))
        if isinstance(cluster, ClusterConfig)
        else config
    )


def write_run(directory: Path, config: RunConfig, planned: Planned) -> None:
    """Write the files that ranks, ``simulate`` and ``calibrate`` read. If one cannot be written, none is."""

    def fill(folder: Path) -> None:
        (folder / STORED).write_text(configuration.dump(config), encoding="utf-8")
        (folder / "profile.json").write_text(planned.profile.to_json() + "\n", encoding="utf-8")
        planned.plan.save(folder / "plan.yaml")
        Inputs(planned.profile, planned.cluster).save(inputs_path(folder / "plan.yaml"))
        with EventLog(folder / PREDICTED_EVENTS) as events:
            events.extend(list(planned.forecast.spans))

    _place(directory, fill)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files``, which :func:`run_files` returned on rank 0, on a node that does not see rank 0's directory."""

    def fill(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    _place(directory, fill)


def _place(directory: Path, fill: Callable[[Path], None]) -> None:
    """Call ``fill`` with a temporary folder, and move the files that it writes into ``directory``. Files of another
    plan are archived first."""
    try:
        for left in directory.glob(f"{_PREPARING}*"):
            shutil.rmtree(left)  # left by a process that was killed
        with tempfile.TemporaryDirectory(dir=directory, prefix=_PREPARING) as name:
            folder = Path(name)
            fill(folder)
            _set_aside(directory, Plan.load(folder / "plan.yaml"))
            for path in folder.iterdir():
                path.replace(directory / path.name)
    except OSError as error:
        where = printable(str(error.filename or directory))
        raise ConfigError(
            f"cannot write the run directory {directory}: {where}: {error.strerror} (on {node_name()}); free space or "
            "make it writable, or choose another name"
        ) from error


def run_files(directory: Path) -> dict[str, bytes]:
    """Return a mapping from name to content of the files of the prepared run in ``directory``, for nodes that do not
    see this directory."""
    plan = directory / "plan.yaml"
    names = STORED, "profile.json", plan.name, inputs_path(plan).name, PREDICTED_EVENTS
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def _set_aside(directory: Path, plan: Plan) -> None:
    """If the plan in ``directory`` makes other decisions than ``plan``, move the old plan and its measurements into a
    separate folder. Otherwise the files with spans (times of actions) would mix two plans."""
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
