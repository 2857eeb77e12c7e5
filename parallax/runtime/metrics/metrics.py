"""The states of a rank's metrics, and their sum over all replicas.

A metric is not the mean of the metrics of micro-batches: that of an F1 score or a perplexity would be wrong, and that
of an accuracy too if parts have different numbers of targets that count. So each replica of the last stage updates the
states of its metrics, which are counts, sums or all scores, with each micro-batch. The states of all replicas are added
or concatenated, and the metric is computed from these, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.nodes.objects import all_gather_object
from parallax.runtime.metrics.config import MetricConfig, MetricsConfig, Task, first_line
from parallax.runtime.metrics.rows import ScoredRows, is_classification, takes_classes, top_k

_MOST_CLASSES = 4096  # in a confusion matrix, and for top-k metrics of training rows
_MOST_SUMS = 2**16  # numbers in the state of a metric of training rows, all-reduced after each step


class Metrics:
    """The metrics of one rank. On earlier stages nothing is computed."""

    def __init__(self, config: MetricsConfig, mesh: Mesh) -> None:
        config.check_installed()
        self.config, self._mesh = config, mesh
        self._task: Task | None = None
        self._made: dict[bool, dict[str, Any]] = {
            True: {},
            False: {},
        }  # whether for training rows → metrics by name
        self.trained: tuple[str, ...] = ()
        """Names of the metrics that are also computed for each training step: those that need only small sums."""

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    @property
    def names(self) -> list[str]:
        return self.config.names

    def wanted(self, *, training: bool) -> bool:
        """Whether rows must be added."""
        return bool(self.trained if training else self.config.metrics)

    def begin(self, *, training: bool) -> None:
        """Forget the rows that were added."""
        for metric in self._made[training].values():
            metric.reset()

    def add(self, results: Any, targets: Any, *, training: bool) -> None:
        """Add the outputs and targets of some rows. Raises :class:`ConfigError` if a metric does not take them."""
        rows = ScoredRows.of(results, targets, self.config)
        if self._task is not None and rows.task != self._task:
            raise ConfigError(
                f"metrics: outputs and targets are {self._task}, and of other rows {rows.task}: all must be of one kind"
            )
        made = self._metrics(rows.task, training)
        for name, metric in made.items() if len(rows.targets) else ():
            with _refusing(name, rows):
                metric.update(*rows.for_metric(metric))

    def evaluated(self) -> dict[str, float]:
        """Return the metrics of all rows that all replicas added since :meth:`begin`; all ranks call it."""
        if not self.config.metrics:
            return {}
        self._exchange_task()
        mine = self._computed(training=False)
        columns = self._mesh.gather_columns({name: mine.get(name, 0.0) for name in self.names})
        return {name: sum(values) for name, values in columns.items()}

    def settle(self) -> None:
        """Choose the metrics that are also computed on training rows: those that proved cheap in the first evaluation.
        All ranks call it after that evaluation."""
        cheap = [name for name, each in self._made[False].items() if _is_cheap(each, self._task)]
        found = self._mesh.all_gather_object(cheap)
        self.trained = tuple(name for name in self.names if any(name in each for each in found))
        for metric in self._made[False].values():
            if hasattr(metric, "validate_args"):
                metric.validate_args = False  # its checks wait for the device

    def stepped(self) -> dict[str, float]:
        """Return the metrics of the training rows of all replicas since :meth:`begin`. All ranks call it; only the
        first replica of the last stage gets the values, the others get 0."""
        mine = self._computed(training=True) if self.trained else {}
        return {name: mine.get(name, 0.0) for name in self.trained}

    def _metrics(self, task: Task, training: bool) -> dict[str, Any]:
        """Return name → metric, built at the first call."""
        self._task, made = task, self._made[training]
        for each in self.config.metrics if not made else ():
            if not training or each.name in self.trained:
                metric = each.build(task)
                _check(each, metric, task)
                metric.sync_on_compute = metric._to_sync = False
                if training and hasattr(metric, "validate_args"):
                    metric.validate_args = False
                made[each.name] = _in_double(metric.to(self._mesh.device))
        return made

    def _exchange_task(self) -> None:
        """Learn the task from other replicas, if this one has had no rows."""
        group = self._mesh.statistics
        if group is not None and self._mesh.is_last:
            found = [each for each in all_gather_object(self._task, group) if each is not None]
            self._task = self._task or next(iter(found), None)

    def _computed(self, *, training: bool) -> dict[str, float]:
        """Return the metrics on the first replica of the last stage."""
        if not self._mesh.is_last or self._task is None:
            return {}
        found = {}
        for name, metric in self._metrics(self._task, training).items():
            with self._of_replicas(metric, training):
                if self._mesh.replica == 0:
                    with _refusing(name):
                        found[name] = _number(metric.compute())
            metric.reset()
        return found

    def _of_replicas(self, metric: Any, training: bool) -> AbstractContextManager[None]:
        """Return a context in which the metric has the states of all replicas."""
        group = self._mesh.statistics
        if group is None:
            return nullcontext()
        if training:
            _sum_states(metric, group)
            return nullcontext()
        context: AbstractContextManager[None] = metric.sync_context(
            dist_sync_fn=_gathered, process_group=group, distributed_available=lambda: True
        )
        return context


@contextmanager
def _refusing(name: str, rows: ScoredRows | None = None) -> Iterator[None]:
    """Raise :class:`ConfigError` for an error of the metric ``name`` inside."""
    shapes = ""
    if rows is not None:
        shapes = (
            f"; outputs have shape {list(rows.scores.shape)} and targets {list(rows.targets.shape)}"
        )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about classes that no row has
            yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ConfigError(f"metrics=[{name}]: {first_line(error)}{shapes}") from error


def _number(value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"{value.numel()} numbers" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"it gives {what}, and one number is needed; set average=macro in kwargs")
    return float(value)


def _check(config: MetricConfig, metric: Any, task: Task) -> None:
    """Raise :class:`ConfigError` if the metric's states cannot be added exactly, or do not fit in memory."""
    from torchmetrics.classification import MulticlassConfusionMatrix
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    for name, default in metric._defaults.items():
        reduction = metric._reductions[name]
        if reduction is dim_zero_mean or (
            isinstance(default, list) and reduction is not dim_zero_cat
        ):
            raise ConfigError(
                f"{config.key}: its state {name} cannot be added over replicas exactly; its dist_reduce_fx must be "
                "sum, cat, min or max"
            )
    table = isinstance(metric, MulticlassConfusionMatrix) or (
        takes_classes(metric) and getattr(metric, "average", "") != "micro"
    )
    if table and task.outputs > _MOST_CLASSES:
        raise ConfigError(
            f"{config.key}: it needs a table of {task.outputs} × {task.outputs} classes, and {_MOST_CLASSES} classes "
            "are the most; use accuracy or perplexity"
        )


