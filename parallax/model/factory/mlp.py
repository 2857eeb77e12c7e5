"""A multi-layer perceptron that predicts the next byte from a window of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from parallax.errors import check_positive, check_switch
from parallax.model.source import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ModelConfig):
    """Sizes of a model that predicts the next byte from a window of bytes (Bengio et al. 2003).

    ``layers``: number of hidden layers.
    ``hidden``: their width.
    ``embedding``: embedding dimension per byte.
    ``vocabulary``: number of tokens, 256 for bytes.
    ``sequence``: bytes in the window.
    ``verify``: whether to compare the chain with the model's own forward before the first step: true, false, or auto
        (once per model, :func:`~parallax.model.verification.verify.verify`).
    """

    name: str = "mlp"
    layers: int = 4
    hidden: int = 512
    embedding: int = 16
    vocabulary: int = 256
    sequence: int = 32
    verify: bool | str = "auto"

    def __post_init__(self) -> None:
        check_switch("model.verify", self.verify)
        for key in ("layers", "hidden", "embedding", "vocabulary", "sequence"):
            check_positive(f"model.{key}", getattr(self, key))

    def build(self) -> MLP:
        """Return the model, on torch's default device."""
        return MLP(self)


class MLP(nn.Sequential):
    """A plain ``nn.Sequential`` whose children are the blocks: the embedding of the window, ``layers`` × (linear,
    GELU), and a linear layer."""

    def __init__(self, config: MLPConfig) -> None:
        window = nn.Sequential(nn.Embedding(config.vocabulary, config.embedding), nn.Flatten())
        sizes = [config.embedding * config.sequence, *[config.hidden] * config.layers]
        hidden = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(sizes)]
        super().__init__(window, *hidden, nn.Linear(sizes[-1], config.vocabulary))

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of ``logits`` for the byte after the window.

        ``targets`` are these bytes, or rows of bytes of which only the last counts.
        """
        return F.cross_entropy(logits, targets if targets.dim() == 1 else targets[:, -1])
