"""Number formats: of the parameters, of matrix products, of what travels between stages, and of the optimizer.

Half the bits are twice the speed and half the bytes, but two things are lost on the way: a weight in two bytes does not
feel a small step, and in fp16 small gradients become zero. So a step is taken on copies of full precision, and the
loss is multiplied by a number that keeps gradients in range (Micikevicius et al. 2018, "Mixed Precision Training",
sections 3.1 and 3.2).

====================  ===========  ==================================================================
``parameters``        ``compute``  what it is
====================  ===========  ==================================================================
fp32                  fp32         single precision throughout
fp32                  tf32         the same, factors of matrix products shortened to 19 bits on a GPU
fp32                  bf16, fp16   autocast: full-precision weights, cast for each matrix product
bf16, fp16            the same     mixed precision: copies of full precision, with the optimizer only
fp64                  fp64         double precision, to compare plans without rounding noise
====================  ===========  ==================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from parallax.errors import ConfigError, check_choice

AS_IT_IS = contextlib.nullcontext()  # one for all, for forwards whose own cost counts
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
COMPUTED_IN = {
    "fp32": ("fp32", "tf32", "bf16", "fp16"),
    "fp64": ("fp64",),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
}
_SHORT = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """``parameters``: type of weights and gradients; those of two bytes have copies in fp32 with the optimizer, which
    are what is stepped, and its states are in fp32 too. ``compute``: type of matrix products.

    ``loss_scale``: the factor of the loss before the backward; ``auto`` adapts it in fp16
    (:class:`~parallax.runtime.optim.scaling.LossScale`), and is 1 in other types, whose range is enough.
    """

    parameters: str = "fp32"
    compute: str = "fp32"
    loss_scale: float | str = "auto"

    def __post_init__(self) -> None:
        check_choice("precision.parameters", self.parameters, COMPUTED_IN)
        check_choice("precision.compute", self.compute, COMPUTED_IN[self.parameters])
        given = self.loss_scale
        if given != "auto" and (isinstance(given, str) or not 0 < given < float("inf")):
            raise ConfigError(
                f"precision.loss_scale={given}: accepted are auto and finite numbers above 0"
            )

    @property
    def parameter_dtype(self) -> torch.dtype:
        """torch's name for ``parameters``."""
        return DTYPES[self.parameters]

    @property
    def masters(self) -> str:
        """What is stepped, and what a run may go on with in another number format: the parameters, or copies of
        them."""
        return "fp32" if self.parameters in _SHORT else self.parameters

    @property
    def boundary_dtype(self) -> torch.dtype | None:
        """The type in which floating tensors travel between stages: that of matrix products where it has two bytes;
        None: their own."""
        return DTYPES[self.compute] if self.compute in _SHORT else None

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """The context in which blocks and the loss run forward."""
        if self.compute in (self.parameters, "tf32"):
            return AS_IT_IS
        return torch.autocast(device_type, dtype=DTYPES[self.compute])

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """The context in which matrix products run, forward and backward. tf32 is a setting of the process, which is
        put back; on a CPU without such products it changes nothing. Others leave torch's settings as they are."""
        if self.compute != "tf32":
            yield
            return
        convolutions = torch.backends.cudnn
        before = torch.get_float32_matmul_precision(), convolutions.allow_tf32
        torch.set_float32_matmul_precision("high")
        convolutions.allow_tf32 = True
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            convolutions.allow_tf32 = before[1]

    def __str__(self) -> str:
        """The name of its recipe (:data:`parallax.plan.analytic.recipe.RECIPES`)."""
        if self.compute in (self.parameters, "tf32"):
            return self.compute
        return f"{self.parameters}+{self.compute} autocast"
