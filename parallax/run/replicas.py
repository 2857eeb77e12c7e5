"""Copies of a run's model for one server. Each copy has separate ranks.

::

    parallax serve ──┬── copy 0 ── fork server ──┬── rank 0, stage 0
      HTTP, queue    │                           └── rank 1, stage 1
                     └── copy 1 ── fork server ──┬── rank 0, stage 0
                                                 └── rank 1, stage 1

If a rank ends, the other ranks of its copy are killed, and all ranks of the copy are started again. Their unanswered
batches are computed again, by the next copy that is free. The server sets each answer once, so no request gets two
answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from parallax.common.files import temporary_folder
from parallax.common.signals import Requests
from parallax.errors import ParallaxError, printable
from parallax.machine.local import choose_devices
from parallax.run.inference import ForwardJob
from parallax.run.job import build_chain, local_cluster
from parallax.run.prepare import PreparedRun
from parallax.run.processes.forkserver import ForkServer, ServerLost
from parallax.run.processes.launch import rank_environment
from parallax.run.processes.restarts import Failure
from parallax.run.rank_group import Named, RankGroup, RankLink, RanksLost, introduced
from parallax.run.serving import RunModel
from parallax.runtime.checkpoint import step_of
from parallax.runtime.failure.exit_report import EXIT_REPORT, read_exit_report
from parallax.runtime.failure.heartbeat import Heartbeats
from parallax.serve.model import ModelFailed
from parallax.serve.tensors import RequestError
from parallax.serve.wire import short_path

LINK = "PARALLAX_SERVER_LINK"
"""The environment variable with the path of the socket of the server that started this rank."""
_ATTEMPTS = 2  # to compute a batch whose ranks end
_RETRY_SECONDS = 1  # after which a client may try again
_STARTS = 3  # that fail before a copy that has never started is given up
# After the first start that fails; twice as long after each further one.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 2.0
_END_SECONDS = 5.0  # for the ranks of a copy to end in order

Say = Callable[[str], None]


class StartFailed(ParallaxError):
    """The ranks of a copy could not be started. ``exit_code``: the exit code of the ranks."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


