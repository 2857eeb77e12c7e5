"""The setting ``metrics``: names of metrics, and their classes in torchmetrics."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from parallax.common.targets import call_target, load_target
from parallax.errors import ConfigError, check_choice, nearest, printable

VALIDATION = "validation_"  # before a metric's name: that of the held-out rows
_LOSSES = ("validation_loss", "loss")
_RESERVED = ("loss", "step")
_LIBRARY = "torchmetrics"


@dataclass(frozen=True)
class Task:
    """The kind of outputs and targets. ``name``: multiclass for a class of each vector of scores; multilabel, or binary
    for one label, for a target of each output. ``outputs``: the size of the outputs' last dimension."""

    name: str
    outputs: int

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the keywords of metrics' classes that depend on the task."""
        sized = {"multiclass": "num_classes", "multilabel": "num_labels"}.get(self.name)
        return {"task": self.name, **({sized: self.outputs} if sized else {})}


def first_line(error: Exception) -> str:
    """Return the first line of the error's text."""
    return printable((str(error).splitlines() or [type(error).__name__])[0]).rstrip(".")


class _UsualMetric(NamedTuple):
    """A metric by its usual name. ``higher``: whether a higher value is better; None if it depends."""

    target: str
    kwargs: dict[str, Any]
    higher: bool | None


_MACRO = {"average": "macro"}
_USUAL = {
    "accuracy": _UsualMetric("Accuracy", {"average": "micro"}, True),
    "balanced_accuracy": _UsualMetric("Accuracy", _MACRO, True),
    "precision": _UsualMetric("Precision", _MACRO, True),
    "recall": _UsualMetric("Recall", _MACRO, True),
    "specificity": _UsualMetric("Specificity", _MACRO, True),
    "f1": _UsualMetric("F1Score", _MACRO, True),
    "jaccard": _UsualMetric("JaccardIndex", _MACRO, True),
    "auroc": _UsualMetric("AUROC", _MACRO, True),
    "average_precision": _UsualMetric("AveragePrecision", _MACRO, True),
    "mcc": _UsualMetric("MatthewsCorrCoef", {}, True),
    "kappa": _UsualMetric("CohenKappa", {}, True),
    "calibration_error": _UsualMetric("CalibrationError", {}, False),
    "perplexity": _UsualMetric("text:Perplexity", {}, False),
    "mse": _UsualMetric("regression:MeanSquaredError", {}, False),
    "rmse": _UsualMetric("regression:MeanSquaredError", {"squared": False}, False),
    "mae": _UsualMetric("regression:MeanAbsoluteError", {}, False),
    "mape": _UsualMetric("regression:MeanAbsolutePercentageError", {}, False),
    "r2": _UsualMetric("regression:R2Score", {}, True),
    "explained_variance": _UsualMetric("regression:ExplainedVariance", {}, True),
    "pearson": _UsualMetric("regression:PearsonCorrCoef", {}, True),
    "spearman": _UsualMetric("regression:SpearmanCorrCoef", {}, True),
}
_TOP = re.compile(r"top([1-9][0-9]{0,2})")  # such as top5


@dataclass(frozen=True, kw_only=True)
class MetricConfig:
    """One metric: ``name``, the keywords ``kwargs`` of its class, and ``target``, the class itself as
    package.module:Class, for a name that is not known."""

    name: str
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, index: int, entry: Any) -> MetricConfig:
        """Return entry ``index`` of the setting ``metrics``: a name, or a mapping with the fields."""
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
            raise ConfigError(f"{where}: a name has letters a to z, digits and '_'")
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
            return _UsualMetric(self.target, {}, None)
        if top := _TOP.fullmatch(self.name):
            return _UsualMetric("Accuracy", {"average": "micro", "top_k": int(top[1])}, True)
        return _USUAL[self.name]

    @cached_property
    def _path(self) -> str:
        """Return the class as package.module:Class."""
        path = self._known.target
        if self.target:
            return path
        return f"{_LIBRARY}.{path}" if ":" in path else f"{_LIBRARY}:{path}"

    @property
    def key(self) -> str:
        """Return the setting, as errors name it."""
        return f"metrics=[{self.name}]"

    def find(self) -> type[Any]:
        """Return the class."""
        found = load_target(f"{self.key} target", self._path)
        if not isinstance(found, type) or not hasattr(found, "compute"):
            raise ConfigError(f"{self.key}: {self._path} is no class of metrics of {_LIBRARY}")
        return found

    def higher_is_better(self) -> bool:
        """Return whether a higher value is better. Raises :class:`ConfigError` if the metric does not define this."""
        known = self._known.higher
        found = getattr(self.find(), "higher_is_better", None) if known is None else known
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
    """The metrics of a run. ``ignored``: the class of targets that do not count. ``probabilities``: outputs for one
    or several labels are probabilities, not logits. ``mixed``: float targets are probabilities of classes."""

    metrics: tuple[MetricConfig, ...] = ()
    ignored: int = -100
    probabilities: bool = False
    mixed: bool = False

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.metrics]

    @staticmethod
    def read(entries: Sequence[Any]) -> tuple[MetricConfig, ...]:
        """Return the entries of the setting ``metrics``."""
        found = tuple([MetricConfig.read(*each) for each in enumerate(entries)])
        names = [each.name for each in found]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(f"metrics: {twice} is there twice; give one of them another name")
        return found

    def check_installed(self) -> None:
        """Raise :class:`ConfigError` if a class cannot be imported."""
        for each in self.metrics:
            try:
                importlib.import_module(_LIBRARY)
            except ImportError as error:
                raise ConfigError(
                    f"{each.key}: it needs {_LIBRARY} ({error}); install it with pip install 'parallax-train[metrics]'"
                ) from error
            each.find()

    def check_key(self, key: str, value: str) -> None:
        """Raise :class:`ConfigError` if ``value`` of the setting ``key`` is not the name of a number by which
        checkpoints may be compared."""
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
