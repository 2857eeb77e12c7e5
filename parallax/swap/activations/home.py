"""Which stream's tensors move. Copies down are ordered after the stream that computes when they begin, and what comes
back is that stream's again; a tensor that another one has saved stays, and autograd orders its uses as it always does.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch
from torch import Tensor


class Graphs(Protocol):
    """Who knows what is saved."""

    @property
    def empty(self) -> bool:
        """Whether nothing is."""


class Home:
    """The stream that has saved the most so far, of those seen when nothing was alive that another one has saved."""

    def __init__(self) -> None:
        self._home: torch.Stream | None = None
        self._last: torch.Stream | None = None
        self._bytes: Counter[torch.Stream] = Counter()

    def is_left(self, tensor: Tensor, graphs: Graphs) -> bool:
        """Whether ``tensor``, which is saved now and is on an accelerator, was saved by another stream."""
        now = torch.accelerator.current_stream(tensor.device.index)
        # torch says of a stream and None that they are not unequal.
        if self._last is None or now != self._last:
            self._last = now
            if self._home is None or graphs.empty:
                self._home = max(self._bytes, key=self._bytes.__getitem__, default=now)
        self._bytes[now] += tensor.nbytes
        return now != self._home
