"""``parallax.swap(parameters=True)``: weights and gradients are offloaded too, and every loop is equal bit for bit."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallax
from parallax.errors import BudgetExceeded, ConfigError, SwapError
from parallax.machine.host import ResidentMeter, data_bytes, trim_freed_memory
from parallax.swap.lms.weights import OffloadedModel, OffloadedWeight
from tests.unit.swap_fakes import KINDS, assert_equal, storing
from tests.unit.swap_loops import (
    GPT,
    HABITS,
    MIB,
    MODELS,
    WIDTH,
    Convolutions,
    FunctionalTie,
    Layers,
    Loop,
    Optimizer,
    Recurrent,
    adamw,
    batches,
    build,
    by_hand,
    clipping_by_norm,
    compare,
    grad_scaler,
    plain,
    scope,
)


def tied_gpt() -> nn.Module:
    return GPT(tied=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_model_is_exact(make: Callable[[], nn.Module], scratch: Path) -> None:
    compare(scratch, make=make, free_bytes=MIB if make in (Convolutions, Recurrent) else 0)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw, foreach": lambda m: adamw(m, foreach=True),
    "adamw, fused": lambda m: adamw(m, fused=True),
    "nesterov, foreach": lambda m: torch.optim.SGD(
        m.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5),
    "two groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 1e-3},
        ]
    ),
}


@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_is_exact(
    optimize: Callable[[nn.Module], Optimizer], scratch: Path
) -> None:
    compare(scratch, optimize=optimize)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("loop", HABITS, ids=lambda loop: loop.__name__)
@pytest.mark.filterwarnings("ignore:.* of offloaded weights stay:RuntimeWarning")
def test_every_habit_is_exact(loop: Loop, scratch: Path) -> None:
    compare(scratch, loop)


def refused(pattern: str) -> Any:
    return pytest.raises(ConfigError, match=pattern)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_exact(reentrant: bool, scratch: Path) -> None:
    compare(scratch, make=lambda: Layers(checkpointed=reentrant), verify=True)


def test_a_fused_step_divides_the_gradients_by_the_loss_scale(scratch: Path) -> None:
    """It changes gradients without a new version."""
    compare(scratch, grad_scaler, optimize=lambda m: adamw(m, fused=True))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *(
            pytest.param(make, kind, marks=pytest.mark.slow if "late" in kind else ())
            for make in (FunctionalTie, tied_gpt)
            for kind in KINDS
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_late_transfers_change_nothing(
    make: Callable[[], nn.Module], kind: str, scratch: Path
) -> None:
    """Copies that end in any order, as those of an accelerator, and no memory that is freed before they end."""

    def loop(model: nn.Module) -> list[Any]:
        found = clipping_by_norm(model, torch.optim.SGD([torch.zeros(1)], lr=1.0))
        return found + by_hand(model, torch.optim.SGD([torch.zeros(1)], lr=1.0))

    model, other = build(make), build(make)
    expected = loop(model)
    delays = random.Random(3)
    with storing(kind, scratch, delay=lambda: delays.random() / 500) as (store, copies):
        offloaded = OffloadedModel(
            other, [], store, lambda: None, limit=MIB, minimum_bytes=2048, verify=True
        )
        with offloaded.saving(torch.autograd.graph.saved_tensors_hooks(_same, _same)):
            assert_equal(loop(other), expected)
        offloaded.restore()
        assert store.slots.used_bytes == 0
        assert getattr(copies, "strays", 0) == 0
    assert_equal(other.state_dict(), model.state_dict())


def _same(tensor: Tensor) -> Tensor:
    return tensor


def test_steps_inside_the_backward_are_exact(scratch: Path) -> None:
    """One optimizer for each parameter, stepped by a hook when its gradient is made."""

    def train(model: nn.Module) -> tuple[list[float], Any]:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        limited = scope(model, [*optimizers.values()], scratch)
        found = []
        with limited if model is models[1] else contextlib.nullcontext():
            for x, y in batches():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                found.append(loss.item())
        return found, model.state_dict()

    models = [build(), build()]
    expected = train(models[0])
    assert_equal(train(models[1]), expected)


def test_the_fast_paths_of_transformers_are_the_same(scratch: Path) -> None:
    """They are taken in evaluation, with nested tensors, unless a weight has torch functions of its own."""

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        return nn.TransformerEncoder(layer, 3)

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        found = []
        padding = torch.arange(8).expand(4, 8) >= torch.tensor([[8], [5], [3], [6]])
        for x, _ in batches():
            rows = x.view(4, 8, WIDTH)
            model.train()
            model(rows, src_key_padding_mask=padding).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found.append(model(rows, src_key_padding_mask=padding))
                assert found[-1][~padding[:, : found[-1].shape[1]]].any()
        return found

    compare(scratch, loop, make=make, free_bytes=MIB)


def test_a_model_enters_again(scratch: Path) -> None:
    model, other = build(), build()
    optimizer, swapped = adamw(model), adamw(other)
    again = scope(other, swapped, scratch)
    for each in (again, again, scope(other, swapped, scratch)):
        expected = plain(model, optimizer)
        with each:
            assert plain(other, swapped) == expected
            assert type(other.head.weight) is OffloadedWeight
        assert_equal(other.state_dict(), model.state_dict())


def test_parametrized_weights_are_exact(scratch: Path) -> None:
    def make() -> nn.Module:
        model = Layers()
        nn.utils.parametrizations.weight_norm(model.layers[0][1])  # type: ignore[index]
        nn.utils.parametrizations.spectral_norm(model.layers[1][1])  # type: ignore[index]
        nn.utils.parametrizations.orthogonal(model.layers[2][1])  # type: ignore[index]
        return model

    compare(scratch, make=make, free_bytes=MIB)


def test_gradients_from_before_the_scope_count(scratch: Path) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        return [optimizer.step(), *plain(model, optimizer)]

    models = [build(), build()]
    optimizers = [adamw(model) for model in models]
    for model in models:
        x, y = next(batches(1))
        F.cross_entropy(model(x), y).backward()
    expected = loop(models[0], optimizers[0])
    with scope(models[1], optimizers[1], scratch):
        assert loop(models[1], optimizers[1]) == expected
    assert_equal(models[1].state_dict(), models[0].state_dict())


def test_a_graph_that_outlives_the_scope_has_its_weights(scratch: Path) -> None:
    models = [build(FunctionalTie), build(FunctionalTie)]
    x, y = next(batches(1))
    F.cross_entropy(models[0](x), y).backward()
    with scope(models[1], (), scratch, free_bytes=MIB):
        loss = F.cross_entropy(models[1](x), y)
    loss.backward()
    for one, another in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_equal(one.grad, another.grad)


def test_an_error_in_a_forward_leaves_the_model_usable(scratch: Path) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        def fail(*_: Any) -> None:
            raise ValueError

        for part in (model.layers[1].norm1, model.layers[2].self_attn):  # type: ignore[index, union-attr]
            handle = part.register_forward_pre_hook(fail)
            with pytest.raises(ValueError):  # noqa: PT011
                model(torch.zeros(4, WIDTH))
            handle.remove()
        return plain(model, optimizer)

    compare(scratch, loop, make=lambda: GPT(tied=False))


def test_parameters_that_cannot_move_stay(scratch: Path) -> None:
    """Tied memory, channels-last, TorchScript, complex and small ones."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Layers()
            self.shared = self.base.head.weight.detach()
            self.images = nn.Parameter(
                torch.randn(16, 16, 3, 3).to(memory_format=torch.channels_last)
            )
            self.waves = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
            self.script = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH))
            self.small = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            extra = self.images.sum() + self.waves.abs().sum() + self.shared.sum()
            return self.script(self.base(x)) * self.small + extra

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        odd: Any = model
        found = plain(model, optimizer)
        resident = [odd.base.head.weight, odd.images, odd.waves, odd.small, odd.script.weight]
        assert all(type(p) is not OffloadedWeight for p in resident)
        return [*found, odd.shared.sum().item()]

    compare(scratch, loop, make=Odd, free_bytes=MIB)


