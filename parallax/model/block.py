"""What a chain is made of: blocks, and the shape of what a model takes and returns.

Between blocks travels a flat tuple of tensors; a model may return tuples and dicts of them. So the last block returns
the tensors alone, and a template, the same nest with a :class:`TensorSlot` in each tensor's place, rebuilds what the
loss is given.
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
"""The way out where rows of several lengths would pass from one block to another."""

_PADDING = {
    "PackedSequence": "torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)",
    "nested tensor": "nested.to_padded_tensor(0.0), torch.tensor([len(row) for row in nested.unbind()])",
    "list": "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(list(map(len, rows)))",
}


@dataclass(frozen=True)
class Block:
    """A piece of the model on the meta device: what it is called and the module that runs it.

    The module may be one of the model's own or one that only holds some of those; either way its parameters are the
    model's. ``unbatched`` are the positions of its outputs that do not have the micro-batch's rows in dimension 0
    (tables of positions, biases made from parameters): they go whole to every peer, and their gradients are summed.
    """

    name: str
    module: nn.Module
    unbatched: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Partition:
    """A model that was cut: its blocks, the names of the first one's arguments (none: those of its forward), where
    the tensors lie in inputs that are nests of nests, the template of what the model returns (None: what the last block
    returns), and the sizes that inputs must have (None: any; empty: nothing is known)."""

    blocks: tuple[Block, ...]
    inputs: tuple[str, ...] = ()
    nest: tuple[tuple[Any, ...], ...] = ()
    template: Any = None
    sizes: tuple[tuple[int | None, ...], ...] = ()


class Slot:
    """Stands for a value in a nest."""


@dataclass(frozen=True)
class TensorSlot(Slot):
    """Stands for tensor number ``index``."""

    index: int


@dataclass(frozen=True)
class Field(Slot):
    """A key of :func:`leaves` that is the name of a dataclass's field."""

    name: str

    def __str__(self) -> str:
        return self.name


def flatten(value: Any) -> tuple[tuple[Tensor, ...], Any]:
    """The tensors in ``value``, depth first, and the template that :func:`rebuild` puts them back in."""
    found: list[Tensor] = []

    def replace(part: Any) -> Any:
        if isinstance(part, Tensor):
            found.append(part)
            return TensorSlot(len(found) - 1)
        return part

    template = transform(value, replace)
    return tuple(found), template


def rebuild(template: Any, tensors: Sequence[Tensor]) -> Any:
    """``template`` with ``tensors`` in the places of its slots."""
    return transform(
        template, lambda part: tensors[part.index] if isinstance(part, TensorSlot) else part
    )


def transform(value: Any, change: Callable[[Any], Any], kinds: tuple[type, ...] = (Tensor,)) -> Any:
    """The same nest of tuples, lists, dicts and dataclasses with every other part changed, and what is of ``kinds``
    whole. A dict that is a dataclass, as models of transformers return, stays one, and so does a tuple with names."""
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
            return tuple.__new__(PackedSequence, changed)  # its own looks at the parts
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if is_record(value):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            part = transform(getattr(value, field.name), change, kinds)
            object.__setattr__(record, field.name, part)
        return record
    return change(value)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every part that :func:`transform` would change, with the keys that lead there; :class:`Field` of a dataclass."""
    if is_nest(value):
        for key, part in parts_of(value):
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def is_nest(value: Any) -> bool:
    """Whether :func:`transform` looks inside of ``value``."""
    return (
        isinstance(value, Mapping | list)
        or type(value) is tuple
        or _has_names(value)
        or is_record(value)
    )


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a nest is made of, by the keys of :func:`leaves`; of what is no nest nothing."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list) or type(value) is tuple or _has_names(value):
        yield from enumerate(value)
    elif is_record(value):
        for field in dataclasses.fields(value):
            yield Field(field.name), getattr(value, field.name)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among :func:`leaves`."""
    return (part for _, part in leaves(value) if isinstance(part, Tensor))


def to_device(values: Any, device: torch.device) -> Any:
    """A nest with its tensors on ``device``; what is no tensor stays as it is. What comes from the host comes through
    pinned memory, for which nobody waits: work that is given to the device afterwards finds it there."""
    return transform(
        values, lambda part: _on_device(part, device) if isinstance(part, Tensor) else part
    )


def _on_device(part: Tensor, device: torch.device) -> Tensor:
    if not comes_pinned(part, device):
        return part.to(device)
    return pinned(part).to(device, non_blocking=True)


def pinned(part: Tensor) -> Tensor:
    """The same in pinned memory, where each number has a place of its own: torch pins no tensor that shows one several
    times, as ``expand`` makes."""
    shown_often = any(size > 1 and not stride for size, stride in zip(part.shape, part.stride()))
    return (part.contiguous() if shown_often else part).pin_memory()


def comes_pinned(part: Tensor, device: torch.device) -> bool:
    """Whether ``part`` is to come from the host to an accelerator, and can through pinned memory."""
    plain = part.layout is torch.strided and not part.is_nested and not part.is_quantized
    return device.type != "cpu" and part.is_cpu and plain


def check_padded(what: str, values: Any) -> None:
    """Raise :class:`~parallax.errors.DataError` where inputs or targets (``what``) hold a PackedSequence or a nested
    tensor: neither can be split by rows as other tensors are."""

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
    """Return how to pad rows of several lengths that are a list of tensors, a PackedSequence or a nested tensor."""
    return f"give padded rows and a tensor of their lengths (padded, lengths = {_PADDING[kind]})"


def plain_rows(tensor: Tensor) -> Tensor:
    """The rows of a nested tensor, one after the other; any other tensor itself."""
    jagged: Any = tensor
    return jagged.values() if tensor.layout is torch.jagged else tensor


def with_own_storage(values: Any) -> Any:
    """A nest whose tensors have memory of their own: a slice of a batch, or of a whole data set, is copied. What is
    saved of it for backward is then as large as it is, moves alone, and is gone afterwards."""
    return transform(values, lambda part: part.clone() if _is_part(part) else part)


def _is_part(value: Any) -> bool:
    """Whether ``value`` is a tensor that lies in more memory than it takes."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.nbytes < value.untyped_storage().nbytes()


def module_repr(module: nn.Module) -> str | None:
    """What ``module`` says of itself and of all inside. None where something inside has no words, as where it tells of
    its values and has none yet."""
    try:
        return repr(module)
    except Exception:  # whatever a user's own code raises
        return None


def can_require_grad(tensor: Tensor) -> bool:
    """Whether a tensor of this type can have one."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_dtype(kind: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a number of type ``kind`` becomes in a model of ``dtype``: complex numbers stay complex."""
    if kind.is_complex:
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return dtype if kind.is_floating_point else kind


def is_record(value: Any) -> bool:
    """Whether ``value`` is a dataclass's; a :class:`Slot` is a part by itself."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, Slot)
    )


def _has_names(value: Any) -> bool:
    """Whether ``value`` is a named tuple, of Python or, such as what torch.max returns, of C."""
    return isinstance(value, tuple) and (
        hasattr(value, "_fields") or hasattr(value, "n_sequence_fields")
    )
