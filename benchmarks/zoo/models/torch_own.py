"""Models made of torch's own large modules."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.zoo.entry import Batch, Entry
from benchmarks.zoo.models.rows import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    class_loss,
    images,
    sequences,
    token_loss,
    tokens,
    vectors,
)

HEADS, INNER = 4, 32


class Translator(nn.Module):
    """nn.Transformer with a causal mask and padding masks."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.target = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, 2, 2, INNER, dropout=0.0, batch_first=batch_first
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """(rows, source length), (rows, target length) → logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device, dtype=self.head.weight.dtype
        )
        x, y = self.source(source), self.target(target)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        padding = torch.zeros_like(source, dtype=x.dtype).masked_fill(source == 0, float("-inf"))
        z = self.transformer(
            x, y, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        return self.head(z if self.batch_first else z.transpose(0, 1))


def translation(rows: int, random: torch.Generator) -> Batch:
    """Two texts and what follows each token of the second."""
    source = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=random)
    target = torch.randint(1, VOCABULARY, (rows, LENGTH - 2), generator=random)
    source[::2, -2:] = 0
    return (source, target[:, :-1]), target[:, 1:]


class Encoder(nn.Module):
    """nn.TransformerEncoder over tokens, the mask a buffer."""

    def __init__(self, causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, 0.0, "gelu", batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(
            layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1) if causal else None
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length) → logits."""
        hidden = self.embedding(x) + self.positions
        return self.head(self.encoder(hidden, mask=self.mask))


class Decoder(nn.Module):
    """nn.TransformerDecoder with learned queries over an encoded image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.queries = nn.Parameter(torch.randn(6, WIDTH))
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3, height, width) → (rows, classes)."""
        memory = self.patches(x).flatten(2).transpose(1, 2)
        queries = self.queries.unsqueeze(0).expand(x.shape[0], -1, -1)
        return self.head(self.decoder(queries, memory).mean(1))


class Recurrent(nn.Module):
    """A stacked recurrent net over tokens; its states begin as zeros that it makes itself."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool, both: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, 2, batch_first=batch_first, bidirectional=both)
        self.mix = nn.Linear(WIDTH * (1 + both), WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length) → logits."""
        hidden = self.embedding(x)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        hidden, _ = self.rnn(hidden)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        return self.head(torch.tanh(self.mix(hidden)))


class LastState(nn.Module):
    """Classes from an LSTM's last state, (layers, rows, width): rows are not in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, 2)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) → (rows, classes)."""
        x, (hidden, _) = self.first(x)
        _, state = self.second(x.transpose(0, 1))
        return self.head(torch.cat([hidden[-1], state[-1]], dim=-1))


class Cells(nn.Module):
    """A loop over time calls two cells."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) → (rows, classes)."""
        h = c = g = x.new_zeros(x.size(0), WIDTH)
        for t in range(x.size(1)):
            h, c = self.lstm(x[:, t], (h, c))
            g = self.gru(h, g)
        return self.head(g)


class Attention(nn.Module):
    """nn.MultiheadAttention with weights returned, in rows-second order, and a residual net."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, length, width) → (rows, classes), mean attention."""
        x = x.transpose(0, 1)
        weights = []
        for attention, norm in zip(self.attentions, self.norms):
            y, w = attention(x, x, x)
            x = norm(x + y)
            weights.append(w)
        return self.head(x.mean(0)), torch.stack(weights, 1)


def _first_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return class_loss(outputs[0], targets) + 0.1 * outputs[1].square().mean()


def convolutions() -> nn.Module:
    """A plain nn.Sequential."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, CLASSES),
    )


def batch_norms() -> nn.Module:
    """nn.Sequential of Sequentials with BatchNorm."""

    def layer(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, 2, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(True)
        )

    return nn.Sequential(
        layer(3, 8), layer(8, 16), layer(16, 16), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def lazy() -> nn.Module:
    """Modules that learn their sizes from the first rows, which the factory gives them."""
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(16), nn.LazyLinear(CLASSES))
    model(torch.zeros(2, WIDTH))
    return model


ENTRIES: dict[str, Entry] = {
    "transformer": Entry(
        partial(Translator, True), translation, token_loss, "torch.nn.Transformer"
    ),
    "transformer-rows-second": Entry(
        partial(Translator, False),
        translation,
        token_loss,
        "torch.nn.Transformer(batch_first=False)",
    ),
    "encoder": Entry(
        partial(Encoder, False, False), tokens(), token_loss, "torch.nn.TransformerEncoder"
    ),
    "encoder-causal": Entry(
        partial(Encoder, True, True), tokens(), token_loss, "torch.nn.TransformerEncoder(mask)"
    ),
    "decoder": Entry(Decoder, images(), class_loss, "torch.nn.TransformerDecoder"),
    "lstm": Entry(partial(Recurrent, nn.LSTM, True), tokens(), token_loss, "torch.nn.LSTM"),
    "lstm-rows-second": Entry(
        partial(Recurrent, nn.LSTM, False), tokens(), token_loss, "torch.nn.LSTM(batch_first=False)"
    ),
    "gru-both-ways": Entry(
        partial(Recurrent, nn.GRU, True, True), tokens(), token_loss, "torch.nn.GRU(bidirectional)"
    ),
    "rnn": Entry(partial(Recurrent, nn.RNN, False), tokens(), token_loss, "torch.nn.RNN"),
    "last-state": Entry(LastState, sequences(), class_loss, "torch.nn.LSTM, last state"),
    "cells": Entry(Cells, sequences(), class_loss, "torch.nn.LSTMCell, GRUCell"),
    "attention": Entry(Attention, sequences(), _first_loss, "torch.nn.MultiheadAttention"),
    "convolutions": Entry(convolutions, images(), class_loss, "torch.nn.Sequential, in place"),
    "batch-norms": Entry(
        batch_norms, images(), class_loss, "torch.nn.BatchNorm2d in Sequentials", coupled=True
    ),
    "lazy": Entry(lazy, vectors(), class_loss, "torch.nn.LazyLinear"),
}
