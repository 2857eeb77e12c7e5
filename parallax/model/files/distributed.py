"""Tensors in folders of torch's distributed checkpoint format, read without executing what such a folder says.

Its index, ``.metadata``, is a pickle. torch unpickles it, and a pickle may call any function of any module. Here the
same bytes are read by an unpickler that knows a dozen names, of torch's own records, and gives an inert record for
each: no class of torch's is made, no function is found, and another name is refused. What the records say is then
checked as data: types, names of files beside the index, places within these files.

Values lie in the other files as ``torch.save`` wrote them, one after the other. They are read with
``weights_only=True``, which is torch's own reader of tensors and nothing else.
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
LARGEST = 256 * 2**20  # bytes of an index: a few hundred for each part of a tensor
_RECORDS = "torch.distributed.checkpoint.metadata"
_PLACES = "torch.distributed.checkpoint.filesystem"


class _Record:
    """Stands for any object of torch's: what it was made of and what was set, as data."""

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
    """Finds what is known, and torch's number formats, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """An inert record, or a number format."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        found = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no part of an index and is not executed"
        )


class _StoredPiece(NamedTuple):
    """A piece of a tensor: where in it, and the run of bytes that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DistributedFiles:
    """The tensors in the folder ``path``: ``held`` without values, by their names in the state_dict, whose levels are
    joined by dots. Whatever is wrong with the folder raises :class:`CheckpointError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        records, places = self._index()
        found = {
            name: self._tensor(name, record, places)
            for name, record in records.items()
            if hasattr(record, "chunks")  # others are objects that were pickled
        }
        self.held: Mapping[str, Tensor] = {name: tensor for name, (tensor, _) in found.items()}
        self._parts = {name: parts for name, (_, parts) in found.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, put together from its parts."""
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
        """Records of tensors by name, and places of their parts."""
        file = self.path / METADATA
        try:
            if file.stat().st_size > LARGEST:
                raise CheckpointError(
                    f"{printable(str(file))} has {file.stat().st_size} bytes, and no index is read beyond {LARGEST}"
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
        except Exception as error:  # whatever an unpickler makes of bytes that are no pickle
            raise self._damaged(f"{METADATA}: {error}") from error

    def _tensor(
        self, name: str, record: Any, places: Mapping[Any, Any]
    ) -> tuple[Tensor, list[_StoredPiece]]:
        try:
            dtype, shape = _dtype(record.properties), _numbers(record.size)
            parts = [self._part(name, chunk, places) for chunk in record.chunks]
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise self._damaged(f"what {METADATA} says of {name}: {error}") from error
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
            raise self._damaged(f"the parts of {name} are not all of it, each once")
        return torch.empty(shape, dtype=dtype, device="meta"), parts

    def _part(self, name: str, chunk: Any, places: Mapping[Any, Any]) -> _StoredPiece:
        offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
        place = places[name, offsets]
        file = str(place.relative_path)
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"it names {file!r}, and files lie beside their index")
        if getattr(place, "transform_descriptors", None):
            raise ValueError("it is compressed, which is not read")
        start, length = _numbers((place.offset, place.length))
        return _StoredPiece(offsets, sizes, file, start, length)

    def _read(self, name: str, part: _StoredPiece, due: Tensor) -> Tensor:
        file = self.path / part.file
        try:
            with file.open("rb") as stream:
                stream.seek(part.start)
                data = stream.read(min(part.length, file.stat().st_size))
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch makes of bytes that are no tensor
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise self._damaged(f"{name} in {part.file}: {reason:.200}") from error
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (part.sizes, due.dtype):
            raise self._damaged(f"{part.file} holds something else where {name} is due")
        return found.detach()

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{printable(str(self.path))} is damaged, or was made to do harm ({printable(what)}): write it again"
        )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError("names of tensors are due")
    return value


def _places(value: Any) -> dict[Any, Any]:
    """By name and offset."""
    return {
        (index.fqn, _numbers(getattr(index, "offset", None) or ())): place
        for index, place in value.items()
    }


def _numbers(value: Any) -> tuple[int, ...]:
    """Whole numbers of 0 or more."""
    if not isinstance(value, tuple) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{value!r:.50} where whole numbers are due")
    return value


def _dtype(properties: Any) -> torch.dtype:
    found = properties.state[0]
    if not isinstance(found, torch.dtype):
        raise TypeError("no number format")
    return found
