"""Asynchronous replicas of which one is killed within an interval: the others complete its updates, with each share
once."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallax.nodes.together import among
from parallax.runtime.asynchronous import Interval
from parallax.runtime.batch import TensorRows
from parallax.runtime.replicas.asynchronous import BatchShare, Use, _Links
from parallax.runtime.replicas.config import ReplicasConfig
from tests.distributed.agent import agents_store, running
from tests.distributed.pool import Pool
from tests.distributed.test_asynchronous import (
    FOUR,
    ONE,
    STEPS_HERE,
    Late,
    Trained,
    replayed,
    weights_after,
)
from tests.distributed.test_engine import Case, Outcome, compare, gpt

CASE = Case(gpt(tied=False), sizes=(8, 8, 8, 8, 7, 6, 8, 5), together=FOUR)
LAST = 2  # from this update on, the victim is killed
PATIENCE_SECONDS = 90


class Deadly(TensorRows):
    """Rows whose reader is killed."""

    def __init__(self, batch: TensorRows, die: Callable[[], None]) -> None:
        super().__init__(batch.inputs(0, len(batch))[0], batch.targets(0, len(batch)))
        self._die = die
        self.row_numbers = 0  # so that the comparison of rows between ranks does not read them

    def inputs(self, start: int, stop: int) -> tuple[Tensor, ...]:
        self._die()
        return super().inputs(start, stop)

    def targets(self, start: int, stop: int) -> Any:
        self._die()
        return super().targets(start, stop)


def deadly(batches: Sequence[TensorRows], place: str, path: Path) -> list[TensorRows]:
    """Batches of a rank that is killed: in the first share of a late update, between two of its gradients, or after it
    has asked for the share after it. Then ``path`` exists."""
    reached = []

    def die() -> None:
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def reach() -> None:
        reached.append(True)

    plain_gradients, plain_weights = _Links.send_gradients, _Links.receive_weights

    def send_gradients(links: _Links, gradients: Sequence[Tensor]) -> None:
        plain_gradients(links, gradients[:2])
        if reached and place == "gradients":
            die()
        plain_gradients(links, gradients[2:])

    def receive_weights(links: _Links) -> tuple[int, int]:
        if reached and place == "weights":
            die()
        return plain_weights(links)

    _Links.send_gradients, _Links.receive_weights = send_gradients, receive_weights  # type: ignore[method-assign]
    action = die if place == "share" else reach
    return [Deadly(each, action) if n >= LAST else each for n, each in enumerate(batches)]


def rank_of_world(
    connection: Connection, port: int, rank: int, case: Case, victims: dict[int, str], folder: Path
) -> None:
    """One rank. ``victims``: rank → place of its death. The replicas without a victim wait for each death in an update
    after the first that a victim can reach; the victim's own must not, because it may compute no share before."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
    connection.send(os.getpid())
    engine = case.engine(folder / str(rank))
    batches: list[TensorRows] = list(case.batches())
    if rank in victims:
        batches = deadly(batches, victims[rank], folder / f"dies-{rank}")
    replica_of = {each: engine.mesh.plan.coordinate(each).replica for each in range(case.world)}
    for number, victim in enumerate(victims, LAST + 1):
        if replica_of[rank] not in {replica_of[each] for each in victims}:
            batches[number] = Late(batches[number], folder / f"dies-{victim}", None)
    sending = threading.Lock()

    def watch() -> None:
        while True:
            lost = engine.lose(connection.recv())
            with sending:
                connection.send([*lost])

    if rank == 0:
        threading.Thread(target=watch, daemon=True).start()
    waiting = iter(batches[1:])
    interval = Interval(
        STEPS_HERE, partial(next, waiting), lambda: False, lambda *_: None, outlives=True
    )
    results = engine.steps(batches[0], interval)
    assert engine.lost
    with among(engine.mesh.pipeline):
        engine.saving.save(
            folder / "checkpoints", engine.completed_steps, {"state": {"mine": 1}, "metrics": {}}
        )
    weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    outcome = Outcome([r.loss for r in results], [r.gradient_norm for r in results], weights)
    uses = [(tuple(use.share), use.replica, use.version) for use in engine._shares.uses]
    with sending:
        torch.save((outcome, uses), folder / f"trained-{rank}")
        connection.send("done")
    threading.Event().wait()


def survivors(case: Case, victims: dict[int, str], folder: Path) -> list[Trained]:
    """What the owners have trained, when the watch of rank 0 is replaced by this process."""
    with agents_store() as port, ExitStack() as stack:
        ends = [
            stack.enter_context(running(rank_of_world, port, rank, case, victims, folder))
            for rank in range(case.world)
        ]
        pids = [end.recv() for end in ends]
        owners = case.world // case.options["replicas"][0]
        replicas = case.options["replicas"][0]
        due = {ends[stage * replicas] for stage in range(owners)}
        alive = set(ends)
        while due:
            ready = wait(alive, PATIENCE_SECONDS)
            assert ready, "the owners do not end their interval"
            for end in ready:
                try:
                    message: Any = end.recv()
                except (EOFError, ConnectionError):
                    alive.discard(end)
                    assert end not in due
                    ends[0].send(ends.index(end))
                    continue
                if message == "done":
                    due.discard(end)
                    continue
                assert message, "the first owner does not continue"
                for rank in message:
                    with suppress(ProcessLookupError):
                        os.kill(pids[rank], signal.SIGKILL)
    found = []
    for stage in range(owners):
        outcome, uses = torch.load(folder / f"trained-{stage * replicas}", weights_only=False)
        uses = [Use(BatchShare(*share), replica, version) for share, replica, version in uses]
        found.append(Trained(outcome, uses, {}, stage, 0))
    return found


# On a busy machine, a victim may ask for its first share when the waiting replicas hold all that may begin.
@pytest.mark.thorough
@pytest.mark.parametrize("rule", [ONE, FOUR], ids=["1", "4"])
@pytest.mark.parametrize("place", ["share", "gradients", "weights"])
@pytest.mark.parametrize(
    ("replicas", "victims"),
    [((2,), [1]), ((3,), [2]), ((3,), [1, 2]), ((2, 2), [1]), ((2, 2), [3])],
    ids=str,
)
def test_updates_have_each_share_once(
    pool: Pool,
    tmp_path: Path,
    replicas: tuple[int, ...],
    victims: list[int],
    place: str,
    rule: ReplicasConfig,
) -> None:
    case = replace(CASE, together=rule).under(replicas)
    found = survivors(case, dict.fromkeys(victims, place), tmp_path)
    for owner in found:
        shares = Counter(use.share for use in owner.uses)
        assert shares == Counter((u, p) for u in range(STEPS_HERE) for p in range(replicas[0]))
        assert all(0 <= use.staleness <= rule.staleness for use in owner.uses)
    # Of a share that is computed twice, the versions of the other stages are unknown.
    if len({tuple(sorted((u.share, u.replica) for u in owner.uses)) for owner in found}) == 1:
        plain = replayed(case, found, replicas[0])
        compare([owner.outcome for owner in found], plain, 1e-9)
    loaded = pool.run(weights_after, case.world, case, tmp_path, 0, False)
    for weights in loaded:
        for owner in found:
            for name in owner.outcome.weights.keys() & weights.keys():
                assert torch.equal(weights[name], owner.outcome.weights[name])
