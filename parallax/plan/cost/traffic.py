"""What a stage moves between its device and the tier below: bytes and seconds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cluster import Device

TIER_SLACK = 1.25  # places in a tier are rounded up, and rows of uneven micro-batches differ by one
TIER_FLOOR = 2**20

Floats = NDArray[np.float64]


def buffer_bytes(largest: Any, moved: Any) -> Any:
    """The swap limit from which reading overlaps with compute: two blocks, one that is used and the next one, or all
    that is ``moved``. With less, a backward waits for what each offloaded block has to read."""
    return np.minimum(2 * largest, moved)


def leaving_bytes(moved: Any, in_flight: int, limit: Any) -> Any:
    """Of ``moved`` bytes that a micro-batch offloads, those that leave the device. Where a backward follows its own
    forward, what was not written by then is spared, so only what the swap ``limit`` has no room for must be. With
    others in between there is time to write it all, unless all of them fit."""
    if in_flight == 1:
        return np.maximum(0.0, moved - limit)
    return np.where(limit >= in_flight * moved, 0.0, moved)


def tier_places(moved: float) -> int:
    """Bytes of a tier that hold ``moved`` bytes of activations."""
    return math.ceil(moved * TIER_SLACK) + TIER_FLOOR


def copying_seconds(device: Device, moved: NDArray[Any]) -> Floats:
    """Seconds to write and to read back ``moved`` bytes."""
    latency = device.write.latency_seconds + device.read.latency_seconds
    per_byte = 1 / device.write.bytes_per_second + 1 / device.read.bytes_per_second
    return np.where(moved > 0, latency + moved * per_byte, 0.0)
