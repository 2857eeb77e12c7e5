"""An optimizer beside the simulated device: what it brings up overlaps with what the device is given meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool


def risen_after() -> tuple[float, float]:
    """Seconds of virtual time after which new weights are on the device, and those of a kernel that the device was
    given after the step had begun, and that does not use them."""
    import threading

    import torch

    from parallax.machine.device import StreamCopies
    from parallax.swap.optimizer.host import HostOptimizer
    from tests.sim.device import SIM, C

    given = threading.Event()

    class AfterTheKernel(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert given.wait(30)
            return super().step(closure)

    weight = torch.nn.Parameter(torch.zeros(1000, device=SIM))
    weight.grad = torch.ones(1000, device=SIM)
    host = HostOptimizer(AfterTheKernel([weight], lr=1.0), [weight], copies=StreamCopies(SIM))
    other = torch.zeros(1000, 1000, device=SIM)
    given.set()
    host.commit()
    host.finish()  # pages are touched, libraries are loaded
    torch.accelerator.synchronize()
    weight.grad = torch.ones(1000, device=SIM)
    given.clear()
    C.speeds(1e9, 1e12, 1e9, 1e9, 0.0, 0.0)
    begun = C.host_seconds()
    host.commit()
    other @ other
    given.set()
    for bucket in host._buckets:
        assert bucket.future is not None
        bucket.future.result()
        for event in bucket.weights._copied_weights:  # type: ignore[attr-defined]
            event.wait_host()
    risen = C.host_seconds() - begun
    torch.accelerator.synchronize()
    computed = C.host_seconds() - begun
    C.speeds()
    host.finish()
    assert weight.tolist() == [-2.0] * 1000
    host.close()
    return risen, computed


def test_new_weights_do_not_wait_for_what_comes_after_the_step(sim_pool: Pool) -> None:
    """They waited for the blocks of the next forward that the device had been given by then: nothing overlapped."""
    ((risen, computed),) = sim_pool.run(risen_after, 1)
    assert computed == pytest.approx(2.0, rel=0.1)  # 2 GFLOP at 1 GFLOP/s
    assert risen < 0.1 * computed
