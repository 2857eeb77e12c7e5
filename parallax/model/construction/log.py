"""The log of a constructor: its storages, and the operations that wrote them.

Each tensor is logged as a view of a storage. This also describes views, ``tensor.data = other`` and copies of a tensor
object. An operation reads some storages and writes others. The final content of a storage is determined by the
operations that wrote it, in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallax.model.private import as_class, negated, without_function_modes, without_operator_modes

_SAMPLES, _SAMPLE_BYTES = 1024, 64  # samples of memory from outside, to detect changes


class Unrecordable(Exception):
    """Raised if the constructor does something that the log cannot represent.

    The whole model is then built without recording.
    """


class Cell:
    """The log's entry for one storage of the constructor.

    ``constant``: the storage's content before the first operation; None: uninitialized. ``writes``: ascending indices
    of the operations that wrote the storage. ``storage``: the storage on the meta device; the reference keeps it alive,
    so that its address is not reused.
    """

    __slots__ = ("constant", "number", "storage", "writes")

    def __init__(self, number: int, storage: torch.UntypedStorage, constant: Any = None) -> None:
        self.number, self.storage, self.constant = number, storage, constant
        self.writes: list[int] = []

    @property
    def nbytes(self) -> int:
        """The size in bytes after the constructor's last resize."""
        return int(self.storage.nbytes())

    @property
    def written(self) -> bool:
        """Whether the storage has been initialized, by a constant or an operation."""
        return self.constant is not None or bool(self.writes) or self.nbytes == 0


class View(NamedTuple):
    """A tensor described as a view of the storage of ``cell``. Strides and offset are in elements.

    ``conjugated`` and ``negated``: the tensor's values are the conjugates, or the negatives, of the stored numbers.
    """

    cell: Cell
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    def as_tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that this view describes, on the given ``storage``."""
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
        """The number of elements from the first to the last element of the view."""
        return sum((size - 1) * stride for size, stride in zip(self.size, self.stride)) + 1

    @property
    def covers(self) -> bool:
        """Whether the view contains each element of its storage exactly once."""
        dense = all(stride or size < 2 for size, stride in zip(self.size, self.stride))
        count = self.nbytes // self.dtype.itemsize
        return dense and self.nbytes == self.cell.nbytes and self.span == count


@dataclass(frozen=True)
class OwnState:
    """The random state for draw number ``place``, which is computed from the run's seed and this number.

    Only draws for which the constructor set no seed are numbered.
    """

    place: int


@dataclass(frozen=True)
class SeededState:
    """The random state to which the constructor set a generator."""

    state: Tensor


@dataclass(frozen=True)
class StateAfter:
    """The random state of a generator after operation ``place``, for a generator that the constructor seeded."""

    place: int


Drawn = OwnState | SeededState | StateAfter


class Operation:
    """A logged operator call. A :class:`View` replaces each tensor in ``args`` and ``kwargs``.

    ``reads``     storages that the call reads
    ``writes``    storages that the call writes in place
    ``outputs``   (index in the results, view) for each new tensor
    ``touches``   all storages that the call reads, writes or creates
    ``floating``  torch's default dtype at the call
    ``drawn``     the random state from which the call draws; None if the call draws no random numbers
    """

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
    """The recorded operations, and a :class:`Cell` for each storage.

    Cells are found by the storage's address. A storage that existed before the constructor has two addresses: its own,
    and that of its copy on the meta device.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.cells: dict[int, Cell] = {}
        self._constants: list[tuple[torch.UntypedStorage, bytes]] = []

    def cell_of(self, tensor: Tensor) -> Cell | None:
        """Return the log's entry for the storage of ``tensor``, or None if the storage is not in the log."""
        return self.cells.get(tensor.untyped_storage()._cdata)

    def view_of(self, tensor: Tensor) -> View:
        """Return the description of ``tensor``, whose storage is in the log, as a view of this storage."""
        return View(
            self.cells[tensor.untyped_storage()._cdata],
            tensor.dtype,
            tuple(tensor.size()),  # ``shape`` raises for a lazy parameter
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def adopt(self, tensor: Tensor) -> Tensor:
        """Add the storage of ``tensor`` to the log, and return ``tensor`` on the meta device.

        A tensor that existed before the constructor is real. For such a tensor a new meta tensor is returned, and the
        memory is kept alive without a copy.
        """
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
        """Raise :class:`Unrecordable` if memory that existed before the constructor has changed since it was added to
        the log.
        """
        for storage, digest in self._constants:
            if fingerprint(storage) != digest:
                raise Unrecordable("it reuses the memory of a tensor that the log refers to")


def fingerprint(storage: torch.UntypedStorage) -> bytes:
    """Return a digest of a storage's bytes. For a large storage, only samples are digested."""
    with without_operator_modes(), without_function_modes():
        held = torch.empty(0, dtype=torch.uint8, device=storage.device)
        held.set_(storage, 0, (storage.nbytes(),), (1,))
        if len(held) > _SAMPLES * _SAMPLE_BYTES:
            step = (len(held) - _SAMPLE_BYTES) // (_SAMPLES - 1)
            held = held.as_strided((_SAMPLES, _SAMPLE_BYTES), (step, 1)).contiguous()
        return hashlib.blake2b(held.cpu().numpy().tobytes(), digest_size=16).digest()


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the class, attributes and requires_grad of ``tensor``."""
    leaf = tensor.is_leaf and tensor.requires_grad
    made = as_class(type(tensor), value.detach(), leaf)
    made.__dict__.update(tensor.__dict__)
    return made
