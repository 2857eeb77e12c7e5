"""A stage's optimizer against loops written out here: masters, scaled gradients, skipped steps, wherever states are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.machine.device import CpuCopies
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.runtime.optim import resident
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.optim.scaling import gradient_norm
from parallax.swap.optimizer.averaging import AVERAGE
from parallax.swap.parameters.offloaded import OffloadedParameters, ResidentParameters
from parallax.swap.stores.store import DiskStore, Store

CPU = torch.device("cpu")
STEPS = 50
OPTIMIZERS = {
    "adamw": AdamWConfig(lr=1e-3, clip_norm=0.5),
    "unclipped": AdamWConfig(lr=1e-3, clip_norm=0.0),
    "sgd": SGDConfig(lr=0.3, clip_norm=0.5),
    "lion": LionConfig(lr=3e-3, betas=(0.9, 0.99), clip_norm=0.5),
}
PLACES = {"device": (0.0, False), "half": (0.5, False), "memory": (1.0, False), "disk": (1.0, True)}


class Permuted(nn.Module):
    """A parameter that is no run of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 30).t() / 5)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() * self.gain


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 300), nn.LayerNorm(300), nn.Linear(300, 30), Permuted()).to(
        dtype
    )


def backward(net: nn.Module, step: int, scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 100, generator=generator).to(next(net.parameters()).dtype)
    (net(x).float().square().mean() * scale).backward()
    return list(net.parameters())


class Opener:
    """Opens optimizers, and closes them and their stores."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.stores: list[DiskStore] = []

    def __call__(
        self,
        net: nn.Module,
        config: OptimizerConfig,
        place: str = "device",
        *,
        averages: bool = False,
        delays: bool = False,
    ) -> StageOptimizer:
        share, on_disk = PLACES[place]

        def store(needed: int, places: int) -> Store | None:
            if not on_disk:
                return None
            folder, capacity = self._folder / str(len(self.stores)), needed + 4096 * places
            opened = DiskStore(folder, capacity, CpuCopies(), threads=1)
            self.stores.append(opened)
            self._stack.callback(opened.close)
            return opened

        named = dict(net.named_parameters())
        optimizer = StageOptimizer(
            named,
            OptimizerBuilder.of(config, net, averages=averages, delays=delays),
            CPU,
            offload=share,
            always_offloaded=(),
            copies=CpuCopies(),
            open_store=store,
            share=None,
            streamed=ResidentParameters(),
        )
        self._stack.callback(optimizer.close)
        return optimizer


@pytest.fixture
def opener(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr(resident, "UPDATE_BUCKET_BYTES", 10_000)  # the widest parameter is in six
    with contextlib.ExitStack() as stack:
        yield Opener(scratch, stack)


def take(optimizer: StageOptimizer, net: nn.Module, step: int, scale: float = 1.0) -> None:
    """One step, as the engine takes it."""
    optimizer.ready(net.parameters())
    optimizer.zero_grad()
    parameters = backward(net, step, scale)
    for parameter in reversed(parameters):
        optimizer.reduced(parameter)
    norm = gradient_norm([p.grad for p in parameters if p.grad is not None]).item() / scale
    optimizer.step(torch.tensor(norm), 1 / (1 + step), scale)


class Plain:
    """What every place must equal: torch's optimizer on full-precision copies of the weights."""

    def __init__(self, net: nn.Module, config: OptimizerConfig) -> None:
        self.net, self._config = net, config
        self.masters = [
            nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in net.parameters()
        ]
        names = [name for name, _ in net.named_parameters()]
        masters = dict(zip(names, self.masters))
        self.optimizer = OptimizerBuilder.over(config, masters).build(masters)

    def take(self, step: int) -> None:
        self.net.zero_grad()
        parameters = backward(self.net, step)
        norm = gradient_norm([p.grad for p in parameters if p.grad is not None])
        for master, parameter in zip(self.masters, parameters):
            assert parameter.grad is not None
            master.grad = parameter.grad.to(torch.float32, copy=True)
        if self._config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self._config.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.lr * (1 / (1 + step))
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, parameters):
                parameter.copy_(master)


