"""The interface to devices other than the CPU.

torch.accelerator offers streams, events, memory counts and devices of any accelerator under the same names.
:class:`Accelerator` adds the functions that torch.accelerator lacks. Each method has a default that works with any
accelerator of torch, and subclasses such as :mod:`parallax.machine.cuda` override some of them. No other code of the
package depends on the kind of accelerator. To add one, subclass it and register an instance
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
    """Properties of a device, as torch reports them: its index, its name, and its total memory in bytes."""

    index: int
    name: str
    total_bytes: int


class Accelerator:
    """One kind of device. ``kind`` is torch's name for it, such as ``cuda``.

    ``backend`` is the process-group backend for tensors on these devices. If it is empty, ranks stage tensors through
    the host. ``shared_backend`` is the backend for reductions if ranks share a device or if ``backend`` is empty.
    """

    def __init__(self, kind: str, backend: str = "", shared_backend: str = "") -> None:
        self.kind, self.backend, self.shared_backend = kind, backend, shared_backend

    @property
    def module(self) -> Any:
        """torch's module for this kind of device, such as torch.cuda."""
        return torch.get_device_module(self.kind)

    @property
    def reserve_bytes(self) -> int:
        """Bytes that torch's allocator uses besides the tensors that the planner counts.

        Allocations are multiples of 512 bytes, and optimizers keep a scalar per parameter.
        """
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
        """Return the estimated bytes of a device context, with libraries, on a device called ``name``.

        The estimate is used if the context was not measured.
        """
        return 0

    def unaccounted_bytes(self, device: torch.device) -> int:
        """Return the bytes in use on ``device`` outside this process's allocator; 0 if torch does not report them."""
        if not hasattr(self.module, "mem_get_info"):
            return 0
        free, total = self.module.mem_get_info(device)
        return max(0, int(total - free) - torch.accelerator.memory_reserved(device))

    def sensors(self, device: torch.device) -> tuple[float | None, float | None]:  # noqa: ARG002
        """Return the temperature of ``device`` in degrees Celsius and its power in watts. An unknown value is None."""
        return None, None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for processes that train on this kind of device, with their values.

        A variable that the user has set keeps the user's value.
        """
        return {}

    @property
    def in_use(self) -> bool:
        """Return whether torch is initialized for this kind of device in this process.

        Only then can the process have used such a device, and torch holds memory of a used device until the process
        ends. Reading device properties also initializes torch.
        """
        return bool(self.module.is_initialized())

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the properties of the visible devices, without creating a context or allocating device memory."""
        if not self.module.is_available():
            return ()
        found = [self.module.get_device_properties(i) for i in range(self.module.device_count())]
        return tuple(DeviceFacts(i, each.name, each.total_memory) for i, each in enumerate(found))

    def identity(self, index: int) -> str:
        """Return a text that identifies the device ``index`` among the devices of all hosts.

        The text is the same for ranks that use different indices for the device.
        """
        own = self.lasting_identity(index)
        return own or f"{socket.gethostname()}/{self.kind}:{index} of process {os.getpid()}"

    def lasting_identity(self, index: int) -> str:
        """Return a text that identifies the device ``index`` in all processes that see it; '' if torch reports too
        little.

        The text includes the bus address, because some drivers report one UUID for all devices of a model.
        """
        found = self.module.get_device_properties(index)
        if not (uuid := getattr(found, "uuid", None)):
            return ""
        place = [str(getattr(found, f"pci_{each}_id", "")) for each in ("domain", "bus", "device")]
        return f"{boot_identity()}/{uuid}@{':'.join(place)}"

    def generator(self, index: int) -> torch.Generator:
        """Return torch's default random generator of the device ``index``."""
        found: torch.Generator = self.module.default_generators[index]
        return found

    def limit_memory(self, device: torch.device, limit_bytes: int) -> None:
        """Make torch's allocator reject allocations on ``device`` beyond ``limit_bytes``, if torch supports that."""
        if hasattr(self.module, "set_per_process_memory_fraction"):
            total = self.module.get_device_properties(device.index or 0).total_memory
            self.module.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def arena(self, device: torch.device, count: int, remedy: str) -> Arena:  # noqa: ARG002
        """Return ``count`` bytes of host memory pinned for ``device``.

        Raises :class:`SwapError` with a message that ends with ``remedy`` if pinning fails.
        """
        return TorchArena(count, remedy)

    def cache_bytes(self, device: torch.device) -> int:
        """Bytes of the device's last-level cache; 0 if torch does not report it."""
        return int(
            getattr(self.module.get_device_properties(device.index or 0), "L2_cache_size", 0)
        )

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for about ``seconds``; by default a no-op.

        Tests delay copies to reveal missing waits.
        """

    def allocation_history(
        self, path: Path, device: torch.device, entries: int
    ) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return two functions: the first starts recording the last ``entries`` allocations on ``device``, the second
        stops recording and writes ``path``.

        None if torch cannot record allocations on this kind of device.
        """
        del path, device, entries
        return None
