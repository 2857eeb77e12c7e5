"""Blocks, and functions for nests: nested tuples, lists, dicts and dataclasses that contain tensors.

Stages exchange a flat tuple of tensors, but a model may return a nest. So the last block returns only the tensors, and
a template (the same nest with a :class:`TensorSlot` in place of each tensor) rebuilds the nest for the loss.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from parallax.errors import DataError

RAGGED_HELP = (
    "hand on padded rows and a tensor of their lengths, and pack or nest them inside one of the model's "
    "blocks()"
)
"""Advice for a model in which rows of several lengths would cross a block boundary."""

_PADDING = {
    "PackedSequence": "torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)",
    "nested tensor": "nested.to_padded_tensor(0.0), torch.tensor([len(row) for row in nested.unbind()])",
    "list": "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(list(map(len, rows)))",
}


@dataclass(frozen=True)
class Block:
    """A part of the model: a name, and the module that computes the part, on the meta device.

    ``module``     a module of the model, or a new module that contains modules of the model. Its parameters are the
                   model's own.
    ``unbatched``  indices of the outputs whose dimension 0 is not the micro-batch's rows (position tables, biases made
                   from parameters). Each rank of the next stage receives these outputs whole, and their gradients are
                   summed.
    ``reads``      (index, bytes) for each earlier block whose results this block uses: the bytes of these results for
                   one row. Tensors that this block only passes on to later blocks do not count. Empty if unknown.
    """

    name: str
    module: nn.Module
    unbatched: frozenset[int] = frozenset()
    reads: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Partition:
    """A model partitioned into blocks.

    ``inputs``     names of the model's arguments; empty: those of the first block's forward
    ``nest``       paths of the tensors in nested inputs; empty if the inputs are not nested
    ``template``   structure of the model's return value; None if the model returns what the last block returns
    ``sizes``      for each input, the required size of each dimension, with None for any size; empty if unknown
    ``evaluates``  False for a model that was recorded in training only
    ``trains``     False for a model that was recorded in evaluation only
    """

    blocks: tuple[Block, ...]
    inputs: tuple[str, ...] = ()
    nest: tuple[tuple[Any, ...], ...] = ()
    template: Any = None
    sizes: tuple[tuple[int | None, ...], ...] = ()
    evaluates: bool = True
    trains: bool = True


class Slot:
    """A placeholder for a value in nested containers."""


@dataclass(frozen=True)
class TensorSlot(Slot):
    """A placeholder for the tensor with number ``index``."""

    index: int


@dataclass(frozen=True)
class Field(Slot):
    """The name of a dataclass field, as a key in the paths that :func:`leaves` yields."""

    name: str

    def __str__(self) -> str:
        return self.name


def flatten(value: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Return the tensors in ``value``, depth first, and a template from which :func:`rebuild` restores ``value``."""
    found: list[Tensor] = []

    def replace(part: Any) -> Any:
        if isinstance(part, Tensor):
            found.append(part)
            return TensorSlot(len(found) - 1)
        return part

    template = transform(value, replace)
    return tuple(found), template


