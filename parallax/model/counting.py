"""Weight the losses of micro-batches so that they add up to the loss of the whole batch.

The usual cross-entropy is a mean over *counted* targets. Targets equal to ``ignore_index`` (-100) do not count, and
others may count with a class weight. A micro-batch with few counted targets must have a small weight. Otherwise the
loss of a split batch would differ from that of the whole batch.

The number of counted targets is not known in two cases: a user's loss calls ``torch.nn.functional.cross_entropy``
somewhere, or a transformers model with ``labels`` among its inputs calls it in its forward. So the first call of a loss
is observed. If the loss returns the result of exactly one cross-entropy call, the counted targets of other rows are
found as follows: the loss is called again with the targets of these rows and placeholders for the outputs, and is
stopped when it calls cross-entropy. If the model itself returns the loss, its labels are found by comparing this loss
with the cross-entropy of the model's scores and each integer input, row by row.

Only ratios of weights matter. The weight of some rows is their number times the fraction of their targets that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallax.errors import HangError
from parallax.model.block import tensors_in, transform
from parallax.model.losses import call_loss

_ARGUMENTS = "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"
"""The arguments of F.cross_entropy and F.nll_loss, both of which are means over counted targets."""
_MOST_ELEMENTS = 2**26  # in the outputs of the two rows that are compared
_SAME, _SAME_HALF = 1e-4, 1e-2  # relative difference between two computations of one loss

AnyLoss = Callable[[Any, Any], Tensor]


class BatchRows(Protocol):
    """The interface that returns rows of a batch by index."""

    def inputs(self, start: int, stop: int) -> Any:
        """Return the model inputs of rows [start, stop)."""

    def targets(self, start: int, stop: int) -> Any:
        """Return the loss targets of rows [start, stop)."""


class _CountingRule(Protocol):
    """The interface of a rule that weights rows by their counted targets."""

    def row_weight(self, results: Any, few: int, batch: BatchRows, low: int, high: int) -> float:
        """Return the weight of rows [low, high) in the batch's loss.

        ``results``: the model's return value for a batch of ``few`` rows, which need not be rows [low, high).
        """


class Counting:
    """Computes a loss, and the weight that a range of rows has in the loss of the whole batch."""

    def __init__(self, loss: AnyLoss) -> None:
        self._loss = loss
        # Observe the uncompiled function: observing a compiled one would compile it again.
        plain = getattr(loss, "_torchdynamo_orig_callable", getattr(loss, "_orig_mod", loss))
        self._plain: AnyLoss = plain if callable(plain) else loss
        self._rule: _CountingRule | None = None
        self._observed = hasattr(loss, "count")  # the loss counts its targets itself

    def value(self, results: Any, targets: Any, inputs: Callable[[], Any]) -> Tensor:
        """Return the loss for ``results``, the model's return value for ``inputs()``.

        The first call also determines how the loss counts its targets. That call raises an error if ``loss`` returns
        several losses.
        """
        if self._observed:
            return call_loss(self._loss, results, targets)
        self._observed = True
        if self._plain is not self._loss:
            with torch.no_grad(), _Observer() as seen:
                plain = call_loss(self._plain, results, targets)
            self._rule = _CrossEntropyRule(self._plain) if seen.means(plain) else None
            return call_loss(self._loss, results, targets, alone=True)
        try:
            with _Observer() as seen:
                value = call_loss(self._loss, results, targets, alone=True)
        except HangError:
            raise
        except Exception:  # raised by the loss, or by a compiler that supports no function mode
            return call_loss(self._loss, results, targets, alone=True)
        if seen.means(value):
            self._rule = _CrossEntropyRule(self._loss)
        elif any(value is each for each in tensors_in(results)):
            self._rule, self._observed = _label_rule(value, results, inputs())
        return value

    def scored(self, results: Any, targets: Any, inputs: Callable[[], Any]) -> tuple[Any, Any]:
        """Return ``results``, the model's outputs, and ``targets``, the corresponding targets.

        If the model computes its loss from labels among its ``inputs()``, return its scores and these labels instead.
        If each score predicts the next label, the last score and the first label of each row are left out.
        """
        if not isinstance(self._rule, _LabelRule):
            return results, targets
        return self._rule.scored(results, list(tensors_in(inputs())))

    @property
    def counts_targets(self) -> bool:
        """Whether the loss is known to be a mean over targets instead of rows."""
        return self._rule is not None

    @property
    def observed(self) -> bool:
        """Whether it is known how the loss weights its targets.

        It is known from the start if the loss has a method ``count``. Otherwise it is known once the loss has been
        called on targets of which at least one counts.
        """
        return self._observed

    def assume_row_mean(self) -> None:
        """Treat the loss as a mean over rows from now on."""
        self._rule = None

    def row_weight(self, results: Any, few: int, batch: BatchRows, low: int, high: int) -> float:
        """Return the weight of the loss of rows [low, high) in the loss of the whole batch, relative to the weights of
        other rows.

        ``results``: the model's return value for a batch of ``few`` rows, which need not be rows [low, high). If no
        counting rule is known, the weight is the number of rows.
        """
        if self._rule is None:
            return float(high - low)
        return self._rule.row_weight(results, few, batch, low, high)


class RowMeanCheck:
    """Checks once whether a loss with masked targets (negative integers) is the mean over its rows.

    The check is for losses whose way of counting is unknown. It compares the row with the fewest masked targets and the
    row with the most, in the first micro-batch in which these numbers differ.
    """

    def __init__(self, loss: AnyLoss) -> None:
        self._loss, self._seen = loss, False

    def difference(self, results: Any, few: int, targets: Any) -> str:
        """Return a text on how the loss of two rows together differs from the mean of their separate losses.

        The text is empty if the two are equal or cannot be compared, and after the first comparison. ``results`` are
        the outputs of ``few`` rows, and ``targets`` the targets of these rows or of others.
        """
        rows = None if self._seen else _masked_unevenly(targets)
        elements = sum(each.numel() for each in tensors_in(results))
        if rows is None or 2 * elements > _MOST_ELEMENTS * few:
            return ""
        self._seen = True
        try:
            before = torch.default_generator.get_state()
            with torch.no_grad():
                both, *each = [
                    float(
                        call_loss(
                            self._loss, _rows_of(results, few, chosen), _rows_of(targets, 0, chosen)
                        )
                    )
                    for chosen in (rows, rows[:1], rows[1:])
                ]
            if not torch.default_generator.get_state().equal(before):
                return ""  # its random numbers change the result, too
        except HangError:
            raise
        except Exception:  # for example, too few rows
            return ""
        mean, half = sum(each) / 2, any(t.dtype.itemsize < 4 for t in tensors_in(results))
        if abs(both - mean) <= (_SAME_HALF if half else _SAME) * abs(both):
            return ""
        return f"{both:.6g} of rows {rows[0]} and {rows[1]} at once, and {mean:.6g} as the mean of both"


def _masked_unevenly(targets: Any) -> list[int] | None:
    """Return the indices of the rows with the fewest and with the most negative targets; None if these numbers are
    equal.
    """
    for each in tensors_in(targets):
        if each.is_floating_point() or each.is_complex() or each.dim() < 1 or len(each) < 2:
            continue
        masked = (each < 0).reshape(len(each), -1).sum(1)
        if bool(masked.min() != masked.max()):
            return [int(masked.argmin()), int(masked.argmax())]
    return None


def _rows_of(value: Any, few: int, chosen: list[int]) -> Any:
    """Return the nested containers ``value`` with only the rows ``chosen`` of each tensor.

    An index in ``chosen`` is taken modulo the tensor's number of rows. ``few``: the number of rows of the tensors that
    have rows; a tensor of another length is returned whole. 0: rows are chosen from every tensor.
    """

    def change(part: Any) -> Any:
        if not isinstance(part, Tensor) or not part.dim() or (few and len(part) != few):
            return part
        return part.detach()[[row % len(part) for row in chosen]]

    return transform(value, change)


class _TargetsCounted(Exception):
    """Raised inside a loss to stop it when it calls cross-entropy. ``counted`` is the number of targets that count."""

    def __init__(self, counted: float) -> None:
        super().__init__()
        self.counted = counted


class _Observer(TorchFunctionMode):
    """Records the calls of cross-entropy in its context.

    With ``only_counts`` the first call raises :class:`_TargetsCounted` with the number of counted targets.
    """

    def __init__(self, *, only_counts: bool = False) -> None:
        super().__init__()
        self._only_counts = only_counts
        self._results: list[Any] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is not F.cross_entropy and func is not F.nll_loss:
            return func(*args, **given)
        named = {**dict(zip(_ARGUMENTS, args)), **given}
        if self._only_counts:
            raise _TargetsCounted(_counted(named))
        found = func(*args, **given)
        plain = named.get("size_average") is None and named.get("reduce") is None
        self._results.append(found if plain and named.get("reduction", "mean") == "mean" else None)
        return found

    def means(self, value: Any) -> bool:
        """Return whether cross-entropy was called exactly once, computed a mean, and returned ``value``."""
        if len(self._results) != 1 or not isinstance(value, Tensor):
            return False
        found = self._results[0]
        if found is None or value is found:
            return found is not None
        return value.numel() == 1 and bool((value.detach() == found.detach()).all())


def _counted(named: Mapping[str, Any]) -> float:
    """Return the number by which a mean cross-entropy with the arguments ``named`` divides its sum."""
    target, weight = named["target"], named.get("weight")
    if target.is_floating_point():  # probabilities of classes
        return target.numel() / named["input"].shape[1 if named["input"].dim() > 1 else 0]
    kept = target != named.get("ignore_index", -100)
    if weight is None:
        return float(kept.sum())
    of_class = weight.detach().to(target.device, torch.float64)
    return float((of_class[target.masked_fill(~kept, 0)] * kept).sum())


@dataclass(frozen=True)
class _CrossEntropyRule:
    """A rule that counts targets by calling ``loss`` until the loss calls cross-entropy."""

    loss: AnyLoss

    def row_weight(self, results: Any, few: int, batch: BatchRows, low: int, high: int) -> float:
        """Return the number of rows [low, high) times the fraction of their targets that the loss counts.

        To find this fraction, the loss is called with these targets and with placeholders for the outputs: meta
        tensors, or expanded zeros if the loss needs values. The placeholders have the structure and shapes of
        ``results``, the model's return value for a batch of ``few`` rows, but ``high`` − ``low`` rows.
        """
        rows, targets = high - low, batch.targets(low, high)
        size = sum(each.numel() for each in tensors_in(targets)) or rows
        for blank in (_meta, _zeros):
            try:
                with torch.no_grad(), _Observer(only_counts=True):
                    self.loss(_blank(results, few, rows, blank), targets)
            except _TargetsCounted as found:
                return rows * found.counted / size
            except HangError:
                raise
            except Exception:  # for example, a meta tensor cannot be indexed by values
                if blank is _zeros:
                    raise
        raise RuntimeError(
            "the loss called no cross-entropy this time, although its first call did"
        )


@dataclass(frozen=True)
class _LabelRule:
    """A rule that counts the labels among a model's inputs. Negative labels do not count.

    ``place`` is the index of the label tensor among the inputs. ``shifted``: each score predicts the next label, so a
    row's first label does not count.
    """

    place: int
    shifted: bool

    def row_weight(self, results: Any, few: int, batch: BatchRows, low: int, high: int) -> float:
        """Return the number of rows [low, high) times the fraction of their labels that count."""
        del results, few
        labels = list(tensors_in(batch.inputs(low, high)))[self.place]
        kept = (labels[..., 1:] if self.shifted else labels) >= 0
        return (high - low) * float(kept.sum()) / labels.numel()

    def scored(self, results: Any, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return a pair: the model's scores, found in its outputs ``results``, and the labels of these scores, found in
        its ``inputs``. If each score predicts the next label, the last score and the first label of each row are left
        out."""
        labels = inputs[self.place]
        scores = next(
            each
            for each in tensors_in(results)
            if each.is_floating_point() and each.shape[:-1] == labels.shape
        )
        return (scores[:, :-1], labels[:, 1:]) if self.shifted else (scores, labels)


