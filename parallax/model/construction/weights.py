"""Read weights from safetensors files tensor by tensor, so that a stage reads only its own weights.

A checkpoint is one file, or a folder that contains ``model.safetensors`` or ``model.safetensors.index.json``. The index
names further files, called shards, as ``save_pretrained`` of transformers writes them. Nothing is unpickled. Names,
shapes and shards are checked in the files' headers, before any allocation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallax.common.documents import MANIFEST_BYTES, read_json
from parallax.errors import CheckpointError, printable
from parallax.model.files.tensors import Recipe, TensorFiles, held_in
from parallax.model.files.values import as_dtype, check_kind, is_of_eight_bits, read_dtype

_PICKLED = (b"PK\x03\x04", b"\x80")  # first bytes of torch.save files: zip, or pickle in old ones
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 5  # names in an error
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class FileLayout(Protocol):
    """The interface that describes how weight files name and store a model's tensors."""

    def recipes(self, held: Mapping[str, Tensor]) -> dict[str, Recipe]:
        """Return {name: recipe} for each tensor of the model. A recipe computes the tensor from tensors in the files.

        ``held``: {name in the files: meta tensor}.
        """
        ...

    def may_lack(self, name: str) -> bool:
        """Return whether files usually lack the model's tensor ``name``, so that no message reports it as missing."""
        ...

    def may_hold(self, name: str) -> bool:
        """Return whether the tensor ``name`` in the files may be ignored if the model has no use for it."""
        ...

    def saved(self, names: Iterable[str]) -> list[Recipe]:
        """Return recipes that compute the tensors to write to files from the model's tensors ``names``."""
        ...

    def kept_name(self, names: Sequence[str]) -> str:
        """Return the one of ``names``, which are all names of one tensor, that :meth:`saved` expects."""
        ...


class OwnLayout:
    """The layout of files that hold exactly the model's tensors, under the model's names."""

    def recipes(self, held: Mapping[str, Tensor]) -> dict[str, Recipe]:
        return {name: Recipe.same(name, name) for name in held}

    def may_lack(self, name: str) -> bool:
        del name
        return False

    def may_hold(self, name: str) -> bool:
        del name
        return False

    def saved(self, names: Iterable[str]) -> list[Recipe]:
        return [Recipe.same(name, name) for name in names]

    def kept_name(self, names: Sequence[str]) -> str:
        return names[0]


