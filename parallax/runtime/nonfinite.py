"""Where a loss or a norm that is no number comes from.

By the time it is noticed it is everywhere: what is not finite in one rank's rows or weights is in every rank's
gradients a moment later. So the ranks look once, after the fact, and tell each other; the first in the order in which
data goes through the model is the cause. No step pays for this before its loss, which every rank knows anyway, is not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import NonFiniteError, printable
from parallax.mesh import Mesh
from parallax.model.block import has_gradient, tensors_in
from parallax.model.ragged import opened
from parallax.runtime.batch import Rows
from parallax.runtime.optim.scaling import LossScale

_ROWS = 64  # of a batch that are looked at together
_DATA = "mend the rows that data.* gives"
_TRAINING = "lower optimizer.lr, or raise optimizer.warmup_steps"


def accept(
    scale: LossScale, step: int, loss: float, norm: float, find: Callable[[], str]
) -> tuple[bool, str]:
    """Whether ``scale`` accepts a step with this loss and norm, which all ranks know, and what is wrong with its loss
    where it is to be skipped. Raises :class:`NonFiniteError`; ``find`` then, and for such a loss, says why."""
    why = "" if math.isfinite(loss) else find()
    try:
        accepted = scale.accepts(loss, norm)
    except NonFiniteError as error:
        what, _, _ = str(error).partition(": ")
        raise NonFiniteError(f"step {step}: {what}: {why or find()}") from None
    return accepted, f"loss {loss}: {why}" if why else ""


def find(
    mesh: Mesh, batch: Rows, loss_share: float, tensors: Iterable[tuple[str, Tensor, Tensor | None]]
) -> str:
    """What is not finite and comes first, and what to do about it; called by every rank. ``tensors``: name, parameter
    or buffer, and gradient of those that this rank answers for."""
    answers = mesh.gather_objects(_look(mesh, batch, loss_share, tensors))
    found = [(order, rank, text) for rank, answer in enumerate(answers) for order, text in answer]
    if not found:
        return f"the sum over all gradients overflows; {_TRAINING}"
    (order, _), rank, text = min(found)
    stage, replica = mesh.plan.locate(rank)
    who = f"rank {rank} (stage {stage}, replica {replica})"
    return f"{text}, seen first by {who}; {_DATA if order == 0 else _TRAINING}"


def _look(
    mesh: Mesh, batch: Rows, loss_share: float, tensors: Iterable[tuple[str, Tensor, Tensor | None]]
) -> list[tuple[tuple[int, int], str]]:
    """What this rank finds, each with its place in the order of causes."""
    found = []
    if mesh.stage == 0 and (text := _rows("inputs", batch, batch.inputs)):
        found.append(((0, 0), text))
    if mesh.is_last and (text := _rows("targets", batch, batch.targets)):
        found.append(((0, 1), text))
    for name, tensor, gradient in tensors:
        if isinstance(tensor, nn.Parameter) and (what := _kind(tensor)):
            found.append(((1, mesh.stage), f"parameter {printable(name)} holds {what}"))
        if gradient is not None and (what := _kind(gradient)):
            found.append(((3, -mesh.stage), f"the gradient of {printable(name)} holds {what}"))
    if not math.isfinite(loss_share):
        found.append(((2, 0), f"the loss becomes {loss_share} on the last stage"))
    return [min(found)] if found else []


def _rows(name: str, batch: Rows, read: Callable[[int, int], Any]) -> str:
    for start in range(0, len(batch), _ROWS):
        stop = min(start + _ROWS, len(batch))
        for tensor in tensors_in(opened(read(start, stop))):
            if what := _kind(tensor):
                if not tensor.dim() or len(tensor) != stop - start:
                    return f"the batch's {name} hold {what}, in a tensor without rows"
                bad = ~torch.isfinite(tensor.detach())
                row = start + int(bad.reshape(len(tensor), -1).any(1).nonzero()[0])
                return f"row {row} of the batch's {name} holds {what}"
    return ""


def _kind(tensor: Tensor) -> str:
    """NaN or infinity, where a tensor holds any."""
    values = tensor.detach()
    if not has_gradient(values) or bool(torch.isfinite(values).all()):
        return ""
    return "nan" if bool(torch.isnan(values).any()) else "inf"


def unfit(name: str, tensor: Tensor, value: Tensor) -> str:
    """Why a trained parameter must not be saved, or nothing."""
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad and (what := _kind(value)):
        return f"parameter {printable(name)} holds {what}"
    return ""
