"""Callbacks that apply ``parallax.swap`` inside training loops: of other libraries, and of ``parallax train``.

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
    """Opens a swap scope when a trainer starts, and closes it when the trainer ends. ``swapping``: the latest scope,
    whose ``report()`` describes the training."""

    def __init__(self, limit: int | str, options: dict[str, Any]) -> None:
        self._limit, self._options = limit, options
        self.swapping: Swapping | None = None

    def begin(self, model: nn.Module, optimizers: Any) -> None:
        """Enter a new scope. The scope of an earlier training that failed without a callback is closed first."""
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
    trainer calls no callback after an exception: if you catch one, call ``callback.training.end()``, or train again.
    """
    base: Any = import_module("transformers").TrainerCallback

    class TransformersSwapCallback(base):
        """Enters the scope before the first step and leaves it after the last."""

        def __init__(self) -> None:
            self.training = Training(limit, options)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            """Enter the scope; the trainer has already moved parameters and optimizer to the device."""
            self.training.begin(kwargs["model"], [kwargs.get("optimizer")])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            """Leave the scope, which moves the optimizer states back to the device."""
            self.training.end()

    return TransformersSwapCallback()


def lightning_callback(limit: int | str = AUTO, **options: Any) -> Any:
    """Return a ``lightning.pytorch.Callback``: ``Trainer(…, callbacks=[lightning_callback("8GiB")])``.

    ``limit`` and ``options`` are passed to :func:`parallax.swap`, together with the trainer's optimizers.
    ``callback.training.swapping.report()`` returns a text about the bytes moved, the time lost and the reasons.
    """
    base: Any = import_module("lightning.pytorch").Callback

    class LightningSwapCallback(base):
        """Enters the scope before the first step and leaves it after the last one, or after a step that fails."""

        def __init__(self) -> None:
            self.training = Training(limit, options)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Enter the scope; the trainer has already moved parameters and optimizers to the device."""
            self.training.begin(pl_module, trainer.optimizers)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            """Leave the scope, which moves the optimizer states back to the device."""
            self.training.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
            """Leave the scope, because the trainer ends after an exception."""
            self.training.end()

    return LightningSwapCallback()


class SwapCallback:
    """The callback of a run that :func:`run_callback` returns. ``training.swapping``: its scope."""

    def __init__(self, limit: int | str, options: dict[str, Any]) -> None:
        self.training = Training(limit, options)

    def on_run_start(self, run: Any) -> None:
        """Enter the scope with the weights of this rank's stage."""
        held = nn.Module()
        for name, tensor in run.engine.parameters.items():
            plain = name.replace(".", "_")
            if isinstance(tensor, nn.Parameter):
                held.register_parameter(plain, tensor)
            elif isinstance(tensor, torch.Tensor):
                held.register_buffer(plain, tensor)
        self.training.begin(held, [])

    def on_run_end(self, run: Any) -> None:
        """Leave the scope, and write its report into the run's directory."""
        self.training.end()
        if self.training.swapping is not None:
            path = run.directory / f"swap-rank{run.rank}.txt"
            path.write_text(self.training.swapping.report() + "\n", encoding="utf-8")


def run_callback(limit: int | str = AUTO, **options: Any) -> SwapCallback:
    """Return a callback for ``parallax train``: ``callbacks=[{target: parallax.integrations:run_callback, kwargs:
    {n_tensors: 2, lb: 1}}]``.

    ``limit`` and ``options`` are passed to :func:`parallax.swap`. It offloads activations by hand, as IBM's Large Model
    Support does; the optimizer's states stay where the plan puts them. A plan offloads activations itself
    (``plan.activations=offload``). The report is in ``swap-rankN.txt`` in the run's directory.
    """
    return SwapCallback(limit, options)
