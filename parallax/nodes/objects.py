"""Exchange Python objects between ranks as JSON, which cannot carry code.

torch's own object collectives unpickle all data that they receive, so anybody who reaches a rank's port could run code
there. JSON lacks tuples, sets, bytes, and keys that are not strings. These values are encoded as ``{"#": kind, "of":
content}``, and so are paths, torch dtypes, devices and sizes, error types, and dataclasses, named tuples and
enumerations of this package.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import ParallaxError, TransportError

MOST_BYTES = 2**31  # size limit of one object
_PACKAGE = __name__.partition(".")[0]


def all_gather_object(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of ``group`` (default: all ranks), in rank order. Collective."""
    padded, lengths = _padded(write_object(value), group)
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group=group)
    return _all_read(found, lengths)


def gather_object(value: object) -> list[Any]:
    """Return the values of all ranks on rank 0, and an empty list on other ranks. Collective over all ranks."""
    padded, lengths = _padded(write_object(value), None)
    found = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else []
    dist.gather(padded, found or None)
    return _all_read(found, lengths)


def broadcast_object(value: object, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the first rank of ``group`` (default: all ranks) on every rank of it. Collective."""
    rank = dist.get_rank(group)
    data = write_object(value) if rank == 0 else b""
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=0)
    length = _checked(int(size), 0)
    held = torch.frombuffer(bytearray(data or length), dtype=torch.uint8)
    dist.broadcast(held, group=group, group_src=0)
    return value if rank == 0 else read_object(held.numpy().tobytes(), 0)


def write_object(value: object) -> bytes:
    """Return ``value`` encoded as bytes for :func:`read_object`. Raises :class:`TypeError` for an unsupported type."""
    return json.dumps(_encoded(value), separators=(",", ":")).encode()


def read_object(data: bytes, rank: int) -> Any:
    """Return the object that ``rank`` encoded as ``data`` with :func:`write_object`.

    Raises :class:`TransportError` for invalid data.
    """
    try:
        return json.loads(data, object_hook=_decoded)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        ParallaxError,
    ) as error:
        raise TransportError(
            f"rank {rank} sent something that is not data of Parallax, and it was not read "
            f"({type(error).__name__}: {error}): see who else is on the network between the hosts"
        ) from error


def _encoded(value: Any) -> Any:
    if isinstance(value, Enum):
        return _tagged("record", [_name(type(value)), [value.value]])
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value)  # including numpy's
    if isinstance(value, list):
        return list(map(_encoded, value))
    if isinstance(value, dict):
        return _tagged("dict", [[_encoded(key), _encoded(part)] for key, part in value.items()])
    if isinstance(value, torch.Size) or type(value) in (tuple, set, frozenset):
        return _tagged(type(value).__name__, list(map(_encoded, value)))
    if isinstance(value, bytes):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, PurePath | torch.device):
        return _tagged("path" if isinstance(value, PurePath) else "device", str(value))
    if isinstance(value, torch.dtype):
        return _tagged("dtype", str(value).removeprefix("torch."))
    if isinstance(value, type) and issubclass(value, ParallaxError):
        return _tagged("error", _name(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _tagged("record", [_name(type(value)), list(map(_encoded, value))])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [_encoded(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return _tagged("record", [_name(type(value)), fields])
    raise TypeError(f"a {type(value).__name__} cannot be sent between ranks")


def _tagged(kind: str, content: Any) -> dict[str, Any]:
    return {"#": kind, "of": content}


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _decoded(found: dict[str, Any]) -> Any:
    return _DECODERS[found["#"]](found["of"])


def _record(content: list[Any]) -> Any:
    """Return the dataclass, named tuple or enumeration member that ``content`` describes: the name of a class of this
    package, and the list of the arguments of its constructor.

    No other function than the constructor is called, and no module is imported.
    """
    kind = _class(content[0])
    if issubclass(kind, Enum):
        return kind(*content[1])
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*content[1])
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**dict(zip(names, content[1], strict=True)))
    raise TypeError(f"{content[0]} is no record")


def _error(name: str) -> type[ParallaxError]:
    kind = _class(name)
    if not issubclass(kind, ParallaxError):
        raise TypeError(f"{name} is no error")
    return kind


def _class(name: str) -> type:
    """Return the class of this package with the name ``name``, in the form ``module:qualified name``. Its module must
    already be imported."""
    module, _, qualname = name.partition(":")
    found = vars(sys.modules[module])[qualname]
    if module.partition(".")[0] != _PACKAGE or not isinstance(found, type) or _name(found) != name:
        raise TypeError(f"{name} is no class of {_PACKAGE}")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "path": Path,
    "device": torch.device,
    "dtype": _dtype,
    "error": _error,
    "record": _record,
}


def _padded(data: bytes, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return two results: this rank's ``data``, padded to the length of the longest data of any rank in ``group``; and
    the lengths of all these ranks' data in bytes, in rank order. Collective over ``group``."""
    device, count = _device(group), dist.get_world_size(group)
    sizes = torch.empty(count, dtype=torch.int64, device=device)
    own = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.all_gather(list(sizes.split(1)), own, group=group)
    lengths = [_checked(int(size), rank) for rank, size in enumerate(sizes.tolist())]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return padded, lengths


def _all_read(found: Sequence[Tensor], lengths: Sequence[int]) -> list[Any]:
    return [
        read_object(tensor[:length].cpu().numpy().tobytes(), rank)
        for rank, (tensor, length) in enumerate(zip(found, lengths))
    ]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group's backend needs tensors."""
    found = None if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    return found or torch.device("cpu")


def _checked(length: int, rank: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise TransportError(
            f"rank {rank} sends an object of {format_bytes(length)}, and {format_bytes(MOST_BYTES)} are the most"
        )
    return length
