"""Streamed parameters: the same losses, gradients and weights as on the device, to the last bit."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from parallax.errors import ConfigError, SwapError
from parallax.machine.device import CpuCopies
from parallax.model.saved import Selector
from parallax.model.split_backward import WeightGradStore
from parallax.runtime.optim.scaling import gradient_norm
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.parameters.offloaded import OffloadedParameters, PrefetchOrder
from parallax.swap.stores.slots import StoreSlot
from parallax.swap.stores.store import DiskStore, HostStore, Store
from parallax.swap.verify import Delays
from tests.unit.swap_fakes import MIB, ManualStore

WIDTH = 24


class Block(nn.Module):
    """Views, transposes, a used-twice, an unused and a low-precision parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8)
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.up(self.norm(x))) @ self.down.t()
        return x + torch.sin(self.gain.float() * hidden) @ self.down[:, :WIDTH]


def model(count: int = 4) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(Block() for _ in range(count))


def batch(micro: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(micro))


def forward(blocks: Sequence[nn.Module], x: Tensor, recompute: str = "no") -> Tensor:
    for index, block in enumerate(blocks):
        again = recompute != "no" and index % 2
        x = checkpoint(block, x, use_reentrant=recompute == "reentrant") if again else block(x)
    return x.square().mean()


def gpipe(count: int) -> list[tuple[str, int]]:
    return [("F", m) for m in range(count)] + [("B", m) for m in range(count)]


def one_f_one_b(count: int) -> list[tuple[str, int]]:
    pairs = [[("F", m + 1), ("B", m)] for m in range(count - 1)]
    return [("F", 0), *itertools.chain(*pairs), ("B", count - 1)]


def run(
    blocks: Sequence[nn.Module], actions: list[tuple[str, int]], recompute: str = "no"
) -> list[float]:
    losses: dict[int, Tensor] = {}
    for kind, micro in actions:
        if kind == "F":
            losses[micro] = forward(blocks, batch(micro), recompute)
        else:
            losses[micro].backward()
    return [losses[m].item() for m in sorted(losses)]


Stream = Callable[..., OffloadedParameters]


@pytest.fixture(params=["disk", "host"])
def store(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Store]:
    disk = request.param == "disk"
    found: Store = (
        DiskStore(scratch, 4 * MIB, CpuCopies(), threads=2)
        if disk
        else HostStore(4 * MIB, CpuCopies())
    )
    yield found
    found.close()


@pytest.fixture
def stream(store: Store) -> Iterator[Stream]:
    """Makes offloaded blocks; in the end nothing may be left in the tier, nor too much have been on the device."""
    made: list[OffloadedParameters] = []

    def build(blocks: Sequence[nn.Module], **options: Any) -> OffloadedParameters:
        options = {"chunk_bytes": 1024, "verify": True, **options}
        made.append(
            OffloadedParameters([list(block.parameters()) for block in blocks], store, **options)
        )
        for index, block in enumerate(blocks):
            made[-1].attach(index, block)
        return made[-1]

    yield build
    for streamed in made:
        assert streamed.take_statistics().high_water <= streamed.limit_bytes
        streamed.close()
    assert store.slots.used_bytes == 0


def gradients(
    blocks: Sequence[nn.Module], streamed: OffloadedParameters | None = None
) -> list[Tensor | None]:
    found = []
    for parameter in [p for block in blocks for p in block.parameters()]:
        if streamed is not None and streamed.is_offloaded(parameter):
            assert parameter.grad is None
            found.append(streamed.read_gradient(parameter))
        else:
            found.append(parameter.grad)
    return found


def weights(blocks: Sequence[nn.Module], streamed: OffloadedParameters) -> list[Tensor]:
    return [tensor for index in range(len(blocks)) for tensor in streamed.read_full(index)]


def assert_same(mine: Sequence[Tensor | None], plain: Sequence[Tensor | None]) -> None:
    assert len(mine) == len(plain)
    for a, b in zip(mine, plain):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


ACTIONS = {"one": gpipe(1), "gpipe": gpipe(3), "1f1b": one_f_one_b(4)}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("window", "actions", "recompute"),
    [
        pytest.param(
            *(window, ACTIONS[name], recompute),
            marks=[pytest.mark.thorough] if (i + j + window) % 3 else [],
            id=f"{window}-{name}-{recompute}",
        )
        for i, recompute in enumerate(("no", "recompute", "reentrant"))
        for j, name in enumerate(ACTIONS)
        for window in (1, 2, 3)
    ],  # each with each of the two others
)
def test_gradients_are_those_of_resident_weights(
    stream: Stream, window: int, actions: Any, recompute: str
) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    streamed = stream(mine, window=window)
    for _ in range(2):
        for block in plain:
            block.zero_grad()
        streamed.zero_gradients(set_to_none=True)
        assert run(mine, actions, recompute) == run(plain, actions, recompute)
        assert_same(gradients(mine, streamed), gradients(plain))
    assert_same(
        weights(mine, streamed), [p.detach() for block in plain for p in block.parameters()]
    )


