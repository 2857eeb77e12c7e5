"""torch's optimizers without ``torch._compile``, with which they exclude themselves from compilation.

It loads the compiler, which takes a second in every process that builds an optimizer. No optimizer step is compiled
here (blocks may be, each on its own), so the functions that torch keeps as ``__wrapped__`` are used directly.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer


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
