"""Loss scaling: keeps the gradients of a step in the range of fp16, and says which steps may be taken.

The smallest gradients of a model are below 6e-8, where fp16 has only zero, and the largest far from 65504, where it
ends. So the loss is multiplied by a factor, which multiplies every gradient, and the optimizer divides again before it
clips and steps. The best factor is the largest that nothing overflows with, and it is found by trying: doubled after
many good steps, halved after an overflow, whose step is skipped (Micikevicius et al. 2018, section 3.2). Factors are
powers of two, so multiplying and dividing loses nothing.

An overflow anywhere makes the norm over all gradients infinite or NaN. That norm is agreed on by all ranks for
clipping anyway, so all skip the same steps and have the same factor, without a word more between them.

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

FIRST_FACTOR = 2.0**16
GROWTH_STEPS = 2000  # good ones in a row, before the factor doubles
T = TypeVar("T", bound=Tensor)
SMALLEST_FACTOR = 1.0  # where even this overflows, the loss does
PATIENCE = 16  # overflows in a row that a fixed factor may have: as many as lead from the first to the smallest


class LossScale:
    """The factor of the loss under ``precision``: fixed at a number given, dynamic in fp16, otherwise one, with which
    every overflow is an error unless up to ``skips`` steps in a row may be skipped, whatever the factor."""

    def __init__(self, precision: PrecisionConfig, skips: int = 0) -> None:
        given = precision.loss_scale
        self._dynamic = given == "auto" and precision.compute == "fp16"
        self._limit = skips
        self._patience = skips or (0 if given == "auto" else PATIENCE)
        self.expects_overflows = self._dynamic or given != "auto"
        self.factor = FIRST_FACTOR if self._dynamic else 1.0 if isinstance(given, str) else given
        self.skipped = 0  # steps so far
        self._good = self._bad = 0  # steps in a row

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether a step with this loss and this norm of all gradients, both without the factor, may be taken; where
        not, gradients are to be dropped. Called once a step, by every rank with the same numbers. Raises
        :class:`NonFiniteError` where skipping leads nowhere."""
        if norm < float("inf") and abs(loss) < float("inf"):
            self._good, self._bad = self._good + 1, 0
            if self._dynamic and self._good >= GROWTH_STEPS:
                self._good, self.factor = 0, 2 * self.factor
            return True
        if self._is_last_chance():
            raise NonFiniteError(
                f"loss {loss}, gradient norm {norm}{self._history()}; nothing was updated: lower optimizer.lr, or "
                "raise optimizer.warmup_steps"
            )
        self._good, self._bad, self.skipped = 0, self._bad + 1, self.skipped + 1
        if self._dynamic:
            self.factor = max(SMALLEST_FACTOR, self.factor / 2)
        return False

    @property
    def skips(self) -> bool:
        """Whether there are steps that it does not accept and does not end the run for."""
        return self._dynamic or self._patience > 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON has it."""
        return {
            "dynamic": self._dynamic,
            "factor": self.factor,
            "good_steps": self._good,
            "bad_steps": self._bad,
            "skipped": self.skipped,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`; a factor that is fixed stays what it is now, and one that was fixed, in another
        number format, is nothing to begin with."""
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
    """What gradients that are ``scale`` times too large are multiplied by before a step: their global ``norm``, without
    the scale, becomes ``clip_norm`` where it is above that (0: whatever it is), as in torch.nn.utils."""

    norm: Tensor
    clip_norm: float
    scale: float = 1.0

    @property
    def coefficient(self) -> Tensor | None:
        """The factor, on the device of the norm; None is one."""
        if self.clip_norm > 0:
            return torch.clamp(self.clip_norm / (self.norm + 1e-6), max=1.0) / self.scale
        return torch.full_like(self.norm, 1 / self.scale) if self.scale != 1 else None

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply the gradients of ``parameters``."""
        given = [parameter for parameter in parameters if parameter.grad is not None]
        coefficient = self.coefficient
        if self.scale == 1 and self.clip_norm > 0:
            # A few kernels for all of them.
            torch.nn.utils.clip_grads_with_norm_(given, self.clip_norm, self.norm)
        elif coefficient is not None:
            for gradients in by_kind([p.grad for p in given if p.grad is not None]):
                multiply_each(gradients, coefficient)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all ``gradients``, where they are, summed in fp32 at least: squares of fp16 overflow, norms in bf16
    have two digits. For other types it is torch.nn.utils.get_total_norm, to the last bit."""
    if all(gradient.dtype.itemsize >= 4 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    found: dict[int, Tensor] = {}
    for alike in by_kind(gradients):
        wide = torch.promote_types(alike[0].dtype, torch.float32)
        found |= zip(map(id, alike), norm_of_each(alike, 2, dtype=wide))
    # In their order: the norms of gradients that are elsewhere, which stand for these, have one type.
    norms = [found[id(gradient)] for gradient in gradients]
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.linalg.vector_norm(torch.stack([norm.to(widest) for norm in norms]))


def by_kind(tensors: Iterable[T]) -> list[list[T]]:
    """Those of one type and device together: kernels for many tensors take such."""
    found: dict[object, list[T]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [*found.values()]


def numbers(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Two tensors of one number each, read together: of a device, each reading is a wait."""
    if one.device != other.device:
        return one.item(), other.item()
    found: list[float] = torch.stack([one.double(), other.double()]).tolist()
    return found[0], found[1]
