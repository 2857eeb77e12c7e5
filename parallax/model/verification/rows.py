"""Check whether a batch may be split into micro-batches, by comparing its loss and gradients with those of its parts.

A step's loss is the mean over all rows. If the loss has a method ``count``, or is a cross-entropy, it is the mean over
all counted targets instead (:mod:`parallax.model.counting`). The parts are weighted accordingly. The result of a split
batch differs if rows interact: in a contrastive loss, in batch statistics, in a user-defined mean over some targets. If
the outputs of all parts are gathered for one loss over the whole batch, only interactions inside the model matter.

During the check dropout is off. BatchNorms use their running statistics, because the user chooses the rows over which
their statistics are computed. Buffers are restored after each part.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallax.errors import HangError
from parallax.model.block import flatten, rebuild, tensors_in, transform
from parallax.model.counting import Counting
from parallax.model.verification.differences import first_difference, tolerance
from parallax.model.verification.draws import WithoutDraws
from parallax.model.verification.runs import BlocksInOrder, Loss, SampleRows, gradients

logger = logging.getLogger("parallax")

_BOUNDS = (0, 2, 5), (0, 2, 4), (0, 1, 2)
"""Row indices between which the sample is split into two parts.

If the model cannot run on these, the next ones are tried.
"""
_ROWS_OF_LOSS = 16
_LARGEST_OUTPUTS = 2**26  # elements
_LOOSER = 10.0  # looser than for equal rows, because other shapes select other kernels


@dataclass(frozen=True)
class _Summed:
    """The loss and the gradients of a step over all its parts.

    ``results``: the model's return value for the last part, or for all rows if the outputs were gathered. ``drew``:
    random numbers were drawn.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    results: Any
    drew: bool


@dataclass(frozen=True)
class Verdict:
    """The findings of the checks before the first step. An empty text means that no difference was found.

    ``coupled``: rows of a batch interact; the text says how a split batch differs from a whole one. ``gathered``: the
    text says how a split batch still differs if its outputs are gathered for one loss. ``padded``: the loss of a row
    depends on its padding; the text says how.
    """

    coupled: str = ""
    gathered: str = ""
    padded: str = ""


def find_coupling(blocks: BlocksInOrder, loss: Loss, batch: SampleRows) -> Verdict:
    """Return a :class:`Verdict` that says whether rows of ``batch`` interact, in the loss or in the model."""
    for bounds in _BOUNDS:
        if bounds[-1] > len(batch):
            continue
        try:
            return _Parts(blocks, loss, batch, bounds).find()
        except HangError:
            raise
        except Exception as error:  # the model's code may raise anything on so few rows
            logger.debug("rows were not split at %s: %s", bounds, error)
    return Verdict()


