"""Answer queries for tensor values while a forward is recorded, by running the recorded instructions on real tensors.

A value that depends only on sizes, constants and buffers is certain, for example whether a mask is causal. A value that
depends on integer inputs is computed from the sample. Activations and parameters are unknown. They are filled with
several values in turn, and an answer is accepted only if it is equal for all fillings, for example that no number is
NaN. Answers that depend on inputs or fillings are assumptions, which are checked with every batch (:mod:`.expected`).

Uniform random numbers in [0, 1) are filled with their least and greatest value, and with 0.5. So a branch on them is
accepted only if all three numbers take it: a layer that its model drops with probability 0 is traced, and one that it
drops with probability 0.1 is not traceable.
"""

from __future__ import annotations

import contextlib
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_packed_sequence

from parallax.errors import ConfigError, HangError
from parallax.model.block import TensorSlot, can_require_grad, leaves, tensors_in, transform
from parallax.model.recording.fakes import FakeModel, KeepsState, without_modes
from parallax.model.recording.flow import SHAPE_ONLY, DataFlow, storage_of, tensors_of
from parallax.model.recording.trace import (
    ForwardTrace,
    Instruction,
    ModulePath,
    Origin,
    SizeOf,
    change,
    draws,
    parts,
)

_UNIFORM = "rand", "rand_like"


@dataclass(frozen=True)
class _Filling:
    """Numbers that replace unknown values.

    ``drawn`` replaces uniform random numbers in [0, 1). ``fill(tensor)`` fills an activation or parameter.
    """

    drawn: float
    fill: Callable[[Tensor], Tensor]


_FILLINGS = (
    _Filling(0.0, lambda bare: bare.zero_()),
    _Filling(1 - 2**-24, lambda bare: bare.fill_(1)),
    _Filling(0.5, lambda bare: bare.normal_(generator=torch.Generator().manual_seed(1))),
)


class NotTraceable(Exception):
    """Raised if the forward of the module ``owner`` does something that a trace cannot represent."""

    def __init__(self, owner: str, why: str) -> None:
        super().__init__(why)
        self.owner = owner


class ChangedByCaller(NotTraceable):
    """Raised if the forward of the module ``owner`` sets an attribute of a submodule that the submodule's forward
    reads.
    """


class WritesParameter(Exception):
    """Raised if the forward changes the parameter called ``name``."""


# Not any folder of this name: a clone of the project may hold the user's files.
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
OWN_ERRORS = NotTraceable, WritesParameter, KeepsState, HangError, ConfigError


def user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return ", at FILE:LINE" for the innermost frame of the user's own code among ``frames``; '' if there is none."""
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(_OURS)]
    return f", at {own[-1].filename}:{own[-1].lineno}" if own else ""


def follows_from_lengths(target: Any) -> bool:
    """Return whether a call packs or pads rows, so that the sizes of its results depend on the rows' lengths."""
    return getattr(target, "__name__", "") in ("_pack_padded_sequence", "_pad_packed_sequence")


