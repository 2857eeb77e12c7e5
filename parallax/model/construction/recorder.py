"""Run a constructor on meta tensors, and log its operations.

The model that is built has all tensors on the meta device. Every operator is intercepted below autograd. It runs on
meta tensors, which gives shapes and shared storage, and is logged if it writes anything. Values that Python needs
(``item()``, ``nonzero()``) are computed at once by replaying the log, so a constructor may branch on values.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallax.errors import HangError
from parallax.model.construction.generators import Generators
from parallax.model.construction.log import Operation, OperationLog, Unrecordable, View
from parallax.model.construction.replay import Replay, change, flat, plain_execution
from parallax.model.private import OperatorMode, without_function_modes, without_operator_modes

logger = logging.getLogger("parallax")

T = TypeVar("T")

_REMEMBERED_BYTES = 1 << 20  # values up to this size are cached until their memory is written again
_SET_STORAGE = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)


_RECORDING: ContextVar[OperatorRecorder | None] = ContextVar("recording", default=None)


def fill(tensor: Tensor, function: Callable[[Tensor], None]) -> None:
    """Initialize a whole tensor by ``function(tensor)``.

    If a constructor is being recorded, the call is deferred until the tensor's value is requested. So if ``function``
    reads a file, each stage reads only the values of its own tensors.
    """
    recorder = _RECORDING.get()
    if recorder is not None:
        recorder.log_filling(tensor, function)
        return
    with torch.no_grad():
        function(tensor)


class OperatorRecorder(OperatorMode):
    """Logs the operators that run in its context.

    ``seed`` seeds the random numbers whose values the constructor reads.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.log = OperationLog()
        self._replay, self._draws = Replay(self.log, seed), Generators(seed)
        self.to_meta = False
        """Whether the constructor itself names the meta device in the current call."""
        self._remembered: dict[View, tuple[int, Tensor]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which the constructor runs. On exit, the states of all random generators are restored."""
        token = _RECORDING.set(self)
        try:
            with self._draws.begun(), self:
                yield
        finally:
            _RECORDING.reset(token)

    def log_filling(self, tensor: Tensor, function: Callable[[Tensor], None]) -> None:
        """Log that ``function`` overwrites the whole ``tensor``."""
        with without_function_modes(), without_operator_modes():
            self.log.adopt(tensor.detach())
            view = self.log.view_of(tensor)
        operation = Operation(function, (view,), {})
        operation.writes = operation.touches = (view.cell,)
        operation.reads = () if view.covers else (view.cell,)
        view.cell.writes.append(len(self.log.operations))
        self.log.operations.append(operation)

    def real(self, tensor: Tensor) -> Tensor:
        """Return a real tensor with the current value of a recorded ``tensor``."""
        with without_function_modes(), without_operator_modes():
            cell = self.log.cell_of(tensor)
            if cell is None:
                return tensor
            view = self.log.view_of(tensor)
            known, value = self._remembered.get(view, (-1, tensor))
            if known != len(cell.writes):
                (value,) = self._replay.values([view])
                if view.nbytes <= _REMEMBERED_BYTES:
                    self._remembered[view] = (len(cell.writes), value)
            return value.clone()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on meta tensors, log it if it writes anything, and return its results.

        If an operand's class has a ``__torch_dispatch__`` of its own, the operator is first decomposed into plain
        operators, for which torch calls this method again.
        """
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        with without_function_modes():
            return self._call(function, operator(function), args, kwargs or {})

    def _call(self, function: Any, kind: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(_all(Tensor, (args, kwargs)))
        absent = [
            tensor for tensor in tensors if tensor.is_meta and self.log.cell_of(tensor) is None
        ]
        device = kwargs.get("device")
        if self.to_meta and device is not None and torch.device(device).type == "meta":
            return function(*change(args, self._bare), **change(kwargs, self._bare))
        if absent and (device is None or kind.copies_to_device):
            return self._call_without_values(function, kind, args, kwargs)
        if not tensors and not kind.takes_device:
            return function(*args, **kwargs)
        if kind.returns_values:
            return self._run_on_values(function, args, kwargs)
        if function is torch.ops.aten.lift_fresh.default:
            return self.log.adopt(args[0])
        if function in _SET_STORAGE and args[1].device.type != "meta":
            looking = torch.empty(0, dtype=args[0].dtype)
            return args[0].set_(self.log.adopt(function(looking, *args[1:], **kwargs)))
        return self._log(function, kind, args, kwargs)

    def _bare(self, part: Any) -> Any:
        """Return a tensor argument on the meta device, or any other value unchanged.

        A zero-dimensional tensor that existed before the constructor is also returned unchanged, because torch uses it
        to determine the dtypes of results.
        """
        if not isinstance(part, Tensor) or part.is_meta:
            return part
        if part.dim() == 0 and self.log.cell_of(part) is None:
            return part
        return self.log.adopt(part)

    def _call_without_values(
        self, function: Any, kind: Operator, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator on a tensor that the constructor itself created on the meta device.

        The results have no values, with or without recording.
        """
        given = {**dict(zip(kind.names, args)), **kwargs}
        written = [t for name in kind.written for t in _all(Tensor, given.get(name))]
        if kwargs.get("device") is not None or (
            not kind.changes_metadata and any(self.log.cell_of(t) or not t.is_meta for t in written)
        ):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        return function(*change(args, self._bare), **change(kwargs, self._bare))

    def _log(self, function: Any, kind: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(kind.names, args)), **kwargs}
        written = [t for name in kind.written for t in _all(Tensor, given.get(name))]
        bare = {id(t): self.log.adopt(t) for t in written if not t.is_meta}
        originals = {id(bare[id(t)]): t for t in written if id(t) in bare}

        def strip(part: Any) -> Any:
            return bare[id(part)] if id(part) in bare else self._bare(part)

        args, kwargs = change(args, strip), change(kwargs, strip)
        operation = self._describe(function, kind, args, kwargs, [strip(t) for t in written])
        generator = kwargs.get("generator")
        if "device" in operation.kwargs:
            kwargs["device"] = torch.device("meta")
        results = self._shapes(function, kind, args, kwargs)
        self._append(operation, kind, results, generator)
        return change(results, lambda part: originals.get(id(part), part))

    def _describe(
        self,
        function: Any,
        kind: Operator,
        args: Any,
        kwargs: dict[str, Any],
        written: list[Tensor],
    ) -> Operation:
        """Return the log entry of an operator call.

        The entry is created before the call, because the call may resize its arguments. ``written``: the tensors that
        the operator writes in place.
        """

        def view(part: Any) -> Any:
            if isinstance(part, Tensor) and self.log.cell_of(part) is not None:
                return self.log.view_of(part)
            return None if isinstance(part, torch.Generator) else part

        operation = Operation(function, change(args, view), change(kwargs, view))
        if "device" in kwargs or (
            kind.takes_device and not any(True for _ in _all(Tensor, (args, kwargs)))
        ):
            operation.kwargs["device"] = torch.device("cpu")
        operation.kwargs.pop("pin_memory", None)
        views = list(_all(View, (operation.args, operation.kwargs)))
        into = [self.log.view_of(tensor) for tensor in written]
        overwritten = {v.cell for v in into if kind.overwrites and v.covers}
        overwritten -= {v.cell for v in Counter(views) - Counter(into)}  # also read
        operation.writes = tuple(dict.fromkeys(v.cell for v in into))
        operation.reads = tuple(dict.fromkeys(v.cell for v in views if v.cell not in overwritten))
        operation.touches = tuple(dict.fromkeys(v.cell for v in views))
        return operation

    def _shapes(self, function: Any, kind: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its results as meta tensors.

        If the sizes of results depend on values, or torch has no meta kernel, the operator runs on real tensors. An
        invalid call then raises the same error as without recording.
        """
        results = NotImplemented
        if not kind.data_dependent:
            try:
                if _fills(kind, args, kwargs):
                    function(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs)
                    results = args[0]
                else:
                    results = function(*args, **kwargs)
            except HangError:
                raise
            except Exception:  # real tensors raise it again
                logger.debug("%s has no meta kernel", function)
        if results is NotImplemented:
            results = self._run_on_values(function, args, kwargs)
        return change(results, lambda p: self._bare(p) if isinstance(p, Tensor) else p)

    def _run_on_values(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on real tensors, and return its results: plain values, and meta tensors in place of real
        ones.

        In-place writes into the real tensors are discarded.
        """
        originals: dict[int, Tensor] = {}

        def real(part: Any) -> Any:
            if isinstance(part, torch.Generator):
                return None
            if not isinstance(part, Tensor) or self.log.cell_of(part) is None:
                return part
            value = self.real(part)
            originals[id(value)] = part
            return value

        args, kwargs = change(args, real), change(kwargs, real)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        with plain_execution():
            results = function(*args, **kwargs)

        def bare(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            if id(part) in originals:
                return originals[id(part)]
            if part.layout is not torch.strided or part.is_quantized:
                raise Unrecordable(f"{function} makes a tensor of type {part.dtype}, {part.layout}")
            return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")

        return change(results, bare)

    def _append(self, operation: Operation, kind: Operator, results: Any, generator: Any) -> None:
        """Append ``operation`` to the log if it writes into any storage, and add the storages that it creates to the
        log.

        ``results``: the operator's results on the meta device. ``generator``: the generator from which the operator
        draws, if it draws; None: torch's default generator.
        """
        made = [(i, t) for i, t in enumerate(flat(results)) if isinstance(t, Tensor)]
        outputs = []
        for i, tensor in made:
            if self.log.cell_of(tensor) is None:
                self.log.adopt(tensor)
                outputs.append((i, self.log.view_of(tensor)))
        if kind.changes_metadata or kind.only_allocates or not (outputs or operation.writes):
            return
        place = len(self.log.operations)
        if kind.draws:
            operation.drawn = self._draws.next(generator, place)
        operation.outputs = tuple(outputs)
        new = [view.cell for _, view in outputs]
        operation.touches = tuple(dict.fromkeys((*operation.touches, *new)))
        for cell in dict.fromkeys((*operation.writes, *new)):
            cell.writes.append(place)
        self.log.operations.append(operation)


def _fills(kind: Operator, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the operator fills its first argument with random values, and all its other arguments are numbers.

    Such an operator returns its first argument, so it need not run on the meta device. On that device, torch implements
    the operator in Python, and imports its compiler for this. The caller runs the operator on an empty tensor instead,
    which checks the numbers.
    """
    return (
        kind.draws
        and kind.overwrites
        and [id(tensor) for tensor in _all(Tensor, (args, kwargs))] == [id(args[0])]
        and 0 not in args[0].stride()  # torch rejects self-overlapping memory
    )


def _all(kind: type[T], value: Any) -> Iterator[T]:
    """Yield every instance of the class ``kind`` in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _all(kind, part)
    elif isinstance(value, dict):
        yield from _all(kind, list(value.values()))


_EMPTY = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
"""Operators that only allocate memory."""

_OVERWRITES = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
"""In-place operators that ignore the previous content of the tensor."""

_ALSO_WRITTEN = {"native_batch_norm": ("running_mean", "running_var")}
"""Arguments that an operator writes although its schema does not declare this."""


@dataclass(frozen=True)
class Operator:
    """The properties of an operator.

    ``names``             names of the operator's arguments
    ``written``           names of the arguments that the operator writes in place
    ``overwrites``        the operator does not read the arguments that it writes
    ``changes_metadata``  the operator changes only how a tensor views its memory
    ``draws``             the operator draws random numbers
    ``returns_values``    the operator returns plain values instead of tensors
    ``only_allocates``    the operator returns uninitialized memory
    ``data_dependent``    the sizes of the results depend on values
    ``takes_device``      the operator has a device argument
    ``copies_to_device``  the operator copies its input to the device in that argument
    """

    names: tuple[str, ...]
    written: frozenset[str]
    overwrites: bool
    changes_metadata: bool
    draws: bool
    returns_values: bool
    only_allocates: bool
    data_dependent: bool
    takes_device: bool
    copies_to_device: bool


@cache
def operator(function: Any) -> Operator:
    """Return the properties of an operator overload, from its schema and tags."""
    schema = function._schema
    name = schema.name.rpartition(":")[2]
    arguments, tags = schema.arguments, function.tags
    written = frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)
    written |= frozenset(_ALSO_WRITTEN.get(name, ()))
    returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
    return Operator(
        names=tuple(argument.name for argument in arguments),
        written=written,
        overwrites=name in _OVERWRITES or all(a.is_out for a in arguments if a.name in written),
        changes_metadata=torch.Tag.inplace_view in tags,
        draws=torch.Tag.nondeterministic_seeded in tags
        or any(a.name == "generator" for a in arguments),
        returns_values=not returns_tensors and not written,
        only_allocates=schema.name.startswith("aten::") and name in _EMPTY,
        data_dependent=torch.Tag.dynamic_output_shape in tags
        or torch.Tag.data_dependent_output in tags,
        takes_device=any(a.name == "device" for a in arguments),
        copies_to_device=name == "_to_copy",
    )