def check_same(plain: Plain, net: nn.Module, optimizer: StageOptimizer) -> None:
    """Weights, masters and states."""
    optimizer.finish()
    for master, one, other in zip(
        plain.masters, plain.net.parameters(), net.parameters(), strict=True
    ):
        assert torch.equal(one, other)
        found = optimizer.states(other)
        if other.dtype.itemsize == 2:
            assert torch.equal(found.pop("master"), master)
        known = {
            key: value
            for key, value in plain.optimizer.state[master].items()
            if isinstance(value, Tensor)
        }
        assert found.keys() == known.keys()
        assert all(torch.equal(found[key], value) for key, value in known.items())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "place", "dtype"),
    [
        pytest.param(
            *(name, place, dtype),
            # Two bytes of either kind have masters; of the others each optimizer is in each place in one.
            marks=[pytest.mark.thorough] if dtype is torch.float16 or (i + j + k) % 2 else [],
        )
        for i, name in enumerate(OPTIMIZERS)
        for j, place in enumerate(PLACES)
        for k, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16))
    ],
    ids=str,
)
def test_steps_are_those_of_full_precision_copies(
    opener: Opener, name: str, place: str, dtype: torch.dtype
) -> None:
    config = OPTIMIZERS[name]
    plain, net = Plain(make_net(dtype), config), make_net(dtype)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = opener(net, config, place)
    for step in range(STEPS):
        plain.take(step)
        take(optimizer, net, step)
    check_same(plain, net, optimizer)
    assert not any(torch.equal(one, other) for one, other in zip(before, net.parameters()))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_gradients_that_are_scaled_step_to_the_same_weights(
    opener: Opener, config: OptimizerConfig, place: str, dtype: torch.dtype
) -> None:
    plain, net = Plain(make_net(dtype), config), make_net(dtype)
    optimizer = opener(net, config, place)
    for step in range(10):
        plain.take(step)
        take(optimizer, net, step, scale=2.0**16 if step % 2 else 2.0**7)
    check_same(plain, net, optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_groups_are_clipped_by_their_own_norms(
    opener: Opener, place: str, dtype: torch.dtype
) -> None:
    groups = [{"match": "0.*", "clip_norm": 1e-3}, {"match": "3.*", "clip_value": 1e-5}]
    config = AdamWConfig(lr=1e-3, clip_norm=0.05, clip_value=1e-4, groups=groups)
    net, twin = make_net(dtype), make_net(dtype)
    optimizer = opener(net, config, place)
    plain = Plain(twin, AdamWConfig(lr=1e-3, clip_norm=0.0))
    first, others = plain.masters[:2], plain.masters[2:]
    for step in range(4):
        optimizer.ready(net.parameters())
        optimizer.zero_grad()
        mine = [p.grad for p in backward(net, step, 2.0**7) if p.grad is not None]
        for parameter in reversed([*net.parameters()]):
            optimizer.reduced(parameter)
        norms = [gradient_norm(part).item() / 2.0**7 for part in (mine[2:], mine[:2])]
        optimizer.step(torch.tensor(norms), 1.0, 2.0**7)
        twin.zero_grad()
        for master, parameter in zip(plain.masters, backward(twin, step, 2.0**7), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / 2.0**7
        torch.nn.utils.clip_grad_norm_(first, 1e-3)
        torch.nn.utils.clip_grad_norm_(others, 0.05)
        torch.nn.utils.clip_grad_value_([*first, *others[:-2]], 1e-4)
        torch.nn.utils.clip_grad_value_(others[-2:], 1e-5)
        plain.optimizer.step()
        for master, parameter in zip(plain.masters, twin.parameters()):
            parameter.detach().copy_(master)
    check_same(plain, net, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_skipped_step_leaves_no_trace(opener: Opener, place: str, dtype: torch.dtype) -> None:
    config = OPTIMIZERS["adamw"]
    plain, net = Plain(make_net(dtype), config), make_net(dtype)
    optimizer = opener(net, config, place)
    for step in range(6):
        if step % 2 == 0:  # the first of all too, and while the step before is under way
            optimizer.ready(net.parameters())
            optimizer.zero_grad()
            for parameter in backward(net, 99, float("inf")):
                optimizer.reduced(parameter)
            optimizer.skip()
            assert not any(p.grad.any() for p in net.parameters() if p.grad is not None)
        plain.take(step)
        take(optimizer, net, step)
    check_same(plain, net, optimizer)


def test_a_skipped_step_of_streamed_parameters_leaves_no_trace(scratch: Path) -> None:
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])
    twin, config = copy.deepcopy(net), AdamWConfig(clip_norm=0.5)
    with contextlib.ExitStack() as stack:
        store = DiskStore(scratch / "weights", 2**24, CpuCopies(), threads=1)
        stack.callback(store.close)
        streamed = OffloadedParameters([block.parameters() for block in net], store)
        stack.callback(streamed.close)
        for index, block in enumerate(net):
            streamed.attach(index, block)
        open_optimizer = partial(
            StageOptimizer,
            builder=OptimizerBuilder.of(config, net),
            device=CPU,
            offload=0.0,
            always_offloaded=(),
            copies=CpuCopies(),
            share=None,
        )
        mine = open_optimizer(
            dict(net.named_parameters()), open_store=lambda needed, places: None, streamed=streamed
        )
        stack.callback(mine.close)
        other = open_optimizer(
            dict(twin.named_parameters()),
            open_store=lambda needed, places: None,
            streamed=ResidentParameters(),
        )
        for step in range(4):
            x = torch.randn(5, 24, generator=torch.Generator().manual_seed(step))
            for blocks, optimizer in ((twin, other), (net, mine)):
                for overflows in (True, False) if optimizer is mine else (False,):
                    for block in blocks:
                        optimizer.ready(block.parameters())
                    optimizer.zero_grad()
                    (
                        blocks[1](blocks[0](x)).square().sum()
                        * (float("nan") if overflows else 1.0)
                    ).backward()
                    if overflows:
                        optimizer.skip()
                    else:
                        optimizer.step(torch.tensor(2.0), 10.0)
            mine.finish()
        for index, block in enumerate(twin):
            assert all(
                torch.equal(a, b)
                for a, b in zip(streamed.read_full(index), block.parameters(), strict=True)
            )


@pytest.mark.sampled
@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", PLACES)
def test_a_checkpoint_has_the_masters(opener: Opener, before: str, after: str) -> None:
    config = OPTIMIZERS["adamw"]
    plain, first, second = (
        Plain(make_net(torch.bfloat16), config),
        make_net(torch.bfloat16),
        make_net(torch.bfloat16),
    )
    optimizer = opener(first, config, before)
    for step in range(4):
        plain.take(step)
        take(optimizer, first, step)
    optimizer.finish()
    saved = [(p.detach().clone(), optimizer.states(p)) for p in first.parameters()]
    restored = opener(second, config, after)
    take(restored, second, 77)  # what it knew of another run is forgotten
    load(restored, second, saved)
    for step in range(4, 8):
        plain.take(step)
        take(restored, second, step)
    check_same(plain, second, restored)


def load(
    optimizer: StageOptimizer, net: nn.Module, saved: Sequence[tuple[Tensor, dict[str, Tensor]]]
) -> None:
    optimizer.reset()
    for parameter, (weight, _) in zip(net.parameters(), saved):
        parameter.detach().copy_(weight)
    for parameter, (_, states) in zip(net.parameters(), saved):
        optimizer.restore(parameter, {key: value.contiguous() for key, value in states.items()})


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_without_masters_begins_with_the_weights(opener: Opener, place: str) -> None:
    config = OPTIMIZERS["sgd"]
    plain, net = Plain(make_net(torch.bfloat16), config), make_net(torch.bfloat16)
    optimizer = opener(net, config, place)
    take(optimizer, net, 5)
    load(optimizer, net, [(parameter.detach(), {}) for parameter in plain.net.parameters()])
    plain.take(0)
    take(optimizer, net, 0)
    check_same(plain, net, optimizer)


def test_masters_lie_where_the_states_do(opener: Opener) -> None:
    net = make_net(torch.bfloat16)
    optimizer = opener(net, OPTIMIZERS["adamw"], "disk")
    take(optimizer, net, 0)
    optimizer.finish()
    numbers = sum(parameter.numel() for parameter in net.parameters())
    (store,) = opener.stores
    assert 12 * numbers <= store.slots.used_bytes <= 12 * numbers + 8 * 4096
    assert numbers * 2 < STATE_BUCKET_BYTES, "one bucket"
    assert not any(
        isinstance(kept, Tensor)
        for bucket in optimizer._host._buckets
        for kept in bucket.weights.kept
    )  # type: ignore[union-attr]


def test_full_precision_takes_no_master_from_a_checkpoint(opener: Opener) -> None:
    short, net = make_net(torch.bfloat16), make_net()
    one = opener(short, OPTIMIZERS["adamw"])
    take(one, short, 0)
    other = opener(net, OPTIMIZERS["adamw"])
    load(other, net, [(p.detach().float(), one.states(p)) for p in short.parameters()])
    take(other, net, 1)
    assert all("master" not in other.states(parameter) for parameter in net.parameters())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("late", [0, 3])
def test_first_gradients_may_come_at_different_steps(opener: Opener, late: int, place: str) -> None:
    """torch's fused SGD raises where a later parameter has none yet, and forgets all momentum where the first has."""
    plain, net = make_net(), make_net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, fused=False)
    optimizer = opener(net, SGDConfig(lr=0.1), place)
    for step in range(5):
        for parameters in (backward(plain, step), backward(net, step)):
            if step < 2:
                parameters[late].grad = None
        reference.step()
        optimizer.step(torch.tensor(1.0), 1.0)
        optimizer.finish()
        for one, other in zip(plain.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(one, other)
            one.grad = other.grad = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_averages_are_those_of_full_precision_copies(
    opener: Opener, place: str, dtype: torch.dtype
) -> None:
    config = OPTIMIZERS["adamw"]
    plain, net = Plain(make_net(dtype), config), make_net(dtype)
    optimizer = opener(net, config, place, averages=True)
    averages = [master.detach().clone() for master in plain.masters]
    for step in range(5):
        optimizer.ready(net.parameters())
        optimizer.zero_grad()
        parameters = backward(net, step)
        for parameter in reversed(parameters):
            optimizer.reduced(parameter)
        norm = gradient_norm([p.grad for p in parameters if p.grad is not None])
        share = (0.0, 1.0, 0.3, 0.0, 0.1)[step]
        optimizer.step(norm.float(), 1 / (1 + step), average=share)
        plain.take(step)
        torch._foreach_lerp_(averages, [master.detach() for master in plain.masters], share)
    optimizer.finish()
    trained = [parameter.detach().clone() for parameter in net.parameters()]
    states = [optimizer.states(parameter) for parameter in net.parameters()]
    optimizer.exchange_averages()
    optimizer.finish()
    for average, parameter in zip(averages, net.parameters()):
        assert torch.equal(parameter, average.to(dtype))
    optimizer.exchange_averages()
    optimizer.finish()
    for weights, known, average, parameter in zip(trained, states, averages, net.parameters()):
        found = optimizer.states(parameter)
        assert torch.equal(parameter, weights)
        assert torch.equal(found[AVERAGE], average)
        assert found.keys() == known.keys()
        assert all(torch.equal(found[key], value) for key, value in known.items())


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_delayed_updates_are_a_loop_with_two_versions(
    opener: Opener, name: str, place: str, corrects: bool, dtype: torch.dtype
) -> None:
    config = replace(OPTIMIZERS[name], delay_correction=corrects)
    plain, net = Plain(make_net(dtype), config), make_net(dtype)
    optimizer = opener(net, config, place, delays=True)
    newest = plain.masters
    previous = [weights.detach().clone() for weights in newest]
    for step in range(6):
        current = [weights.detach().clone() for weights in newest]
        plain.take(step)
        with torch.no_grad():
            for parameter, now, before in zip(plain.net.parameters(), current, previous):
                parameter.copy_(torch.lerp(now, before, -1.0) if corrects else now)
        previous = current
        take(optimizer, net, step)
        optimizer.finish()
        for one, other in zip(plain.net.parameters(), net.parameters()):
            assert torch.equal(one, other)
    before = [optimizer.states(parameter) for parameter in net.parameters()]
    optimizer.exchange_versions()
    optimizer.finish()
    for weights, parameter in zip(newest, net.parameters()):
        assert torch.equal(parameter, weights.to(dtype))
    optimizer.exchange_versions()
    optimizer.finish()
    for one, known, other in zip(plain.net.parameters(), before, net.parameters()):
        found = optimizer.states(other)
        assert torch.equal(one, other)
        assert all(torch.equal(found[key], value) for key, value in known.items())


class Kernels(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        makes_none = func.is_view or func.overloadpacket.__name__ in ("detach", "empty_like")
        self.count += not makes_none
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_takes_as_many_kernels_for_a_hundred_parameters(
    name: str, dtype: torch.dtype, scratch: Path
) -> None:
    """A launch takes microseconds, and a model has thousands of biases and gains."""
    counts = []
    with contextlib.ExitStack() as stack:
        for layers in (2, 50):
            net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers))).to(dtype)
            optimizer = Opener(scratch, stack)(net, OPTIMIZERS[name])
            for _ in range(2):  # states are made in the first
                for parameter in net.parameters():
                    parameter.grad = torch.ones_like(parameter)
                with Kernels() as kernels:
                    norm = gradient_norm([p.grad for p in net.parameters() if p.grad is not None])
                    optimizer.step(norm / 8, 1.0, scale=8.0)
            counts.append(kernels.count)
    assert counts[0] == counts[1] < 40
