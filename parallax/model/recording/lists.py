"""Lists that are as long as there are rows: ``torch.cat(list(features))`` is one step, however many parts it joins.

A tensor is taken apart, and all of its parts go in their order into calls that join them. The number of parts differs
between runs, so no program could name them; taken apart and joined in one step it does not have to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from parallax.model.block import TensorSlot, transform
from parallax.model.recording.trace import ForwardTrace, Instruction, parts

_APART = "unbind", "split", "chunk", "tensor_split", "split_with_sizes"


class Place(Enum):
    """Stands in arguments for the list of all parts."""

    PARTS = "parts"


def call_with_parts(
    take_apart: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    join: Callable[..., Any],
    join_args: tuple[Any, ...],
    join_kwargs: Mapping[str, Any],
) -> Any:
    """``join`` with the parts of a tensor in the place of :class:`Place`."""
    found = list(take_apart(*args, **kwargs))

    def put(part: Any) -> Any:
        return found if part is Place.PARTS else part

    return join(*transform(join_args, put), **transform(join_kwargs, put))


def join_lists(trace: ForwardTrace) -> None:
    """Make one instruction of what takes a tensor apart and what joins all of its parts, wherever nothing else uses
    them."""
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
    """How often the list of ``numbers`` is an argument."""
    return sum(
        _is_list(value, numbers) for value in (*instruction.args, *instruction.kwargs.values())
    )


def _is_list(value: Any, numbers: list[int]) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return numbers == [part.index if isinstance(part, TensorSlot) else None for part in value]


def _fuse(apart: Instruction, join: Instruction, numbers: list[int]) -> None:
    def put(value: Any) -> Any:
        return Place.PARTS if _is_list(value, numbers) else value

    args = tuple(map(put, join.args))
    kwargs = {key: put(value) for key, value in join.kwargs.items()}
    join.args = (apart.target, apart.args, apart.kwargs, join.target, args, kwargs)
    join.kwargs, join.target = {}, call_with_parts
