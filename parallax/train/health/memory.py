"""Raise an alarm for memory that keeps growing: the rate, the time left, and the probable cause.

The resident bytes of the process are read before and after rows are fetched, and after the step. If they keep growing
(:mod:`parallax.train.health.growth`), the growth is compared with the known bytes of tensors: parameters with
gradients, optimizer states, offloaded activations. The rest of the growth is attributed to the part of the step in
which it appears: the data source, the model and its loss, or the time between steps. If tensors of one shape take more
and more memory, the message names the shape.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from parallax.common.units import format_bytes
from parallax.machine.host import available_memory, data_bytes
from parallax.train.health.growth import GrowthDetector

WARM_UP = 3  # steps in which libraries and caches are filled
ROWS, STEP, BETWEEN = "rows", "step", "between"
WHOSE = {
    ROWS: "rows that the data source keeps (data.*)",
    STEP: "what the model or the loss keeps from step to step (activations with their graph, as in `losses += loss`)",
    BETWEEN: "what is kept between steps: evaluation, checkpoints, logs",
}
_MOST_OF = 0.5  # least share of the growth for which a tier, or a part of the step, is named
_SOME_OF = 0.25  # the same for tensors of one shape

Shape = tuple[tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that keeps growing: ``what`` names the memory. The other fields are the growth in bytes per step, the
    number of steps until the memory is full, and the probable cause."""

    what: str
    bytes_per_step: float
    steps_left: float
    suspect: str

    def __str__(self) -> str:
        rate = format_bytes(int(self.bytes_per_step))
        full = f"full in {self.steps_left:.0f} steps" if self.steps_left < 1e7 else "far from full"
        return (
            f"memory keeps rising: {self.what} by {rate} per step, {full}; probably {self.suspect}"
        )


class MemoryAlarm:
    """Watches the memory of one rank, and reports growth once.

    ``tiers()``     returns the bytes of this rank's tensors by kind, such as optimizer states
    ``ranks``       the number of ranks on this host, which share the host's free memory
    ``resident()``  returns the resident bytes of this process
    ``free(n)``     returns the bytes that each of n more processes could use on this host
    """

    def __init__(
        self,
        tiers: Callable[[], Mapping[str, int]],
        device: torch.device,
        ranks: int,
        *,
        resident: Callable[[], int] = data_bytes,
        free: Callable[[int], int] = available_memory,
    ) -> None:
        self._tiers, self._device, self._ranks = tiers, device, ranks
        self._resident, self._free = resident, free
        self._detector, self._device_detector = GrowthDetector(), GrowthDetector()
        self._parts = dict.fromkeys((ROWS, STEP, BETWEEN), 0)
        self._last, self._steps, self._reported = 0, 0, False
        self._before: _Account | None = None

    def mark(self, part: str) -> None:
        """Attribute the memory growth since the last call to ``part`` of the step."""
        now = self._resident()
        if self._last:
            self._parts[part] += now - self._last
        self._last = now

    def find_growth(self) -> Growth | None:
        """Return the growth of memory once, as soon as it is certain; otherwise None. Call it after each step."""
        self._steps += 1
        if self._reported or self._steps <= WARM_UP:
            return None
        found = self._host_growth() or self._device_growth()
        self._reported = found is not None
        return found

    def _host_growth(self) -> Growth | None:
        slope = self._detector.add(self._steps, self._last, lambda: self._free(1))
        if self._detector.suspects and self._before is None:
            self._before = self._account()
        elif not self._detector.suspects and not slope:
            self._before = None
        if not slope:
            return None
        now, left = self._account(), self._free(1) / slope / self._ranks
        first = _Account(now.tiers, dict.fromkeys(self._parts, 0), now.tensors)
        return Growth(
            "resident memory of the host", slope, left, probable_cause(self._before or first, now)
        )

    def _device_growth(self) -> Growth | None:
        if self._device.type == "cpu":
            return None
        held = torch.accelerator.memory_allocated(self._device)

        def free() -> int:  # a call of the driver, which not every step needs
            return torch.accelerator.get_memory_info(self._device)[0]

        slope = self._device_detector.add(self._steps, held, free)
        if not slope:
            return None
        return Growth(f"allocated memory of {self._device}", slope, free() / slope, WHOSE[STEP])

    def _account(self) -> _Account:
        return _Account(dict(self._tiers()), dict(self._parts), _tensors())


@dataclass(frozen=True, slots=True)
class _Account:
    """The memory at one time: known bytes by kind, growth by part of the step, and bytes of tensors by shape."""

    tiers: Mapping[str, int]
    parts: Mapping[str, int]
    tensors: Counter[Shape]


def probable_cause(before: _Account, now: _Account) -> str:
    """Return the probable cause of the growth from ``before``, the account of the memory at one time, to ``now``, a
    later one."""
    came = {part: now.parts[part] - before.parts[part] for part in now.parts}
    risen = max(1, sum(came.values()))
    for tier, count in now.tiers.items():
        grown = count - before.tiers.get(tier, count)
        if grown > _MOST_OF * risen:
            return f"{tier}, which grew by {format_bytes(grown)}"
    part = max(came, key=lambda each: came[each])
    whose = WHOSE[part] if came[part] > _MOST_OF * risen else "of several parts of the step"
    more = now.tensors - before.tensors
    if not more:
        return whose
    (shape, kind), count = more.most_common(1)[0]
    if count < _SOME_OF * risen:
        return whose
    return f"{whose}: there are {format_bytes(count)} more of {kind} tensors of shape {shape}"


def _tensors() -> Counter[Shape]:
    """Return the bytes of all tensors that Python's garbage collector tracks, by the shape and type of the tensors."""
    found: Counter[Shape] = Counter()
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.layout is torch.strided and not thing.is_nested:
            kind = str(thing.dtype).removeprefix("torch.")
            found[tuple(thing.shape), kind] += thing.nbytes
    return found
