"""The kinds of accelerators that are known here, by the names of torch's devices.

A kind of one's own is registered in every process that plans or trains::

    register_accelerator(MyAccelerator("mine"))            # torch.device("mine", 0), cluster.kind=mine
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from parallax.errors import ConfigError, printable
from parallax.machine.accelerator import Accelerator, DeviceFacts
from parallax.machine.cuda import Cuda

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


def select_device(kind: str, local_rank: int) -> torch.device:
    """The device of a local rank; several ranks may share one. The variables of its kind, which libraries read when
    they are first used, are set here where nobody has: torchrun, for one, knows none."""
    if kind == "cpu":
        return torch.device("cpu")
    os.environ.update(unset_variables(kind))
    device = torch.device(kind, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


@dataclass(frozen=True, slots=True)
class RanksDevices:
    """Of the ranks of a run: how many devices of ``kind`` those of this host have, and how many all of them have."""

    kind: str
    here: int
    everywhere: int


_of_ranks: RanksDevices | None = None


def tell_ranks_devices(found: RanksDevices | None) -> None:
    """For all that is planned in this process from now on: a rank may see fewer devices than its host has, or no other
    than its own. None: what this process sees is all there is."""
    global _of_ranks
    _of_ranks = found


def ranks_devices(kind: str) -> RanksDevices | None:
    """What was told of devices of ``kind``; None where nothing was."""
    return _of_ranks if _of_ranks is not None and _of_ranks.kind == kind else None


def identity_of_rank(local_rank: int) -> tuple[str, str]:
    """The kind of accelerator that is present, and what tells that of a local rank from every other one; '' where there
    is none, or torch does not say."""
    if (kind := present_kind()) is None:
        return "", ""
    index = local_rank % torch.accelerator.device_count()
    return kind, accelerator_named(kind).lasting_identity(index)


def own_device(kind: str) -> torch.device:
    """The device of ``kind`` that this process computes on: the first, unless it has selected another."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def keep_to(device: torch.device, limit_bytes: int) -> None:
    """Let torch refuse what this process would allocate on an accelerator beyond ``limit_bytes``: a plan was proved to
    fit there, and other ranks may share the device. The RAM that a CPU's ranks hold has other guards."""
    if device.type != "cpu":
        accelerator_of(device).limit_memory(device, limit_bytes)
