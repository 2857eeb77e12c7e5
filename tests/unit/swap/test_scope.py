"""``with parallax.swap(...)``: any loop under a limit equals the loop without one, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallax
from parallax.swap.lms.scope import Swapping
from tests.unit.swap_fakes import assert_equal

MIB = 2**20
WIDTH, LAYERS, ROWS, STEPS = 128, 6, 256, 4
Optimizer = torch.optim.Optimizer
Outcome = tuple[list[float], dict[str, Tensor], dict[str, Any]]


class Layers(nn.Module):
    """Linear layers; some of their calls run inside a checkpoint."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 4)
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.reentrant is None or number % 2:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def build(**options: Any) -> Layers:
    torch.manual_seed(0)
    return Layers(**options)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def batches(steps: int = STEPS, rows: int = ROWS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(rows, WIDTH, generator=generator)
        yield x, x[:, :4].argmax(1)


def plain_loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bare() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def static_bytes(model: nn.Module) -> int:
    return 2 * sum(p.nbytes for p in model.parameters())


@pytest.fixture
def tight(scratch: Path) -> Callable[..., Swapping]:
    return tightly(scratch)


def tightly(scratch: Path) -> Callable[..., Swapping]:
    """A limit under which activations and states must be offloaded: both are several times the free bytes."""

    def make(
        model: nn.Module, optimizer: Any = (), free_bytes: int = 5 * MIB // 8, **options: Any
    ) -> Swapping:
        defaults = {"minimum_bytes": 1024, "piece_bytes": MIB // 8, "directory": scratch}
        return parallax.swap(
            model, static_bytes(model) + free_bytes, optimizer=optimizer, **{**defaults, **options}
        )

    return make


def outcome(model: nn.Module, optimizer: Optimizer, losses: list[float]) -> Outcome:
    return losses, model.state_dict(), optimizer.state_dict()


def assert_moved(swapping: Swapping) -> None:
    assert swapping.statistics.bytes_out > 0
    assert swapping.statistics.bytes_in > 0
    for states in swapping.states:
        assert states.bytes_out > 0
        assert states.bytes_in > 0


def compare(
    tight: Callable[..., Swapping],
    loop: Callable[[nn.Module, Optimizer], list[float]] = plain_loop,
    make: Callable[[], nn.Module] = build,
    optimize: Callable[[nn.Module], Optimizer] = adamw,
    **options: Any,
) -> Swapping:
    """The same loop without and with a limit."""
    model = make()
    optimizer = optimize(model)
    expected = outcome(model, optimizer, loop(model, optimizer))
    other = make()
    swapped = optimize(other)
    with tight(other, swapped, **options) as swapping:
        losses = loop(other, swapped)
    assert_equal(outcome(other, swapped, losses), expected)
    assert_moved(swapping)
    share = swapping.statistics.limit_bytes
    assert swapping.statistics.high_water <= share
    return swapping


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "adamw, foreach": lambda m: adamw(m, foreach=True),
    "adamw, fused": lambda m: adamw(m, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "sgd with momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=1e-2, momentum=0.9, nesterov=True
    ),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "two groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 1e-3},
        ]
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_is_exact(
    optimize: Callable[[nn.Module], Optimizer], tight: Callable[..., Swapping]
) -> None:
    compare(tight, optimize=optimize)


def test_odd_models(tight: Callable[..., Swapping]) -> None:
    """Tied, frozen, low-precision and channels-last parameters; one that is never used."""

    def make() -> nn.Module:
        model = build()
        model.layers[1][0].weight = model.layers[4][0].weight
        model.layers[2].requires_grad_(False)
        model.unused = nn.Linear(WIDTH, WIDTH)
        model.images = nn.Parameter(torch.randn(16, 16, 3, 3).to(memory_format=torch.channels_last))
        model.layers[5].to(torch.bfloat16).register_forward_pre_hook(
            lambda _, args: args[0].bfloat16()
        )
        model.layers[5].register_forward_hook(
            lambda _, args, output: output.float() + model.images.sum()
        )
        return model

    compare(tight, make=make)


def test_knobs_by_hand(tight: Callable[..., Swapping]) -> None:
    knobs = {"n_tensors": 20, "swapout_threshold": 2, "lb": 2, "swapin_groupby": 2}
    compare(tight, **knobs, eager=True)
    compare(tight, eager=True, verify=True)


def test_nothing_moves_while_all_fits(scratch: Path) -> None:
    model = build()
    optimizer = adamw(model)
    threads = threading.active_count()
    with parallax.swap(
        model, "1GiB", optimizer=optimizer, directory=scratch, minimum_bytes=1024
    ) as swapping:
        plain_loop(model, optimizer)
        assert threading.active_count() == threads
    assert swapping.statistics.bytes_out == swapping.states[0].bytes_out == 0
    assert not scratch.exists()
    assert "kept within the limit" in swapping.report()


def moved_in_one_step(scratch: Path, **settings: Any) -> int:
    """Tensors offloaded in each of two equal steps that fit the limit."""
    model, found = build(), []
    with parallax.swap(
        model, "1GiB", directory=scratch, minimum_bytes=1024, **settings
    ) as swapping:
        for x, y in batches(2, 64):
            F.cross_entropy(model(x), y).backward()
            found.append(swapping.statistics.decisions.get("moved", (0, 0))[0])
    assert found[1] == 2 * found[0]
    return found[0]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_n_tensors_alone_offloads_so_many(scratch: Path, count: int) -> None:
    assert moved_in_one_step(scratch, n_tensors=count) == count


@pytest.mark.parametrize("setting", ["swapin_ahead", "lb", "swapin_groupby"])
def test_a_setting_by_hand_moves_tensors_that_fit(scratch: Path, setting: str) -> None:
    all_tensors = moved_in_one_step(scratch, eager=True)
    assert moved_in_one_step(scratch, **{setting: 2}) == all_tensors > 4
    assert moved_in_one_step(scratch, **{setting: 2}, eager=False) == 0


def test_swapout_threshold_alone_moves_tensors_that_are_used_late(scratch: Path) -> None:
    model, found = build(), []
    with parallax.swap(
        model, "1GiB", directory=scratch, minimum_bytes=1024, swapout_threshold=3
    ) as swapping:
        for x, y in batches(3, 64):
            F.cross_entropy(model(x), y).backward()
            found.append(swapping.statistics.decisions["moved"][0])
    # The uses are known from the first step on.
    assert 0 < found[1] - found[0] == found[2] - found[1] < found[0]


def test_states_are_offloaded_for_larger_batches_and_fetched_for_the_step(
    tight: Callable[..., Swapping],
) -> None:
    def growing(model: nn.Module, optimizer: Optimizer) -> list[float]:
        losses = []
        for rows in (8, 8, 512, 8):
            x, y = next(batches(1, rows))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(swapping[0].states[0].bytes_out if swapping else 0)
        return losses

    seen: list[int] = []
    swapping: list[Swapping] = []
    model, other = build(), build()
    expected = growing(model, adamw(model))
    seen.clear()
    optimizer = adamw(other)
    with tight(other, optimizer, free_bytes=MIB + MIB // 2) as scope:
        swapping.append(scope)
        assert growing(other, optimizer) == expected
    assert seen[0] == seen[1] == 0
    assert seen[2] > 0
    assert scope.statistics.high_water <= scope.statistics.limit_bytes


# ---- what a loop may do


def accumulating(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
    return losses


def with_autocast(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_scheduler(model: nn.Module, optimizer: Optimizer) -> list[float]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    return losses


def with_closure(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses, calls = [], 0
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        losses.append(optimizer.step(closure))
    assert calls == STEPS
    return losses


def with_scaler(model: nn.Module, optimizer: Optimizer) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), scaler.get_scale()]
    return losses


def saving_and_loading(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = plain_loop(model, optimizer)
    found = copy.deepcopy(optimizer.state_dict())
    losses += plain_loop(model, optimizer)
    optimizer.load_state_dict(found)
    assert_equal(optimizer.state_dict(), found)
    return losses + plain_loop(model, optimizer)


def growing_groups(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = plain_loop(model, optimizer)
    extra = nn.Parameter(torch.ones(64, 64))
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones_like(extra)
    model.head.weight.requires_grad_(False)
    return losses + plain_loop(model, optimizer) + extra.flatten()[:2].tolist()


def with_eval(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for x, _ in batches():
        model(x)  # saved, and no backward ever comes
        with torch.no_grad():
            losses.append(model(x).sum().item())
        losses += plain_loop(model, optimizer)[:1]
    return losses


LOOPS = [
    accumulating,
    with_autocast,
    with_scheduler,
    with_closure,
    with_scaler,
    saving_and_loading,
    growing_groups,
    with_eval,
]


@pytest.mark.sampled
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_loops_are_exact(
    loop: Callable[[nn.Module, Optimizer], list[float]], fused: bool, tight: Callable[..., Swapping]
) -> None:
    compare(tight, loop, optimize=lambda m: adamw(m, fused=fused or None))


def test_a_scheduler_made_before(tight: Callable[..., Swapping]) -> None:
    def optimize(model: nn.Module) -> Optimizer:
        optimizer = adamw(model)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return optimizer

    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            losses += plain_loop(model, optimizer)
            schedulers[-1].step()
        return losses

    schedulers: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(tight, loop, optimize=optimize)


# A checkpoint in another.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [False, True], ids=["parts", "all of the model"])
def test_checkpoint(reentrant: bool, around: bool, tight: Callable[..., Swapping]) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        losses = []
        for x, y in batches():
            x.requires_grad_()
            output = checkpoint(model, x, use_reentrant=reentrant) if around else model(x)
            loss = F.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    # Where all is recomputed with torch's own hooks, only the input is saved.
    if not (around and not reentrant):
        compare(tight, loop, lambda: build(checkpointed=reentrant), free_bytes=MIB // 2)
        return
    model, other = build(), build()
    expected = loop(model, adamw(model))
    optimizer = adamw(other)
    with tight(other, optimizer):
        assert loop(other, optimizer) == expected


def compiled(backend: str, tight: Callable[..., Swapping]) -> None:
    from torch._dynamo.utils import counters

    def make() -> nn.Module:
        model = build()
        model.layers = nn.ModuleList(
            torch.compile(layer, backend=backend) for layer in model.layers
        )
        return model

    torch.compiler.reset()
    counters.clear()
    compare(tight, make=make)
    # One of an input that needs no gradient, one of an input that does; none of hooks.
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


def test_compiled_blocks(tight: Callable[..., Swapping]) -> None:
    compiled("aot_eager", tight)


def test_what_a_compiled_block_leaves_to_python_compiles_no_hook(scratch: Path) -> None:
    """Between its graphs such a block calls the operator from Python, whose hooks torch would compile, too."""
    from torch._dynamo import disallow_in_graph
    from torch._dynamo.utils import counters

    layer, x = nn.Linear(WIDTH, WIDTH), torch.rand(ROWS, WIDTH)

    def block() -> Tensor:
        return torch.erfinv(torch.erfinv(layer(x).tanh() / 2) / 2) * 2

    def graphs(scope: contextlib.AbstractContextManager[object]) -> int:
        torch.compiler.reset()
        counters.clear()
        with scope:
            torch.compile(block, backend="aot_eager")().sum().backward()
        return counters["stats"]["unique_graphs"]

    disallow_in_graph(torch.erfinv)
    plain = graphs(contextlib.nullcontext())
    assert plain > 1
    assert graphs(parallax.swap(layer, "1GiB", minimum_bytes=1, directory=scratch)) == plain
    torch.compiler.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.thorough
def test_blocks_of_inductor(scratch: Path) -> None:
    """In a process of its own: inductor's threads stay."""
    code = (
        "from tests.unit.swap.test_scope import *; compiled('inductor', tightly(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(scratch)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
