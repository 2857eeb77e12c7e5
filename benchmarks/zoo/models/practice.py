"""What people do in the forward and to the modules: hooks, counters, checkpoints, parametrisations, frozen parts."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.zoo.entry import Batch, Entry
from benchmarks.zoo.models.rows import (
    CLASSES,
    WIDTH,
    class_loss,
    images,
    named,
    numbers,
    square_loss,
    vectors,
)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


class BYOL(nn.Module):
    """An online net and a copy of it that moves after it, under no_grad, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = _mlp(WIDTH, 32, 32, WIDTH)
        self.target = copy.deepcopy(self.online)
        self.predictor = _mlp(WIDTH, 32, WIDTH)
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def _move(self) -> None:
        for p, t in zip(self.online.parameters(), self.target.parameters()):
            t.data = t.data * 0.9 + p.data * 0.1

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self._move()
        p = self.predictor(self.online(one))
        with torch.no_grad():
            z = self.target(two)
        return p, z.detach()


def cosine_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    del targets
    return (2 - 2 * F.cosine_similarity(*outputs, dim=-1)).mean()


def two_views(rows: int, random: torch.Generator) -> Batch:
    """Two views of a row."""
    x = torch.randn(rows, WIDTH, generator=random)
    return (x, x + 0.1 * torch.randn(rows, WIDTH, generator=random)), torch.zeros(rows)


class DQN(nn.Module):
    """A frozen target net gives the value of the next state; both begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.policy_net, self.target_net = _mlp(WIDTH, 32, 32, 4), _mlp(WIDTH, 32, 32, 4)
        self.target_net.load_state_dict(self.policy_net.state_dict())
        self.target_net.requires_grad_(False).eval()

    def forward(self, batch: dict[str, Tensor] | None = None, **given: Tensor) -> dict[str, Tensor]:
        batch = batch or given
        q = self.policy_net(batch["state"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.target_net(batch["next_state"]).max(1).values
            wanted = batch["reward"] + 0.9 * best * (1 - batch["done"])
        return {"q": q, "wanted": wanted}


class KeywordDQN(DQN):
    """The same with arguments by name."""

    def forward(
        self, state: Tensor, action: Tensor, reward: Tensor, next_state: Tensor, done: Tensor
    ) -> dict[str, Tensor]:
        return super().forward(
            {
                "state": state,
                "action": action,
                "reward": reward,
                "next_state": next_state,
                "done": done,
            }
        )


def transitions(rows: int, random: torch.Generator) -> Batch:
    """States, actions and what came of them, by name."""
    values = {
        "state": torch.randn(rows, WIDTH, generator=random),
        "action": torch.randint(0, 4, (rows,), generator=random),
        "reward": torch.randn(rows, generator=random),
        "next_state": torch.randn(rows, WIDTH, generator=random),
        "done": torch.randint(0, 2, (rows,), generator=random).float(),
    }
    return values, torch.zeros(rows)


def one_dict(rows: int, random: torch.Generator) -> Batch:
    """The same, a dict as the only argument."""
    values, targets = transitions(rows, random)
    return (values,), targets


def q_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    del targets
    return F.smooth_l1_loss(outputs["q"], outputs["wanted"])


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.neg() * ctx.strength, None


class DomainAdversarial(nn.Module):
    """Gradient reversal before one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.features = _mlp(WIDTH, 32, 32)
        self.label, self.domain = _mlp(32, 16, CLASSES), _mlp(32, 16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.features(x)
        return self.label(f), self.domain(GradientReversal.apply(f, 0.3))


def two_heads_loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0]) + F.cross_entropy(outputs[1], targets[1])


def labelled_domains(rows: int, random: torch.Generator) -> Batch:
    """Vectors, their classes and domains."""
    return torch.randn(rows, WIDTH, generator=random), (
        torch.randint(0, CLASSES, (rows,), generator=random),
        torch.randint(0, 2, (rows,), generator=random),
    )


class Counter(nn.Module):
    """Counts its calls in Python, and a schedule of that scales its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(WIDTH, 32, 32, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * min(1.0, 0.1 * self.calls)


class BufferCounter(nn.Module):
    """Counts its calls in a buffer, and a schedule of that scales its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.enter, self.middle = nn.Linear(WIDTH, 32), nn.Linear(32, 32)
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.enter(x))
        if self.training:
            self.steps += 1
        warm = torch.clamp(self.steps.to(x.dtype) / 10, max=1.0)
        return self.leave(F.relu(self.middle(x)) * warm)


