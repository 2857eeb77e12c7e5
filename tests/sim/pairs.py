"""What two ranks do with each other on simulated devices, for mutants: each in a process of its own, both in one order.

A rank that finds a fault reports it and ends; the parent process ends the other rank.
"""

from __future__ import annotations

import datetime
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax import mesh
from parallax.machine.accelerators import register_accelerator
from parallax.machine.device import StreamCopies
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.runtime.channels.direct_channel import DirectReceiver, DirectSender
from parallax.runtime.channels.group_channel import (
    Address,
    GroupReceiver,
    GroupSender,
)
from parallax.runtime.channels.staging import Lease, PinnedStaging
from parallax.runtime.engine import Engine
from tests.plans import described, make_plan
from tests.sim import group, stumbling
from tests.sim.device import SIM, C
from tests.sim.engines import SEQUENCE, Apart, Shared, batch, train
from tests.sim.races import judge

MESSAGES, AHEAD, SIZE = 16, 2, 64 * 1024
GROWING = 2, 3, 5  # times as long, at last: longer than any before
MANY = 40, 90, 60  # tensors, of whose headers each is long and unlike the one before
_QUIET_SECONDS = 0.3  # in which a sender that does not wait has sent everything
_SLOW_MICROSECONDS = 20_000  # for each wait for a copy
_PATIENCE = datetime.timedelta(seconds=15)
_STEPS = 5
_APART = 1e-6  # relative; rows of a replica are summed in another order
_OFFLOADED: dict[str, Any] = {"optimizer_offload": 1.0, "parameter_offload": 1.0}


@cache
def on_a_cpu() -> list[float]:
    """The losses of one rank; computed before there are two."""
    return train("cpu", (1,), {}, steps=_STEPS).losses


def trains(
    replicas: Sequence[int],
    options: dict[str, Any],
    *,
    direct: bool,
    slow: bool = False,
) -> Callable[[int], None]:
    """As a CPU does; ``slow``: threads wait long for copies, so that what they do comes late."""

    def run(rank: int) -> None:
        del rank
        C.sync_micros(_SLOW_MICROSECONDS if slow else 0)
        ran = train("sim", replicas, options, direct=direct, lateness=9, steps=_STEPS)
        C.sync_micros(0)
        assert ran.verdict.good, ran.verdict.error or ran.verdict.races[0][0]
        for one, other in zip(ran.losses, on_a_cpu(), strict=True):
            assert abs(one - other) <= _APART * abs(other), f"{ran.losses} are not {on_a_cpu()}"

    return run


def stumbles(rank: int) -> None:
    """Replicas fail in a step's last backward, on their own sides of a block."""
    del rank
    stumbling.stumbles(stumbling.on_a_cpu(), (2,), _OFFLOADED, direct=True)


def leaves_early(*, direct: bool) -> Callable[[int], None]:
    """The first rank has given away all it has, and closes, before the second looks at it."""

    def run(rank: int) -> None:
        register_accelerator(Apart() if direct else Shared("sim", "", group.NAME))
        chain = described(GPTConfig(layers=4, hidden=64, heads=4, sequence=SEQUENCE).build)
        plan = make_plan(chain, replicas=(1, 1), tier="host", microbatch=1)
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine.build(chain, plan, loss=GPT.loss, device=SIM, scratch=Path(folder))
            if rank == 1:
                time.sleep(_QUIET_SECONDS)
            # Copies down come late; without any, a wait would be time in which all is sent after all.
            C.sync_micros(_SLOW_MICROSECONDS if rank == 0 and not direct else 0)
            parts = engine.predict(batch())
            found = [output.abs().sum().item() for _, output in parts]
            engine.close()
            C.sync_micros(0)
            del engine
            gc.collect()
        dist.barrier()
        assert len(found) == (8 if rank else 0), f"{len(found)} parts of 8"
        assert all(0 < value < float("inf") for value in found), found

    return run


