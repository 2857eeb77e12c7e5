"""The byte layout of a message's tensors, and its description for the peer.

A message is a flat tuple of tensors of any shapes. Both ends of a channel compute the same layout from a description of
types and shapes, so only the description has to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from parallax.errors import TransportError
from parallax.model.block import RAGGED_HELP

Copy = Callable[[Tensor], Tensor]
Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]  # None: no gradient
Spec = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # type and shape of each tensor

ALIGNMENT = 64  # bytes, as of torch's own tensors
LEAST = 512  # bytes of the smallest message over gloo: the header of a few tensors
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def aligned(count: int) -> int:
    """Return ``count`` bytes rounded up to the alignment of tensors."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of consecutive tensors in a buffer: the byte offset of each, and the total bytes.

    ``spec`` holds the type and the shape of each tensor, ``starts`` the byte offsets, and ``size`` the total bytes.
    ``numbers`` describes the layout as integers for the peer (:func:`read_numbers`).
    """

    spec: Spec
    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    size: int

    def views(self, buffer: Tensor, offset: int = 0) -> list[Tensor]:
        """Return one tensor per entry of the layout, each a view of ``buffer``; the first begins at byte ``offset``.

        The byte at ``offset`` must be aligned to :data:`ALIGNMENT` bytes in the memory of ``buffer``. Each view has its
        own version counter, as if it had its own memory.
        """
        storage, first = buffer.untyped_storage(), buffer.storage_offset() + offset
        return [
            torch.empty(0, dtype=dtype, device=buffer.device).set_(
                storage, (first + start) // dtype.itemsize, shape, ()
            )
            for (dtype, shape), start in zip(self.spec, self.starts)
        ]


# Placeholder for None, of a type that no gradient has. Zeros would not do: weight decay and momentum change a parameter
# whose gradient is zero, but not one without a gradient.
_NO_GRADIENT = torch.empty(0, dtype=torch.bool)


def packed(gradients: Gradients) -> Tensors:
    """Return ``gradients`` with a placeholder tensor in place of each None, as a message can hold only tensors.
    :func:`unpacked` is the inverse."""
    return tuple([_NO_GRADIENT if each is None else each for each in gradients])


def unpacked(tensors: Tensors) -> Gradients:
    """Return the gradients that were passed to :func:`packed`."""
    return tuple([None if each.dtype is torch.bool else each for each in tensors])


def spec_of(tensors: Sequence[Tensor]) -> Spec:
    """Return type and shape of each tensor."""
    return tuple([(tensor.dtype, tensor.shape) for tensor in tensors])


@lru_cache(maxsize=256)
def lay_out(spec: Spec) -> Layout:
    """Return the layout of tensors with the types and shapes in ``spec``."""
    numbers = [len(spec)]
    for dtype, shape in spec:
        if not all(type(size) is int for size in shape):
            raise TransportError(
                f"a block returned a nested tensor of shape {tuple(shape)}, and stages exchange rows of one size: "
                f"{RAGGED_HELP}"
            )
        if dtype not in _DTYPES:
            raise TransportError(
                f"a block returned {dtype}; stages exchange {', '.join(map(str, _DTYPES))}"
            )
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    *starts, end = accumulate(
        (aligned(prod(shape) * dtype.itemsize) for dtype, shape in spec), initial=0
    )
    return Layout(spec, tuple(numbers), tuple(starts), end)


@lru_cache(maxsize=256)
def read_numbers(numbers: tuple[int, ...]) -> Layout:
    """Return the layout whose :attr:`Layout.numbers` are ``numbers``."""
    spec, at = [], 1
    for _ in range(numbers[0]):
        dtype, dims = _DTYPES[numbers[at]], numbers[at + 1]
        spec.append((dtype, numbers[at + 2 : at + 2 + dims]))
        at += 2 + dims
    return lay_out(tuple(spec))


@lru_cache(maxsize=256)
def header_of(spec: Spec) -> Tensor:
    """Return the header of a message with the types and shapes in ``spec``, as bytes. It holds the size of the whole
    message in bytes, the length of :attr:`Layout.numbers`, and these numbers."""
    layout = lay_out(spec)
    count = _header_bytes(len(layout.numbers))
    numbers = torch.zeros(count // 8, dtype=torch.int64)
    described = [count + layout.size, len(layout.numbers), *layout.numbers]
    numbers[: len(described)] = torch.tensor(described)
    return numbers.view(torch.uint8)


def read_header(buffer: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the size of the whole message in bytes and its :attr:`Layout.numbers`, from the header that starts
    ``buffer``.

    If ``buffer`` ends within the header, the numbers beyond the end of ``buffer`` are missing.
    """
    numbers = buffer[:LEAST].view(torch.int64).tolist()
    whole, count = numbers[:2]
    if 2 + count > len(numbers):
        numbers = buffer[: 8 * (2 + count)].view(torch.int64).tolist()
    return whole, tuple(numbers[2 : 2 + count])


def header_size(buffer: Tensor) -> int:
    """Return the size in bytes of the header that starts ``buffer``."""
    return _header_bytes(int(buffer[8:16].view(torch.int64)))


def _header_bytes(numbers: int) -> int:
    return aligned(8 * (2 + numbers))