class IsInstance(nn.Module):
    """The forward asks of what class each layer is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(3, 8, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3, 2, 1),
                nn.Linear(128, 32),
                nn.Linear(32, CLASSES),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if isinstance(layer, nn.Linear) and x.dim() > 2:
                x = x.flatten(1)
            x = layer(x)
            if isinstance(layer, nn.Linear) and i + 1 < len(self.layers):
                x = F.relu(x)
        return x


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        for p in base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def lora() -> nn.Module:
    """A net whose linear modules were replaced."""
    model = _mlp(WIDTH, 32, 32, 32, CLASSES)
    for i, module in enumerate(model):
        if isinstance(module, nn.Linear):
            model[i] = LoRALinear(module)
    return model


class ZeroHead(nn.Module):
    """Zero-initialised head and orthogonal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
            nn.init.constant_(layer.bias, 0.1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def weight_norms() -> nn.Module:
    """Weight norm on each layer."""
    layers: list[nn.Module] = []
    for inside, outside in ((WIDTH, 32), (32, 32), (32, CLASSES)):
        layers += [parametrizations.weight_norm(nn.Linear(inside, outside)), nn.ELU()]
    return nn.Sequential(*layers[:-1])


def spectral_norms() -> nn.Module:
    """Spectral norm on each layer: its power iteration writes buffers in each forward."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 8), (8, 8), (8, 8)):
        layers += [
            parametrizations.spectral_norm(nn.Conv2d(inside, outside, 3, 2, 1)),
            nn.LeakyReLU(0.1),
        ]
    return nn.Sequential(
        *layers, nn.Flatten(), parametrizations.spectral_norm(nn.Linear(32, CLASSES))
    )


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrised(nn.Module):
    """Own parametrisations: a symmetric matrix and an orthogonal one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        parametrize.register_parametrization(self.a, "weight", Symmetric())
        parametrizations.orthogonal(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.b(F.silu(self.a(x)))))


class MaskedLinear(nn.Linear):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.register_buffer("mask", torch.ones(outside, inside))

    def set_mask(self, mask: Tensor) -> None:
        self.mask.data.copy_(mask.T.to(self.mask.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


class MADE(nn.Module):
    """Masks that the constructor computes from degrees of the units."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH, 32, 32, WIDTH]
        self.net = nn.ModuleList(MaskedLinear(i, o) for i, o in itertools.pairwise(sizes))
        degrees = [torch.arange(size) % (WIDTH - 1) for size in sizes[:-1]]
        degrees[0] = torch.arange(WIDTH)
        masks = [a[:, None] <= b[None, :] for a, b in itertools.pairwise(degrees)]
        masks.append(degrees[-1][:, None] < torch.arange(WIDTH)[None, :])
        for layer, mask in zip(self.net, masks):
            layer.set_mask(mask)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net[:-1]:
            x = F.relu(layer(x))
        return self.net[-1](x)


class Checkpointed(nn.Module):
    """torch.utils.checkpoint around segments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_mlp(WIDTH, 32, WIDTH) for _ in range(3))
        self.rest = _mlp(WIDTH, 32, 32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return checkpoint_sequential(self.rest, 2, x, use_reentrant=False)


class Hooked(nn.Module):
    """register_hook on an activation, in the forward, and a forward hook on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.b.register_forward_hook(lambda module, inputs, output: output * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.c(F.relu(self.b(x)))


class Unused(nn.Module):
    """A head that no forward uses, a frozen stem, a parameter of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = _mlp(WIDTH, 32, 32), _mlp(32, 32, 32)
        self.stem.requires_grad_(False)
        self.head, self.old_head = nn.Linear(32, CLASSES), nn.Linear(32, 10)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.stem(x)
        return self.head(self.body(x)) / self.temperature


class IgnoredHead(nn.Module):
    """An early head that the loss does not look at: its parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.early = nn.Linear(WIDTH, 32), _mlp(32, 32, CLASSES)
        self.rest = _mlp(32, 32, 32, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.first(x))
        early = self.early(x)
        return {"logits": self.rest(x), "early": early}


class OneParameter(nn.Module):
    """y = a·x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x


class MixedPrecision(nn.Module):
    """One part is always in double precision, one in half."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle = nn.Linear(WIDTH, 32), nn.Linear(32, 32)
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        z = x.double()
        z = torch.logcumsumexp(z, dim=-1).to(x.dtype)
        return self.leave(torch.tanh(self.middle(z)))


class Nested(nn.Module):
    """ModuleLists in ModuleDicts in ModuleLists, ParameterList and ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict(
                {
                    "layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)),
                    "norm": nn.LayerNorm(WIDTH),
                }
            )
            for _ in range(3)
        )
        self.gains = nn.ParameterList([torch.ones(WIDTH) for _ in range(3)])
        self.extra = nn.ParameterDict({"shift": torch.zeros(WIDTH), "scale": torch.ones(1)})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for stage, gain in zip(self.stages, self.gains):
            for layer in stage["layers"]:
                x = x + F.gelu(layer(x)) * gain
            x = stage["norm"](x)
        return self.head(x * self.extra["scale"] + self.extra["shift"])


class LayerDrop(nn.Module):
    """Stochastic depth at rate 0, dropout at 0, a training flag that is read."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_mlp(WIDTH, 32, WIDTH) for _ in range(4))
        self.head, self.rate = nn.Linear(WIDTH, CLASSES), rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.rate > 0 and torch.rand(()) < self.rate:
                continue
            x = x + F.dropout(layer(x), 0.0, self.training)
        return self.head(x)


class NormalisedInputs(nn.Module):
    """Running moments of the inputs, which the forward updates in place (as reinforcement learning does)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(1e-4))
        self.net = _mlp(WIDTH, 32, 32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                n = x.shape[0]
                delta = x.mean(0) - self.mean
                total = self.count + n
                self.mean.add_(delta * n / total)
                self.var.mul_(self.count / total).add_(x.var(0, unbiased=False) * n / total)
                self.count.copy_(total)
        return self.net((x - self.mean) / torch.sqrt(self.var + 1e-8))


class Slots(nn.Module):
    """Writes into a tensor made beforehand, slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_mlp(WIDTH, 16, 4) for _ in range(4))
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], 16, dtype=x.dtype, device=x.device)
        for i, head in enumerate(self.heads):
            out[:, 4 * i : 4 * (i + 1)] = head(x)
        out.relu_()
        return self.last(out)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Binary(nn.Module):
    """Binarised weights by a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(32, WIDTH) * 0.3)
        self.w2 = nn.Parameter(torch.randn(32, 32) * 0.3)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, Straight.apply(self.w1)) / WIDTH
        return self.head(F.linear(F.hardtanh(x), Straight.apply(self.w2)) / 32)