def sends(*, direct: bool) -> Callable[[int], None]:
    """Messages arrive as they were, whatever they are made of, and a sender whose peer is behind waits: no more memory
    is held than that of the messages that may be under way."""

    def run(rank: int) -> None:
        device = dist.new_group([0, 1], backend=group.NAME, timeout=_PATIENCE)
        world, peer = dist.group.WORLD, 1 - rank
        staging = PinnedStaging(SIM, StreamCopies(SIM))
        variants = Address(device, peer, 5), Address(world, peer, 6)
        if rank == 0:
            most = _send(
                DirectSender(*variants, SIM, AHEAD)
                if direct
                else GroupSender(variants[1], staging, AHEAD),
                staging,
                C.pinned_bytes if not direct else lambda: torch.accelerator.memory_allocated(SIM),
            )
            bound = (AHEAD + 2 if direct else AHEAD + 6) * (SIZE + 1024)
            assert most <= bound, f"{most} bytes are held for messages, where {bound} may be"
            pinned = C.counts().get("pinned allocations", 0)
            assert not pinned, f"{pinned} buffers were pinned by torch, in powers of two"
        else:
            time.sleep(_QUIET_SECONDS)
            receiver = (
                DirectReceiver(*variants, SIM) if direct else GroupReceiver(variants[1], staging)
            )
            for number in range(MESSAGES):
                (found,) = receiver.receive(1)
                assert torch.equal(found.cpu(), _message(number)[0].cpu()), f"message {number}"
            for times in GROWING:
                (found,) = receiver.receive(1)
                assert torch.equal(found.cpu(), _message(times, times)[0].cpu()), f"{times} times"
            for count in MANY:
                many = receiver.receive(1)
                assert [int(each.sum()) for each in many] == [*range(count)], f"{count} tensors"
        dist.barrier()
        staging.close()

    return run


def gives_up(rank: int) -> None:
    """Closes while the peer takes nothing, the copies down are under way, and messages wait for both."""
    del rank
    staging, taken = PinnedStaging(SIM, StreamCopies(SIM)), threading.Event()
    buffers = staging.buffers()

    def post(lease: Lease) -> None:
        taken.wait()
        buffers.release([lease])

    for number in range(3):
        lease = buffers.acquire(1000)
        source = torch.full((1000,), number, dtype=torch.uint8, device=SIM)
        staging.send([source], [lease.data], partial(post, lease))
        del lease, source
    staging.close()
    taken.set()
    for thread in threading.enumerate():
        if thread.name.startswith("parallax-send"):
            thread.join()


def _message(number: int, times: int = 1) -> list[Tensor]:
    return [torch.full((1, times * SIZE // 4), float(number), device=SIM)]


def _send(
    sender: DirectSender | GroupSender, staging: PinnedStaging, held: Callable[[], int]
) -> int:
    """All of them, longer ones, and some of many tensors; the most bytes ``held`` at one time for all but those."""
    most, before = 0, held()
    for number in range(MESSAGES):
        sender.send(_message(number), 1)
        most = max(most, held() - before)
    for times in GROWING:
        sender.send(_message(times, times), 1)
    for count in MANY:
        sender.send([torch.full((1, 1), number, device=SIM) for number in range(count)], 1)
    staging.drain()
    sender.flush()
    return most


PAIRS: dict[str, Callable[[int], None]] = {
    "sends direct": sends(direct=True),
    "sends staged": sends(direct=False),
    "leaves early direct": leaves_early(direct=True),
    "leaves early staged": leaves_early(direct=False),
    "gives up": gives_up,
    "trains direct": trains((1, 1), {"directive": "offload"}, direct=True),
    "trains staged": trains((1, 1), {"directive": "offload"}, direct=False),
    "replicas": trains((2,), {"optimizer_offload": 1.0, "microbatch": 1}, direct=False, slow=True),
    "replicas offloaded": trains((2,), _OFFLOADED, direct=True),
    "replicas breadth-first": trains(
        (2,), {**_OFFLOADED, "schedule": "breadth-first", "interleave": 6}, direct=True
    ),
    "replicas split": trains((2,), {**_OFFLOADED, "schedule": "zb-h1"}, direct=True),
    "replicas stumble": stumbles,
}


def run_all(rank: int, store: str) -> str:
    """What is wrong first; '' if nothing is."""
    on_a_cpu()
    stumbling.on_a_cpu()
    mesh.TIMEOUT = _PATIENCE
    met = dist.FileStore(store, 2)
    met.set(f"here {rank}", "")
    met.wait(["here 0", "here 1"], datetime.timedelta(minutes=5))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("world", met), rank=rank, world_size=2, timeout=_PATIENCE
    )
    for name, pair in PAIRS.items():
        verdict = judge(lambda: pair(rank), lateness=9)  # noqa: B023
        if not verdict.good:
            return f"{name}: {verdict.error or verdict.races[0][0]}"
    return ""
