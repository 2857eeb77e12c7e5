"""Weights in safetensors files, read tensor by tensor: a stage reads its own and no others.

A checkpoint is one file, or a folder with ``model.safetensors`` or with ``model.safetensors.index.json`` and the shards
that it names, as ``save_pretrained`` of transformers writes them. Nothing is unpickled. Everything that can be wrong
with names, shapes and shards is found from the files' headers, before anything is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallax.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 5  # names in an error


class CheckpointWeights:
    """The tensors of the checkpoint at ``path``; ``rename`` turns a file's name for one into the model's."""

    def __init__(self, path: Path, rename: Callable[[str], str] = str) -> None:
        self._path = path
        self._places = {rename(name): (file, name) for name, file in _files(path).items()}

    def check(
        self,
        wanted: Mapping[str, Sequence[int]],
        aliases: Mapping[str, Iterable[str]],
        ignored: Collection[str] = (),
    ) -> None:
        """Every name in ``wanted`` is there with its shape, under that name or one of its ``aliases``, and there is
        nothing else but for what may be ``ignored``. Raises :class:`CheckpointError` with the names."""
        known = {*wanted, *ignored, *(other for names in aliases.values() for other in names)}
        missing = [name for name in wanted if self.find(name, aliases) is None]
        extra = [name for name in self._places if name not in known]
        wrong = []
        for name, shape in wanted.items():
            found = self.find(name, aliases)
            if found is not None and (held := self._shape(found)) != list(shape):
                wrong.append(f"{found} is {held} and must be {list(shape)}")
        problems = [f"it lacks {_list(missing)}"] if missing else []
        problems += [f"it has {_list(extra)}, which the model has not"] if extra else []
        problems += [_list(wrong)] if wrong else []
        if problems:
            raise CheckpointError(
                f"weights {self._path} are not of this model: {'; '.join(problems)}; name the architecture and sizes "
                "that they were saved from"
            )

    def find(self, name: str, aliases: Mapping[str, Iterable[str]]) -> str | None:
        """Under which of its names a tensor is there: a shared one is saved once."""
        return next(
            (other for other in (name, *aliases.get(name, ())) if other in self._places), None
        )

    def fill(self, tensor: Tensor, name: str) -> None:
        """Read ``name`` into ``tensor``."""
        path, saved = self._places[name]
        with torch.no_grad(), _open(path) as file:
            tensor.copy_(file.get_tensor(saved))

    def _shape(self, name: str) -> list[int]:
        path, saved = self._places[name]
        with _open(path) as file:
            return list(file.get_slice(saved).get_shape())


def _files(path: Path) -> dict[str, Path]:
    """Name of every tensor → the file that holds it."""
    index = path / INDEX
    if path.is_dir() and index.is_file():
        shards = sorted({path / str(name) for name in _read_index(index).values()})
    else:
        shards = [path / SINGLE if path.is_dir() else path]
    files: dict[str, Path] = {}
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(
                f"weights {path}: there is no {shard.name}; give a safetensors file, or a folder with {SINGLE} or "
                f"{INDEX}"
            )
        with _open(shard) as file:
            files |= dict.fromkeys(file.keys(), shard)
    return files


def _read_index(index: Path) -> dict[str, str]:
    try:
        held = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"weights {index}: it is no index of shards ({error}); download it again"
        ) from error
    names = {str(name): str(file) for name, file in held.items()}
    outside = [file for file in names.values() if Path(file).name != file]
    if outside:
        raise CheckpointError(
            f"weights {index}: it names {outside[0]}, and shards lie beside their index"
        )
    return names


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"weights {path}: it is no readable safetensors file ({error})"
        ) from error


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
