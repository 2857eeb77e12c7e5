"""End a rank in a way that torchrun does not restart, for use after invalid input.

Torchrun restarts all ranks after every failure, but invalid input would fail in the same way each time. So the first
rank of a host asks its torchrun to end, and writes a marker file for the script that started torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

from parallax.errors import UserError

REFUSED = "refused"  # a file beside the logs of torchrun's ranks


def end_process(code: int) -> NoReturn:
    """End this process with exit code ``code``, whatever its other threads are doing. If ``code`` is that of invalid
    input, first prevent torchrun from restarting the ranks."""
    if code == UserError.exit_code and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _refuse()
    os._exit(code)


def _refuse() -> None:
    if os.environ.get("LOCAL_RANK") != "0":
        return
    with contextlib.suppress(OSError, KeyError, IndexError):
        (Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / REFUSED).touch()
    with contextlib.suppress(OSError):
        os.kill(os.getppid(), signal.SIGTERM)