@pytest.mark.parametrize("count", [1, 2])
def test_few_blocks(stream: Stream, count: int) -> None:
    plain = model(count).append(nn.Tanh())  # a block without parameters
    mine = copy.deepcopy(plain)
    streamed = stream(mine)
    for actions in (gpipe(2), one_f_one_b(3)):
        assert run(mine, actions) == run(plain, actions)
    assert_same(gradients(mine, streamed), gradients(plain))


def test_the_window_is_all_that_is_on_the_device(stream: Stream) -> None:
    blocks = model(6)
    streamed = stream(blocks)
    whole = sum(p.nbytes for block in blocks for p in block.parameters())
    assert streamed.resident_bytes == 0
    held: list[int] = []
    for block in blocks:
        block.register_forward_hook(lambda *_: held.append(streamed.resident_bytes))
    run(blocks, gpipe(2))
    largest = max(sum(p.nbytes for p in block.parameters()) for block in blocks)
    assert max(held) <= 2 * largest * 1.1  # places begin at multiples of 64 bytes
    assert streamed.limit_bytes < whole * 0.6
    statistics = streamed.take_statistics()
    assert statistics.high_water <= streamed.limit_bytes
    assert statistics.bytes_in > statistics.bytes_out > whole


def test_frozen_parameters_and_blocks(stream: Stream) -> None:
    plain = model()
    plain[1].requires_grad_(False)
    plain[2].up.requires_grad_(False)
    mine = copy.deepcopy(plain)
    streamed = stream(mine)
    assert all(s.parameter.requires_grad for chunk in streamed.chunks for s in chunk.segments)
    assert run(mine, gpipe(2)) == run(plain, gpipe(2))
    assert_same(gradients(mine, streamed), gradients(plain))
    for blocks in (plain, mine):  # unfrozen later
        blocks[1].requires_grad_(True)
    assert run(mine, gpipe(2)) == run(plain, gpipe(2))
    assert_same(gradients(mine, streamed), gradients(plain))


def test_evaluation_in_between(stream: Stream) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    streamed = stream(mine)
    for blocks in (plain, mine):
        loss = forward(blocks, batch(0))
        with torch.no_grad():
            forward(blocks, batch(1))
        loss.backward()
    assert_same(gradients(mine, streamed), gradients(plain))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_clean_step_follows_a_failure(stream: Stream, where: str) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    streamed = stream(mine)

    def fail(_: Any, result: Tensor) -> Tensor:
        if where == "forward":
            raise ArithmeticError("in forward")
        return Fails.apply(result)

    hook = mine[2].up.register_forward_hook(lambda module, _, result: fail(module, result))
    for _ in range(2):
        with pytest.raises(ArithmeticError, match=f"in {where}"):
            run(mine, gpipe(2))
    hook.remove()
    streamed.zero_gradients(set_to_none=True)
    assert run(mine, gpipe(2)) == run(plain, gpipe(2))
    assert_same(gradients(mine, streamed), gradients(plain))


def test_backward_twice_and_gradients_of_inputs(stream: Stream) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    streamed = stream(mine)
    slopes = []
    for blocks in (plain, mine):
        x = batch(0).requires_grad_()
        loss = forward(blocks, x)
        loss.backward(retain_graph=True)
        slopes += torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    assert_same(gradients(mine, streamed), gradients(plain))
    assert_same(slopes[:1], slopes[1:])


def test_gradients_of_gradients_are_refused(stream: Stream) -> None:
    mine = model()
    stream(mine)
    x = batch(0).requires_grad_()
    with pytest.raises(SwapError, match="create_graph=True"):
        torch.autograd.grad(forward(mine, x), x, create_graph=True)


def test_gradients_can_be_replaced(stream: Stream) -> None:
    mine = model()
    streamed = stream(mine)
    run(mine, gpipe(1))
    assert streamed.read_gradient(mine[0].unused) is None
    for parameter in (mine[0].down, mine[0].unused):
        summed = torch.randn_like(parameter)
        streamed.gradient(parameter).write(summed).finish()
        assert_same([streamed.read_gradient(parameter)], [summed])
        assert torch.equal(
            get_total_norm(streamed.norm_terms([parameter])), get_total_norm([summed])
        )


