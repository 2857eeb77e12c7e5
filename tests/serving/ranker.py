"""A model of two inputs and three outputs, of several datatypes, as a user writes it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(), nn.Linear(16, 4))

    def forward(self, tokens: Tensor, shares: Tensor) -> dict[str, Tensor]:
        scores = self.layers((self.embedding(tokens) * shares.unsqueeze(-1)).sum(1))
        return {"scores": scores, "best": scores.argmax(-1), "positive": scores > 0}

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["scores"], targets)
