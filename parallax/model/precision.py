"""Number formats of parameters, matrix products, boundary tensors and the optimizer.

Half the bits double the speed and halve the bytes. But a two-byte weight is too coarse for small updates, and small
fp16 gradients underflow to zero. So updates are made on full-precision master copies, and the loss is scaled to keep
gradients in range (Micikevicius et al. 2018, "Mixed Precision Training", sections 3.1 and 3.2).

====================  ===========  ==================================================================
``parameters``        ``compute``  meaning
====================  ===========  ==================================================================
fp32                  fp32         single precision throughout
fp32                  tf32         single precision, but matrix products on a GPU use 19 bits of each factor
fp32                  bf16, fp16   autocast: full-precision weights, cast for each matrix product
bf16, fp16            the same     mixed precision: full-precision master copies in the optimizer only
fp64                  fp64         double precision, to compare plans without rounding noise
====================  ===========  ==================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from parallax.errors import ConfigError, check_choice

AS_IT_IS = contextlib.nullcontext()  # shared, because creating one per forward would cost time
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
    """Number formats of a run.

    ``parameters``: dtype of weights and gradients. Two-byte parameters have fp32 master copies, which the optimizer
    updates; optimizer states are fp32 too. ``compute``: dtype of matrix products.

    ``loss_scale``: the factor of the loss before the backward; ``auto`` adapts it in fp16
    (:class:`~parallax.runtime.optim.scaling.LossScale`), and is 1 in other dtypes, whose range is sufficient.
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
    def scales(self) -> bool:
        """Whether the loss is multiplied by a factor before the backward."""
        return self.loss_scale != "auto" or self.compute == "fp16"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """``parameters`` as a torch dtype."""
        return DTYPES[self.parameters]

    @property
    def masters(self) -> str:
        """The name of the dtype in which the optimizer updates weights: that of the master copies or, without them, of
        the parameters. A run can resume in any number format in which this dtype is the same."""
        return "fp32" if self.parameters in _SHORT else self.parameters

    @property
    def boundary_dtype(self) -> torch.dtype | None:
        """The dtype in which stages exchange floating-point tensors: the dtype of matrix products if that has two
        bytes, otherwise None, which means each tensor's own dtype."""
        return DTYPES[self.compute] if self.compute in _SHORT else None

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context in which blocks and loss run forward on a device of the type ``device_type``."""
        if self.compute in (self.parameters, "tf32"):
            return AS_IT_IS
        return torch.autocast(device_type, dtype=DTYPES[self.compute])

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """A context in which forward and backward run, so that matrix products have the configured precision.

        For tf32 the context sets torch's process-wide precision, and restores it on exit. On a CPU without tf32 this
        has no effect. For all other formats the context is a no-op.
        """
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
        """Return this precision's name among the planner's recipes (:data:`parallax.plan.analytic.recipe.RECIPES`)."""
        if self.compute in (self.parameters, "tf32"):
            return self.compute
        return f"{self.parameters}+{self.compute} autocast"
