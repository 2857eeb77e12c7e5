"""Bytes of a parameter and of an activation in mixed or full precision.

There are two kinds of mixed precision. Megatron's (Narayanan et al. 2021; Micikevicius et al. 2018) keeps parameters
and gradients in two bytes and a full-precision copy with the optimizer. Torch autocast keeps parameters and gradients
in full precision and casts each weight once per micro-batch. Each precision has a name, such as ``bf16``, and a recipe
with its bytes. ``parallax/model/precision.py`` trains by the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import check_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Bytes of one element of each kind of tensor under a recipe for precision. The optimizer is AdamW.

    ``dtype``      type of the matrix products
    ``compute``    bytes of an element of ``dtype``
    ``residual``   bytes of an element of the residual stream, which autocast keeps in full precision because norms
                   return it
    ``weight``     bytes of a parameter
    ``gradient``   bytes of a gradient
    ``master``     bytes of the full-precision copy in the optimizer; 0 if the parameter is in full precision
    ``optimizer``  bytes of the optimizer's two moments
    ``cast``       bytes of the copy in ``dtype`` that autocast keeps of a weight between forward and backward
    """

    dtype: str
    compute: int
    residual: int
    weight: int
    gradient: int
    master: int
    optimizer: int
    cast: int = 0


def _full(dtype: str, size: int) -> BytesPerParameter:
    return BytesPerParameter(
        dtype=dtype,
        compute=size,
        residual=size,
        weight=size,
        gradient=size,
        master=0,
        optimizer=2 * size,
    )


def _mixed(dtype: str) -> BytesPerParameter:
    return BytesPerParameter(
        dtype=dtype, compute=2, residual=2, weight=2, gradient=2, master=4, optimizer=8
    )


def _cast(dtype: str) -> BytesPerParameter:
    return BytesPerParameter(
        dtype=dtype, compute=2, residual=4, weight=4, gradient=4, master=0, optimizer=8, cast=2
    )


AUTOCAST = "fp32+bf16 autocast"

RECIPES: dict[str, BytesPerParameter] = {
    "fp32": _full("fp32", 4),
    "tf32": _full("tf32", 4),
    "fp64": _full("fp64", 8),
    "fp16": _mixed("fp16"),
    "bf16": _mixed("bf16"),
    AUTOCAST: _cast("bf16"),
    "fp32+fp16 autocast": _cast("fp16"),
}
"""The recipes by name. fp16 and bf16 alone are mixed precision as in Megatron."""


def recipe(precision: str) -> BytesPerParameter:
    """Return the recipe called ``precision``. Raises :class:`~parallax.errors.ConfigError` for an unknown name."""
    check_choice("precision", precision, RECIPES)
    return RECIPES[precision]
