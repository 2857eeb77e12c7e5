"""Callbacks that apply :func:`parallax.swap` in the training loops of transformers, Lightning and ``parallax train``.

Each library is imported only when its callback is requested.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallax.swap.lms.arguments import AUTO
from parallax.swap.lms.scope import Swapping, swap


class Training:
    """Opens a swap scope (:func:`parallax.swap`) when a training starts, and closes the scope when the training ends.

    ``limit`` and ``options`` are passed to :func:`parallax.swap`. ``swapping``: the latest scope. Its ``report()``
    describes what was offloaded.
    """

    def __init__(self, limit: int | str, options: dict[str, Any]) -> None:
        self._limit, self._options = limit, options
        self.swapping: Swapping | None = None

    def begin(self, model: nn.Module, optimizers: Any) -> None:
        """Open a new scope for ``model`` and its ``optimizers``. If an earlier scope is still open, because its
        training failed, the earlier scope is closed first."""
        self.end()
        # Other objects in the list (a placeholder, None in an evaluation) have no states to offload.
        given = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
        self.swapping = swap(model, self._limit, optimizer=given, **self._options).__enter__()

    def end(self) -> None:
        if self.swapping is not None and self.swapping.open:
            self.swapping.__exit__(None, None, None)


def transformers_callback(limit: int | str = AUTO, **options: Any) -> Any:
    """Return a ``transformers.TrainerCallback``: ``Trainer(…, callbacks=[transformers_callback("8GiB")])``.

    ``limit`` and ``options`` are passed to :func:`parallax.swap`, together with the trainer's optimizer.
    ``callback.training.swapping.report()`` returns a text about the bytes moved, the time lost and the reasons. The
    trainer calls no callback after an exception. If you catch the exception, call ``callback.training.end()``, or train
    again.
    """
    base: Any = import_module("transformers").TrainerCallback

    class TransformersSwapCallback(base):
        """A callback that opens the swap scope before the first step and closes it after the last."""

        def __init__(self) -> None:
            self.training = Training(limit, options)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            """Open the scope. At this time the trainer has already moved parameters and optimizer to the device."""
            self.training.begin(kwargs["model"], [kwargs.get("optimizer")])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            """Close the scope, which moves the optimizer states back to the device."""
            self.training.end()

    return TransformersSwapCallback()


def lightning_callback(limit: int | str = AUTO, **options: Any) -> Any:
    """Return a ``lightning.pytorch.Callback``: ``Trainer(…, callbacks=[lightning_callback("8GiB")])``.

    ``limit`` and ``options`` are passed to :func:`parallax.swap`, together with the trainer's optimizers.
    ``callback.training.swapping.report()`` returns a text about the bytes moved, the time lost and the reasons.
    """
    base: Any = import_module("lightning.pytorch").Callback

    class LightningSwapCallback(base):
        """A callback that opens the swap scope before the first step, and closes it after the last step or after a
        failed step.
        """

        def __init__(self) -> None:
            self.training = Training(limit, options)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Open the scope. At this time the trainer has already moved parameters and optimizers to the device."""
            self.training.begin(pl_module, trainer.optimizers)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            """Close the scope, which moves the optimizer states back to the device."""
            self.training.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
            """Close the scope, because the trainer ends after an exception."""
            self.training.end()

    return LightningSwapCallback()


class SwapCallback:
    """The callback for ``parallax train`` that :func:`run_callback` returns.

    ``training.swapping``: the latest swap scope.
    """

    def __init__(self, limit: int | str, options: dict[str, Any]) -> None:
        self.training = Training(limit, options)

    def on_run_start(self, run: Any) -> None:
        """Open the scope for the weights of this rank's stage."""
        held = nn.Module()
        for name, tensor in run.engine.parameters.items():
            plain = name.replace(".", "_")
            if isinstance(tensor, nn.Parameter):
                held.register_parameter(plain, tensor)
            elif isinstance(tensor, torch.Tensor):
                held.register_buffer(plain, tensor)
        self.training.begin(held, [])

    def on_run_end(self, run: Any) -> None:
        """Close the scope, and write its report into the run's directory."""
        self.training.end()
        if self.training.swapping is not None:
            path = run.directory / f"swap-rank{run.rank}.txt"
            path.write_text(self.training.swapping.report() + "\n", encoding="utf-8")


def run_callback(limit: int | str = AUTO, **options: Any) -> SwapCallback:
    """Return a callback for ``parallax train`` that offloads activations as you specify, like IBM's Large Model
    Support.

    Its setting is ``callbacks=[{target: parallax.integrations:run_callback, kwargs: {n_tensors: 2, lb: 1}}]``.
    ``limit`` and ``options`` are passed to :func:`parallax.swap`. The optimizer's states stay where the plan puts them.
    A report is written to ``swap-rankN.txt`` in the run's directory.

    You do not need this callback if the plan offloads activations (``plan.activations=offload``).
    """
    return SwapCallback(limit, options)
