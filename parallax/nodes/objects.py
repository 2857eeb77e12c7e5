"""Python objects between ranks: values and records of this package, never code.

Torch's own collectives of objects unpickle whatever they receive, so whoever reaches a rank's port could run code
there. The unpickler here knows builtin values, the records of Parallax (dataclasses, enumerations, named tuples,
errors), and a few types of torch and ``pathlib``; it refuses every other name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import ParallaxError, TransportError

MOST_BYTES = 2**31  # of one object
_PACKAGE = __name__.partition(".")[0]
_OTHERS = frozenset([("pathlib", "PosixPath"), ("torch", "Size"), ("torch", "device")])


def all_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return one value of every rank of ``group`` (torch's world), on every rank; called by all of them."""
    padded, lengths = _padded(pickle.dumps(value), group)
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group=group)
    return _all_read(found, lengths)


def objects_for_first(value: object) -> list[Any]:
    """Return one value of every rank of torch's world on rank 0, and an empty list on others; called by all of them."""
    padded, lengths = _padded(pickle.dumps(value), None)
    found = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else []
    dist.gather(padded, found or None)
    return _all_read(found, lengths)


def object_of_first(value: object) -> Any:
    """Return the value of rank 0 of torch's world on every rank; called by all of them."""
    rank = dist.get_rank()
    data = pickle.dumps(value) if rank == 0 else b""
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, 0)
    length = _checked(int(size), 0)
    held = torch.frombuffer(bytearray(data or length), dtype=torch.uint8)
    dist.broadcast(held, 0)
    return value if rank == 0 else read_object(held.numpy().tobytes(), 0)


def read_object(data: bytes, rank: int) -> Any:
    """Return the object that ``data`` of rank ``rank`` is. Raises :class:`TransportError` where it is no pickle of
    values and records of this package."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # whatever bytes make of an unpickler
        raise TransportError(
            f"rank {rank} sent something that is not data of Parallax, and it was not read "
            f"({type(error).__name__}: {error}): see who else is on the network between the hosts"
        ) from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        ours = module.partition(".")[0] == _PACKAGE
        # A name with dots would lead from a module of ours to those that it imports.
        if "." not in name and (ours or module == "torch" or (module, name) in _OTHERS):
            found = super().find_class(module, name)
            if (module, name) in _OTHERS or isinstance(found, torch.dtype) or _is_record(found):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def _is_record(found: Any) -> bool:
    """Whether ``found`` is a class of Parallax that only holds values: a dataclass, an enumeration, a named tuple or
    an error."""
    if not isinstance(found, type) or found.__module__.partition(".")[0] != _PACKAGE:
        return False
    named = issubclass(found, tuple) and hasattr(found, "_fields")
    return is_dataclass(found) or issubclass(found, Enum | ParallaxError) or named


def _padded(data: bytes, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """``data`` in as many bytes as that of any rank takes, and how many that of each does."""
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
    """Where the group's backend wants its tensors."""
    found = None if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    return found or torch.device("cpu")


def _checked(length: int, rank: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise TransportError(
            f"rank {rank} sends an object of {format_bytes(length)}, and {format_bytes(MOST_BYTES)} are the most"
        )
    return length