def total_length() -> int | None:
    """Return the ``total_length`` argument of the pad_packed_sequence call that is running, or None."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code is pad_packed_sequence.__code__:
            return frame.f_locals["total_length"]
    return None


@contextlib.contextmanager
def no_python_randomness(owner: Callable[[], str]) -> Iterator[None]:
    """A context that raises :class:`NotTraceable` if random numbers of Python or numpy are drawn inside.

    The trace would repeat these numbers for every batch. ``owner()`` returns the path of the module whose forward runs.
    """
    before = _draw_counts()
    yield
    if before != _draw_counts():
        raise NotTraceable(
            owner(), "it draws random numbers of Python or numpy; draw them with torch"
        )


def _draw_counts() -> tuple[int, int]:
    """Return numbers that change if random numbers of Python or numpy are drawn."""
    legacy = numpy.random.get_state(legacy=False)  # noqa: NPY002  # the global generator
    return random.getstate()[1][-1], int(legacy["state"]["pos"])


def without_values(fakes: FakeModel, flow: DataFlow, answer: Any, given: Any) -> Any:
    """Return ``answer``, the result of a call on real values, with fake tensors in place of its tensors.

    ``given``: the call's arguments. If any tensor in them depends on the model's inputs, the fake tensors are marked as
    dependent, too.
    """
    sources = list(tensors_of(given))
    follows = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)

    def bare(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        made = fakes.fake(tuple(part.shape), part.dtype)
        for tensor in sources:
            if flow.is_dependent(storage_of(tensor)):
                flow.mark_dependent(made)
        return made.requires_grad_().clone() if follows and can_require_grad(made) else made

    return transform(answer, bare)


@dataclass(frozen=True)
class Answer:
    """The answer to a query for values. ``assumed``: the answer may differ for another batch."""

    value: Any
    assumed: bool


class ValueOracle:
    """Answers queries of a run for the values of its fake tensors.

    ``numbers``: {id of a tensor: its number in ``trace``}. ``given(name)`` returns the sample's value of an input, or
    raises ``KeyError`` if the sample has none.
    """

    def __init__(
        self,
        fakes: FakeModel,
        trace: ForwardTrace,
        numbers: Mapping[int, int],
        given: Callable[[str], Tensor],
    ) -> None:
        self._fakes, self._trace, self._numbers, self._given = fakes, trace, numbers, given
        self._held: dict[int, Tensor] = {}

    def register_tensor(self, number: int, tensor: Tensor) -> None:
        """Register a tensor of the model that has ``number`` in the trace."""
        self._held[number] = tensor

    def answer(self, function: Callable[..., Any], args: Any, kwargs: Any, owner: str) -> Answer:
        """Return the result of ``function`` on real values.

        Raises :class:`NotTraceable`, with the module ``owner``, if a value is unavailable or if the result depends on
        the fillings of unknown values.
        """
        tensors = list(tensors_in((args, kwargs)))
        if any(tensor.is_nested for tensor in tensors):
            where = user_line(traceback.extract_stack())
            raise NotTraceable(owner, f"it reads the row lengths of a nested tensor{where}")
        requested = [self._numbers[id(tensor)] for tensor in tensors]
        replay = _TraceReplay(self, requested)
        try:
            found = [replay.evaluate(filling, function, args, kwargs) for filling in _FILLINGS]
        except KeyError:
            found = []
        if not found or len({repr(transform(value, _metadata)) for value in found}) > 1:
            what = "random numbers" if found and replay.drawn else "the values of tensors"
            raise NotTraceable(
                owner, f"it branches on {what}{user_line(traceback.extract_stack())}"
            )
        return Answer(found[0], replay.assumed)

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the value of ``tensor``; None if it is unknown."""
        number = self._numbers.get(id(tensor))
        if number is None:
            return None
        replay = _TraceReplay(self, [number])
        if number in replay.unknown:
            return None
        with contextlib.suppress(KeyError):
            found = [replay.evaluate(filling, lambda t: t, (tensor,), {}) for filling in _FILLINGS]
            if all(torch.equal(found[0], other) for other in found):
                return found[0]
        return None

    def number(self, tensor: Tensor) -> int:
        """Return the number of ``tensor`` in the trace."""
        return self._numbers[id(tensor)]

    @property
    def trace(self) -> ForwardTrace:
        """The instructions recorded so far."""
        return self._trace

    def is_unknown(self, number: int) -> bool:
        """Return whether the value of tensor ``number`` is unknown. The tensor is not the result of an instruction.

        The values of parameters are unknown, and so are those of floating-point inputs that are not masks.
        """
        traced = self._trace.tensors[number]
        if traced.origin is Origin.INPUT:
            with without_modes():
                return _floats(traced.dtype) and not _is_mask(self._given_or_none(number))
        return isinstance(self._held.get(number), nn.Parameter)

    def source(self, number: int) -> Tensor:
        """Return the value of tensor ``number``, which is an input or a tensor of the model."""
        traced = self._trace.tensors[number]
        if traced.origin is Origin.INPUT:
            return self._given(traced.name).clone()
        if traced.origin is Origin.OUTSIDE and traced.value is not None:
            return traced.value
        return self._fakes.value(self._held[number])

    def _given_or_none(self, number: int) -> Tensor | None:
        with contextlib.suppress(KeyError):
            return self._given(self._trace.tensors[number].name)
        return None


