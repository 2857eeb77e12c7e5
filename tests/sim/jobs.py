"""What a worker of a pool runs: its imports give the simulated accelerator to that process for good."""

from __future__ import annotations

from typing import Any


def scenario(name: str, lateness: int = 2) -> Any:
    """A part of the swap."""
    from tests.sim.midway import ALL
    from tests.sim.races import judge

    return tuple(judge(ALL[name], lateness=lateness))


def engine(*args: Any, **options: Any) -> Any:
    """A rank of an engine."""
    from tests.sim.engines import train

    ran = train(*args, **options)
    return ran._replace(verdict=tuple(ran.verdict))._asdict()


def scenario_names() -> list[str]:
    from tests.sim.midway import ALL

    return list(ALL)


def missing_wait() -> Any:
    """A copy that does not wait for who used its target's block before."""
    import torch

    from parallax.machine.device import DoneEvent, StreamCopies
    from tests.sim.device import SIM
    from tests.sim.races import judge

    def copy() -> None:
        copies = StreamCopies(SIM)
        source = torch.zeros(1000, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(1000, dtype=torch.uint8, device=SIM)
        copies.copy(source, target, DoneEvent()).wait_host()

    return tuple(judge(copy))


def timed() -> Any:
    """Steps in virtual time."""
    from tests.sim.timed import figures

    return figures()


def stalls() -> tuple[int, int]:
    """How many are known of three waits that nobody asked for, and of three others."""
    import torch

    from parallax.machine.device import StreamCopies
    from tests.sim.device import SIM, C

    C.configure(lateness=9)
    copies = StreamCopies(SIM)
    source = torch.zeros(1000, dtype=torch.uint8, pin_memory=True)
    counts = []
    for _ in range(2):
        for _ in range(3):
            copies.copy(source, torch.empty(1000, dtype=torch.uint8, device=SIM)).wait_stream()
        counts.append(len(copies.take_stalls()))
    torch.accelerator.synchronize()
    return counts[0], counts[1]
