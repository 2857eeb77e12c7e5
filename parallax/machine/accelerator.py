"""Kinds of devices other than the CPU.

torch.accelerator offers streams, events, memory counts and devices of any accelerator under the same names.
:class:`Accelerator` adds the functions that torch.accelerator lacks. Each method has a default that works with any
accelerator of torch, and a kind of device may override it (:mod:`parallax.machine.cuda`). No other code of the package
depends on the kind of accelerator. A custom kind is one class and one registration
(:func:`parallax.machine.accelerators.register_accelerator`).
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
    """Properties of a device, as torch reports them."""

    index: int
    name: str
    total_bytes: int


class Accelerator:
    """One kind of device, by torch's name. ``backend``: the process-group backend that carries its tensors between
    devices; without one they are staged through the host. ``shared_backend``: the backend for reductions if ranks
    share a device or have no ``backend``."""

    def __init__(self, kind: str, backend: str = "", shared_backend: str = "") -> None:
        self.kind, self.backend, self.shared_backend = kind, backend, shared_backend

    @property
    def module(self) -> Any:
        """torch's module for the kind, such as torch.cuda."""
        return torch.get_device_module(self.kind)

    @property
    def reserve_bytes(self) -> int:
        """Bytes that torch's allocator uses besides the model's tensors: allocations are multiples of 512 bytes, and
        optimizers keep a scalar per parameter."""
        return SMALL_TENSORS_BYTES

    @property
    def flattens_recurrent_weights(self) -> bool:
        """Whether torch keeps all weights of an nn.LSTM, nn.GRU or nn.RNN in one buffer on a device."""
        return False

    @property
    def collective_bytes(self) -> int:
        """Return the device bytes, outside torch's allocator, of a process group of ``backend`` for all-reduces."""
        return 0

    @property
    def edge_bytes(self) -> int:
        """Return the device bytes, outside torch's allocator, of a point-to-point connection between two ranks."""
        return 0

    def usual_context_bytes(self, name: str) -> int:  # noqa: ARG002
        """Return the bytes of a device context with its libraries on a device called ``name``, for use if it was not
        measured."""
        return 0

    def unaccounted_bytes(self, device: torch.device) -> int:
        """Return the bytes in use on ``device`` outside this process's allocator; 0 if torch does not report them."""
        if not hasattr(self.module, "mem_get_info"):
            return 0
        free, total = self.module.mem_get_info(device)
        return max(0, int(total - free) - torch.accelerator.memory_reserved(device))

    def sensors(self, device: torch.device) -> tuple[float | None, float | None]:  # noqa: ARG002
        """Return the temperature of ``device`` in degrees Celsius and its power in watts; None for an unknown value."""
        return None, None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for processes that train on this kind of device; those that the user has set take
        precedence."""
        return {}

    @property
    def in_use(self) -> bool:
        """Whether this process may have used a device of the kind, whose memory torch then holds until the process
        ends. In torch, reading device properties counts as use."""
        return bool(self.module.is_initialized())

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the visible devices. Only properties are read: no context is made and no memory is allocated."""
        if not self.module.is_available():
            return ()
        found = [self.module.get_device_properties(i) for i in range(self.module.device_count())]
        return tuple(DeviceFacts(i, each.name, each.total_memory) for i, each in enumerate(found))

    def identity(self, index: int) -> str:
        """Return a text that identifies the device among all hosts, whatever index a rank uses for it."""
        own = self.lasting_identity(index)
        return own or f"{socket.gethostname()}/{self.kind}:{index} of process {os.getpid()}"

    def lasting_identity(self, index: int) -> str:
        """Return a text that is equal in all processes that see the device; '' if torch reports too little. It includes
        the address on the bus, because some drivers report one UUID for all devices of a model."""
        found = self.module.get_device_properties(index)
        if not (uuid := getattr(found, "uuid", None)):
            return ""
        place = [str(getattr(found, f"pci_{each}_id", "")) for each in ("domain", "bus", "device")]
        return f"{boot_identity()}/{uuid}@{':'.join(place)}"

    def generator(self, index: int) -> torch.Generator:
        """Return the default generator of a device."""
        found: torch.Generator = self.module.default_generators[index]
        return found

    def limit_memory(self, device: torch.device, limit_bytes: int) -> None:
        """Make torch's allocator reject allocations beyond ``limit_bytes`` on ``device``, if torch supports that."""
        if hasattr(self.module, "set_per_process_memory_fraction"):
            total = self.module.get_device_properties(device.index or 0).total_memory
            self.module.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def arena(self, device: torch.device, count: int, remedy: str) -> Arena:  # noqa: ARG002
        """Return ``count`` bytes of host memory pinned for ``device``; raise :class:`SwapError` ending with
        ``remedy`` if that fails."""
        return TorchArena(count, remedy)

    def cache_bytes(self, device: torch.device) -> int:
        """Bytes of the largest cache between the device's memory and its processors; 0 if torch does not report it."""
        return int(
            getattr(self.module.get_device_properties(device.index or 0), "L2_cache_size", 0)
        )

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for about ``seconds``, to delay copies in tests for missing waits. No-op by
        default."""

    def allocation_history(
        self, path: Path, device: torch.device, entries: int
    ) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return two functions: one starts recording the last ``entries`` allocations on ``device``, the other stops
        and writes ``path``. None if torch records none."""
        del path, device, entries
        return None
