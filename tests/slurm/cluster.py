"""A real Slurm on this machine: munged, slurmctld and a slurmd for each of three nodes, on ports of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

NODES = ("node1", "node2", "node3")
DAEMONS = ("munged", "slurmctld", "slurmd")
START_SECONDS = 30.0
CALL_SECONDS = 30.0
END_SECONDS = 20.0
SHOWN = 3000  # characters of each log that a failure shows
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}

# The nodes of the partition gpu are no machines; they only have something to tell.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=DEFAULT CPUs=2 RealMemory=4000 Gres=gpu:l4:2
NodeName={nodes} NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[3]}]
NodeName=h[1-2] NodeAddr=127.0.0.1 Port={ports[4]} CPUs=96 RealMemory=2000000 Gres=gpu:h100:8 State=DOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=h[1-2] MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=_path()) is None]
    if absent:
        return (
            f"no {', '.join(absent)} here: `make test-slurm` as root installs slurm-wlm and munge"
        )
    return "" if os.geteuid() == 0 else "slurmd starts jobs as their users: needs root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Slurm:
    """Started by :meth:`start`; all of it is gone after :meth:`close`."""

    def __init__(self) -> None:
        # Short: a socket's path has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all; idle when it returns."""
        self._write()
        munge = self.folder / "munge"
        self._run(
            "munged",
            "--foreground",
            "--force",  # folders above that only root may enter
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        self.wait_for((munge / "socket").exists, "munged", START_SECONDS)
        self._run("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_for(self._idle, "three idle nodes", START_SECONDS)

    def start_node(self, node: str) -> None:
        """Start its slurmd."""
        self._run("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node: str) -> None:
        """As when its power fails: all its processes end, without a message."""
        daemon = self._processes.pop(node)
        daemon.kill()
        daemon.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    for each in (*process.parents(), process):
                        if each == process or each.name().startswith("slurmstepd"):
                            each.kill()

    def return_node(self, node: str) -> None:
        """Its power is back."""
        self.start_node(node)
        self.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_for(self._idle, "three idle nodes", START_SECONDS)

    def close(self) -> None:
        """End all jobs and daemons, and remove the files."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.cancel_all()
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
        for child in psutil.Process().children():  # of slurmd's own, which this process has adopted
            with contextlib.suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE and child.name() == "slurmstepd":
                    child.wait(0)
        shutil.rmtree(self.folder)

    def call(self, *command: str, seconds: float = CALL_SECONDS, **added: str) -> str:
        """What one of Slurm's commands prints; it must end well."""
        found = subprocess.run(
            command,
            env={**os.environ, "PATH": _path(), **self.environment, **added},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        assert found.returncode == 0, f"{command}: {found.stderr}\n{self.logs()}"
        return found.stdout

    def job(self, number: str) -> Mapping[str, str]:
        """What ``scontrol`` knows of a job."""
        fields = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in fields if "=" in word)

    def wait_for_job(self, number: str, log: Path, seconds: float) -> Mapping[str, str]:
        """The job at its end, but for one that goes back into the queue."""
        found: Mapping[str, str] = {}

        def ended() -> bool:
            nonlocal found
            found = self.job(number)
            return found["JobState"] in ENDED

        self.wait_for(ended, f"the end of job {number}", seconds, log)
        return found

    def wait_for(
        self, condition: Callable[[], bool], what: str, seconds: float, log: Path | None = None
    ) -> None:
        """Wait so long at most, and show everybody's logs where it was in vain."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}\n{self.logs(log)}"
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """End every job; nothing of it runs when it returns."""
        self.call("scancel", "--user=root")
        # Jobs of a node that is down, or which wait for it, say nothing any more.
        self.wait_for(lambda: not self.call("squeue", "--noheader"), "no job", END_SECONDS)

    def logs(self, job: Path | None = None) -> str:
        """The ends of all logs."""
        files = [*sorted(self.folder.glob("*.log")), *sorted(self.folder.glob("*.out"))]
        files += [job] if job is not None and job.exists() else []
        return "\n".join(f"== {file}\n{file.read_text()[-SHOWN:]}" for file in files)

    def _write(self) -> None:
        for name in ("munge", "state", *(f"{node}.spool" for node in NODES)):
            (self.folder / name).mkdir()
        self.folder.chmod(0o711)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            nodes=f"node[1-{len(NODES)}]",
            ports=_free_ports(2 + len(NODES)),
        )
        (self.folder / "slurm.conf").write_text(text)
        # Slurm counts devices that are there, whatever they are; ranks do not know these.
        gpus = f"NodeName=node[1-{len(NODES)}] Name=gpu Type=l4 File=/dev/null,/dev/zero\n"
        (self.folder / "gres.conf").write_text(gpus)

    def _run(self, *command: str, name: str = "") -> None:
        with (self.folder / f"{name or command[0]}.out").open("wb") as out:
            self._processes[name or command[0]] = subprocess.Popen(
                command,
                env={**os.environ, "PATH": _path(), **self.environment},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def _idle(self) -> bool:
        found = subprocess.run(
            ["sinfo", "--noheader", "--partition=main", "--Node", "--format=%T"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_SECONDS,
        )
        return found.stdout.split() == ["idle"] * len(NODES)


def _free_ports(count: int) -> list[int]:
    """Unused ports, below those that the kernel gives to connections."""
    for first in range(17000, 20000, count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return list(range(first, first + count))
    raise AssertionError("no free ports from 17000 to 20000")
