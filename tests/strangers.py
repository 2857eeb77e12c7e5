"""Small models with habits that the zoo's have not: outputs of all kinds, other computations in evaluation, fused
kernels."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

ROWS, WIDTH = 8, 8
STRANGERS: dict[str, type[nn.Module]] = {}
"""Each with ``rows()``, its inputs: a tuple, or a dict of arguments by name."""


def stranger(model: type[nn.Module]) -> type[nn.Module]:
    STRANGERS[model.__name__] = model
    return model


def vectors(*sizes: int) -> Tensor:
    return torch.randn(ROWS, *(sizes or (WIDTH,)), generator=torch.Generator().manual_seed(5))


def numbers(*sizes: int, below: int = 16) -> Tensor:
    return torch.randint(0, below, (ROWS, *sizes), generator=torch.Generator().manual_seed(6))


class Layers(nn.Module):
    rows: Callable[[], Any] = staticmethod(lambda: (vectors(),))

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def body(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.two(F.gelu(self.one(x)))))


# ---- outputs

Pair = namedtuple("Pair", "scores more")


@stranger
class Nested(Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        best = {"best": y.argmax(-1), "none": None}
        return Pair(y, [best, (y > 0, "text", 3), y.double(), y.half()])


@stranger
class Integers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).argmax(-1)


@stranger
class Complex(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.body(x))


@stranger
class Aliases(Layers):
    """Of its input, and of one another, with any strides."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        views = {"view": x.view(-1, 2, 4), "every second": x[:, ::2], "transposed": y.t().t()}
        return {"x": x, "y": y, "again": y, "wide": y.unsqueeze(1).expand(-1, 3, -1), **views}


@stranger
class InPlace(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return self.body(x), x


@stranger
class OwnLoss(Layers):
    rows = staticmethod(lambda: {"x": vectors(), "labels": numbers(below=4)})

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.body(x)
        return {"loss": F.cross_entropy(y, labels), "logits": y}


@stranger
class RowsTogether(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return (y - y.mean(0)) / len(x)


# ---- inputs


@stranger
class KeywordsOnly(Layers):
    rows = staticmethod(lambda: {"left": vectors(), "right": vectors()})

    def forward(self, *, left: Tensor, right: Tensor | None = None, flag: bool = False) -> Tensor:
        return self.body(left) if flag or right is None else self.body(left) + self.head(right)


@stranger
class AnyArguments(Layers):
    rows = staticmethod(lambda: (vectors(), vectors()))

    def forward(self, *given: Tensor) -> Tensor:
        return self.body(given[0]) + self.head(given[1])


@stranger
class Images(nn.Module):
    rows = staticmethod(lambda: (numbers(3, 8, 8, below=256).to(torch.uint8),))

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.InstanceNorm2d(8, track_running_stats=True)
        self.two, self.act = nn.Conv2d(8, 8, 3, groups=2), nn.RReLU()
        self.drops = nn.Sequential(nn.Dropout2d(), nn.FeatureAlphaDropout(), nn.AlphaDropout())

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.two(self.norm(self.one(x.to(self.one.weight.dtype) / 255))))
        return self.drops(x).mean((2, 3))


@stranger
class Tied(nn.Module):
    rows = staticmethod(lambda: (numbers(6),))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(16, 8, padding_idx=0), nn.EmbeddingBag(16, 8)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(tokens)) + self.bag(tokens).unsqueeze(1))


# ---- evaluation


@stranger
class Dropouts(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.one(x)), 0.3, self.training)
        return self.head(F.dropout(self.two(x), training=self.training))


@stranger
class OwnMode(Layers):
    """Its own ``train()`` leaves the norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(16), nn.BatchNorm1d(WIDTH, momentum=None)

    def train(self, mode: bool = True) -> OwnMode:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.two(self.norm(self.one(x)))))


@stranger
class SoftmaxInEvaluation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y if self.training else y.softmax(-1)


@stranger
class HeadOfTraining(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.one(x))
        y = self.head(self.two(h))
        return (y, self.aside(h)) if self.training else y

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        one, other = outputs
        return F.cross_entropy(one, targets) + F.cross_entropy(other, targets)


@stranger
class NoiseInTraining(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + torch.randn_like(x) if self.training else x)


@stranger
class CountsInTraining(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.body(x) * self.count


@stranger
class Forces(Layers):
    """The gradients of an energy, also in evaluation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.body(x).sum(-1)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, -slope


@stranger
class OwnAutocast(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.body(x)


@stranger
class Hooked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.two.register_forward_hook(lambda module, inputs, output: output * 2)
        self.one.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@stranger
class Normed(Layers):
    """The head's norm is a hook of its own, which uses the weight before ``forward`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.spectral_norm(self.one)
        self.two = parametrizations.weight_norm(self.two)
        self.head = nn.utils.spectral_norm(self.head)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@stranger
class Quantized(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("integers", torch.arange(128, dtype=torch.int8).view(16, 8))
        self.register_buffer("scale", torch.linspace(0.01, 0.02, 16))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.integers.to(x.dtype) * self.scale[:, None]
        return self.head(self.two(F.linear(x, weight)))


@stranger
class Recurrent(nn.Module):
    rows = staticmethod(lambda: (vectors(5, WIDTH),))

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.LSTM(WIDTH, 8, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.two, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y, (h, _) = self.one(x)
        y, _ = self.two(
            y
        )  # strided: torch.matmul takes another way if the weight requires a gradient
        return {"y": self.head(y), "h": h.transpose(0, 1)}


# ---- attention, for which torch has fused kernels in evaluation


class Attention(nn.Module):
    rows: Callable[[], Any] = staticmethod(lambda: (vectors(5, 16),))

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.entry, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.encoder = nn.TransformerEncoder(layer, 4, **settings)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.entry(x), src_key_padding_mask=padding))


def padded() -> tuple[Tensor, Tensor]:
    return vectors(5, 16), torch.arange(5) >= (torch.arange(ROWS) % 4 + 2)[:, None]


@stranger
class Encoder(Attention):
    pass


@stranger
class PaddedEncoder(Attention):
    rows = staticmethod(padded)


@stranger
class PaddedPlainEncoder(Attention):
    rows = staticmethod(padded)

    def __init__(self) -> None:
        super().__init__(enable_nested_tensor=False)


@stranger
class SelfAttention(nn.Module):
    rows = staticmethod(lambda: (vectors(5, 16),))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            y, weights = layer(x, x, x)
            x = x + y
        return self.head(x), weights


@stranger
class Translation(nn.Module):
    rows = staticmethod(lambda: (vectors(5, 16), vectors(4, 16)))

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(source, target)