def test_nested_scopes_are_exact(scratch: Path) -> None:
    """The hooks of the inner scope see the weights of both."""

    def train(models: list[nn.Module], optimizers: list[Optimizer]) -> list[Any]:
        found = []
        for x, _ in batches():
            loss = models[1](models[0](x)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return [*found, *(model.state_dict() for model in models)]

    pairs = [[build(), build(FunctionalTie)] for _ in range(2)]
    expected = train(pairs[0], [adamw(model) for model in pairs[0]])
    optimizers = [adamw(model) for model in pairs[1]]
    with (
        scope(pairs[1][0], optimizers[0], scratch),
        scope(pairs[1][1], optimizers[1], scratch, free_bytes=MIB),
    ):
        assert_equal(train(pairs[1], optimizers), expected)


# ---- refusals


def test_another_thread(scratch: Path) -> None:
    model = build()
    with (
        scope(model, (), scratch),
        ThreadPoolExecutor(1) as pool,
        refused("on another thread than that which entered"),
    ):
        pool.submit(model, torch.zeros(1, WIDTH)).result()


def test_an_optimizer_that_the_scope_does_not_know(scratch: Path) -> None:
    model = build()
    with scope(model, (), scratch), refused("AdamW steps offloaded parameters.*optimizer="):
        plain(model, adamw(model))


def test_an_optimizer_that_cannot_be_divided(scratch: Path) -> None:
    class Together(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            parameters = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            with torch.no_grad():
                for p in parameters:
                    p -= p.grad / norm

    model = build()
    optimizer = Together(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    with scope(model, optimizer, scratch), refused("Together.*parameters=False"):
        plain(model, optimizer)
    assert_equal(model.state_dict(), before)


def test_data_parallel(scratch: Path) -> None:
    model = nn.DataParallel(build())
    with (
        refused("parameters=True: DataParallel sums gradients"),
        scope(model, (), scratch),
    ):
        pass


def test_memory_that_is_replaced(scratch: Path) -> None:
    model = build()
    weight = model.head.weight
    with scope(model, (), scratch):
        for replace in (lambda: weight.set_(torch.zeros(4)), lambda: weight.resize_(4)):
            with refused("_ replaces the memory"), torch.no_grad():
                replace()
        with refused(r"assignment to \.data"):
            weight.data = torch.zeros(4)
        with refused(r"assignment to \.data"):
            model.double()
        backup = weight.data  # of an average: it must not become the average
        with refused(r"assigned while a Python variable holds a view.*p\.data\.clone"):
            weight.data = torch.zeros(WIDTH, WIDTH)
        assert backup.any()


def test_sparse_gradients(scratch: Path) -> None:
    model = build(lambda: nn.Sequential(nn.Embedding(WIDTH, WIDTH, sparse=True)))
    with (
        scope(model, (), scratch, free_bytes=MIB),
        pytest.raises(SwapError, match="sparse gradient"),
    ):
        model(torch.arange(4)).sum().backward()


def test_a_compiled_function(scratch: Path) -> None:
    model = build()
    function = torch.compile(lambda x: F.linear(x, model.head.weight), backend="eager")
    with (
        scope(model, (), scratch, free_bytes=MIB),
        pytest.raises(Exception, match=r"torch\.compile traces a function that uses offloaded"),
    ):
        function(torch.randn(2, WIDTH))


def test_a_limit_that_one_parameter_exceeds(scratch: Path) -> None:
    model = build(lambda: nn.Sequential(nn.Linear(512, 512)))
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(BudgetExceeded, match="offloaded parameters and gradients while on the dev"),
        parallax.swap(model, 3 * MIB, directory=scratch, parameters=True),
    ):
        pass
    assert_equal(model.state_dict(), before)


def test_a_tier_that_is_too_small_leaves_the_model_as_it_was(scratch: Path) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SwapError), scope(model, (), scratch, tier_bytes=MIB // 4):
        pass
    assert_equal(model.state_dict(), before)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_views_in_python_variables_keep_weights_on_the_device(scratch: Path) -> None:
    model = build()
    with scope(model, (), scratch) as swapping:
        with pytest.warns(RuntimeWarning, match="of offloaded weights stay on the device"):
            views = [p.detach() for p in model.parameters()]
        assert not any(view.isnan().any() for view in views)
        del views
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))
        assert swapping._offloaded is not None
        assert swapping._offloaded._offloaded.resident_bytes <= swapping._offloaded.limit_bytes


