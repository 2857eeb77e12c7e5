"""Registry of the kinds of accelerators, by torch's name for the device.

To add a kind, register it in every process that plans or trains::

    register_accelerator(MyAccelerator("mine"))            # torch.device("mine", 0), cluster.kind=mine
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from parallax.errors import ConfigError, printable
from parallax.machine.accelerator import Accelerator, DeviceFacts
from parallax.machine.cuda import Cuda

NVIDIA_DEVICE = Path("/dev/nvidia0")
_KNOWN: dict[str, Accelerator] = {
    each.kind: each
    # gloo accepts device tensors of CUDA only
    for each in (Cuda("cuda", "nccl", "gloo"), Accelerator("xpu", "xccl"))
}


def register_accelerator(accelerator: Accelerator) -> None:
    """Register a kind of accelerator under its name, so that ``cluster.kind`` accepts it."""
    _KNOWN[accelerator.kind] = accelerator


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the registered accelerator of ``device``, which is not a CPU."""
    return accelerator_named(device.type)


def device_sensors(device: torch.device) -> Callable[[], tuple[float | None, float | None]]:
    """Return a function that returns the temperature and the power of ``device``; both None for a CPU."""
    if device.type == "cpu":
        return lambda: (None, None)
    return partial(accelerator_of(device).sensors, device)


def accelerator_named(kind: str) -> Accelerator:
    """Return the accelerator registered for ``kind``. Raises :class:`ConfigError` if there is none."""
    if kind not in _KNOWN:
        raise ConfigError(
            f"devices of kind {printable(kind)} are not known: use cpu, {', '.join(known_kinds())}, or "
            "register_accelerator"
        )
    return _KNOWN[kind]


def unset_variables(kind: str) -> dict[str, str]:
    """Return the environment variables for training on ``kind``, with their values.

    Variables that are already set, and not empty, are omitted.
    """
    wanted = accelerator_named(kind).environment
    return {key: value for key, value in wanted.items() if not os.environ.get(key)}


def known_kinds() -> list[str]:
    """Return the names of all registered kinds."""
    return sorted(_KNOWN)


def present_kind() -> str | None:
    """Return the kind of accelerator that torch can use on this host; None if there is none or it is not registered."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in _KNOWN else None


def present_devices(kind: str | None = None) -> tuple[DeviceFacts, ...]:
    """Return the devices of ``kind`` (default: the present kind) that torch sees, without allocating device memory."""
    kind = kind or present_kind()
    return accelerator_named(kind).devices() if kind is not None else ()


def unusable_device() -> tuple[str, str] | None:
    """Return the problem and the remedy if this host has an NVIDIA device that torch cannot use; None otherwise.

    Devices that are hidden (CUDA_VISIBLE_DEVICES) or that this process may not open are ignored.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    shown = first.isdecimal() or first.startswith(("GPU-", "MIG-"))
    usable = os.access(NVIDIA_DEVICE, os.R_OK | os.W_OK)
    if not shown or not usable or present_kind() is not None:
        return None
    return (
        f"there is an NVIDIA device, but torch {torch.__version__} cannot use it",
        "install a CUDA build of torch that fits the driver; see nvidia-smi",
    )


def select_device(kind: str, local_rank: int) -> torch.device:
    """Select and return the device of the rank ``local_rank`` of this host. Several ranks may share a device.

    The environment variables of this kind of device are set first, because libraries read them at first use and
    torchrun does not set them. Variables that the user has set are kept.
    """
    if kind == "cpu":
        return torch.device("cpu")
    os.environ.update(unset_variables(kind))
    device = torch.device(kind, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


class OwnDevice(NamedTuple):
    """The device of one rank: its kind, and its total memory in bytes. ``identity`` is a text that is unique over all
    hosts, or '' if torch provides none."""

    kind: str
    identity: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class RanksDevices:
    """The devices of all ranks of a run, all of one ``kind``.

    ``present`` is the number of distinct devices that the ranks on this host use. ``apart`` is True if at least two
    ranks of the run use different devices. ``shares`` gives, for each rank on this host, the bytes of its device and
    the number of ranks that share the device.
    """

    kind: str
    present: int
    apart: bool
    shares: tuple[tuple[int, int], ...]

    @classmethod
    def collect(cls, found: Sequence[OwnDevice | None], here: Sequence[int]) -> RanksDevices | None:
        """Return the devices of all ranks, or None if they cannot be compared.

        ``found`` is the device of each rank of the run, and ``here`` the ranks on this host. The result is None if a
        rank has no device, if the kinds differ, or if the identity of a device is unknown.
        """
        known = [each for each in found if each is not None and each.identity]
        if len(known) < len(found) or len({each.kind for each in known}) != 1:
            return None
        users = Counter(each.identity for each in known)
        return cls(
            known[0].kind,
            len({known[rank].identity for rank in here}),
            len(users) > 1,
            tuple((known[rank].total_bytes, users[known[rank].identity]) for rank in here),
        )


_of_ranks: RanksDevices | None = None


def set_ranks_devices(found: RanksDevices | None) -> None:
    """Set the devices for which this process plans. If ``found`` is None, it plans for the devices that this process
    sees.

    A rank may see only some of the devices of its host. Therefore all ranks first exchange their devices, and each rank
    calls this function with the result.
    """
    global _of_ranks
    _of_ranks = found


def ranks_devices(kind: str) -> RanksDevices | None:
    """Return the devices set by :func:`set_ranks_devices`; None if none were set or if they are not of ``kind``."""
    return _of_ranks if _of_ranks is not None and _of_ranks.kind == kind else None


def find_own_device(kind: str, index: int) -> OwnDevice | None:
    """Return the device ``index`` of ``kind`` as this process sees it; None for a CPU, or if no device of ``kind`` is
    present."""
    facts = present_devices(kind) if kind != "cpu" else ()
    if not facts:
        return None
    identity = accelerator_named(kind).lasting_identity(index)
    return OwnDevice(kind, identity, facts[index].total_bytes)


def own_device(kind: str) -> torch.device:
    """Return the device of ``kind`` that this process uses: the selected one, by default the first."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def computing_on(device: torch.device) -> torch.device:
    """Select ``device`` for this process, and return it with its index. A CPU is returned unchanged.

    Code that takes no device argument, such as generators, messages and other libraries, uses the selected device.
    """
    if device.type == "cpu":
        return device
    found = own_device(device.type) if device.index is None else device
    torch.accelerator.set_device_index(found)
    return found


def limit_device_memory(device: torch.device, limit_bytes: int) -> None:
    """Make torch reject allocations of this process on an accelerator beyond ``limit_bytes``; a no-op on a CPU.

    So a rank that needs more memory gets an out-of-memory error, instead of taking memory from other ranks that share
    the device. The memory of a CPU is checked elsewhere.
    """
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # frees cached memory of measurements: other ranks may share the device
        accelerator_of(device).limit_memory(device, limit_bytes)