def _is_cheap(metric: Any, task: Task | None) -> bool:
    """Whether a metric can be computed on training rows: its states are small sums, and an update needs little
    memory."""
    from torchmetrics.utilities import dim_zero_sum

    states = metric._defaults.values()
    sums = all(each is dim_zero_sum for each in metric._reductions.values())
    if not sums or sum(each.numel() for each in states) > _MOST_SUMS:
        return False
    if task is None or task.name != "multiclass":
        return True
    return takes_classes(metric) or (top_k(metric) > 1 and task.outputs <= _MOST_CLASSES)


def _in_double(metric: Any) -> Any:
    """Return the metric with sums in double precision, where the device has it. Those of classification are
    integers."""
    if is_classification(metric) or metric.device.type == "mps":
        return metric
    return metric.set_dtype(torch.float64)


def _sum_states(metric: Any, group: dist.ProcessGroup) -> None:
    """All-reduce the states of a metric, which are sums."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    flat = torch.cat([_for_backend(group, each).double().flatten() for each in states.values()])
    dist.all_reduce(flat, group=group)
    parts = flat.split([each.numel() for each in states.values()])
    for (name, each), part in zip(states.items(), parts):
        setattr(metric, name, part.view(each.shape).to(each.dtype).to(each.device))


def _gathered(state: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the state of each replica. Replicas may have different numbers of rows; those without any are omitted."""
    kinds = all_gather_object((list(state.shape), state.dtype), group)
    own = _for_backend(group, state).contiguous().view(-1).view(torch.uint8)
    lengths = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
    padded = own.new_zeros(max(lengths))
    padded[: own.numel()] = own
    found = [torch.empty_like(padded) for _ in kinds]
    dist.all_gather(found, padded, group=group)
    parts = [
        each[:length].view(dtype).view(shape).to(state.device)
        for each, length, (shape, dtype) in zip(found, lengths, kinds)
    ]
    return [each for each in parts if each.numel()] or parts[:1]


def _for_backend(group: dist.ProcessGroup, state: Tensor) -> Tensor:
    """Return the state where the group's backend takes it: gloo gathers host tensors only."""
    return state.cpu() if dist.get_backend(group) == "gloo" else state
