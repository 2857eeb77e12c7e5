"""The ``loss`` settings, and losses of torch.nn.functional computed as a sum and a separate divisor.

Ignored targets and class weights change the divisor of a mean. So the mean of a batch cannot be computed from the means
of its micro-batches. Each loss here returns a sum instead, and ``count(targets)`` returns the divisor for any rows. The
loss of the global batch is the sum over all micro-batches divided by the count of all targets.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallax.common.targets import bound_target
from parallax.errors import ConfigError, DataError, DescribeError, check_choice, nearest, printable
from parallax.model.losses import scores_of

MODEL, CUSTOM = "model", "custom"
_CLOSE = 1e-4  # relative difference between two computations of one loss
_IGNORED = -100  # torch's default of ``ignore_index``
_OWN = ("input", "target", "size_average", "reduce")  # arguments that are not options


@dataclass(frozen=True)
class _TorchKind:
    """A loss function of torch.

    ``targets``: classes, if there is one class for each vector of scores; elements, if there is one number for each
    output; labels, if there is a vector of labels for each vector of scores. ``vectors``: the options that are lists of
    numbers, one for each class or label.
    """

    function: Callable[..., Tensor]
    targets: str
    vectors: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """The names of the function's options."""
        names = inspect.signature(self.function).parameters
        return [n for n in names if n not in _OWN and (n != "weight" or n in self.vectors)]


_KINDS = {
    "cross_entropy": _TorchKind(F.cross_entropy, "classes", ("weight",)),
    "nll_loss": _TorchKind(F.nll_loss, "classes", ("weight",)),
    "multi_margin_loss": _TorchKind(F.multi_margin_loss, "classes", ("weight",)),
    "mse_loss": _TorchKind(F.mse_loss, "elements"),
    "l1_loss": _TorchKind(F.l1_loss, "elements"),
    "smooth_l1_loss": _TorchKind(F.smooth_l1_loss, "elements"),
    "huber_loss": _TorchKind(F.huber_loss, "elements"),
    "binary_cross_entropy": _TorchKind(F.binary_cross_entropy, "elements", ("weight",)),
    "binary_cross_entropy_with_logits": _TorchKind(
        F.binary_cross_entropy_with_logits, "elements", ("weight", "pos_weight")
    ),
    "kl_div": _TorchKind(F.kl_div, "elements"),
    "poisson_nll_loss": _TorchKind(F.poisson_nll_loss, "elements"),
    "soft_margin_loss": _TorchKind(F.soft_margin_loss, "elements"),
    "hinge_embedding_loss": _TorchKind(F.hinge_embedding_loss, "elements"),
    "multilabel_margin_loss": _TorchKind(F.multilabel_margin_loss, "labels"),
    "multilabel_soft_margin_loss": _TorchKind(F.multilabel_soft_margin_loss, "labels", ("weight",)),
}
LOSSES = (MODEL, *_KINDS, CUSTOM)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss. It is computed over the whole global batch, however the batch is split.

    ``name``: model is the model's own loss, or mean cross-entropy if it has none; custom is your own loss. All other
        names are losses of torch.nn.functional, which expect class scores in the last dimension of the outputs or of
        their ``logits``.
    ``target``: your own loss for loss=custom, as package.module:name. It is a function (outputs, targets, ...), or a
        class whose objects are such functions.
    ``kwargs``: arguments of your function or class, or options of torch's loss, such as ``weight`` (a list with a
        number for each class), ``ignore_index``, ``label_smoothing`` and ``reduction``.
    """

    name: str = MODEL
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("loss.name", self.name, list(LOSSES))
        if self.target and self.name != CUSTOM:
            raise ConfigError(
                f"loss.target={self.target}: only loss=custom has a target; add loss=custom"
            )
        if self.kwargs and self.name == MODEL:
            raise ConfigError(
                f"loss.kwargs={self.kwargs}: loss=model has no options; choose a loss, for example loss=cross_entropy"
            )
        if self.name in _KINDS:
            TorchLoss(self.name, self.kwargs).check_options()

    def build(self) -> Callable[[Any, Any], Any] | None:
        """Return the loss; None for the model's own loss."""
        if self.name == MODEL:
            return None
        if self.name != CUSTOM:
            return TorchLoss(self.name, self.kwargs)
        return bound_target("loss", self.target, self.kwargs, "outputs", "targets")

    @property
    def ignore_index(self) -> int:
        """The class index that marks ignored targets."""
        found = self.kwargs.get("ignore_index", _IGNORED)
        return found if isinstance(found, int) else _IGNORED

    @property
    def takes_classes(self) -> bool | None:
        """Whether each target is one class for a vector of scores. None if the loss is the model's own or custom."""
        kind = _KINDS.get(self.name)
        return None if kind is None else kind.targets == "classes"

    @property
    def takes_mixed_classes(self) -> bool:
        """Whether floating-point targets are probabilities of classes."""
        return self.name == "cross_entropy"

    @property
    def takes_probabilities(self) -> bool:
        """Whether the outputs are probabilities instead of logits."""
        return self.name == "binary_cross_entropy"


