"""Learning-rate schedules against torch's schedulers, in steps and epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from parallax.config import compose
from parallax.errors import ConfigError
from parallax.runtime.optim.schedule import ScheduleConfig, curve
from parallax.runtime.optim.schedules.constant import ConstantSchedule
from parallax.runtime.optim.schedules.cosine import CosineSchedule
from parallax.runtime.optim.schedules.custom import CustomSchedule
from parallax.runtime.optim.schedules.exponential import ExponentialSchedule
from parallax.runtime.optim.schedules.inverse_sqrt import InverseSqrtSchedule
from parallax.runtime.optim.schedules.linear import LinearSchedule
from parallax.runtime.optim.schedules.one_cycle import OneCycleSchedule
from parallax.runtime.optim.schedules.polynomial import PolynomialSchedule
from parallax.runtime.optim.schedules.step import StepSchedule
from parallax.runtime.optim.schedules.wsd import WSDSchedule

STEPS = 40
Make = Callable[[torch.optim.Optimizer], Any]
PEERS: dict[str, tuple[ScheduleConfig, Make]] = {
    "constant": (ConstantSchedule(), lambda o: torch_schedules.ConstantLR(o, factor=1.0)),
    "linear": (
        LinearSchedule(final=0.2),
        lambda o: torch_schedules.LinearLR(o, 1.0, 0.2, total_iters=STEPS),
    ),
    "cosine": (
        CosineSchedule(final=0.1, warmup=0),
        lambda o: torch_schedules.CosineAnnealingLR(o, STEPS, eta_min=0.1),
    ),
    "restarts": (
        CosineSchedule(final=0.1, warmup=0, restarts=3),
        lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, STEPS // 4, eta_min=0.1),
    ),
    "step": (StepSchedule(every=7, gamma=0.3), lambda o: torch_schedules.StepLR(o, 7, 0.3)),
    "milestones": (
        StepSchedule(milestones=[5, 20], gamma=0.3),
        lambda o: torch_schedules.MultiStepLR(o, [5, 20], 0.3),
    ),
    "exponential": (
        ExponentialSchedule(gamma=0.9),
        lambda o: torch_schedules.ExponentialLR(o, 0.9),
    ),
    "polynomial": (
        PolynomialSchedule(power=3.0),
        lambda o: torch_schedules.PolynomialLR(o, STEPS, power=3.0),
    ),
    "one_cycle": (
        OneCycleSchedule(),
        lambda o: torch_schedules.OneCycleLR(o, 1.0, total_steps=STEPS, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_factors_are_those_of_torch(name: str) -> None:
    schedule, make = PEERS[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = make(optimizer)
    for step in range(STEPS):
        assert schedule.factor(step, STEPS) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-9)
        scheduler.step()


def test_warm_up_rises_to_the_full_rate_and_shifts_the_schedule() -> None:
    schedule = CosineSchedule(warmup=4, final=0.0)
    assert [schedule.factor(step, 12) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert schedule.factor(8, 12) == pytest.approx(0.5)
    assert schedule.factor(12, 12) == pytest.approx(0.0)


def test_inverse_square_root_is_that_of_transformers() -> None:
    """Vaswani et al. 2017, equation 3, relative to its peak."""
    schedule = InverseSqrtSchedule(warmup=100)
    for step in (100, 400, 2500):
        assert schedule.factor(step, 10**6) == pytest.approx(math.sqrt(100 / step))


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_the_rate_is_stable_until_its_decay(shape: str) -> None:
    schedule = WSDSchedule(decay=0.25, shape=shape, warmup=10, final=0.1)
    assert {schedule.factor(step, 100) for step in range(10, 76)} == {1.0}
    decay = [schedule.factor(step, 100) for step in range(75, 101)]
    assert decay == sorted(decay, reverse=True)
    assert decay[-1] == pytest.approx(0.1)


def test_epochs_have_one_rate_each() -> None:
    schedule = StepSchedule(every=2, unit="epochs", epoch_steps=3)
    factors = [schedule.factor(step, 12) for step in range(12)]
    assert factors == pytest.approx([1.0] * 6 + [0.1] * 6)
    with pytest.raises(ConfigError, match="the run ends within these epochs, of 3 steps each"):
        CosineSchedule(unit="epochs", epoch_steps=3, warmup=2).factor(0, 6)
    with pytest.raises(ConfigError, match=r"schedule\.epoch_steps=N"):
        CosineSchedule(unit="epochs").factor(0, 6)


def halved(position: int, length: int, *, base: float) -> float:
    return base ** (2 * position // length)


def test_a_function_of_ones_own() -> None:
    schedule = CustomSchedule(target=f"{__name__}:halved", kwargs={"base": 0.5})
    assert [schedule.factor(step, 4) for step in range(4)] == [1.0, 1.0, 0.5, 0.5]
    below = CustomSchedule(target="operator:sub")
    with pytest.raises(ConfigError, match="it returned -4 at 0 of 4; accepted is the factor"):
        below.factor(0, 4)


def test_curve_shows_the_shape() -> None:
    assert curve(ConstantSchedule(), 5) == "█████"
    assert curve(LinearSchedule(), 9) == "██▇▆▅▄▃▂▁"
    rising = curve(CosineSchedule(warmup=20, final=0.0), 40, width=40)
    assert rising.index("█") == pytest.approx(18, abs=3)
    assert rising[-1] in " ▁"


def test_options_compose() -> None:
    config = compose(["schedule=wsd", "schedule.warmup=7", "schedule.decay=0.5"]).schedule
    assert config == WSDSchedule(warmup=7, decay=0.5)