def test_the_norm_is_that_of_resident_gradients(stream: Stream) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    plain.append(nn.Linear(WIDTH, 3))
    mine.append(copy.deepcopy(plain[-1]))  # the last block stays on the device
    streamed = stream(mine[:-1])
    for count in (1, 3):
        run(plain, gpipe(count))
        run(mine, gpipe(count))
        expected = gradient_norm([p.grad for p in plain.parameters() if p.grad is not None])
        assert gradient_norm(streamed.norm_terms(mine.parameters())) == expected
    streamed.zero_gradients()
    plain.zero_grad(set_to_none=False)
    mine[-1].zero_grad(set_to_none=False)
    assert torch.equal(get_total_norm(streamed.norm_terms(mine.parameters())), torch.tensor(0.0))
    assert_same(gradients(mine, streamed), gradients(plain))


class Split(Block):
    """Hands on, beside its own result, what it was given."""

    def forward(self, given: Any) -> Any:
        skip, x = given["both"] if isinstance(given, dict) else (given, given)
        return {"both": [skip, super().forward(x) + skip]}


def test_results_that_are_only_passed_on(stream: Stream) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(), *(Split() for _ in range(3))])
    mine = copy.deepcopy(plain)
    streamed = stream(mine)
    for blocks in (plain, mine):
        x: Any = batch(0)
        for block in blocks:
            x = block(x)
        torch.stack(x["both"]).prod(0).sum().backward()
    assert_same(gradients(mine, streamed), gradients(plain))


@pytest.mark.parametrize("how", ["same", "memory"])
def test_shared_parameters_stay(stream: Stream, how: str) -> None:
    plain = model()
    if how == "same":
        plain[2].down = plain[0].down
    mine = copy.deepcopy(plain)
    if how == "memory":
        mine[2].down = nn.Parameter(mine[0].down.detach())
    streamed = stream(mine)
    assert not streamed.is_offloaded(mine[0].down)
    assert not streamed.is_offloaded(mine[2].down)
    assert mine[0].down.data_ptr() == mine[2].down.data_ptr()
    assert streamed.is_offloaded(mine[0].up.weight)
    if how == "same":
        assert run(mine, gpipe(2)) == run(plain, gpipe(2))
        assert_same(gradients(mine, streamed), gradients(plain))


def test_blocks_are_made_one_after_another(store: Store) -> None:
    alive: list[nn.Module] = []

    def make() -> Iterator[Iterator[nn.Parameter]]:
        for block in model():
            assert all(p.isnan().all() for earlier in alive for p in earlier.parameters())
            alive.append(block)
            yield block.parameters()

    streamed = OffloadedParameters(make(), store)
    streamed.close()
    assert store.slots.used_bytes == 0


