"""``with parallax.swap(...)``: any loop under a limit equals the loop without one, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallax
from parallax.errors import BudgetExceeded, ConfigError, SwapError
from parallax.machine.host import return_freed_memory
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
    """A limit under which activations and states must move: both are several times the room."""

    def make(
        model: nn.Module, optimizer: Any = (), room: int = 5 * MIB // 8, **options: Any
    ) -> Swapping:
        defaults = {"minimum_bytes": 1024, "piece_bytes": MIB // 8, "directory": scratch}
        return parallax.swap(
            model, static_bytes(model) + room, optimizer=optimizer, **{**defaults, **options}
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
    assert "kept while there was room" in swapping.report()


def test_states_make_way_for_larger_batches_and_come_back_for_the_step(
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
    with tight(other, optimizer, room=MIB + MIB // 2) as scope:
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
        compare(tight, loop, lambda: build(checkpointed=reentrant), room=MIB // 2)
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.thorough
def test_blocks_of_inductor(scratch: Path) -> None:
    """In a process of its own: inductor's threads stay."""
    code = (
        "from tests.unit.test_swap_scope import *; compiled('inductor', tightly(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(scratch)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_gan(tight: Callable[..., Swapping]) -> None:
    """Two models, one in the other's block: the inner scope has the activations, each the states of its own."""

    def models() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
        torch.manual_seed(0)
        one = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        )
        two = Layers()
        return one, two, adamw(one), adamw(two, lr=1e-3)

    def loop(one: nn.Module, two: nn.Module, first: Optimizer, second: Optimizer) -> list[float]:
        losses = []
        for x, y in batches():
            fake = one(x)
            loss = F.cross_entropy(two(fake.detach()), y)
            loss.backward()
            second.step()
            second.zero_grad()
            other = -F.cross_entropy(two(fake), y)
            other.backward()
            first.step()
            first.zero_grad()
            losses += [loss.item(), other.item()]
        return losses

    expected = loop(*models())
    one, two, first, second = models()
    with tight(one, first) as outer, tight(two, second, room=MIB) as inner:
        assert loop(one, two, first, second) == expected
    assert_moved(inner)
    assert outer.states[0].bytes_out > 0
    one, two, first, second = models()
    with tight(nn.ModuleList([one, two]), [first, second], room=MIB) as both:
        assert loop(one, two, first, second) == expected
    assert_moved(both)


def test_states_too_small_to_move_stay(tight: Callable[..., Swapping]) -> None:
    """Adafactor has rows and columns only; plain SGD has nothing."""
    kinds: list[Callable[..., Optimizer]] = [torch.optim.Adafactor, torch.optim.SGD]
    for kind in kinds:
        model, other = build(), build()
        expected = plain_loop(model, kind(model.parameters(), lr=1e-2))
        optimizer = kind(other.parameters(), lr=1e-2)
        with tight(other, optimizer) as swapping:
            assert plain_loop(other, optimizer) == expected
        assert swapping.statistics.bytes_out > 0
        assert swapping.states[0].bytes_out == 0


def test_optimizer_left_out(tight: Callable[..., Swapping]) -> None:
    model, other = build(), build()
    expected = plain_loop(model, adamw(model))
    with tight(other) as swapping:
        assert plain_loop(other, adamw(other)) == expected
    assert_moved(swapping)


# ---- optimizers out of the ordinary


class Counting(torch.optim.SGD):
    """Keeps a counter in its groups and one in itself, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 1e-2 / group["k"]
        return super().step(closure)


class Together(torch.optim.SGD):
    """The rate of every parameter depends on all."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = float(sum(p.grad.abs().sum() for p in group["params"]))
        return super().step(closure)


def test_counters_of_the_optimizer_count_steps_not_pieces(tight: Callable[..., Swapping]) -> None:
    made: list[Counting] = []

    def optimize(model: nn.Module) -> Optimizer:
        made.append(Counting(model.parameters(), momentum=0.9))
        return made[-1]

    compare(tight, optimize=optimize)
    assert made[0].steps == made[1].steps == STEPS


