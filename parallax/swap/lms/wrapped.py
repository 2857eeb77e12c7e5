"""Access the plain tensors inside tensor subclasses, such as the shard of a rank in a DTensor (FSDP, tensor
parallelism).

A subclass instance has a size and a device but no memory. Only its inner tensors can be counted or moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from parallax.model.private import as_plain_tensors

# types of nearly all tensors, which need no check for a wrapper
_PLAIN = frozenset((Tensor, Parameter))
Rebuild = Callable[[Iterator[Tensor]], Tensor]


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold a tensor's data on this rank: the tensor itself, or its inner tensors."""
    return take_apart(tensor)[0]


def address_of(part: Tensor) -> int:
    """Return the address of a plain tensor's memory."""
    with as_plain_tensors():
        return part.untyped_storage().data_ptr()


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank. ``nbytes`` of a tensor subclass may include other ranks."""
    return sum(part.nbytes for part in parts(tensor))


def wraps(tensor: Tensor) -> bool:
    """Return whether a tensor implements torch's ``__tensor_flatten__`` protocol of tensor subclasses."""
    return type(tensor) not in _PLAIN and all(
        hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__")
    )


def take_apart(tensor: Tensor) -> tuple[list[Tensor], Rebuild]:
    """Return a tensor's plain tensors, and a function that rebuilds the tensor subclass from replacements of them.

    The function does not reference the original tensors.
    """
    if not wraps(tensor):
        return [tensor], next
    kind: Any = type(tensor)
    names, context = kind.__tensor_flatten__(tensor)
    size, stride = tensor.size(), tensor.stride()
    found: list[Tensor] = []
    makers: dict[str, Rebuild] = {}
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):
            plain, makers[name] = take_apart(inner)
            found += plain
        else:
            makers[name] = _same(inner)  # for example a device mesh

    def rebuild(others: Iterator[Tensor]) -> Tensor:
        made = {name: make(others) for name, make in makers.items()}
        whole: Tensor = kind.__tensor_unflatten__(made, context, size, stride)
        return whole

    return found, rebuild


def _same(value: object) -> Rebuild:
    return lambda others: value  # type: ignore[return-value]
