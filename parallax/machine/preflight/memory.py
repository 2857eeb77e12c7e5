"""Check that the memory of all ranks of a host fits RAM, control groups, process limits and shared memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import psutil

from parallax.common.units import format_bytes
from parallax.machine.host import memory_limits, shared_memory_bytes
from parallax.machine.preflight.finding import Finding
from parallax.machine.preflight.needs import (
    FILES_PER_RANK,
    PROCESS_ADDRESS_BYTES,
    PROCESS_DATA_BYTES,
    PROCESS_FILES,
    SHARED_BYTES,
    HostNeeds,
)

_LESS = "plan for less (cluster.device_memory)"


def check_memory(needs: HostNeeds) -> Iterator[Finding]:
    """Yield a problem if all ranks together need more than the available RAM or the limits of control groups."""
    planned = sum(rank.memory_bytes for rank in needs.ranks)
    wanted = planned + len(needs.ranks) * needs.process_bytes
    available, limit = psutil.virtual_memory().available, "RAM is available"
    for each in memory_limits():
        if not each.per_process and each.free_bytes < available:
            available, limit = each.free_bytes, f"{each.name} leaves"
    if wanted > available:
        count, own = len(needs.ranks), needs.process_bytes
        processes = f" + {count} × {format_bytes(own)} for their processes = {format_bytes(wanted)}"
        yield Finding(
            f"{count} rank(s) take {format_bytes(planned)} by their plan{processes if own else ''}, and {limit} "
            f"{format_bytes(available)}",
            f"{_LESS}, use fewer ranks, or end what else runs",
        )


def check_limits(needs: HostNeeds) -> Iterator[Finding]:
    """Yield a problem for each process limit (rlimit) that is too small for the largest rank."""
    planned = max((rank.memory_bytes for rank in needs.ranks if rank.reserved), default=0)
    limits = [("RLIMIT_DATA", "ulimit -d", PROCESS_DATA_BYTES)]
    if not needs.accelerators:  # their drivers reserve huge address ranges
        limits.append(("RLIMIT_AS", "ulimit -v", PROCESS_ADDRESS_BYTES))
    for name, command, own in limits:
        allowed, _ = resource.getrlimit(getattr(resource, name))
        if allowed != resource.RLIM_INFINITY and planned + own > allowed:
            yield Finding(
                f"a rank takes {format_bytes(planned)} by its plan + {format_bytes(own)} for its process = "
                f"{format_bytes(planned + own)}, and {name} ({command}) allows {format_bytes(allowed)}",
                f"{command} unlimited, or {_LESS}",
            )
    files = PROCESS_FILES + FILES_PER_RANK * needs.world
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and files > allowed:
        yield Finding(
            f"a rank opens {PROCESS_FILES} files + {FILES_PER_RANK} connections to each of {needs.world} ranks = "
            f"{files}, and RLIMIT_NOFILE (ulimit -n) allows {allowed}",
            f"ulimit -n {max(1024, files)}",
        )


def check_shared(needs: HostNeeds) -> Iterator[Finding]:
    """Yield a problem if ``/dev/shm`` is too small for NCCL, which moves data between devices of one host through it.

    Channels between CPU ranks use anonymous memory instead, which only RAM limits.
    """
    size = shared_memory_bytes()
    by_shm = needs.accelerators > 1 and os.environ.get("NCCL_SHM_DISABLE", "0") != "1"
    if by_shm and size is not None and size < SHARED_BYTES:
        yield Finding(
            f"{needs.accelerators} devices exchange data through /dev/shm, in {format_bytes(SHARED_BYTES)} at least, "
            f"and it has {format_bytes(size)}",
            "docker run --shm-size=1g (or --ipc=host), or mount -o remount,size=1g /dev/shm",
        )
