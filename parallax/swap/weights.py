"""The interface through which an optimizer step accesses the weights and gradients of a bucket, in any memory.

Two-byte weights are stepped as fp32 copies (master weights) and rounded afterwards. So small updates, which bfloat16
would round away, add up over the steps. Master weights are created from the weights at the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from parallax.machine.device import CopyEngine, DoneEvent, Event
from parallax.model.private import copy_to_each, zero_each

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_LANES = 64  # elements, a multiple of all vector sizes, because kernels round a last, partial vector differently


class ParameterSegment(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened parameter."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether the segment is the whole parameter."""
        return self.stop - self.start == self.parameter.numel()


def aligned_runs(
    parameters: Iterable[nn.Parameter],
    run_bytes: int,
    kind: Callable[[nn.Parameter], object],
    *,
    split: bool,
    size: Callable[[ParameterSegment], int] | None = None,
) -> Iterator[list[ParameterSegment]]:
    """Yield runs of consecutive segments of ``parameters``, in order, each run with at most ``run_bytes``.

    ``kind`` returns the same value for all parameters of a run. With ``split``, a contiguous parameter may be divided
    among runs, at multiples of 64 elements. All other parameters stay whole, so a run with one of them may be longer
    than ``run_bytes``. ``size`` returns the bytes of a segment, as counted for ``run_bytes``; by default, those of its
    weights.
    """
    run: list[ParameterSegment] = []
    free, known = 0, None
    for parameter in parameters:
        whole = not (split and parameter.is_contiguous())
        at, count, item = 0, parameter.numel(), parameter.element_size()
        while at < count:
            least = count - at if whole else min(_LANES, count - at)
            if run and (free < least * item or kind(parameter) != known):
                yield run
                run = []
            if not run:
                free, known = run_bytes, kind(parameter)
            fitting = max(1, free // item // _LANES) * _LANES
            stop = count if whole else min(count, at + fitting)
            run.append(ParameterSegment(parameter, at, stop))
            free -= (size or bytes_of)(run[-1])
            at = stop
    if run:
        yield run


class BucketWeights(Protocol):
    """The interface to the weights and gradients of one bucket during a step.

    In a step of the host optimizer, ``reduced``, ``commit`` and ``wait`` are called on the main thread. These methods
    are called on the optimizer's thread, in this order: ``tensors_to_step``, ``round_masters``, ``exchange_tensors``,
    ``publish``. If another replica steps the bucket, this replica calls only ``exchange_tensors`` and ``publish``.
    """

    @property
    def segments(self) -> Sequence[ParameterSegment]:
        """The parameter segments of the bucket (parameters or parts of them), in order."""

    @property
    def device(self) -> torch.device:
        """The device on which the bucket is stepped."""

    @property
    def kept(self) -> list[Tensor | None]:
        """The master weights of each parameter segment that are to be stored with the optimizer states.

        An entry is None if the master does not exist yet or is already in the store. The list is empty if the bucket
        has no masters or stores them itself.
        """

    def reduced(self) -> None:
        """Begin to copy the gradients, which are final, to the host."""

    def commit(self, unused: Event) -> None:
        """Prepare for the optimizer step that begins now.

        ``unused``: the caller's event on the device, after the last use of the weights and gradients before the step.
        The device may therefore get new weights as soon as this event has occurred.
        """

    def tensors_to_step(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the weights and the gradient of each parameter segment, on the device on which the bucket is
        stepped."""

    def round_masters(self) -> None:
        """Round the new master weights to the parameters' dtype."""

    def exchange_tensors(self) -> list[Tensor]:
        """Return the new weights of each parameter segment in the parameters' dtype, to send to other replicas or to
        receive into."""

    def publish(self) -> None:
        """Begin to copy the new weights to the device, and set the gradients to zero."""

    def wait(self) -> None:
        """Make the device's current stream wait for the new weights."""

    def skip(self) -> None:
        """Discard gradients that were copied or are being copied, because no step follows."""

    def reset(self) -> None:
        """Discard an unfinished step. The weights on the device are valid."""

    def masters(self) -> list[Tensor | None]:
        """Return the master weights of each parameter segment.

        If there are no master weights, the list is empty. An entry is None if the master weights of its segment do not
        exist.
        """

    def restore(self, index: int, master: Tensor | None) -> None:
        """Set the ``master`` weights of the parameter segment ``index``; None derives them from the weights.

        The caller has already set the weights on the device.
        """


class ResidentWeights:
    """Weights that are stepped in place. Master weights of two-byte weights are on the same device."""

    def __init__(self, segments: Sequence[ParameterSegment]) -> None:
        self.segments = segments
        self.device, dtype = segments[0].parameter.device, segments[0].parameter.dtype
        self.kept: list[Tensor | None] = (
            [] if stepped_in(dtype) is dtype else [None] * len(segments)
        )

    def reduced(self) -> None:
        """No-op: gradients are already on the device on which the weights are stepped."""

    def commit(self, unused: Event) -> None:
        """No-op: weights are changed in place."""

    def tensors_to_step(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the parameters and gradients, or the master weights and the gradients in full precision."""
        weights, gradients = (
            self.exchange_tensors(),
            [_gradient(segment) for segment in self.segments],
        )
        if not self.kept:
            return list(zip(weights, gradients))
        unknown = [index for index, master in enumerate(self.kept) if master is None]
        for index, master in zip(unknown, _full([weights[index] for index in unknown])):
            self.kept[index] = master
        widened = iter(_full([gradient for gradient in gradients if gradient is not None]))
        masters = [master for master in self.kept if master is not None]
        return [
            (master, None if gradient is None else next(widened))
            for master, gradient in zip(masters, gradients, strict=True)
        ]

    def round_masters(self) -> None:
        """Round the new master weights to the parameters' dtype."""
        masters = [master for master in self.kept if master is not None]
        if masters:
            copy_to_each(self.exchange_tensors(), masters)

    def exchange_tensors(self) -> list[Tensor]:
        return [part_of(segment.parameter.detach(), segment) for segment in self.segments]

    def publish(self) -> None:
        """Set the gradients to zero. The weights were stepped in place, so nothing is copied."""
        _zero_gradients(self.segments)

    def wait(self) -> None:
        """No-op: no copy is under way."""

    def skip(self) -> None:
        """No-op: no gradient was copied."""

    def reset(self) -> None:
        """Drop the master weights, because an unfinished step may have changed some of them."""
        self.kept = [None] * len(self.kept)

    def masters(self) -> list[Tensor | None]:
        return self.kept

    def restore(self, index: int, master: Tensor | None) -> None:
        if self.kept:
            self.kept[index] = master


class CopiedWeights:
    """Weights that are stepped as full-precision copies on the host.

    The parameters themselves are on a device, or their dtype has too little precision. ``place`` is pinned memory of
    the size of the weights. Gradients are copied into ``place``. After the step, the new weights are copied from
    ``place`` to the device. ``owned`` says whether this replica steps the weights.
    """

    def __init__(
        self,
        segments: Sequence[ParameterSegment],
        copies: CopyEngine,
        place: Tensor,
        *,
        owned: bool,
    ) -> None:
        self.segments, self._copies, self._place, self._owned = segments, copies, place, owned
        self.device = torch.device("cpu")
        self._dtype = stepped_in(segments[0].parameter.dtype)
        self._master: list[Tensor | None] = [None] * len(segments)
        self._copied_gradients: list[Event] = []
        self._copied_weights: list[Event] = []
        self._unused: Event = DoneEvent()

    @property
    def kept(self) -> list[Tensor | None]:
        """The master weights, which are stored with the optimizer states.

        The list is empty if the weights are stepped in their own dtype, because the copies then stay in memory.
        """
        return self._master if self._dtype is not self.segments[0].parameter.dtype else []

    def reduced(self) -> None:
        """Begin to copy the gradients to the host, if this replica steps the weights. The copies overlap with the
        backward."""
        if not self._owned:
            return
        pairs = [
            (_gradient(segment), place)
            for segment, place in zip(self.segments, self.exchange_tensors())
        ]
        self._copied_gradients = [
            self._copies.copy(gradient, place) for gradient, place in pairs if gradient is not None
        ]

    def commit(self, unused: Event) -> None:
        """Remember the event ``unused``.

        Copies of new weights to the device wait for this event, and not for later work such as the next forward.
        """
        self._unused = unused

    def tensors_to_step(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the copies of the weights, and the gradients in the same dtype."""
        for event in self._copied_gradients:
            event.wait_host()
        have = [segment.parameter.grad is not None for segment in self.segments]
        gradients = [
            place.to(self._dtype) if here else None
            for here, place in zip(have, self.exchange_tensors())
        ]
        return list(zip(self._copied(), gradients))

    def round_masters(self) -> None:
        """Round the copies to the parameters' dtype."""
        for place, master in zip(self.exchange_tensors(), self._master):
            assert master is not None
            place.copy_(master)

    def exchange_tensors(self) -> list[Tensor]:
        found, offset = [], 0
        for segment in self.segments:
            size = bytes_of(segment)
            shape = part_of(segment.parameter, segment).shape
            found.append(
                self._place[offset : offset + size].view(segment.parameter.dtype).view(shape)
            )
            offset += size
        return found

    def publish(self) -> None:
        parts = [part_of(segment.parameter.detach(), segment) for segment in self.segments]
        self._copied_weights = [
            self._copies.copy(place, part, self._unused)
            for place, part in zip(self.exchange_tensors(), parts)
        ]
        _zero_gradients(self.segments)

    def wait(self) -> None:
        """Make the device's current stream wait until the new weights are copied to the device."""
        for event in self._copied_weights:
            event.wait_stream()

    def skip(self) -> None:
        """Discard the copied gradients.

        The device's stream waits for running copies, so that it changes no gradient that is still being copied.
        """
        for event in self._copied_gradients:
            event.wait_stream()
        self._copied_gradients = []

    def reset(self) -> None:
        """Drop the copies, because an unfinished step may have changed some of them.

        The device's stream waits for running copies, so that they cannot overwrite weights that are set next.
        """
        self.skip()
        self.wait()
        self._master = [None] * len(self.segments)

    def masters(self) -> list[Tensor | None]:
        return self.kept

    def restore(self, index: int, master: Tensor | None) -> None:
        """Set the full-precision copy of the parameter segment ``index`` to ``master``; None copies it from the device
        at the next step."""
        self._master[index] = master

    def _copied(self) -> list[Tensor]:
        """Return the full-precision copy of each parameter segment. A missing copy is made from the device's
        weights."""
        found = []
        for index, (segment, place) in enumerate(zip(self.segments, self.exchange_tensors())):
            master = self._master[index]
            if master is None:
                master = torch.empty_like(place, dtype=self._dtype).copy_(
                    part_of(segment.parameter.detach(), segment)
                )
                self._master[index] = master
            found.append(master)
        return found


def bytes_of(segment: ParameterSegment) -> int:
    """Return the bytes of a segment's weights."""
    return (segment.stop - segment.start) * segment.parameter.element_size()


def stepped_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights of ``dtype`` are stepped."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def _full(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of ``tensors``, which have one dtype, in full precision and with unchanged memory layout."""
    copies = [torch.empty_like(tensor, dtype=stepped_in(tensor.dtype)) for tensor in tensors]
    if copies:
        copy_to_each(copies, list(tensors))
    return copies


def part_of(tensor: Tensor, segment: ParameterSegment) -> Tensor:
    """Return the segment's elements of ``tensor``, or ``tensor`` itself if the segment is the whole parameter."""
    return tensor if segment.whole else tensor.view(-1)[segment.start : segment.stop]


def _gradient(segment: ParameterSegment) -> Tensor | None:
    gradient = segment.parameter.grad
    return None if gradient is None else part_of(gradient, segment)


def _zero_gradients(segments: Sequence[ParameterSegment]) -> None:
    found = [_gradient(segment) for segment in segments]
    gradients = [gradient for gradient in found if gradient is not None]
    if gradients:
        zero_each(gradients)
