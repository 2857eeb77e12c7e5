"""Check the dtypes and values of tensors in files, and convert them to those of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallax.errors import CheckpointError, printable

_OF_EIGHT_BITS = {
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16} | _OF_EIGHT_BITS
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.bool}
_WHOLE |= {torch.uint64, torch.uint32, torch.uint16, torch.uint8}
_ACCEPTED = {
    "float": "float64, float32, float16, bfloat16 and float8",
    "whole": "whole numbers and bool",
    "complex": "complex numbers",
}


def is_of_eight_bits(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is one of the float8 dtypes."""
    return dtype in _OF_EIGHT_BITS


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which a tensor of ``dtype`` in a file is converted when it is read: float32 for float8, for
    which torch has few operators; other dtypes are unchanged."""
    return torch.float32 if is_of_eight_bits(dtype) else dtype


def check_kind(name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """Raise :class:`CheckpointError` if a tensor in a file cannot be converted to the dtype that it has in the model.

    ``found`` is the dtype in the file, and ``wanted`` that in the model. Both must be floating-point, both complex, or
    both integer. A packed dtype in a file cannot be converted. ``name``: the tensor's name, for the message.
    """
    if _kind(found) != (kind := _kind(wanted)):
        raise CheckpointError(
            f"{printable(name)} is in {found}, but in the model it is in {wanted}: accepted are "
            f"{_ACCEPTED.get(kind, kind)}"
        )


def as_dtype(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` converted to ``dtype``. Raises :class:`CheckpointError` if a number is too large for ``dtype``.

    Both dtypes are of the same kind: floating-point, complex or integer.
    """
    if value.dtype is dtype:
        return value
    found = value.to(dtype)
    if _kind(dtype) == "whole":
        fits = torch.equal(found.to(value.dtype), value)
    else:
        largest = torch.tensor(_extremes(value), dtype=torch.float64)
        fits = not bool(
            (largest.isfinite() & ~largest.to(read_dtype(_real_dtype(dtype))).isfinite()).any()
        )
    if not fits:
        more = ": use precision=fp64" if dtype is torch.float32 else ""
        raise CheckpointError(
            f"{printable(name)} holds numbers that are too large for {dtype}{more}"
        )
    return found


def nonfinite_kind(tensor: Tensor) -> str:
    """Return "nan" if ``tensor`` contains NaN, else "inf" if it contains Inf, else ""."""
    ends = _extremes(tensor)
    if all(map(math.isfinite, ends)):
        return ""
    return "nan" if math.isnan(ends[0]) else "inf"


def nonfinite_text(tensor: Tensor) -> str:
    """Return a phrase with the number of NaN and infinite values in ``tensor``, to append to a message."""
    count = int((~torch.isfinite(tensor.detach().to(read_dtype(tensor.dtype)))).sum())
    return f"holds {count} number(s) that are NaN or infinite, of {tensor.numel()}"


def check_finite(name: str, tensor: Tensor, *, frozen: bool = False) -> None:
    """Raise :class:`CheckpointError` if ``tensor`` contains NaN or Inf.

    A ``frozen`` tensor may contain Inf, as masks do.
    """
    what = nonfinite_kind(tensor)
    if what == "nan" or (what and not frozen):
        raise CheckpointError(
            f"{printable(name)} {nonfinite_text(tensor)}, which a checkpoint may not hold: give finite numbers"
        )


def _extremes(tensor: Tensor) -> list[float]:
    """Return the smallest and the largest value; twice NaN if any value is NaN; an empty list for integers.

    The tensor is not copied, and this takes a twentieth of the time of isfinite.
    """
    values = tensor.detach()
    if _kind(values.dtype) not in ("float", "complex") or not values.numel():
        return []
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return [float(each) for each in torch.aminmax(values.to(read_dtype(values.dtype)))]


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real and the imaginary part of a complex dtype. Other dtypes are unchanged."""
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype in _FLOATS else "whole" if dtype in _WHOLE else str(dtype)
