"""A model's own forward, recorded and cut into blocks.

Each block has a step with parameters, or several small ones, and steps without that stand beside them::

    embed ─ add ┊ layer ─ add ┊ layer ┊ norm ─ head          ┊ a cut: what is alive there passes

What passes a cut is what steps behind it still use; a tensor that is used much later passes every block between,
unchanged. What is made of whole-numbered inputs alone (masks, positions) is made again instead, where that is less.
Between two steps with parameters the cut lies where the fewest bytes pass. There is none where a tensor depends on the
rows and has no dimension of them, where a tensor is changed in place behind it, between two uses of a module with
buffers, which must see all of its updates, or between tensors and a derivative of one by the other.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallax.errors import DescribeError
from parallax.model.block import Block, Partition, TensorSlot
from parallax.model.recording.partitioning.segment import (
    RecordedSegment,
    SegmentWriter,
    UnknownSize,
)
from parallax.model.recording.program import ForwardProgram, ForwardStep, ForwardTensor
from parallax.model.recording.trace import Context, ModulePath, Origin, change, draws, parts

logger = logging.getLogger("parallax")


_DERIVATIVES = "grad", "backward"
"""Calls that walk the graph between the tensors that they are given, which must lie in one block."""


@dataclass(frozen=True)
class _Piece:
    """Some steps as a module, with the tensors that it takes and gives."""

    name: str
    module: RecordedSegment
    steps: list[ForwardStep]
    entering: list[int]
    leaving: list[int]
    last: bool


class ProgramPartitioner:
    """Finds where to cut ``program``, and builds what lies between. ``share(step)`` is the part of the model's work
    that a step does; a block has at least ``least`` of it, where there is that much."""

    def __init__(
        self,
        model: nn.Module,
        program: ForwardProgram,
        share: Callable[[ForwardStep], float],
        least: float,
    ) -> None:
        self._model, self._program = model, program
        self._steps, self._tensors = program.steps, program.tensors
        self._share, self._least = share, least
        self.reason = ""
        self._results = [p.index for p in parts(program.returned) if isinstance(p, TensorSlot)]
        self._written = self._written_storages()
        self._born: dict[int, int] = {}
        for tensor in self._tensors:
            self._born.setdefault(tensor.traced.storage, max(tensor.maker, 0))
        self._remade = self._find_remade()
        self._last_use = [-1] * len(self._tensors)
        for step in self._steps:
            for index in step.uses:
                self._use(index, step.position)
        for index in self._results:
            self._use(index, len(self._steps))
        self._forbidden = self._intervals()
        self._held: set[int] = set()
        self._named: dict[str, int] = {}

    def partition(self) -> Partition:
        """The blocks. Raises :class:`UnknownSize` where even one block of all steps cannot make a size."""
        if not any(step.heavy for step in self._steps):
            raise DescribeError(
                f"{type(self._model).__name__} is no chain of blocks: its forward uses no parameters"
            )
        bounds = [0, *self._bounds(), len(self._steps)]
        found: list[_Piece] = []
        while len(found) + 1 < len(bounds):
            low, high = bounds[len(found) : len(found) + 2]
            try:
                found.append(self._piece(low, high))
            except UnknownSize as unknown:
                self.reason = f"{unknown} cannot be made from what passes a cut"
                if len(bounds) == 2:
                    raise
                bounds.remove(low or high)  # one piece less
                del found[-1:]
        blocks = [self._block(piece) for piece in found]
        return Partition(tuple(blocks), template=self._template())

    def _template(self) -> Any:
        order = iter(range(len(self._results)))
        returned = self._program.returned
        if isinstance(returned, TensorSlot):
            return None
        return change(
            returned, lambda p: TensorSlot(next(order)) if isinstance(p, TensorSlot) else p
        )

    # ---- where

    def _bounds(self) -> list[int]:
        """The positions of the steps that begin a block, but the first."""
        heavy = [step for step in self._steps if step.heavy]
        remaining = sum(map(self._share, heavy))
        found, gathered = [], 0.0
        for before, after in itertools.pairwise(heavy):
            gathered += self._share(before)
            remaining -= self._share(before)
            if gathered < self._least or remaining < self._least:
                continue
            places = range(before.position + 1, after.position + 1)
            costs = [(self._cost(place), -place) for place in places]
            possible = [(cost, place) for cost, place in costs if cost is not None]
            if possible:
                found.append(-min(possible)[1])
                gathered = 0.0
        return found

    def _cost(self, position: int) -> int | None:
        """Bytes that pass a cut before ``position``; None: it cannot be cut there."""
        if any(low < position <= high for low, high in self._forbidden):
            return None
        alive = self._alive(position)
        for tensor in alive:
            if tensor.rows is None:
                maker = self._steps[tensor.maker].name if tensor.maker >= 0 else tensor.traced.name
                self.reason = (
                    f"{maker} gives something that depends on the rows and has no dimension of them, and all that "
                    "follows needs it"
                )
                return None
        return sum(tensor.traced.nbytes for tensor in alive) if alive else None

    def _alive(self, position: int) -> list[ForwardTensor]:
        """What steps from ``position`` on use of what is there before."""
        return [
            tensor
            for tensor in self._tensors
            if tensor.maker < position
            and self._last_use[tensor.index] >= position
            and not tensor.held
            and tensor.index not in self._remade
        ]

    def _use(self, index: int, position: int) -> None:
        """A tensor is used at ``position``; if it is made again there, what it is made of is used."""
        if self._last_use[index] >= position:
            return
        self._last_use[index] = position
        if index in self._remade:
            for source in self._steps[self._tensors[index].maker].uses:
                self._use(source, position)

    def _find_remade(self) -> set[int]:
        """Tensors that every block makes for itself: of whole-numbered inputs no larger than they are, or of none."""
        found: set[int] = set()
        sources: dict[int, frozenset[int]] = {}
        for tensor in self._tensors:
            if tensor.traced.origin is Origin.INPUT:
                if not tensor.traced.dtype.is_floating_point:
                    sources[tensor.index] = frozenset([tensor.index])
                continue
            if tensor.held or tensor.maker < 0 or not self._is_light(self._steps[tensor.maker]):
                continue
            used = self._steps[tensor.maker].uses
            given = tensor.rows is not None and all(i in sources for i in used)
            if tensor.traced.storage in self._written or not given:
                continue
            sources[tensor.index] = frozenset().union(*(sources[i] for i in used))
            needed = sum(self._tensors[i].traced.nbytes for i in sources[tensor.index])
            if needed <= tensor.traced.nbytes or not needed:
                found.add(tensor.index)
        # What one of them is made of is made again with it.
        return found

    def _is_light(self, step: ForwardStep) -> bool:
        changes = step.heavy or step.writes or draws(step.name)
        return step.module is None and not changes

    def _written_storages(self) -> set[int]:
        return {self._tensors[i].traced.storage for step in self._steps for i in step.writes}

    def _intervals(self) -> list[tuple[int, int]]:
        """Steps that must be in one block: all uses of a module with buffers, a tensor and what changes it."""
        found: list[tuple[int, int]] = []
        first: dict[Any, int] = {}
        changed_by_modules = {
            name
            for step in self._steps
            if isinstance(step.target, ModulePath) and step.module is not None
            for name in (f"{step.target.path}.{n}" for n, _ in step.module.named_buffers())
        }
        for step in self._steps:
            keys: list[Any] = [id(b) for b in step.module.buffers()] if step.module else []
            for index in {*step.uses, *step.writes}:
                tensor = self._tensors[index].traced
                if tensor.name in changed_by_modules:
                    keys.append(id(_tensor_named(self._model, tensor.name)))
                if tensor.origin is Origin.MODEL and tensor.storage in self._written:
                    keys.append(("held", tensor.storage))
            for key in keys:
                found.append((first.setdefault(key, step.position), step.position))
            for index in step.writes:
                found.append((self._born[self._tensors[index].traced.storage], step.position))
            if step.name in _DERIVATIVES:
                found += [(max(self._tensors[i].maker, 0), step.position) for i in step.uses]
        return [(low, high) for low, high in found if low < high]

    # ---- what

    def _piece(self, low: int, high: int) -> _Piece:
        """The steps from ``low`` to below ``high``."""
        entering = [t.index for t in self._alive(low)] if low else self._program.inputs
        last = high == len(self._steps)
        leaving = self._results if last else [t.index for t in self._alive(high)]
        writer = SegmentWriter(self._model, self._program, entering, unfold=low > 0)
        steps = [step for step in self._steps[low:high] if self._is_wanted(step)]
        for step in steps:
            writer.add(step)
        module = writer.build(leaving, fold=not last)
        name = next(iter(writer.paths), f"steps {low} to {high - 1}")
        return _Piece(name, module, steps, entering, leaving, last)

    def _is_wanted(self, step: ForwardStep) -> bool:
        """Not what is only made again further behind."""
        gives = [i for _, i in step.results]
        return not gives or not all(i in self._remade for i in gives)

    def _block(self, piece: _Piece) -> Block:
        module = piece.module
        self._held |= {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        whole = None if piece.last and self._adopt(module) else self._plain(piece)
        self._named[piece.name] = count = self._named.get(piece.name, 0) + 1
        rows = [self._tensors[index].rows for index in piece.leaving]
        unbatched = (
            frozenset() if piece.last else frozenset(i for i, r in enumerate(rows) if r == -1)
        )
        name = piece.name if count == 1 else f"{piece.name} ({count})"
        return Block(name, whole or module, unbatched)

    def _plain(self, piece: _Piece) -> nn.Module | None:
        """The model's own module where the block does nothing but call it."""
        if len(piece.steps) != 1 or not self._program.evaluates:
            return None
        step = piece.steps[0]
        given = [part.index if isinstance(part, TensorSlot) else None for part in step.args]
        rows = [self._tensors[i].rows for i in [*piece.entering, *piece.leaving]]
        straight = (
            given == piece.entering
            and not step.kwargs
            and step.context == Context()
            and [((), index) for index in piece.leaving] == list(step.results)
        )
        straight = straight and not any(self._program.other_mode.values())
        return step.module if straight and all(r in (0, -1) for r in rows) else None

    def _adopt(self, module: nn.Module) -> bool:
        """Give the last block what no step uses, as the model has it; whether there is any."""
        found = False
        for path, part in self._model.named_modules():
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            unused = [(name, tensor) for name, tensor in own if id(tensor) not in self._held]
            found = found or bool(unused)
            if unused and len(unused) == len(own) and not list(part.children()):
                module.add_module(f"unused_{path.replace('.', '_')}", part)
            elif unused:
                for name, tensor in unused:
                    unique = f"unused_{path.replace('.', '_')}_{name}"
                    if isinstance(tensor, nn.Parameter):
                        module.register_parameter(unique, tensor)
                    else:
                        keeps = name not in part._non_persistent_buffers_set
                        module.register_buffer(unique, tensor, persistent=keeps)
        return found


def _tensor_named(model: nn.Module, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)
