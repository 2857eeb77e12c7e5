"""Merge several traces of a forward into one program.

A forward is traced for several numbers of rows, several values of other variable sizes, and for training and
evaluation. The program has the calls that all traces have in common. A size that differs between the traces becomes a
:class:`Number`, which is computed from the sizes of available tensors. A value that differs only in evaluation
(``training=self.training``) becomes a :class:`Switch`. If the traces differ in another way, the module whose forward
causes the difference is not traceable.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from parallax.model.block import Slot, TensorSlot
from parallax.model.layer import LayerOutput
from parallax.model.recording.expected import expect_answer
from parallax.model.recording.trace import (
    Context,
    ForwardTrace,
    Instruction,
    ModulePath,
    Origin,
    Path,
    TracedTensor,
    change,
    parts,
    shape_of,
)
from parallax.model.recording.value_oracle import NotTraceable

_PRODUCTS = (
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("embedding", "embedding_bag", "conv1d", "conv2d", "conv3d", "conv_transpose1d"),
    *("conv_transpose2d", "conv_transpose3d", "bilinear", "multi_head_attention_forward"),
)


_SORTS = "sort", "argsort"


@dataclass(frozen=True)
class Number(Slot):
    """A placeholder for a size that differs between recorded runs of a forward. ``values``: the size in each run."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Switch(Slot):
    """A placeholder for a value that differs between training and evaluation."""

    training: Any
    evaluation: Any


@dataclass(eq=False)
class ForwardStep:
    """One call in the program.

    ``position``: the index of the step in the program. ``module``: the module that is called; None if it is a function.
    ``heavy``: the step calls a module with parameters or buffers, or is a product with a parameter. Each block has at
    least one heavy step. The other fields are those of :class:`Instruction`.
    """

    position: int
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context
    results: tuple[tuple[Path, int], ...]
    writes: tuple[int, ...]
    module: nn.Module | None = None
    heavy: bool = False

    @property
    def uses(self) -> list[int]:
        """The numbers of the tensors that the step uses."""
        return [p.index for p in parts((self.args, self.kwargs)) if isinstance(p, TensorSlot)]

    @property
    def name(self) -> str:
        if isinstance(self.target, ModulePath):
            return self.target.path
        return str(getattr(self.target, "__name__", type(self.target).__name__))


@dataclass(eq=False)
class ForwardTensor:
    """A tensor of the program.

    ``index``   the number of the tensor in the program
    ``traced``  the tensor in the trace of the first recorded run
    ``shapes``  the tensor's shape in every recorded run
    ``rows``    the dimension that the micro-batch's rows are in; -1: the tensor has no rows; None: its values depend on
                the rows in another way
    ``maker``   the position of the step that computes it; -1 for inputs, and for tensors that blocks hold
    ``path``    where the tensor is in the result of this step
    """

    index: int
    traced: TracedTensor
    shapes: tuple[tuple[int, ...], ...]
    rows: int | None
    maker: int = -1
    path: Path = ()

    @property
    def held(self) -> bool:
        """Whether the tensor is a parameter, a buffer or a constant.

        Such a tensor is held by every block that uses it.
        """
        return self.traced.origin in (Origin.MODEL, Origin.OUTSIDE)


@dataclass
class ForwardProgram:
    """The program of all recorded runs of a forward: calls in order, all tensors, and the return value with a slot for
    each tensor.

    ``inputs``                    the numbers of the input tensors
    ``evaluates`` and ``trains``  whether the program is that of evaluation, and that of training; usually both are True
    ``dropped`` and ``packs``     see :class:`ForwardTrace`
    ``other_mode``                {mode: paths of modules that are not in this mode after ``train(mode)``}
    """

    steps: list[ForwardStep]
    tensors: list[ForwardTensor]
    returned: Any
    dropped: tuple[str, ...] = ()
    evaluates: bool = True
    inputs: list[int] = field(default_factory=list)
    packs: bool = False
    trains: bool = True
    other_mode: Mapping[bool, frozenset[str]] = field(default_factory=dict)


def merge_traces(
    model: nn.Module,
    runs: Sequence[ForwardTrace],
    rows: Sequence[int],
    evaluation: ForwardTrace | None,
    layer: str = "",
) -> ForwardProgram:
    """Return the program that the traces of all ``runs`` have in common. The inputs of run i had ``rows[i]`` rows.

    ``evaluation``: a run in evaluation mode, with the inputs of the first run; None: the program is for training only.
    ``layer``: the module at whose output the runs end; empty: they end at the model's output. Raises
    :class:`NotTraceable` if the runs differ in more than sizes.
    """
    base = runs[0]
    others = [_Correspondence(base, run) for run in runs]
    evaluated = _Correspondence(base, evaluation) if evaluation is not None else None
    modules = dict(model.named_modules())
    steps = []
    for position, mine in enumerate(base.instructions):
        step = _step(position, mine, others, evaluated)
        if isinstance(step.target, ModulePath):
            step.module = modules[step.target.path]
            if step.target.layer is not None:
                step.module = LayerOutput(step.module, step.target.layer, layer, flat=False)
        step.heavy = _is_heavy(step, base)
        steps.append(step)
    if not any(step.heavy for step in steps):
        for step in steps:
            step.heavy = any(base.tensors[i].origin is Origin.MODEL for i in step.uses)
    for other in [*others, *([evaluated] if evaluated is not None else [])]:
        other.check_length()
    returned = _merge([(o.trace.returned,) for o in others], "", others, None, None)[0]
    tensors = [_tensor(i, base, others, rows) for i in range(len(base.tensors))]
    for step in steps:
        for path, i in step.results:
            if tensors[i].maker < 0 and tensors[i].traced.origin is Origin.MADE:
                tensors[i].maker, tensors[i].path = step.position, path
    _mark_orders(steps, tensors)
    inputs = [t.index for t in tensors if t.traced.origin is Origin.INPUT]
    evaluates = evaluation is not None
    return ForwardProgram(
        steps, tensors, returned, base.dropped, evaluates, inputs, packs=base.packs
    )


