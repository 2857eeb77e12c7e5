"""The trace of one forward: its instructions, in the order in which the recorder wrote them.

A trace refers to tensors by number. A tensor is an input, a tensor of the model, a tensor from outside, or the result
of an instruction. Sizes and other plain values are those of the traced run.

``torch.cat(list(features))`` over all rows would give a different number of instructions for each number of rows. So
the instruction that splits a tensor and the one that joins all its parts are fused (:func:`fuse_lists`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from parallax.model.block import Slot, TensorSlot, transform

Path = tuple[Any, ...]
"""The keys that lead to a tensor in a nest, outermost first."""


class Origin(Enum):
    """Where a tensor of a trace comes from."""

    INPUT = "input"
    MODEL = "model"
    OUTSIDE = "outside"
    MADE = "made"


@dataclass(frozen=True)
class AutocastRegion:
    """A ``torch.autocast`` context in which an instruction ran. ``device`` None is the device of the run."""

    device: str | None
    dtype: torch.dtype | None
    enabled: bool


@dataclass(frozen=True)
class Context:
    """The context of an instruction: whether gradients are enabled, and the autocast contexts, outermost first."""

    gradients: bool = True
    autocast: tuple[AutocastRegion, ...] = ()


@dataclass
class TracedTensor:
    """A tensor of a trace.

    ``shape``    the size of each dimension; empty for a nested tensor
    ``storage``  the id of the tensor's storage
    ``depends``  whether the tensor's values depend on the model's inputs
    ``name``     the name of the tensor in the model, or of the input; empty for other tensors
    ``value``    the value of a tensor from outside the model; None for other tensors
    """

    origin: Origin
    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    depends: bool
    name: str = ""
    value: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel() * self.dtype.itemsize)


@dataclass(frozen=True)
class ModulePath(Slot):
    """A placeholder for a module of the model.

    ``layer``: the submodule whose output a call returns; None: a call returns the module's own output.
    """

    path: str
    layer: str | None = None


@dataclass(frozen=True)
class SizeOf(TensorSlot):
    """A placeholder for a size: that of tensor ``index`` in ``dimension``."""

    dimension: int


def size_of(size: torch.SymInt, nested: Iterable[tuple[int, Tensor]]) -> SizeOf | None:
    """Return a placeholder for the symbolic ``size`` if one of the ``nested`` tensors has this size, otherwise None.

    ``nested`` holds pairs (number of the tensor, tensor).
    """
    for number, tensor in nested:
        for dimension, own in enumerate(tensor.shape):
            if isinstance(own, torch.SymInt) and bool(own == size):
                return SizeOf(number, dimension)
    return None


@dataclass(eq=False)
class Instruction:
    """A recorded call, with slots in place of tensors and modules.

    ``target``   the function that is called, or the path of the module
    ``results``  (path in the result, number) for each result tensor
    ``writes``   numbers of the tensors that the call changes in place
    ``owner``    the path of the module whose forward makes the call
    """

    target: Callable[..., Any] | ModulePath
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context
    owner: str
    results: tuple[tuple[Path, int], ...] = ()
    writes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        if isinstance(self.target, ModulePath):
            return self.target.path
        return str(getattr(self.target, "__name__", type(self.target).__name__))


@dataclass
class ForwardTrace:
    """The trace of one run.

    ``returned``: the model's return value with slots in place of tensors. ``dropped``: the types of other objects in
    the return value, which a stage cannot send. ``packs``: the forward sets saved-tensor hooks outside of modules, as
    torch.utils.checkpoint does.
    """

    tensors: list[TracedTensor] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    returned: Any = None
    dropped: tuple[str, ...] = ()
    packs: bool = False


HOOKS = "register_hook", "register_post_accumulate_grad_hook", "retain_grad"
"""Calls that return no tensor, but affect the backward."""

_DRAWS = ("rand", "bernoulli", "dropout", "multinomial", "normal", "exponential", "uniform")


def draws(name: str) -> bool:
    """Return whether the torch function ``name`` draws random numbers."""
    return any(word in name for word in _DRAWS)


def change(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return ``value``, nested containers, with ``replace`` applied to each leaf.

    Unlike :func:`transform`, it also replaces the parts of slices and of torch.Size.
    """

    def deeper(part: Any) -> Any:
        if isinstance(part, torch.Size):
            return tuple(replace(size) for size in part)
        if isinstance(part, slice):
            return slice(*(change(end, replace) for end in (part.start, part.stop, part.step)))
        return replace(part)

    return transform(value, deeper)


