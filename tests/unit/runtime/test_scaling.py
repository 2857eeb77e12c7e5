"""The loss scale's decisions, and that scaling by powers of two changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import NonFiniteError
from parallax.model.precision import PrecisionConfig
from parallax.runtime.optim.scaling import (
    FIRST_FACTOR,
    GROWTH_STEPS,
    PATIENCE,
    GradientCorrection,
    LossScale,
    gradient_norm,
)

FP16 = PrecisionConfig(compute="fp16")
INFINITE, NAN = float("inf"), float("nan")


def test_an_overflow_halves_the_factor_and_many_good_steps_double_it() -> None:
    scale = LossScale(FP16)
    assert scale.factor == FIRST_FACTOR
    assert not scale.accepts(1.0, INFINITE)
    assert not scale.accepts(1.0, NAN)
    assert (scale.factor, scale.skipped) == (FIRST_FACTOR / 4, 2)
    assert all(scale.accepts(1.0, 2.0) for _ in range(GROWTH_STEPS - 1))
    assert scale.factor == FIRST_FACTOR / 4
    assert scale.accepts(1.0, 2.0)
    assert scale.factor == FIRST_FACTOR / 2
    assert not scale.accepts(NAN, 1.0), "the loss may overflow too"
    assert all(scale.accepts(1.0, 2.0) for _ in range(GROWTH_STEPS - 1))
    assert (scale.factor, scale.skipped) == (FIRST_FACTOR / 4, 3), (
        "the count of good steps restarts after a bad one"
    )


def test_where_even_the_smallest_factor_overflows_training_ends() -> None:
    scale = LossScale(FP16)
    while scale.factor > 1:
        assert not scale.accepts(1.0, INFINITE)
    before = scale.state()
    with pytest.raises(
        NonFiniteError, match=r"scaled by 1, after 16 skipped steps in a row; nothing was updated"
    ):
        scale.accepts(1.0, INFINITE)
    assert scale.state() == before
    assert scale.accepts(1.0, 1.0)


def test_without_scaling_an_overflow_is_an_error() -> None:
    for precision in (
        PrecisionConfig(),
        PrecisionConfig(compute="bf16"),
        PrecisionConfig(compute="tf32"),
    ):
        scale = LossScale(precision)
        assert scale.factor == 1.0
        assert scale.accepts(1.0, 2.0)
        with pytest.raises(
            NonFiniteError, match=r"loss 1.0, gradient norm nan; nothing was updated"
        ):
            scale.accepts(1.0, NAN)


def test_a_number_stays_and_has_patience() -> None:
    scale = LossScale(PrecisionConfig(compute="fp16", loss_scale=512.0))
    for _ in range(2):
        assert not any(scale.accepts(1.0, INFINITE) for _ in range(PATIENCE))
        assert scale.accepts(1.0, 1.0)
    assert (scale.factor, scale.skipped) == (512.0, 2 * PATIENCE)
    assert not any(scale.accepts(1.0, INFINITE) for _ in range(PATIENCE))
    with pytest.raises(NonFiniteError):
        scale.accepts(1.0, INFINITE)


def test_it_continues_from_its_state() -> None:
    one, other = LossScale(FP16), LossScale(FP16)
    one.accepts(1.0, INFINITE)
    for _ in range(GROWTH_STEPS - 1):
        one.accepts(1.0, 1.0)
    other.load_state(one.state())
    for scale in (one, other):
        assert scale.accepts(1.0, 1.0)
        assert (scale.factor, scale.skipped) == (FIRST_FACTOR, 1)
    fixed = LossScale(PrecisionConfig(compute="fp16", loss_scale=8.0))
    fixed.load_state(one.state())
    assert (fixed.factor, fixed.skipped) == (8.0, 1)
    other.load_state({})  # of a run in a precision that had none
    assert (other.factor, other.skipped) == (FIRST_FACTOR, 0)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_corrected_gradients_are_those_that_torch_clips(clip: float, scale: float) -> None:
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape)) for shape in ((7, 30), (5,), ())]
    mine = [nn.Parameter(parameter.detach().clone()) for parameter in plain]
    for one, other in zip(plain, mine):
        one.grad = torch.randn_like(one)
        other.grad = one.grad * scale
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain if p.grad is not None])
    found = gradient_norm([p.grad for p in mine if p.grad is not None]) / scale
    assert torch.equal(found, norm)
    GradientCorrection(norm, clip, scale).apply(mine)
    if clip:
        torch.nn.utils.clip_grads_with_norm_(plain, clip, norm)
    for one, other in zip(plain, mine):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_the_norm_of_short_gradients_is_summed_in_full_precision() -> None:
    large = torch.full((300,), 6e4, dtype=torch.float16)
    assert gradient_norm([large]) == pytest.approx(6e4 * 300**0.5, rel=1e-3)
    many = [torch.full((1000,), 1 / 3).bfloat16() for _ in range(50)]
    exact = float(torch.cat(many).double().norm())
    assert gradient_norm(many) == pytest.approx(exact, rel=1e-6)
    assert gradient_norm([*many, torch.ones(3, dtype=torch.float64)]) == pytest.approx(
        (exact**2 + 3) ** 0.5
    )
    assert gradient_norm([]) == 0.0
    full: list[Tensor] = [torch.randn(50), torch.randn(7, 7)]
    assert gradient_norm(full) == float(torch.nn.utils.get_total_norm(full))
