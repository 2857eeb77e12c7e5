"""The plain tensors inside a tensor of a subclass: FSDP's and tensor parallelism's DTensor holds the part of one rank.

Such a wrapper has a size and a device but no memory of its own; what can be counted or moved is what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

# What nearly all are: wrappers are looked for among others alone.
_PLAIN = frozenset((Tensor, Parameter))
Rebuild = Callable[[Iterator[Tensor]], Tensor]


def parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold its memory here: itself, or what it wraps."""
    return take_apart(tensor)[0]


def local_bytes(tensor: Tensor) -> int:
    """Bytes on this rank, where ``nbytes`` of a wrapper may be those of all ranks."""
    return sum(part.nbytes for part in parts(tensor))


def wraps(tensor: Tensor) -> bool:
    """Whether it follows torch's protocol of subclasses that can be taken apart and made again."""
    return type(tensor) not in _PLAIN and all(
        hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__")
    )


def take_apart(tensor: Tensor) -> tuple[list[Tensor], Rebuild]:
    """Its parts, and what makes such a tensor of as many others; that holds none of the parts."""
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
            below, makers[name] = take_apart(inner)
            found += below
        else:
            makers[name] = _same(inner)  # a mesh of devices, say

    def rebuild(others: Iterator[Tensor]) -> Tensor:
        made = {name: make(others) for name, make in makers.items()}
        whole: Tensor = kind.__tensor_unflatten__(made, context, size, stride)
        return whole

    return found, rebuild


def _same(value: object) -> Rebuild:
    return lambda others: value  # type: ignore[return-value]
