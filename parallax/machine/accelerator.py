"""Kinds of devices beside the CPU.

torch.accelerator offers streams, events, memory counts and devices of any accelerator by the same names. What it does
not offer for all of them is here: each method has a default that works wherever torch does, and a kind of device that
does better overrides it (:mod:`parallax.machine.cuda`). Nothing else in the package asks which accelerator it is on. A
kind of one's own is one class and one registration (:func:`parallax.machine.accelerators.register_accelerator`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallax.machine.host import boot_identity
from parallax.machine.pinned import Arena, TorchArena

SMALL_TENSORS_BYTES = 8 * 2**20  # 16,000 numbers of 512 bytes each


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device as torch sees it."""

    index: int
    name: str
    total_bytes: int


class Accelerator:
    """One kind of device, by the name that torch gives its devices. ``backend`` is the process-group backend that
    carries its tensors from device to device; without one they are staged through the host. ``shared_backend`` reduces
    them where ranks share a device or have none of ``backend``."""

    def __init__(self, kind: str, backend: str = "", shared_backend: str = "") -> None:
        self.kind, self.backend, self.shared_backend = kind, backend, shared_backend

    @property
    def module(self) -> Any:
        """torch's own module for the kind, as torch.cuda."""
        return torch.get_device_module(self.kind)

    @property
    def reserve_bytes(self) -> int:
        """Of torch's allocator, what is no tensor of the model: an allocation takes whole pieces of some hundred bytes,
        and optimizers keep a number for each parameter."""
        return SMALL_TENSORS_BYTES

    @property
    def collective_bytes(self) -> int:
        """What a group of ranks of ``backend`` that sum tensors takes on a device, beside torch's allocator."""
        return 0

    @property
    def edge_bytes(self) -> int:
        """The same of a way between two ranks."""
        return 0

    def usual_context_bytes(self, name: str) -> int:  # noqa: ARG002
        """What a context and its libraries take on a device that calls itself so, where nobody has measured it."""
        return 0

    def unaccounted_bytes(self, device: torch.device) -> int:
        """What is taken of ``device`` by now, and not by this process's allocator; 0 where torch does not say."""
        if not hasattr(self.module, "mem_get_info"):
            return 0
        free, total = self.module.mem_get_info(device)
        return max(0, int(total - free) - torch.accelerator.memory_reserved(device))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes that train on it, where the user has not set them."""
        return {}

    @property
    def in_use(self) -> bool:
        """Whether this process may have used a device of the kind: what torch holds there for it, it holds to its end.
        Asking for the properties of devices counts, too, in torch."""
        return bool(self.module.is_initialized())

    def devices(self) -> tuple[DeviceFacts, ...]:
        """The visible devices. Only their properties are read: no context is made, so no memory is taken."""
        if not self.module.is_available():
            return ()
        found = [self.module.get_device_properties(i) for i in range(self.module.device_count())]
        return tuple(DeviceFacts(i, each.name, each.total_memory) for i, each in enumerate(found))

    def identity(self, index: int) -> str:
        """What tells a device from every other one of all hosts, however ranks number those that they see."""
        own = self.lasting_identity(index)
        return own or f"{socket.gethostname()}/{self.kind}:{index} of process {os.getpid()}"

    def lasting_identity(self, index: int) -> str:
        """The same, equal in all processes that see the device; '' where torch says too little. Its place on the bus
        is a part of it: some drivers give all devices of a model one UUID."""
        found = self.module.get_device_properties(index)
        if not (uuid := getattr(found, "uuid", None)):
            return ""
        place = [str(getattr(found, f"pci_{each}_id", "")) for each in ("domain", "bus", "device")]
        return f"{boot_identity()}/{uuid}@{':'.join(place)}"

    def generator(self, index: int) -> torch.Generator:
        """The default one of a device."""
        found: torch.Generator = self.module.default_generators[index]
        return found

    def limit_memory(self, device: torch.device, limit_bytes: int) -> None:
        """Let torch's allocator refuse what goes beyond ``limit_bytes`` on ``device``, as if the device were so small,
        where torch offers that."""
        if hasattr(self.module, "set_per_process_memory_fraction"):
            total = self.module.get_device_properties(device.index or 0).total_memory
            self.module.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def arena(self, device: torch.device, count: int, remedy: str) -> Arena:  # noqa: ARG002
        """``count`` bytes of host memory that is pinned for ``device``. Raises :class:`SwapError`, which ends with
        ``remedy``, where there is not so much."""
        return TorchArena(count, remedy)

    def cache_bytes(self, device: torch.device) -> int:
        """The largest cache between the device's memory and its processors; 0 where torch does not say."""
        return int(
            getattr(self.module.get_device_properties(device.index or 0), "L2_cache_size", 0)
        )

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for about so long; tests of waits hold copies up. No time at all by default."""

    def allocation_history(
        self, path: Path, device: torch.device, entries: int
    ) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """What begins to record the last ``entries`` allocations on ``device``, and what ends it and writes ``path``;
        None where torch records none."""
        del path, device, entries
        return None
