"""torch's optimizers without the wrappers that import ``torch._compile``; and Lion.

The wrappers exclude optimizers from compilation. For this they load the compiler, which takes a second in every process
that builds an optimizer. Parallax compiles no optimizer steps, so these classes use the unwrapped functions, which
torch keeps as ``__wrapped__``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.model.private import (
    add_to_each,
    lerp_each,
    lerp_each_in_place,
    multiply_each,
    sign_of_each,
)
from parallax.runtime.optim.scaling import by_kind

# Lion allocates a direction for each weight of a group of small parameters, or of one large parameter. The plan counts
# the directions of the largest parameter. The device's reserve, which is twice as large, covers those of a group.
_RUN_BYTES = 4 * 2**20


class Uncompiled(Optimizer):
    """An optimizer whose base methods are torch's, unwrapped."""

    add_param_group: Any = inspect.unwrap(Optimizer.add_param_group)
    zero_grad: Any = inspect.unwrap(Optimizer.zero_grad)


class AdamW(Uncompiled, torch.optim.AdamW):
    """``torch.optim.AdamW``, bit-identical."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Uncompiled, torch.optim.SGD):
    """``torch.optim.SGD``, bit-identical."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Muon(Uncompiled, torch.optim.Muon):
    """``torch.optim.Muon``, bit-identical."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))


class Momentum(SGD):
    """SGD with momentum for parameters whose first gradients come in different steps. torch's fused kernel looks at the
    momentum of one parameter to decide whether all parameters are in their first step. So here the momentum of each
    parameter starts as zeros, which gives the same update."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
        return super().step(closure)


class Lion(Uncompiled):
    """Evolved sign momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    It has one state per parameter, and its updates have the same magnitude for all weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run one update; ``closure``, if given, computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _together(group["params"]):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update ``parameters`` with five multi-tensor kernels."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        averages = [self.state[parameter]["exp_avg"] for parameter in parameters]
        weights: list[Tensor] = [*parameters]
        directions = lerp_each(gradients, averages, first)
        sign_of_each(directions)
        multiply_each(weights, 1 - group["lr"] * group["weight_decay"])
        add_to_each(weights, directions, alpha=-group["lr"])
        lerp_each_in_place(averages, gradients, 1 - second)


def _together(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield lists of those ``parameters`` that have gradients. The parameters of a list have one dtype, one device and
    at most ``_RUN_BYTES`` in total; a larger parameter is alone in its list."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    for alike in by_kind(given):
        run: list[nn.Parameter] = []
        size = 0
        for parameter in alike:
            if run and size + parameter.nbytes > _RUN_BYTES:
                yield run
                run, size = [], 0
            run.append(parameter)
            size += parameter.nbytes
        yield run
