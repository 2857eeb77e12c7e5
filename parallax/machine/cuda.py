"""The accelerator for CUDA, and for ROCm, whose functions have the same names in torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parallax.machine.accelerator import Accelerator
from parallax.machine.pinned import Arena, RegisteredArena
from parallax.plan.analytic.hardware import (
    CHANNELS,
    EDGE_CHANNELS,
    collective_bytes,
    edge_bytes,
    usual_context,
)

_CYCLES_PER_SECOND = 1.5e9  # approximate GPU clock, for delays that need only be long enough
_HANDLES, _WORKSPACE_BYTES = 2, 32 * 2**20  # torch's figures for Hopper; less on other GPUs
# increments of torch's allocator: for small tensors, and for others
_PIECES_BYTES = (2 + 20) * 2**20
_MOST_CHANNELS, _MOST_EDGE_CHANNELS = "NCCL_MAX_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"
_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


class Cuda(Accelerator):
    """NVIDIA and AMD devices."""

    @property
    def reserve_bytes(self) -> int:
        """Bytes of small tensors, of cuBLAS workspaces, and of the unused part of the allocator's last segment.

        There are two workspaces: one for the forward thread and one for the backward thread. The unused part counts
        towards the allocator's limit.
        """
        return super().reserve_bytes + _HANDLES * _WORKSPACE_BYTES + _PIECES_BYTES

    @property
    def flattens_recurrent_weights(self) -> bool:
        """True: cuDNN and MIOpen keep all weights of a recurrent module in one buffer."""
        return True

    @property
    def collective_bytes(self) -> int:
        """Return the bytes of NCCL's buffers for collectives, with the configured number of channels."""
        return collective_bytes(int(self._channels[_MOST_CHANNELS]))

    @property
    def edge_bytes(self) -> int:
        """Return the bytes of NCCL's buffers for one point-to-point connection, with the configured number of
        channels."""
        return edge_bytes(int(self._channels[_MOST_EDGE_CHANNELS]))

    def usual_context_bytes(self, name: str) -> int:
        return usual_context(name)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that enable expandable segments, against fragmentation, and limit the number of NCCL
        channels.

        The plan counts the buffers of these channels as device memory.
        """
        known_before = (
            "PYTORCH_CUDA_ALLOC_CONF" in os.environ
        )  # the variable's name in older versions
        mapped = {} if known_before else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        return {**mapped, **self._channels}

    @property
    def _channels(self) -> dict[str, str]:
        usual = {_MOST_CHANNELS: CHANNELS, _MOST_EDGE_CHANNELS: EDGE_CHANNELS}
        given = {name: os.environ.get(name, "") for name in usual}
        numbers = {name for name, text in given.items() if text.isdigit() and int(text)}
        return {name: given[name] if name in numbers else str(usual[name]) for name in usual}

    def arena(self, device: torch.device, count: int, remedy: str) -> Arena:
        """Return an arena of ``count`` bytes of host memory, in pages that are registered with the CUDA runtime. Errors
        end with ``remedy``.

        torch's pinned allocator would round the size up to a power of two. ``device`` is made current for the runtime
        calls, which would otherwise create a context on another device.
        """
        runtime = torch.cuda.cudart()

        def register(address: int, size: int) -> int:
            with torch.cuda.device(device):
                return pin(runtime, address, size)

        def unregister(address: int) -> None:
            with torch.cuda.device(device):
                runtime.cudaHostUnregister(address)

        return RegisteredArena(
            count,
            register,
            unregister,
            synchronize=lambda: torch.cuda.synchronize(device),
            cpus=self._near_cpus(device),
            remedy=remedy,
        )

    def sensors(self, device: torch.device) -> tuple[float | None, float | None]:
        """Return temperature and power as NVML reports them through torch, which needs the package nvidia-ml-py."""
        try:
            return float(torch.cuda.temperature(device)), torch.cuda.power_draw(device) / 1000
        except Exception:  # of torch, NVML or its package; the calling thread must continue
            return None, None

    def hold(self, seconds: float) -> None:
        if seconds:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))

    def allocation_history(
        self, path: Path, device: torch.device, entries: int
    ) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return a function that starts torch's memory history, and one that stops it and writes it to ``path``.

        The written file is a pickle, which Parallax never reads.
        """

        def start() -> None:
            torch.cuda.memory._record_memory_history(max_entries=entries, device=device)

        def stop() -> None:
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None, device=device)

        return start, stop

    def _near_cpus(self, device: torch.device) -> frozenset[int]:
        """Return the usable CPUs of the device's NUMA node; empty if unknown."""
        found: Any = torch.cuda.get_device_properties(device)
        try:
            place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
            listed = Path(f"/sys/bus/pci/devices/{place}/local_cpulist").read_text().strip()
            ranges = [part.split("-") for part in listed.split(",") if part]
            near = {cpu for part in ranges for cpu in range(int(part[0]), int(part[-1]) + 1)}
        except (AttributeError, OSError, ValueError):
            return frozenset()
        return frozenset(near & os.sched_getaffinity(0))


def pin(runtime: Any, address: int, size: int) -> int:
    """Pin ``size`` bytes of host memory at ``address`` with ``runtime``, the CUDA runtime, and return the runtime's
    error code, 0 for success.

    After a failure, a kernel is launched to clear the error, because the runtime would report it again at the next
    launch.
    """
    code = int(runtime.cudaHostRegister(address, size, _ALL_CONTEXTS))
    if code and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code
