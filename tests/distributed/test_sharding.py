"""Replicas that share the optimizer's states on the device: the weights of each are those of one that keeps its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.machine.device import CpuCopies
from parallax.runtime.optim import resident
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.replicas.replicate import SharedStates
from parallax.swap.parameters.offloaded import ResidentParameters
from tests.distributed.pool import Pool

SHAPES = ((90, 70), (70,), (3,), (), (50, 33), (33,), (1, 7), (40, 40), (40, 40), (11, 5))  # uneven
STEPS = 6
Saved = list[tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Setting:
    """What is stepped. ``bucket_bytes``: small ones divide parameters."""

    config: OptimizerConfig
    dtype: torch.dtype = torch.float32
    offloaded: float = 0.0
    scale: float = 1.0
    bucket_bytes: int = 3000


@dataclass
class Outcome:
    """What one replica has in the end. ``states``: of each parameter, with whether it alone knows them."""

    weights: list[Tensor]
    states: list[dict[str, Tensor]]
    alone: list[bool]
    spreads: int

    @property
    def state_bytes(self) -> int:
        return sum(
            value.nbytes for states in self.states for key, value in states.items() if key != "step"
        )


class Counting:
    """An exchange that counts."""

    def __init__(self, inner: SharedStates) -> None:
        self._inner, self.spreads = inner, 0
        self.owner, self.owns = inner.owner, inner.owns

    def broadcast(self, parameter: Tensor, tensors: list[Tensor]) -> None:
        self.spreads += 1
        self._inner.broadcast(parameter, tensors)


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def stepping(setting: Setting, first: int, last: int, saved: Saved | None, shard: bool) -> Outcome:
    """Steps ``first`` to ``last`` on this replica, after loading what was ``saved``."""
    before, resident.UPDATE_BUCKET_BYTES = resident.UPDATE_BUCKET_BYTES, setting.bucket_bytes
    world = dist.get_world_size() if dist.is_initialized() else 1
    made: list[Counting] = []

    def assign_owners(group: Any, parameters: Sequence[nn.Parameter]) -> Counting:
        made.append(Counting(SharedStates(group, dist.get_rank(), world, parameters)))
        return made[-1]

    ranks = list(range(world))
    shard_exchange = partial(assign_owners, dist.new_group(ranks)) if world > 1 and shard else None
    parameters = make_parameters(setting.dtype)
    named = {str(index): parameter for index, parameter in enumerate(parameters)}
    optimizer = StageOptimizer(
        named,
        OptimizerBuilder.over(setting.config, named),
        torch.device("cpu"),
        offload=setting.offloaded,
        always_offloaded=(),
        copies=CpuCopies(),
        open_store=lambda needed, places: None,
        share=partial(assign_owners, dist.new_group(ranks)) if setting.offloaded else None,
        streamed=ResidentParameters(),
        shard=shard_exchange,
    )
    if saved is not None:
        optimizer.reset()
        for parameter, (weight, _) in zip(parameters, saved):
            parameter.detach().copy_(weight)
        for parameter, (_, states) in zip(parameters, saved):
            optimizer.restore(parameter, states)
    for step in range(first, last):
        optimizer.ready(parameters)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 + step)
        for index, parameter in enumerate(parameters):
            if (index, step) != (4, 0):  # one has none at first
                gradient = torch.randn(parameter.shape, generator=generator) * setting.scale
                parameter.grad = gradient.to(setting.dtype)
                optimizer.reduced(parameter)
        if step == 2:
            optimizer.skip()
        else:
            optimizer.step(torch.tensor(7.0), 10 / (1 + step), setting.scale)
    optimizer.finish()
    states = [
        {key: value.clone() for key, value in optimizer.states(p).items()} for p in parameters
    ]
    alone = [optimizer.alone_knows(parameter) for parameter in parameters]
    optimizer.close()
    resident.UPDATE_BUCKET_BYTES = before
    spreads = sum(exchange.spreads for exchange in made)
    return Outcome([parameter.detach().clone() for parameter in parameters], states, alone, spreads)


def collected(outcomes: Sequence[Outcome]) -> Saved:
    """As a checkpoint has it: the first replica's weights, and each state from the replica that holds it."""
    found: Saved = []
    for index, weight in enumerate(outcomes[0].weights):
        writers = [o for replica, o in enumerate(outcomes) if replica == 0 or o.alone[index]]
        known = [outcome.states[index] for outcome in writers if outcome.states[index]]
        assert len(known) == 1, "each state is written once"
        found.append((weight, known[0]))
    return found


