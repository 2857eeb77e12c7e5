"""What a worker of a pool runs: its imports give the simulated accelerator to that process for good."""

from __future__ import annotations

from typing import Any


def scenario(name: str, lateness: int = 2) -> Any:
    """A part of the swap."""
    from tests.sim.races import judge
    from tests.sim.scenarios import SCENARIOS

    return tuple(judge(SCENARIOS[name], lateness=lateness))


def engine(*args: Any, **options: Any) -> Any:
    """A rank of an engine."""
    from tests.sim.engines import train

    ran = train(*args, **options)
    return ran._replace(verdict=tuple(ran.verdict))._asdict()


def recurrent(options: dict[str, Any]) -> Any:
    """An RNN."""
    from tests.sim.engines import recurrent

    return recurrent(options)


def scenario_names() -> list[str]:
    from tests.sim.scenarios import SCENARIOS

    return list(SCENARIOS)


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


def pair(name: str) -> Any:
    """One of two ranks."""
    import torch.distributed as dist

    from tests.sim.pairs import PAIRS
    from tests.sim.races import judge

    rank = dist.get_rank()
    return tuple(judge(lambda: PAIRS[name](rank)))


def never_stumbles() -> list[float]:
    """The losses of a CPU whose steps do not fail."""
    from tests.sim.stumbling import on_a_cpu

    return on_a_cpu()


def stumbles(expected: list[float], replicas: Any, options: Any, *, direct: bool) -> Any:
    """A rank whose steps fail in their last backwards: what was noticed, and states of buckets."""
    from tests.sim import stumbling
    from tests.sim.races import judge

    states: set[str] = set()

    def run() -> None:
        states.update(stumbling.stumbles(expected, replicas, options, direct=direct))

    return tuple(judge(run, lateness=9)), states


def timed() -> Any:
    """Steps in virtual time."""
    from tests.sim.timed import figures

    return figures(layers=3)


def offloading() -> tuple[float, float]:
    """The result of an offload micro-benchmark, in virtual time."""
    from tests.sim.timed import offloading

    return offloading()


def wide_inputs() -> Any:
    """Steps in virtual time of a model with many inputs."""
    from tests.sim.wide_inputs import figures

    return figures()


def stalls() -> tuple[int, int]:
    """Return the counts of three waits without a caller, and of three others."""
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


def two_threads() -> list[bool]:
    """Whether each of two threads, on streams of their own, is still there after a copy beside the other's."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from parallax.machine.device import StreamCopies
    from tests.sim.device import SIM

    entered, left, second = threading.Event(), threading.Event(), threading.local()

    def hold() -> float:
        """The first is inside when the second enters, and leaves before it."""
        if getattr(second, "here", False):
            both.wait(60)
            left.wait(60)
        else:
            entered.set()
            both.wait(60)
        return 0.0

    both = threading.Barrier(2)
    copies = StreamCopies(SIM, hold)

    def copy(last: bool) -> bool:
        second.here = last
        mine = torch.Stream(SIM)
        if last:
            entered.wait(60)
        with mine:
            copies.copy(torch.ones(4, device=SIM), torch.empty(4, pin_memory=True)).wait_host()
            found = torch.accelerator.current_stream(SIM)
        left.set()
        return found == mine

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(copy, (False, True))]


def loop(tier: str, steps: int) -> dict[str, Any]:
    """A plain loop in a ``parallax.swap`` scope; the bytes on the device, and of pinned memory, after each step."""
    import tempfile

    import torch
    from torch import nn

    from tests.sim.device import SIM, C
    from tests.sim.midway import scope_around, take_step
    from tests.sim.races import judge
    from tests.sim.swapping import Block, adamw

    held: list[tuple[int, int]] = []

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(4)]).to(SIM)
        optimizer = adamw(model.parameters())
        with (
            tempfile.TemporaryDirectory() as folder,
            scope_around(model, optimizer, tier, folder, free_bytes=128 * 1024) as scope,
        ):
            for seed in range(steps):
                take_step(model, optimizer, seed)
                held.append((torch.accelerator.memory_allocated(SIM), C.pinned_bytes()))
            assert scope.states[0].bytes_out > 0, scope.report()
            assert scope.statistics.bytes_out > 0, scope.report()

    verdict = judge(run)
    device, pinned = zip(*held)
    return {"verdict": tuple(verdict), "allocated_bytes": device, "pinned_bytes": pinned}


def events_made() -> tuple[int, int]:
    """How many events two hundred copies down and up make, and the result when all are queried at the end."""
    import torch

    from parallax.machine.device import StreamCopies
    from tests.sim.device import SIM
    from tests.sim.races import judge

    made, plain = 0, torch.Event

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return plain(*args, **options)

    torch.Event = counted  # type: ignore[misc, assignment]

    def copy() -> None:
        copies = StreamCopies(SIM)
        host = torch.zeros(1000, dtype=torch.uint8, pin_memory=True)
        for number in range(100):
            device = torch.full((1000,), number, dtype=torch.uint8, device=SIM)
            copies.copy(device, host).wait_host()
            event = copies.copy(host, device)
            event.wait_stream()
            assert device.cpu().eq(number).all()
            event.wait_host()
            assert event.done()

    try:
        error, races, _ = judge(copy)
    finally:
        torch.Event = plain  # type: ignore[misc]
    assert not error, error
    return made, len(races)


def masks() -> tuple[bool, int, int]:
    """Whether dropout makes the same of 200 rows on the device and on the CPU, races, and waits of the host."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from parallax.model.layers.dropout import Draws, RowDropout
    from parallax.model.layers.row_noise import RowNoise
    from tests.sim.device import SIM
    from tests.sim.races import host_waits, judge, note_waits

    x = torch.randn(200, 3000)
    found: list[Tensor] = []
    waits = 0

    def drop(device: torch.device) -> None:
        nonlocal waits
        there = x.to(device)
        note_waits()
        with RowDropout(Draws(RowNoise(device), 7, 0, 0, 200, 0)):
            dropped = [F.dropout(there, 0.3), F.dropout(there, 0.3)]
        waits = host_waits().total()
        found.extend(each.cpu() for each in dropped)

    error, races, _ = judge(lambda: drop(SIM))
    assert not error, error
    on_device = waits
    drop(torch.device("cpu"))
    return all(map(torch.equal, found[:2], found[2:])), len(races), on_device