def rebuild(template: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the nested containers of ``template`` with ``tensors`` in place of the :class:`TensorSlot` objects."""
    return transform(
        template, lambda part: tensors[part.index] if isinstance(part, TensorSlot) else part
    )


def transform(value: Any, change: Callable[[Any], Any], kinds: tuple[type, ...] = (Tensor,)) -> Any:
    """Return ``value``, nested containers, with ``change`` applied to each leaf.

    Containers are tuples, lists, dicts and dataclasses. All other values are leaves, and so are instances of ``kinds``.
    Named tuples keep their class, and so do dataclasses that are dicts, such as the model outputs of transformers.
    """
    if isinstance(value, kinds):
        return change(value)
    if type(value) is tuple:
        return tuple([transform(part, change, kinds) for part in value])
    if isinstance(value, Mapping):
        parts = {key: transform(part, change, kinds) for key, part in value.items()}
        return type(value)(**parts) if is_record(value) else parts
    if isinstance(value, list):
        return [transform(part, change, kinds) for part in value]
    if _has_names(value):
        changed = [transform(part, change, kinds) for part in value]
        if isinstance(value, PackedSequence):
            return tuple.__new__(PackedSequence, changed)  # its constructor checks the parts
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if is_record(value):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            part = transform(getattr(value, field.name), change, kinds)
            object.__setattr__(record, field.name, part)
        return record
    return change(value)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, leaf) for each leaf in nested containers. Containers and leaves are those of :func:`transform`.

    A path lists the keys and indices that lead to the leaf. For a field of a dataclass it has a :class:`Field`.
    """
    if is_nest(value):
        for key, part in parts_of(value):
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def is_nest(value: Any) -> bool:
    """Return whether ``value`` is a tuple, list, dict or dataclass that :func:`transform` descends into."""
    return (
        isinstance(value, Mapping | list)
        or type(value) is tuple
        or _has_names(value)
        or is_record(value)
    )


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key or index, member) for each member of a tuple, list, dict or dataclass; nothing for any other value.

    The key of a dataclass's field is a :class:`Field`.
    """
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list) or type(value) is tuple or _has_names(value):
        yield from enumerate(value)
    elif is_record(value):
        for field in dataclasses.fields(value):
            yield Field(field.name), getattr(value, field.name)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    return (part for _, part in leaves(value) if isinstance(part, Tensor))


def to_device(values: Any, device: torch.device) -> Any:
    """Return ``values``, nested containers, with the tensors on ``device``.

    Copies from host to accelerator are asynchronous, through pinned memory. Work that is enqueued on the current stream
    afterwards waits for them.
    """
    return transform(
        values, lambda part: _on_device(part, device) if isinstance(part, Tensor) else part
    )


def _on_device(part: Tensor, device: torch.device) -> Tensor:
    if not comes_pinned(part, device):
        return part.to(device)
    return pinned(part).to(device, non_blocking=True)


def pinned(part: Tensor) -> Tensor:
    """Return a copy of ``part`` in pinned memory.

    Torch cannot pin a tensor whose elements share memory (``expand``), so such a tensor is made contiguous first.
    """
    shown_often = any(size > 1 and not stride for size, stride in zip(part.shape, part.stride()))
    return (part.contiguous() if shown_often else part).pin_memory()


def comes_pinned(part: Tensor, device: torch.device) -> bool:
    """Return whether pinning ``part`` helps to move it to ``device``.

    This is the case if ``part`` is a plain tensor in host memory and ``device`` is an accelerator.
    """
    plain = part.layout is torch.strided and not part.is_nested and not part.is_quantized
    return device.type != "cpu" and part.is_cpu and plain


def check_padded(what: str, values: Any) -> None:
    """Raise :class:`~parallax.errors.DataError` if ``values`` contain a PackedSequence or a nested tensor.

    These cannot be split by rows as other tensors are. ``what`` names the values in the message, such as inputs.
    """

    def check(part: Any) -> None:
        if isinstance(part, PackedSequence):
            kind = "PackedSequence"
        elif isinstance(part, Tensor) and part.is_nested:
            kind = "nested tensor"
        else:
            return
        raise DataError(
            f"{what} hold a {kind}, whose rows have several lengths: {padding_help(kind)}, and pack or nest them "
            "inside the model"
        )

    transform(values, check, (Tensor, PackedSequence))


def padding_help(kind: str = "list") -> str:
    """Return advice on how to pad rows of several lengths.

    ``kind`` is the form of the rows: a list of tensors, a PackedSequence or a nested tensor.
    """
    return f"give padded rows and a tensor of their lengths (padded, lengths = {_PADDING[kind]})"


def plain_rows(tensor: Tensor) -> Tensor:
    """Return all rows of a jagged nested tensor concatenated, or any other tensor unchanged."""
    jagged: Any = tensor
    return jagged.values() if tensor.layout is torch.jagged else tensor


def with_own_storage(values: Any) -> Any:
    """Return ``values``, nested containers, with a copy in place of each tensor that is a slice of a larger storage.

    A slice that autograd saves for backward would otherwise keep the whole batch or data set alive.
    """
    return transform(values, lambda part: part.clone() if _is_part(part) else part)


def _is_part(value: Any) -> bool:
    """Return whether ``value`` is a tensor whose storage is larger than the tensor."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.nbytes < value.untyped_storage().nbytes()


def module_repr(module: nn.Module) -> str | None:
    """Return ``repr(module)``, or None if that raises an error.

    The module's own code may print values that do not exist on the meta device.
    """
    try:
        return repr(module)
    except Exception:  # user code may raise anything
        return None


def can_require_grad(tensor: Tensor) -> bool:
    """Return whether torch computes gradients for tensors of this dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_dtype(kind: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor of dtype ``kind`` gets in a model of ``dtype``.

    Floating-point dtypes become ``dtype``. Complex dtypes become complex128 if ``dtype`` is float64, otherwise
    complex64. Other dtypes are unchanged.
    """
    if kind.is_complex:
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return dtype if kind.is_floating_point else kind


def is_record(value: Any) -> bool:
    """Return whether ``value`` is a dataclass instance, but not a :class:`Slot`."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, Slot)
    )


def _has_names(value: Any) -> bool:
    """Return whether ``value`` is a named tuple, from Python or from C (such as the result of ``torch.max``)."""
    return isinstance(value, tuple) and (
        hasattr(value, "_fields") or hasattr(value, "n_sequence_fields")
    )
