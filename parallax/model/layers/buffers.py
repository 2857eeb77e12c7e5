"""Keep buffers that a forward changes correct under recomputation.

Some forwards update buffers: moving averages of a codebook, a counter, the vectors of a power iteration. If such a
block is recomputed, it would update the buffers twice, and compute with other values than the first time. So a
recomputation runs on copies of the values from before the first forward. Afterwards the buffers again have the values
from after the first forward. Frozen parameters that a forward changes, such as those of a teacher network, count as
buffers here.

Copies cost memory, and most buffers never change. So the block's first forward determines which buffers change. A
dispatch mode copies each buffer before an operator first writes to it, and replaced buffers are found afterwards. From
the second forward on, only the buffers found are copied, before the forward begins. Version counters detect a buffer
that changes for the first time in a later forward. It is updated once, but one recomputation computes with its new
value, and a warning is logged.

The same mode finds operators that write into an argument besides their result, as ``rrelu_with_noise`` does. Such an
operator saves the argument before filling it. A recomputation stops at the last saved tensor, so the argument would not
be filled, and backward would read uninitialized memory. To prevent that, a block with such an operator saves one more
tensor at its end (:meth:`ChangingBuffers.end_forward`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallax.model.private import NestedSizes, OperatorMode

logger = logging.getLogger("parallax")
Owner = dict[str, Tensor | None]


class _BufferSlot(NamedTuple):
    """The place of a buffer or frozen parameter: a module's dictionary of tensors, and the name in it."""

    owner: Owner
    name: str

    @property
    def tensor(self) -> Tensor:
        found = self.owner[self.name]
        assert found is not None
        return found


class ChangingBuffers:
    """Tracks the buffers of one block that its forwards change.

    ``leave_out``: modules whose buffers are handled elsewhere. ``is_offloaded(tensor)`` returns whether a tensor is an
    offloaded parameter. ``compiled``: the block is compiled, so its operators cannot be intercepted. Instead, all
    buffers are copied before the block's first forward, and compared with the copies afterwards.
    """

    def __init__(
        self,
        block: nn.Module,
        leave_out: Collection[nn.Module],
        is_offloaded: Callable[[Tensor], bool],
        *,
        compiled: bool,
    ) -> None:
        self._compiled = compiled
        self._fills_saved = compiled  # whether an operator may write into a tensor that it saved
        self._unknown: list[_BufferSlot] | None = []
        self._changing: list[_BufferSlot] = []
        self._others: list[_BufferSlot] = []
        for module in block.modules():
            if module in leave_out:
                continue
            places = [
                _BufferSlot(module._buffers, name)
                for name, t in module._buffers.items()
                if t is not None
            ]
            if not compiled:
                frozen: Any = module._parameters
                places += [
                    _BufferSlot(frozen, name)
                    for name, p in module._parameters.items()
                    if p is not None and not p.requires_grad and not is_offloaded(p)
                ]
            self._unknown += [place for place in places if place.tensor.layout is torch.strided]

    @contextlib.contextmanager
    def first_forward(self, found: BufferSnapshot) -> Iterator[None]:
        """A context for a forward that may be recomputed.

        The context stores in ``found`` the values that the changing buffers had before the forward.
        """
        if self._unknown is not None:
            with self._watching(self._unknown, found):
                yield
            self._unknown, found.complete = None, True
            return
        found.values = _copies(self._changing)
        before = [place.tensor._version for place in self._others]
        tensors = [place.tensor for place in self._others]
        yield
        found.complete = True
        late = [
            place
            for place, tensor, version in zip(self._others, tensors, before)
            if place.tensor is not tensor or tensor._version != version
        ]
        if late:
            self._learn(late)

    @contextlib.contextmanager
    def repeated_forward(self, found: BufferSnapshot) -> Iterator[None]:
        """A context for a recomputation, in which the buffers have the values in ``found``.

        On exit, the buffers again have the values that they had before the context was entered.
        """
        left = [(place, place.tensor) for place, _ in found.values]
        fresh: dict[Tensor, Tensor] = {}  # a buffer shared by two modules stays shared
        for place, value in found.values:
            if value not in fresh:
                fresh[value] = _like(place.tensor, value)
            place.owner[place.name] = fresh[value]
        try:
            yield
        finally:
            for place, tensor in left:
                place.owner[place.name] = tensor

    def end_forward(self) -> None:
        """Save one more tensor for backward, if the block is compiled or if one of its operators may fill an argument
        that it has saved.

        A recomputation stops at the last saved tensor, and must not stop before the argument is filled. Call this after
        the last operator of a forward that may be recomputed, and of its recomputation.
        """
        if self._fills_saved:
            torch.zeros((), requires_grad=True).exp()

    @contextlib.contextmanager
    def _watching(self, places: Sequence[_BufferSlot], found: BufferSnapshot) -> Iterator[None]:
        tensors = [place.tensor for place in places]
        aliases = [
            tensor.detach() for tensor in tensors
        ]  # keeps the memory that an assignment to .data replaces
        if self._compiled:
            copies = dict(zip(map(_address, aliases), (alias.clone() for alias in aliases)))
            yield
            written = {a for alias in aliases if not _equal(alias, copies[a := _address(alias)])}
        else:
            mode = _CopyOnWrite(aliases)
            with mode:
                yield
            copies, written = mode.copies, set(mode.copies)
            self._fills_saved = mode.fills_arguments
        values: dict[int, Tensor] = {}
        for place, tensor, alias in zip(places, tensors, aliases):
            moved = place.tensor is not tensor or _address(tensor) != _address(alias)
            if moved or _address(alias) in written:
                key = id(tensor)
                values[key] = values.get(key, copies.get(_address(alias), alias))
                found.values.append((place, values[key]))
        self._changing = [place for place, _ in found.values]
        known = {(id(place.owner), place.name) for place in self._changing}
        self._others = [place for place in places if (id(place.owner), place.name) not in known]

    def _learn(self, late: Sequence[_BufferSlot]) -> None:
        logger.warning(
            "%s first changes in a later forward, so one recomputation sees its new value; do not recompute this block "
            "(directive keep or offload) if that matters",
            ", ".join(place.name for place in late),
        )
        self._changing += late
        known = {(id(place.owner), place.name) for place in self._changing}
        self._others = [
            place for place in self._others if (id(place.owner), place.name) not in known
        ]