def check_classes(loss: str, scores: Tensor) -> None:
    """Raise :class:`DescribeError` if ``scores`` have a single class, because then the cross-entropy is always 0. The
    message calls the loss ``loss``."""
    if scores.dim() > 1 and scores.shape[-1] == 1:
        raise DescribeError(
            f"{loss}: the model's scores have shape {list(scores.shape)}, a single class, for which the loss is always "
            "0: use loss=binary_cross_entropy_with_logits with targets of 0 and 1, loss=mse_loss for numbers, or a "
            "model that returns a score for each class"
        )


class TorchLoss:
    """The loss ``name`` of torch.nn.functional with the keywords ``kwargs``, as a sum instead of a mean.

    :meth:`count` returns the divisor that makes a mean of the sum.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        self._name, self._kind, self._kwargs = name, _KINDS[name], dict(kwargs)
        self._reduction = self._kwargs.pop("reduction", "mean")
        self._vectors = {n: self._kwargs.pop(n) for n in self._kind.vectors if n in self._kwargs}
        self._copies: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        self._ignored = self._kwargs.get("ignore_index", _IGNORED)
        self._compared = False
        # Caches of profiles and verdicts tell losses apart by this name.
        self.__qualname__ = f"{type(self).__qualname__}({name}, {sorted(kwargs.items())})"

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        scores = scores_of(outputs)
        if not isinstance(scores, Tensor) or not isinstance(targets, Tensor):
            raise DescribeError(
                f"loss={self._name}: it takes a tensor of outputs, or logits among them, and a tensor of targets; the "
                f"model returns a {type(outputs).__name__} and the targets are a {type(targets).__name__}"
            )
        if scores.dtype.itemsize < 4:
            scores = scores.float()  # a sum in half precision may overflow
        if self._kind.targets == "classes" and not self._compared:
            self._compared = self._compare_with_own(getattr(outputs, "loss", None), scores, targets)
        of_model = scores
        scores, targets = self._matched(scores, targets)
        if self._kind.targets == "classes":
            check_classes(f"loss={self._name}", of_model)
        return self._kind.function(
            scores, targets, reduction="sum", **self._kwargs, **self._on_device(scores)
        )

    def count(self, targets: Any) -> float:
        """Return the number by which the sum over rows with these ``targets`` is divided."""
        if self._reduction == "sum" or not isinstance(targets, Tensor):
            return 1.0
        if self._reduction == "batchmean":
            return float(len(targets))
        soft = self._kind.targets == "classes" and targets.is_floating_point()
        if self._kind.targets == "labels" or soft:
            return targets.numel() / (targets.shape[-1] if targets.dim() else 1)
        if self._kind.targets == "elements" or self._name == "multi_margin_loss":
            return float(targets.numel())
        return self._counted(targets)

    def check_options(self) -> None:
        """Raise :class:`ConfigError` for an option that torch rejects."""
        accepted = [*self._kind.options]
        given = [*self._kwargs, *self._vectors]
        for name in given:
            if name not in accepted:
                raise ConfigError(
                    f"loss.kwargs.{printable(name)}: loss={self._name} takes no such option; accepted are "
                    f"{', '.join(accepted)}{nearest(name, accepted)}"
                )
        reductions = ["mean", "sum", *(["batchmean"] if self._name == "kl_div" else [])]
        check_choice("loss.kwargs.reduction", self._reduction, reductions)
        lengths = {n: _length(f"loss.kwargs.{n}", value) for n, value in self._vectors.items()}
        classes = next(iter(lengths.values()), 2)
        shape = (2,) if self._kind.targets == "classes" else (2, classes)
        floating = self._kind.targets != "classes" and self._name != "multilabel_margin_loss"
        targets = torch.zeros(shape, dtype=torch.float32 if floating else torch.int64)
        try:
            self(torch.zeros(2, classes), targets)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            options = {**self._kwargs, **self._vectors}
            raise ConfigError(
                f"loss.kwargs={printable(str(options))}: loss={self._name} does not take them; {printable(reason)}"
            ) from error

    def _compare_with_own(self, own: Any, scores: Tensor, targets: Tensor) -> bool:
        """Return whether each score is known to belong to the target at the same position.

        Raises :class:`DescribeError` if the model's ``own`` loss, computed from labels among its inputs, pairs each
        score with the next target, as in causal models.
        """
        if not isinstance(own, Tensor) or scores.dim() != 3 or targets.shape != scores.shape[:2]:
            return True
        if type(scores) is not Tensor or scores.is_meta:
            return False  # tensors without values cannot be compared
        pairs = (scores, targets), (scores[:, :-1], targets[:, 1:])
        same, following = (
            float(F.cross_entropy(each.detach().flatten(0, 1), classes.flatten().long()))
            for each, classes in pairs
        )
        mine = float(own.detach())
        next_label, label = (abs(each - mine) <= _CLOSE * mine for each in (following, same))
        if next_label and not label:
            raise DescribeError(
                f"loss={self._name}: the model's own loss compares each score with the next label, and this one would "
                "compare it with the label itself: use loss=model, or rows without labels among the inputs, with "
                "targets that are shifted by one"
            )
        return not next_label and not math.isnan(mine)  # as if no label counts

    def _counted(self, targets: Tensor) -> float:
        """Return the number of targets that are not ignored, each counted with the weight of its class."""
        kept = targets != self._ignored
        if "weight" not in self._vectors:
            return float(kept.sum())
        weight = torch.tensor(self._vectors["weight"], dtype=torch.float64)
        classes = targets[kept].long().cpu()
        if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < len(weight):
            raise DataError(
                f"the targets hold classes {int(classes.min())} to {int(classes.max())}, and loss.kwargs.weight has "
                f"{len(weight)} numbers: give one for each class"
            )
        return float(weight[classes].sum())

    def _matched(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and targets in the shapes and dtypes that torch's loss function expects."""
        kind = self._kind.targets
        if scores.dim() > 1 and kind != "elements":
            same = targets.shape == scores.shape
            if kind == "labels" and same:
                whole = self._name == "multilabel_margin_loss"
                changed = targets.long() if whole else targets.to(scores.dtype)
                return scores.flatten(0, -2), changed.flatten(0, -2)
            if kind == "classes" and same and targets.is_floating_point():
                return scores.flatten(0, -2), targets.to(scores.dtype).flatten(0, -2)
            if kind == "classes" and scores.shape[:-1].numel() == targets.numel():
                return scores.flatten(0, -2), targets.long().flatten()
        elif kind == "elements" and scores.numel() == targets.numel():
            if targets.shape in (scores.shape, scores.shape[:-1]):
                return scores.reshape(targets.shape), targets.to(scores.dtype)
            if targets.shape[:-1] == scores.shape:
                return scores, targets.reshape(scores.shape).to(scores.dtype)
        wanted = {
            "classes": "a class for each vector of scores in the last dimension",
            "labels": "a label for each score",
            "elements": "a number for each output",
        }[kind]
        raise DescribeError(
            f"loss={self._name}: the model's outputs have shape {list(scores.shape)} and the targets "
            f"{list(targets.shape)}, {targets.dtype}; it takes {wanted}"
        )

    def _on_device(self, scores: Tensor) -> dict[str, Tensor]:
        """Return the options that are lists of numbers as tensors on the device of ``scores``.

        The tensors are cached for each device and dtype, except tensors without values, on the meta device.
        """
        key, plain = (scores.device, scores.dtype), type(scores) is Tensor
        found = self._copies.get(key) if plain else None
        if found is None:
            with torch.inference_mode(False):  # a training step uses them later
                found = {name: scores.new_tensor(values) for name, values in self._vectors.items()}
        if plain and all(type(each) is Tensor for each in found.values()):
            self._copies[key] = found
        for name, vector in found.items():
            if len(vector) not in (1, scores.shape[-1]) or (
                len(vector) != scores.shape[-1] and self._kind.targets == "classes"
            ):
                raise ConfigError(
                    f"loss.kwargs.{name}: it has {len(vector)} numbers, and the model gives {scores.shape[-1]} outputs "
                    "in the last dimension: give one for each"
                )
        return found


def _length(key: str, values: Any) -> int:
    """Return the length of the list ``values``, which is the option ``key`` of a loss.

    Raises :class:`ConfigError` if ``values`` is not a list of numbers.
    """
    plain = isinstance(values, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in values
    )
    if not plain or not values:
        raise ConfigError(
            f"{key}={printable(str(values))}: accepted is a list with a number for each class, such as [1, 2.5]"
        )
    return len(values)
