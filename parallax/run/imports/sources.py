"""Sources of an import: files with weights and, in some formats, optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from parallax.errors import CheckpointError, printable
from parallax.model.construction.weights import (
    CheckpointWeights,
    FileLayout,
    OwnLayout,
    SafetensorFiles,
)
from parallax.model.describe import Chain
from parallax.model.files.distributed import DistributedFiles
from parallax.model.files.tensors import TensorFiles
from parallax.model.pretrained import layout_of

# How the parts of a state_dict are called: by torch.distributed.checkpoint.state_dict and torchtitan, and by others.
_OF_MODEL = ("model.", "")
_OF_OPTIMIZER = ("optimizer.state.", "optim.state.")


@dataclass(frozen=True)
class ImportSource:
    """The source files of an import. ``weights``: reads weights by the model's names. ``states``: for each parameter, a
    mapping from the name of an optimizer state to its name in ``files``. ``unread``: names in the files that are not
    recognized."""

    weights: CheckpointWeights
    files: TensorFiles
    states: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unread: Sequence[str] = ()

    def without_values(self, name: str) -> dict[str, Tensor]:
        """Return a mapping from the name of each optimizer state of the parameter ``name`` to a meta tensor (without
        values)."""
        return {key: self.files.held[held] for key, held in self.states.get(name, {}).items()}

    def read_state(self, name: str, key: str) -> Tensor:
        """Return the optimizer state ``key`` of the parameter ``name``."""
        return self.files.read(self.states[name][key])


def _safetensors(path: Path, chain: Chain) -> ImportSource:
    """Open safetensors files that use the model's own names."""
    del chain
    return _of_files(path, OwnLayout())


def _huggingface(path: Path, chain: Chain) -> ImportSource:
    """Open a folder that ``save_pretrained`` of transformers wrote."""
    return _of_files(path, layout_of(chain.model))


def _of_files(path: Path, layout: FileLayout) -> ImportSource:
    files = SafetensorFiles(path)
    return ImportSource(CheckpointWeights(path, layout, files), files)


def _distributed(path: Path, chain: Chain) -> ImportSource:
    """Open a folder in torch's distributed checkpoint format, with the state dict of a model and, optionally, of an
    optimizer."""
    files = DistributedFiles(path)
    wanted = set(chain.model.state_dict(keep_vars=True))
    prefix = max(_OF_MODEL, key=lambda each: len(wanted & _with_prefix(files.held, each).keys()))
    states = _states(path, files.held)
    used = {held for known in states.values() for held in known.values()}
    named = {n: held for n, held in _with_prefix(files.held, prefix).items() if held not in used}
    weights = CheckpointWeights(path, OwnLayout(), _Renamed(files, named))
    unread = sorted(set(files.held) - used - set(named.values()))
    return ImportSource(weights, files, states, unread)


SOURCES: dict[str, Callable[[Path, Chain], ImportSource]] = {
    "safetensors": _safetensors,
    "dcp": _distributed,
    "huggingface": _huggingface,
}


class _Renamed:
    """Some tensors of ``files``, under other names."""

    def __init__(self, files: TensorFiles, names: Mapping[str, str]) -> None:
        self._files, self._names = files, names
        self.held: Mapping[str, Tensor] = {name: files.held[old] for name, old in names.items()}

    def read(self, name: str) -> Tensor:
        """Return the values of the tensor with the new name ``name``."""
        return self._files.read(self._names[name])


def _with_prefix(names: Collection[str], prefix: str) -> dict[str, str]:
    """Return {name without ``prefix``: name} for those of ``names`` that begin with ``prefix``."""
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def _states(path: Path, names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the names of optimizer states in the files at ``path``: for each parameter a mapping from the name of a
    state, such as ``exp_avg``, to its name in the files.

    ``names`` are all names in the files at ``path``. Raises :class:`CheckpointError` if they contain a state twice.
    """
    found: dict[str, dict[str, str]] = {}
    for prefix in _OF_OPTIMIZER:
        for rest, whole in _with_prefix(names, prefix).items():
            name, _, key = rest.rpartition(".")
            if key in found.setdefault(name, {}):
                raise CheckpointError(
                    f"{printable(str(path))} has {printable(rest)} twice: below {' and '.join(_OF_OPTIMIZER)}"
                )
            found[name][key] = whole
    return found
