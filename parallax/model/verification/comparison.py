"""Compare the chain of blocks with the model's own forward, on the same rows.

Both run several times, each time with another number of rows. They are not reset in between, so that changes of buffers
are compared, too. In training, outputs, loss, gradients and buffers are compared; in evaluation, outputs and loss.

If something differs, both run again to find the block. If outputs differ, it is the first block with an output that the
model's own forward never computes, or with outputs that only repeat its inputs. If gradients differ, it is the last
block with a wrong gradient, because the backward runs from the last block to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import DataError, DescribeError, HangError, printable
from parallax.model.block import Field, flatten, leaves, plain_rows
from parallax.model.describe import Chain, parameter_names
from parallax.model.losses import call_loss
from parallax.model.verification.differences import first_difference, tolerance
from parallax.model.verification.draws import SameDraws, begin_draws
from parallax.model.verification.runs import (
    BlockFails,
    BlocksInOrder,
    ComparedModel,
    Loss,
    OwnForward,
    SampleRows,
    gradients,
)

REMEDIES = (
    "give the model a method blocks() whose parts, called in order, are its forward, or make it one block "
    "(model.blocks=['']); model.verify=false trains the chain as it is"
)


class CannotRun(Exception):
    """Raised if the model's own forward or its loss raises an error on the given rows."""


@dataclass(frozen=True)
class _Setting:
    """The setting of one comparison: number of rows, and training or evaluation mode."""

    rows: int
    training: bool

    def __str__(self) -> str:
        return f"{'training' if self.training else 'evaluation'}, {self.rows} row(s)"


@dataclass(frozen=True)
class _Ran:
    """The results of one run of the model or of the chain, each as {name: tensor}."""

    outputs: dict[str, Tensor]
    loss: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


# {kind of a difference: field of _Ran}, in the order of the comparison
_RESULTS = {"output": "outputs", "loss": "loss", "gradient": "gradients", "buffer": "buffers"}


class _Differs(Exception):
    """Raised for a difference between chain and model.

    ``where``  the setting of the comparison
    ``kind``   output, loss, gradient, buffer or block
    ``name``   the name of the tensor, or the number of the block
    ``how``    a text that describes the difference
    """

    def __init__(self, where: _Setting, kind: str, name: str, how: str) -> None:
        super().__init__(f"{kind} {name}: {how}")
        self.where, self.kind, self.name, self.how = where, kind, name, how


def has_own_forward(chain: Chain) -> bool:
    """Return whether the model has a forward with which the chain can be compared."""
    return type(chain.model).forward is not nn.Module.forward


def compare_with_own_forward(
    chain: Chain, loss: Loss, batch: SampleRows, counts: Sequence[int]
) -> str:
    """Compare chain and model on the first rows of ``batch``, for each number of rows in ``counts``.

    Return a text on what could not be compared, or ''. Raises :class:`DescribeError` if the chain computes other values
    than the model, and :class:`CannotRun` if the model cannot run on these rows.
    """
    training, evaluation = ([_Setting(rows, mode) for rows in counts] for mode in (True, False))
    comparison = _Comparison(chain, loss, batch)
    unlike = ""
    for passes in ([*training, *evaluation], evaluation):
        try:
            comparison.run(passes)
            break
        except _Differs as difference:
            mode = training if difference.where.training else evaluation
            if comparison.repeats(mode):
                raise DescribeError(comparison.difference_message(passes, difference)) from None
            unlike = "its forward draws other random numbers each time, so "
            if mode is evaluation:
                return f"{unlike}evaluation was not compared"
    return unlike and f"{unlike}only evaluation was compared, not training"


