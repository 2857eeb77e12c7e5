"""End child processes together with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """On Linux, let the kernel send this process the signal ``number`` when its ``parent`` process ends.

    ``parent`` is the parent's process id. If the parent has ended already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, number)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)
