"""Values of trained parameters that no checkpoint keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from parallax.runtime.health.nonfinite import unfit

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    ("bad", "what"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")]
)
def test_one_bad_value_is_found(dtype: torch.dtype, bad: float, what: str) -> None:
    parameter, values = nn.Parameter(torch.zeros(3, 4).to(dtype)), torch.ones(3, 4)
    assert not unfit("weight", parameter, values.to(dtype))
    values[1, 2] = bad
    found = values.to(dtype)
    if dtype.is_complex:
        found = torch.complex(torch.ones(3, 4), values).to(dtype).mT.conj()
    assert unfit("weight", parameter, found) == f"parameter weight holds {what}"
    parameter.requires_grad_(False)
    assert not unfit("weight", parameter, found), "is not trained"


def test_what_has_no_infinity_and_what_has_no_values() -> None:
    parameter = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    bad = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    assert unfit("weight", parameter, bad) == "parameter weight holds nan"
    empty = nn.Parameter(torch.zeros(0))
    assert not unfit("weight", empty, empty)
