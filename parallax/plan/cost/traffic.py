"""Compute the bytes and seconds of transfers of activations between a device and the offload tier."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cluster import Device

TIER_SLACK = 1.25  # sizes in a tier are rounded up, and rows of uneven micro-batches differ by one
TIER_FLOOR = 2**20

Floats = NDArray[np.float64]


def buffer_bytes(largest: Any, moved: Any) -> Any:
    """Return the smallest swap limit, in bytes, with which reads overlap with compute.

    The limit is twice ``largest``, the bytes of the largest offloaded block, so that the current and the next block
    fit. If all ``moved`` bytes of a micro-batch are fewer, the limit is ``moved``. With a smaller limit, a backward
    waits for the read of each offloaded block.
    """
    return np.minimum(2 * largest, moved)


def leaving_bytes(moved: Any, in_flight: int, limit: Any) -> Any:
    """Return how many of a micro-batch's ``moved`` bytes are written to the offload tier, with ``in_flight``
    micro-batches in flight.

    With one micro-batch in flight, the backward directly follows its own forward. It cancels the writes that have not
    begun, so only the bytes above the swap ``limit`` are written. With several micro-batches in flight, all bytes are
    written, unless all these micro-batches fit the limit.
    """
    if in_flight == 1:
        return np.maximum(0.0, moved - limit)
    return np.where(limit >= in_flight * moved, 0.0, moved)


def tier_places(moved: float) -> int:
    """Return the bytes to reserve in the offload tier for ``moved`` bytes of activations.

    The result is larger than ``moved``, because sizes are rounded up and uneven micro-batches differ by one row.
    """
    return math.ceil(moved * TIER_SLACK) + TIER_FLOOR


def copying_seconds(device: Device, moved: NDArray[Any]) -> Floats:
    """Return the seconds for writing ``moved`` bytes to the offload tier and reading them back."""
    latency = device.write.latency_seconds + device.read.latency_seconds
    per_byte = 1 / device.write.bytes_per_second + 1 / device.read.bytes_per_second
    return np.where(moved > 0, latency + moved * per_byte, 0.0)
