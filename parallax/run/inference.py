"""Run forwards with a trained run: its settings, a checkpoint, and a plan of forwards for the present devices.

::

    before the ranks    ForwardJob.of(run, request)       settings ─> model ─> profile ─> plan; plain data
    in each rank        job.build(...)                    this rank's stage of the plan, with the checkpoint's weights
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax import config as configuration
from parallax.common.documents import DOCUMENT_BYTES, plain_json, read_text
from parallax.common.files import existing_parent
from parallax.common.trust import check_named
from parallax.common.units import plural
from parallax.config import RunConfig
from parallax.errors import ConfigError, PlanError, printable
from parallax.machine.accelerators import own_device
from parallax.machine.local import ClusterConfig, divided
from parallax.model.block import leaves
from parallax.model.describe import Chain
from parallax.model.profiling.cache import device_name
from parallax.plan.cluster import Cluster
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.task import PlanTask
from parallax.plan.tier import AUTO
from parallax.run.export import CheckpointChoice
from parallax.run.job import device_kind, local_cluster, open_source, plan_run
from parallax.run.nodes import swap_folder
from parallax.run.planning import Loss, Planned, as_planned
from parallax.run.resume import StoredRun
from parallax.runtime.batch import Rows
from parallax.runtime.checkpoint import CheckpointReader
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.evaluation import EvaluationEngine
from parallax.runtime.forward import ForwardEngine
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.source import DataConfig, Source
from parallax.train.loop import OFF
from parallax.train.unlabelled import STOP, UnlabelledDataConfig, settings_for

TRAINED, EMA = "trained", "ema"
_CHANGED = ("data", "cluster", "plan", "swap", "loss", "precision", "metrics", "compile")
_OF_TRAINER = (
    "global_batch",
    "microbatch",
    "gather_loss",
    "eval_batches",
    "watchdog_seconds",
    "phase_seconds",
)
_ALL = "data"  # the set of all rows of other data
# Predicted seconds up to which forwards are planned with the profile of a run that had another number of threads.
# Blocks of a GPT of 10 million parameters are measured in 20 s, and by this profile it computes 20% fewer rows.
_SHORT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """Rows without targets. ``path``: the file or folder of the rows; empty if the data settings name the path.
    ``bad``: the reaction to a row that cannot be read, stop or skip."""

    path: str = ""
    bad: str = STOP

    def data_before(self, overrides: Sequence[str], stored: RunConfig) -> DataConfig:
        """Return the data settings to which ``overrides`` are applied.

        If ``overrides`` choose a kind of data, or without ``path``, these are the run's own settings, those of
        ``stored``. Otherwise they are settings of a kind of data that can read ``path``. Raises :class:`ConfigError` if
        neither ``overrides`` nor ``path`` name the new rows.
        """
        if any(each.startswith("data=") for each in overrides):
            return stored.data
        if self.path:
            return settings_for(self.path, stored.data)
        keys = {each.lstrip("+").partition("=")[0] for each in overrides}
        if not {key for key in keys if key.startswith("data.")} - _reading(stored):
            raise ConfigError(
                "predict: name the rows, with --inputs FOLDER|FILE, with data=KIND data.path=FOLDER|FILE, or with "
                f"settings of the run's own data={stored.data.name}, such as data.{_place_of(stored.data)}"
            )
        return stored.data

    def fitted(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``path`` as the path of the data, and without held-out rows. If there are fewer rows
        than in a global batch, the batch is reduced to them."""
        data = config.data
        if self.path and hasattr(data, "path"):
            data = replace(data, path=self.path)  # type: ignore[call-arg]
        if isinstance(data, IndexedDataConfig):
            data = replace(data, validation=0)
        config = replace(config, data=data)
        rows = len(open_source(self.read_by(config)))  # type: ignore[arg-type]
        trainer = config.trainer
        return replace(
            config, trainer=replace(trainer, global_batch=min(trainer.global_batch, rows))
        )

    def read_by(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with data settings that read rows without targets."""
        return replace(config, data=UnlabelledDataConfig.of(config.data, self.bad))


@dataclass(frozen=True, kw_only=True)
class ForwardRequest:
    """The forwards that a user requests.

    ``choice``     the checkpoint
    ``overrides``  changes of the run's settings
    ``weights``    trained, ema, or None for the weights with which the run validated
    ``devices``    the number of devices to plan for, unless the overrides set it
    ``groups``     further groups of settings that the overrides may change
    ``rows``       new rows, which replace the run's data
    ``layer``      the module whose output is computed; empty for the output of the model
    """

    task: PlanTask
    choice: CheckpointChoice
    overrides: tuple[str, ...] = ()
    weights: str | None = None
    devices: int = 1
    groups: tuple[str, ...] = ()
    rows: NewRows | None = None
    layer: str = ""

    def chosen(self, run: StoredRun) -> tuple[Path, bool, str]:
        """Return the folder of the checkpoint to use, whether to use averaged weights, and a message for the user about
        the choice, which may be empty."""
        checkpoint, remark = self.choice.find(run)
        return checkpoint, _averaged(run, checkpoint, self.weights), remark

    @property
    def measures(self) -> bool:
        """Whether the plan needs times that are measured on the present devices, as that of a server does."""
        return "serve" in self.groups or bool(self.layer)

    def settings(self, run: StoredRun) -> RunConfig:
        """Return the settings for the forwards. Raises :class:`ConfigError` if an override changes a setting that only
        affects training."""
        stored = run.config
        base = replace(
            stored,
            task=self.task.value,
            plan=PlanConfig(),
            trainer=replace(stored.trainer, microbatch="auto", patience=0, target=OFF),
            checkpoint=CheckpointConfig(),
            cluster=_sized(stored, self.devices),
            callbacks=[],
        )
        if self.rows is not None:
            base = replace(base, data=self.rows.data_before(self.overrides, stored))
        found = configuration.compose(self.overrides, base)
        local_cluster(found)
        changed = configuration.changes(base, found)
        if "serve" in self.groups:
            found = shared(found, run.directory)
        accepted = (*_CHANGED, *self.groups)
        for key in changed:
            root, _, leaf = key.partition(".")
            if root not in accepted and not (root == "trainer" and leaf in _OF_TRAINER):
                raise ConfigError(
                    f"{key}: it does not change what a trained run computes; accepted are "
                    f"{', '.join(accepted)} and trainer.{{{', '.join(_OF_TRAINER)}}}"
                )
        if self.rows is not None:
            return self.rows.fitted(found)
        of_data = {key for key in changed if key.split(".")[0] == "data"}
        if not of_data - _reading(found):
            return found
        limit = found.trainer.eval_batches if "trainer.eval_batches" in changed else AUTO
        found = replace(found, trainer=replace(found.trainer, eval_batches=limit))
        return found if _holds_out(changed) else _with_all_rows(found)


def shared(config: RunConfig, directory: Path) -> RunConfig:
    """Return the settings for one of ``serve.replicas`` copies of the model. Each copy gets an equal part of the
    devices and of the memory of each tier. ``directory``: the run's directory, below which swap files may be. Raises
    :class:`ConfigError` if there are fewer devices than copies."""
    copies, cluster = config.serve.replicas, local_cluster(config)
    if copies == 1:
        return config
    folder = existing_parent(swap_folder(config.swap, directory))
    return replace(config, cluster=divided(cluster, copies, folder))


def _sized(stored: RunConfig, devices: int) -> ClusterConfig:
    if isinstance(stored.cluster, ClusterConfig):
        return replace(stored.cluster, devices=devices)
    return ClusterConfig(devices=devices)


def _place_of(data: DataConfig) -> str:
    """Return a setting of ``data`` that chooses other rows, without the prefix ``data.``, as an example for an error
    message."""
    return "path=FOLDER|FILE" if hasattr(data, "path") else "kwargs.KEY=VALUE"


def _reading(config: RunConfig) -> set[str]:
    """Return the keys of the data settings that affect only how rows are read, not which rows are evaluated."""
    return {f"data.{key}" for key in config.data.reading}


def _holds_out(changed: Collection[str]) -> bool:
    """Return whether the keys ``changed`` include a setting that selects the held-out rows."""
    return any(key.split(".")[:2] == ["data", "validation"] for key in changed)


def _with_all_rows(config: RunConfig) -> RunConfig:
    """Return ``config`` with all rows of its data held out, so that all of them are evaluated. If there are fewer rows
    than in a global batch, the batch is reduced to them."""
    data = config.data
    if not isinstance(data, IndexedDataConfig):
        return config
    config = replace(config, data=replace(data, validation={_ALL: {}}))
    rows = len(open_source(config))  # type: ignore[arg-type]
    trainer = config.trainer
    return replace(config, trainer=replace(trainer, global_batch=min(trainer.global_batch, rows)))


@dataclass(frozen=True, kw_only=True)
class ForwardJob:
    """All that a rank needs to run forwards, as plain data that is equal on all ranks.

    ``directory``  the directory of the run
    ``averaged``   use averaged weights
    ``rows``       new rows, which replace the run's data
    ``layer``      the module whose output is computed; empty for the output of the model
    ``changed``    ``key: old -> new`` for each setting that differs from the run's and may change outputs or metrics
    ``remarks``    messages for the user about the choice of the checkpoint and the devices
    """

    config: RunConfig
    plan: Plan
    directory: Path
    checkpoint: Path
    averaged: bool = False
    rows: NewRows | None = None
    layer: str = ""
    changed: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        run: StoredRun,
        request: ForwardRequest,
        progress: Callable[[str], None],
        *,
        present: Cluster | None = None,
    ) -> ForwardJob:
        """Return the job for ``request``: choose the checkpoint, and plan forwards for the present devices.
        ``present``: the cluster of all nodes, if there are several nodes; this process is on the first node."""
        checkpoint, averaged, chosen = request.chosen(run)
        config = request.settings(run)
        read = config if request.rows is None else request.rows.read_by(config)
        scratch = run.directory / "evaluate" / "swap"
        stored = _StoredProfile(run, read)
        plan = partial(plan_run, read, scratch, progress, present=present, layer=request.layer)
        planned = plan() if request.measures else plan(known=stored.of)
        if stored.is_too_rough(planned):
            planned = plan()
        return cls(
            config=counted(config, planned),
            plan=planned.plan,
            directory=run.directory,
            checkpoint=checkpoint,
            averaged=averaged,
            rows=request.rows,
            layer=request.layer,
            changed=_changed(run.config, config),
            remarks=tuple(filter(None, (chosen, *planned.remarks, stored.remark(planned)))),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain data."""
        return {
            "config": configuration.dump(self.config),
            "plan": self.plan.to_dict(),
            "directory": str(self.directory),
            "checkpoint": str(self.checkpoint),
            "averaged": self.averaged,
            "rows": None if self.rows is None else asdict(self.rows),
            "layer": self.layer,
            "changed": list(self.changed),
            "remarks": list(self.remarks),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ForwardJob:
        """Return the job from the data that :meth:`to_dict` returned."""
        return cls(
            config=configuration.load(data["config"]),
            plan=Plan.from_dict(data["plan"]),
            directory=Path(data["directory"]),
            checkpoint=Path(data["checkpoint"]),
            averaged=data["averaged"] is True,
            rows=None if data["rows"] is None else NewRows(**data["rows"]),
            layer=str(data["layer"]),
            changed=tuple(map(str, data["changed"])),
            remarks=tuple(map(str, data["remarks"])),
        )

    def write(self, path: Path) -> None:
        """Write the job for the ranks of this host. Only the user may write the file, because the ranks import the
        class paths in it."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file)

    @classmethod
    def read(cls, path: Path) -> ForwardJob:
        """Read a job that :meth:`write` wrote. Raises :class:`ConfigError` for a file that other users could write."""
        try:
            found = path.lstat()
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ConfigError(
                    f"--prepared {printable(str(path))}: other users can open this file"
                )
            return cls.from_dict(plain_json(read_text(path, 2 * DOCUMENT_BYTES)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--prepared {printable(str(path))}: it is no job that Parallax prepared "
                f"({printable(str(error))[:200]})"
            ) from error

    @property
    def read_config(self) -> RunConfig:
        """The settings with which the rows are opened and the model is built."""
        return self.config if self.rows is None else self.rows.read_by(self.config)

    def build_forward(
        self, chain: Chain, device: torch.device, command: str = "predict"
    ) -> ForwardEngine:
        """Return this rank's engine with the checkpoint's weights and without a loss. All ranks must call this method.
        ``command``: the name of the command; swap files are in the folder of this name in the run's directory."""
        config = self.config
        engine = ForwardEngine.build(
            chain,
            self.plan,
            device=device,
            precision=config.precision,
            swap=config.swap,
            compile=config.compile,
            scratch=self.directory / command / "swap",
        )
        engine.load(self.checkpoint, averaged=self.averaged)
        return engine

    def build(self, chain: Chain, loss: Loss, device: torch.device) -> EvaluationEngine:
        """Return this rank's engine with the checkpoint's weights and ``loss``. All ranks must call this method."""
        config = self.config
        engine = EvaluationEngine.build(
            chain,
            self.plan,
            loss=loss,
            metrics=config.metrics_config,
            device=device,
            precision=config.precision,
            swap=config.swap,
            compile=config.compile,
            scratch=self.directory / "evaluate" / "swap",
        )
        engine.load(self.checkpoint, averaged=self.averaged)
        return engine


@dataclass(frozen=True)
class _StoredProfile:
    """The profile with which ``run`` was planned, as a profile of the forwards ``config``. Its bytes are those that a
    measurement would find, so a short evaluation need not take longer to plan than to run."""

    run: StoredRun
    config: RunConfig

    def of(self, chain: Chain, batch: Rows) -> ModelProfile | None:
        """Return the profile; None if it may be of another model, device, number format, loss or length of rows."""
        path = self.run.directory / "profile.json"
        if not path.is_file() or not self._same_loss():
            return None
        with contextlib.suppress(PlanError):
            profile = ModelProfile.load(path)
            row = sum(tensor.nbytes for tensor in chain.arguments(batch.inputs(0, 1)))
            alike = (
                profile.fingerprint == chain.fingerprint()
                and profile.precision == str(self.config.precision)
                and _without_threads(profile) == device_name(own_device(device_kind(self.config)))
                and round(profile.blocks[0].input.at(1)) == row
            )
            return profile if alike else None
        return None

    def _same_loss(self) -> bool:
        if not self._has_loss:
            return True
        stored, now = self.run.config, self.config
        rows = [c.trainer.gather_loss and c.trainer.global_batch for c in (stored, now)]
        return stored.loss == now.loss and rows[0] == rows[1]

    @property
    def _has_loss(self) -> bool:
        return PlanTask(self.config.task) is PlanTask.EVALUATION

    def is_too_rough(self, planned: Planned) -> bool:
        """Whether ``planned`` is for another number of threads, and for so many rows that a measurement with this one
        may save more time than it takes."""
        if not self._other_threads(planned):
            return False
        return self._rows() > _SHORT_SECONDS * planned.plan.rows_per_second

    def _rows(self) -> int:
        """Return the number of rows to compute, as far as it is known."""
        source, trainer = open_source(self.config), self.config.trainer
        if not self._has_loss:
            return len(source)  # type: ignore[arg-type]
        limit = trainer.eval_batches if isinstance(trainer.eval_batches, int) else sys.maxsize
        sets = held_out_sets(source).values()
        most = limit * trainer.global_batch
        return sum(min(most, getattr(each, "validation_rows", 0)) for each in sets)

    def _other_threads(self, planned: Planned) -> str:
        """Return the number of threads of the profile in ``planned``, as text; empty if it is that of this process."""
        of = planned.profile.device.rpartition(", ")[2]
        here = plural(torch.get_num_threads(), "thread")
        return "" if of == here or device_kind(self.config) != "cpu" else of

    def remark(self, planned: Planned) -> str:
        """Return a message for the user if the speed of an evaluation is predicted for another number of threads."""
        of, here = self._other_threads(planned), plural(torch.get_num_threads(), "thread")
        if not of or not self._has_loss:
            return ""
        return f"the predicted speed is that of the run's ranks, with {of}; here they have {here}"


def _without_threads(profile: ModelProfile) -> str:
    return profile.device.rpartition(", ")[0]


def counted(config: RunConfig, planned: Planned) -> RunConfig:
    """Return the settings with ``cluster.devices`` set to the number of devices that the plan uses. Ranks divide the
    cores of the host by this number."""
    assert isinstance(config.cluster, ClusterConfig)
    return replace(config, cluster=as_planned(config.cluster, config.plan, planned.plan))


def _averaged(run: StoredRun, checkpoint: Path, weights: str | None) -> bool:
    """Return whether to use averaged weights. Raises :class:`ConfigError` if the user requests averaged weights and the
    checkpoint has none."""
    if weights == TRAINED:
        return False
    there = bool(CheckpointReader(checkpoint).averages.get("updates"))
    if weights == EMA and not there:
        raise ConfigError(
            f"--weights ema: {checkpoint.name} has no averaged weights (ema={run.config.ema.name}); use --weights "
            "trained, or train with ema=on"
        )
    return there and (weights == EMA or run.config.ema.evaluates)


def _changed(stored: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """Return ``key: old -> new`` for each changed setting that may change outputs or metrics."""
    kept = (
        "data.",
        "loss.",
        "precision.",
        "metrics",
        "trainer.eval_batches",
        "trainer.global_batch",
    )
    return tuple(
        f"{key}: {old} -> {new}"
        for key, (old, new) in configuration.changes(stored, config).items()
        if key.startswith(kept)
    )


def held_out_sets(source: Source) -> dict[str, Any]:
    """Return the held-out sets of ``source`` by name, the main one first."""
    return dict(getattr(source, "validation_sets", {"": source}))


def stored_run(path: Path, runs: Path, overrides: Sequence[str]) -> StoredRun:
    """Return the run in the directory ``path``, or the run of that name in ``runs``. Raises :class:`ConfigError` if its
    settings contain class paths that the user has typed neither in ``overrides`` nor when the run was made
    (:mod:`parallax.common.trust`)."""
    directory = path if path.is_dir() else runs / path
    return StoredRun.read(directory, lambda file, found: check_named(file, found, overrides))


def output_tensors(results: Any) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) for each tensor in a model's return value, except tensors without dimensions, such as a
    loss, because they have no rows. A single tensor is called ``output``; others are named by their keys or numbers.
    Raises :class:`ConfigError` if two tensors have the same name."""
    parts = [(path, part) for path, part in leaves(results) if isinstance(part, Tensor)]
    found = [(tensor_name(path, "output"), tensor) for path, tensor in parts if tensor.ndim]
    names = [name for name, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"the model returns two tensors called {twice[0]}: rename one of their keys"
        )
    return found


def tensor_name(path: tuple[Any, ...], usual: str) -> str:
    """Return the name of the tensor at ``path`` in nested values. ``usual``: the name if the path is empty."""
    words = [re.sub(r"[^\w.-]", "_", str(key)) for key in path]
    if not words or isinstance(path[0], int):
        words = [usual, *words]
    return "_".join(words)