def test_who_looks_at_all_parameters_is_refused(tight: Callable[..., Swapping]) -> None:
    model = build()
    with (
        pytest.raises(ConfigError, match="LBFGS"),
        tight(model, torch.optim.LBFGS(model.parameters())),
    ):
        pass
    together = Together(model.parameters(), momentum=0.9)
    with (
        pytest.raises(SwapError, match=r"Together updates parameters together.*'lr'"),
        tight(model, together),
    ):
        plain_loop(model, together)


class Lamb(torch.optim.Optimizer):
    """Clips by the norm of all gradients inside ``step``, as timm's Lamb and Adan do."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([p.grad.norm() for p in found]).norm())
        for group in self.param_groups:
            most = group.get("max_grad_norm")
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad * min(1.0, most / norm) if most else p.grad, 0.1)
                state["v"].lerp_(state["m"].square(), 0.1)
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-3, value=-group["lr"])


class FusedLamb(Lamb):
    """Only its name tells."""


class NormedLamb(Lamb):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.max_grad_norm = 1.0


def test_who_clips_inside_step_is_refused(tight: Callable[..., Swapping]) -> None:
    """The norm of a piece is not the norm of all: plain and swapped losses would part without a word."""
    model = build()
    weights, biases = (
        [p for p in model.parameters() if p.dim() > 1],
        [p for p in model.parameters() if p.dim() == 1],
    )
    refused = [
        (
            Lamb(model.parameters(), max_grad_norm=1.0),
            "Lamb: max_grad_norm=1.0 takes the norm of all.*clip_grad_norm_",
        ),
        (Lamb(model.parameters(), pre_norm=True), "pre_norm=True"),
        (
            Lamb([{"params": weights}, {"params": biases, "max_grad_norm": 2.0}]),
            r"max_grad_norm=2\.0",
        ),
        (NormedLamb(model.parameters()), r"NormedLamb: max_grad_norm=1\.0"),
        (FusedLamb(model.parameters()), "FusedLamb updates all parameters together"),
    ]
    for optimizer, message in refused:
        with pytest.raises(ConfigError, match=message), tight(model, optimizer):
            pass
    compare(tight, optimize=lambda m: Lamb(m.parameters(), max_grad_norm=None))


def test_who_begins_to_clip_later_is_refused_then(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = Lamb(model.parameters(), max_grad_norm=0.0)
    with tight(model, optimizer):
        plain_loop(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        optimizer.param_groups[0]["max_grad_norm"] = 1.0
        with pytest.raises(ConfigError, match="max_grad_norm"):
            plain_loop(model, optimizer)
        assert_equal(model.state_dict(), before)


def test_hooks_of_the_optimizer_run_once_and_see_all(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    seen: list[int] = []

    def hook(found: Optimizer, args: Any, kwargs: Any) -> None:
        assert found is optimizer
        seen.append(len(found.param_groups[0]["params"]))

    handles = [optimizer.register_step_pre_hook(hook), optimizer.register_step_post_hook(hook)]
    with tight(model, optimizer):
        plain_loop(model, optimizer)
    assert seen == [2 * LAYERS + 2] * 2 * STEPS
    for handle in handles:
        handle.remove()


def test_states_below_come_up_for_who_reads_them(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    with tight(model, optimizer):
        plain_loop(model, optimizer)
        state = optimizer.state[model.layers[3][0].weight]
        assert state["step"] == STEPS
        assert isinstance(state["exp_avg"], Tensor)
        with pytest.raises(KeyError):
            state["no such state"]
        copy.deepcopy(optimizer)
    assert isinstance(optimizer.state[model.layers[3][0].weight]["exp_avg"], Tensor)
    copy.deepcopy(optimizer)


# ---- entering, leaving, failing


def test_an_exception_leaves_everything_as_it_was(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    hooks = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]

    def fail(*_: Any) -> None:
        next(calls)

    calls = iter(range(STEPS))
    handle = model.register_forward_pre_hook(fail)
    swapping = tight(model, optimizer)
    with pytest.raises(StopIteration), swapping:
        plain_loop(model, optimizer) + plain_loop(model, optimizer)
    handle.remove()
    assert not swapping.open
    assert hooks == [
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
    ]
    other = build()
    same = adamw(other)
    losses = plain_loop(other, same) + plain_loop(other, same)
    with tight(model, optimizer):
        found = plain_loop(model, optimizer)
    assert found == losses[STEPS:]
    assert_equal(optimizer.state_dict(), same.state_dict())


def test_a_failing_step_loses_no_state(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    with tight(model, optimizer):
        plain_loop(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)  # type: ignore[arg-type]
        assert_equal(optimizer.state_dict(), before)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * LAYERS + 2
        plain_loop(model, optimizer)


def test_a_full_tier_loses_no_state(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    plain_loop(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(SwapError, match="is full"), tight(model, optimizer, tier_bytes=MIB // 4):
        plain_loop(model, optimizer)
    found = optimizer.state_dict()["state"]
    assert found.keys() == before["state"].keys()
    assert all(isinstance(state["exp_avg"], Tensor) for state in found.values())


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses every write into a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_step_that_failed_in_the_middle_is_not_taken_again(
    tight: Callable[..., Swapping],
) -> None:
    model, other = build(), build()
    optimizer, same = adamw(model), adamw(other)
    expected = [plain_loop(other, same), plain_loop(other, same)]
    with tight(model, optimizer):
        losses = [plain_loop(model, optimizer)]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        x, y = next(batches(1, 8))
        F.cross_entropy(model(x), y).backward()
        with (
            full_disk(),
            pytest.raises(
                SwapError, match=r"(?s)cannot write.*AdamW has updated some parameters and not"
            ),
        ):
            optimizer.step()
        half = copy.deepcopy(model.state_dict())
        moved = [not torch.equal(half[name], saved[0][name]) for name in half]
        assert any(moved)
        assert not all(moved)
        for _ in range(2):
            with pytest.raises(
                SwapError,
                match=r"the step before failed: AdamW .*load a checkpoint of the model and",
            ):
                optimizer.step(lambda: pytest.fail("a closure of a step that is refused"))
        assert_equal(model.state_dict(), half)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        losses.append(plain_loop(model, optimizer))
    assert losses == expected
    assert_equal(outcome(model, optimizer, []), outcome(other, same, []))


def test_a_step_that_raised_in_the_middle_is_not_taken_again(
    tight: Callable[..., Swapping],
) -> None:
    """Not our error, as where one piece finds no memory for a temporary."""

    class Failing(torch.optim.SGD):
        left = 2 * LAYERS  # more than one step has pieces

        def step(self, closure: Any = None) -> Any:
            Failing.left -= 1
            if not Failing.left:
                raise MemoryError
            return super().step(closure)

    model = build()
    optimizer = Failing(model.parameters(), lr=1e-2, momentum=0.9)
    with tight(model, optimizer):
        with pytest.raises(MemoryError):
            plain_loop(model, optimizer)
        with pytest.raises(SwapError, match="the step before failed"):
            optimizer.step()
    assert all(isinstance(state["momentum_buffer"], Tensor) for state in optimizer.state.values())


def test_a_graph_that_outlives_the_scope_still_runs_backward(
    tight: Callable[..., Swapping],
) -> None:
    model, other = build(), build()
    x, y = next(batches(1, 4 * ROWS))
    F.cross_entropy(model(x), y).backward()
    threads = threading.active_count()
    optimizer = adamw(other)
    F.cross_entropy(other(x[:4]), y[:4]).backward()
    optimizer.step()
    other.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    with tight(other, optimizer) as swapping:
        loss = F.cross_entropy(other(x), y)
    assert swapping.statistics.bytes_out > 0
    assert swapping.states[0].bytes_in > 0
    assert threading.active_count() > threads
    loss.backward()
    assert_equal([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])
    assert all(isinstance(state["exp_avg"], Tensor) for state in optimizer.state.values())
    del loss
    gc.collect()
    assert threading.active_count() == threads


def test_a_graph_dropped_at_exit_closes_the_tier(tight: Callable[..., Swapping]) -> None:
    model = build()
    threads = threading.active_count()
    with tight(model) as swapping:
        kept = model(next(batches(1, 4 * ROWS))[0])
    assert swapping.statistics.bytes_out > 0
    del kept
    gc.collect()
    assert threading.active_count() == threads


def test_a_graph_alive_at_the_end_of_the_program(scratch: Path) -> None:
    code = (
        "import parallax, torch\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])\n"
        f"with parallax.swap(model, '512KiB', directory={str(scratch)!r}, minimum_bytes=1024) as swapping:\n"
        "    kept = model(torch.randn(512, 64)).relu()\n"
        "assert swapping.statistics.bytes_out > 0\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_the_same_model_twice_is_refused(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    with tight(model, optimizer) as swapping:
        with pytest.raises(ConfigError, match=r"inside a parallax\.swap already"), swapping:
            pass
        with (
            pytest.raises(ConfigError, match=r"inside a parallax\.swap already"),
            tight(model.layers),
        ):
            pass
        with pytest.raises(ConfigError, match="optimizer= is inside"), tight(build(), optimizer):
            pass
        assert swapping.open
        plain_loop(model, optimizer)
    with swapping:  # one after the other is fine
        plain_loop(model, optimizer)


def test_a_hundred_steps_leak_nothing(scratch: Path) -> None:
    def steps(count: int) -> None:
        for x, y in batches(count, 64):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = build()
    optimizer = adamw(model)
    process = psutil.Process()
    files, threads = process.num_fds(), threading.active_count()
    limit = static_bytes(model) + MIB // 4
    with parallax.swap(
        model, limit, optimizer=optimizer, directory=scratch, minimum_bytes=1024
    ) as swapping:
        steps(20)
        inside, memory = process.num_fds(), process.memory_info().rss
        steps(100)
        assert process.num_fds() == inside
        assert process.memory_info().rss - memory < 8 * MIB
    assert_moved(swapping)
    assert (process.num_fds(), threading.active_count()) == (files, threads)


# ---- limits


def test_a_limit_that_cannot_be_kept_says_why(tight: Callable[..., Swapping]) -> None:
    model = build()
    with (
        pytest.raises(
            BudgetExceeded,
            match=r"limit 500.0 KiB = parameters and buffers .* gradients .* leaves no room",
        ),
        parallax.swap(model, "500KiB"),
    ):
        pass
    optimizer = adamw(model)
    with (
        pytest.raises(
            BudgetExceeded,
            match=r"limit .* activations .* in use .* [\d.]+ KiB more are needed: raise limit",
        ),
        tight(model, optimizer, room=MIB // 16),
    ):
        plain_loop(model, optimizer)
    (x, y), optimizer = next(batches(1, 8)), adamw(model)
    plain_loop(model, optimizer)
    with (
        pytest.raises(
            BudgetExceeded, match=r"a step of AdamW needs 128.0 KiB of states .* raise limit"
        ),
        tight(model, optimizer, room=MIB // 16),
    ):
        optimizer.step(lambda: F.cross_entropy(model(x), y).backward())  # type: ignore[arg-type,return-value]
    assert all(
        isinstance(state["exp_avg"], Tensor) for state in optimizer.state_dict()["state"].values()
    )


def uneven() -> nn.Module:
    """The states of its last weight are most of all states."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
    )


