"""The peak of a device (:mod:`parallax.model.profiling.peak`), measured once in a process for equal conditions.

Every profile measures it anew, by products of large matrices, which took a third of the time of the tests of profiles.
"""

from __future__ import annotations

import functools

import torch

from parallax.model.profiling import measure, peak


def remember_peaks() -> None:
    """From now on, profiles of this process and of its forks measure each peak once."""
    measure.peak_flops = _peak_flops  # type: ignore[attr-defined]


def _peak_flops(
    device: torch.device, name: str, compute: str, _fastest_block: float = 0.0
) -> tuple[float, str]:
    return _measured(device, name, compute, torch.get_num_threads())


@functools.cache
def _measured(device: torch.device, name: str, compute: str, _threads: int) -> tuple[float, str]:
    return peak.peak_flops(device, name, compute)
