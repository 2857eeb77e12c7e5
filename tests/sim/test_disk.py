"""The disk tier of an accelerator: what is on the host already has nothing to do with the device."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.distributed.pool import Pool


def host_bytes() -> tuple[bool, dict[str, int]]:
    """Whether bytes of host memory come back while the device is busy, and the calls of its runtime meanwhile."""
    import torch

    from parallax.machine.device import StreamCopies
    from parallax.swap.stores.store import DiskStore
    from tests.sim.device import SIM, C

    data = torch.arange(10**6, dtype=torch.int32).view(torch.uint8)
    target = torch.zeros_like(data)
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(Path(folder) / "swap", 2**24, StreamCopies(SIM), threads=1)
        torch.zeros(1000, device=SIM).add_(1)
        torch.accelerator.synchronize()
        C.reset()
        slot, pending = store.write(data)
        pending.wait()
        store.read(slot, target).wait()
        requested = dict(C.counts())
        store.close()
    return torch.equal(data, target), requested


def test_states_of_the_host_do_not_wait_for_the_device(sim_pool: Pool) -> None:
    """An optimizer on the host waited for all that the device had been given, with each piece of its states."""
    ((same, requested),) = sim_pool.run(host_bytes, 1)
    assert same
    assert not [what for what in requested if "sync" in what], requested