class _TraceReplay:
    """Runs the instructions of a trace on which the tensors ``requested`` depend, with fillings for unknown values.

    ``known``    the oracle that has the trace and the known values
    ``unknown``  numbers of floating-point tensors that depend on parameters or activations. They are filled instead of
                 computed.
    ``assumed``  whether values of inputs or fillings were used
    ``drawn``    whether random numbers were used
    """

    def __init__(self, known: ValueOracle, requested: list[int]) -> None:
        self._known, self._tensors = known, known.trace.tensors
        self.assumed = self.drawn = False
        self.unknown: set[int] = set()
        made = {n for each in known.trace.instructions for _, n in each.results}
        self.unknown |= {
            n for n in range(len(self._tensors)) if n not in made and known.is_unknown(n)
        }
        for each in known.trace.instructions:
            self._note_unknown(each)
        self._steps = self._needed(requested)

    def evaluate(
        self, filling: _Filling, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return the result of ``function`` on real values, with ``filling`` in place of unknown values.

        Raises ``KeyError`` if a value is unavailable.
        """
        values: dict[int, Tensor] = {}
        with without_modes():
            for instruction in self._steps:
                self._carry_out(instruction, values, filling)

            def real(part: Any) -> Any:
                if not isinstance(part, Tensor):
                    return part
                return self._value(self._known.number(part), values, filling)

            return function(*change(args, real), **change(kwargs, real))

    def _note_unknown(self, instruction: Instruction) -> None:
        tainted = (
            isinstance(instruction.target, ModulePath)
            or (draws(instruction.name) and instruction.name not in _UNIFORM)
            or any(n in self.unknown for n in _uses(instruction))
        )
        if tainted and instruction.name not in SHAPE_ONLY:
            for _, n in instruction.results:
                if _floats(self._tensors[n].dtype):
                    self.unknown.add(n)

    def _needed(self, requested: list[int]) -> list[Instruction]:
        """Return the instructions that compute the tensors ``requested`` or write into them, in order."""
        wanted = {self._tensors[n].storage for n in requested if n not in self.unknown}
        found = []
        for each in reversed(self._known.trace.instructions):
            gives = [n for _, n in each.results if n not in self.unknown]
            if any(self._tensors[n].storage in wanted for n in [*gives, *each.writes]):
                found.append(each)
                wanted |= {self._tensors[n].storage for n in _uses(each) if n not in self.unknown}
        return found[::-1]

    def _carry_out(
        self, instruction: Instruction, values: dict[int, Tensor], filling: _Filling
    ) -> None:
        """Run an instruction on real tensors, and store its results in ``values``.

        Calls of modules, and random operations other than uniform ones, are skipped. So is an instruction that fails or
        has an unavailable operand. ``filling``: what replaces unknown values and uniform random numbers.
        """

        def real(part: Any) -> Any:
            if not isinstance(part, TensorSlot):
                return part
            found = self._value(part.index, values, filling)
            return found.shape[part.dimension] if isinstance(part, SizeOf) else found

        if isinstance(instruction.target, ModulePath):
            return
        uniform = instruction.name in _UNIFORM
        if draws(instruction.name):
            self.drawn = True
            if not uniform:
                return
        # Some operators reject the filling; their results are then unknown.
        with contextlib.suppress(KeyError, IndexError, ValueError, RuntimeError):
            args, kwargs = change(instruction.args, real), change(instruction.kwargs, real)
            found = instruction.target(*args, **kwargs)
            if uniform:
                found = torch.full_like(found, filling.drawn)
            at = {path: part for path, part in leaves(found) if isinstance(part, Tensor)}
            values |= {n: at[path] for path, n in instruction.results}

    def _value(self, number: int, values: dict[int, Tensor], filling: _Filling) -> Tensor:
        if number in values:
            return values[number]
        traced = self._tensors[number]
        if number in self.unknown:
            self.assumed = True
            values[number] = filling.fill(torch.empty(traced.shape, dtype=traced.dtype))
        else:
            self.assumed |= traced.origin is Origin.INPUT
            values[number] = self._known.source(number)
        return values[number]


def _uses(instruction: Instruction) -> list[int]:
    found = parts((instruction.args, instruction.kwargs))
    return [part.index for part in found if isinstance(part, TensorSlot)]


def _metadata(part: Any) -> Any:
    """Return a tensor's shape and dtype, to compare tensors without their values; any other value unchanged."""
    return (tuple(part.shape), part.dtype) if isinstance(part, Tensor) else part


def _is_mask(tensor: Tensor | None) -> bool:
    """Return whether a floating-point tensor consists of zeros and ones, and contains both.

    All zeros, or all ones, may be a coincidence.
    """
    if tensor is None:
        return False
    ones = tensor == 1
    return bool((ones | (tensor == 0)).all() and ones.any() and not ones.all())


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