class _Parts:
    def __init__(
        self, blocks: BlocksInOrder, loss: Loss, batch: SampleRows, bounds: Sequence[int]
    ) -> None:
        self._blocks, self._loss, self._batch, self._bounds = blocks, loss, batch, bounds
        self._part = _LOOSER * tolerance(blocks.chain.dtype)
        self._count, self._counting = getattr(loss, "count", None), Counting(loss)

    def find(self) -> Verdict:
        whole = self._bounds[0], self._bounds[-1]
        for training in (True, False):
            at_once = self._run(whole, training)
            if not at_once.drew:
                found = self._compare(at_once, self._run(self._bounds, training))
                if found:
                    return Verdict(found, self._compare_gathered(at_once, training))
                break
        return Verdict(self._of_targets(at_once.results))

    def _compare_gathered(self, whole: _Summed, training: bool) -> str:
        try:
            gathered = self._run(self._bounds, training, gather=True)
        except HangError:
            raise
        except Exception as error:  # raised by gathering, or by the loss of gathered outputs
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"outputs of {self._sizes(self._bounds)} cannot be gathered for it ({reason})"
        return self._compare(whole, gathered)

    def _compare(self, whole: _Summed, parts: _Summed) -> str:
        if parts.drew:
            return ""
        sizes = self._sizes(self._bounds)
        if first_difference({"": whole.loss}, {"": parts.loss}, self._part):
            return _losses(whole.loss, parts.loss, sizes)
        differing = first_difference(whole.gradients, parts.gradients, self._part)
        if differing is not None:
            return f"the gradient of {differing[0]} differs {differing[1]} when it is made from {sizes}"
        return ""

    def _of_targets(self, results: Any) -> str:
        """Return a text on how the loss over many rows differs from the loss over parts of them; '' if it does not.

        ``results``: the model's outputs for few rows, which are repeated and combined with the targets of more rows.
        """
        rows, few = min(len(self._batch), _ROWS_OF_LOSS), self._bounds[-1]
        tensors = list(tensors_in(results))
        fits = sum(t.numel() for t in tensors) * rows <= _LARGEST_OUTPUTS * few
        if rows <= few or not fits or any(t.dim() == 0 or len(t) != few for t in tensors):
            return ""
        bounds = (0, rows // 2, rows)
        try:
            whole, parts = self._loss_alone(results, (0, rows)), self._loss_alone(results, bounds)
        except HangError:
            raise
        except Exception as error:  # outputs of some rows and targets of others may not match
            logger.debug("the loss was not compared on %d rows: %s", rows, error)
            return ""
        if whole is None or parts is None:
            return ""
        if first_difference({"": whole}, {"": parts}, self._part):
            return _losses(whole, parts, self._sizes(bounds))
        return ""

    def _loss_alone(self, results: Any, bounds: Sequence[int]) -> Tensor | None:
        """Return the sum of the losses of the parts between ``bounds``; None if the loss draws random numbers.

        ``results``: the model's outputs for few rows, which are repeated for all rows of the parts.
        """
        rows, few = bounds[-1], self._bounds[-1]
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad(), WithoutDraws() as draws:
            for low, high in itertools.pairwise(bounds):
                given = _select_rows(results, torch.arange(low, high) % few)
                total += self._weighted_loss(given, low, high, rows).double().reshape(())
        return None if draws.drew() else total

    def _run(self, bounds: Sequence[int], training: bool, *, gather: bool = False) -> _Summed:
        """Run a step over the parts of the batch between ``bounds``, and return its loss and gradients.

        ``bounds``: the first row of each part, and the end of the last part. ``training``: the model is in training
        mode. ``gather``: the outputs of all parts have one loss together; otherwise each part has its own loss.
        """
        blocks, rows = self._blocks, self._bounds[-1]
        before = [buffer.detach().clone() for buffer in blocks.every_buffer()]
        blocks.train(training)
        total, results = torch.zeros((), dtype=torch.float64), None
        outputs: list[Any] = []
        with WithoutDraws() as draws:
            for low, high in itertools.pairwise(bounds):
                results = blocks.forward(self._batch.inputs(low, high))
                if gather:
                    outputs.append(results)
                else:
                    total += _backward(self._weighted_loss(results, low, high, rows))
                with torch.no_grad():
                    for buffer, value in zip(blocks.every_buffer(), before):
                        buffer.copy_(value)
            if gather:
                results = _concatenate_outputs(
                    outputs, [b - a for a, b in itertools.pairwise(bounds)]
                )
                total += _backward(self._weighted_loss(results, 0, rows, rows))
        detached = transform(results, lambda p: p.detach() if isinstance(p, Tensor) else p)
        return _Summed(total, gradients(blocks), detached, draws.drew())

    def _weighted_loss(self, results: Any, low: int, high: int, rows: int) -> Tensor:
        """Return the contribution of rows [low, high) to the loss of a step over ``rows`` rows: their loss times their
        weight.

        ``results``: the model's outputs for rows [low, high).
        """
        targets = self._batch.targets(low, high)
        value = self._counting.value(results, targets, lambda: self._batch.inputs(low, high))
        if self._count is not None:
            return value / max(1.0, float(self._count(self._batch.targets(0, rows))))
        mass, whole = self._masses(results, low, high, rows)
        return value * (mass / whole) if mass else torch.zeros_like(value, requires_grad=False)

    def _masses(self, results: Any, low: int, high: int, rows: int) -> tuple[float, float]:
        mass = partial(self._counting.row_weight, results, high - low, self._batch)
        try:
            return mass(low, high), mass(0, rows)
        except HangError:
            raise
        except Exception as error:  # as in training
            logger.debug("targets are not counted: %s", error)
            self._counting.assume_row_mean()
            return mass(low, high), mass(0, rows)

    def _sizes(self, bounds: Sequence[int]) -> str:
        first, second = (high - low for low, high in itertools.pairwise(bounds))
        return f"micro-batches of {first} and {second} rows"


def _backward(share: Tensor) -> Tensor:
    """Run the backward of ``share``, a part's contribution to the loss, and return its value."""
    if share.requires_grad:
        share.backward()
    return share.detach().double().reshape(())


def _concatenate_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the outputs of several parts, concatenated along the rows. ``sizes``: the number of rows of each part.

    A tensor without rows must be equal in all parts.
    """
    parts, (_, template) = [flatten(each)[0] for each in outputs], flatten(outputs[0])
    return rebuild(template, [_concatenate(tensors, sizes) for tensors in zip(*parts, strict=True)])


def _concatenate(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if all(tensor.shape[:1] == (size,) for tensor, size in zip(tensors, sizes)):
        return torch.cat(list(tensors))
    if not all(torch.equal(tensors[0], tensor) for tensor in tensors):
        raise ValueError(
            f"one of shape {tuple(tensors[0].shape)} has no rows and differs between parts"
        )
    return tensors[0]


def _losses(whole: Tensor, parts: Tensor, sizes: str) -> str:
    return f"the loss is {float(whole):.6g} of all rows at once and {float(parts):.6g} from {sizes}"


def _select_rows(results: Any, rows: Tensor) -> Any:
    return transform(results, lambda part: part[rows] if isinstance(part, Tensor) else part)
