"""Python objects between ranks: pickled, and where the run has a secret, unpickled only if its holder has signed them.

A signature is of the object, who sent it, and the how manyth of its group it is, so none can be sent again or as
another's. Tensors travel without: who could change them could spoil a training, but run nothing.
"""

from __future__ import annotations

import hmac
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import TransportError

MOST_BYTES = 2**31  # of one object
_TAG_BYTES = 32
_UNSIGNED = b""

_key = _UNSIGNED
_sent: Counter[str] = Counter()  # by group


def sign_with(key: bytes) -> None:
    """From now on, by this key; empty: not at all."""
    global _key
    _key = key
    _sent.clear()


def all_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """One value of every rank of ``group`` (torch's world), on every rank; called by all of them."""
    label = _label(group)
    padded, lengths = _padded(_sealed(value, label, dist.get_rank(group)), group)
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group=group)
    return _all_opened(found, lengths, label)


def objects_for_first(value: object) -> list[Any]:
    """One value of every rank of torch's world, on rank 0, and nothing on others; called by all of them."""
    label, mine = _label(None), dist.get_rank()
    padded, lengths = _padded(_sealed(value, label, mine), None)
    found = [torch.empty_like(padded) for _ in lengths] if mine == 0 else []
    dist.gather(padded, found or None)
    return _all_opened(found, lengths, label)


def object_of_first(value: object) -> Any:
    """The value of rank 0 of torch's world, on every rank; called by all of them."""
    label, rank = _label(None), dist.get_rank()
    data = _sealed(value, label, 0) if rank == 0 else b""
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, 0)
    length = _checked(int(size), 0)
    held = torch.frombuffer(bytearray(data or length), dtype=torch.uint8)
    dist.broadcast(held, 0)
    return value if rank == 0 else _opened(held.numpy().tobytes(), label, 0)


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


def _all_opened(found: Sequence[Tensor], lengths: Sequence[int], label: str) -> list[Any]:
    return [
        _opened(tensor[:length].cpu().numpy().tobytes(), label, rank)
        for rank, (tensor, length) in enumerate(zip(found, lengths))
    ]


def _label(group: dist.ProcessGroup | None) -> str:
    name = str((group or dist.group.WORLD).group_name)  # type: ignore[union-attr]
    _sent[name] += 1
    return f"{name} {_sent[name]}"


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend wants its tensors."""
    found = None if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    return found or torch.device("cpu")


def _sealed(value: object, label: str, rank: int) -> bytes:
    data = pickle.dumps(value)
    return _tag(data, label, rank) + data


def _opened(data: bytes, label: str, rank: int) -> Any:
    if _key:
        tag, data = data[:_TAG_BYTES], data[_TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(data, label, rank)):
            raise TransportError(
                f"what came as rank {rank}'s is not signed with the run's secret, and was not read: see who else is on "
                "the network between the hosts"
            )
    return pickle.loads(data)


def _tag(data: bytes, label: str, rank: int) -> bytes:
    return hmac.digest(_key, f"{label} {rank}\0".encode() + data, "sha256") if _key else _UNSIGNED


def _checked(length: int, rank: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise TransportError(
            f"rank {rank} sends an object of {format_bytes(length)}, and {format_bytes(MOST_BYTES)} are the most"
        )
    return length
