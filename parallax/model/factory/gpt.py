"""A GPT-style decoder over bytes, made of blocks: embedding, layers, head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.errors import ConfigError, check_positive, check_switch
from parallax.model.source import ModelConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """Sizes of a GPT-style decoder.

    ``layers``: transformer blocks.
    ``hidden``: model width.
    ``heads``: attention heads; must divide ``hidden``.
    ``vocabulary``: number of tokens, 256 for bytes.
    ``sequence``: tokens per row.
    ``dropout``: probability.
    ``tied``: the head shares the embedding's weight.
    ``verify``: whether to compare the chain with the model's own forward before the first step: true, false, or auto
        (once per model, :func:`~parallax.model.verification.verify.verify`).
    """

    name: str = "gpt"
    layers: int = 8
    hidden: int = 320
    heads: int = 5
    vocabulary: int = 256
    sequence: int = 256
    dropout: float = 0.0
    tied: bool = True
    verify: bool | str = "auto"

    def __post_init__(self) -> None:
        check_switch("model.verify", self.verify)
        for key in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            check_positive(f"model.{key}", getattr(self, key))
        if self.hidden % self.heads:
            raise ConfigError(
                f"model.heads={self.heads}: must divide model.hidden={self.hidden}; type "
                f"model.heads={math.gcd(self.hidden, 8)}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"model.dropout={self.dropout}: accepted are numbers from 0 to below 1"
            )

    def build(self) -> GPT:
        """Return the model, on torch's default device."""
        return GPT(self)


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)
        self.drop = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weights with standard deviation 0.02 (Radford et al. 2019)."""
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings (rows, sequence, hidden) of ``tokens`` (rows, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.drop(self.token(tokens) + self.position(positions))


class Layer(nn.Module):
    """A transformer layer: pre-norm causal attention and an MLP of width 4 × ``hidden``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, self.heads, self.depth = config.hidden, config.heads, config.layers
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weights with standard deviation 0.02, and the two residual output weights with 0.02 / √(2·layers).

        The source is Radford et al. 2019. Biases are 0.
        """
        for linear in (self.qkv, self.out, self.up, self.down):
            residual = linear in (self.out, self.down)
            nn.init.normal_(
                linear.weight, std=0.02 / math.sqrt(2 * self.depth) if residual else 0.02
            )
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x``. Both have the shape (rows, sequence, hidden)."""
        rows, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(rows, length, hidden)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Head(nn.Module):
    """The final norm and the linear layer that computes logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.linear = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight with standard deviation 0.02. If ``tied``, the embedding's weight replaces it later."""
        nn.init.normal_(self.linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (rows, sequence, vocabulary) of ``x`` (rows, sequence, hidden)."""
        return self.linear(self.norm(x))


class GPT(nn.Module):
    """The whole decoder. Its plain forward is the single-process reference for its pipeline."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Head(config)
        if config.tied:
            self.head.linear.weight = self.embedding.token.weight

    def blocks(self) -> list[nn.Module]:
        return [self.embedding, *self.layers, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (rows, sequence, vocabulary) of ``tokens`` (rows, sequence)."""
        for block in self.blocks():
            tokens = block(tokens)
        return tokens

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of ``logits`` over the ``targets`` that are not -100."""
        return F.cross_entropy(
            logits.flatten(0, 1).float()
            if logits.dtype == torch.bfloat16
            else logits.flatten(0, 1),
            targets.flatten(),
        )
