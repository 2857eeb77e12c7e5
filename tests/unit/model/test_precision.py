"""Number formats: what is accepted, what each means, and that the process is left as it was found."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from parallax.config import compose, dump, load
from parallax.errors import ConfigError
from parallax.model.precision import COMPUTED_IN, PrecisionConfig
from parallax.plan.analytic.recipe import RECIPES, recipe

EVERY = [
    PrecisionConfig(parameters=p, compute=c)
    for p, computed in COMPUTED_IN.items()
    for c in computed
]


@pytest.mark.parametrize("precision", EVERY, ids=str)
def test_what_runs_has_the_recipe_that_is_planned_for(precision: PrecisionConfig) -> None:
    how = recipe(str(precision))
    assert how.dtype == precision.compute
    assert how.weight == how.gradient == precision.parameter_dtype.itemsize
    assert (how.master > 0) == (precision.parameter_dtype.itemsize == 2)
    with precision.autocast("cpu"):
        out = nn.Linear(3, 3, dtype=precision.parameter_dtype)(
            torch.ones(2, 3, dtype=precision.parameter_dtype)
        )
    assert out.dtype.itemsize == how.compute
    if precision.boundary_dtype is not None:
        assert precision.boundary_dtype is out.dtype


def test_every_recipe_runs() -> None:
    assert {str(precision) for precision in EVERY} == set(RECIPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": "int8"}, "precision.parameters=int8"),
        ({"parameters": "fp64", "compute": "bf16"}, "precision.compute=bf16: accepted are fp64"),
        ({"parameters": "bf16"}, "precision.compute=fp32: accepted are bf16"),
        (
            {"loss_scale": "high"},
            "precision.loss_scale=high: accepted are auto and finite numbers above 0",
        ),
        ({"loss_scale": 0.0}, "precision.loss_scale=0"),
        ({"loss_scale": float("inf")}, "precision.loss_scale=inf"),
        ({"loss_scale": float("nan")}, "precision.loss_scale=nan"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrecisionConfig(**changes)


@pytest.mark.parametrize(
    ("name", "recipe_name", "boundary"),
    [
        ("fp32", "fp32", None),
        ("tf32", "tf32", None),
        ("fp64", "fp64", None),
        ("bf16", "fp32+bf16 autocast", torch.bfloat16),
        ("fp16", "fp32+fp16 autocast", torch.float16),
        ("mixed_bf16", "bf16", torch.bfloat16),
        ("mixed_fp16", "fp16", torch.float16),
    ],
)
def test_names(name: str, recipe_name: str, boundary: torch.dtype | None) -> None:
    config = compose([f"precision={name}", "precision.loss_scale=1024"])
    assert str(config.precision) == recipe_name
    assert config.precision.boundary_dtype is boundary
    assert config.precision.loss_scale == 1024
    assert load(dump(config)) == config
    assert compose([f"precision={name}"]).precision.loss_scale == "auto"


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_tf32_is_set_for_the_run_alone(before: str) -> None:
    convolutions, found = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        with contextlib.suppress(KeyError), PrecisionConfig(compute="tf32").products():
            assert torch.get_float32_matmul_precision() == "high"
            assert torch.backends.cuda.matmul.allow_tf32
            raise KeyError
        assert torch.get_float32_matmul_precision() == before
        with PrecisionConfig(compute="bf16").products():
            assert torch.get_float32_matmul_precision() == before
        assert torch.backends.cudnn.allow_tf32 == convolutions
    finally:
        torch.set_float32_matmul_precision(found)