def parts(value: Any) -> list[Any]:
    """Return the leaves of a nested value, in the order in which :func:`change` replaces them."""
    found: list[Any] = []

    def note(part: Any) -> Any:
        found.append(part)
        return part

    change(value, note)
    return found


def shape_of(value: Any) -> Any:
    """Return the structure of nested containers for comparison, with None for every leaf."""
    if isinstance(value, Mapping):
        return type(value).__name__, {key: shape_of(part) for key, part in value.items()}
    if isinstance(value, slice):
        return "slice", [shape_of(end) for end in (value.start, value.stop, value.step)]
    if isinstance(value, tuple | list):
        return type(value).__name__, [shape_of(part) for part in value]
    return None


_APART = "unbind", "split", "chunk", "tensor_split", "split_with_sizes"


class ListSlot(Enum):
    """A placeholder in a call's arguments for the list of all parts of a split tensor."""

    PARTS = "parts"


def split_and_join(
    split: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    join: Callable[..., Any],
    join_args: tuple[Any, ...],
    join_kwargs: Mapping[str, Any],
) -> Any:
    """Split a tensor, and return the result of joining its parts.

    ``split(*args, **kwargs)`` returns the parts. ``join`` is then called with ``join_args`` and ``join_kwargs``, in
    which the list of parts replaces each :class:`ListSlot`.
    """
    found = list(split(*args, **kwargs))

    def put(part: Any) -> Any:
        return found if part is ListSlot.PARTS else part

    return join(*transform(join_args, put), **transform(join_kwargs, put))


def fuse_lists(trace: ForwardTrace) -> None:
    """Fuse, in ``trace``, each instruction that splits a tensor with the instructions that join all its parts, if no
    other instruction uses the parts."""
    uses = Counter(
        part.index
        for nest in [
            *((each.args, each.kwargs) for each in trace.instructions),
            trace.returned,
        ]
        for part in parts(nest)
        if isinstance(part, TensorSlot)
    )
    written = {n for each in trace.instructions for n in each.writes}
    for apart in list(trace.instructions):
        numbers = [n for _, n in apart.results]
        if apart.name not in _APART or [path for path, _ in apart.results] != [
            (i,) for i in range(len(numbers))
        ]:
            continue
        joins = [each for each in trace.instructions if _lists(each, numbers)]
        joined = sum(_lists(each, numbers) for each in joins)
        if joined and not written & set(numbers) and all(uses[n] == joined for n in numbers):
            for each in joins:
                _fuse(apart, each, numbers)
            trace.instructions.remove(apart)


def _lists(instruction: Instruction, numbers: list[int]) -> int:
    """Return how many of an instruction's arguments are a list of exactly the tensors ``numbers``."""
    return sum(
        _is_list(value, numbers) for value in (*instruction.args, *instruction.kwargs.values())
    )


def _is_list(value: Any, numbers: list[int]) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return numbers == [part.index if isinstance(part, TensorSlot) else None for part in value]


def _fuse(apart: Instruction, join: Instruction, numbers: list[int]) -> None:
    def put(value: Any) -> Any:
        return ListSlot.PARTS if _is_list(value, numbers) else value

    args = tuple(map(put, join.args))
    kwargs = {key: put(value) for key, value in join.kwargs.items()}
    join.args = (apart.target, apart.args, apart.kwargs, join.target, args, kwargs)
    join.kwargs, join.target = {}, split_and_join
