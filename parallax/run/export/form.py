"""What an export is made of: a run's last checkpoint with its model, and a form in which others load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from parallax.errors import CheckpointError
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.factory.registry import BuiltModelConfig
from parallax.model.pretrained import tied_names
from parallax.runtime.checkpoint import CheckpointReader


@dataclass(frozen=True)
class Exported:
    """What was written: where, of which step, how many bytes of tensors, which ``files``, and ``remarks`` on what was
    not to be had."""

    directory: Path
    step: int
    weight_bytes: int
    files: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """What will be written: its bytes, and ``write``, which puts it into a folder and returns what is to be said of
    it."""

    size: int
    write: Callable[[Path], list[str]]


@dataclass(frozen=True)
class Trained:
    """A checkpoint and the model that it is of, which has no values. ``settings`` are the run's."""

    model: nn.Module
    reader: CheckpointReader
    settings: Any

    @property
    def config(self) -> BuiltModelConfig:
        config: BuiltModelConfig = self.settings.model
        return config

    @property
    def beginning(self) -> Path | None:
        """The folder of transformers that the run began with."""
        if isinstance(self.config, HuggingFaceConfig) and self.config.pretrained:
            return Path(self.config.pretrained).expanduser()
        return None

    def names(self) -> list[list[str]]:
        """All names of each tensor of the model that is saved, the checkpoint's first."""
        return all_names(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """What the checkpoint has of the model, without values. Raises :class:`CheckpointError` where it is of
        another."""
        known, found = self.model.state_dict(keep_vars=True), self.reader.model_tensors()
        due = {names[0]: known[names[0]].shape for names in self.names()}
        wrong = [
            name
            for name in {**due, **found}
            if name not in found or due.get(name) != found[name].shape
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CheckpointError(
                f"{self.reader.directory} is not of the model that the run's settings say now: {', '.join(wrong[:3])}"
                f"{more}; restore what they name (model.pretrained, model.target)"
            )
        return found

    def read(self, name: str) -> Tensor:
        """One tensor of the model."""
        return self.reader.read(f"model/{name}")


class ExportForm(Protocol):
    """A form in which others load what a run has trained. ``takes_adapters``: it is for what a run trains beside a
    base, which its checkpoints do not hold."""

    name: str
    takes_adapters: bool

    def contents(self, trained: Trained) -> Contents:
        """What is to be written of ``trained``. Raises :class:`ConfigError` where that has no such form."""
        ...


def all_names(model: nn.Module) -> list[list[str]]:
    """All names of each tensor of ``model`` that is saved, the first one first."""
    aliases = tied_names(model)
    others = {other for names in aliases.values() for other in names}
    known = model.state_dict(keep_vars=True)
    return [[name, *aliases.get(name, ())] for name in known if name not in others]
