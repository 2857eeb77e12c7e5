"""Locate the tensor that made a loss or a gradient norm NaN or Inf.

A NaN in one rank's rows or weights has spread to every rank's gradients by the end of the step. So all ranks search
after such a step and gather their findings; the first in the order of the data flow is the cause. Steps with a finite
loss and norm cost nothing extra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallax.errors import NonFiniteError, printable
from parallax.mesh import Mesh
from parallax.model.block import tensors_in
from parallax.model.files.values import nonfinite_kind
from parallax.plan.plan import Plan
from parallax.plan.rows import micro_batch_rows
from parallax.runtime.batch import Rows
from parallax.runtime.failure.report import name as name_of
from parallax.runtime.optim.scaling import LossScale

Losses = Callable[[], Sequence[tuple[int, int, float]]]
"""First row, last row + 1, and value of each call of the loss."""

_ROWS = 64  # rows that are read at one time
_NAMED = 8  # rows that a message lists, at most
_DATA = "correct these rows in the data source (data.*)"
_TRAINING = "lower optimizer.lr, or raise schedule.warmup"


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Whether a step is ``accepted``. If not, ``what`` names the non-finite number and ``why`` its cause.

    ``refusal`` is the text of the error that ends the run; empty if training continues.
    """

    accepted: bool = True
    what: str = ""
    why: str = ""
    refusal: str = ""

    def report(self, step: int) -> str:
        """Return why a step is skipped; "" if a dynamic loss scale expected the overflow.

        Raises :class:`NonFiniteError` if the run may skip no more steps.
        """
        if self.refusal:
            raise NonFiniteError(f"step {step}: {self.refusal}: {self.why}")
        return f"{self.what}: {self.why}" if self.why else ""


def judge(scale: LossScale, loss: float, norm: float, find: Callable[[], str]) -> StepVerdict:
    """Return the verdict on a step: accepted if ``scale`` accepts this loss and this gradient norm, otherwise with the
    cause.

    All ranks call this function with equal ``loss`` and ``norm``. ``find`` locates the non-finite tensor. It is not
    called for the overflows that a dynamic loss scale expects.
    """
    why = find() if not math.isfinite(loss) else None
    try:
        accepted, refusal = scale.accepts(loss, norm), ""
    except NonFiniteError as error:
        accepted, (refusal, _, _) = False, str(error).partition(": ")
    if accepted:
        return StepVerdict()
    if refusal or not scale.expects_overflows:
        why = why or find()
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    if why is None:
        return StepVerdict(accepted=False)
    return StepVerdict(False, what, why, refusal)


class NamedValue(NamedTuple):
    """A parameter or buffer, resident or offloaded, with its value and its gradient. ``is_parameter`` is False for a
    buffer."""

    name: str
    value: Tensor
    gradient: Tensor | None
    is_parameter: bool


def find(mesh: Mesh, batch: Rows, losses: Losses, tensors: Iterable[NamedValue]) -> str:
    """Return a description of the first non-finite tensor in the data flow, with a remedy. Every rank calls this
    function.

    ``losses()`` returns the losses of this rank's micro-batches. ``tensors`` are the tensors that this rank searches.
    """
    answers = mesh.all_gather_object(_search(mesh, batch, losses, tensors))
    found = [(order, rank, text) for rank, answer in enumerate(answers) for order, text in answer]
    if not found:
        return f"the sum over all losses or gradients overflows; {_TRAINING}"
    (order, _), rank, text = min(found)
    who = name_of(rank, mesh.plan.coordinate(rank))
    remedy = _DATA if order == 0 else _TRAINING
    return f"{text}, seen first by {who}; {remedy}"


