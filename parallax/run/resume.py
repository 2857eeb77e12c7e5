"""Resume a run with its stored settings and the overrides that its checkpoint allows.

The directory of a run holds its settings, so its name is enough to resume it. Overrides are applied to the stored
settings. Settings that a checkpoint depends on cannot be changed, since that would train another model under the old
name. Such changes are refused, key by key, before anything is measured or written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallax import config as configuration
from parallax.common.documents import LARGEST, read_text
from parallax.common.terminal import safe_console
from parallax.common.trust import check_named, class_paths
from parallax.config import RunConfig
from parallax.errors import CheckpointError, ConfigError, DataError, nearest, printable
from parallax.model.describe import Chain, parameter_names
from parallax.run.job import built_model, open_source, with_steps
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints, step_of

STORED = "config.yaml"
# Given a file and the class paths in it, key by key.
Trusts = Callable[[Path, Mapping[str, str]], None]
_SHOWN = 6  # settings in one line


@dataclass(frozen=True)
class StoredRun:
    """The directory of a run and its stored settings."""

    directory: Path
    config: RunConfig

    @classmethod
    def read(cls, directory: Path, trusts: Trusts = lambda file, found: None) -> StoredRun:
        """Read the stored settings. ``trusts(file, class_paths)`` raises an error if the class paths in the file must
        not be imported."""
        text = read_stored(directory)
        trusts(directory / STORED, class_paths(text))
        return cls(directory, load_stored(directory / STORED, text))


@dataclass(frozen=True)
class Settings:
    """The settings to train with. ``changed``: one line for each override that differs from the stored settings; None
    for a new run. ``rate``: how the overrides change the learning rate of the next step; empty if they do not."""

    config: RunConfig
    changed: list[str] | None
    rate: str = ""


def settings(overrides: Sequence[str], runs: Path) -> Settings:
    """Return the settings that ``overrides`` define. If the overrides name a run in ``runs``, they are applied to the
    stored settings of that run. If there is no such run, or with ``trainer.resume=never``, they are applied to the
    defaults."""
    name = configuration.override_value(overrides, "name")
    if (
        name == "auto"
        or not configuration.is_name(name)
        or configuration.override_value(overrides, "trainer.resume") == "never"
    ):
        return Settings(configuration.compose(overrides), None)
    directory = runs / name
    text = read_stored(directory) if (directory / STORED).exists() else None
    if text is None:
        return Settings(configuration.compose(overrides), None)
    file = directory / STORED
    check_named(file, class_paths(text), overrides)
    stored = load_stored(file, text)
    config = with_steps(configuration.compose(overrides, _without_other_length(stored, overrides)))
    check_resumable(directory, stored, config)
    changed = [
        f"{key}: {old} -> {new}"
        for key, (old, new) in configuration.changes(stored, config).items()
    ]
    changed = [line for line in changed if not line.startswith("name: ")]
    return Settings(config, changed, _rate_change(directory, stored, config))


def _without_other_length(stored: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the stored settings, without the length of the run if ``overrides`` replace it. If only steps are set, the
    stored epochs are removed. If the length is given in epochs, the stored steps are removed, because they depend on
    other settings, such as the batch."""
    steps, epochs = (
        configuration.override_value(overrides, f"trainer.{key}") for key in ("steps", "epochs")
    )
    if steps:
        return stored if epochs else replace(stored, trainer=replace(stored.trainer, epochs=0))
    if epochs or stored.trainer.epochs:
        return replace(stored, trainer=replace(stored.trainer, steps=0))
    return stored


def _rate_change(directory: Path, stored: RunConfig, config: RunConfig) -> str:
    """Return a text that tells the learning rate of the next step under ``config``, and under ``stored``, the stored
    settings. The text is empty if the rates are equal, or if there is no next step after a checkpoint."""
    found = list_checkpoints(config.checkpoint.folder(directory, config.name))
    done = (step_of(found[-1]) or 0) if found else 0
    before, after = stored.trainer.steps, config.trainer.steps
    old, new = _rate(stored, done), _rate(config, done)
    if not 0 < done < after or math.isclose(old, new):
        return ""
    ends = f", as the schedule now ends at step {after} and not {before}" if before != after else ""
    return (
        f"the learning rate of step {done + 1} is {new:.3g} and not {old:.3g}{ends}; at its end it is "
        f"{_rate(config, after - 1):.3g}"
    )


