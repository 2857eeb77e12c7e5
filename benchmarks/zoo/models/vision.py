"""Models of images and points, written as libraries and papers have them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Batch, Entry
from benchmarks.zoo.models.rows import CLASSES, IMAGE, WIDTH, class_loss, images


class PatchEmbed(nn.Module):
    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class ViTAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-2 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), ViTAttention(width, heads)
        self.ls1, self.ls2 = LayerScale(width), LayerScale(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """As timm has it: an attribute called ``blocks``, a class token, initialised by ``apply``."""

    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(4, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (IMAGE // 4) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, CLASSES)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.norm(self.blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


class InvertedResidual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inside * expand
        self.use_res_connect = stride == 1 and inside == outside
        self.conv = nn.Sequential(
            nn.Conv2d(inside, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNet(nn.Module):
    """As torchvision has MobileNetV2: its own initialisation loop over modules."""

    def __init__(self) -> None:
        super().__init__()
        features: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(True))
        ]
        for inside, outside, stride in ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 24, 1)):
            features.append(InvertedResidual(inside, outside, stride, 3))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(24, CLASSES))
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")
            elif isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, 0, 0.01)
                nn.init.zeros_(m.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = F.silu(self.conv_reduce(x.mean((2, 3), keepdim=True)), inplace=True)
        return x * torch.sigmoid(self.conv_expand(s))


class EfficientNet(nn.Module):
    """Squeeze and excitation, SiLU, stochastic depth that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.stages = nn.ModuleList()
        for _ in range(3):
            self.stages.append(
                nn.ModuleDict(
                    {
                        "dw": nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False),
                        "bn": nn.BatchNorm2d(8),
                        "se": SqueezeExcite(8),
                        "pw": nn.Conv2d(8, 8, 1, bias=False),
                    }
                )
            )
        self.head = nn.Linear(8, CLASSES)
        self.drop_path = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.bn1(self.conv_stem(x)), inplace=True)
        for stage in self.stages:
            y = stage["pw"](stage["se"](F.silu(stage["bn"](stage["dw"](x)))))
            if self.training and self.drop_path > 0:
                y = y * (torch.rand(len(y), 1, 1, 1) > self.drop_path)
            x = x + y
        return self.head(x.mean([2, 3]))


class DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inside), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inside, growth, 3, padding=1, bias=False)

    def forward(self, inputs: Any) -> Tensor:
        features = [inputs] if isinstance(inputs, Tensor) else inputs
        return self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))


class DenseNet(nn.Module):
    """Each layer takes the list of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.denselayers = nn.ModuleDict()
        for i in range(4):
            self.denselayers[f"denselayer{i + 1}"] = DenseLayer(8 + 4 * i, 4)
        self.norm5, self.classifier = nn.BatchNorm2d(24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.conv0(x)]
        for _, layer in self.denselayers.items():
            features.append(layer(features))
        x = F.relu(self.norm5(torch.cat(features, 1)), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        nn.init.zeros_(self.bn2.weight)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """As torchvision has it; the last norm of each residual begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Skips from each level down to its level up, sizes fitted by padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 8)
        self.downs = nn.ModuleList([DoubleConv(8, 16), DoubleConv(16, 16)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)])
        self.convs = nn.ModuleList([DoubleConv(32, 8), DoubleConv(16, 8)])
        self.outc = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.inc(x)]
        for down in self.downs:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, conv in zip(self.ups, self.convs):
            x, skip = up(x), skips.pop()
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = conv(torch.cat([skip, x], dim=1))
        return self.outc(x)


def pixels(rows: int, random: torch.Generator) -> Batch:
    """Images and a class for each pixel."""
    return torch.randn(rows, 3, IMAGE, IMAGE, generator=random), torch.randint(
        0, CLASSES, (rows, IMAGE, IMAGE), generator=random
    )


class TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, t: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
        angles = t[:, None] * rates.to(t.dtype)[None]
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class DiffusionBlock(nn.Module):
    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inside), nn.Conv2d(inside, outside, 3, 1, 1)
        self.time = nn.Linear(time, 2 * outside)
        self.norm2, self.conv2 = nn.GroupNorm(4, outside), nn.Conv2d(outside, outside, 3, 1, 1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(F.silu(h))


class DiffusionUNet(nn.Module):
    """Predicts noise from a noised image and a time; the schedule is a table of buffers."""

    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, 100)
        self.register_buffer("alphas", torch.cumprod(1 - betas, 0))
        self.time = TimeEmbedding(WIDTH)
        self.enter = nn.Conv2d(3, 8, 3, 1, 1)
        self.down = nn.ModuleList([DiffusionBlock(8, 8, WIDTH), DiffusionBlock(8, 16, WIDTH)])
        self.middle = DiffusionBlock(16, 16, WIDTH)
        self.up = nn.ModuleList([DiffusionBlock(32, 8, WIDTH), DiffusionBlock(16, 8, WIDTH)])
        self.leave = nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, image: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        alpha = self.alphas[step][:, None, None, None]
        x = alpha.sqrt() * image + (1 - alpha).sqrt() * noise
        emb = self.time(step.to(image.dtype))
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x, emb)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, emb)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), emb)
        return self.leave(x)


def noised(rows: int, random: torch.Generator) -> Batch:
    """Images, noise and times; the noise is the target too."""
    shape = (rows, 3, IMAGE, IMAGE)
    noise = torch.randn(shape, generator=random)
    steps = torch.randint(0, 100, (rows,), generator=random)
    return (torch.randn(shape, generator=random), noise, steps), noise


