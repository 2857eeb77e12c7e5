"""Torch's optimizers without its compiler, which they load in order to keep it away from themselves.

That takes a second of computing in every process that makes an optimizer, and here no step is ever compiled: a stage's
blocks may be, each by itself. What torch wraps in this way it keeps as ``__wrapped__``, and that is called.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """What all optimizers do, as torch does it."""

    add_param_group: Any = inspect.unwrap(Optimizer.add_param_group)
    zero_grad: Any = inspect.unwrap(Optimizer.zero_grad)


class AdamW(Uncompiled, torch.optim.AdamW):
    """``torch.optim.AdamW``, to the last bit."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Uncompiled, torch.optim.SGD):
    """``torch.optim.SGD``, to the last bit."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