def shown_often() -> list[bool]:
    """Whether batches that show one number several times come as they are, ahead and at once."""
    import torch

    from parallax import TensorRows
    from parallax.machine.device import StreamCopies
    from parallax.model.block import to_device
    from parallax.runtime.inputs import InputsAhead
    from tests.sim.device import SIM

    mask = torch.arange(4).expand(8, 4)
    ahead = InputsAhead(SIM, StreamCopies(SIM))
    ahead.begin(TensorRows(mask, mask), [(0, 4), (4, 4)])
    came = [to_device(mask, SIM), *ahead.take((0, 4)), *ahead.take((4, 4))]
    return [torch.equal(each.cpu(), mask[: len(each)]) for each in came]


def selected() -> list[int]:
    """The number of the device that a mesh is on, and of that which is current then, when it was requested by its kind
    alone, and by another number than the current one's."""
    import torch

    from parallax.machine.accelerators import computing_on
    from tests.sim.device import SIM

    found = []
    try:
        torch.accelerator.set_device_index(1)
        found.append(computing_on(torch.device("sim")).index)
        torch.accelerator.set_device_index(0)
        found.append(computing_on(torch.device("sim", 1)).index)
        found.append(torch.accelerator.current_device_index())
    finally:
        torch.accelerator.set_device_index(SIM.index)
    return found


def forwards(*args: Any, **options: Any) -> Any:
    """A rank of forwards alone."""
    from tests.sim.forwards import predict

    found = predict(*args, **options)
    return found._replace(verdict=tuple(found.verdict))._asdict()


def steps_with_metrics(names: list[str], micro: int) -> tuple[dict[str, int], dict[str, float]]:
    """How often the host waits for the device in three steps, and the metrics of the last."""
    import torch
    from torch import nn

    from parallax.model.describe import describe
    from parallax.model.loss_kinds import LossConfig
    from parallax.runtime.batch import TensorRows
    from parallax.runtime.engine import Engine
    from parallax.runtime.metrics import MetricsConfig
    from tests.plans import make_plan
    from tests.sim.device import SIM
    from tests.sim.races import judge

    chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5)))
    plan = make_plan(chain, global_batch=16, microbatch=micro)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    batch = TensorRows(x, x.argmax(1))
    loss = LossConfig(name="cross_entropy", kwargs={"weight": [1.0, 2.0, 1.0, 0.5, 1.0]}).build()
    assert loss is not None
    metrics = MetricsConfig(metrics=MetricsConfig.read(names))
    engine = Engine.build(chain, plan, loss=loss, device=SIM, metrics=metrics)
    engine.check_metrics(batch)
    engine.step(batch)
    found: dict[str, float] = {}

    def steps() -> None:
        for _ in range(3):
            found.update(engine.step(batch).metrics)

    verdict = judge(steps)
    engine.close()
    assert verdict.good, (verdict.error, verdict.races[:1])
    waits = {
        kind: count
        for kind, count in verdict.counts.items()
        if kind == "item" or kind.startswith("blocking") or kind.endswith("synchronize")
    }
    return waits, found
