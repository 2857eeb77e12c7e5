"""Copy the model's inputs to the device of the first stage, on demand or one micro-batch ahead.

::

    at once     copy 0 ─▶ forward 0 … copy 1 ─▶ forward 1 …
    ahead       copy 0 ─▶ forward 0 …        ─▶ forward 1 …          concurrently, if the plan has memory for
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
"""The first row of a micro-batch that a rank computes on, and the number of its rows."""


class ModelInputs(Protocol):
    """Gives a rank the model inputs of a step on its device, micro-batch by micro-batch."""

    def begin(self, batch: Rows, parts: Iterable[Part], /) -> None:
        """Start a step. :meth:`take` will be called with each of ``parts``, in this order. A part is the index of its
        first row in ``batch``, and its number of rows."""

    def take(self, part: Part, /) -> Any:
        """Return the inputs of the next part, on the device and ready for the current stream."""

    def landed(self) -> None:
        """Wait until all copies from the batch's memory are complete, so that the owner of the batch may overwrite
        it."""

    def abandon(self) -> None:
        """Drop the inputs of the current step that no call of :meth:`take` has returned yet."""


class InputsAtOnce:
    """Copies the inputs of a micro-batch when its forward requests them."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._batch: Rows | None = None

    def begin(self, batch: Rows, _parts: Iterable[Part]) -> None:
        self._batch = batch

    def take(self, part: Part) -> Any:
        assert self._batch is not None
        return to_device(self._batch.inputs(part[0], sum(part)), self._device)

    def landed(self) -> None:
        """Wait for the compute stream, on which the copies were queued."""
        self._copies.mark().wait_host()

    def abandon(self) -> None:
        self._batch = None


class InputsAhead:
    """Copies the inputs of the next micro-batch while the current one computes. An error of reading rows is raised when
    the forward requests these rows."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._batch: Rows | None = None
        self._parts: deque[Part] = deque()
        self._values: Any = None
        self._failure: Exception | None = None
        self._events: list[Event] = []

    def begin(self, batch: Rows, parts: Iterable[Part]) -> None:
        """Start a step, and start to copy the inputs of its first micro-batch to the device. Each call of :meth:`take`
        starts the copies of the next one."""
        self._batch, self._parts = batch, deque(parts)
        self._start()

    def take(self, part: Part) -> Any:
        """Return the inputs of ``part`` on the device, which were copied before, and start to copy the next part."""
        assert self._parts.popleft() == part
        self._arrive()
        failure, values, self._failure, self._values = self._failure, self._values, None, None
        if failure is not None:
            raise failure
        self._start()
        return values

    def landed(self) -> None:
        """Wait for the compute stream, which waits for all copies."""
        self._copies.mark().wait_host()

    def abandon(self) -> None:
        """Drop the copies. The compute stream first waits for them, so that their memory can be reused."""
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
            self._arrive()  # after that the copies' memory may be dropped
            self._failure = error

    def _arrive(self) -> None:
        events, self._events = self._events, []
        for event in events:
            event.wait_stream()

    def _bring(self, part: Any) -> Any:
        if not isinstance(part, Tensor) or not comes_pinned(part, self._device):
            return to_device(part, self._device)
        # torch's pinned allocator tracks copies and does not reuse the memory before they end.
        source = pinned(part)
        target = torch.empty_like(source, device=self._device)
        self._events.append(self._copies.copy(source, target))
        return target


def open_inputs(
    plans: Iterable[StagePlan], device: torch.device, copies: CopyEngine
) -> ModelInputs:
    """Return the object from which a rank with the stages ``plans`` takes the model's inputs. It copies inputs ahead if
    the plan of a stage has ``inputs_ahead``. Only the model's first stage calls :meth:`ModelInputs.take`."""
    if any(plan.inputs_ahead for plan in plans):
        return InputsAhead(device, copies.on_own_streams())
    return InputsAtOnce(device, copies)
