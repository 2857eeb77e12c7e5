"""Gradients that torch makes sparse become dense before they are added up.

An embedding with ``sparse=True`` gives the rows it read and no others. What follows works on plain memory: sums over
replicas, norms, halves of a backward, optimizers and what leaves the device. A dense gradient is the same gradient, so
SGD and AdamW do what they do without that option. Whether a gradient is sparse only the first one tells: a hook looks
at it, and stays only where it is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger("parallax")


def make_gradients_dense(parameters: Mapping[str, Tensor]) -> None:
    """From now on, of all ``parameters`` that are trained, by name; to be called before their first backward."""
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            look = _FirstLook(name, parameter)
            look.handle = parameter.register_hook(look)


class _FirstLook:
    """A parameter's hook, called before a gradient is added to ``.grad``. No hook may make it another kind of tensor;
    but what is added to zeros becomes dense. It does not hold the parameter, which holds it."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        self._name, self._parameter = name, weakref.ref(parameter)
        self._told = False
        self.handle: RemovableHandle | None = None

    def __call__(self, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            if self.handle is not None and not self._told:
                self.handle.remove()
            return
        parameter = self._parameter()
        if parameter is not None and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not self._told:
            logger.info(
                "%s: its sparse gradients become one dense gradient; results are those of sparse=False",
                self._name,
            )
        self._told = True