class MixerLayer(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Patches taken by unfold."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(48, WIDTH)
        self.mixers = nn.Sequential(*[MixerLayer(16, WIDTH) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.unfold(x, kernel_size=4, stride=4).transpose(1, 2)
        return self.head(self.norm(self.mixers(self.proj(x))).mean(dim=1))


class TNet(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, k * k)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 32)
        eye = torch.eye(self.k, dtype=x.dtype, device=x.device).flatten().repeat(batch, 1)
        return (self.fc(x) + eye).view(-1, self.k, self.k)


class PointNet(nn.Module):
    """A T-Net makes a matrix for each cloud; the matrix is returned for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stn, self.fstn = TNet(3), TNet(16)
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        x = points.transpose(2, 1)
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = F.relu(self.conv1(x))
        feat = self.fstn(x)
        x = torch.bmm(x.transpose(2, 1), feat).transpose(2, 1)
        x = self.conv2(x).amax(dim=2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1), feat


def point_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, trans = outputs
    eye = torch.eye(trans.size(1), dtype=trans.dtype)
    off = torch.norm(trans @ trans.transpose(2, 1) - eye, dim=(1, 2))
    return F.nll_loss(logits, targets) + 0.001 * off.mean()


def points(rows: int, random: torch.Generator) -> Batch:
    """Clouds of points and their classes."""
    return torch.randn(rows, 20, 3, generator=random), torch.randint(
        0, CLASSES, (rows,), generator=random
    )


class NeRF(nn.Module):
    """Positional encoding by a list of functions, a skip in the middle, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_fns = [lambda x: x]
        for i in range(4):
            for fn in (torch.sin, torch.cos):
                self.embed_fns.append(lambda x, fn=fn, rate=2.0**i: fn(x * rate))
        wide = 3 * len(self.embed_fns)
        self.skips = [2]
        self.pts_linears = nn.ModuleList(
            [nn.Linear(wide, 32)]
            + [nn.Linear(32 + wide if i + 1 in self.skips else 32, 32) for i in range(3)]
        )
        self.alpha_linear, self.feature = nn.Linear(32, 1), nn.Linear(32, 32)
        self.rgb_linear = nn.Linear(32 + 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        positions, views = torch.split(x, [3, 3], dim=-1)
        encoded = torch.cat([fn(positions) for fn in self.embed_fns], -1)
        h = encoded
        for i, linear in enumerate(self.pts_linears):
            h = F.relu(linear(h))
            if i + 1 in self.skips:
                h = torch.cat([encoded, h], -1)
        rgb = self.rgb_linear(torch.cat([self.feature(h), views], -1))
        return torch.cat([rgb, self.alpha_linear(h)], -1)


def rays(rows: int, random: torch.Generator) -> Batch:
    """Points with directions and their colours."""
    return torch.randn(rows, 8, 6, generator=random), torch.rand(rows, 8, 4, generator=random)


class Perceiver(nn.Module):
    """A few latents read all pixels several times, with the same weights."""

    def __init__(self, rounds: int = 3) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, WIDTH) * 0.02)
        self.enter = nn.Linear(3, WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.norm, self.head, self.rounds = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES), rounds

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.enter(x.flatten(2).mT)
        z = self.latents[None].repeat(x.shape[0], 1, 1)
        for _ in range(self.rounds):
            z = z + self.cross(z, pixels, pixels, need_weights=False)[0]
            z = self.layer(z)
        return self.head(self.norm(z).mean(1))


class Pyramid(nn.Module):
    """A feature pyramid: a dict of maps of several sizes, each with a shared head (as detectors have)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 16)
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.body = nn.ModuleList(
            nn.Conv2d(i, o, 3, 2, 1) for i, o in zip((8, *widths[:-1]), widths)
        )
        self.lateral = nn.ModuleDict({f"p{i}": nn.Conv2d(w, 8, 1) for i, w in enumerate(widths)})
        self.cls_head, self.box_head = nn.Conv2d(8, CLASSES, 3, 1, 1), nn.Conv2d(8, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> dict[str, dict[str, Tensor]]:
        x, maps = self.stem(x), {}
        for i, layer in enumerate(self.body):
            x = F.relu(layer(x))
            maps[f"p{i}"] = x
        found: dict[str, dict[str, Tensor]] = {}
        above = None
        for name in reversed(maps):
            y = self.lateral[name](maps[name])
            if above is not None:
                y = y + F.interpolate(above, size=y.shape[-2:], mode="nearest")
            found[name] = {"classes": self.cls_head(y), "boxes": self.box_head(y)}
            above = y
        return found


def pyramid_loss(outputs: dict[str, dict[str, Tensor]], targets: Tensor) -> Tensor:
    parts = []
    for level in outputs.values():
        logits = level["classes"].mean((2, 3))
        parts.append(F.cross_entropy(logits, targets) + level["boxes"].square().mean())
    return torch.stack(parts).sum()


ENTRIES: dict[str, Entry] = {
    "vit": Entry(VisionTransformer, images(), class_loss, "vision transformer (timm)"),
    "mobilenet": Entry(MobileNet, images(), class_loss, "MobileNetV2 (torchvision)", coupled=True),
    "efficientnet": Entry(EfficientNet, images(), class_loss, "EfficientNet", coupled=True),
    "densenet": Entry(DenseNet, images(), class_loss, "DenseNet (torchvision)", coupled=True),
    "resnet": Entry(ResNet, images(), class_loss, "ResNet (torchvision)", coupled=True),
    "unet": Entry(UNet, pixels, partial(F.cross_entropy), "U-Net", coupled=True),
    "diffusion": Entry(DiffusionUNet, noised, F.mse_loss, "diffusion U-Net with time"),
    "mixer": Entry(MLPMixer, images(), class_loss, "MLP-Mixer"),
    "pointnet": Entry(PointNet, points, point_loss, "PointNet with T-Nets", coupled=True),
    "nerf": Entry(NeRF, rays, F.mse_loss, "NeRF"),
    "perceiver": Entry(Perceiver, images(), class_loss, "Perceiver, one layer several times"),
    "pyramid": Entry(Pyramid, images(), pyramid_loss, "feature pyramid, dicts of dicts"),
}
