"""The kinds of accelerators that are known here, by the names of torch's devices.

A kind of one's own is registered in every process that plans or trains::

    register_accelerator(MyAccelerator("mine"))            # torch.device("mine", 0), cluster.kind=mine
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from parallax.errors import ConfigError, printable
from parallax.machine.accelerator import Accelerator, DeviceFacts
from parallax.machine.cuda import Cuda

NVIDIA_DEVICE = Path("/dev/nvidia0")
_KNOWN: dict[str, Accelerator] = {
    each.kind: each
    # Of devices' tensors gloo takes CUDA's alone.
    for each in (Cuda("cuda", "nccl", "gloo"), Accelerator("xpu", "xccl"))
}


def register_accelerator(accelerator: Accelerator) -> None:
    """Make a kind of device known as ``cluster.kind``, and to everything that runs on one."""
    _KNOWN[accelerator.kind] = accelerator


def accelerator_of(device: torch.device) -> Accelerator:
    """What is known of the kind of ``device``, which is no CPU."""
    return accelerator_named(device.type)


def accelerator_named(kind: str) -> Accelerator:
    """The same by the kind's name. Raises :class:`ConfigError` for one that was not registered."""
    if kind not in _KNOWN:
        raise ConfigError(
            f"devices of kind {printable(kind)} are not known: use cpu, {', '.join(known_kinds())}, or "
            "register_accelerator"
        )
    return _KNOWN[kind]


def unset_variables(kind: str) -> dict[str, str]:
    """Variables of the processes that train on a kind of device, but for those that the user has set: to nothing is as
    good as not at all."""
    wanted = accelerator_named(kind).environment
    return {key: value for key, value in wanted.items() if not os.environ.get(key)}


def known_kinds() -> list[str]:
    """The names of all kinds that were registered."""
    return sorted(_KNOWN)


def present_kind() -> str | None:
    """The kind of accelerator that torch can use on this host; None where there is none, or nobody registered it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in _KNOWN else None


def present_devices(kind: str | None = None) -> tuple[DeviceFacts, ...]:
    """The devices of ``kind``, or of the kind that is present, which torch sees here. No memory of them is taken."""
    kind = kind or present_kind()
    return accelerator_named(kind).devices() if kind is not None else ()


def unusable_device() -> tuple[str, str] | None:
    """Of an accelerator that is there, and that torch cannot use: what is wrong, and what to do; None where there is
    none. One that was hidden, or that this process may not open, is none."""
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
    """The device of a local rank; several ranks may share one. The variables of its kind, which libraries read when
    they are first used, are set here where nobody has: torchrun, for one, knows none."""
    if kind == "cpu":
        return torch.device("cpu")
    os.environ.update(unset_variables(kind))
    device = torch.device(kind, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


class OwnDevice(NamedTuple):
    """The device of one rank: its kind, what tells it from every other one ('' where torch does not say), its bytes."""

    kind: str
    identity: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class RanksDevices:
    """The devices of ``kind`` that the ranks of a run have: how many are ``present`` on this host, whether some two
    ranks of any hosts have a device each (``apart``), and of each rank here the bytes of its device and how many ranks
    have that (``shares``)."""

    kind: str
    present: int
    apart: bool
    shares: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, found: Sequence[OwnDevice | None], here: Sequence[int]) -> RanksDevices | None:
        """By what every rank has ``found``, of which those are ``here``; None where some have none, or of another kind,
        or torch does not say which."""
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


def tell_ranks_devices(found: RanksDevices | None) -> None:
    """For all that is planned in this process from now on: a rank may see fewer devices than its host has, or no other
    than its own. None: what this process sees is all there is."""
    global _of_ranks
    _of_ranks = found


def ranks_devices(kind: str) -> RanksDevices | None:
    """What was told of devices of ``kind``; None where nothing was."""
    return _of_ranks if _of_ranks is not None and _of_ranks.kind == kind else None


def find_own_device(kind: str, index: int) -> OwnDevice | None:
    """What is known of a device that this process sees; None of a CPU, or where there is none of the kind."""
    facts = present_devices(kind) if kind != "cpu" else ()
    if not facts:
        return None
    identity = accelerator_named(kind).lasting_identity(index)
    return OwnDevice(kind, identity, facts[index].total_bytes)


def own_device(kind: str) -> torch.device:
    """The device of ``kind`` that this process computes on: the first, unless it has selected another."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def computing_on(device: torch.device) -> torch.device:
    """``device`` by its number, and selected for this process: generators, messages and memory that another library is
    given go by it. A CPU as it is."""
    if device.type == "cpu":
        return device
    found = own_device(device.type) if device.index is None else device
    torch.accelerator.set_device_index(found)
    return found


def keep_to(device: torch.device, limit_bytes: int) -> None:
    """Let torch refuse what this process would allocate on an accelerator beyond ``limit_bytes``: a plan was proved to
    fit there, and other ranks may share the device. The RAM that a CPU's ranks hold has other guards."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # of a rank that has measured: others may share the device
        accelerator_of(device).limit_memory(device, limit_bytes)