def _label_rule(value: Tensor, results: Any, inputs: Any) -> tuple[_LabelRule | None, bool]:
    """Return a rule that counts the labels among ``inputs``, and whether the result is certain.

    The rule is None if the loss ``value`` is not the mean cross-entropy of ``results`` and any of the inputs. The
    result is uncertain if no label counts in these inputs.
    """
    best, rule = _SAME_HALF if value.dtype.itemsize < 4 else _SAME, None
    scores = [each for each in tensors_in(results) if each.is_floating_point()]
    for place, labels in enumerate(tensors_in(inputs)):
        if labels.is_floating_point() or not labels.dim():
            continue
        for shifted in (True, False) if labels.dim() == 2 else (False,):
            candidate = _LabelRule(place, shifted)
            for each in (one for one in scores if one.shape[:-1] == labels.shape):
                mean = _mean(each, labels, shifted)
                if mean is None and bool(value.isnan()):
                    return candidate, False
                far = abs(float(value.detach()) / mean - 1) if mean else best
                if far < best:
                    best, rule = far, candidate
    return rule, True


def _mean(scores: Tensor, labels: Tensor, shifted: bool) -> float | None:
    """Return the mean cross-entropy of ``scores`` and ``labels``; None if no label counts, infinity if a label is not
    a class index of the scores.

    ``shifted``: each score predicts the next label. The mean is computed row by row, because computing all rows at once
    would need as much memory as the scores again.
    """
    total, counted = 0.0, 0
    with torch.no_grad():
        for row, classes in zip(scores.detach(), labels.to(scores.device)):
            if shifted:
                row, classes = row[:-1], classes[1:]
            if bool((classes >= row.shape[-1]).any()):
                return float("inf")  # not class indices of these scores
            wanted = classes.reshape(-1).clamp(min=-1)
            each = row.reshape(-1, row.shape[-1]).float()
            total += float(F.cross_entropy(each, wanted.long(), ignore_index=-1, reduction="sum"))
            counted += int((wanted >= 0).sum())
    return total / counted if counted else None


def _blank(results: Any, few: int, rows: int, make: Callable[[Tensor, list[int]], Tensor]) -> Any:
    """Return placeholders for the model's outputs of ``rows`` rows, with the structure of ``results``, the outputs of
    ``few`` rows. ``make(tensor, shape)`` returns the placeholder for an output tensor."""

    def change(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        has_rows = part.dim() > 0 and len(part) == few
        return make(part, [rows, *part.shape[1:]] if has_rows else list(part.shape))

    return transform(results, change)


def _meta(part: Tensor, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=part.dtype, device="meta")


def _zeros(part: Tensor, shape: list[int]) -> Tensor:
    return torch.zeros((), dtype=part.dtype).expand(shape)