class Replica:
    """One copy of the model. A thread starts the ranks of the copy, and starts them again when they end.

    ``number``   the index of the copy
    ``file``     the file with the job
    ``folder``   the folder for temporary files
    ``devices``  the index of the copy's first device
    ``changed``  called, by any thread, when :attr:`free` may have changed
    ``say``      prints a line
    """

    def __init__(
        self,
        number: int,
        job: ForwardJob,
        file: Path,
        folder: Path,
        *,
        devices: int,
        changed: Callable[[], None],
        say: Say,
    ) -> None:
        self._number, self._job, self._file, self._folder = number, job, file, folder
        self._devices, self._changed, self._say = devices, changed, say
        self._group: RankGroup | None = None
        self._started = False  # once
        self._at_work, self._held, self._ending = 0, False, False
        self._failed_starts = 0
        self._lock = threading.Condition()
        self.failure: StartFailed | None = None
        """Why the copy was given up."""
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether all ranks have connected and the copy is not being closed."""
        return self._group is not None and not self._ending

    @property
    def free(self) -> int:
        """The number of further batches that the copy can take now. A copy takes at most one batch for each of its
        stages, which keeps all stages busy."""
        if self._held or not self.ready:
            return 0
        return max(0, len(self._job.plan.stages) - self._at_work)

    @property
    def step(self) -> int:
        """The training step of the weights; 0 while the copy is not ready."""
        group = self._group
        return 0 if group is None else group.step

    @property
    def fetched_bytes(self) -> int:
        group = self._group
        return 0 if group is None else group.fetched_bytes

    @property
    def at_work(self) -> int:
        """The number of batches that the copy is computing, including reserved ones."""
        return self._at_work

    def reserve(self) -> bool:
        """Reserve the copy for one batch, if it is free. Return whether it was free."""
        with self._lock:
            reserved = self.free > 0
            self._at_work += reserved
        return reserved

    def run(self, tensors: Sequence[Tensor]) -> tuple[Named, int]:
        """Return the outputs of a batch with the inputs ``tensors``, and the step of the weights that computed them.
        Call :meth:`reserve` before each call. Raises :class:`RanksLost` or :class:`ModelFailed`."""
        try:
            if (group := self._group) is None:
                raise RanksLost("the ranks have ended")
            return group.run(tensors)
        finally:
            with self._lock:
                self._at_work -= 1
                self._lock.notify_all()
            self._changed()

    def load(self, job: ForwardJob) -> str:
        """Load the checkpoint of ``job`` between two batches. Return an empty text, or the reason why the checkpoint
        cannot be loaded. A copy that is not ready loads the checkpoint when it starts."""
        try:
            with self._without_batches():
                if (group := self._group) is not None:
                    group.load(job.checkpoint, averaged=job.averaged)
        except ModelFailed as failed:
            return str(failed)
        except RanksLost:
            return ""
        return ""

    def close(self) -> None:
        """End the ranks after the batches that they are computing. Call this method only once."""
        self._ending = True
        self._changed()
        with self._without_batches():
            if (group := self._group) is not None:
                group.end()
        self._thread.join(_END_SECONDS)

    @contextlib.contextmanager
    def _without_batches(self) -> Iterator[None]:
        """A context in which the copy computes no batch and takes none. Entering it waits for the current batches."""
        try:
            with self._lock:
                self._held = True
                self._lock.wait_for(lambda: not self._at_work)
            yield
        finally:
            self._held = False
            self._changed()

    # ---- the thread

    def _keep(self) -> None:
        try:
            self._keep_ranks()
        except Exception as error:  # nobody waits for this thread
            text = f"replica {self._number}: {type(error).__name__}: {error}"
            self.failure = StartFailed(printable(text), 1)
            self._changed()

    def _keep_ranks(self) -> None:
        job = self._job
        environment = rank_environment(PreparedRun(job.directory, job.config, job.plan))
        kind = choose_devices(local_cluster(job.config)).kind
        libraries = tuple(job.config.model.libraries) if kind == "cpu" else ()
        command = ("serve", "--prepared", str(self._file))
        while not self._ending and self.failure is None:
            with ForkServer(job.directory, environment, libraries, command) as server:
                while not (self._ending or server.lost or self.failure):
                    self._attempt(server)

    def _attempt(self, server: ForkServer) -> None:
        """Start all ranks of the copy with ``server``, and wait until they have ended."""
        folder = Path(tempfile.mkdtemp(prefix=f"{self._number}-", dir=self._folder))
        ranks, report = self._job.plan.world_size, folder / "exit-report"
        heartbeats = Heartbeats(folder, ranks, Requests())
        came = threading.Event()
        with socket.socket(socket.AF_UNIX) as listener:
            with short_path(folder / "link") as address:
                listener.bind(address)
            listener.listen(ranks)
            arguments = listener, server, came
            threading.Thread(target=self._accept, args=arguments, daemon=True).start()
            try:
                server.fork([*self._environments(folder, report)])
                codes = server.wait(heartbeats.have_stopped, ending_seconds=0.0)
            except ServerLost as lost:
                failure = Failure.of_server(lost.code, heartbeats.report)
            else:
                early = heartbeats.living(rank for rank in codes if not codes[rank])
                failure = Failure.of(codes, heartbeats.report or read_exit_report(report), early)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._group = None
        self._changed()
        if not self._ending:
            self._failed(failure, came=came.is_set())

    def _failed(self, failure: Failure, *, came: bool) -> None:
        """React to the end of the ranks: print the reason, and pause before the next start if the ranks had not
        connected; or give up the copy, which sets ``failure``. ``came``: whether the ranks had connected before they
        ended."""
        self._failed_starts = 0 if came else self._failed_starts + 1
        text, code = failure.report.text, failure.report.code
        if not came and (
            not failure.may_pass or (self._failed_starts == _STARTS and not self._started)
        ):
            self.failure = StartFailed(text or "the ranks ended while they started", code)
            self._changed()
            return
        self._say(f"replica {self._number}: {text}; starting it again")
        if not came:
            time.sleep(min(_PAUSE_SECONDS * 2 ** (self._failed_starts - 1), _LONGEST_PAUSE_SECONDS))

    def _accept(self, listener: socket.socket, server: ForkServer, came: threading.Event) -> None:
        """Wait until all ranks have connected to ``listener``. Then set ``came``: this copy can compute."""
        links = list[RankLink]()
        try:
            while len(links) < self._job.plan.world_size:
                links.append(introduced(listener.accept()[0]))
        except OSError:  # a rank has ended, or all of them
            return
        group = RankGroup(links, lambda: self._lost(server))
        self._group, self._started = group, True
        group.start()
        came.set()
        self._changed()

    def _lost(self, server: ForkServer) -> None:
        """Kill the remaining ranks after one rank has ended."""
        self._group = None
        self._changed()
        if not self._ending:
            server.signal(signal.SIGKILL)

    def _environments(self, folder: Path, report: Path) -> Iterator[dict[str, str]]:
        size = self._job.plan.world_size
        for rank in range(size):
            yield {
                "RANK": str(rank),
                "LOCAL_RANK": str(self._devices + rank),
                "ROLE_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "ROLE_WORLD_SIZE": str(size),
                "GROUP_WORLD_SIZE": "1",
                "TORCHELASTIC_RUN_ID": self._job.config.name,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json"),
                "PARALLAX_RENDEZVOUS": str(folder / "ranks"),
                EXIT_REPORT: str(report),
                LINK: str(folder / "link"),
            }


class Replicas(RunModel):
    """The model of ``job``, computed by several copies. :meth:`scale` sets the number of copies; it is at most
    ``most``. ``say`` prints a line."""

    def __init__(self, job: ForwardJob, say: Say) -> None:
        super().__init__(job, build_chain(job.config))
        self.most = self.replicas = job.config.serve.replicas
        self._say = say
        self._closing = contextlib.ExitStack()
        self._folder = self._closing.enter_context(temporary_folder())
        self._file = self._folder / "job.json"
        self._write(job)
        self._lock, self._calls = threading.Condition(), list[Callable[[], None]]()
        self._copies = dict[int, Replica]()
        self._scaling, self._closed = threading.Lock(), False
        self._scale()

    @property
    def capacity(self) -> int:  # type: ignore[override]
        each = [copy for copy in [*self._copies.values()] if copy.ready]
        return sum(copy.free + copy.at_work for copy in each)

    @property
    def ready(self) -> int:  # type: ignore[override]
        return sum(copy.ready for copy in [*self._copies.values()])

    @property
    def fetched_bytes(self) -> int:  # type: ignore[override]
        return sum(copy.fetched_bytes for copy in [*self._copies.values()])

    @property
    def step(self) -> int:
        """The training step of the newest weights that a copy has loaded."""
        return max((copy.step for copy in [*self._copies.values()]), default=0)

    @property
    def failure(self) -> StartFailed | None:  # type: ignore[override]
        found = [copy.failure for copy in [*self._copies.values()]]
        return found[-1] if found and all(found) else None

    def on_change(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def wait_until_ready(self) -> None:
        """Wait until all copies have started. Raises :class:`StartFailed` if one of them has been given up, because its
        ranks could not be started."""

        def started() -> bool:
            for copy in self._copies.values():
                if copy.failure is not None:
                    raise copy.failure
            return all(copy.ready for copy in self._copies.values())

        with self._lock:
            while not started():
                self._lock.wait(1.0)

    def compute(self, tensors: Sequence[Tensor]) -> tuple[Named, int]:
        """Return the outputs of a batch with the inputs ``tensors``, and the step of the weights that computed them. If
        the ranks that compute the batch end, the batch is computed once more. Raises :class:`ModelFailed`, or
        :class:`RequestError` if the ranks end again."""
        for _ in range(_ATTEMPTS):
            copy = self._free_copy()
            try:
                return copy.run(tensors)
            except RanksLost:
                continue
        raise RequestError(503, "the ranks that computed it ended", _RETRY_SECONDS)

    def scale(self, replicas: int) -> None:
        """Start or stop copies until ``replicas`` run. Returns at once. A copy that stops first completes its
        batches."""
        self.replicas = replicas
        threading.Thread(target=self._scale, daemon=True).start()

    def load(self, job: ForwardJob) -> str:
        """Load the checkpoint of ``job`` in one copy after the other. Return an empty text, or the reason of the first
        copy that cannot load it. In this case, copies that start later load the previous checkpoint."""
        with self._scaling:
            before = self._job
            self._write(job)  # copies that start from now on load it
            for copy in [*self._copies.values()]:
                if reason := copy.load(job):
                    self._write(before)
                    return reason
        return ""

    @property
    def outdated(self) -> bool:  # type: ignore[override]
        step = step_of(self._job.checkpoint)
        return any(copy.ready and copy.step != step for copy in [*self._copies.values()])

    def _write(self, job: ForwardJob) -> None:
        new = self._file.with_suffix(".new")
        new.unlink(missing_ok=True)
        job.write(new)
        os.replace(new, self._file)
        self._job = job

    def close(self) -> None:
        """End all ranks."""
        self._closed = True
        with self._scaling:
            threads = [threading.Thread(target=c.close, daemon=True) for c in self._copies.values()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * _END_SECONDS)
        self._closing.close()

    def _scale(self) -> None:
        with self._scaling:
            while len(self._copies) > self.replicas and not self._closed:
                copy = self._copies[max(self._copies)]
                copy.close()
                del self._copies[max(self._copies)]
            while len(self._copies) < self.replicas and not self._closed:
                number = len(self._copies)
                self._copies[number] = Replica(
                    number,
                    self._job,
                    self._file,
                    self._folder,
                    devices=number * self._job.plan.world_size,
                    changed=self._changed,
                    say=self._say,
                )
        self._changed()

    def _free_copy(self) -> Replica:
        """Reserve the free copy that computes the fewest batches, and return it. If no copy is free, wait for one."""
        with self._lock:
            while not self._closed:
                for copy in sorted([*self._copies.values()], key=lambda each: each.at_work):
                    if copy.reserve():
                        return copy
                self._lock.wait(1.0)
        raise RequestError(503, "the server ends")

    def _changed(self) -> None:
        with self._lock:
            self._lock.notify_all()
        for call in self._calls:
            call()