class Hyper(nn.Module):
    """A net makes the weights of another, which runs by torch.func.functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(8))
        self.hyper = nn.Linear(8, WIDTH * CLASSES)
        self.body, self.target = _mlp(WIDTH, 32, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hyper(self.code).view(CLASSES, WIDTH)
        made = {"weight": weight, "bias": self.target.bias}
        return torch.func.functional_call(self.target, made, (self.body(x),))


class PrintsAndAsserts(nn.Module):
    """Asks whether values are finite, and for the largest, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        if torch.isnan(x).any():
            raise ValueError("NaN in the activations")
        self.largest = max(self.largest, x.abs().max().item())
        return self.c(F.relu(self.b(x)))


ENTRIES: dict[str, Entry] = {
    "byol": Entry(BYOL, two_views, cosine_loss, "BYOL, target moved in the forward"),
    "dqn": Entry(KeywordDQN, transitions, q_loss, "DQN with target net, dict output"),
    "dqn-one-dict": Entry(DQN, one_dict, q_loss, "DQN, one dict as argument"),
    "reversal": Entry(DomainAdversarial, labelled_domains, two_heads_loss, "gradient reversal"),
    "counter": Entry(Counter, vectors(), class_loss, "Python counter in the forward"),
    "buffer-counter": Entry(BufferCounter, vectors(), class_loss, "counter in a buffer"),
    "isinstance": Entry(IsInstance, images(), class_loss, "isinstance in the forward"),
    "lora": Entry(lora, vectors(), class_loss, "LoRA by hand"),
    "zero-head": Entry(ZeroHead, vectors(), class_loss, "zero head, orthogonal layers"),
    "weight-norm": Entry(weight_norms, vectors(), class_loss, "weight_norm"),
    "spectral-norm": Entry(spectral_norms, images(), class_loss, "spectral_norm", coupled=True),
    "parametrised": Entry(Parametrised, vectors(), class_loss, "parametrize, orthogonal"),
    "made": Entry(MADE, numbers(outputs=WIDTH), square_loss, "MADE, masked linear"),
    "checkpointed": Entry(Checkpointed, vectors(), class_loss, "torch.utils.checkpoint"),
    "hooked": Entry(Hooked, vectors(), class_loss, "hooks on tensors and modules"),
    "unused": Entry(Unused, vectors(), class_loss, "unused and frozen parameters"),
    "ignored-head": Entry(
        IgnoredHead, vectors(), named(class_loss, "logits"), "a head that the loss ignores"
    ),
    "one-parameter": Entry(OneParameter, numbers(1), square_loss, "one parameter"),
    "double-inside": Entry(MixedPrecision, vectors(), class_loss, "a part in double precision"),
    "nested": Entry(Nested, vectors(), class_loss, "nested lists and dicts of modules"),
    "layer-drop": Entry(LayerDrop, vectors(), class_loss, "LayerDrop and dropout of 0"),
    "running-moments": Entry(
        NormalisedInputs, vectors(), class_loss, "running moments of inputs", coupled=True
    ),
    "slots": Entry(Slots, vectors(), class_loss, "writes into slices"),
    "binary": Entry(Binary, vectors(), class_loss, "straight-through estimator"),
    "hyper": Entry(Hyper, vectors(), class_loss, "functional_call with made weights"),
    "asks-values": Entry(PrintsAndAsserts, vectors(), class_loss, "asks for values"),
}
