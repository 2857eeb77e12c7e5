"""Steps of an engine that fail inside their last backward, block by block: the steps between them are as if those had
not been."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parallax.machine.accelerators import register_accelerator
from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.replicas import streamed_sum
from parallax.runtime.replicas.streamed_sum import StreamedSum
from parallax.swap.parameters.offloaded import OffloadedParameters
from tests.plans import make_plan
from tests.sim import group
from tests.sim.device import SIM
from tests.sim.engines import Apart, Shared

BLOCKS, WIDTH, MICRO_BATCHES = 8, 64, 2
BUCKET_BYTES = WIDTH * (WIDTH + 1) * 4  # of one block's gradients
# Where buckets stay in the step that fails in each block. Before the last two no replica's neighbour has filled one.
HELD = ("FILLING", "READING", "REDUCING", "WRITING", "WRITING", "REDUCING", "FILLING", "FILLING")
_PATIENCE_SECONDS = 60
Move = Callable[[StreamedSum, Any, bool], bool]
_APART = 1e-5  # relative; rows of a replica are summed in another order


class _Stumble(torch.autograd.Function):
    """Nothing in a forward; in a backward, the fault set in :class:`Stumbling`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        Stumbling.come(ctx.number)
        return gradient, None


class Stumbling(nn.Module):
    """One of several layers, of which one fails in the last backward of a step."""

    fails = -1  # the number of that which does; none where it is negative
    calls_left = 0
    before: Callable[[], None] = staticmethod(lambda: None)  # called when it does

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        stumbled: Tensor = _Stumble.apply(torch.sigmoid(self.layer(x)), self.number)
        return stumbled

    @classmethod
    def come(cls, number: int) -> None:
        """The backward has come to a layer."""
        if number == cls.fails:
            cls.calls_left -= 1
            if not cls.calls_left:
                cls.before()
                raise ArithmeticError("stumbled")


def _model() -> nn.Module:
    return nn.Sequential(*[Stumbling(number) for number in range(BLOCKS)])


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _rows(seed: int) -> TensorRows:
    made = torch.Generator().manual_seed(seed)
    return TensorRows(torch.randn(8, WIDTH, generator=made), torch.rand(8, WIDTH, generator=made))


@cache
def on_a_cpu() -> list[float]:
    """The losses of one rank that never fails; computed before there are two."""
    chain = describe(_model)
    plan = make_plan(chain, microbatch=8 // MICRO_BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(chain, plan, loss=_loss, scratch=Path(folder))
        losses = [engine.step(_rows(seed)).loss for seed in range(BLOCKS + 2)]
        engine.close()
    return losses


def stumbles(
    expected: Sequence[float], replicas: Sequence[int], options: dict[str, Any], *, direct: bool
) -> set[str]:
    """A step that fails in each of the blocks, and one after it that does not, called by every rank; in what states
    buckets of streamed gradients were then: they are held in each of them. Replicas fail in neighbour blocks, so that
    one has begun more sums. Losses are those ``expected``."""
    register_accelerator(Apart() if direct else Shared("sim", "", group.NAME))
    chain = describe(_model)
    offloaded = {"tier": "strict host", "tier_bytes": 2**20, **options}
    plan = make_plan(chain, replicas=replicas, microbatch=8 // MICRO_BATCHES, **offloaded)
    with tempfile.TemporaryDirectory() as folder, _noting_states() as states:
        engine = Engine.build(chain, plan, loss=_loss, device=SIM, scratch=Path(folder))
        sums = [s for s in getattr(engine._sync, "_following", ()) if isinstance(s, StreamedSum)]
        for each in sums:
            each._bucket_bytes = BUCKET_BYTES  # no plan has so little
        losses = [engine.step(_rows(seed)).loss for seed in range(2)]
        stored = _stored_bytes(engine)
        for number in range(BLOCKS):
            # Sums keep one order only if the other rank gets as far in the end.
            block = min(number + engine.mesh.replica, BLOCKS - 1)
            with _held(sums, HELD[number]):
                _fail(engine, block)
            losses.append(engine.step(_rows(number + 2)).loss)
        assert _stored_bytes(engine) == stored, "places of gradients were not given back"
        engine.close()
    for one, other in zip(losses, expected, strict=True):
        assert abs(one - other) <= _APART * abs(other), f"{losses} are not {expected}"
    return states


def _stored_bytes(engine: Engine) -> int:
    """Of streamed parameters, after a step."""
    engine._optimizer.finish()
    streamed = engine._stage.offloaded
    if not isinstance(streamed, OffloadedParameters):
        return 0
    return streamed._tier._store.slots.used_bytes


def _fail(engine: Engine, number: int) -> None:
    """Take a step of other rows that gets no further than the backward of block ``number``."""
    Stumbling.fails, Stumbling.calls_left = number, MICRO_BATCHES
    try:
        engine.step(_rows(1000 + number))
    except ArithmeticError:
        return
    finally:
        Stumbling.fails = -1
    raise AssertionError("no block has stumbled")


@contextmanager
def _held(sums: Sequence[StreamedSum], state: str) -> Iterator[None]:
    """No bucket goes further than ``state``, as if memory or a network were slow, and a step fails no earlier than one
    is in it. READING is the state of buckets that read: until the step fails, others keep the buffers."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    reads, failing = state == "READING", False

    def is_there(bucket: Any) -> bool:
        return bucket.state.name == state and bool(bucket.reads or not reads)

    def reach() -> None:
        nonlocal failing
        failing = True
        while not all(any(map(is_there, each._active)) for each in sums):
            assert time.monotonic() < deadline, f"no bucket is {state}"
            for each in sums:
                each._advance()
            time.sleep(0)

    def held(move: Move) -> Move:
        def stay(each: StreamedSum, bucket: Any, wait: bool) -> bool:
            stays = is_there(bucket) or (reads and bucket.state.name == "REDUCING" and not failing)
            return not stays and move(each, bucket, wait)

        return stay

    moves = {key: held(move) for key, move in streamed_sum._MOVES.items()}
    with patch.dict(streamed_sum._MOVES, moves), patch.object(Stumbling, "before", reach):
        yield


@contextmanager
def _noting_states() -> Iterator[set[str]]:
    """Those of the buckets that a step leaves behind."""
    states, forget = set[str](), StreamedSum.forget

    def noting(self: StreamedSum) -> None:
        states.update(bucket.state.name for bucket in self._active)
        forget(self)

    StreamedSum.forget = noting  # type: ignore[method-assign]
    try:
        yield states
    finally:
        StreamedSum.forget = forget  # type: ignore[method-assign]


def _alone() -> None:
    """The mark of the last gradients is reset: those of another step would be offloaded too early."""
    stumbles(on_a_cpu(), (1,), {"optimizer_offload": 1.0}, direct=False)


SCENARIOS: dict[str, Callable[[], None]] = {"steps fail in backwards": _alone}
