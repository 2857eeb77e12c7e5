"""One rank as a process: join the other ranks, work under a watch, report a failure, and end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from parallax.common.processes import die_with
from parallax.common.signals import ending_after_request, exit_code, stopped_by
from parallax.errors import ConfigError, printable
from parallax.machine.variables import check_interfaces, check_rank, unset_hint
from parallax.nodes.joining import start_processes, stop_processes
from parallax.runtime.failure.exit_report import (
    EXIT_REPORT,
    exit_process,
    heartbeat_for_launcher,
    report_and_exit,
    send_report,
)
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.runtime.failure.watch import Watch
from parallax.train.loop import TrainerConfig

_MEETING_SECONDS = (
    10.0  # for which a rank that was requested to end waits for others, to end together
)


def as_rank(work: Callable[[Watch, contextlib.ExitStack], int]) -> NoReturn:
    """Run one rank under torchrun: join the other ranks, call ``work``, and end the process with the exit code that
    ``work`` returns. ``work`` adds the locks that it acquires to its second argument.

    After an exception the process ends without cleanup, because destroying the process groups would wait for the other
    ranks.
    """
    watch: Watch | None = None
    heartbeat = heartbeat_for_launcher()
    held = contextlib.ExitStack()  # locks, released with the process at the latest
    try:
        die_with(os.getppid())  # ranks must not outlive a killed launcher
        if not faulthandler.is_enabled():
            # Print the Python stack of a crash in compiled code.
            faulthandler.enable(all_threads=False)
        join_ranks()
        watch = Watch.start(send_report, heartbeat)
        usual = TrainerConfig()  # defaults, until the run's configuration is known
        watch.limit(usual.watchdog_seconds, usual.phase_seconds, usual.grace_seconds)
        code = work(watch, held)
        watch.close()
        stop_processes()
        held.close()
        heartbeat.end()
    except BaseException as error:  # also SystemExit, which is not the end of a run
        report_and_exit(error, watch)
    exit_process(
        0 if EXIT_REPORT in os.environ else code
    )  # Parallax's launcher sets the code itself


def join_ranks() -> None:
    """Join the other ranks. If that fails, the error names the address and the port of the rendezvous, which the user
    can change."""
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(key, "0").isdecimal():
            raise ConfigError(
                f"{key}={printable(os.environ[key])}: accepted is a whole number, as torchrun sets it"
            )
    check_interfaces()
    if "PARALLAX_RENDEZVOUS" not in os.environ:
        check_rank()
    try:
        with ending_after_request(_MEETING_SECONDS, _give_up):
            start_processes(os.environ.get("PARALLAX_RENDEZVOUS"))
    except (dist.DistError, ValueError) as error:
        address, port = (os.environ.get(key, "(not set)") for key in ("MASTER_ADDR", "MASTER_PORT"))
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])
        raise ConfigError(
            f"the ranks cannot join at MASTER_ADDR={address} MASTER_PORT={port}: {reason}; choose a free port and an "
            f"address that all of them reach{unset_hint()}"
        ) from error


def _give_up(number: int) -> None:
    """End this rank after signal ``number``, which arrived while it waited for other ranks."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        what = "while it waited for the other ranks"
        send_report(
            FailureReport(0, FailureKind.STOPPED, stopped_by(number), what, code=exit_code(number))
        )
    os._exit(exit_code(number))
