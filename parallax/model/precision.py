"""Number formats: the type of the parameters, and the type that matrix products are computed in."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from parallax.errors import check_choice

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES_PLANNED = ("bf16", "fp16", "tf32")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """``parameters``: type of weights, gradients and optimizer states. ``compute``: type that autocast uses for
    matrix products; equal to ``parameters`` means no autocast."""

    name: str = "native"
    parameters: str = "fp32"
    compute: str = "fp32"

    def __post_init__(self) -> None:
        check_choice("precision.parameters", self.parameters, ["fp32", "fp64"])
        check_choice("precision.compute", self.compute, [self.parameters, "bf16"])

    @property
    def parameter_dtype(self) -> torch.dtype:
        """torch's name for ``parameters``."""
        return DTYPES[self.parameters]

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """The context in which blocks and the loss run forward."""
        if self.compute == self.parameters:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=DTYPES[self.compute])

    def __str__(self) -> str:
        return self.parameters if self.compute == self.parameters else f"{self.parameters}+{self.compute} autocast"


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Formats to plan for, not to train in. ``recipe``: bf16 or fp16 is mixed precision with parameters and gradients
    of two bytes and full-precision copies in the optimizer; tf32 is fp32 with shorter factors of matrix products
    (:mod:`parallax.plan.recipe`)."""

    name: str = "recipe"
    recipe: str = "bf16"

    def __post_init__(self) -> None:
        check_choice("precision.recipe", self.recipe, RECIPES_PLANNED)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """torch's name for the type of parameters."""
        return DTYPES.get(self.recipe, torch.float32)

    @property
    def compute(self) -> str:
        """Type of matrix products."""
        return self.recipe

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """Parameters have the type of matrix products already."""
        return contextlib.nullcontext(device_type)

    def __str__(self) -> str:
        return self.recipe


AnyPrecision = PrecisionConfig | RecipeConfig
