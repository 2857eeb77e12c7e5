"""The states of a rank's metrics, and their sum over all replicas.

The metric of a batch is not the mean of its micro-batches' metrics: for an F1 score or a perplexity that mean would be
wrong, and also for an accuracy if micro-batches have different numbers of targets that count. So each replica of the
last stage updates the states of its metrics, which are counts, sums or all scores, with each micro-batch. The states of
all replicas are added or concatenated, and the metric is computed from the result.

Metrics of training rows must not make the host wait for the device. They use only counts and sums, which are updated on
the device, and copied to the host together with the step's loss.
"""

from __future__ import annotations

import copy
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
from parallax.runtime.metrics.rows import ScoredRows, counts_labels, is_classification, top_k

_MOST_CLASSES = 4096  # in a confusion matrix, and for top-k metrics of training rows
_MOST_SUMS = 2**16  # numbers in the state of a metric of training rows, all-reduced after each step


class Metrics:
    """The metrics of one rank. Ranks that do not have the last stage compute nothing."""

    def __init__(self, config: MetricsConfig, mesh: Mesh) -> None:
        if mesh.is_last:
            config.check_installed()
        self.config, self._mesh = config, mesh
        self._task: Task | None = None
        # Whether for training rows → metrics by name.
        self._made: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        self._on_host: dict[
            str, Any
        ] = {}  # copies of those for training rows, which compute the values
        self._wrong = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._copied: Tensor | None = None
        self.trained: tuple[str, ...] = ()
        """Names of the metrics that are also computed for each training step: those that need only small sums."""

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    @property
    def names(self) -> list[str]:
        return self.config.names

    def wanted(self, *, training: bool) -> bool:
        """Whether any metric is computed on training rows, if ``training`` is True, or otherwise on evaluated rows. If
        so, the caller passes these rows to :meth:`add`."""
        return bool(self.trained if training else self.config.metrics)

    def begin(self, *, training: bool) -> None:
        """Forget the rows that were added before: the training rows if ``training`` is True, otherwise the evaluated
        rows."""
        for metric in self._made[training].values():
            metric.reset()
        self._wrong.zero_()

    def add(self, results: Any, targets: Any, *, training: bool) -> None:
        """Update the metrics with the model's outputs ``results`` and the targets of some rows.

        If ``training`` is True, only the metrics of training rows are updated, otherwise only those of evaluated rows.
        Raises :class:`ConfigError` if a metric does not accept the outputs or targets.
        """
        rows = ScoredRows.of(results, targets, self.config)
        if self._task is not None and rows.task != self._task:
            raise ConfigError(
                f"metrics: outputs and targets are {self._task}, and of other rows {rows.task}: all must be of one kind"
            )
        made = self._metrics(rows.task, training)
        for name, metric in made.items():
            with _refusing(name, rows):
                wrong = rows.wrong(metric)
                if training:
                    self._wrong += wrong
                elif wrong:
                    raise ValueError(_wrong_targets(int(wrong), rows.task))
                rows.add_to(metric)

    def evaluated(self) -> dict[str, float]:
        """Return the values of the metrics, by name, over all rows that all replicas have added since :meth:`begin`.
        All ranks call this method and get the same values."""
        if not self.config.metrics:
            return {}
        self._exchange_task()
        mine = self._computed()
        columns = self._mesh.gather_columns({name: mine.get(name, 0.0) for name in self.names})
        return {name: sum(values) for name, values in columns.items()}

    def settle(self) -> None:
        """Choose the metrics that are also computed on training rows: those whose states are small sums.

        All ranks call this method after the first evaluation, which has built the metrics.
        """
        cheap = [name for name, each in self._made[False].items() if _is_cheap(each, self._task)]
        found = self._mesh.all_gather_object(cheap)
        self.trained = tuple(name for name in self.names if any(name in each for each in found))
        for metric in self._made[False].values():
            if hasattr(metric, "validate_args"):
                metric.validate_args = False  # its checks wait for the device

    def copy_states(self) -> None:
        """Sum the states of the training rows over the replicas, and start to copy the sums to the host.

        All replicas call this method. The copy is complete when the host next reads a number from the device.
        """
        if not self.trained or not self._mesh.is_last or self._task is None:
            return
        metrics, group = self._metrics(self._task, True).values(), self._mesh.statistics
        states = [getattr(metric, name) for metric in metrics for name in metric._defaults]
        parts = [_for_backend(group, each).double().flatten() for each in (self._wrong, *states)]
        flat = torch.cat(parts)
        if group is not None:
            dist.all_reduce(flat, group=group)
        if self._mesh.replica == 0:
            self._copied = flat.to("cpu", non_blocking=True)

    def stepped(self) -> dict[str, float]:
        """Return the values of the metrics, by name, over the training rows of all replicas, from the states on the
        host. Only the first replica of the last stage gets the values; all other ranks get 0 for each metric."""
        copied, self._copied = self._copied, None
        mine = {} if copied is None else self._from_sums(copied)
        return {name: mine.get(name, 0.0) for name in self.trained}

    def _from_sums(self, sums: Tensor) -> dict[str, float]:
        wrong, found, first = int(sums[0]), dict[str, float](), 1
        if wrong and self._task is not None:
            raise ConfigError(f"metrics: {_wrong_targets(wrong, self._task)}")
        for name, metric in self._on_host.items():
            metric.reset()
            for state in metric._defaults:
                like = getattr(self._made[True][name], state)
                part = sums[first : first + like.numel()]
                setattr(metric, state, part.view(like.shape).to(like.dtype))
                first += like.numel()
            with _refusing(name):
                found[name] = _number(metric.compute())
        return found

    def _metrics(self, task: Task, training: bool) -> dict[str, Any]:
        """Return a dict from each name to its metric: the metrics of training rows if ``training`` is True, otherwise
        those of evaluated rows. They are built for ``task`` at the first call."""
        self._task, made = task, self._made[training]
        for each in self.config.metrics if not made else ():
            if not training or each.name in self.trained:
                metric = each.build(task)
                _check(each, metric, task)
                metric.sync_on_compute = metric._to_sync = False
                if training and hasattr(metric, "validate_args"):
                    metric.validate_args = False
                made[each.name] = _in_double(metric.to(self._mesh.device))
                if training:
                    self._on_host[each.name] = copy.deepcopy(made[each.name]).to("cpu")
        return made

    def _exchange_task(self) -> None:
        """Take over the task (:class:`Task`) that another replica has found, if this replica has had no rows to find it
        from. All replicas of the last stage call this method."""
        group = self._mesh.statistics
        if group is not None and self._mesh.is_last:
            found = [each for each in all_gather_object(self._task, group) if each is not None]
            self._task = self._task or next(iter(found), None)

    def _computed(self) -> dict[str, float]:
        """Return the values of the metrics of evaluated rows, by name, computed from the states of all replicas. Only
        the first replica of the last stage gets them; all other ranks get an empty dict."""
        if not self._mesh.is_last or self._task is None:
            return {}
        found = {}
        for name, metric in self._metrics(self._task, False).items():
            with self._of_replicas(metric):
                if self._mesh.replica == 0:
                    with _refusing(name):
                        found[name] = _number(metric.compute())
            metric.reset()
        return found

    def _of_replicas(self, metric: Any) -> AbstractContextManager[None]:
        """Return a context in which ``metric`` has the combined states of all replicas."""
        group = self._mesh.statistics
        if group is None:
            return nullcontext()
        context: AbstractContextManager[None] = metric.sync_context(
            dist_sync_fn=_gathered, process_group=group, distributed_available=lambda: True
        )
        return context


