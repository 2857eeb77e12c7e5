"""Every figure of a results file, with its quartiles, for the comparison of two files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.results import BadResults


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``low`` and ``high`` are quartiles, or the value itself where it was found once; ``more`` of it is better."""

    name: str
    value: float
    low: float
    high: float
    more: bool

    def worse_than(self, before: Figure) -> bool:
        """Whether this figure is worse than the other one, and their quartiles do not overlap."""
        if self.more:
            return self.value < before.value and self.high < before.low
        return self.value > before.value and self.low > before.high


def figures(found: Mapping[str, Any], path: object) -> dict[str, Figure]:
    """By name, in the order of the file. Raises :class:`BadResults` where a part is not as it should be."""
    every: dict[str, Figure] = {}
    for name, part in found["parts"].items():
        try:
            every |= {figure.name: figure for figure in _OF.get(name, _of_rows)(name, part)}
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            message = f"{type(error).__name__}: {error}"
            raise BadResults(
                f"{path}: part {name} is not as it is written here: {message}"
            ) from None
    return every


def _once(name: str, value: float, *, more: bool) -> Figure:
    return Figure(name=name, value=value, low=value, high=value, more=more)


def _turns(name: str, values: Sequence[float], *, more: bool) -> Figure:
    """The median of some turns."""
    if len(values) < 2:
        return _once(name, float(values[0]), more=more)
    low, value, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(name=name, value=value, low=low, high=high, more=more)


def _of_tests(name: str, part: Mapping[str, Any]) -> Iterator[Figure]:
    rows = part.get("rows", ())
    for outcome, more in (("passed", True), ("failed", False)):
        count = sum(row["outcome"] == outcome for row in rows)
        yield _once(f"{name}: {outcome}", float(count), more=more)
    errors = part.get("sanitizer", {}).get("errors")
    if errors is not None:
        yield _once(f"{name}: errors found by the sanitizer", float(errors), more=False)


def _of_device(name: str, part: Mapping[str, Any]) -> Iterator[Figure]:
    for key, value in part.items():
        if isinstance(value, dict):
            low, median, high = (float(value[each]) for each in ("low", "median", "high"))
            yield Figure(name=f"{name}: {key}", value=median, low=low, high=high, more=True)


def _of_batch(name: str, part: Mapping[str, Any]) -> Iterator[Figure]:
    for row in part.get("rows", ()):
        yield _once(f"{name}: {row['way']}, most rows", float(row["largest"]), more=True)


def _of_rows(name: str, part: Mapping[str, Any]) -> Iterator[Figure]:
    for row in part.get("rows", ()):
        if row["reason"] is not None:
            continue
        way = f"{name}: {row['way']}"
        if (over := row["over_reference"]) is not None:
            low, median, high = (1 / over[each] for each in ("high", "median", "low"))
            share = f"{way}, throughput"
            yield Figure(name=share, value=median, low=low, high=high, more=True)
        yield _turns(f"{way}, seconds of a step", row["seconds"], more=False)
        yield _turns(f"{way}, peak bytes", row.get("peaks") or [row["peak_bytes"]], more=False)
        if "seconds_error" in row:
            yield _once(f"{way}, error of the step", abs(row["seconds_error"]), more=False)
            yield _once(f"{way}, peak over predicted", row["peak_of_predicted"], more=False)


_OF = {"tests": _of_tests, "device": _of_device, "batch": _of_batch}
