"""Convert sparse gradients to dense ones before they are accumulated.

An embedding with ``sparse=True`` has gradients only for the rows that it read. All-reduces, norms, split backwards,
optimizers and offloading need dense memory. A dense gradient has the same values, so SGD and AdamW update as with
``sparse=False``. Only the first gradient shows whether a parameter's gradients are sparse. A hook checks this gradient,
and removes itself if it is dense.
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
    """Make all future gradients of the trained ``parameters`` dense. Call this before the first backward.

    ``parameters``: {name: parameter}.
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            hook = _DensifyingHook(name, parameter)
            hook.handle = parameter.register_hook(hook)


class _DensifyingHook:
    """A hook that runs before a gradient is accumulated into ``.grad``, and makes ``.grad`` dense.

    The hook cannot return a gradient of another layout. So it sets ``.grad`` to dense zeros, and adding a sparse
    gradient to dense zeros gives a dense one. The hook refers to the parameter weakly, to avoid a reference cycle.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self._name, self._parameter = name, weakref.ref(parameter)
        self._logged = False
        self.handle: RemovableHandle | None = None

    def __call__(self, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            if self.handle is not None and not self._logged:
                self.handle.remove()
            return
        parameter = self._parameter()
        if parameter is not None and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not self._logged:
            logger.info(
                "%s: its sparse gradients are converted to dense ones; results equal those of sparse=False",
                self._name,
            )
        self._logged = True