# ---- memory of the process


def wide(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(768, 768), nn.Tanh()) for _ in range(layers)])


def clipped(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = model(torch.randn(16, 768, generator=generator)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def measured(folder: str, limit: int) -> None:
    """In a process of its own: losses under ``limit`` MiB (0: none), and the most memory beyond what was there before
    the model."""
    first = wide(1)
    clipped(first, adamw(first), 1)  # what torch loads on first use is not the model's
    del first
    trim_freed_memory()
    before = data_bytes()
    model = wide(20)
    optimizer = adamw(model)
    if not limit:
        print(json.dumps([clipped(model, optimizer, 3)]))
        return
    with parallax.swap(
        model, limit * MIB, optimizer=optimizer, directory=folder, parameters=True
    ) as scope:
        entered, meter = data_bytes() - before, ResidentMeter()
        found = clipped(model, optimizer, 3)
        taken = entered + meter.peak_bytes()
        report = scope.report()
    print(json.dumps([found, taken, report]))


def run(folder: Path, limit: int) -> list[Any]:
    program = (
        "from tests.unit.swap.test_scope_parameters import measured; "
        f"measured({str(folder)!r}, {limit})"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_weights_larger_than_the_limit_train_within_it(scratch: Path) -> None:
    """45 MiB of weights, 180 MiB with gradients and states, under a limit of 40 MiB."""
    plain_losses, *_ = run(scratch, 0)
    losses, taken, report = run(scratch, 40)
    assert losses == plain_losses
    # what operators need while they run, and what malloc keeps
    assert taken < (40 + 16) * MIB
    assert "offloaded parameters and gradients while on the device 9.0 MiB" in report
