"""The processes of a forward job, such as an evaluation: started by Parallax, or by the user's own torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallax import config as configuration
from parallax.common.signals import exit_on_request, handling_requests
from parallax.common.terminal import safe_console
from parallax.errors import PlanError
from parallax.machine.accelerators import limit_device_memory, select_device
from parallax.machine.local import choose_devices
from parallax.nodes.fitness import from_hosts
from parallax.nodes.places import Nodes
from parallax.nodes.together import broadcast_result
from parallax.run.inference import ForwardJob, ForwardRequest
from parallax.run.job import build_chain, build_loss, check_devices, local_cluster, open_source
from parallax.run.nodes import join_nodes, node_devices, share_devices
from parallax.run.planning import settle
from parallax.run.preflight import check_versions
from parallax.run.prepare import PreparedRun
from parallax.run.processes.agent import Agent, SignalForwarder
from parallax.run.processes.launch import rank_environment, start_afresh, uses_accelerator
from parallax.run.processes.rank import limits
from parallax.run.processes.together import compare_rows
from parallax.run.resume import StoredRun
from parallax.run.working import working
from parallax.runtime.evaluation import EvaluationEngine
from parallax.runtime.failure.exit_report import failure_of, follows
from parallax.runtime.failure.watch import Watch
from parallax.runtime.forward import ForwardEngine
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.source import Source, seed_generators

Engine = EvaluationEngine | ForwardEngine
Work = Callable[[ForwardJob, Any, Source, Watch], None]
"""Does the work of a rank, given a job, the engine (a :class:`ForwardEngine` for inference), the rows and the watch."""
Prepare = Callable[[Callable[[], ForwardJob]], ForwardJob]
"""Returns the job of rank 0, given the function that plans it."""
_AGAIN = "run the same command again"


def launch(job: ForwardJob, command: Sequence[str], *, own_process: bool) -> int:
    """Start the ranks of ``job``, each like ``python -m parallax COMMAND`` with the arguments ``command``, and wait for
    them. Return the exit code. ``own_process``: this process belongs to the command, so it may be replaced by a new
    one."""
    run = PreparedRun(job.directory, job.config, job.plan)
    kind = choose_devices(local_cluster(run.config)).kind
    if uses_accelerator(kind) and own_process:
        start_afresh(command)
    forwarder = SignalForwarder()
    agent = Agent(
        job.config.name,
        job.directory,
        job.plan.world_size,
        0,
        job.checkpoint.parent,
        libraries=tuple(job.config.model.libraries) if kind == "cpu" else (),
        command=tuple(command),
        again=_AGAIN,
    )
    with handling_requests(forwarder, signal.SIGQUIT):
        code = agent.start(rank_environment(run), forwarder)
    if forwarder.first and own_process:
        exit_on_request(code)
    return code


def job_of_rank(
    prepared: Path | None,
    read: Callable[[], StoredRun],
    request: Callable[[int], ForwardRequest],
    prepare: Prepare = lambda plan: plan(),
) -> ForwardJob:
    """Return the job of this rank. All ranks must call this function. The job is in the file ``prepared`` if Parallax's
    launcher started the ranks. Otherwise rank 0 plans the job for ``request(n)``, where n is the number of ranks
    (:func:`job_together`). ``read()`` returns the trained run. ``prepare(plan)`` returns the job in this case: either
    the result of ``plan()``, or the job of an earlier start."""
    if prepared is not None:
        return job_of_file(prepared)
    return job_together(read, request(int(os.environ.get("WORLD_SIZE", "1"))), prepare)


def job_together(
    read: Callable[[], StoredRun],
    request: ForwardRequest,
    prepare: Prepare = lambda plan: plan(),
) -> ForwardJob:
    """Return the job for ``request`` that rank 0 plans for all ranks. Every rank of torch's default group must call
    this function. ``read()`` returns the trained run; only rank 0 calls it. ``prepare(plan)`` is called on rank 0 and
    returns the job: either the result of ``plan()``, or the job of an earlier start."""
    nodes = Nodes.gather()
    check_versions(nodes)
    config = configuration.load(
        broadcast_result(lambda: configuration.dump(request.settings(read())))
    )
    from_hosts(lambda: check_devices(config), nodes)
    share_devices(local_cluster(config), nodes, select=True)
    present = None
    if nodes.several:
        present = join_nodes(local_cluster(config), config.swap, nodes, None).cluster

    def planned() -> dict[str, object]:
        with working(safe_console(stderr=True), "planning") as work:
            plan = partial(ForwardJob.of, read(), request, work, present=present)
            return prepare(plan).to_dict()

    return ForwardJob.from_dict(broadcast_result(planned))


def job_of_file(file: Path) -> ForwardJob:
    """Return the job in ``file``, which the launcher wrote for all ranks. All ranks must call this function."""
    job, nodes = ForwardJob.read(file), Nodes.gather()
    from_hosts(lambda: check_devices(job.config), nodes)
    share_devices(local_cluster(job.config), nodes, select=True)
    return job


def run_forwards(job: ForwardJob, watch: Watch, work: Work) -> None:
    """Open the rows of ``job`` and build this rank's engine, and call ``work(job, engine, source, watch)``, where
    ``source`` gives the rows."""
    config, nodes = job.config, Nodes.gather()
    with contextlib.ExitStack() as closing:
        device = rank_device(job, nodes, watch)
        with watch.phase("loading data"):
            source = open_source(job.read_config)
            compare_rows(source, nodes)
            if isinstance(source, IndexedSource):
                source.start()
                closing.callback(source.close)
        engine = _engine(job, device, watch)
        closing.callback(engine.close)
        watch.attend(engine, job.plan, patient_steps=1 if config.compile else 0)
        seed_generators(config.seed)
        try:
            work(job, engine, source, watch)
        except Exception as error:
            tell_others(error, watch)
            raise
        finally:
            with watch.phase("closing the engine"):
                closing.close()


def rank_device(job: ForwardJob, nodes: Nodes, watch: Watch) -> torch.device:
    """Select this rank's device, limit the memory that this rank may allocate there to the budget of the plan, set the
    time limits of ``watch``, and return the device. Raises :class:`PlanError` if the number of ranks differs from the
    plan's."""
    watch.limit(*limits(PreparedRun(job.directory, job.config, job.plan)))
    if dist.get_world_size() != job.plan.world_size:
        raise PlanError(
            f"{dist.get_world_size()} rank(s) were started, and the plan uses {job.plan.world_size}: start as many "
            "(torchrun --nproc-per-node)"
        )
    choice = node_devices(local_cluster(job.config), nodes)
    settle(choice)
    device = select_device(choice.kind, int(os.environ.get("LOCAL_RANK", "0")))
    limit_device_memory(device, job.plan.allocator_bytes(dist.get_rank()))
    return device


def tell_others(error: Exception, watch: Watch) -> None:
    """Tell the other ranks that this rank has failed, so that they do not wait for it."""
    if not follows(error):
        watch.claim(failure_of(error, watch))


def _engine(job: ForwardJob, device: torch.device, watch: Watch) -> Engine:
    infers = job.plan.task == "inference"
    with watch.phase("building the model"):
        chain = build_chain(job.read_config, job.layer)
        loss = None if infers else build_loss(job.config)
    with watch.phase("building the engine"):
        return job.build_forward(chain, device) if loss is None else job.build(chain, loss, device)
