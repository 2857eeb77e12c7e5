"""The setting ``metrics``: names of metrics, and their classes in torchmetrics."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from parallax.common.metrics import larger_is_better
from parallax.common.targets import call_target, load_target
from parallax.errors import ConfigError, check_choice, nearest, printable

VALIDATION = "validation_"  # before a metric's name: that of the held-out rows
_LOSSES = ("validation_loss", "loss")
_RESERVED = ("loss", "step")
_LIBRARY = "torchmetrics"


@dataclass(frozen=True)
class Task:
    """The kind of outputs and targets. ``name``: "multiclass" if each vector of scores has one class as its target,
    "multilabel" if each score of a vector has a target of 0 or 1, and "binary" if there is only one score. ``outputs``:
    the size of the outputs' last dimension."""

    name: str
    outputs: int

    @property
    def keywords(self) -> dict[str, Any]:
        """Return those keyword arguments of torchmetrics' classes that depend on the task: ``task``, and the number of
        classes or labels."""
        sized = {"multiclass": "num_classes", "multilabel": "num_labels"}.get(self.name)
        return {"task": self.name, **({sized: self.outputs} if sized else {})}


def first_line(error: Exception) -> str:
    """Return the first line of the error's text."""
    return printable((str(error).splitlines() or [type(error).__name__])[0]).rstrip(".")


class _UsualMetric(NamedTuple):
    """The class of a metric that is known by name, and its keyword arguments."""

    target: str
    kwargs: dict[str, Any]


_MACRO = {"average": "macro"}
_USUAL = {
    "accuracy": _UsualMetric("Accuracy", {"average": "micro"}),
    "balanced_accuracy": _UsualMetric("Accuracy", _MACRO),
    "precision": _UsualMetric("Precision", _MACRO),
    "recall": _UsualMetric("Recall", _MACRO),
    "specificity": _UsualMetric("Specificity", _MACRO),
    "f1": _UsualMetric("F1Score", _MACRO),
    "jaccard": _UsualMetric("JaccardIndex", _MACRO),
    "auroc": _UsualMetric("AUROC", _MACRO),
    "average_precision": _UsualMetric("AveragePrecision", _MACRO),
    "mcc": _UsualMetric("MatthewsCorrCoef", {}),
    "kappa": _UsualMetric("CohenKappa", {}),
    "calibration_error": _UsualMetric("CalibrationError", {}),
    "perplexity": _UsualMetric("text:Perplexity", {}),
    "mse": _UsualMetric("regression:MeanSquaredError", {}),
    "rmse": _UsualMetric("regression:MeanSquaredError", {"squared": False}),
    "mae": _UsualMetric("regression:MeanAbsoluteError", {}),
    "mape": _UsualMetric("regression:MeanAbsolutePercentageError", {}),
    "r2": _UsualMetric("regression:R2Score", {}),
    "explained_variance": _UsualMetric("regression:ExplainedVariance", {}),
    "pearson": _UsualMetric("regression:PearsonCorrCoef", {}),
    "spearman": _UsualMetric("regression:SpearmanCorrCoef", {}),
}
_TOP = re.compile(r"top([1-9][0-9]{0,2})")  # such as top5


