"""Loss scaling: keeps the gradients of a step in the range of fp16, and decides which steps are skipped.

The smallest gradients of a model are below 6e-8, where fp16 rounds to zero. The largest gradients are far below 65504,
the maximum of fp16. So the loss, and with it every gradient, is multiplied by a factor. The optimizer divides the
gradients by this factor before it clips them. The best factor is the largest without overflows. The factor is doubled
after many good steps, and halved after an overflow, whose step is skipped (Micikevicius et al. 2018, section 3.2).
Factors are powers of two, so scaling is exact.

An overflow anywhere makes the norm over all gradients Inf or NaN. All ranks need that norm for clipping, so all ranks
skip the same steps and have the same factor without further communication.

::

    factor   65536 ───────────────── 131072 ─ ✗ ─ 65536 ───────────        ✗: an overflow, skipped
             │  2000 good steps    │ 100  │     │  2000 …
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parallax.errors import NonFiniteError
from parallax.model.precision import PrecisionConfig
from parallax.model.private import multiply_each, norm_of_each
from parallax.swap.optimizer.buckets import Correction

FIRST_FACTOR = 2.0**16
GROWTH_STEPS = 2000  # good steps in a row, before the factor doubles
T = TypeVar("T", bound=Tensor)
SMALLEST_FACTOR = 1.0  # with this factor, the loss itself overflows
PATIENCE = 16  # overflows in a row with a constant factor: as many as halve the first factor to the smallest


class LossScale:
    """The factor of the loss under ``precision``: a configured constant, or dynamic in fp16, or 1.

    With a factor of 1, an overflow of the loss or a gradient is an error by default. ``skips`` is the number of
    consecutive steps that may be skipped. 0 means the default: 16 with a configured constant, otherwise none, except
    for the overflows that a dynamic factor expects.
    """

    def __init__(self, precision: PrecisionConfig, skips: int = 0) -> None:
        given = precision.loss_scale
        self._dynamic = given == "auto" and precision.compute == "fp16"
        self._limit = skips
        self._patience = skips or (0 if given == "auto" else PATIENCE)
        self.expects_overflows = self._dynamic or given != "auto"
        self.factor = FIRST_FACTOR if self._dynamic else 1.0 if isinstance(given, str) else given
        self.skipped = 0  # skipped steps so far
        self._good = self._bad = 0  # steps in a row

    def accepts(self, loss: float, norm: float) -> bool:
        """Return whether the step is accepted. If not, the caller drops the gradients of the step.

        ``loss`` and ``norm``, the norm of all gradients, are already divided by the factor. Every rank calls this
        method once a step with the same numbers. Raises :class:`NonFiniteError` if no more steps may be skipped.
        """
        if norm < float("inf") and abs(loss) < float("inf"):
            self._good, self._bad = self._good + 1, 0
            if self._dynamic and self._good >= GROWTH_STEPS:
                self._good, self.factor = 0, 2 * self.factor
            return True
        if self._is_last_chance():
            raise NonFiniteError(
                f"loss {loss}, gradient norm {norm}{self._history()}; nothing was updated: lower optimizer.lr, or "
                "raise schedule.warmup"
            )
        self._good, self._bad, self.skipped = 0, self._bad + 1, self.skipped + 1
        if self._dynamic:
            self.factor = max(SMALLEST_FACTOR, self.factor / 2)
        return False

    @property
    def skips(self) -> bool:
        """Whether steps may be skipped."""
        return self._dynamic or self._patience > 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {
            "dynamic": self._dynamic,
            "factor": self.factor,
            "good_steps": self._good,
            "bad_steps": self._bad,
            "skipped": self.skipped,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state` returned.

        If this run's settings have a constant factor, that factor stays. If this run has a dynamic factor, it does not
        take over a constant factor of the saved run.
        """
        self.skipped = int(state.get("skipped", 0))
        if self._limit:
            self._bad = int(state.get("bad_steps", 0))
        if self._dynamic and state.get("dynamic", "factor" in state):
            self.factor = float(state["factor"])
            self._good, self._bad = int(state["good_steps"]), int(state["bad_steps"])

    def _is_last_chance(self) -> bool:
        if self._dynamic and self.factor / 2 >= SMALLEST_FACTOR:
            return False
        return self._bad >= self._patience

    def _history(self) -> str:
        if not self._patience and not self._dynamic:
            return ""
        scaled = f" with the loss scaled by {self.factor:g}" if self.expects_overflows else ""
        return f"{scaled}{', after' if scaled else ' after'} {self._bad} skipped steps in a row"


@dataclass(frozen=True)
class GradientCorrection:
    """The correction of gradients before a step.

    Gradients are divided by ``scale``, then clipped to the norm ``clip_norm`` as torch.nn.utils does (0: no clipping),
    and then each element is bounded by ``clip_value`` (0: no bound). ``norm`` is the global gradient norm after the
    division.
    """

    norm: Tensor
    clip_norm: float
    scale: float = 1.0
    clip_value: float = 0.0

    @property
    def coefficient(self) -> Tensor | None:
        """The factor by which gradients are multiplied, on the device of ``norm``; None if it is 1."""
        if self.clip_norm > 0:
            return torch.clamp(self.clip_norm / (self.norm + 1e-6), max=1.0) / self.scale
        return torch.full_like(self.norm, 1 / self.scale) if self.scale != 1 else None

    @property
    def of_bucket(self) -> Correction:
        """The same correction in the form that buckets use."""
        return Correction(self.coefficient, self.clip_value)

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Correct the gradients of ``parameters``."""
        given = [parameter for parameter in parameters if parameter.grad is not None]
        coefficient = self.coefficient
        if self.scale == 1 and self.clip_norm > 0:
            # Multi-tensor kernels.
            torch.nn.utils.clip_grads_with_norm_(given, self.clip_norm, self.norm)
        elif coefficient is not None:
            for gradients in by_kind([p.grad for p in given if p.grad is not None]):
                multiply_each(gradients, coefficient)
        if given and self.clip_value:
            torch.nn.utils.clip_grad_value_(given, self.clip_value)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all ``gradients``, on their device. Squares are summed in fp32 at least, because squares in
    fp16 overflow, and those in bf16 have only two digits. For other types the norm is bit-identical to
    torch.nn.utils.get_total_norm."""
    if all(gradient.dtype.itemsize >= 4 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    found: dict[int, Tensor] = {}
    for alike in by_kind(gradients):
        wide = torch.promote_types(alike[0].dtype, torch.float32)
        found |= zip(map(id, alike), norm_of_each(alike, 2, dtype=wide))
    # In the order of the gradients: norms that replace offloaded gradients have one type.
    norms = [found[id(gradient)] for gradient in gradients]
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.linalg.vector_norm(torch.stack([norm.to(widest) for norm in norms]))


def by_kind(tensors: Iterable[T]) -> list[list[T]]:
    """Return the tensors grouped by type and device, as multi-tensor kernels require."""
    found: dict[object, list[T]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [*found.values()]


def numbers(*tensors: Tensor) -> list[float]:
    """Return the values of one-element ``tensors``, with a single synchronization for each device."""
    if len({tensor.device for tensor in tensors}) == 1:
        found: list[float] = torch.stack([tensor.double() for tensor in tensors]).tolist()
        return found
    values: dict[int, float] = {}
    for alike in by_kind(tensors):
        values |= zip(map(id, alike), torch.stack(alike).tolist())
    return [values[id(tensor)] for tensor in tensors]