def _rate(config: RunConfig, step: int) -> float:
    return config.optimizer.lr * config.schedule.factor(step, config.trainer.steps)


def read_stored(directory: Path) -> str:
    """Return the text of a run's stored settings."""
    try:
        return read_text(directory / STORED, 4 * LARGEST)  # bytes; letters are counted later
    except OSError as error:
        reason = f"{error.strerror} for {STORED}"
        with contextlib.suppress(OSError):
            if not directory.exists():
                runs = (each.name for each in directory.parent.iterdir() if each.is_dir())
                reason = f"there is no such folder{printable(nearest(directory.name, runs))}"
    except UnicodeDecodeError:
        reason = f"{STORED} is no text"
    except ValueError as error:  # an invalid path, or invalid content
        reason = f"{STORED}: {printable(str(error))}"
    raise ConfigError(f"{printable(str(directory))} is no run directory: {reason}")


def load_stored(file: Path, text: str) -> RunConfig:
    """Return the stored settings from their ``text``. The user must trust the class paths in ``file``. Settings that an
    earlier version did not store get their defaults, and a printed line names these settings."""
    added: list[str] = []
    try:
        config = configuration.load(text, added)
    except ConfigError as error:
        raise ConfigError(
            f"{printable(str(file))} is damaged or of another version: {error}; restore it, or move it away and give "
            "all settings again"
        ) from error
    if added:
        more = f" and {len(added) - _SHOWN} more" if len(added) > _SHOWN else ""
        safe_console(stderr=True).print(
            f"{printable(str(file))} was written before these settings existed, and gets their defaults: "
            f"{', '.join(added[:_SHOWN])}{more}",
            highlight=False,
            soft_wrap=True,
        )
    return config


def check_resumable(directory: Path, stored: RunConfig, config: RunConfig) -> None:
    """Raise :class:`ConfigError`, with each key and both values, if the run's checkpoint cannot be used with the
    settings ``config``."""
    found = list_checkpoints(config.checkpoint.folder(directory, config.name))
    if not found:
        return
    lost = list(_lost(stored, config, found[-1]))
    if lost:
        more = f"; and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise ConfigError(
            f"{directory} cannot resume with {'; '.join(lost[:_SHOWN])}{more}: its checkpoint {found[-1].name} needs "
            "the old value; leave the change out, or start another run with name=OTHER"
        )


def check_model_of(folder: Path, chain: Chain) -> None:
    """Raise :class:`CheckpointError`, with names, if the last checkpoint in ``folder`` is of another model than
    ``chain``, because code may have changed although the settings are equal. ``chain`` has no weights yet. A damaged
    checkpoint is ignored here. The code that loads checkpoints reports the damage and uses an older checkpoint."""
    for path in list_checkpoints(folder)[-1:]:
        with contextlib.suppress(CheckpointError):
            reader = CheckpointReader(path)
            break
    else:
        return
    names = set(parameter_names(chain, range(len(chain.blocks)))) - chain.left_out
    reader.check_names(names, chain.fingerprint(), chain.structure(), str(chain.dtype))


def _lost(stored: RunConfig, config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Yield ``key: old -> new`` for each changed setting that the checkpoint does not allow."""
    for key, (old, new) in configuration.changes(stored, config).items():
        group, _, setting = key.partition(".")
        if group == "data" and setting in config.data.reading:
            continue
        fixed = key in ("seed", "optimizer.name", "optimizer.target") or (
            group == "model" and key != "model.verify"
        )
        if key == "precision.parameters":
            # A checkpoint of adapters identifies the base model by checksums, which depend on its number format.
            adapting = built_model(stored).base(stored.seed) != ""
            fixed = adapting or stored.precision.masters != config.precision.masters
        if fixed or (group == "data" and not _same_rows(config, checkpoint)):
            yield f"{key}: {old} -> {new}"


def _same_rows(config: RunConfig, checkpoint: Path) -> bool:
    """Whether the data certainly have the same rows as the data that the checkpoint was trained on, even if the path
    differs. False if the rows cannot be compared."""
    if not config.data.identifies_rows:
        return False
    try:
        state = CheckpointReader(checkpoint).state["source"]
        return bool(state["fingerprint"] == getattr(open_source(config), "fingerprint", None))
    except (KeyError, TypeError, CheckpointError, DataError):
        return False
