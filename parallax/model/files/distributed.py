"""Read tensors from folders of torch.distributed.checkpoint without executing code from them.

The index of such a folder, ``.metadata``, is a pickle. When torch loads a pickle, the pickle may call any function of
any module. So a restricted unpickler is used here. It accepts a few names, mostly of torch's metadata classes, and
rejects all others. For an object of these classes it creates a plain data object, and it calls none of torch's code.
The data is then validated: types, names of files beside the index, and byte ranges within these files.

The values are in the other files, where ``torch.save`` wrote them one after the other. They are loaded with
``weights_only=True``, torch's own restricted reader of tensors.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallax.errors import CheckpointError, printable

METADATA = ".metadata"
LARGEST = 256 * 2**20  # bytes of an index, which has a few hundred per chunk of a tensor
_RECORDS = "torch.distributed.checkpoint.metadata"
_PLACES = "torch.distributed.checkpoint.filesystem"


class _Record:
    """A plain data object in place of an object in the pickle. It stores the constructor's arguments and the state."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Record,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib._local", "PosixPath"): _Record,
    ("collections", "OrderedDict"): dict,
    **{
        (_RECORDS, name): _Record
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_PLACES, "_StorageInfo"): _Record,
    (_PLACES, "_StoragePrefix"): _Record,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts the names in ``_KNOWN``, which an index contains, and torch's dtypes; it rejects all
    others.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that stands for ``module.name`` if the name is in ``_KNOWN``, or the dtype with this name.

        Raises UnpicklingError for any other name.
        """
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        found = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which an index does not contain; it is not executed"
        )


class _StoredPiece(NamedTuple):
    """A chunk of a tensor.

    ``offsets`` and ``sizes``: the range of the chunk in each dimension of the tensor. ``file``, ``start`` and
    ``length``: the file with the chunk's values, and the range of its bytes in this file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DistributedFiles:
    """The tensors in the folder ``path``, which torch.distributed.checkpoint has written.

    ``held``: {name in the state_dict: meta tensor}. The keys of nested dictionaries are joined by dots. Raises
    :class:`CheckpointError` for any defect of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        records, places = self._index()
        found = {
            name: self._tensor(name, record, places)
            for name, record in records.items()
            if hasattr(record, "chunks")  # other entries are pickled objects
        }
        self.held: Mapping[str, Tensor] = {name: tensor for name, (tensor, _) in found.items()}
        self._parts = {name: parts for name, (_, parts) in found.items()}

    def read(self, name: str) -> Tensor:
        """Return the tensor ``name``, assembled from its chunks."""
        due = self.held[name]
        parts = self._parts[name]
        if len(parts) == 1:
            return self._read(name, parts[0], due)
        whole = torch.zeros(due.shape, dtype=due.dtype)
        for part in parts:
            ranges = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes))
            whole[ranges] = self._read(name, part, due)
        return whole

    def _index(self) -> tuple[dict[str, Any], dict[Any, Any]]:
        """Return {name: metadata of a tensor}, and {(name, offsets): place of a chunk in the files}."""
        file = self.path / METADATA
        try:
            if file.stat().st_size > LARGEST:
                raise CheckpointError(
                    f"{printable(str(file))} has {file.stat().st_size} bytes; an index may have at most {LARGEST}"
                )
            with file.open("rb") as stream:
                found = _Unpickler(stream).load()
            return _mapping(found.state_dict_metadata), _places(found.storage_data)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"{printable(str(self.path))} is no folder of torch.distributed.checkpoint: there is no {METADATA}"
            ) from error
        except CheckpointError:
            raise
        except Exception as error:  # an unpickler may raise anything on malformed bytes
            raise self._damaged(f"{METADATA}: {error}") from error

    def _tensor(
        self, name: str, record: Any, places: Mapping[Any, Any]
    ) -> tuple[Tensor, list[_StoredPiece]]:
        try:
            dtype, shape = _dtype(record.properties), _numbers(record.size)
            parts = [self._part(name, chunk, places) for chunk in record.chunks]
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise self._damaged(f"the record of {name} in {METADATA}: {error}") from error
        inside = all(
            len(part.offsets) == len(part.sizes) == len(shape)
            and all(at + size <= whole for at, size, whole in zip(part.offsets, part.sizes, shape))
            for part in parts
        )
        covered = sum(math.prod(part.sizes) for part in parts)
        if (
            not inside
            or covered != math.prod(shape)
            or len({p.offsets for p in parts}) < len(parts)
        ):
            raise self._damaged(f"the chunks of {name} do not cover it exactly once")
        return torch.empty(shape, dtype=dtype, device="meta"), parts

    def _part(self, name: str, chunk: Any, places: Mapping[Any, Any]) -> _StoredPiece:
        offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
        place = places[name, offsets]
        file = str(place.relative_path)
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"it names {file!r}, but files must be beside their index")
        if getattr(place, "transform_descriptors", None):
            raise ValueError("it is compressed, which is not supported")
        start, length = _numbers((place.offset, place.length))
        return _StoredPiece(offsets, sizes, file, start, length)

    def _read(self, name: str, part: _StoredPiece, due: Tensor) -> Tensor:
        file = self.path / part.file
        try:
            with file.open("rb") as stream:
                stream.seek(part.start)
                data = stream.read(min(part.length, file.stat().st_size))
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load may raise anything on malformed bytes
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise self._damaged(f"{name} in {part.file}: {reason:.200}") from error
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (part.sizes, due.dtype):
            raise self._damaged(f"{part.file} does not hold {name} where it should")
        return found.detach()

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{printable(str(self.path))} is damaged or malicious ({printable(what)}): write it again"
        )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError("expected names of tensors")
    return value


def _places(value: Any) -> dict[Any, Any]:
    """Return {(name, offsets): place of a chunk in the files}."""
    return {
        (index.fqn, _numbers(getattr(index, "offset", None) or ())): place
        for index, place in value.items()
    }


def _numbers(value: Any) -> tuple[int, ...]:
    """Return ``value`` if it is a tuple of non-negative integers; raise ValueError otherwise."""
    if not isinstance(value, tuple) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{value!r:.50} is no tuple of non-negative integers")
    return value


def _dtype(properties: Any) -> torch.dtype:
    found = properties.state[0]
    if not isinstance(found, torch.dtype):
        raise TypeError("expected a dtype")
    return found
