"""A run that torchrun starts again on whatever devices are there: one run, under one name.

Torchrun starts all ranks again when one has failed, when a node is lost and when one joins, and types the same words
each time. What was decided for the devices of the start before must not bind this one::

    torchrun --nnodes=1:4 ... train      4 devices: plan ── a node is lost ──> 3 devices: plan again, go on
                                         the same name, the settings that were typed, the last checkpoint

A host that is unfit leaves, and the start after that is without it (:mod:`parallax.nodes.fitness`).
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
from parallax.nodes.together import from_all, from_first
from parallax.run.prepare import RUNS
from parallax.run.resume import STORED, settings
from parallax.runtime.failure.refusal import end
from parallax.runtime.failure.watch import PATIENCE_SECONDS, Watch
from parallax.train.repeats import note_refusal

# That ranks of the start before, on other hosts, may take to notice that it is over.
_LEAVING_SECONDS = 20.0


def patience_seconds() -> float:
    """For how long a directory may still be held by ranks of the start before."""
    return _LEAVING_SECONDS if _is_restarted() else 0.0


def present_settings(overrides: Sequence[str], nodes: Nodes) -> list[str]:
    """What was typed, for the ranks that have come this time; called by all of them.

    The number of devices is theirs, unless one was typed. A run without a name has that of its first start. Where the
    stages and replicas of an option do not fit the devices that are there now, the planner chooses.
    """
    devices = len(nodes.of)
    found = [f"cluster.devices={devices}", *_named(overrides)]
    return from_first(lambda: [*_stages(found, devices), *found])


@contextlib.contextmanager
def leaving_out_unfit(overrides: Sequence[str], nodes: Nodes, watch: Watch) -> Iterator[None]:
    """While inside, an :class:`UnfitHostError` ends the run on the unfit hosts alone, where enough others are left:
    those start again without them, and write down why. Called by every rank."""
    try:
        yield
    except UnfitHostError as error:
        why = error.why
        if not Elastic.gather(nodes).goes_on(why, nodes):
            raise
        watch.close()  # nobody wonders at the others' end
        if nodes.hosts[nodes.rank] in why:
            _leave_run(why[nodes.hosts[nodes.rank]])
        fit = [rank for rank, host in enumerate(nodes.hosts) if host not in why]
        if nodes.rank == fit[0]:
            _tell_refusal(overrides, why)
        end(ParallaxError.exit_code)  # after which torchrun starts all again that are left


def _leave_run(reason: str) -> NoReturn:
    """End this host's part in the run. Its first rank says why and asks torchrun to end; the others wait for that."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE_SECONDS)
        end(ParallaxError.exit_code)
    print(
        f"parallax: {printable(reason)}; the others go on without this host: type the same line when it is mended",
        file=sys.stderr,
        flush=True,
    )
    end(UserError.exit_code)


def _tell_refusal(overrides: Sequence[str], why: Mapping[str, str]) -> None:
    """Say and write down, where the run has a directory here, why some hosts are done without."""
    text = printable("; ".join(why.values()))
    print(f"parallax: going on without a host: {text}", file=sys.stderr, flush=True)
    name = configuration.said(overrides, "name")
    if name not in ("", "auto") and (RUNS / name).is_dir():
        with contextlib.suppress(OSError):  # a full disk ends no run for this
            note_refusal(RUNS / name, why.values())


def _is_restarted() -> bool:
    """Whether torchrun may have started ranks of this run before."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _named(overrides: Sequence[str]) -> list[str]:
    """With the time at which torchrun was started, on the first node that has a run of that name, where there is no
    name."""
    unnamed = configuration.said(overrides, "name") in ("", "auto")
    if not from_all(lambda: unnamed and _is_restarted())[0]:
        return list(overrides)
    started = psutil.Process(os.getppid()).create_time()
    name = datetime.datetime.fromtimestamp(started).strftime("%Y-%m-%d_%H-%M-%S")
    begun = from_all(lambda: (name, (RUNS / name / STORED).exists()))
    chosen = next((each for each, exists in begun if exists), begun[0][0])
    return [*overrides, f"name={chosen}"]


def _stages(overrides: Sequence[str], devices: int) -> list[str]:
    typed = any(
        configuration.said(overrides, key) for key in ("plan", "plan.stages", "plan.replicas")
    )
    if typed or not _is_restarted():
        return []
    plan = settings(overrides, RUNS).config.plan
    many = isinstance(plan.stages, int) and plan.stages > devices
    misfits = many or plan.ranks not in (None, devices)
    return ["plan.stages=auto", "plan.replicas=auto"] if misfits else []
