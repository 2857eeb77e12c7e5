"""Elastic runs: torchrun restarts a run on the devices that are present, and the run keeps its name.

Torchrun restarts all ranks, with the same command line, when one has failed, when a node is lost and when one joins.
Choices made for the previous devices must not bind the next start::

    torchrun --nnodes=1:4 ... train      4 devices: plan ── a node is lost ──> 3 devices: plan again, resume
                                         the same name, the typed settings, the last checkpoint

An unfit host ends its ranks, and the next start excludes it (:mod:`parallax.nodes.fitness`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import psutil

from parallax import config as configuration
from parallax.errors import ParallaxError, UnfitHostError, UserError, printable
from parallax.nodes.fitness import Elastic
from parallax.nodes.places import Nodes
from parallax.nodes.together import all_gather_result, broadcast_result
from parallax.run.prepare import RUNS
from parallax.run.resume import STORED, settings
from parallax.runtime.failure.refusal import end_process
from parallax.runtime.failure.watch import PATIENCE_SECONDS, Watch
from parallax.train.repeats import note_refusal

# For ranks of the previous start on other hosts to notice its end.
_LEAVING_SECONDS = 20.0


def patience_seconds() -> float:
    """Return how many seconds to wait for the lock of the run directory. Ranks of the previous start may still hold
    this lock while they end."""
    return _LEAVING_SECONDS if _is_restarted() else 0.0


def present_settings(overrides: Sequence[str], nodes: Nodes) -> list[str]:
    """Return the overrides on the command line, completed for the ranks of this start. All ranks must call this
    function.

    ``cluster.devices`` is set to the number of ranks, unless the user sets it. A run without a name keeps the name of
    its first start. On a restart, the planner chooses the stages and replicas if those of the first start do not fit
    the number of ranks and the user has not typed them.
    """
    devices = len(nodes.of)
    found = [f"cluster.devices={devices}", *_named(overrides)]
    return broadcast_result(lambda: [*_stages(found, devices), *found])


@contextlib.contextmanager
def leaving_out_unfit(overrides: Sequence[str], nodes: Nodes, watch: Watch) -> Iterator[None]:
    """A context that handles an :class:`UnfitHostError`. If enough hosts remain without the unfit ones, the unfit hosts
    leave the run. The other hosts record the reason and end their ranks, which torchrun then restarts. Otherwise the
    error is raised as usual. Every rank enters the context."""
    try:
        yield
    except UnfitHostError as error:
        why = error.why
        if not Elastic.gather(nodes).goes_on(why, nodes):
            raise
        watch.close()  # otherwise each rank would report the end of the others
        if nodes.hosts[nodes.rank] in why:
            _leave_run(why[nodes.hosts[nodes.rank]])
        fit = [rank for rank, host in enumerate(nodes.hosts) if host not in why]
        if nodes.rank == fit[0]:
            _report_refusal(overrides, why)
        end_process(ParallaxError.exit_code)  # torchrun then restarts the remaining ranks


def _leave_run(reason: str) -> NoReturn:
    """End this host's ranks. The first rank of the host prints the reason and asks torchrun to end. The host's other
    ranks wait until torchrun ends them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE_SECONDS)
        end_process(ParallaxError.exit_code)
    print(
        f"parallax: {printable(reason)}; the other hosts continue without this one: "
        "run the same command here when it is repaired",
        file=sys.stderr,
        flush=True,
    )
    end_process(UserError.exit_code)


def _report_refusal(overrides: Sequence[str], why: Mapping[str, str]) -> None:
    """Print why some hosts are excluded. If the run has a directory on this host, also record the reasons there."""
    text = printable("; ".join(why.values()))
    print(f"parallax: continuing without a host: {text}", file=sys.stderr, flush=True)
    name = configuration.override_value(overrides, "name")
    if name not in ("", "auto") and (RUNS / name).is_dir():
        with contextlib.suppress(OSError):  # a full disk must not end the run
            note_refusal(RUNS / name, why.values())


def _is_restarted() -> bool:
    """Return whether this may be a restart: torchrun may have started ranks of this run before."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _named(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, with a name if torchrun restarts a run without one. The name is the start time of torchrun,
    as at the first start. Nodes may have started torchrun at different times. The start time for which a node already
    has a run counts, otherwise the start time on the first node."""
    unnamed = configuration.override_value(overrides, "name") in ("", "auto")
    if not all_gather_result(lambda: unnamed and _is_restarted())[0]:
        return list(overrides)
    started = psutil.Process(os.getppid()).create_time()
    name = datetime.datetime.fromtimestamp(started).strftime("%Y-%m-%d_%H-%M-%S")
    begun = all_gather_result(lambda: (name, (RUNS / name / STORED).exists()))
    chosen = next((each for each, exists in begun if exists), begun[0][0])
    return [*overrides, f"name={chosen}"]


def _stages(overrides: Sequence[str], devices: int) -> list[str]:
    typed = any(
        configuration.override_value(overrides, key)
        for key in ("plan", "plan.stages", "plan.replicas")
    )
    if typed or not _is_restarted():
        return []
    plan = settings(overrides, RUNS).config.plan
    many = isinstance(plan.stages, int) and plan.stages > devices
    misfits = many or plan.ranks not in (None, devices)
    return ["plan.stages=auto", "plan.replicas=auto"] if misfits else []