def test_a_changed_byte_in_the_tier_is_noticed(scratch: Path) -> None:
    store = HostStore(4 * MIB, CpuCopies())
    mine = model()
    streamed = OffloadedParameters([list(b.parameters()) for b in mine], store, verify=True)
    slot = streamed._flats[2].chunks[0]._slot
    assert slot is not None
    store._slabs[0].data[slot.offset : slot.offset + slot.size][slot.size // 2] += 1
    streamed.enter(1)
    with pytest.raises(SwapError, match="not what was written"):
        streamed.enter(2)
    assert streamed.resident_bytes <= streamed.limit_bytes
    streamed.close()


def gradients_of_one_more(
    blocks: nn.ModuleList, streamed: OffloadedParameters
) -> list[Tensor | None]:
    run(blocks, gpipe(1))
    return gradients(blocks, streamed)


def test_a_full_disk_is_never_followed_by_stale_gradients(
    stream: Stream, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.tier != "disk":
        pytest.skip("memory does not fail")
    plain = model()
    mine = copy.deepcopy(plain)
    streamed = stream(mine)
    run(mine, gpipe(1))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(SwapError, match="No space left"):
            gradients_of_one_more(mine, streamed)
    streamed.zero_gradients(set_to_none=True)
    assert run(mine, gpipe(2)) == run(plain, gpipe(2))
    assert_same(gradients(mine, streamed), gradients(plain))


def test_the_next_block_comes_while_one_runs() -> None:
    store = ManualStore()
    mine = model(3)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in mine]
    streamed = OffloadedParameters([list(b.parameters()) for b in mine], store, chunk_bytes=MIB)
    assert [t.name for t in store.transfers if not t.finished] == []
    streamed.enter(0)
    under_way = [t for t in store.transfers if not t.finished]
    assert under_way, "nothing comes ahead"
    assert streamed.resident_bytes <= 2 * max(sizes) * 1.1
    streamed.enter(1)
    assert all(t.finished for t in under_way)
    streamed.close()


def test_a_step_is_expected_to_go_as_the_last_one() -> None:
    visits = PrefetchOrder()
    step = [0, 1, 2, 0, 1, 2, 1, 0, 2, 1, 0]  # two forwards, two backwards of three blocks
    guessed = []
    for block in step:
        visits.visit(block)
        guessed += visits.next_blocks(1, 3)
    assert guessed == [1, 2, 1, 1, 2, 1, 0, 1, 1, 0, 1]
    visits.restart()
    guessed = []
    for block in step:
        assert visits.visit(block)
        assert not visits.visit(block)
        guessed += visits.next_blocks(1, 3)
    assert guessed == step[1:]
    visits.visit(2)
    assert visits.next_blocks(2, 3) == [1, 0]


def test_forwards_alone_are_expected_to_begin_again_at_the_first_block(stream: Stream) -> None:
    visits = PrefetchOrder()
    guessed = []
    for block in [0, 1, 2, 0, 1, 2]:
        visits.visit(block, returns=False)
        guessed += visits.next_blocks(1, 3)
    assert guessed == [1, 2, 0, 1, 2, 0]
    blocks = model(3)
    offloaded = stream(blocks)
    with torch.no_grad():
        forward(blocks, batch(0))
    assert [flat.is_offloaded for flat in offloaded._flats] == [False, True, False]


@pytest.mark.parametrize("seed", range(3))
def test_late_transfers_and_offloaded_activations(scratch: Path, seed: int) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    delay = Delays(seed, most_seconds=0.001)
    with contextlib.ExitStack() as stack:
        stores = [
            DiskStore(scratch / name, MIB, CpuCopies(), threads=2, delay=delay)
            for name in ("p", "a")
        ]
        for store in stores:
            stack.callback(store.close)
        streamed = OffloadedParameters(
            [block.parameters() for block in mine], stores[0], chunk_bytes=8192, verify=True
        )
        stack.callback(streamed.close)
        manager = SwapManager(stores[1], limit_bytes=20_000)
        selector = Selector([], 1)

        class Offloaded(nn.Module):
            def __init__(self, block: nn.Module) -> None:
                super().__init__()
                self.block = block

            def forward(self, x: Tensor) -> Tensor:
                with offloading(manager, selector, 0):
                    return self.block(x)

        blocks = [Offloaded(block) for block in mine]
        for index, block in enumerate(blocks):
            streamed.attach(index, block)
        assert run(blocks, one_f_one_b(3)) == run(plain, one_f_one_b(3))
        assert_same(gradients(mine, streamed), gradients(plain))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("large", [0, 10, 20])
def test_a_slow_tier_holds_one_block_twice(
    monkeypatch: pytest.MonkeyPatch, large: int, split: bool
) -> None:
    """Gradients that are written anew, while the tier has not freed the old ones. (The gradients of many small blocks
    were more than a block.)"""
    widths = [1024 if index == large else 64 for index in range(21)]
    blocks = [  # of whole pages
        nn.Sequential(nn.Linear(64, w, bias=False), nn.ReLU(), nn.Linear(w, 64, bias=False))
        for w in widths
    ]
    store, most = ManualStore(), 0
    streamed = OffloadedParameters([block.parameters() for block in blocks], store)
    allocate = store.slots.allocate

    def noting(size: int) -> StoreSlot:
        nonlocal most
        slot = allocate(size)
        most = max(most, store.slots.used_bytes)
        return slot

    monkeypatch.setattr(store.slots, "allocate", noting)
    for index, block in enumerate(blocks):
        streamed.attach(index, block)
    deferred = [WeightGradStore(None, streamed.holds_memory_of) for _ in range(3)]
    for micro, weight_gradients in enumerate(deferred):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(micro))
        with weight_gradients.splitting() if split else contextlib.nullcontext():
            for block in blocks:
                x = block(x)
        x.sum().backward()
    for weight_gradients in deferred:
        weight_gradients.finish(streamed.offload_gradient, begin=streamed.fetch_gradient)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    assert streamed.take_statistics().high_water <= streamed.limit_bytes
    assert most <= 2 * sum(sizes) + 2 * max(sizes)


def test_a_window_of_nothing_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="window=0"):
        OffloadedParameters([], store, window=0)


def test_what_the_selector_should_know(stream: Stream) -> None:
    mine = model()
    streamed = stream(mine)
    streamed.enter(0)
    assert streamed.holds_memory_of(mine[0].down.t())
    assert streamed.holds_memory_of(mine[0].up.weight.detach())
    assert not streamed.holds_memory_of(batch(0))
