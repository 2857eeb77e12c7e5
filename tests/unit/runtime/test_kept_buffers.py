"""Buffers go back to what they were before a step."""

from __future__ import annotations

import torch
from torch import nn

from parallax.runtime.health.buffers import KeptBuffers


class Odd(nn.Module):
    """One buffer that is expanded, one that is made in a forward, one that counts, and one too large to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(4), persistent=False)
        self.register_buffer("made", None)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2**19))

    def forward(self) -> None:
        self.made = torch.ones(3)
        self.count += 1
        self.table[3] = 1


def test_all_go_back() -> None:
    module = Odd()
    kept, count = KeptBuffers(module.modules()), module.count
    for _ in range(2):
        kept.remember()
        module()
        kept.restore()
        assert module.made is None
        assert module.count is count
        assert not count.any()
        assert not module.table.any()
        assert module.mask.tolist() == [1.0] * 4
