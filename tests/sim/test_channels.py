"""What is received through the host comes up beside what the device computes."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest

from tests.distributed.pool import Pool


def arrived_after() -> tuple[float, float, float]:
    """Seconds of virtual time after which a message is on the device, those of a kernel that the device was given
    before, and those until the kernel that reads the message is done."""
    import torch

    from parallax.machine.device import StreamCopies
    from parallax.runtime.channels.staging import PinnedStaging
    from tests.sim.device import SIM, C

    staging = PinnedStaging(SIM, StreamCopies(SIM))
    buffers, device_buffer = staging.buffers(), staging.device_buffer()
    lease = buffers.acquire(1000)
    lease.data.fill_(1)
    message, _ = device_buffer.upload(lease.data)
    kept = message.clone()
    device_buffer.mark_read()
    other = torch.zeros(1000, 1000, device=SIM)
    torch.accelerator.synchronize()
    C.speeds(1e9, 1e12, 1e6, 1e6, 0.0, 0.0)
    begun = C.host_seconds()
    other @ other
    lease.data.fill_(2)
    message, read = device_buffer.upload(lease.data)
    read.wait_host()
    risen = C.host_seconds() - begun
    kept += message
    device_buffer.mark_read()
    torch.accelerator.synchronize()
    done = C.host_seconds() - begun
    C.speeds()
    assert kept.tolist() == [3] * 1000
    staging.close()
    return risen, 2.0, done


def test_a_message_does_not_wait_for_what_the_device_has_to_compute(sim_pool: Pool) -> None:
    """Its copy was ordered behind all of that: nothing overlapped."""
    ((risen, computing, done),) = sim_pool.run(arrived_after, 1)
    assert risen == pytest.approx(0.001, rel=0.1)  # 1 kB at 1 MB/s
    assert done == pytest.approx(computing, rel=0.1)  # 2 GFLOP at 1 GFLOP/s


def unpinned_too_early(left: str) -> tuple[int, list[tuple[str, str]]]:
    """Bytes that stay pinned, and races, where messages go no further: their staging was ``closed``, or its owner
    ``failed`` and let go of all, or it was ``received`` into too little memory."""
    import torch

    from parallax.machine.device import StreamCopies
    from parallax.runtime.channels.group_channel import Address, GroupReceiver
    from parallax.runtime.channels.message import header_of, spec_of
    from parallax.runtime.channels.staging import PinnedStaging
    from tests.sim.device import SIM, C
    from tests.sim.pairs import gives_up
    from tests.sim.races import judge

    class Posted(Address):
        """A peer that has sent zeros before the request."""

        def receive(self, buffer: torch.Tensor) -> Any:
            tensors = [torch.zeros(16)]
            header = header_of(spec_of(tensors))
            buffer[: header.numel()].copy_(header)
            buffer[header.numel() :].zero_()
            return types.SimpleNamespace(wait=lambda: None)

    def refuse(part: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("too little")

    def work() -> None:
        staging = PinnedStaging(SIM, StreamCopies(SIM))
        if left == "received":
            with contextlib.suppress(torch.OutOfMemoryError):
                GroupReceiver(Posted(None, 0, 0), staging).receive(16, refuse)
        elif left == "closed":
            gives_up(0)
        else:
            lease = staging.buffers().acquire(1000)
            sources.append(torch.zeros(1000, dtype=torch.uint8, device=SIM))
            StreamCopies(SIM).copy(sources[0], lease.data)

    sources: list[torch.Tensor] = []
    before = C.pinned_bytes()
    error, races, _ = judge(work, lateness=1000)
    assert not error, error
    return C.pinned_bytes() - before, races


@pytest.mark.parametrize("left", ["closed", "failed", "received"])
def test_nothing_is_unpinned_under_a_copy(sim_pool: Pool, left: str) -> None:
    """An owner that fails does not wait for its copies; what is registered waits when it is collected."""
    ((bytes_left, races),) = sim_pool.run(unpinned_too_early, 1, left)
    assert not races, races[0]
    assert bytes_left == 0
