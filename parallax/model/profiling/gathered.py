"""The loss of a whole batch, where it is computed once, of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Outputs = tuple[int, Sequence[Tensor]]  # of so many rows


@dataclass(frozen=True, kw_only=True)
class WholeLoss:
    """Bytes of the ``outputs`` of ``rows`` rows, what the loss needs besides (``work``), and the seconds that it
    takes, with its backward."""

    rows: int
    outputs: int
    work: int
    seconds: float


NO_LOSS = WholeLoss(rows=0, outputs=0, work=0, seconds=0.0)
"""Each micro-batch has a loss of its own."""


def repeated(rows: int, few: Outputs, more: Outputs) -> tuple[Tensor, ...]:
    """Outputs of ``rows`` rows: those of a few, over and over. What is as long for ``few`` as for ``more`` rows, where
    these differ, has none."""

    def whole(less: Tensor, tensor: Tensor) -> Tensor:
        has_rows = tensor.shape[:1] == (more[0],) and less.shape[:1] == (few[0],)
        found = tensor.detach()
        if has_rows:
            found = found[torch.arange(rows, device=found.device) % more[0]]
        return found.clone().requires_grad_(tensor.requires_grad)

    return tuple([whole(*pair) for pair in zip(few[1], more[1])])
