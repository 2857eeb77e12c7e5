"""Where the weights and gradients of a bucket are, and how a step of the optimizer below the device reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from parallax.device import CopyEngine, Event

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Segment(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, flattened."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()


class Weights(Protocol):
    """Where the weights and gradients of one bucket are, and how a step reaches them. ``reduced`` and ``wait`` are
    called on the main thread, the others beside it, in the order begin, stepped, shared, end; where another replica
    steps the bucket, shared and end alone."""

    @property
    def segments(self) -> Sequence[Segment]:
        """What is in the bucket, in order."""

    def reduced(self) -> None:
        """The gradients are final: begin to bring them to the host."""

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

    def reset(self) -> None:
        """Forget what an unfinished step left behind: the weights on the device are right."""


class ResidentWeights:
    """Weights in host memory, in the type that they are stepped in: a step reaches them where they are."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments

    def reduced(self) -> None:
        """They are on the host."""

    def begin(self) -> list[tuple[Tensor, Tensor | None]]:
        """The parameters themselves."""
        return list(zip(self.shared(), (_gradient(segment) for segment in self.segments)))

    def stepped(self) -> None:
        """They are where they belong."""

    def shared(self) -> list[Tensor]:
        """The parameters themselves."""
        return [part_of(segment.parameter.detach(), segment) for segment in self.segments]

    def end(self) -> None:
        """They are where they belong."""
        _zero_gradients(self.segments)

    def wait(self) -> None:
        """Nothing is under way."""

    def reset(self) -> None:
        """Nothing is left behind."""


class CopiedWeights:
    """Weights on a device, or in a type too short to be stepped in: the step has full-precision copies of its own.

    ``place`` is pinned memory of the size of the weights: gradients land there, and when they are used, new weights
    leave from there.
    """

    def __init__(self, segments: Sequence[Segment], copies: CopyEngine, place: Tensor, *, owned: bool) -> None:
        self.segments, self._copies, self._place = segments, copies, place
        self._dtype = stepped_in(segments[0].parameter.dtype)
        self._master = [torch.empty_like(place, dtype=self._dtype) for place in self.shared()] if owned else []
        self._landed: list[Event] = []
        self._risen: list[Event] = []
        self.reset()

    def reduced(self) -> None:
        """Copy beside the backward, where they are stepped here."""
        if not self._master:
            return
        pairs = [(_gradient(segment), place) for segment, place in zip(self.segments, self.shared())]
        self._landed = [self._copies.copy(gradient, place) for gradient, place in pairs if gradient is not None]

    def begin(self) -> list[tuple[Tensor, Tensor | None]]:
        """The copies of the weights, and the gradients in their type."""
        for event in self._landed:
            event.wait_host()
        have = [segment.parameter.grad is not None for segment in self.segments]
        gradients = [place.to(self._dtype) if here else None for here, place in zip(have, self.shared())]
        return list(zip(self._master, gradients))

    def stepped(self) -> None:
        """Round them to the device's type."""
        for place, master in zip(self.shared(), self._master):
            place.copy_(master)

    def shared(self) -> list[Tensor]:
        """Pinned memory."""
        found, offset = [], 0
        for segment in self.segments:
            size = bytes_of(segment)
            shape = part_of(segment.parameter, segment).shape
            found.append(self._place[offset : offset + size].view(segment.parameter.dtype).view(shape))
            offset += size
        return found

    def end(self) -> None:
        """Copy up."""
        parts = [part_of(segment.parameter.detach(), segment) for segment in self.segments]
        self._risen = [self._copies.copy(place, part) for place, part in zip(self.shared(), parts)]
        _zero_gradients(self.segments)

    def wait(self) -> None:
        """Order the device after the copies."""
        for event in self._risen:
            event.wait_stream()

    def reset(self) -> None:
        """Take the weights from the device, where somebody else has set them."""
        for segment, master in zip(self.segments, self._master):
            master.copy_(part_of(segment.parameter.detach(), segment))


def bytes_of(segment: Segment) -> int:
    """Of the weights."""
    return (segment.stop - segment.start) * segment.parameter.element_size()


def stepped_in(dtype: torch.dtype) -> torch.dtype:
    """The type that weights of ``dtype`` are stepped in."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def part_of(tensor: Tensor, segment: Segment) -> Tensor:
    """The whole tensor as it is, or a run of its elements."""
    return tensor if segment.whole else tensor.view(-1)[segment.start : segment.stop]


def _gradient(segment: Segment) -> Tensor | None:
    gradient = segment.parameter.grad
    return None if gradient is None else part_of(gradient, segment)


def _zero_gradients(segments: Sequence[Segment]) -> None:
    for segment in segments:
        gradient = _gradient(segment)
        if gradient is not None:
            gradient.zero_()
