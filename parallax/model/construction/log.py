"""What a constructor did, written down: pieces of memory, and the operations that wrote them.

Views, ``tensor.data = other`` and copies of the Python object are all one thing here: a tensor is a way of looking at
a piece of memory (a storage). An operation reads some pieces and writes others; what is in a piece at the end is
what the operations that wrote it left there, in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallax.model.private import as_class, negated, without_function_modes, without_operator_modes

_SAMPLES, _SAMPLE_BYTES = 1024, 64  # of memory from outside, to see whether it was changed


class Unrecordable(Exception):
    """The constructor does what a log cannot hold; the model is then built whole."""


class Cell:
    """A piece of memory. ``constant`` is what was in it before the first operation (None: nothing); ``writes`` are the
    places of the operations that wrote it, rising. ``storage`` has its size and no bytes; it is held so that no other
    piece gets its address."""

    __slots__ = ("constant", "number", "storage", "writes")

    def __init__(self, number: int, storage: torch.UntypedStorage, constant: Any = None) -> None:
        self.number, self.storage, self.constant = number, storage, constant
        self.writes: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes, as many as the constructor asked for at last."""
        return int(self.storage.nbytes())

    @property
    def written(self) -> bool:
        """Whether anything was ever put there."""
        return self.constant is not None or bool(self.writes) or self.nbytes == 0


class View(NamedTuple):
    """A tensor: how a piece of memory is looked at; strides and offset in elements."""

    cell: Cell
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    def as_tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, in real memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugated:
            tensor = tensor.conj()
        return negated(tensor) if self.negated else tensor

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.size:
            count *= size
        return count * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Elements from its first to its last."""
        return sum((size - 1) * stride for size, stride in zip(self.size, self.stride)) + 1

    @property
    def covers(self) -> bool:
        """Whether it is all of its piece, each element once."""
        dense = all(stride or size < 2 for size, stride in zip(self.size, self.stride))
        count = self.nbytes // self.dtype.itemsize
        return dense and self.nbytes == self.cell.nbytes and self.span == count


@dataclass(frozen=True)
class OwnState:
    """Generators that the constructor did not seed: number ``place`` of them."""

    place: int


@dataclass(frozen=True)
class SeededState:
    """The state that the constructor gave to a generator."""

    state: Tensor


@dataclass(frozen=True)
class StateAfter:
    """The state in which operation ``place`` left its generator, which the constructor had seeded."""

    place: int


Drawn = OwnState | SeededState | StateAfter


class Operation:
    """One call. Tensors among ``args`` are :class:`View`; ``reads`` are the pieces whose content matters, ``writes``
    those that it writes in place, ``outputs`` its new tensors by their place among the results, ``touches`` the pieces
    of all of these. ``floating`` is the default type in which it was called, ``drawn`` the state of the generator that
    it drew from."""

    __slots__ = (
        "args",
        "drawn",
        "floating",
        "function",
        "kwargs",
        "outputs",
        "reads",
        "touches",
        "writes",
    )

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.reads: tuple[Cell, ...] = ()
        self.writes: tuple[Cell, ...] = ()
        self.touches: tuple[Cell, ...] = ()
        self.outputs: tuple[tuple[int, View], ...] = ()
        self.floating = torch.get_default_dtype()
        self.drawn: Drawn | None = None


class OperationLog:
    """``cells`` by the address of their storage; one that came from outside is there under two, its own and that of
    its twin without bytes."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.cells: dict[int, Cell] = {}
        self._constants: list[tuple[torch.UntypedStorage, bytes]] = []

    def cell_of(self, tensor: Tensor) -> Cell | None:
        """The piece of memory that ``tensor`` looks at, where the log knows it."""
        return self.cells.get(tensor.untyped_storage()._cdata)

    def view_of(self, tensor: Tensor) -> View:
        """``tensor``, which the log knows."""
        return View(
            self.cells[tensor.untyped_storage()._cdata],
            tensor.dtype,
            tuple(tensor.size()),  # a parameter without a shape yet forbids ``shape``
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def adopt(self, tensor: Tensor) -> Tensor:
        """``tensor``, whose piece of memory is known from now on; for one from outside, whose bytes are held and not
        copied, its twin without bytes."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise Unrecordable(f"a tensor of type {tensor.dtype} and layout {tensor.layout}")
        storage = tensor.untyped_storage()
        cell = self.cells.get(storage._cdata)
        if tensor.is_meta:
            if cell is None:
                self.cells[storage._cdata] = Cell(len(self.cells), storage)
            return tensor
        if cell is None:
            bare = torch.UntypedStorage(storage.nbytes(), device="meta")
            cell = Cell(len(self.cells), bare, storage)
            self.cells[storage._cdata] = self.cells[bare._cdata] = cell
            self._constants.append((storage, fingerprint(storage)))
        return self.view_of(tensor).as_tensor(cell.storage)

    def check_constants(self) -> None:
        """What came from outside is what it was when it came. Raises :class:`Unrecordable`."""
        for storage, digest in self._constants:
            if fingerprint(storage) != digest:
                raise Unrecordable("it uses again the memory of a tensor that it was given")


def fingerprint(storage: torch.UntypedStorage) -> bytes:
    """A digest of some bytes of real memory: of all of them where they are few."""
    with without_operator_modes(), without_function_modes():
        held = torch.empty(0, dtype=torch.uint8, device=storage.device)
        held.set_(storage, 0, (storage.nbytes(),), (1,))
        if len(held) > _SAMPLES * _SAMPLE_BYTES:
            step = (len(held) - _SAMPLE_BYTES) // (_SAMPLES - 1)
            held = held.as_strided((_SAMPLES, _SAMPLE_BYTES), (step, 1)).contiguous()
        return hashlib.blake2b(held.cpu().numpy().tobytes(), digest_size=16).digest()


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """``value`` as what ``tensor`` is: a parameter, with its attributes, or not; with a gradient or not."""
    leaf = tensor.is_leaf and tensor.requires_grad
    made = as_class(type(tensor), value.detach(), leaf)
    made.__dict__.update(tensor.__dict__)
    return made
