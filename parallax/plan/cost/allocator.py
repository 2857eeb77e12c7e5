"""Compute the memory that an allocator reserves beyond the tensors of a rank.

Freed memory is reused by tensors of other sizes, which leaves gaps. The bytes of the gaps are proportional to the size
of one tensor. They do not grow with the micro-batches in flight, because a micro-batch reuses the gaps of the previous
one (``docs/adr/008-what-the-allocator-holds.md``). Gaps arise only in the memory of transient tensors, which are freed
and allocated again in each step. So the bytes of the gaps are also at most a fraction of the transient bytes::

    lost = share · transient + min(most, limit · transient)

``share`` is the device's ``gap_share``, ``most`` its ``gap_tensors`` in bytes, ``limit`` its ``gap_limit``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallax.plan.cluster import Device


@dataclass(frozen=True, slots=True)
class Gaps:
    """The bytes that the allocator of one rank loses to rounding and to gaps between tensors.

    The lost bytes depend on the rank's transient bytes: the bytes of tensors that are freed and allocated again in each
    step. Methods accept one number of transient bytes or, where the annotation is Any, an array.
    """

    share: float
    most: float
    limit: float

    @staticmethod
    def of(device: Device, tensor_bytes: float) -> Gaps:
        """Return the gaps of a rank on ``device`` whose largest tensor between two blocks has ``tensor_bytes``."""
        return Gaps(
            device.gap_share, math.ceil(device.gap_tensors * tensor_bytes), device.gap_limit
        )

    @staticmethod
    def together(gaps: Iterable[Gaps]) -> Gaps:
        """Return the gaps of a rank with several stages: those of the stage that may lose the most bytes, because the
        stages reuse each other's freed memory."""
        return max(gaps, key=lambda each: each.most)

    def lost(self, transient: float) -> int:
        """Return the bytes that the allocator loses on a rank with ``transient`` bytes of transient tensors."""
        return math.ceil(self.share * transient + min(self.most, self.limit * transient))

    def lost_each(self, transient: Any) -> Any:
        """Return the bytes that :meth:`lost` returns, for each entry of the array ``transient``."""
        return np.ceil(self.share * transient + np.minimum(self.most, self.limit * transient))

    def capacity(self, free: Any) -> Any:
        """Return the largest number of transient bytes that, with the bytes lost to gaps, fits into ``free`` bytes."""
        limited = free / (1 + self.share + self.limit)
        return np.maximum((free - self.most) / (1 + self.share), limited)

    def more(self, transient: Any, spare: Any) -> Any:
        """Return by how many bytes a rank's transient tensors may grow if ``spare`` bytes of memory are free.

        They have ``transient`` bytes now. As they grow, more bytes are lost to gaps, which ``spare`` must hold, too.
        """
        lost = self.share * transient + np.minimum(self.most, self.limit * transient)
        return self.capacity(transient + lost + spare) - transient