class BufferSnapshot:
    """The values that a block's changing buffers had before one forward.

    ``values``: (place of a buffer, value) for each of these buffers. ``complete``: the forward has ended. ``sizes``
    makes recomputations use the same symbols for the row lengths of nested tensors as the forward.
    """

    def __init__(self) -> None:
        self.values: list[tuple[_BufferSlot, Tensor]] = []
        self.complete = False
        self.sizes = NestedSizes()


class _CopyOnWrite(OperatorMode):
    """A dispatch mode that copies each of ``tensors`` before an operator first writes to its memory.

    ``copies``: {address: copy}. ``fills_arguments``: an operator has written into an argument that it does not return.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._watched = {_address(tensor): tensor for tensor in tensors if tensor.numel()}
        self.copies: dict[int, Tensor] = {}
        self.fills_arguments = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        self.fills_arguments |= _fills_arguments(func)
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else given.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    self._before_writing(tensor)
        return func(*args, **given)

    def _before_writing(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return
        address = _address(tensor)
        if address in self._watched and address not in self.copies:
            self.copies[address] = self._watched[address].clone()


@cache
def _fills_arguments(operator: Any) -> bool:
    """Return whether ``operator`` writes into an argument that it does not return."""
    schema = operator._schema
    returned = [value.alias_info.before_set for value in schema.returns if value.alias_info]
    return any(
        each.alias_info is not None
        and each.alias_info.is_write
        and each.alias_info.before_set not in returned
        for each in schema.arguments
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copies(places: Sequence[_BufferSlot]) -> list[tuple[_BufferSlot, Tensor]]:
    """Return (place, copy of its tensor) for each place. A tensor with several places is copied once."""
    made: dict[Tensor, Tensor] = {}
    for place in places:
        if place.tensor not in made:
            made[place.tensor] = place.tensor.detach().clone()
    return [(place, made[place.tensor]) for place in places]


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a copy of ``value``, as a Parameter if ``tensor`` is a Parameter."""
    copied = value.detach().clone()
    return nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())
