"""Find a device's peak operations per second of matrix products, from its data sheet or by measurement."""

from __future__ import annotations

import re

import torch

from parallax.common.units import plural
from parallax.model.precision import DTYPES
from parallax.model.profiling.clock import Clock
from parallax.plan.analytic.hardware import DEVICE_KINDS, DeviceKind

_SIZES = (512, 1024)  # sizes of square matrices
_LARGE_SIZES = (4096, 8192)
_LARGE = ("cuda", "xpu", "mps")
_REPEATS = 5
_SLOWER = {"pcie", "nvl", "max", "laptop", "ti"}  # variants whose peak differs from the kind's


def known_kind(name: str) -> DeviceKind | None:
    """Return the catalog's entry for the device called ``name``. None if the catalog lacks the device, or if the device
    is a variant whose peak operations per second differ from the entry's."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    joined = "".join(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _SLOWER and "a100" not in words:  # an A100 computes as fast in both forms
        return None
    for kind in DEVICE_KINDS.values():
        first = kind.name.split("-")[0]
        if first in words or (first.startswith("rtx") and first in joined):
            return kind
    return None


def peak_flops(
    device: torch.device, name: str, compute: str, fastest_block: float = 0.0
) -> tuple[float, str]:
    """Return the peak operations per second of matrix products in the number format ``compute``, and a text on its
    source.

    The peak is from the data sheet of the device called ``name``. If there is none, it is that of the fastest of some
    products that are timed here, but at least ``fastest_block``, the rate of the model's fastest block: convolutions
    may be faster than products, and the products, timed within a tenth of a second, may meet a slow moment of the
    machine.
    """
    if device.type != "cpu" and (kind := known_kind(name)) is not None:
        return kind.peak(compute), f"the data sheet of {kind.name.split('-')[0]} in {compute}"
    flops = max(
        _measured(device, size, compute)
        for size in (_LARGE_SIZES if device.type in _LARGE else _SIZES)
    )
    threads = f" on {plural(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    if fastest_block > flops:
        return fastest_block, f"the model's fastest block measured here{threads}, in {compute}"
    return flops, f"the fastest {compute} matrix product measured here{threads}"


def _measured(device: torch.device, size: int, compute: str) -> float:
    dtype = DTYPES.get(compute, torch.float32)
    numbers = torch.arange(size * size, device=device).remainder(7) - 3.0  # draws nothing random
    one = numbers.view(size, size).to(dtype)
    clock, seconds, result = Clock(device), list[float](), one @ one
    for _ in range(_REPEATS):
        start = clock.now()
        torch.mm(one, one, out=result)
        seconds.append(clock.now() - start)
    return 2.0 * size**3 / max(min(seconds), 1e-9)
