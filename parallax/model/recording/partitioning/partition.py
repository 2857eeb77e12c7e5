"""Partition a recorded forward into blocks.

A step is one call in the forward. Each block has a step with parameters, or several small ones, and adjacent steps
without parameters::

    embed ─ add ┊ layer ─ add ┊ layer ┊ norm ─ head          ┊ a boundary: live tensors cross it

Tensors that later steps still use cross a boundary. A tensor that is used much later passes unchanged through all
blocks between. Tensors that are computed from integer inputs only (masks, positions) are recomputed in later blocks
instead, if the inputs have no more bytes. Between two steps with parameters, the boundary is placed where the fewest
bytes cross. No boundary is possible:

* where a crossing tensor depends on the rows but has no row dimension, or is changed in place later
* between two uses of a module with buffers, because one block must see all updates of these
* between two tensors if the derivative of one by the other is computed
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallax.errors import DescribeError
from parallax.model.block import Block, Partition, TensorSlot
from parallax.model.recording.partitioning.segment import (
    DERIVATIVES,
    RecordedSegment,
    SegmentWriter,
    UnknownSize,
)
from parallax.model.recording.program import ForwardProgram, ForwardStep, ForwardTensor
from parallax.model.recording.trace import Context, ModulePath, Origin, change, draws, parts

logger = logging.getLogger("parallax")


@dataclass(frozen=True)
class _Piece:
    """One block of the program.

    ``steps``                     the recorded calls of the block
    ``module``                    the module that runs these calls
    ``entering`` and ``leaving``  the numbers of its input and output tensors
    ``last``                      it is the last block
    """

    name: str
    module: RecordedSegment
    steps: list[ForwardStep]
    entering: list[int]
    leaving: list[int]
    last: bool


class ProgramPartitioner:
    """Finds the block boundaries of ``program`` and builds the blocks.

    A step is one recorded call in the forward, and ``share(step)`` returns its fraction of the model's work. ``least``:
    the smallest fraction that a block has, if possible. ``whole``: the blocks must hold all tensors of the model, also
    unused ones.
    """

    def __init__(
        self,
        model: nn.Module,
        program: ForwardProgram,
        share: Callable[[ForwardStep], float],
        least: float,
        *,
        whole: bool = True,
    ) -> None:
        self._model, self._program = model, program
        self._steps, self._tensors = program.steps, program.tensors
        self._share, self._least, self._whole = share, least, whole
        self.reason = ""
        self._results = [p.index for p in parts(program.returned) if isinstance(p, TensorSlot)]
        self._written = self._written_storages()
        self._first_steps: dict[int, int] = {}
        for tensor in self._tensors:
            self._first_steps.setdefault(tensor.traced.storage, max(tensor.maker, 0))
        self._recomputed = self._find_recomputed()
        self._last_use = [-1] * len(self._tensors)
        for step in self._steps:
            for index in step.uses:
                self._record_use(index, step.position)
        for index in self._results:
            self._record_use(index, len(self._steps))
        self._forbidden = self._intervals()
        self._held: set[int] = set()
        self._named: dict[str, int] = {}

    def partition(self) -> Partition:
        """Return the program partitioned into blocks.

        Raises :class:`UnknownSize` if a size cannot be computed even in a single block of all steps.
        """
        if not any(step.heavy for step in self._steps):
            raise DescribeError(
                f"{type(self._model).__name__} has nothing to train: its forward uses no parameters"
            )
        bounds = [0, *self._bounds(), len(self._steps)]
        found: list[_Piece] = []
        while len(found) + 1 < len(bounds):
            low, high = bounds[len(found) : len(found) + 2]
            try:
                found.append(self._piece(low, high))
            except UnknownSize as unknown:
                self.reason = f"{unknown} cannot be computed from the tensors that cross a boundary"
                if len(bounds) == 2:
                    raise
                bounds.remove(low or high)  # merge two pieces
                del found[-1:]
        blocks = [self._block(piece, bounds) for piece in found]
        return Partition(tuple(blocks), template=self._template())

    def _template(self) -> Any:
        order = iter(range(len(self._results)))
        returned = self._program.returned
        if isinstance(returned, TensorSlot):
            return None
        return change(
            returned, lambda p: TensorSlot(next(order)) if isinstance(p, TensorSlot) else p
        )

    # ---- boundaries

    def _bounds(self) -> list[int]:
        """Return, for each block except the first, the index of its first step (recorded call) in the program."""
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
        """Return the bytes that cross a block boundary before the step (recorded call) with index ``position``; None if
        no boundary is possible there."""
        if any(low < position <= high for low, high in self._forbidden):
            return None
        alive = self._live_tensors(position)
        for tensor in alive:
            if tensor.rows is None:
                maker = self._steps[tensor.maker].name if tensor.maker >= 0 else tensor.traced.name
                self.reason = (
                    f"{maker} returns a tensor that depends on the rows but has no row dimension, and all later steps "
                    "need it"
                )
                return None
        return sum(tensor.traced.nbytes for tensor in alive) if alive else None

    def _live_tensors(self, position: int) -> list[ForwardTensor]:
        """Return the tensors that cross a block boundary before the step (recorded call) with index ``position``.

        These are tensors of earlier steps that this step or later ones use.
        """
        return [
            tensor
            for tensor in self._tensors
            if tensor.maker < position
            and self._last_use[tensor.index] >= position
            and not tensor.held
            and tensor.index not in self._recomputed
        ]

    def _record_use(self, index: int, position: int) -> None:
        """Record that the step (recorded call) with index ``position`` uses tensor ``index``.

        If blocks recompute the tensor instead of receiving it, the tensors that it is computed from are recorded as
        used by that step, too.
        """
        if self._last_use[index] >= position:
            return
        self._last_use[index] = position
        if index in self._recomputed:
            for source in self._steps[self._tensors[index].maker].uses:
                self._record_use(source, position)

    def _find_recomputed(self) -> set[int]:
        """Return the numbers of the tensors that every block recomputes instead of receiving them.

        These tensors are computed from no input, or only from integer inputs that together have no more bytes than the
        tensor.
        """
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
        # Their sources are recomputed with them.
        return found

    def _is_light(self, step: ForwardStep) -> bool:
        changes = step.heavy or step.writes or draws(step.name)
        return step.module is None and not changes

    def _written_storages(self) -> set[int]:
        return {self._tensors[i].traced.storage for step in self._steps for i in step.writes}

    def _intervals(self) -> list[tuple[int, int]]:
        """Return pairs (index of the first step, index of the last step) of steps that must be in one block.

        A step is a recorded call. One block must have all calls of a module with buffers; the call that computes a
        tensor and those that change it in place; and all calls from the operands of a derivative to the derivative.
        """
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
                found.append(
                    (self._first_steps[self._tensors[index].traced.storage], step.position)
                )
            if step.name in DERIVATIVES:
                found += [(max(self._tensors[i].maker, 0), step.position) for i in step.uses]
        return [(low, high) for low, high in found if low < high]

    # ---- blocks

    def _piece(self, low: int, high: int) -> _Piece:
        """Return a block of the steps (recorded calls) with indices from ``low`` to ``high`` − 1."""
        entering = [t.index for t in self._live_tensors(low)] if low else self._program.inputs
        last = high == len(self._steps)
        leaving = self._results if last else [t.index for t in self._live_tensors(high)]
        writer = SegmentWriter(self._model, self._program, entering, unfold=low > 0)
        steps = [step for step in self._steps[low:high] if self._is_needed(step)]
        for step in steps:
            writer.add(step)
        module = writer.build(leaving, fold=not last)
        name = next(iter(writer.paths), f"steps {low} to {high - 1}")
        return _Piece(name, module, steps, entering, leaving, last)

    def _is_needed(self, step: ForwardStep) -> bool:
        """Return whether the block to which the recorded call ``step`` belongs must run this call.

        A call is left out if all its results are recomputed in the blocks that use them.
        """
        gives = [i for _, i in step.results]
        return not gives or not all(i in self._recomputed for i in gives)

    def _reads(self, piece: _Piece, bounds: list[int]) -> tuple[tuple[int, float], ...]:
        """Return (block, bytes) for each earlier block whose results the steps of ``piece`` use.

        The bytes are those of these results for one row.
        """
        first = bisect_right(bounds, piece.steps[0].position) - 1 if piece.steps else 0
        used = {index for step in piece.steps for index in step.uses if index in piece.entering}
        found: dict[int, float] = {}
        for tensor in (self._tensors[index] for index in used):
            if tensor.maker >= 0 and (block := bisect_right(bounds, tensor.maker) - 1) < first:
                own = tensor.rows if tensor.rows is not None and tensor.rows >= 0 else None
                rows = 1 if own is None else tensor.traced.shape[own]
                found[block] = found.get(block, 0.0) + tensor.traced.nbytes / rows
        return tuple(sorted(found.items()))

    def _block(self, piece: _Piece, bounds: list[int]) -> Block:
        module = piece.module
        self._held |= {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        adopts = piece.last and self._whole and self._adopt_unused(module)
        own = None if adopts else self._own_module(piece)
        self._named[piece.name] = count = self._named.get(piece.name, 0) + 1
        rows = [self._tensors[index].rows for index in piece.leaving]
        unbatched = (
            frozenset() if piece.last else frozenset(i for i, r in enumerate(rows) if r == -1)
        )
        name = piece.name if count == 1 else f"{piece.name} ({count})"
        return Block(name, own or module, unbatched, self._reads(piece, bounds))

    def _own_module(self, piece: _Piece) -> nn.Module | None:
        """Return the module of the model that the block calls if the block does nothing else; otherwise None."""
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

    def _adopt_unused(self, module: nn.Module) -> bool:
        """Add the model's tensors that no block holds to ``module``, the last block. Return whether there are any."""
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
