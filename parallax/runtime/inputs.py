"""The model's inputs on their way from the batch to the device of the first stage.

::

    at once     copy 0 ─▶ forward 0 … copy 1 ─▶ forward 1 …
    ahead       copy 0 ─▶ forward 0 …        ─▶ forward 1 …          beside the computing, where the plan has room for
                          copy 1 ──────────────┘ copy 2 …            the inputs of one more micro-batch
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from parallax.machine.device import CopyEngine, Event
from parallax.model.block import comes_pinned, pinned, to_device, transform
from parallax.plan.plan import StagePlan
from parallax.runtime.batch import Rows

Part = tuple[int, int]
"""The first row of a micro-batch that a rank computes on, and their number."""


class ModelInputs(Protocol):
    """The inputs of one step after the other, micro-batch by micro-batch."""

    def begin(self, batch: Rows, parts: Iterable[Part], /) -> None:
        """A step begins, which takes ``parts`` of ``batch`` in this order."""

    def take(self, part: Part, /) -> Any:
        """The inputs of the next part, on the device, for its current stream."""

    def landed(self) -> None:
        """Return when nothing reads the batch's memory any more: its owner may write there."""

    def abandon(self) -> None:
        """The step goes no further."""


class InputsAtOnce:
    """Brought when they are asked for."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._batch: Rows | None = None

    def begin(self, batch: Rows, _parts: Iterable[Part]) -> None:
        """Nothing is asked for yet."""
        self._batch = batch

    def take(self, part: Part) -> Any:
        assert self._batch is not None
        return to_device(self._batch.inputs(part[0], sum(part)), self._device)

    def landed(self) -> None:
        """They came in the order of what computes."""
        self._copies.mark().wait_host()

    def abandon(self) -> None:
        """Nothing is on its way."""
        self._batch = None


class InputsAhead:
    """Those of the next micro-batch are on their way while one computes. What the batch says against one is raised when
    that one is asked for."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._batch: Rows | None = None
        self._parts: deque[Part] = deque()
        self._values: Any = None
        self._failure: Exception | None = None
        self._events: list[Event] = []

    def begin(self, batch: Rows, parts: Iterable[Part]) -> None:
        """Those of the first begin to come."""
        self._batch, self._parts = batch, deque(parts)
        self._start()

    def take(self, part: Part) -> Any:
        """Those that have come; the next ones begin to."""
        assert self._parts.popleft() == part
        self._arrive()
        failure, values, self._failure, self._values = self._failure, self._values, None, None
        if failure is not None:
            raise failure
        self._start()
        return values

    def landed(self) -> None:
        """What computes has waited for all that were asked for."""
        self._copies.mark().wait_host()

    def abandon(self) -> None:
        """Their memory may be used for something else, after the copies."""
        self._arrive()
        self._batch = self._values = self._failure = None
        self._parts.clear()

    def _start(self) -> None:
        if self._batch is None or not self._parts:
            return
        first, rows = self._parts[0]
        try:
            found = self._batch.inputs(first, first + rows)
            self._values = transform(found, self._bring)
        except Exception as error:
            self._arrive()  # nobody has the targets of those that are on their way
            self._failure = error

    def _arrive(self) -> None:
        events, self._events = self._events, []
        for event in events:
            event.wait_stream()

    def _bring(self, part: Any) -> Any:
        if not isinstance(part, Tensor) or not comes_pinned(part, self._device):
            return to_device(part, self._device)
        # Torch knows of copies from memory that it pinned itself, and does not use that for others before.
        source = pinned(part)
        target = torch.empty_like(source, device=self._device)
        self._events.append(self._copies.copy(source, target))
        return target


def open_inputs(
    plans: Iterable[StagePlan], device: torch.device, copies: CopyEngine
) -> ModelInputs:
    """What brings the inputs to a rank with the stages ``plans``; only the model's first one asks for them."""
    if any(plan.inputs_ahead for plan in plans):
        return InputsAhead(device, copies.on_own_streams())
    return InputsAtOnce(device, copies)