def check_same(one: Saved, other: Saved) -> None:
    for (weight, states), (weight_there, states_there) in zip(one, other, strict=True):
        assert torch.equal(weight, weight_there)
        assert states.keys() == states_there.keys()
        assert all(torch.equal(value, states_there[key]) for key, value in states.items())


OPTIMIZERS = {
    "adamw": AdamWConfig(clip_norm=0.5),
    "unclipped": AdamWConfig(clip_norm=0.0),
    "sgd": SGDConfig(clip_norm=0.5),
    "lion": LionConfig(clip_norm=0.5),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "replicas", "dtype"),
    [
        pytest.param(name, replicas, dtype, marks=[pytest.mark.thorough] if (i + j + k) % 2 else [])
        for i, name in enumerate(OPTIMIZERS)
        for j, replicas in enumerate((2, 3))
        for k, dtype in enumerate((torch.float32, torch.bfloat16))
    ],  # of each pair of values one
    ids=str,
)
def test_shared_steps_are_those_of_one(
    pool: Pool, name: str, replicas: int, dtype: torch.dtype
) -> None:
    setting = Setting(OPTIMIZERS[name], dtype)
    (plain,) = pool.run(stepping, 1, setting, 0, STEPS, None, False)
    for offloaded, scale in ((0.0, 1.0), (0.0, 2.0**16), (0.5, 2.0**16)):
        found = pool.run(
            stepping,
            replicas,
            replace(setting, offloaded=offloaded, scale=scale),
            0,
            STEPS,
            None,
            True,
        )
        assert all(
            torch.equal(a, b)
            for o in found[1:]
            for a, b in zip(o.weights, found[0].weights, strict=True)
        )
        check_same(collected(found), collected([plain]))
        assert all(sum(owns) == 1 for owns in zip(*(o.alone for o in found))), (
            "everything has one owner"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_replica_holds_its_part_of_the_states(pool: Pool, dtype: torch.dtype) -> None:
    setting = Setting(OPTIMIZERS["adamw"], dtype)
    numbers = sum(parameter.numel() for parameter in make_parameters(dtype))
    whole = numbers * (8 if dtype is torch.float32 else 12)
    for replicas in (2, 3):
        copies = pool.run(stepping, replicas, setting, 0, STEPS, None, False)
        assert [outcome.state_bytes for outcome in copies] == [whole] * replicas
        parts = [
            outcome.state_bytes
            for outcome in pool.run(stepping, replicas, setting, 0, STEPS, None, True)
        ]
        assert sum(parts) == whole
        largest = max(parameter.numel() for parameter in make_parameters(dtype)) * whole // numbers
        assert max(parts) <= max(largest, 1.1 * whole / replicas)


def test_what_is_new_is_sent_once_for_each_owner(pool: Pool) -> None:
    setting = Setting(OPTIMIZERS["adamw"], bucket_bytes=2**20)
    found = pool.run(stepping, 3, setting, 0, 2, None, True)
    assert [outcome.spreads for outcome in found] == [3 * 2] * 3


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        *((1, 3, torch.float32), (3, 2, torch.bfloat16), (2, 1, torch.float32)),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in ((1, 3, torch.bfloat16), (3, 2, torch.float32), (2, 1, torch.bfloat16))
        ),
    ],
    ids=str,
)
def test_a_checkpoint_does_not_depend_on_the_holder_of_states(
    pool: Pool, before: int, after: int, dtype: torch.dtype
) -> None:
    setting = Setting(OPTIMIZERS["adamw"], dtype)
    (plain,) = pool.run(stepping, 1, setting, 0, STEPS, None, False)
    half = collected(pool.run(stepping, before, setting, 0, 3, None, True))
    rest = pool.run(stepping, after, setting, 3, STEPS, half, True)
    check_same(collected(rest), collected([plain]))
    if after > 1:
        assert sum(outcome.state_bytes for outcome in rest) == plain.state_bytes, (
            "what others own was not kept"
        )
