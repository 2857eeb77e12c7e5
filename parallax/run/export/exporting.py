"""Write a checkpoint of a run in another format.

Tensors are read, converted and written one by one. Only tensors that are converted together, such as the experts of one
layer, are in memory at the same time. Names and sizes in the output are computed from the checkpoint's headers, so
errors appear before anything is written.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from parallax.common.files import disk_free_bytes, making_folder
from parallax.common.units import format_bytes
from parallax.config import RunConfig
from parallax.errors import CheckpointError, ConfigError, printable
from parallax.model.construction.deferred import deferred_init
from parallax.model.factory.adapters import AdaptableModelConfig
from parallax.model.source import ModelConfig
from parallax.run.export.choice import CheckpointChoice
from parallax.run.export.form import CheckpointTensors, Exported, ExportForm, Trained
from parallax.run.export.merging import MergedTensors
from parallax.run.job import built_model, model_factory
from parallax.run.resume import StoredRun
from parallax.runtime.checkpoint import CheckpointReader


def export(
    run: StoredRun,
    form: ExportForm,
    out: Path | None,
    *,
    choice: CheckpointChoice | None = None,
    merge: bool = False,
    averaged: bool = False,
) -> Exported:
    """Write a checkpoint of ``run`` to a folder in the format ``form``, and return the result. The folder is written
    completely or not at all.

    ``out``       the folder; by default one in the run's directory, named after the step
    ``choice``    the checkpoint; by default the last
    ``merge``     write the base model with the run's adapters merged into its weights
    ``averaged``  write the average of each weight that has one, instead of the weight
    """
    checkpoint, chosen = (choice or CheckpointChoice()).find(run)
    which = f"{'-merged' if merge else ''}{'-ema' if averaged else ''}"
    out = out or run.directory / form.name / f"{checkpoint.name}{which}"
    _check_free(out)
    config = built_model(run.config)
    _check_merge(form, merge=merge, adapting=config.base(run.config.seed) != "")
    reader = CheckpointReader(checkpoint, averaged=averaged)
    reader.check_whole()
    if averaged and not reader.averages.get("updates"):
        raise ConfigError(
            f"--weights ema: {checkpoint.name} has no averaged weights (ema={run.config.ema.name}); use --weights "
            "trained, or train with ema=on"
        )
    contents = form.contents(_trained(run.config, config, reader, merge=merge))
    _check_room(out, contents.size)
    try:
        with making_folder(out) as folder:
            remarks = contents.write(folder)
            files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or printable(str(error))
        raise CheckpointError(
            f"--out {printable(str(out))}: cannot write {format_bytes(contents.size)} there: {reason}, "
            f"{format_bytes(disk_free_bytes(out))} free; nothing is left of it"
        ) from error
    if chosen and not averaged and run.config.ema.evaluates:
        chosen += "; that is the value of the averaged weights: add --weights ema to write these"
    remarks = [chosen, *remarks] if chosen else remarks
    return Exported(out, reader.step, contents.size, tuple(files), tuple(remarks))


def _trained(
    settings: RunConfig, config: ModelConfig, reader: CheckpointReader, *, merge: bool
) -> Trained:
    deferred = deferred_init(model_factory(settings), settings.seed)
    if not merge:
        return Trained(deferred.model, reader, settings, CheckpointTensors(reader))
    assert isinstance(config, AdaptableModelConfig)
    base = deferred_init(config.create, settings.seed).model
    identity, dtype = config.base(settings.seed), settings.precision.parameter_dtype
    weights = MergedTensors(base, deferred, reader, identity, dtype)
    return Trained(base, reader, settings, weights)


def _check_merge(form: ExportForm, *, merge: bool, adapting: bool) -> None:
    """Raise :class:`ConfigError` if ``form`` cannot hold the export: adapters, if ``adapting``, or with ``merge`` a
    base model with merged adapters. Also raise it if there are no adapters to merge."""
    if merge and not adapting:
        raise ConfigError("--merge: the run trains no adapters (model.adapter); leave it out")
    if merge and not form.takes_merged:
        raise ConfigError(
            f"--merge: --to {form.name} cannot hold a base with merged adapters; use --to huggingface or safetensors"
        )
    if adapting and not merge and not form.takes_adapters:
        merged = "; with --merge it gets the weights of both" if form.takes_merged else ""
        raise ConfigError(
            f"--to {form.name}: the run trains adapters, and its checkpoints do not hold their base; use --to peft"
            f"{merged}"
        )


def _check_free(out: Path) -> None:
    """Raise :class:`ConfigError` if ``out`` is a file, or a folder that is not empty: a folder holds only one
    export."""
    taken = "it is no folder" if out.exists() and not out.is_dir() else ""
    if out.is_dir() and any(out.iterdir()):
        taken = "it is not empty"
    if taken:
        raise ConfigError(
            f"--out {printable(str(out))}: {taken}; name another folder, or move that away"
        )


def _check_room(out: Path, size: int) -> None:
    free = disk_free_bytes(out)
    if size > free:
        raise CheckpointError(
            f"--out {printable(str(out))}: its tensors take {format_bytes(size)}, and {format_bytes(free)} are free "
            "there; free space, or name a folder on another disk"
        )
