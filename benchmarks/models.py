"""What the GPU benchmark trains: ResNet (He et al. 2016) and GPT, with a batch, a loss and the bytes they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.model.factory.gpt import GPT, GPTConfig


class Task(Protocol):
    """A model with random data of its kind."""

    @property
    def unit(self) -> str:
        """The name of the items that :meth:`units` counts."""

    def build(self, device: torch.device) -> nn.Module:
        """The model, the same for the same seed of torch."""

    def batch(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, in the precision that such models are trained in."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are each recomputed or sharded as a whole."""

    def units(self, rows: int) -> int:
        """The number of items in ``rows`` that a throughput counts."""


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions with BatchNorm, and a residual."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = (
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.down: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.down = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inside, height, width) → (rows, 4·width, height/stride, width/stride)."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.down(x), inplace=True)


class ResNet(nn.Module):
    """Stem, four groups of bottlenecks, mean, classes. 3, 8, 36 and 3 of width 64 are ResNet-152."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        layers, inside = [], width
        for group, depth in enumerate(depths):
            wide = width * 2**group
            for index in range(depth):
                layers.append(Bottleneck(inside, wide, 2 if group and index == 0 else 1))
                inside = 4 * wide
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3, height, width) → (rows, classes)."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True, kw_only=True)
class ResNetTask:
    """fp32 weights under bf16 autocast, channels last: how convolutions are trained on GPUs with matrix units."""

    depths: tuple[int, ...] = (3, 8, 36, 3)
    width: int = 64
    classes: int = 1000
    image: int = 224
    unit: str = "images"

    def build(self, device: torch.device) -> nn.Module:
        """The model, the same for the same seed of torch."""
        with device:
            return ResNet(self.depths, self.width, self.classes).to(
                memory_format=torch.channels_last
            )

    def batch(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Noise, and random classes."""
        generator = torch.Generator(device).manual_seed(1)
        images = torch.randn(rows, 3, self.image, self.image, generator=generator, device=device)
        classes = torch.randint(0, self.classes, (rows,), generator=generator, device=device)
        return images.contiguous(memory_format=torch.channels_last), classes

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return F.cross_entropy(model(inputs), targets)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The bottlenecks."""
        assert isinstance(model, ResNet)
        return list(model.layers)

    def units(self, rows: int) -> int:
        """Images."""
        return rows


@dataclass(frozen=True, kw_only=True)
class GPTTask:
    """bf16 weights and activations. Eight layers of 4096 are a quarter of those of a 7 B model: 1.9 B parameters with
    their embedding and head, and the ratio of work to bytes of the large one."""

    layers: int = 8
    hidden: int = 4096
    heads: int = 32
    vocabulary: int = 32768
    sequence: int = 2048
    unit: str = "tokens"

    @property
    def parameters(self) -> int:
        """Weights of the matrices; vectors are less than a thousandth of them."""
        return (
            12 * self.layers * self.hidden**2 + (2 * self.vocabulary + self.sequence) * self.hidden
        )

    def build(self, device: torch.device) -> nn.Module:
        """The model, the same for the same seed of torch; never in fp32, which would be the peak."""
        config = GPTConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocabulary=self.vocabulary,
            sequence=self.sequence,
            tied=False,
        )
        with device, _default_type(torch.bfloat16):
            return config.build()

    def batch(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random tokens and those that follow."""
        generator = torch.Generator(device).manual_seed(1)
        tokens = torch.randint(
            0, self.vocabulary, (rows, self.sequence + 1), generator=generator, device=device
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return GPT.loss(model(inputs), targets)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The layers."""
        assert isinstance(model, GPT)
        return list(model.layers)

    def units(self, rows: int) -> int:
        """Tokens."""
        return rows * self.sequence


@contextlib.contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
