"""Models, loops and their comparison for ``parallax.swap(parameters=True)``: the same loop without and with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import parallax
from parallax.swap.lms.scope import Swapping
from parallax.swap.lms.weights import OffloadedWeight
from tests.unit.swap_fakes import assert_equal

MIB = 2**20
WIDTH, ROWS, STEPS = 96, 32, 4
Optimizer = torch.optim.Optimizer
Loop = Callable[[nn.Module, Optimizer], list[Any]]


class Layers(nn.Module):
    """Residual layers; ``checkpointed``: half of them run inside a checkpoint, reentrant or not."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.reentrant is None or number % 2:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class GPT(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x[:, :8].abs().mul(9).long() % WIDTH)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).mean(1)


class Product(torch.autograd.Function):
    """Two products in one operator of the user's own, which saves both weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, second)
        return x @ first @ second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, first, second = ctx.saved_tensors
        inner = gradient @ second.t()
        return inner @ first.t(), x.t() @ inner, (x @ first).t() @ gradient


class FunctionalTie(nn.Module):
    """A head that uses the weight of another module, a weight that is used as views, and an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.both = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embedding(x))
        first, second = self.both.chunk(2, dim=1)
        x = torch.sin(x @ first.t())
        for layer in self.middle:
            x = x + torch.relu(layer(x))
        x = Product.apply(x, self.middle[0].weight, self.middle[3].weight)
        return F.linear(x @ second, self.embedding.weight)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in [(1, 32), (32, 48), (48, 48), (48, 48)]:
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.view(-1, 1, 8, WIDTH // 8)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(24, 48, 2, batch_first=True), nn.LSTM(48, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.view(-1, 4, 24))[0])[0][:, -1]


class Experts(nn.Module):
    """Each step runs some of the layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number in (self.calls % 6, (self.calls * 5) % 6):
            x = x + torch.relu(self.experts[number](x))
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(tied=False),
    "tied gpt": lambda: GPT(tied=True),
    "functional tie": FunctionalTie,
    "convolutions and BatchNorm": Convolutions,
    "lstm": Recurrent,
    "experts": Experts,
    "compiled blocks": lambda: compiled(Layers()),
}


def compiled(model: Layers) -> nn.Module:
    model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")  # type: ignore[assignment]
    model.layers[3].compile(backend="aot_eager")
    return model


def build(make: Callable[[], nn.Module] = Layers) -> nn.Module:
    torch.manual_seed(0)
    return make()


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        yield x, x.argmax(1)


def plain(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Its last gradients stay."""
    found = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def scope(
    model: nn.Module, optimizer: Any, folder: Path, free_bytes: int = 0, **options: Any
) -> Swapping:
    """A limit of half of the bytes of weights, gradients and states, and of ``free_bytes`` for larger activations."""
    size = sum(p.nbytes for p in model.parameters())
    defaults = {"minimum_bytes": 2048, "piece_bytes": MIB // 8, "parameters": True}
    return parallax.swap(
        model,
        2 * size + free_bytes,
        optimizer=optimizer,
        directory=folder,
        **{**defaults, **options},
    )


def compare(
    folder: Path,
    loop: Loop = plain,
    make: Callable[[], nn.Module] = Layers,
    optimize: Callable[[nn.Module], Optimizer] = adamw,
    **options: Any,
) -> Swapping:
    """The same loop without and with a scope: losses, weights, buffers, gradients and states are equal."""
    model = build(make)
    optimizer = optimize(model)
    expected = loop(model, optimizer)
    other = build(make)
    swapped = optimize(other)
    with scope(other, swapped, folder, **options) as swapping:
        assert any(type(p) is OffloadedWeight for p in other.parameters())
        found = loop(other, swapped)
    assert_equal(found, expected)
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(swapped.state_dict(), optimizer.state_dict())
    for one, another in zip(other.parameters(), model.parameters(), strict=True):
        assert type(one) is nn.Parameter
        assert_equal(one.grad, another.grad)
    offloaded = swapping._offloaded
    assert offloaded is not None
    views = loop in (averages, vectors)  # of all weights at one time
    assert views or offloaded.high_water <= offloaded.limit_bytes
    assert "of weights offloaded" in swapping.report()
    return swapping


# ---- what loops do between and around steps


def each_step(
    model: nn.Module, optimizer: Optimizer, after_backward: Callable[[], Any]
) -> list[Any]:
    found: list[Any] = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        found += [loss.item(), after_backward()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def accumulation(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    found = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        found.append(loss.item())
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return found


def clipping_by_norm(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    clip = nn.utils.clip_grad_norm_
    return each_step(model, optimizer, lambda: clip(model.parameters(), 0.1).item())


def clipping_by_foreach(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    clip = nn.utils.clip_grad_norm_
    return each_step(model, optimizer, lambda: clip(model.parameters(), 0.1, foreach=True).item())


def clipping_by_value(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    return each_step(model, optimizer, lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3))


def clipping_by_data(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """An alias of a gradient has a version counter of its own."""

    def clamp() -> None:
        for p in model.parameters():
            p.grad.data.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]

    return each_step(model, optimizer, clamp)


def gradient_norms(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    return each_step(
        model,
        optimizer,
        lambda: [(p.grad.norm().item(), p.grad.shape, p.grad is None) for p in model.parameters()],  # type: ignore[union-attr]
    )


def assigned_gradients(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    def assign() -> None:
        for number, p in enumerate(model.parameters()):
            assert p.grad is not None
            if number % 3 == 0:
                p.grad = p.grad * 0.5 + 1e-4
            elif number % 3 == 1:
                p.grad += 1e-4

    return each_step(model, optimizer, assign)


def kept_gradients(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Gradients of the step before, that Python variables hold, keep their values."""
    before: list[Any] = []

    def compare_with_previous() -> list[float]:
        now = [p.grad for p in model.parameters()]
        found = [(a - b).abs().sum().item() for a, b in zip(now, before)]
        before[:] = now
        return found

    return each_step(model, optimizer, compare_with_previous)


def kept_views_of_gradients(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """A second backward adds to the memory that the views share."""
    found = []
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        views = [p.grad.view(-1) for p in model.parameters()]  # type: ignore[union-attr]
        F.cross_entropy(model(2 * x), y).backward()
        found += [view.sum().item() for view in views]
        del views
        optimizer.step()
        optimizer.zero_grad()
    return found


def bf16_autocast(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    found = []
    for x, y in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def grad_scaler(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.cross_entropy(model(x), y) * (float("inf") if number == 2 else 1)
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        found += [loss.item(), scaler.get_scale()]
        found += [repr(p.grad.sum().item()) for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
    return found


def scheduler(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    return each_step(model, optimizer, cosine.step)


def closure(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    found = []
    for x, y in batches():

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        found.append(optimizer.step(evaluate).item())  # type: ignore[arg-type, union-attr]
    return found


def zeroed_gradients(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    found = plain(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    found += [p.grad.abs().sum().item() for p in model.parameters()]  # type: ignore[union-attr]
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
    return found


def evaluation(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    def evaluate() -> list[float]:
        model.eval()
        found = []
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                found += [model(x).sum().item() for x, _ in batches(2)]
        model.train()
        return found

    return each_step(model, optimizer, evaluate)


def state_dicts(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Saved in one step, loaded in another."""
    found = plain(model, optimizer)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    found += plain(model, optimizer)
    buffer.seek(0)
    weights, states = torch.load(buffer)
    found.append(model.load_state_dict(weights))
    optimizer.load_state_dict(states)
    found += [weights, states]
    return found + plain(model, optimizer)


def copies(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """They are ordinary models, which train by themselves."""
    found = plain(model, optimizer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(p) is nn.Parameter for p in other.parameters())
        found += plain(other, torch.optim.SGD(other.parameters(), lr=0.1))
        found.append(other.state_dict())
    return found + plain(model, optimizer)


def averages(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    target = copy.deepcopy(model)

    def update() -> None:
        mean.update_parameters(model)
        for slow, p in zip(target.parameters(), model.parameters()):
            slow.data.mul_(0.9).add_(p.data, alpha=0.1)

    found = each_step(model, optimizer, update)
    return [*found, mean.state_dict(), target.state_dict()]


def changed_weights(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """In place, through ``data``, by numpy, and exchanged for the averages while the model is evaluated."""

    def change() -> list[float]:
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                if number % 4 == 0:
                    p.mul_(0.99)
                elif number % 4 == 1:
                    p.data.clamp_(-0.1, 0.1)
                elif number % 4 == 2:
                    p.detach().numpy()[...] *= 0.99
                else:
                    p.view(-1)[::7] = 0
            before = [p.data.clone() for p in model.parameters()]
            for p in model.parameters():
                p.data = torch.ones_like(p) / 50
            found = [model(x).sum().item() for x, _ in batches(1)]
            for p, value in zip(model.parameters(), before):
                p.data = value
        return found

    return each_step(model, optimizer, change)


def frozen_and_unfrozen(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    every_second = [*model.parameters()][::2]
    found = plain(model, optimizer)
    for flag in (False, True):
        for p in every_second:
            p.requires_grad_(flag)
        optimizer.zero_grad()
        found += plain(model, optimizer)
        found.append([p.grad is None for p in model.parameters()])
    return found


def gradient_penalty(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    found = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        total = loss + sum(g.square().sum() for g in gradients)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    return found


def by_hand(model: nn.Module, _: Optimizer) -> list[Any]:
    """Without an optimizer."""
    found = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
                p.grad = None
        found.append(loss.item())
    return found


def hooks(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    found: list[Any] = []
    handles = []
    for p in model.parameters():
        handles.append(p.register_hook(lambda g: g * 0.5))
        handles.append(
            p.register_post_accumulate_grad_hook(lambda q: found.append(q.grad.sum().item()))
        )
    found += plain(model, optimizer)
    for handle in handles:
        handle.remove()
    return found + plain(model, optimizer)


def by_hand_in_lists(model: nn.Module, _: Optimizer) -> list[Any]:
    """As optimizers do it: functions of lists of weights and gradients."""
    found = []
    parameters = [*model.parameters()]
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            gradients = [p.grad for p in parameters]
            found += [norm.item() for norm in torch._foreach_norm(gradients)]  # type: ignore[arg-type]
            torch._foreach_mul_(gradients, [0.5] * len(gradients))  # type: ignore[arg-type]
            torch._foreach_add_(parameters, gradients, alpha=-0.1)  # type: ignore[arg-type]
            torch._foreach_zero_(gradients)  # type: ignore[arg-type]
        found.append(loss.item())
    return found


def vectors(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """All weights as one vector and back."""

    def halve() -> float:
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
        return vector.sum().item()

    return each_step(model, optimizer, halve)


def other_users(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Functions that take modules apart, texts of weights and gradients, and properties."""

    def use() -> list[Any]:
        weights = dict(model.named_parameters())
        x, _ = next(batches(1))
        found = [torch.func.functional_call(model, weights, x).sum().item()]
        found += [str(p)[-300:] for p in weights.values()]
        found += [str(p.grad)[-300:] for p in weights.values()]
        found += [[p.stride(), p.is_contiguous(), p.grad.stride()] for p in weights.values()]  # type: ignore[union-attr]
        found += [torch.isfinite(p.grad).all().item() for p in weights.values()]  # type: ignore[arg-type]
        found += [[p.max().item(), p.tolist()[0], p.grad.numpy().sum()] for p in weights.values()]  # type: ignore[union-attr]
        return found

    return each_step(model, optimizer, use)


HABITS: list[Loop] = [
    by_hand_in_lists,
    vectors,
    other_users,
    accumulation,
    clipping_by_norm,
    clipping_by_foreach,
    clipping_by_value,
    clipping_by_data,
    gradient_norms,
    assigned_gradients,
    kept_gradients,
    kept_views_of_gradients,
    bf16_autocast,
    grad_scaler,
    scheduler,
    closure,
    zeroed_gradients,
    evaluation,
    state_dicts,
    copies,
    averages,
    changed_weights,
    frozen_and_unfrozen,
    gradient_penalty,
    by_hand,
    hooks,
]
