"""Growing memory is distinguished from noise, from memory filled once, and from caches that level off."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from parallax.train.health.growth import WINDOW, GrowthDetector, line

MIB = 2**20
Curve = Callable[[int, random.Random], float]


def detected(curve: Curve, steps: int, free: float = math.inf) -> tuple[int, float]:
    """The step at which a curve is found to rise, and by how much; 0 where it never is."""
    detector, chance = GrowthDetector(), random.Random(1)
    for step in range(1, steps + 1):
        if found := detector.add(step, curve(step, chance), lambda: free):
            return step, found
    return 0, 0.0


def leak(rate: float, noise: float = 0.0, begins: int = 0) -> Curve:
    return lambda step, chance: 1000 * MIB + rate * max(0, step - begins) + chance.gauss(0, noise)


@pytest.mark.parametrize(
    ("curve", "rate", "latest"),
    [
        (leak(1 * MIB), MIB, 150),
        (leak(1 * MIB, noise=3 * MIB), MIB, 200),
        (leak(200 * 1024, noise=300 * 1024), 200 * 1024, 200),
        (leak(5 * MIB, begins=300), 5 * MIB, 300 + 200),
        # In steps of an allocator's arenas.
        (lambda step, chance: 1000 * MIB + step // 5 * 8 * MIB, 8 / 5 * MIB, 200),
        # With a peak every now and then, when something is evaluated.
        (lambda step, chance: step * MIB + (500 * MIB if step % 7 == 0 else 0), MIB, 200),
        # So slow that a window of single steps shows nothing.
        (leak(5 * 1024, noise=100 * 1024), 5 * 1024, 3500),
    ],
    ids=["plain", "noisy", "small", "late", "stairs", "peaks", "slow"],
)
def test_a_leak_is_found(curve: Curve, rate: float, latest: int) -> None:
    step, found = detected(curve, latest)
    assert 3 * WINDOW <= step <= latest
    assert found == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize(
    "curve",
    [
        lambda step, chance: 1000 * MIB,
        leak(0, noise=20 * MIB),
        lambda step, chance: 1000 * MIB + min(step, 40) * 10 * MIB,  # filled, and full
        lambda step, chance: 1000 * MIB + 500 * MIB * (1 - math.exp(-step / 30)),
        lambda step, chance: 1000 * MIB + 500 * MIB * (1 - math.exp(-step / 100)),
        lambda step, chance: 1000 * MIB + 300 * MIB * math.log(step + 1),
        lambda step, chance: 1000 * MIB + (200 * MIB if step > 300 else 0),  # another batch size
        lambda step, chance: 1000 * MIB + 100 * MIB * math.sin(step / 15),
        lambda step, chance: 1000 * MIB + (step % 60) * 3 * MIB,  # collected now and then
        lambda step, chance: 1000 * MIB - step * MIB / 4,
    ],
    ids=[
        "flat",
        "noise",
        "fills",
        "cache",
        "larger cache",
        "log",
        "jump",
        "wave",
        "collected",
        "falls",
    ],
)
def test_what_levels_off_is_no_leak(curve: Curve) -> None:
    assert detected(curve, 4000) == (0, 0.0)


def test_growth_that_fills_the_memory_soon_is_reported_sooner() -> None:
    slow, _ = detected(leak(MIB), 200)
    soon, _ = detected(leak(MIB), 200, free=300 * MIB)
    assert soon == 4 * WINDOW < slow


def test_a_line_is_not_moved_by_outliers() -> None:
    points = [(step, 7.0 * step + (1e9 if step % 5 == 0 else 0)) for step in range(30)]
    assert line(points).slope == pytest.approx(7.0)
