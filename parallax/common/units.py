"""Format and parse bytes, seconds and counts."""

from __future__ import annotations

import math

from parallax.errors import ConfigError, printable


def format_bytes(count: float) -> str:
    """Return ``count``, a number of bytes, as text with a unit.

    >>> format_bytes(1536 * 1024)
    '1.5 MiB'
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    for unit in units:
        if abs(size) < 1024 or unit == units[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Return seconds with three significant digits, in a suitable unit.

    >>> format_seconds(0.01234), format_seconds(2.5)
    ('12.3 ms', '2.50 s')"""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e6:.2f} µs"


def format_rate(rate: float) -> str:
    """Return ``rate``, a number per second, as text with two or three significant digits below 100.

    >>> format_rate(0.027), format_rate(12.17), format_rate(2666.4)
    ('0.027', '12.2', '2,666')
    """
    return _three_digits(rate) if 0 < rate < 100 else f"{rate:,.0f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural if the count is not 1.

    >>> plural(1, "row"), plural(1200, "micro-batch")
    ('1 row', '1,200 micro-batches')
    """
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {noun}{ending if count != 1 else ''}"


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - int(math.log10(abs(value))))}f}"


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}


def parse_bytes(value: int | str, key: str) -> int:
    """Return the number of bytes in ``value``, which is a number or a text such as ``8GiB``.

    Errors name the setting ``key``.

    >>> parse_bytes("1.5KiB", "cluster.device_memory")
    1536
    """
    text = str(value).strip().lower().replace(" ", "")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        size = float(number) * _UNITS[text[len(number) :]]
    except (ValueError, KeyError):
        raise ConfigError(
            f"{key}={printable(str(value))}: accepted are bytes such as 8GiB, 500MB or 1048576"
        ) from None
    if not 0 < size < float("inf"):
        raise ConfigError(f"{key}={value}: a size in bytes must be above zero")
    return int(size)


_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0}


def parse_seconds(value: float | str, key: str) -> float:
    """Return the number of seconds in ``value``, which is a number of seconds or a text such as ``50ms``.

    Errors name the setting ``key``.

    >>> parse_seconds("50ms", "serve.p99")
    0.05
    """
    text = str(value).strip().lower().replace(" ", "")
    number = text.rstrip("µinmsu")
    try:
        seconds = float(number) * _TIMES[text[len(number) :]]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f"{key}={printable(str(value))}: accepted are seconds such as 0.05 or 50ms"
        )
    return seconds
