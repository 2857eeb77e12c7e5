"""Refuse a run that does not fit this host before it starts, in one line that shows the arithmetic.

The check takes milliseconds and prints nothing if all is well. It uses the memory that the plan predicts and low
estimates of all other needs, so a refused run would almost certainly fail.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

from parallax.common.units import format_bytes
from parallax.machine.preflight.disk import check_clock, check_folders
from parallax.machine.preflight.finding import Finding, refuse
from parallax.machine.preflight.memory import check_limits, check_memory, check_shared
from parallax.machine.preflight.needs import (
    IMPORT_ADDRESS_BYTES,
    IMPORT_DATA_BYTES,
    HostNeeds,
)


def check_host(needs: HostNeeds, where: str = "this host") -> None:
    """Raise :class:`~parallax.errors.PreflightError` if ``needs`` exceed this host's resources. ``where`` names the
    host in the message."""
    refuse(_findings(needs), where)


def _findings(needs: HostNeeds) -> Iterator[Finding]:
    for check in (check_memory, check_limits, check_shared):
        yield from check(needs)
    yield from check_folders(needs.folders)
    for each in {each.folder: each for each in needs.folders}.values():
        yield from check_clock(each.folder)


def check_process() -> None:
    """Raise :class:`~parallax.errors.PreflightError` if a process limit is too small to import torch.

    The check runs before the import, because an import that runs out of memory may fail without an error message.
    """
    for name, command, own in (
        ("RLIMIT_DATA", "ulimit -d", IMPORT_DATA_BYTES),
        ("RLIMIT_AS", "ulimit -v", IMPORT_ADDRESS_BYTES),
    ):
        allowed, _ = resource.getrlimit(getattr(resource, name))
        if allowed != resource.RLIM_INFINITY and allowed < own:
            what = (
                f"torch alone takes {format_bytes(own)} of a process, and {name} ({command}) allows "
                f"{format_bytes(allowed)}"
            )
            refuse([Finding(what, f"{command} unlimited")])
