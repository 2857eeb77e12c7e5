"""Where the weights and gradients of a bucket are, and how a step of the optimizer reaches them.

Weights of two bytes are stepped as copies in fp32, the masters, and rounded afterwards: a small step that is lost in
bfloat16 adds up there. Masters are made from the weights when they are first stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from parallax.machine.device import CopyEngine, DoneEvent, Event
from parallax.model.private import copy_to_each, zero_each

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_LANES = 64  # elements; kernels round the last few, which fill no vector, in another way: cut where no vector is cut


class ParameterSegment(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, flattened."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()


def aligned_runs(
    parameters: Iterable[nn.Parameter],
    run_bytes: int,
    kind: Callable[[nn.Parameter], object],
    *,
    cut: bool,
    size: Callable[[ParameterSegment], int] | None = None,
) -> Iterator[list[ParameterSegment]]:
    """``parameters``, in order, in runs of one ``kind`` and of at most ``run_bytes`` of what a segment's ``size`` is,
    its bytes where nobody says. What may not be ``cut``, or does not lie in one piece, is in one run whole, which may
    then be longer."""
    run: list[ParameterSegment] = []
    room, known = 0, None
    for parameter in parameters:
        whole = not (cut and parameter.is_contiguous())
        at, count, item = 0, parameter.numel(), parameter.element_size()
        while at < count:
            least = count - at if whole else min(_LANES, count - at)
            if run and (room < least * item or kind(parameter) != known):
                yield run
                run = []
            if not run:
                room, known = run_bytes, kind(parameter)
            fitting = max(1, room // item // _LANES) * _LANES
            stop = count if whole else min(count, at + fitting)
            run.append(ParameterSegment(parameter, at, stop))
            room -= (size or bytes_of)(run[-1])
            at = stop
    if run:
        yield run


class BucketWeights(Protocol):
    """Where the weights and gradients of one bucket are, and how a step reaches them. In a step below the device,
    ``reduced``, ``commit`` and ``wait`` are called on the main thread, the others beside it, in the order begin,
    stepped, shared, end; where another replica steps the bucket, shared and end alone."""

    @property
    def segments(self) -> Sequence[ParameterSegment]:
        """What is in the bucket, in order."""

    @property
    def device(self) -> torch.device:
        """Where they are stepped."""

    @property
    def kept(self) -> list[Tensor | None]:
        """The masters of each segment, which whoever keeps the states keeps with them: None where it is not made, or
        elsewhere. Empty where there are none, or these weights keep their own."""

    def reduced(self) -> None:
        """The gradients are final: begin to bring them to the host."""

    def commit(self, unused: Event) -> None:
        """A step begins; until its end the device uses neither weights nor gradients after ``unused``."""

    def begin(self) -> list[tuple[Tensor, Tensor | None]]:
        """The weights and gradients of each segment, on the host, to step on."""

    def stepped(self) -> None:
        """The weights that :meth:`begin` gave are new."""

    def shared(self) -> list[Tensor]:
        """Where the host has, or takes, the new weights of each segment as the device will have them."""

    def end(self) -> None:
        """Begin to bring the new weights to the device; gradients become zero."""

    def wait(self) -> None:
        """The current stream of the device sees the new weights from here on."""

    def skip(self) -> None:
        """No step follows: gradients that were on their way are forgotten."""

    def reset(self) -> None:
        """Forget what an unfinished step left behind: the weights on the device are right."""

    def masters(self) -> list[Tensor | None]:
        """Those of each segment, as far as they are known."""

    def restore(self, index: int, master: Tensor | None) -> None:
        """Somebody else has set the weights of one segment on the device; ``master`` is what they are in full
        precision, where that is known."""


class ResidentWeights:
    """Weights that are stepped where they are. Of those of two bytes the masters lie beside them."""

    def __init__(self, segments: Sequence[ParameterSegment]) -> None:
        self.segments = segments
        self.device, dtype = segments[0].parameter.device, segments[0].parameter.dtype
        self.kept: list[Tensor | None] = (
            [] if stepped_in(dtype) is dtype else [None] * len(segments)
        )

    def reduced(self) -> None:
        """They are where they are stepped."""

    def commit(self, unused: Event) -> None:
        """They are changed where they are."""

    def begin(self) -> list[tuple[Tensor, Tensor | None]]:
        """The parameters themselves, or their masters and gradients in the type of these."""
        weights, gradients = self.shared(), [_gradient(segment) for segment in self.segments]
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

    def stepped(self) -> None:
        """Round new masters; other weights are where they belong."""
        masters = [master for master in self.kept if master is not None]
        if masters:
            copy_to_each(self.shared(), masters)

    def shared(self) -> list[Tensor]:
        return [part_of(segment.parameter.detach(), segment) for segment in self.segments]

    def end(self) -> None:
        """They are where they belong."""
        _zero_gradients(self.segments)

    def wait(self) -> None:
        """Nothing is under way."""

    def skip(self) -> None:
        """Nothing was on its way."""

    def reset(self) -> None:
        """Masters may be half new."""
        self.kept = [None] * len(self.kept)

    def masters(self) -> list[Tensor | None]:
        return self.kept

    def restore(self, index: int, master: Tensor | None) -> None:
        """Taken over, or made again from the weights."""
        if self.kept:
            self.kept[index] = master


class CopiedWeights:
    """Weights on a device, or in a type too short to be stepped in: the step has full-precision copies of its own.

    ``place`` is pinned memory of the size of the weights: gradients land there, and when they are used, new weights
    leave from there.
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
        self._landed: list[Event] = []
        self._risen: list[Event] = []
        self._unused: Event = DoneEvent()

    @property
    def kept(self) -> list[Tensor | None]:
        """The copies, where they are masters; of other weights they stay in memory."""
        return self._master if self._dtype is not self.segments[0].parameter.dtype else []

    def reduced(self) -> None:
        """Copy beside the backward, where they are stepped here."""
        if not self._owned:
            return
        pairs = [
            (_gradient(segment), place) for segment, place in zip(self.segments, self.shared())
        ]
        self._landed = [
            self._copies.copy(gradient, place) for gradient, place in pairs if gradient is not None
        ]

    def commit(self, unused: Event) -> None:
        """What the device is given from now on, as the next forward's first blocks, has nothing to do with these."""
        self._unused = unused

    def begin(self) -> list[tuple[Tensor, Tensor | None]]:
        """The copies of the weights, and the gradients in their type."""
        for event in self._landed:
            event.wait_host()
        have = [segment.parameter.grad is not None for segment in self.segments]
        gradients = [
            place.to(self._dtype) if here else None for here, place in zip(have, self.shared())
        ]
        return list(zip(self._copied(), gradients))

    def stepped(self) -> None:
        """Round them to the device's type."""
        for place, master in zip(self.shared(), self._master):
            assert master is not None
            place.copy_(master)

    def shared(self) -> list[Tensor]:
        found, offset = [], 0
        for segment in self.segments:
            size = bytes_of(segment)
            shape = part_of(segment.parameter, segment).shape
            found.append(
                self._place[offset : offset + size].view(segment.parameter.dtype).view(shape)
            )
            offset += size
        return found

    def end(self) -> None:
        parts = [part_of(segment.parameter.detach(), segment) for segment in self.segments]
        self._risen = [
            self._copies.copy(place, part, self._unused)
            for place, part in zip(self.shared(), parts)
        ]
        _zero_gradients(self.segments)

    def wait(self) -> None:
        """Order the device after the copies."""
        for event in self._risen:
            event.wait_stream()

    def skip(self) -> None:
        """The next step's gradients come to the same place, after these; the device changes no gradient that is still
        being copied."""
        for event in self._landed:
            event.wait_stream()
        self._landed = []

    def reset(self) -> None:
        """The copies may be half new. What is set on the device now comes after what is still on its way there."""
        self.skip()
        self.wait()
        self._master = [None] * len(self.segments)

    def masters(self) -> list[Tensor | None]:
        return self.kept

    def restore(self, index: int, master: Tensor | None) -> None:
        """Taken over, or taken from the device when they are stepped next."""
        self._master[index] = master

    def _copied(self) -> list[Tensor]:
        """Those of every segment, taken from the device where there is none."""
        found = []
        for index, (segment, place) in enumerate(zip(self.segments, self.shared())):
            master = self._master[index]
            if master is None:
                master = torch.empty_like(place, dtype=self._dtype).copy_(
                    part_of(segment.parameter.detach(), segment)
                )
                self._master[index] = master
            found.append(master)
        return found


def bytes_of(segment: ParameterSegment) -> int:
    """Of the weights."""
    return (segment.stop - segment.start) * segment.parameter.element_size()


def stepped_in(dtype: torch.dtype) -> torch.dtype:
    """The type that weights of ``dtype`` are stepped in."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def _full(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in full precision, that lie in memory as ``tensors`` do, which are of one type."""
    copies = [torch.empty_like(tensor, dtype=stepped_in(tensor.dtype)) for tensor in tensors]
    if copies:
        copy_to_each(copies, list(tensors))
    return copies


def part_of(tensor: Tensor, segment: ParameterSegment) -> Tensor:
    """The whole tensor as it is, or a run of its elements."""
    return tensor if segment.whole else tensor.view(-1)[segment.start : segment.stop]


def _gradient(segment: ParameterSegment) -> Tensor | None:
    gradient = segment.parameter.grad
    return None if gradient is None else part_of(gradient, segment)


def _zero_gradients(segments: Sequence[ParameterSegment]) -> None:
    found = [_gradient(segment) for segment in segments]
    gradients = [gradient for gradient in found if gradient is not None]
    if gradients:
        zero_each(gradients)
