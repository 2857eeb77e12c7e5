"""Sizes that differ between runs, as expressions of the sizes of tensors that are at hand.

The runs say what a size was for several numbers of rows and lengths. An expression is right when it gives that size
in every run: a tensor's size, times or plus a constant, the product of two, a whole part or a remainder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

Sizes = tuple[int, ...]
"""A size in each of the runs."""

_DIVISORS = range(2, 65)


def expression(values: tuple[Any, ...], known: Mapping[Sizes, str]) -> str | None:
    """Python that computes ``values`` from ``known`` sizes and what each is called; None where there is none."""
    known = {size: name for size, name in known.items() if len(set(size)) > 1}
    products = {
        tuple(a * b for a, b in zip(first, second)): f"{known[first]} * {known[second]}"
        for first, second in itertools.combinations_with_replacement(known, 2)
    }
    for sizes in (known, products):
        for size, name in sizes.items():
            for text in _forms(values, size, name):
                return text
    return None


def _forms(values: tuple[Any, ...], size: Sizes, name: str) -> Iterator[str]:
    """``values`` as a function of one size, the plainest first."""
    if values == size and all(type(value) is int for value in values):
        yield name
        return
    if any(type(value) is float for value in values):
        yield from _float_forms(values, size, name)
        return
    if len({value - part for value, part in zip(values, size)}) == 1:
        yield f"{name} + {values[0] - size[0]}"
    if 0 not in size and len({Fraction(value, part) for value, part in zip(values, size)}) == 1:
        ratio = Fraction(values[0], size[0])
        yield f"{name} * {ratio.numerator} // {ratio.denominator}"
    yield from _line(values, size, name)
    for divisor in _DIVISORS:
        if all(value == part // divisor for value, part in zip(values, size)):
            yield f"{name} // {divisor}"
        if all(value == -(-part // divisor) for value, part in zip(values, size)):
            yield f"-(-({name}) // {divisor})"
        if all(value == part % divisor for value, part in zip(values, size)):
            yield f"{name} % {divisor}"
        if all(value == -part % divisor for value, part in zip(values, size)):
            yield f"-({name}) % {divisor}"


def _line(values: tuple[int, ...], size: Sizes, name: str) -> Iterator[str]:
    """a x + b, which three runs at least agree on."""
    points = sorted(set(zip(size, values)))
    if len(points) < 3 or len({x for x, _ in points}) < len(points):
        return
    slope = Fraction(points[1][1] - points[0][1], points[1][0] - points[0][0])
    start = points[0][1] - slope * points[0][0]
    if slope.denominator == start.denominator == 1 and all(
        y == slope * x + start for x, y in points
    ):
        yield f"({name}) * {slope} + {start}"


def _float_forms(values: tuple[Any, ...], size: Sizes, name: str) -> Iterator[str]:
    for text, power in ((name, 1.0), (f"({name}) ** 0.5", 0.5)):
        factors = [value / part**power for value, part in zip(values, size) if part]
        if len(factors) == len(values) and _equal(factors):
            yield f"{factors[0]!r} * {text}"
        products = [value * part**power for value, part in zip(values, size)]
        if _equal(products):
            yield f"{products[0]!r} / ({text})"


def _equal(numbers: list[float]) -> bool:
    return max(numbers) - min(numbers) <= 1e-12 * max(map(abs, numbers))