class _Correspondence:
    """Maps the tensors of ``base``, the trace of the first run, to those of ``trace``, the trace of another run."""

    def __init__(self, base: ForwardTrace, trace: ForwardTrace) -> None:
        self.base, self.trace = base, trace
        self.matches: dict[int, int] = {}
        named = {
            _identity(t): i for i, t in enumerate(trace.tensors) if t.origin is not Origin.MADE
        }
        for i, tensor in enumerate(base.tensors):
            if tensor.origin is not Origin.MADE and _identity(tensor) in named:
                self.matches[i] = named[_identity(tensor)]

    def instruction(self, position: int) -> Instruction:
        """Return the other run's instruction at ``position``.

        Raises :class:`NotTraceable` if this instruction calls something else than the first run's.
        """
        mine = self.base.instructions[position]
        if position >= len(self.trace.instructions):
            raise NotTraceable(mine.owner, f"it calls {mine.name} for some sizes or modes only")
        other = self.trace.instructions[position]
        same = _same_value(mine.target, other.target) and mine.context == other.context
        if not same or shape_of((mine.args, mine.kwargs)) != shape_of((other.args, other.kwargs)):
            raise NotTraceable(
                mine.owner, f"it calls {mine.name} in one case and {other.name} in another"
            )
        return other

    def match_results(self, mine: Instruction, other: Instruction) -> None:
        """Map the results of ``mine``, an instruction of the first run, to those of ``other``, the other run's
        instruction.
        """
        if [path for path, _ in mine.results] != [path for path, _ in other.results]:
            raise NotTraceable(
                mine.owner, f"the structure of {mine.name}'s result depends on sizes or the mode"
            )
        for (_, i), (_, j) in zip(mine.results, other.results):
            if self.matches.setdefault(i, j) != j:
                raise NotTraceable(mine.owner, f"{mine.name} returns its input in some cases only")
        if {self.matches.get(i) for i in mine.writes} != set(other.writes):
            raise NotTraceable(mine.owner, f"{mine.name} changes its input in some cases only")

    def check_length(self) -> None:
        if len(self.trace.instructions) > len(self.base.instructions):
            more = self.trace.instructions[len(self.base.instructions)]
            raise NotTraceable(more.owner, f"it calls {more.name} for some sizes or modes only")


def _identity(tensor: TracedTensor) -> tuple[Any, ...]:
    return tensor.origin, tensor.name, id(tensor.value) if tensor.value is not None else None


def _step(
    position: int,
    mine: Instruction,
    others: list[_Correspondence],
    evaluated: _Correspondence | None,
) -> ForwardStep:
    found = [other.instruction(position) for other in others]
    late = evaluated.instruction(position) if evaluated is not None else None
    if mine.target is expect_answer and len({repr(one.args[3]) for one in found}) > 1:
        raise NotTraceable(mine.owner, f"it branches on the values of tensors{mine.args[4]}")
    args, kwargs = _merge(
        [(one.args, one.kwargs) for one in found],
        mine.owner,
        others,
        (late.args, late.kwargs) if late is not None else None,
        evaluated,
    )
    for other, one in zip(others, found):
        other.match_results(mine, one)
    if evaluated is not None and late is not None:
        evaluated.match_results(mine, late)
    return ForwardStep(position, mine.target, args, kwargs, mine.context, mine.results, mine.writes)


def _merge(
    nests: list[Any],
    owner: str,
    others: list[_Correspondence],
    late: Any,
    evaluated: _Correspondence | None,
) -> Any:
    """Return the arguments of a call, with slots for the values that differ between the recorded runs.

    ``nests``      the arguments in each run
    ``owner``      the path of the module that makes the call, for errors
    ``others``     for each run, the mapping of the first run's tensors to those of this run
    ``late``       the arguments in the run in evaluation mode, if there is one
    ``evaluated``  the mapping of the first run's tensors to those of the run in evaluation mode; None: there is none
    """
    columns = list(zip(*(parts(nest) for nest in nests), strict=True))
    lates: Iterator[Any] = iter(parts(late)) if evaluated is not None else iter(())
    merged = []
    for column in columns:
        part = _merge_part(column, owner, others)
        if evaluated is not None:
            part = _merge_late(part, column[0], next(lates), owner, evaluated)
        merged.append(part)
    order = iter(merged)
    return change(nests[0], lambda _: next(order))