def _search(
    mesh: Mesh, batch: Rows, losses: Losses, tensors: Iterable[NamedValue]
) -> list[tuple[tuple[int, int], str]]:
    """Return the non-finite tensor of this rank that comes first in the data flow, as a list of one pair (position in
    the data flow, description); an empty list if all tensors are finite."""
    found = []
    if mesh.pipeline_rank == 0 and (text := _rows(mesh, "inputs", batch, batch.inputs)):
        found.append(((0, 0), text))
    if mesh.is_last and (text := _rows(mesh, "targets", batch, batch.targets)):
        found.append(((0, 1), text))
    for name, value, gradient, is_parameter in tensors:
        if is_parameter and (what := nonfinite_kind(value)):
            found.append(((1, mesh.pipeline_rank), f"parameter {printable(name)} holds {what}"))
        if gradient is not None and (what := nonfinite_kind(gradient)):
            found.append(
                ((3, -mesh.pipeline_rank), f"the gradient of {printable(name)} holds {what}")
            )
    bad = next(
        ((low, high, value) for low, high, value in losses() if not math.isfinite(value)), None
    )
    if bad is not None:
        found.append(((2, bad[0]), _loss(mesh.plan, len(batch), *bad)))
    return [min(found)] if found else []


def _loss(plan: Plan, batch: int, low: int, high: int, value: float) -> str:
    """Return a description of the non-finite loss ``value``, with the rows [low, high) that it was computed from.
    ``batch`` is the number of rows of the batch."""
    text = f"the loss becomes {value} on the last stage"
    if high - low == batch:
        return text
    rows = f"row {low}" if high - low == 1 else f"rows {low} to {high - 1}"
    count = plan.micro_batches(batch)
    (micro,) = (micro for micro in range(count) if _holds(batch, count, micro, low))
    return f"{text}, from {rows} of the batch (micro-batch {micro})"


def _rows(mesh: Mesh, name: str, batch: Rows, read: Callable[[int, int], Any]) -> str:
    """Return a description of the rows of ``batch`` with NaN or Inf and of their micro-batches; "" if there are none.

    ``name`` is "inputs" or "targets", and ``read(start, stop)`` returns these for rows [start, stop).
    """
    rows, kinds = set[int](), set[str]()
    for start in range(0, len(batch), _ROWS):
        stop = min(start + _ROWS, len(batch))
        for tensor in tensors_in(read(start, stop)):
            if what := nonfinite_kind(tensor):
                if not tensor.dim() or len(tensor) != stop - start:
                    return f"the batch's {name} hold {what}, in a tensor without rows"
                bad = ~torch.isfinite(tensor.detach()).reshape(len(tensor), -1).all(1)
                rows |= {start + row for row in bad.nonzero().flatten().tolist()}
                kinds.add(what)
    return _description(
        mesh.plan, name, len(batch), sorted(rows), "nan" if "nan" in kinds else "inf"
    )


def _description(plan: Plan, name: str, batch: int, rows: Sequence[int], what: str) -> str:
    if not rows:
        return ""
    count = plan.micro_batches(batch)
    micros = sorted({m for m in range(count) for row in rows if _holds(batch, count, m, row)})
    places = f"micro-batch{'es' if len(micros) > 1 else ''} {_listed(micros)}"
    if len(rows) == 1:
        return f"row {rows[0]} of the batch's {name} holds {what} ({places})"
    return f"rows {_listed(rows)} of the batch's {name} hold {what} ({places})"


def _holds(batch: int, count: int, micro: int, row: int) -> bool:
    low, high = micro_batch_rows(batch, count, micro)
    return low <= row < high


def _listed(numbers: Sequence[int]) -> str:
    more = len(numbers) - _NAMED
    return ", ".join(map(str, numbers[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def unfit(name: str, tensor: Tensor, value: Tensor) -> str:
    """Return the reason why the trained parameter ``name`` must not be saved: its ``value`` has a NaN or an Inf. "" if
    it may be saved."""
    if (
        isinstance(tensor, nn.Parameter)
        and tensor.requires_grad
        and (what := nonfinite_kind(value))
    ):
        return f"parameter {printable(name)} holds {what}"
    return ""
