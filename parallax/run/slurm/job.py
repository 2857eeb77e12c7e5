"""Run training as a Slurm job. A batch script starts the training on the job's nodes, and queues the job again if it
ended early.

Slurm gives a job its nodes for a limited time. The script requests the nodes, starts one torchrun on each node
(``body.sh``), and gets a signal before the time is over. Then the run saves, the job returns to the queue under its own
name, and the run resumes later. The points of a sweep are tasks of one job array, each with its own run.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.common.files import replacing
from parallax.common.lock import PRIVATE
from parallax.errors import ConfigError, printable

SCRIPT, LOG = "job.sbatch", "slurm.log"
BODY = Path(__file__).with_name("body.sh")
_ENDING_SECONDS = 30  # for the summary and the ends of ranks and torchrun, after the checkpoint
_USUAL_GRACE_SECONDS = 60  # if the run sets no limit
_SUBMIT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A Slurm job that trains the run ``name`` with ``settings``, by ``processes`` ranks on each of ``nodes`` nodes.

    ``gpus``           the number of devices of each node; 0 for ranks on CPUs
    ``cpus``           the number of cores of each node; 0 requests whole nodes
    ``time``           the time limit in Slurm's format; empty for the partition's time limit
    ``grace_seconds``  the time that the run may need to save
    ``options``        further options of sbatch, placed last
    ``points``         for a job array, the settings of each task; its runs are called ``name-0``, ``name-1``, …. Empty
                       for a job of one run.
    """

    name: str
    settings: Sequence[str]
    nodes: int
    processes: int
    gpus: int = 0
    cpus: int = 0
    time: str = ""
    grace_seconds: float = _USUAL_GRACE_SECONDS
    options: Sequence[str] = ()
    points: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        for option in self.options:
            if not option.startswith("-") or not option.isprintable():
                raise ConfigError(
                    f"--sbatch={printable(option)}: accepted are options of sbatch, such as --sbatch=--partition=gpu"
                )
        if not self.time.isprintable() or " " in self.time:
            raise ConfigError(
                f"--time={printable(self.time)}: accepted is what sbatch takes, such as 90 (minutes) or 1-12:00:00"
            )

    @property
    def runs(self) -> list[str]:
        """Return the names of the job's runs."""
        return [f"{self.name}-{index}" for index in range(len(self.points))] or [self.name]

    def script(self, folder: Path, runs: Path) -> str:
        """Return the batch script, which starts in ``folder`` and keeps run directories in its subfolder ``runs``."""
        if not str(folder).isprintable():
            raise ConfigError(
                f"--slurm: the folder {printable(str(folder))} has control characters in its name, which end a line of "
                "the script: start from another folder"
            )
        head = [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {line}" for line in self._sbatch_options(folder, runs)),
        ]
        return "\n".join([*head, "set -euo pipefail", "", *self._variables(), "", BODY.read_text()])

    def submit(self, folder: Path, runs: Path) -> str:
        """Write the batch script into the directory of the job's run and submit it; return Slurm's job number."""
        path = runs / self.name / SCRIPT
        try:
            for name in self.runs:  # Slurm makes no folder for the log
                (folder / runs / name).mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            with replacing(folder / path) as file:
                file.write(self.script(folder, runs).encode())
        except OSError as error:
            where = printable(str(error.filename or path))
            raise ConfigError(
                f"cannot write {where}: {error.strerror}; make it writable, or start from another folder"
            ) from error
        return _sbatch(folder / path)

    def _sbatch_options(self, folder: Path, runs: Path) -> list[str]:
        """Return the options of sbatch. Each node has one task with all cores and devices of the node, because one
        torchrun starts all ranks there."""
        log = f"{runs}/{self.name}{'-%a' if self.points else ''}/{LOG}"
        grace = self.grace_seconds or _USUAL_GRACE_SECONDS
        options = {
            "job-name": self.name,
            "chdir": shlex.quote(str(folder)),
            "output": log,
            "open-mode": "append",
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            "gpus-per-node": str(self.gpus or ""),
            "cpus-per-task": str(self.cpus or ""),
            "time": self.time,
            "signal": f"B:USR1@{math.ceil(grace) + _ENDING_SECONDS}",
            "array": f"0-{len(self.points) - 1}" if self.points else "",
        }
        whole = [] if self.cpus else ["--exclusive", "--mem=0"]
        named = [f"--{key}={value}" for key, value in options.items() if value]
        return [*named, *whole, "--requeue", *self.options]

    def _variables(self) -> list[str]:
        lines = [
            f"name={shlex.quote(self.name)}",
            f"processes={self.processes}  # on each node",
            f"python={shlex.quote(sys.executable)}",
            f"settings=({shlex.join(self.settings)})",
        ]
        if self.points:
            cases = [f"{i}) settings+=({shlex.join(p)}) ;;" for i, p in enumerate(self.points)]
            chosen = ["case $SLURM_ARRAY_TASK_ID in", *(f"    {case}" for case in cases), "esac"]
            lines += [*chosen, "name+=-$SLURM_ARRAY_TASK_ID"]
        return lines


def _sbatch(path: Path) -> str:
    """Submit a script; return Slurm's job number. If Slurm refuses the script, raise :class:`ConfigError` with Slurm's
    message."""
    command = ["sbatch", "--parsable", str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SUBMIT_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(
            "--slurm: there is no sbatch here; start it where jobs are submitted, or see the script with --dry"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--slurm: sbatch has not answered for {_SUBMIT_SECONDS:g} s; see whether `sinfo` does, then submit {path}"
        ) from None
    if done.returncode != 0:
        reason = "; ".join(line for line in done.stderr.splitlines() if line) or "no reason given"
        raise ConfigError(
            f"--slurm: sbatch refuses {printable(str(path))}: {printable(reason)}; options for it are given as "
            "--sbatch=--partition=NAME"
        )
    return done.stdout.strip().partition(";")[0]
