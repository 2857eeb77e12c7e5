"""Check for torch environment variables that are left over from another run."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from parallax.errors import ConfigError, printable

_RANK = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
# variables that launchers set
_LAUNCHERS = "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"


def check_interfaces(environment: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`ConfigError` if ``GLOO_SOCKET_IFNAME`` in ``environment`` names a network interface that this host
    does not have."""
    named = environment.get("GLOO_SOCKET_IFNAME", "")
    present = sorted(psutil.net_if_addrs())
    if missing := [name for name in named.split(",") if name and name.strip() not in present]:
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={printable(named)}: this host has no network interface {printable(missing[0])}; "
            f"unset GLOO_SOCKET_IFNAME, or name one of {', '.join(map(printable, present))}"
        )


def check_rank(environment: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`ConfigError` if the variables in ``environment`` that make a process a rank, such as ``RANK`` and
    ``WORLD_SIZE``, are incomplete or contradict each other."""
    if missing := [key for key in _RANK if not environment.get(key)]:
        given = [key for key in (*_RANK, "TORCHELASTIC_RUN_ID") if environment.get(key)]
        raise ConfigError(
            f"{', '.join(given)} {'are' if len(given) > 1 else 'is'} set and {', '.join(missing)} not: start the ranks "
            f"with torchrun, or type `unset {' '.join(given)}` to train without it"
        )
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    if rank.isdecimal() and size.isdecimal() and int(rank) >= int(size):
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size}: accepted are ranks from 0 to WORLD_SIZE - 1; start the ranks with "
            f"torchrun, or type `unset {' '.join(_RANK)}` to train without it"
        )


def leftover_warning(environment: Mapping[str, str] = os.environ) -> str:
    """Return a warning if rank variables, such as ``RANK``, are set in ``environment`` although no launcher has started
    this process as a rank; '' otherwise."""
    found = _by_hand(environment)
    if not found:
        return ""
    shown = " ".join(f"{key}={printable(environment[key])}" for key in found)
    return f"{shown}: set by no torchrun, and ignored; type `unset {' '.join(found)}`"


def unset_hint(environment: Mapping[str, str] = os.environ) -> str:
    """Return the end of a message about missing ranks, if rank variables are set in ``environment`` but no launcher has
    set them; otherwise ''.

    The text names the variables, which may be left over from another run, and the command that unsets them.
    """
    found = _by_hand(environment)
    if not found:
        return ""
    return f"; no torchrun has set {', '.join(found)}: where they are left over, type `unset {' '.join(found)}`"


def _by_hand(environment: Mapping[str, str]) -> list[str]:
    if any(key in environment for key in _LAUNCHERS):
        return []
    return [key for key in _RANK if environment.get(key)]
