"""What is received through the host comes up beside what the device computes."""

from __future__ import annotations

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
    buffers, landing = staging.buffers(), staging.landing()
    lent = buffers.take(1000)
    lent.data.fill_(1)
    message, _ = landing.up(lent.data)
    kept = message.clone()
    landing.left()
    other = torch.zeros(1000, 1000, device=SIM)
    torch.accelerator.synchronize()
    C.speeds(1e9, 1e12, 1e6, 1e6, 0.0, 0.0)
    begun = C.host_seconds()
    other @ other
    lent.data.fill_(2)
    message, read = landing.up(lent.data)
    read.wait_host()
    risen = C.host_seconds() - begun
    kept += message
    landing.left()
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
