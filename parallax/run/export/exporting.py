"""Write the last checkpoint of a run in another format.

Tensors are read, converted and written one by one. Only tensors that are converted together, such as the experts of one
layer, are in memory at once. The contents of the files follow from the checkpoint's headers, so they are known before
anything is written.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from parallax.common.files import disk_free_bytes, making_folder
from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, ConfigError, printable
from parallax.model.construction.deferred import deferred_init
from parallax.run.export.form import Exported, ExportForm, Trained
from parallax.run.job import built_model
from parallax.run.resume import StoredRun
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints


def export(run: StoredRun, form: ExportForm, out: Path | None) -> Exported:
    """Write the last checkpoint of ``run`` in the format ``form`` to the folder ``out``; by default, to a folder in the
    run's directory named after the step. The folder is either written completely or not at all."""
    checkpoint = _last(run)
    out = out or run.directory / form.name / checkpoint.name
    _check_free(out)
    config = built_model(run.config)
    model = deferred_init(config.build, run.config.seed).model
    adapting = config.base(run.config.seed) != ""
    if adapting and not form.takes_adapters:
        raise ConfigError(
            f"--to {form.name}: the run trains adapters, and its checkpoints do not hold their base; use --to peft"
        )
    reader = CheckpointReader(checkpoint)
    reader.check_whole()
    contents = form.contents(Trained(model, reader, run.config))
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
    return Exported(out, reader.step, contents.size, tuple(files), tuple(remarks))


def _last(run: StoredRun) -> Path:
    found = list_checkpoints(run.config.checkpoint.folder(run.directory, run.config.name))
    if not found:
        raise ConfigError(
            f"{printable(str(run.directory))} has no checkpoint yet: a run saves every trainer.checkpoint_every "
            "steps, at its end, and where SIGTERM or Ctrl-C ends it"
        )
    return max(found, key=_history)


def _history(checkpoint: Path) -> tuple[float, str]:
    """Return a sort key for checkpoints: the latest start comes last, and within a start the last step."""
    try:
        return CheckpointReader(checkpoint).started, checkpoint.name
    except CheckpointError:
        return -1.0, checkpoint.name


def _check_free(out: Path) -> None:
    """Raise :class:`ConfigError` if ``out`` is a file, or a folder with files: a folder holds one export only."""
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
