"""Which stream's tensors move. Copies down are ordered after the stream that computes when they begin, and what comes
back is that stream's again; a tensor that another one has saved stays, and autograd orders its uses as it always does.

Which stream that is can change while nothing is alive that has moved, or may: when the graphs of a step are gone.
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
        """Whether no graph is alive that holds anything of it."""


class Home:
    """The stream that saved the most while graphs were last alive; or one that has saved more since, while it itself
    has saved nothing."""

    def __init__(self) -> None:
        self._home: torch.Stream | None = None
        self._most = 0  # bytes that it saved then
        self._bytes: Counter[torch.Stream] = Counter()  # since then

    def is_left(self, tensor: Tensor, graphs: Graphs) -> bool:
        """Whether ``tensor``, which is saved now and is on an accelerator, was saved by another stream."""
        now = torch.accelerator.current_stream(tensor.device.index)
        if graphs.empty:
            self._choose(now)
        self._bytes[now] += tensor.nbytes
        return now != self._home

    def _choose(self, now: torch.Stream) -> None:
        if self._home is None:
            self._home = now
        elif self._bytes[self._home]:
            ((self._home, self._most),) = self._bytes.most_common(1)
            self._bytes.clear()
        elif self._bytes[now] > self._most:
            self._home = now