class _Comparison:
    def __init__(self, chain: Chain, loss: Loss, batch: SampleRows) -> None:
        self._chain, self._loss, self._batch = chain, loss, batch
        self._part = tolerance(chain.dtype)

    def run(self, passes: Sequence[_Setting]) -> None:
        blocks = BlocksInOrder(self._chain)
        own = OwnForward(self._chain, blocks)
        for each in passes:
            self._compare(own, blocks, each)

    def repeats(self, passes: Sequence[_Setting]) -> bool:
        """Return whether the model's own forward, run twice, gives equal results in the settings ``passes``."""
        blocks = BlocksInOrder(self._chain)
        first, second = OwnForward(self._chain, blocks), OwnForward(self._chain, blocks)
        try:
            for each in passes:
                self._compare(first, second, each)
        except _Differs:
            return False
        return True

    def difference_message(self, passes: Sequence[_Setting], difference: _Differs) -> str:
        """Return the message of the error for a chain that differs from the model. The message names the block that
        differs.

        ``passes``: all settings of the comparison. ``difference``: the first difference that was found.
        """
        model, where = type(self._chain.model).__name__, difference.where
        index = self._block_of(passes, difference)
        block, count = (
            printable(self._chain.blocks[index].name or "the model"),
            len(self._chain.blocks),
        )
        return (
            f"block {index + 1} of {count} ({block}) of {model} does not compute what the model's own forward does: "
            f"{self._what(difference)}, {printable(difference.how)} ({where}); {REMEDIES}"
        )

    def _what(self, difference: _Differs) -> str:
        if difference.kind == "block":
            return "it fails"
        return f"{difference.kind} {printable(difference.name)}".strip() + " differs"

    def _block_of(self, passes: Sequence[_Setting], difference: _Differs) -> int:
        last = len(self._chain.blocks) - 1
        names = parameter_names(self._chain, range(last + 1))
        if difference.kind == "gradient":
            return self._last_wrong_gradient(passes, difference)
        if difference.kind == "buffer":
            return names[difference.name][0]
        if difference.kind == "block":
            return int(difference.name) - 1
        return self._first_unknown(passes, difference.where)

    def _last_wrong_gradient(self, passes: Sequence[_Setting], difference: _Differs) -> int:
        blocks = BlocksInOrder(self._chain)
        own = OwnForward(self._chain, blocks)
        for each in passes:
            expected, found = self._ran(own, each), self._ran(blocks, each)
            if each == difference.where:
                break
        names = parameter_names(self._chain, range(len(self._chain.blocks)))
        wrong = [
            names[name][0]
            for name in expected.gradients
            if first_difference(
                {name: expected.gradients[name]}, {name: found.gradients[name]}, self._part
            )
        ]
        return max(wrong, default=names[difference.name][0])

    def _first_unknown(self, passes: Sequence[_Setting], where: _Setting) -> int:
        """Return the index of the first block that is wrong; the last block if none is found.

        A block is wrong if one of its outputs is a tensor that the model's own forward never computes, or if it has
        parameters but returns only tensors that earlier blocks have returned. ``where``: the setting in which a
        difference was found. ``passes``: all settings; those before ``where`` run first, because they change buffers.
        """
        blocks = BlocksInOrder(self._chain)
        own = OwnForward(self._chain, blocks)
        for each in passes:
            if each == where:
                break
            self._ran(own, each)
            self._ran(blocks, each)
        made, handed = _Digests(self._part), list[list[Tensor]]()
        made.add([*own.parameters().values(), *own.model.buffers()])
        made.add(self._batch.inputs(0, where.rows))
        blocks.after = lambda index, tensors: handed.append([t.detach().clone() for t in tensors])
        self._ran(own, where, made.add)
        self._ran(blocks, where)
        entering = _Digests(self._part)
        for index, given in enumerate(handed):
            works = any(True for _ in self._chain.blocks[index].module.parameters())
            idle = works and all(map(entering.has, given))
            if idle or not all(map(made.has, given)):
                return index
            entering.add(given)
        return len(handed) - 1

    def _compare(self, own: ComparedModel, other: ComparedModel, each: _Setting) -> None:
        try:
            expected = self._ran(own, each)
        except (HangError, DataError):  # DataError: of targets that the loss does not take
            raise
        except Exception as error:  # the model's code may raise anything
            if not each.training:
                return  # some models cannot run without gradients
            raise CannotRun(f"{type(error).__name__}: {_first_line(error)}") from error
        try:
            found = self._ran(other, each)
        except BlockFails as failure:
            if not each.training and isinstance(failure.error, DescribeError):
                return  # the chain was recorded for training only, and reports that itself
            how = f"{type(failure.error).__name__}: {_first_line(failure.error)}"
            raise _Differs(each, "block", str(failure.index + 1), how) from failure
        for kind, results in _RESULTS.items():
            a, b = getattr(expected, results), getattr(found, results)
            differing = first_difference(a, b, self._part)
            if differing is not None:
                raise _Differs(each, kind, *differing)

    def _ran(
        self,
        model: ComparedModel,
        each: _Setting,
        watch: Callable[[Any], None] = lambda found: None,
    ) -> _Ran:
        inputs, targets = self._batch.inputs(0, each.rows), self._batch.targets(0, each.rows)
        model.train(each.training)
        begin_draws()
        with SameDraws(watch), torch.set_grad_enabled(each.training):
            results = model.forward(inputs)
            outputs = {path: tensor.detach().clone() for path, tensor in _named(results)}
            loss = self._loss_of(results, targets)
            if each.training and loss.requires_grad:
                loss.backward()
        given = gradients(model) if each.training else {}
        buffers = {name: buffer.detach().clone() for name, buffer in model.buffers().items()}
        return _Ran(outputs, {"": loss.detach()}, given, buffers)

    def _loss_of(self, results: Any, targets: Any) -> Tensor:
        """Return the loss of ``results``, the return value of the model or of the chain.

        If the blocks are defined by the user, the chain does not restore the structure of the model's return value.
        Then only the tensors are passed to the loss, those of the model as well as those of the chain.
        """
        if self._chain.template is None:
            results = self._chain.results(flatten(results)[0])
        return call_loss(self._loss, results, targets)


@dataclass
class _Digests:
    """A set of tensors, for comparisons within a tolerance.

    A tensor is represented by two sums of its values, which do not depend on the order of dimensions. ``part``: the
    tolerance of a comparison, relative to the sum of absolute values. ``seen``: {number of elements: (sum of values,
    sum of absolute values) of each tensor}.
    """

    part: float
    seen: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, found: Any) -> None:
        for tensor in map(plain_rows, flatten(found)[0]):
            if not tensor.is_meta:
                self.seen.setdefault(tensor.numel(), []).append(_digest(tensor))

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor was added that seems equal to ``tensor``: it has as many elements, and its two sums
        differ by the tolerance at most."""
        total, size = _digest(tensor)
        return any(
            abs(total - a) <= self.part * size and abs(size - b) <= self.part * size
            for a, b in self.seen.get(tensor.numel(), [])
        )


def _digest(tensor: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        plain = real.detach().double().nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
        return float(plain.sum()), float(plain.abs().sum())


def _named(results: Any) -> Iterator[tuple[str, Tensor]]:
    for path, part in leaves(results):
        if isinstance(part, Tensor):
            name = ".".join(k.name if isinstance(k, Field) else str(k) for k in path)
            yield name, plain_rows(part)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
