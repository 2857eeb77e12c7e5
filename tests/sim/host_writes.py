"""Where the package's own threads write to pinned memory, which the simulated accelerator cannot see: they are reported
to it, so that it names copies up that may still read there. Importing this tells it from then on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from parallax.machine.device import StagingRing, StreamCopies
from parallax.runtime.channels.staging import Buffers, Lease
from parallax.swap.weights import CopiedWeights
from tests.sim.device import C


def _report_access(*tensors: Tensor) -> None:
    """This thread is about to write there."""
    for tensor in tensors:
        C.host_writes(tensor.data_ptr(), tensor.nbytes)


_take, _copy, _up, _stepped = (
    Buffers.acquire,
    StreamCopies.copy,
    StagingRing.to_device,
    CopiedWeights.round_masters,
)


def _taking(self: Buffers, count: int) -> Lease:
    """Who takes a buffer fills it, or receives into it."""
    lease = _take(self, count)
    _report_access(lease.data)
    return lease


def _copying(self: StreamCopies, source: Tensor, target: Tensor, *after: Any) -> Any:
    """Within the host at once."""
    if source.is_cpu and target.is_cpu:
        _report_access(target)
    return _copy(self, source, target, *after)


def _filling(self: StagingRing, target: Tensor, *ready: Any) -> Iterator[Tensor]:
    """From a file, piece by piece."""
    for piece in _up(self, target, *ready):
        _report_access(piece)
        yield piece


def _stepping(self: CopiedWeights) -> None:
    """New weights, where gradients came down and older weights left."""
    _report_access(*self.exchange_tensors())
    _stepped(self)


Buffers.acquire = _taking  # type: ignore[method-assign]
StreamCopies.copy = _copying  # type: ignore[method-assign]
StagingRing.to_device = _filling  # type: ignore[method-assign]
CopiedWeights.round_masters = _stepping  # type: ignore[method-assign]
