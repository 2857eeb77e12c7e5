"""ResNet, EfficientNet-B7 and ViT in plain torch, with the sizes and names of their papers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

RESNETS = {14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def _convolution(
    channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True
) -> nn.Sequential:
    """Return a convolution from ``channels`` to ``out`` channels without bias, a BatchNorm and, with ``act``, a
    ReLU."""
    layers = [
        nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    ]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if act else []))


class Bottleneck(nn.Module):
    """The bottleneck block of ResNet: three convolutions and a shortcut. The first two convolutions have ``width``
    channels, the output has four times as many."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            _convolution(channels, width, 1),
            _convolution(width, width, 3, stride),
            _convolution(width, out, 1, act=False),
        )
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(channels, out, 1, stride, act=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x) + self.shortcut(x)
        return found.relu_()


def resnet(depth: int = 50, classes: int = 2) -> nn.Sequential:
    """Return a ResNet for images of any size, with ``classes`` outputs.

    ``depth`` is 50, 101 or 152 (He et al. 2015), or 14, which has one block in each stage.
    """
    blocks: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate(RESNETS[depth]):
        for index in range(count):
            width = 64 * 2**stage
            blocks.append(Bottleneck(channels, width, 2 if stage and not index else 1))
            channels = 4 * width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*blocks, head)


EFFICIENTNET = (  # of B0: factor of expansion, kernel, stride, channels, blocks
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
)


class InvertedBottleneck(nn.Module):
    """The block of EfficientNet: expansion, depthwise convolution, squeeze and excitation, projection, and a shortcut
    if input and output have the same shape."""

    def __init__(self, channels: int, out: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide, squeezed = expand * channels, channels // 4
        before = [] if expand == 1 else _smooth(channels, wide, 1)
        self.wide = nn.Sequential(*before, *_smooth(wide, wide, kernel, stride, wide))
        self.squeeze = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, squeezed, 1), nn.SiLU(inplace=True)),
            *(nn.Conv2d(squeezed, wide, 1), nn.Sigmoid()),
        )
        self.project = _convolution(wide, out, 1, act=False)
        self.adds = channels == out and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        found: Tensor = self.project(wide * self.squeeze(wide))
        return found + x if self.adds else found


def _smooth(
    channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    return [
        _convolution(channels, out, kernel, stride, groups, act=False),
        nn.SiLU(inplace=True),
    ]


def efficientnet(width: float = 2.0, depth: float = 3.1, classes: int = 2) -> nn.Sequential:
    """Return an EfficientNet (Tan and Le 2019), by default B7, without stochastic depth and dropout.

    ``width`` multiplies the channels of B0, and ``depth`` its numbers of blocks. The network has ``classes`` outputs.
    """

    def scaled(channels: int) -> int:
        rounded = max(8, int(channels * width + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * channels * width else rounded

    channels = scaled(32)
    blocks: list[nn.Module] = [nn.Sequential(*_smooth(3, channels, 3, 2))]
    for expand, kernel, stride, out, count in EFFICIENTNET:
        for index in range(math.ceil(count * depth)):
            step = 1 if index else stride
            blocks.append(InvertedBottleneck(channels, scaled(out), expand, kernel, step))
            channels = scaled(out)
    last = 4 * channels
    head = nn.Sequential(
        *_smooth(channels, last, 1),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)),
    )
    return nn.Sequential(*blocks, head)


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2020), by default ViT-S/16, with the parameter names of timm."""

    def __init__(
        self,
        pixels: int = 224,
        patch: int = 16,
        width: int = 384,
        layers: int = 12,
        heads: int = 6,
        classes: int = 2,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(
            nn.init.trunc_normal_(torch.empty(1, (pixels // patch) ** 2 + 1, width), std=0.02)
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x[:, 0]))
        return scores