def _merge_part(column: tuple[Any, ...], owner: str, others: list[_Correspondence]) -> Any:
    first = column[0]
    if isinstance(first, TensorSlot):
        for part, other in zip(column, others):
            if not isinstance(part, TensorSlot) or other.matches.get(first.index) != part.index:
                raise NotTraceable(owner, "which tensor it uses depends on sizes")
        return first
    if all(_same_value(first, part) for part in column):
        return first
    if all(isinstance(part, int | float) and not isinstance(part, bool) for part in column):
        return Number(tuple(column))
    raise NotTraceable(
        owner, f"a plain value differs with sizes: {first!r:.40}, {column[-1]!r:.40}"
    )


def _merge_late(part: Any, mine: Any, late: Any, owner: str, evaluated: _Correspondence) -> Any:
    if isinstance(mine, TensorSlot):
        if not isinstance(late, TensorSlot) or evaluated.matches.get(mine.index) != late.index:
            raise NotTraceable(owner, "which tensor it uses depends on the mode")
        return part
    if _same_value(mine, late):
        return part
    plain = bool, int, float, type(None)
    if isinstance(mine, plain) and isinstance(late, plain) and not isinstance(part, Number):
        return Switch(mine, late)
    raise NotTraceable(owner, "it computes something else in evaluation than in training")


def _same_value(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, types.FunctionType):
        return first.__code__ is second.__code__ and _cells(first) == _cells(second)
    if isinstance(first, Tensor):
        return False
    try:
        return bool(first == second)
    except Exception:  # incomparable values are not the same
        return False


def _cells(function: types.FunctionType) -> list[Any]:
    return [repr(cell.cell_contents) for cell in function.__closure__ or ()]


def _is_heavy(step: ForwardStep, trace: ForwardTrace) -> bool:
    """Return whether the step calls a module with parameters or buffers, or is a product with a parameter."""
    if step.module is not None:
        return next(step.module.parameters(), None) is not None or (
            next(step.module.buffers(), None) is not None
        )
    return step.name in _PRODUCTS and any(
        trace.tensors[i].origin is Origin.MODEL for i in step.uses
    )


def _mark_orders(steps: Sequence[ForwardStep], tensors: Sequence[ForwardTensor]) -> None:
    """Mark permutations of the rows, such as the indices returned by a sort along the rows, as tensors that cannot be
    split.

    A permutation has one number per row. But the numbers of some rows are meaningless alone, because they refer to
    other rows. So a permutation cannot cross a block boundary: a block that reorders rows must also restore their
    order.
    """
    orders: set[int] = set()
    for step in steps:
        made = {i for path, i in step.results if step.name == "argsort" or path[-1:] == (1,)}
        if step.name in _SORTS and _along_rows(step, tensors):
            orders |= made
        elif step.uses and orders.issuperset(step.uses):
            orders |= {i for _, i in step.results}
        elif orders.intersection(step.uses):
            whole = (i for i in step.writes if not tensors[i].traced.dtype.is_floating_point)
            orders.update(whole)
    for i in orders:
        tensors[i].rows = None


def _along_rows(step: ForwardStep, tensors: Sequence[ForwardTensor]) -> bool:
    """Return whether ``step``, a sort, sorts along the row dimension."""
    source = tensors[step.uses[0]]
    given = step.kwargs.get("dim", next((a for a in step.args[1:] if type(a) is int), -1))
    dims = len(source.shapes[0])
    return dims > 0 and source.rows == int(given) % dims


def _tensor(
    index: int, base: ForwardTrace, others: list[_Correspondence], rows: Sequence[int]
) -> ForwardTensor:
    traced = base.tensors[index]
    shapes = tuple(
        other.trace.tensors[other.matches.get(index, 0)].shape
        if index in other.matches
        else traced.shape
        for other in others
    )
    held = traced.origin in (Origin.MODEL, Origin.OUTSIDE)
    return ForwardTensor(index, traced, shapes, -1 if held else _rows(traced, shapes, rows))


def _rows(
    traced: TracedTensor, shapes: tuple[tuple[int, ...], ...], rows: Sequence[int]
) -> int | None:
    """Return the row dimension of a tensor; -1 if it has no rows; None if it depends on the rows in another way.

    ``shapes``: the tensor's shape in each run. ``rows``: the number of rows of each run. The row dimension is the only
    dimension whose size equals the number of rows in every run. No other size may change with the number of rows.
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    found = [
        d
        for d in range(len(shapes[0]))
        if all(shape[d] == count for shape, count in zip(shapes, rows))
    ]
    first = rows[0]
    moving = {
        d
        for shape, count in zip(shapes, rows)
        for d in range(len(shape))
        if count != first and shape[d] != shapes[0][d]
    }
    if not moving:
        return None if traced.depends and traced.origin is not Origin.INPUT else -1
    return found[0] if len(found) == 1 and moving == set(found) else None
