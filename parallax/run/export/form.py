"""The interfaces of an export: the checkpoint with its model, the tensors, and the output format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from parallax.errors import CheckpointError
from parallax.model.pretrained import tied_names
from parallax.model.source import ModelConfig
from parallax.runtime.checkpoint import CheckpointReader


@dataclass(frozen=True)
class Exported:
    """The result of an export: the folder that was written, the step of the exported checkpoint, the bytes of all
    tensors, the names of the written ``files``, and ``remarks``: messages for the user, for example about parts that
    are missing."""

    directory: Path
    step: int
    weight_bytes: int
    files: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """The contents of an export, which are not written yet. ``size``: their bytes. ``write(folder)`` writes the files,
    and returns messages for the user."""

    size: int
    write: Callable[[Path], list[str]]


class Weights(Protocol):
    """The values of a model's tensors, by the model's names."""

    def held(self) -> dict[str, Tensor]:
        """Return a mapping from name to meta tensor (without values), for the tensors to export."""
        ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint, read by ``reader``."""

    reader: CheckpointReader

    def held(self) -> dict[str, Tensor]:
        """Return a mapping from name to meta tensor (without values), for the model's tensors in the checkpoint."""
        return self.reader.model_tensors()

    def read(self, name: str) -> Tensor:
        """Return the values of one tensor."""
        return self.reader.read(f"model/{name}")


@dataclass(frozen=True)
class Trained:
    """A checkpoint to export, and its model, which is on the meta device. ``weights``: the weights to export, for
    example with merged adapters. ``reader``: reads the checkpoint. ``settings``: the settings of the run."""

    model: nn.Module
    reader: CheckpointReader
    settings: Any
    weights: Weights

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self.settings.model
        return config

    @property
    def beginning(self) -> Path | None:
        """Return the transformers folder whose weights the run started from; None if there is none."""
        folder = self.config.exported_from
        return Path(folder).expanduser() if folder else None

    def names(self) -> list[list[str]]:
        """Return, for each saved tensor of the model, a list of its names. The first is the name in the checkpoint."""
        return all_names(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """Return a mapping from name to meta tensor (without values), for the tensors of the model that the checkpoint
        holds. Raises :class:`CheckpointError` for a checkpoint of another model."""
        known, found = self.model.state_dict(keep_vars=True), self.weights.held()
        due = {names[0]: known[names[0]].shape for names in self.names()}
        wrong = [
            name
            for name in {**due, **found}
            if name not in found or due.get(name) != found[name].shape
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CheckpointError(
                f"{self.reader.directory} is not of the model in the run's present settings: {', '.join(wrong[:3])}"
                f"{more}; restore what they name (model.pretrained, model.target)"
            )
        return found

    def read(self, name: str) -> Tensor:
        """Return the values of one tensor of the model."""
        return self.weights.read(name)


class ExportForm(Protocol):
    """A file format of another library. ``takes_adapters``: whether the format can hold adapters alone, without the
    base model. ``takes_merged``: whether it can hold a base model with merged adapters, which has no optimizer
    states."""

    name: str
    takes_adapters: bool
    takes_merged: bool

    def contents(self, trained: Trained) -> Contents:
        """Return the files to write for ``trained``, as :class:`Contents`. Raises :class:`ConfigError` if the model
        cannot be exported in this format."""
        ...


def all_names(model: nn.Module) -> list[list[str]]:
    """Return, for each saved tensor of ``model``, a list of its names in the order of the model."""
    aliases = tied_names(model)
    others = {other for names in aliases.values() for other in names}
    known = model.state_dict(keep_vars=True)
    return [[name, *aliases.get(name, ())] for name in known if name not in others]