@contextmanager
def _refusing(name: str, rows: ScoredRows | None = None) -> Iterator[None]:
    """A context that converts an error of the metric ``name`` to :class:`ConfigError`. The message names the shapes of
    ``rows``, if given."""
    shapes = ""
    if rows is not None:
        shapes = (
            f"; outputs have shape {list(rows.scores.shape)} and targets {list(rows.targets.shape)}"
        )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns about classes without rows
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


def _wrong_targets(count: int, task: Task) -> str:
    if task.name == "multiclass":
        return f"{count} targets are classes above {task.outputs - 1}, the last of which the model has a score"
    return f"{count} of the targets are not 0 and 1"


def _check(config: MetricConfig, metric: Any, task: Task) -> None:
    """Raise :class:`ConfigError` if the metric's states cannot be combined exactly over replicas, or do not fit in
    memory."""
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
    if isinstance(metric, MulticlassConfusionMatrix) and task.outputs > _MOST_CLASSES:
        raise ConfigError(
            f"{config.key}: it needs a table of {task.outputs} × {task.outputs} classes, and {_MOST_CLASSES} classes "
            "are the most; use accuracy or perplexity"
        )


def _is_cheap(metric: Any, task: Task | None) -> bool:
    """Whether ``metric`` can be computed on training rows of ``task``, because its states are small sums and an update
    needs little memory."""
    from torchmetrics.utilities import dim_zero_sum

    states = metric._defaults.values()
    sums = all(each is dim_zero_sum for each in metric._reductions.values())
    if not sums or sum(each.numel() for each in states) > _MOST_SUMS:
        return False
    if task is None or task.name != "multiclass":
        return True
    return counts_labels(metric) and (top_k(metric) == 1 or task.outputs <= _MOST_CLASSES)


def _in_double(metric: Any) -> Any:
    """Return the metric with sums in double precision, if the device supports it. The sums of classification metrics
    are integers."""
    if is_classification(metric) or metric.device.type == "mps":
        return metric
    return metric.set_dtype(torch.float64)


def _gathered(state: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return a list of the values that ``state`` has on the replicas in ``group`` that have had rows. The values may
    have different lengths, because replicas may have had different numbers of rows."""
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


def _for_backend(group: dist.ProcessGroup | None, state: Tensor) -> Tensor:
    """Return ``state`` on a device from which ``group`` can send it in double precision.

    gloo sends host tensors only, and MPS has no doubles. In both cases ``state`` is copied to the host. If ``group`` is
    None, nothing is sent.
    """
    on_host = state.is_mps or (group is not None and dist.get_backend(group) == "gloo")
    return state.cpu() if on_host else state