MAKING: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {}, 2),
    "adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}, 3),
    "adamax": (torch.optim.Adamax, {}, 2),
    "adadelta": (torch.optim.Adadelta, {}, 2),
    "adagrad": (torch.optim.Adagrad, {}, 1),
    "asgd": (torch.optim.ASGD, {}, 1),
    "nadam": (torch.optim.NAdam, {}, 2),
    "radam": (torch.optim.RAdam, {}, 2),
    "rmsprop": (torch.optim.RMSprop, {}, 1),
    "rmsprop, all": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, 3),
    "rprop": (torch.optim.Rprop, {}, 2),
    "sgd, momentum": (torch.optim.SGD, {"momentum": 0.9}, 1),
}


@pytest.mark.parametrize(("kind", "settings", "states"), MAKING.values(), ids=MAKING)
def test_a_step_without_room_for_its_largest_piece_steps_nothing(
    kind: Callable[..., Optimizer],
    settings: dict[str, Any],
    states: int,
    tight: Callable[..., Swapping],
) -> None:
    """Refused in the first step too, which would make the states; a little more room is enough."""
    largest = states * 4 * WIDTH * WIDTH * 4
    for made in (False, True):
        model = uneven()
        optimizer = kind(model.parameters(), lr=1e-3, **settings)
        x = torch.ones(2, WIDTH)
        if made:
            model(x).sum().backward()
            optimizer.step()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with tight(model, optimizer, room=largest - 4096, minimum_bytes=MIB // 16):
            model(x).sum().backward()
            for _ in range(2):
                words = rf"a step of {kind.__name__} needs .* nothing was stepped: raise limit by 4\.0 KiB"
                with pytest.raises(BudgetExceeded, match=words):
                    optimizer.step()
                assert_equal((model.state_dict(), optimizer.state_dict()), before)
        with tight(model, optimizer, room=largest, minimum_bytes=MIB // 16) as swapping:
            for _ in range(3):
                optimizer.step()
                assert swapping.states[0].device_bytes <= largest


def test_what_makes_no_states_needs_no_room_for_them(tight: Callable[..., Swapping]) -> None:
    """Nor is an optimizer of somebody else's refused for a guess."""

    class Plain(torch.optim.SGD):
        pass

    for kind in (torch.optim.SGD, Plain):
        model = uneven()
        optimizer = kind(model.parameters(), lr=1e-3)
        with tight(model, optimizer, room=MIB // 64, minimum_bytes=4096):
            for _ in range(3):
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()


def test_auto_takes_what_is_free() -> None:
    model = build()
    with parallax.swap(model) as swapping:
        plain_loop(model, adamw(model))
    assert 16 * MIB < swapping.statistics.limit_bytes < psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": "8 apples"}, "limit=8 apples"),
        ({"limit": 0}, "limit=0"),
        ({"tier": "none"}, "tier=none"),
        ({"tier": "host"}, "use tier=disk"),
        ({"threads": 0}, "threads=0"),
        ({"lb": 1, "swapin_ahead": 2}, "two names"),
        ({"swapin_groupby": 0}, "swapin_groupby=0"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallax.swap(build(), **options)


def test_a_model_on_no_device() -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ConfigError, match="Layers is on meta"):
        parallax.swap(model)


def test_report_explains(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    scope = tight(model, optimizer)
    assert scope.report().startswith("not entered yet")
    with scope as swapping:
        plain_loop(model, optimizer)
        inside = swapping.report()
    for report in (inside, swapping.report()):
        for part in (
            "limit 1",
            "gradients",
            " out, ",
            "waited",
            "overlapped",
            "high water",
            "disk tier",
            "AdamW",
        ):
            assert part in report
        assert "moved: " in report


# ---- on a limit that the kernel enforces

DEEP, WIDE = 12, 512  # each layer has 1 MiB of weights and saves 4 MiB of 2,048 rows twice

# Beyond what torch itself takes; plain was seen to need more than 142 MiB, swap 100 MiB.
ALLOWED = 120 * MIB


def big_loop(scope: Callable[[nn.Module, Optimizer], Any], layers: int = DEEP) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(layers)])
    optimizer = adamw(model, lr=1e-3)
    x = torch.randn(2048, WIDE, generator=torch.Generator().manual_seed(1))
    losses = []
    with scope(model, optimizer):
        for _ in range(2):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def limited(scratch: str) -> None:
    """In a process of its own: a plain loop until the kernel says no, then the same loop with a limit."""
    return_freed_memory()
    # What torch loads on first use is not the model's.
    big_loop(lambda model, optimizer: bare(), layers=1)
    status = Path("/proc/self/status").read_text().split()
    limit = int(status[status.index("VmData:") + 1]) * 1024 + ALLOWED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    failure = ""
    try:
        big_loop(lambda model, optimizer: bare())
    except RuntimeError as error:
        failure = str(error)
    gc.collect()
    losses = big_loop(
        lambda m, o: parallax.swap(m, "56MiB", optimizer=o, directory=scratch, piece_bytes="4MiB")
    )
    print(json.dumps({"failure": failure, "losses": losses}))


def test_what_does_not_fit_trains(scratch: Path) -> None:
    command = [
        sys.executable,
        "-c",
        f"from tests.unit.test_swap_scope import limited; limited({str(scratch)!r})",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        unlimited = big_loop(lambda model, optimizer: bare())
        output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    found = json.loads(output.splitlines()[-1])
    assert "DefaultCPUAllocator: can't allocate memory" in found["failure"]
    assert found["losses"] == unlimited
