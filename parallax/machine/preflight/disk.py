"""Check the free bytes of folders (file system, quota, file-size limit), and the clock of their file systems."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import psutil

from parallax.common.files import disk_free_bytes, existing_parent
from parallax.common.units import format_bytes
from parallax.errors import printable
from parallax.machine.preflight.finding import Finding
from parallax.machine.preflight.needs import FolderNeeds

CLOCK_SECONDS = 60.0  # accepted difference between a file system's clock and this host's
_QUOTACTL_FD = 443  # number for syscall(2), the same on every architecture
_GET_USER_QUOTA = 0x800007 << 8  # QCMD(Q_GETQUOTA, USRQUOTA) of quotactl(2)
_BLOCK_BYTES = 1024  # unit of its limits; usage is in bytes
_LIMITS_KNOWN = 1 | 2  # QIF_BLIMITS | QIF_SPACE


class _Quota(ctypes.Structure):
    """The C structure ``if_dqblk`` in which quotactl(2) returns a quota."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("hard_blocks", "soft_blocks", "used_bytes")),
        *((f"_{n}", ctypes.c_uint64) for n in range(5)),
        ("valid", ctypes.c_uint32),
    )


def quota_free_bytes(folder: Path) -> int | None:
    """Return the bytes that the user's quota leaves free on the file system of ``folder``. statvfs does not report
    quotas.

    None if there is no quota or if it cannot be read, as on network file systems.
    """
    if sys.platform != "linux":
        return None
    found = _Quota()
    with contextlib.suppress(OSError, AttributeError):
        handle = os.open(existing_parent(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            failed = ctypes.CDLL(None).syscall(
                _QUOTACTL_FD,
                handle,
                ctypes.c_uint(_GET_USER_QUOTA),
                ctypes.c_uint(os.getuid()),
                ctypes.byref(found),
            )
        finally:
            os.close(handle)
        if not failed and found.valid & _LIMITS_KNOWN == _LIMITS_KNOWN and found.hard_blocks:
            return max(0, found.hard_blocks * _BLOCK_BYTES - found.used_bytes)
    return None


def check_folders(needs: Sequence[FolderNeeds]) -> Iterator[Finding]:
    """Yield a problem for each file system with too few free bytes for all its folders in ``needs``, and for each
    folder whose largest file exceeds the process limit on file size (RLIMIT_FSIZE)."""

    def device(each: FolderNeeds) -> int:
        return existing_parent(each.folder).stat().st_dev

    for _, found in groupby(sorted(needs, key=device), device):
        yield from _check_together(list(found))
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    for each in needs:
        if limit != resource.RLIM_INFINITY and each.largest_bytes > limit:
            yield Finding(
                f"{each.what} needs files of {format_bytes(each.largest_bytes)}, and RLIMIT_FSIZE (ulimit -f) allows "
                f"{format_bytes(limit)}",
                f"ulimit -f unlimited, or {each.remedy}",
            )


def _check_together(needs: Sequence[FolderNeeds]) -> Iterator[Finding]:
    folder, wanted = needs[0].folder, sum(each.size for each in needs)
    if not psutil.disk_usage(str(existing_parent(folder))).total:
        return  # a file system that reports no size
    free, limit = disk_free_bytes(folder), "free"
    left = quota_free_bytes(folder)
    if left is not None and left < free:
        free, limit = left, "left of your quota"
    if wanted > free:
        terms = " + ".join(f"{format_bytes(each.size)} for {each.what}" for each in needs)
        total = f" = {format_bytes(wanted)}" if len(needs) > 1 else ""
        yield Finding(
            f"{terms}{total}, and {format_bytes(free)} are {limit} in {printable(str(existing_parent(folder)))}",
            f"free space, or {max(needs, key=lambda each: each.size).remedy}",
        )


def check_clock(folder: Path, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Yield a problem if the clock of the file system of ``folder``, read from a new file, differs from this host's
    clock.

    The clocks must agree because left-over files are recognised by their age. Folders that cannot be written are
    ignored.
    """
    place = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            off = os.fstat(file.fileno()).st_mtime - now()
    except OSError:
        return
    if abs(off) > CLOCK_SECONDS:
        yield Finding(
            f"the clock of the file system of {printable(str(place))} is {off:+.0f} s off this host's, and at most "
            f"{CLOCK_SECONDS:g} s are accepted",
            "set both by one time server (chronyc makestep), or use another folder",
        )
