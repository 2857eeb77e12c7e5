"""Replay the logged operations on the CPU, as far as the requested tensors depend on them.

The needed operations are found backwards: the last operation that wrote a tensor's memory, then those that wrote its
operands, and so on. The search for the earlier content of a storage ends at an operation that overwrites the whole
storage. The needed operations run in order, and each storage is freed after its last use. So peak memory is little more
than the requested tensors.

Each random operation draws from a separate generator, seeded by (seed, number of the draw). So its numbers do not
depend on which other operations are replayed. If the constructor seeded a generator itself, the draws depend on each
other, so the earlier draws are replayed, too. One in sixteen of that generator's states is cached.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallax.common.seeds import block_seed
from parallax.model.construction.log import (
    Cell,
    Drawn,
    Operation,
    OperationLog,
    OwnState,
    SeededState,
    StateAfter,
    View,
)
from parallax.model.private import without_function_modes, without_operator_modes

_KEPT_STATES = 16  # draws of a seeded generator per cached state


class Replay:
    """Computes real tensors from ``log``, the operations of a model's constructor.

    ``seed`` seeds the random numbers for which the constructor sets no seed.
    """

    def __init__(self, log: OperationLog, seed: int) -> None:
        self._log, self._seed = log, seed
        self._states: dict[int, Tensor] = {}

    def values(self, views: Sequence[View]) -> list[Tensor]:
        """Return real tensors for ``views``, with the values after the last logged operation.

        Overlapping views share memory. If the requested views of a storage do not overlap and cover only a part of it,
        each view is copied, so that the storage can be freed. Constants that existed before the constructor are copied,
        too.
        """
        by_cell: dict[Cell, list[View]] = {}
        for view in dict.fromkeys(views):
            by_cell.setdefault(view.cell, []).append(view)
        with plain_execution():
            memory = self._carry_out(self._needed(by_cell), set(by_cell))
            made: dict[View, Tensor] = {}
            for cell, mine in by_cell.items():
                storage = memory[cell]
                if storage is cell.constant:
                    storage = storage.clone()
                apart = sum(v.nbytes for v in mine) < cell.nbytes and not _overlap(mine)
                for view in mine:
                    made[view] = (
                        view.as_tensor(storage).clone() if apart else view.as_tensor(storage)
                    )
            return [made[view] for view in views]

    def _needed(self, wanted: Iterable[Cell]) -> list[int]:
        """Return ascending indices of the operations on which the contents of the storages ``wanted`` depend."""
        operations = self._log.operations
        found: set[int] = set()
        ahead: list[int] = []

        def need(cell: Cell, before: int) -> None:
            last = bisect_left(cell.writes, before)
            if last:
                ahead.append(cell.writes[last - 1])

        for cell in wanted:
            need(cell, len(operations))
        while ahead:
            place = ahead.pop()
            if place in found:
                continue
            found.add(place)
            operation = operations[place]
            for cell in operation.reads:
                need(cell, place)
            drawn = operation.drawn
            if isinstance(drawn, StateAfter) and drawn.place not in self._states:
                ahead.append(drawn.place)
        return sorted(found)

    def _carry_out(
        self, places: Sequence[int], wanted: set[Cell]
    ) -> dict[Cell, torch.UntypedStorage]:
        operations = [self._log.operations[place] for place in places]
        last = {cell: i for i, operation in enumerate(operations) for cell in operation.touches}
        last |= dict.fromkeys(wanted, len(operations))
        memory = _Memory(cell for operation in operations for cell in operation.writes)
        states = _States(self._states, operations)
        for i, (place, operation) in enumerate(zip(places, operations)):
            with states.drawing(place, operation.drawn, self._seed):
                _call(operation, memory)
            for cell in operation.touches:
                if last[cell] == i:
                    memory.free(cell)
        return {cell: memory.storage_of(cell) for cell in wanted}


class _Memory:
    """The real storages of a replay, each created at its first use.

    ``changed``: the storages that replayed operations change. If such a storage existed before the constructor, the
    replay works on a copy of it.
    """

    def __init__(self, changed: Iterable[Cell]) -> None:
        self._changed = set(changed)
        self._held: dict[Cell, torch.UntypedStorage] = {}

    def storage_of(self, cell: Cell) -> torch.UntypedStorage:
        """Return the real storage for ``cell``.

        Uninitialized memory is filled with zeros, so that every rank computes equal values.
        """
        held = self._held.get(cell)
        if held is None:
            held = self._held[cell] = self._begin(cell)
        return held

    def _begin(self, cell: Cell) -> torch.UntypedStorage:
        if cell.constant is None:
            return torch.zeros(cell.nbytes, dtype=torch.uint8).untyped_storage()
        if cell.constant.device.type != "cpu":
            return cell.constant.cpu()
        return cell.constant.clone() if cell in self._changed else cell.constant

    def put(self, view: View, made: Tensor) -> None:
        """Store ``made``, the first tensor that is written to the storage of ``view``.

        If ``made`` has the strides, offset and storage size of ``view``, its memory becomes the storage; otherwise its
        values are copied.
        """
        storage = made.untyped_storage()
        known = any(storage is held for held in self._held.values())
        same = made.stride() == view.stride and made.storage_offset() == view.offset
        if (
            same
            and not known
            and storage.nbytes() == view.cell.nbytes
            and not made.is_conj()
            and not made.is_neg()
        ):
            self._held[view.cell] = storage
        else:
            view.as_tensor(self.storage_of(view.cell)).copy_(made)

    def free(self, cell: Cell) -> None:
        """Drop the storage of ``cell``, because no later operation uses it."""
        self._held.pop(cell, None)


class _States:
    """Holds the random states of generators that the constructor seeded.

    ``kept`` is a cache of states that outlives this replay. A state that is not in the cache is held from the operation
    that produced it until the last of ``operations`` that needs it.
    """

    def __init__(self, kept: dict[int, Tensor], operations: Sequence[Operation]) -> None:
        self._kept, self._passing = kept, dict[int, Tensor]()
        self._left = Counter(o.drawn.place for o in operations if isinstance(o.drawn, StateAfter))

    @contextlib.contextmanager
    def drawing(self, place: int, drawn: Drawn | None, seed: int) -> Iterator[None]:
        """A context in which the operation with index ``place`` runs.

        In the context, torch's default generator has the logged random state ``drawn``; None: the operation draws no
        random numbers. ``seed``: the seed for draws for which the constructor set none.
        """
        if drawn is None:
            yield
            return
        if isinstance(drawn, OwnState):
            torch.default_generator.manual_seed(block_seed(seed, drawn.place))
        elif isinstance(drawn, SeededState):
            torch.default_generator.set_state(drawn.state)
        else:
            held = self._passing if drawn.place in self._passing else self._kept
            torch.default_generator.set_state(held[drawn.place])
            self._left[drawn.place] -= 1
            if not self._left[drawn.place]:
                self._passing.pop(drawn.place, None)
        yield
        if isinstance(drawn, OwnState):
            return
        if self._left[place]:
            self._passing[place] = torch.default_generator.get_state()
        if place % _KEPT_STATES == 0:
            self._kept[place] = torch.default_generator.get_state()


def _overlap(views: Sequence[View]) -> bool:
    """Return whether any two of ``views``, which are views of one storage, overlap."""
    ranges = sorted((v.offset * v.dtype.itemsize, v.span * v.dtype.itemsize) for v in views)
    return any(start + span > after for (start, span), (after, _) in itertools.pairwise(ranges))


def _call(operation: Operation, memory: _Memory) -> None:
    def real(part: Any) -> Any:
        return part.as_tensor(memory.storage_of(part.cell)) if isinstance(part, View) else part

    args, kwargs = change(operation.args, real), change(operation.kwargs, real)
    floating = torch.get_default_dtype()
    torch.set_default_dtype(operation.floating)
    try:
        results = flat(operation.function(*args, **kwargs))
    finally:
        torch.set_default_dtype(floating)
    for place, view in operation.outputs:
        memory.put(view, results[place])


@contextlib.contextmanager
def plain_execution() -> Iterator[None]:
    """A context without gradients, dispatch modes and function modes. On exit, torch's random state is restored."""
    state = torch.default_generator.get_state()
    with without_operator_modes(), without_function_modes(), torch.no_grad():
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def change(value: Any, changed: Callable[[Any], Any]) -> Any:
    """Return ``value``, nested lists, tuples and dicts, with ``changed`` applied to every leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([change(part, changed) for part in value])
    if kind is dict:
        return {key: change(part, changed) for key, part in value.items()}
    return changed(value)


def flat(results: Any) -> list[Any]:
    """Return the nested results of an operator as a flat list."""
    if isinstance(results, tuple | list):
        return [part for result in results for part in flat(result)]
    return [results]
