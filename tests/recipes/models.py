"""The models of the recipes: small, in any precision, and without biases of attention keys, whose gradients are
rounding errors."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(inner)))


class ResNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Residual(width), Residual(width))
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(F.relu(self.bn1(self.conv1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


class ViT(nn.Module):
    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 16, 0, batch_first=True, norm_first=True, bias=False
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x[:, 0]))
        return scores


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        sizes: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "bias": False}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, **sizes) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 2, 16, **sizes) for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory, x = self.embed(input_ids), self.embed(decoder_input_ids)
        for layer in self.encoder:
            memory = layer(memory)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        scores: Tensor = self.head(x)
        return scores


class DecoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(x)
        q, k, v = self.q_proj(inner), self.k_proj(inner), self.v_proj(inner)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down_proj(F.silu(self.up_proj(self.norm2(x))))


class Decoder(nn.Module):
    """Its parameters are named as Llama's; transformers' own computes norms and losses in fp32."""

    def __init__(self, layers: int = 5, width: int = 8, vocabulary: int = 400, sequence: int = 24):
        super().__init__()
        del sequence
        parts = {
            "embed_tokens": nn.Embedding(vocabulary, width),
            "layers": nn.ModuleList(DecoderLayer(width) for _ in range(layers)),
            "norm": nn.LayerNorm(width),
        }
        self.model = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.model["embed_tokens"](input_ids)
        for layer in cast("nn.ModuleList", self.model["layers"]):
            x = layer(x)
        scores: Tensor = self.lm_head(self.model["norm"](x))
        return scores


def with_lora() -> nn.Module:
    import peft

    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(Decoder(layers=2), settings).base_model.model
    return model


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.expand, self.bn1 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.project, self.bn3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu6(self.bn1(self.expand(x)))
        inner = F.relu6(self.bn2(self.depth(inner)))
        return x + self.bn3(self.project(inner))


class MobileNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(InvertedResidual(width), InvertedResidual(width))
        self.classifier = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu6(self.bn(self.stem(x))))
        scores: Tensor = self.classifier(x.mean((2, 3)))
        return scores


class Bert(nn.Module):
    """The weight of its last layer is that of its embedding."""

    def __init__(self, width: int = 8, vocabulary: int = 16, length: int = 6) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, 0, "gelu", batch_first=True, bias=False)
            for _ in range(3)
        )
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        scores: Tensor = self.decoder(self.norm(F.gelu(self.dense(x))))
        return scores


class Speech(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, width, 5, stride=2, bias=False)
        self.bn1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, bias=False)
        self.bn2 = nn.BatchNorm1d(width)
        self.gru, self.fc = nn.GRU(width, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x))).transpose(1, 2)
        scores: Tensor = self.fc(self.gru(x)[0][:, -1])
        return scores


def with_tied_head() -> Seq2Seq:
    model = Seq2Seq()
    model.head.weight = model.embed.weight
    return model