@dataclass(frozen=True, kw_only=True)
class MetricConfig:
    """One metric. ``name``: its name. ``kwargs``: keyword arguments of its class. ``target``: the class as
    package.module:Class, for a name that Parallax does not know."""

    name: str
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, index: int, entry: Any) -> MetricConfig:
        """Return the metric that ``entry`` describes: a name, or a mapping of the fields of this class. ``index``: the
        index of ``entry`` in the setting ``metrics``, for error messages."""
        given = {"name": entry} if isinstance(entry, str) else entry
        where = f"metrics[{index}]={printable(str(entry))}"
        if not isinstance(given, Mapping) or not {"name"} <= given.keys() <= {
            "name",
            "target",
            "kwargs",
        }:
            raise ConfigError(
                f"{where}: accepted is a name, or {{name: NAME, kwargs: {{KEY: VALUE}}}}, with target: "
                "package.module:Class for a metric of another name"
            )
        name, target, kwargs = given["name"], given.get("target", ""), given.get("kwargs", {})
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
            raise ConfigError(
                f"{where}: a name has letters a to z, digits and '_'; a class of your own is {{name: NAME, target: "
                "package.module:Class}"
            )
        if name in _RESERVED:
            raise ConfigError(f"{where}: {name} is another number of metrics.jsonl")
        if not isinstance(target, str) or not isinstance(kwargs, Mapping):
            raise ConfigError(
                f"{where}: target is package.module:Class, and kwargs keys and values"
            )
        if not target and name not in _USUAL and not _TOP.fullmatch(name):
            known = [*_USUAL, "top5"]
            raise ConfigError(
                f"{where}: unknown metric; known are {', '.join(known)}, and any with target: package.module:Class"
                f"{nearest(name, known)}"
            )
        return cls(name=name, target=target, kwargs=dict(kwargs))

    @property
    def _known(self) -> _UsualMetric:
        if self.target:
            return _UsualMetric(self.target, {})
        if top := _TOP.fullmatch(self.name):
            return _UsualMetric("Accuracy", {"average": "micro", "top_k": int(top[1])})
        return _USUAL[self.name]

    @cached_property
    def _path(self) -> str:
        """Return the path of the class as package.module:Class."""
        path = self._known.target
        if self.target:
            return path
        return f"{_LIBRARY}.{path}" if ":" in path else f"{_LIBRARY}:{path}"

    def fits(self, *, classes: bool) -> bool:
        """Whether the metric accepts the targets of the loss.

        If ``classes`` is True, each target is the class of a vector of scores; otherwise targets are numbers or labels
        of 0 or 1.
        """
        regression, needs = (
            self._path.startswith(f"{_LIBRARY}.regression:"),
            self.name == "perplexity",
        )
        if self.target:
            return True
        return not regression if classes else not (needs or _TOP.fullmatch(self.name))

    @property
    def key(self) -> str:
        """Return the metric as error messages name it."""
        return f"metrics=[{self.name}]"

    def find(self) -> type[Any]:
        """Import and return the metric's class."""
        found = load_target(f"{self.key} target", self._path)
        if not isinstance(found, type) or not hasattr(found, "compute"):
            raise ConfigError(f"{self.key}: {self._path} is no class of metrics of {_LIBRARY}")
        return found

    def higher_is_better(self) -> bool:
        """Return whether a higher value is better. Raises :class:`ConfigError` if the metric does not define this."""
        if not self.target:
            return larger_is_better(self.name)
        found = getattr(self.find(), "higher_is_better", None)
        if not isinstance(found, bool):
            raise ConfigError(
                f"checkpoint.metric={VALIDATION}{self.name}: {self._path} does not tell whether higher is better; "
                "choose another metric"
            )
        return found

    def build(self, task: Task) -> Any:
        """Return the metric for outputs and targets of ``task``."""
        kind, usual = self.find(), self._known.kwargs
        keys = inspect.signature(kind).parameters
        given = {k: v for k, v in {**task.keywords, **usual}.items() if k in keys} | self.kwargs
        if "top_k" in given and task.name != "multiclass":
            raise ConfigError(f"{self.key}: the outputs are not scores of several classes")
        try:
            return call_target(self.key, self._path, given)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self.key}: {first_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """The metrics of a run. ``ignored``: the class of targets that do not count. ``probabilities``: outputs for labels
    are probabilities, not logits. ``mixed``: float targets are probabilities of classes."""

    metrics: tuple[MetricConfig, ...] = ()
    ignored: int = -100
    probabilities: bool = False
    mixed: bool = False

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.metrics]

    @staticmethod
    def read(entries: Sequence[Any]) -> tuple[MetricConfig, ...]:
        """Return the metrics that the ``entries`` of the setting ``metrics`` name."""
        found = tuple([MetricConfig.read(*each) for each in enumerate(entries)])
        names = [each.name for each in found]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(f"metrics: {twice} is there twice; give one of them another name")
        return found

    def check_installed(self) -> None:
        """Raise :class:`ConfigError` if the class of a metric cannot be imported."""
        for each in self.metrics:
            try:
                importlib.import_module(_LIBRARY)
            except ImportError as error:
                raise ConfigError(
                    f"{each.key}: it needs {_LIBRARY} ({error}); install it with pip install 'parallax-train[metrics]'"
                ) from error
            each.find()

    def check_targets(self, *, classes: bool) -> None:
        """Raise :class:`ConfigError` if a metric that Parallax knows by name does not accept the loss's targets.
        ``classes``: targets are classes; otherwise they are numbers or labels."""
        for each in self.metrics:
            if not each.fits(classes=classes):
                usual = [MetricConfig(name=name) for name in (*_USUAL, "top5")]
                fitting = ", ".join(one.name for one in usual if one.fits(classes=classes))
                what = (
                    "a class for each vector of scores" if classes else "a number for each output"
                )
                raise ConfigError(
                    f"{each.key}: the loss compares outputs with {what}; metrics for it are {fitting}"
                )

    def check_key(self, key: str, value: str) -> None:
        """Raise :class:`ConfigError` unless ``value``, the value of the setting ``key``, names a figure by which
        checkpoints can be compared: a loss, or a validation metric of this run."""
        accepted = [*_LOSSES, *(f"{VALIDATION}{each.name}" for each in self.metrics)]
        if value not in accepted and value.startswith(VALIDATION):
            name = printable(value.removeprefix(VALIDATION))
            raise ConfigError(
                f"{key}={printable(value)}: accepted are {', '.join(accepted)}; add {name} to metrics for it"
            )
        check_choice(key, value, accepted)

    def higher_is_better(self, key: str) -> bool:
        """Return whether a higher value of ``key``, such as ``validation_accuracy``, is better."""
        self.check_key("checkpoint.metric", key)
        for each in self.metrics:
            if key == f"{VALIDATION}{each.name}":
                return each.higher_is_better()
        return False
