"""Values that a forward asks for and that follow from sizes, constants and buffers alone, such as whether a mask is
causal: what is recorded so far is carried out on real tensors.

Where torch's random numbers are among it, the question is answered only if the answer does not depend on what is drawn:
a layer that is dropped with probability 0 is never dropped.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import HangError
from parallax.model.block import TensorSlot, leaves
from parallax.model.recording.fakes import FakeModel, KeepsState, without_modes
from parallax.model.recording.trace import (
    ForwardTrace,
    Instruction,
    ModulePath,
    Origin,
    change,
)

_DRAWS = "rand", "rand_like"
_OTHER_DRAWS = ("rand", "bernoulli", "dropout", "multinomial", "normal", "exponential", "uniform")
_EXTREMES = 0.0, 1 - 2**-24
"""The least and the most that a number in [0, 1) may be, of which answers must not depend."""


class StaysWhole(Exception):
    """The forward of module ``owner`` does what a record cannot hold."""

    def __init__(self, owner: str, why: str) -> None:
        super().__init__(why)
        self.owner = owner


class WritesParameter(Exception):
    """The forward changes the parameter of that name."""


OWN_ERRORS = StaysWhole, WritesParameter, KeepsState, HangError


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of the user's own code among ``frames``; empty where there is none."""
    own = [f for f in frames if "/torch/" not in f.filename and "/parallax/" not in f.filename]
    return f", at {own[-1].filename}:{own[-1].lineno}" if own else ""


class KnownValues:
    """Answers what a run asks of its fake tensors; ``numbers`` are theirs in ``trace``."""

    def __init__(self, fakes: FakeModel, trace: ForwardTrace, numbers: Mapping[int, int]) -> None:
        self._fakes, self._trace, self._numbers = fakes, trace, numbers
        self._held: dict[int, Tensor] = {}

    def hold(self, number: int, tensor: Tensor) -> None:
        """Tensor ``number`` of the trace is one of the model's own."""
        self._held[number] = tensor

    def answer(self, ask: Callable[..., Any], args: Any, kwargs: Any, owner: str) -> Any:
        """What ``ask`` gives with the values that its tensors have. Raises :class:`StaysWhole` for ``owner`` where
        those are not known, or not the same whatever is drawn."""
        try:
            answers = [self._answer(ask, args, kwargs, drawn) for drawn in _EXTREMES]
        except KeyError:
            answers = []
        if not answers or repr(answers[0]) != repr(answers[1]):
            what = "random numbers" if answers else "the values of tensors"
            raise StaysWhole(owner, f"it decides by {what}{place(traceback.extract_stack())}")
        return answers[0]

    def _answer(self, ask: Callable[..., Any], args: Any, kwargs: Any, drawn: float) -> Any:
        values: dict[int, Any] = {}
        with without_modes():
            for instruction in self._trace.instructions:
                self._carry_out(instruction, values, drawn)

            def real(part: Any) -> Any:
                if not isinstance(part, Tensor):
                    return part
                number = self._numbers[id(part)]
                return values[number] if number in values else self._given(number)

            return ask(*change(args, real), **change(kwargs, real))

    def _carry_out(self, instruction: Instruction, values: dict[int, Any], drawn: float) -> None:
        """Run an instruction on real tensors, if all that it uses are there."""

        def real(part: Any) -> Any:
            if not isinstance(part, TensorSlot):
                return part
            return values[part.index] if part.index in values else self._given(part.index)

        if isinstance(instruction.target, ModulePath):
            return
        with contextlib.suppress(KeyError):
            args, kwargs = change(instruction.args, real), change(instruction.kwargs, real)
            if instruction.name in _DRAWS:
                found: Any = torch.full_like(instruction.target(*args, **kwargs), drawn)
            elif any(word in instruction.name for word in _OTHER_DRAWS):
                return
            else:
                found = instruction.target(*args, **kwargs)
            at = {path: part for path, part in leaves(found) if isinstance(part, Tensor)}
            values |= {number: at[path] for path, number in instruction.results}

    def _given(self, number: int) -> Tensor:
        """A tensor that no instruction makes. Raises ``KeyError`` for inputs and parameters."""
        traced = self._trace.tensors[number]
        if traced.origin is Origin.OUTSIDE and traced.value is not None:
            return traced.value
        held = self._held[number]
        if isinstance(held, nn.Parameter):
            raise KeyError(number)
        return self._fakes.value(held)
