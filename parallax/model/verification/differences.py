"""Compare two computations of the same tensors, with a tolerance for rounding.

Both computations call the same kernels on the same numbers, so most results are bit-identical. A different order of
summation changes the last bits. So the tolerance of a tensor is relative to the largest number in it. Some gradients
are zero up to rounding, such as that of a bias before a norm. Their rounding noise has the size of other gradients. So
each tensor may also differ by a small fraction of the largest number in all tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FLOOR = 1e-2  # factor of the tolerance that applies to the largest number of all tensors


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerated difference of results in ``dtype``, relative to a tensor's largest number."""
    return _TOLERANCES[dtype]


def first_difference(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], part: float
) -> tuple[str, str] | None:
    """Return (name, text on the difference) of the first tensor that differs; None if all agree.

    ``expected`` and ``found``: the tensors of the two computations by name. ``part`` is the tolerance relative to the
    largest number in a tensor.
    """
    largest = max((_largest(tensor) for tensor in expected.values()), default=0.0)
    for name, tensor in expected.items():
        if name not in found:
            return name, "it is missing"
        how = _difference(tensor, found[name], part, _FLOOR * part * largest)
        if how:
            return name, how
    return None


def _difference(expected: Tensor, found: Tensor, part: float, floor: float) -> str:
    if expected.shape != found.shape:
        return f"its shape is {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        changed = int((expected != found).sum())
        return f"{changed} of {expected.numel()} values differ" if changed else ""
    a, b = _plain(expected), _plain(found)
    finite = a.isfinite() & b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((finite | same).all()):
        return "one is non-finite where the other is finite"
    apart = torch.where(finite, (a - b).abs(), 0.0)
    most = float(apart.max()) if apart.numel() else 0.0
    largest = float(torch.where(finite, a.abs(), 0.0).max()) if a.numel() else 0.0
    if most <= part * largest + floor:
        return ""
    return f"by {most:.3g} where the largest number is {largest:.3g}"


def _largest(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    plain = _plain(tensor)
    return float(torch.where(plain.isfinite(), plain.abs(), 0.0).max())


def _plain(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.double()
