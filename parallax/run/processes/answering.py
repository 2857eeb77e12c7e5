"""One rank of a served model: compute the batches that the server sends, until it sends no more.

Each rank has a connection with the server. All ranks get all batches in the same order. Only ranks of the first stage
get the tensors, and only ranks of the last stage send outputs::

    server ──run 7, tensors──> rank 0, stage 0 ──done 7────────────> server
       └─────run 7───────────> rank 1, stage 1 ──done 7, outputs──> server
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from parallax.errors import ParallaxError, printable
from parallax.model.block import flatten, rebuild
from parallax.nodes.places import Nodes
from parallax.run.inference import ForwardJob, output_tensors
from parallax.run.job import build_chain, sample_inputs
from parallax.run.prepare import PreparedRun
from parallax.run.processes.forwards import rank_device, tell_others
from parallax.run.processes.rank import limits
from parallax.runtime.failure.watch import Watch
from parallax.runtime.forward import ForwardEngine
from parallax.serve.model import ModelFailed
from parallax.serve.wire import receive, send, short_path

_LIFE_SECONDS = 1.0  # a rank that waits wakes up as often, to show that it lives


class RequestRows:
    """A batch of requests as rows for an engine: the inputs are ``template``, with ``tensors`` in place of its slots.
    ``rows``: the number of rows. On a rank that reads no inputs there are no tensors, and only the number of rows may
    be used."""

    def __init__(self, template: Any, tensors: Sequence[Tensor], rows: int) -> None:
        self._template, self._tensors, self._rows = template, tensors, rows

    def __len__(self) -> int:
        return self._rows

    def inputs(self, start: int, stop: int) -> Any:
        return rebuild(self._template, [tensor[start:stop] for tensor in self._tensors])

    def targets(self, start: int, stop: int) -> Any:
        raise AssertionError(
            f"targets of rows {start} to {stop}: forwards without a loss read none"
        )


Connect = Callable[[], contextlib.AbstractContextManager[socket.socket]]


def answer_batches(job: ForwardJob, watch: Watch, connect: Connect) -> None:
    """Run one rank of ``job``: build its engine, connect with the server by ``connect()``, and compute batches until
    the server ends."""
    with contextlib.ExitStack() as closing:
        engine, template = _built(job, watch)
        closing.callback(engine.close)
        action, _, grace = limits(PreparedRun(job.directory, job.config, job.plan))
        watch.limit(action, 0.0, grace)  # it may wait for requests without a limit
        watch.serve()
        watch.served()  # there is nothing to save, so requests to end are left to the server
        link = closing.enter_context(connect())
        try:
            with contextlib.suppress(ConnectionError):
                send(link, introduction(engine))
                while _handled(engine, template, link):
                    pass
        except Exception as error:
            tell_others(error, watch)
            raise


def connected(path: str) -> socket.socket:
    """Return a connection with the server that listens at ``path``."""
    link = socket.socket(socket.AF_UNIX)
    with short_path(Path(path)) as address:
        link.connect(address)
    return link


def _built(job: ForwardJob, watch: Watch) -> tuple[ForwardEngine, Any]:
    """Return this rank's engine, and the structure of the model's inputs if this rank reads them."""
    device = rank_device(job, Nodes.gather(), watch)
    with watch.phase("building the model"):
        chain = build_chain(job.config)
    with watch.phase("building the engine"):
        engine = job.build_forward(chain, device, "serve")
        watch.attend(engine, job.plan, patient_steps=1 if job.config.compile else 0)
        template = flatten(sample_inputs(job.config, 2))[1] if _reads(engine) else None
        return engine, template


def _reads(engine: ForwardEngine) -> bool:
    return 0 in engine.mesh.stages


def introduction(engine: ForwardEngine) -> dict[str, Any]:
    """Return the first message of a rank: the step of its weights, and whether it reads inputs."""
    return {"step": engine.completed_steps, "reads": _reads(engine)}


def _handled(engine: ForwardEngine, template: Any, link: socket.socket) -> bool:
    """Handle the next message of the server; return False if it was the last."""
    while not select.select([link], [], [], _LIFE_SECONDS)[0]:
        pass
    message, tensors = receive(link)
    what, number = message["do"], message.get("number", 0)
    if what == "load":
        found: dict[str, Any] = {"number": number, "error": ""}
        try:
            engine.load(Path(message["checkpoint"]), averaged=message["averaged"])
        except (ParallaxError, OSError) as error:
            found["error"] = printable(str(error))
        send(link, found | {"step": engine.completed_steps})
    elif what == "run":
        _compute(engine, RequestRows(template, tensors, message["rows"]), number, link)
    return bool(what != "end")


def _compute(engine: ForwardEngine, rows: RequestRows, number: int, link: socket.socket) -> None:
    """Compute a batch, and answer with the outputs that this rank has, or with the model's exception."""
    errors = list[Exception]()
    parts = [
        (first, output_tensors(found))
        for first, found in engine.predict(rows, failed=errors.append)
    ]
    if errors:
        failed = str(ModelFailed.of(errors[0]))
        send(link, {"number": number, "error": failed, "step": engine.completed_steps})
        return
    done = {
        "number": number,
        "error": "",
        "step": engine.completed_steps,
        "fetched": engine.fetched_bytes(),
        "names": [name for name, _ in parts[0][1]] if parts else [],
        "first": [row for row, _ in parts],
    }
    send(link, done, [tensor.cpu() for _, named in parts for _, tensor in named])