class SafetensorFiles:
    """The tensors at ``path``: a safetensors file, or a folder with such files."""

    def __init__(self, path: Path) -> None:
        self._files, held = _contents(path)
        self.held: Mapping[str, Tensor] = held

    def read(self, name: str) -> Tensor:
        with _open(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


class CheckpointWeights:
    """The tensors of the checkpoint at ``path``, which is stored in ``layout``.

    ``files``: a reader for checkpoints that are not safetensors files; None: the checkpoint consists of such files.
    """

    def __init__(self, path: Path, layout: FileLayout, files: TensorFiles | None = None) -> None:
        self._path, self._layout = path, layout
        self._files = files or SafetensorFiles(path)
        self._held = {n: t.to(read_dtype(t.dtype)) for n, t in self._files.held.items()}
        self._recipes = layout.recipes(self._held)

    def check(
        self,
        wanted: Mapping[str, Tensor],
        aliases: Mapping[str, Iterable[str]],
        ignored: Collection[str] = (),
        *,
        made: Collection[str] = (),
    ) -> list[str]:
        """Raise :class:`CheckpointError` if the files do not fit the model.

        Every tensor in ``wanted`` must exist in the files, under its name or one of its ``aliases``, with the same
        shape and kind of dtype. The files must hold no other tensors except ``ignored``. The error lists the tensors
        that do not fit.

        ``made``: tensors that the constructor initializes if they are missing, such as those of a new head. A tensor
        of a numbered layer must exist if the files hold the tensor of the same name in another layer, and at least one
        tensor in ``wanted`` must exist. If ``made`` is not empty, the files may also hold unused tensors.

        Returns a line about missing tensors and a line about unused ones; each is left out if there are none.
        """
        known = {*wanted, *ignored, *(other for names in aliases.values() for other in names)}
        missing = [name for name in wanted if self.find(name, aliases) is None]
        new = self._new_tensors(missing, made) if len(missing) < len(wanted) else set()
        lacking = [name for name in missing if name not in new]
        extra = self._extra(known)
        wrong = []
        for name, tensor in wanted.items():
            found = self.find(name, aliases)
            if found is not None and (held := self._shape(found)) != list(tensor.shape):
                wrong.append(f"{found} is {held} and must be {list(tensor.shape)}")
        problems = [
            *_problem_lines("it lacks {}", lacking),
            *_problem_lines("it has {}, which the model does not have", [] if made else extra),
            *_problem_lines("{}", wrong),
        ]
        if problems:
            raise CheckpointError(
                f"weights {self._path} do not fit this model: {'; '.join(problems)}; give the architecture and sizes "
                "that they were saved from"
            )
        self._check_numbers(wanted, aliases, extra)
        unmade = [name for name in missing if not self._layout.may_lack(name)]
        return [
            *_problem_lines("they lack {}, which the model's constructor initializes", unmade),
            *_problem_lines("they hold {}, which the model does not have: ignored", extra),
        ]

    def _check_numbers(
        self,
        wanted: Mapping[str, Tensor],
        aliases: Mapping[str, Iterable[str]],
        extra: Collection[str],
    ) -> None:
        """Raise :class:`CheckpointError` if a dtype in the files cannot be converted, or a tensor is quantized.

        ``wanted``: the model's tensors by name. ``aliases``: {name: other names of the same tensor}. ``extra``: names
        of tensors in the files that the model does not use. A tensor is quantized if its scale is among them.
        """
        for name, tensor in wanted.items():
            if (found := self.find(name, aliases)) is None:
                continue
            check_kind(found, self.without_values(found).dtype, tensor.dtype)
            for source in self._recipes[found].sources:
                if not is_of_eight_bits(dtype := self._files.held[source].dtype):
                    continue
                part = source.rpartition(".")[0]
                scales = [n for n in extra if n.rpartition(".")[0] == part and "scale" in n]
                if scales:
                    raise CheckpointError(
                        f"{printable(source)} is in {dtype} with {printable(scales[0])} beside it: quantized "
                        "weights cannot be trained; give the unquantized ones"
                    )

    def check_ties(self, aliases: Mapping[str, Iterable[str]]) -> None:
        """Raise :class:`CheckpointError` if the files hold different values under the several names of one tensor.

        ``aliases``: {name in the model: other names of the same tensor in the model}.
        """
        for name, others in aliases.items():
            first, *more = [each for each in (name, *others) if each in self._recipes] or [name]
            for other in more:
                if not torch.equal(self.read(first), self.read(other)):
                    raise CheckpointError(
                        f"weights {self._path} have {first} and {other}, which differ, but in the model they are one "
                        "tensor: untie them, for transformers with +model.config.tie_word_embeddings=false"
                    )

    def find(self, name: str, aliases: Mapping[str, Iterable[str]]) -> str | None:
        """Return the name under which the files hold the model's tensor ``name``: this name or one of its ``aliases``.

        None if the files do not hold the tensor.
        """
        return next(
            (other for other in (name, *aliases.get(name, ())) if other in self._recipes), None
        )

    def fill(self, tensor: Tensor, name: str) -> None:
        """Read the tensor ``name`` from the files into ``tensor``, converted to the dtype of ``tensor``."""
        with torch.no_grad():
            tensor.copy_(as_dtype(f"weights {self._path}: {name}", self.read(name), tensor.dtype))

    def _new_tensors(self, missing: Iterable[str], made: Collection[str]) -> set[str]:
        """Return the tensors in ``missing`` that the model's constructor may create, such as those of a new head.

        ``made`` are the candidates. A tensor of a numbered layer is excluded if the files hold the tensor of the same
        name in another layer, as ``layers.3.weight`` for ``layers.7.weight``.
        """
        there = {_NUMBER.sub("*", name) for name in self._recipes}
        return {name for name in missing if name in made and _NUMBER.sub("*", name) not in there}

    def _extra(self, known: Collection[str]) -> list[str]:
        """Return the names of the tensors in the files from which no tensor in ``known`` is computed.

        Tensors that the layout allows to be unused (:meth:`FileLayout.may_hold`) are left out.
        """
        used = {name for name, recipe in self._recipes.items() if name in known}
        sources = {source for name in used for source in self._recipes[name].sources}
        return [
            name for name in self._held if name not in sources and not self._layout.may_hold(name)
        ]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name in the model: shape} for all tensors that the files provide."""
        return {name: tuple(self._shape(name)) for name in self._recipes}

    def without_values(self, name: str) -> Tensor:
        """Return the tensor that :meth:`read` would return, on the meta device."""
        return self._recipes[name].make(self._held.__getitem__)[name]

    def read(self, name: str) -> Tensor:
        """Return the model's tensor ``name`` in the dtype of the files, or in float32 if that is float8."""
        return self._recipes[name].make(self._read)[name]

    def _read(self, name: str) -> Tensor:
        tensor = self._files.read(name)
        return tensor.to(read_dtype(tensor.dtype))

    def _shape(self, name: str) -> list[int]:
        return list(self.without_values(name).shape)


def _contents(path: Path) -> tuple[dict[str, Path], dict[str, Tensor]]:
    """Return {name: file} and {name: meta tensor} for the tensors in the safetensors files at ``path``."""
    index = path / INDEX
    if path.is_dir() and index.is_file():
        shards = sorted({path / str(name) for name in _read_index(index).values()})
    else:
        shards = [path / SINGLE if path.is_dir() else path]
    files: dict[str, Path] = {}
    held: dict[str, Tensor] = {}
    for shard in shards:
        if not shard.is_file():
            pickled = path.is_dir() and any(path.glob("*.bin"))
            why = (
                "its pickled weights (*.bin) are not supported: load and save it again with transformers"
                if pickled
                else f"give a safetensors file, or a folder with {SINGLE} or {INDEX}"
            )
            raise CheckpointError(f"weights {path}: there is no {shard.name}; {why}")
        with _open(shard) as file:
            found = held_in(file)
        held |= found
        files |= dict.fromkeys(found, shard)
    return files, held


def _read_index(index: Path) -> dict[str, str]:
    try:
        held = dict(read_json(index, MANIFEST_BYTES)["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"weights {index}: it is no valid index of shards ({error}); download it again"
        ) from error
    names = {str(name): str(file) for name, file in held.items()}
    outside = [file for file in names.values() if Path(file).name != file]
    if outside:
        raise CheckpointError(
            f"weights {index}: it names {outside[0]}, but shards must be beside their index"
        )
    return names


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        if _is_pickled(path):
            raise CheckpointError(
                f"weights {path}: it was written by torch.save, whose pickles are not supported: load "
                "it with torch.load(FILE, weights_only=True), and write it with safetensors.torch.save_file"
            ) from error
        raise CheckpointError(
            f"weights {path}: it is no readable safetensors file ({error})"
        ) from error


def _is_pickled(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(_PICKLED)
    except OSError:
        return False


def _problem_lines(text: str, names: Sequence[str]) -> list[str]:
    """Return a list of one line, ``text`` with ``names`` inserted; an empty list if ``names`` is empty."""
    return [text.format(_list(names))] if names else []


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
