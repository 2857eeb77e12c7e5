"""Models of tokens and sequences, written as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Batch, Entry
from benchmarks.zoo.models.rows import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    class_loss,
    sequences,
    token_loss,
    tokens,
)

HEADS = 4


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotary(nn.Module):
    """Tables as non-persistent buffers, as in the first Llama."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        rates = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        angles = torch.outer(torch.arange(length).float(), rates)
        table = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_cached", table.cos(), persistent=False)
        self.register_buffer("sin_cached", table.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        length = q.shape[-2]
        cos, sin = self.cos_cached[:length].to(q.dtype), self.sin_cached[:length].to(q.dtype)
        return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH // 2, False)
        self.wv, self.wo = nn.Linear(WIDTH, WIDTH // 2, False), nn.Linear(WIDTH, WIDTH, False)
        self.w1, self.w3 = nn.Linear(WIDTH, 32, False), nn.Linear(WIDTH, 32, False)
        self.w2 = nn.Linear(32, WIDTH, False)
        self.n1, self.n2 = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        b, t, _ = x.size()
        h = self.n1(x)
        q = self.wq(h).view(b, t, HEADS, -1).transpose(1, 2)
        k = self.wk(h).view(b, t, HEADS // 2, -1).transpose(1, 2).repeat_interleave(2, dim=1)
        v = self.wv(h).view(b, t, HEADS // 2, -1).transpose(1, 2).repeat_interleave(2, dim=1)
        q, k = rotary(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))
        h = self.n2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    """A rotary module that all layers are given; residual weights scaled by the depth."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = Rotary(WIDTH // HEADS, 32)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(depth))
        self.norm, self.output = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                scaled = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if scaled else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.output(self.norm(x))


class MinGPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 32), "act": nn.GELU(), "c_proj": nn.Linear(32, WIDTH)}
        )
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
        x = x + self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    """As minGPT: a ModuleDict, a lambda that holds modules, an assertion about lengths, a configuration check."""

    def __init__(self, targets_inside: bool = False) -> None:
        super().__init__()
        self.block_size, self.targets_inside = 32, targets_inside
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([MinGPTBlock() for _ in range(3)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device = idx.device
        _, t = idx.size()
        assert t <= self.block_size, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=device).unsqueeze(0)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def with_targets(rows: int, random: torch.Generator) -> Batch:
    """Tokens and targets, both inputs: the model computes the loss."""
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=random)
    return (ids[:, :-1], ids[:, 1:]), torch.zeros(rows)


def second_output(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    del targets
    return outputs[1]


def first_output_tokens(outputs: tuple[Tensor, None], targets: Tensor) -> Tensor:
    return token_loss(outputs[0], targets)


class TiedHead(nn.Module):
    """The head is the embedding's matrix, used by F.linear; a mask is cached as an attribute at first use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.mask: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.mask is None or self.mask.size(0) != x.size(1):
            self.mask = torch.ones(x.size(1), x.size(1), device=x.device, dtype=x.dtype).tril()
        for layer in self.layers:
            x = x + torch.tanh(layer(self.mask @ x / x.size(1)))
        return F.linear(x, self.embed.weight)


class TiedModules(nn.Module):
    """``head.weight = embed.weight``, and one layer of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.again = self.a
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in (self.a, self.b, self.c, self.again):
            x = x + F.gelu(layer(x))
        return self.head(x)


class WaveNet(nn.Module):
    """Dilated causal convolutions, gates, skips summed over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Embedding(VOCABULARY, WIDTH)
        self.filter_convs, self.gate_convs = nn.ModuleList(), nn.ModuleList()
        self.residual_convs, self.skip_convs = nn.ModuleList(), nn.ModuleList()
        self.dilations = []
        for _ in range(2):
            dilation = 1
            for _ in range(2):
                self.dilations.append(dilation)
                self.filter_convs.append(nn.Conv1d(WIDTH, WIDTH, 2, dilation=dilation))
                self.gate_convs.append(nn.Conv1d(WIDTH, WIDTH, 2, dilation=dilation))
                self.residual_convs.append(nn.Conv1d(WIDTH, WIDTH, 1))
                self.skip_convs.append(nn.Conv1d(WIDTH, 24, 1))
                dilation *= 2
        self.end = nn.Conv1d(24, VOCABULARY, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x).transpose(1, 2)
        skip: Tensor | float = 0.0
        for i, dilation in enumerate(self.dilations):
            padded = F.pad(x, (dilation, 0))
            h = torch.tanh(self.filter_convs[i](padded)) * torch.sigmoid(self.gate_convs[i](padded))
            skip = self.skip_convs[i](h) + skip
            x = x + self.residual_convs[i](h)
        return self.end(F.relu(skip)).transpose(1, 2)


class TextCNN(nn.Module):
    """Kernels of several widths over embeddings, maxima over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, (k, WIDTH)) for k in (2, 3, 4)])
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).unsqueeze(1)
        pooled = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        return self.fc(torch.cat([F.max_pool1d(p, p.size(2)).squeeze(2) for p in pooled], 1))


def token_classes(rows: int, random: torch.Generator) -> Batch:
    """Tokens and a class for each row."""
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=random)
    return ids, torch.randint(0, CLASSES, (rows,), generator=random)


class Bag(nn.Module):
    """nn.EmbeddingBag and a sparse gradient's dense twin."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", sparse=sparse)
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.bag(x))))


class Universal(nn.Module):
    """One layer called several times, as a universal transformer; the state between is a tuple."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)
        self.step_embed = nn.Parameter(torch.randn(steps, 1, WIDTH) * 0.02)
        self.halt, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        total, remaining = torch.zeros_like(x), x.new_ones(x.shape[:2]).unsqueeze(-1)
        for step in self.step_embed:
            x = self.layer(x + step)
            p = torch.sigmoid(self.halt(x))
            total, remaining = total + remaining * p * x, remaining * (1 - p)
        return self.head(total + remaining * x)


class EarlyExits(nn.Module):
    """A head after each layer, all returned as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True) for _ in range(3)
        )
        self.exits = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = self.embed(x), []
        for layer, leave in zip(self.layers, self.exits):
            x = layer(x)
            found.append(leave(x))
        return found


def exits_loss(outputs: list[Tensor], targets: Tensor) -> Tensor:
    return sum((i + 1) * token_loss(each, targets) for i, each in enumerate(outputs))


@dataclass
class Output:
    """What a model returns, as a dataclass."""

    logits: Tensor
    hidden: Tensor
    cache: None = None


class ReturnsDataclass(nn.Module):
    """Its output is a plain dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Output:
        x, _ = self.gru(self.embed(tokens))
        hidden = F.gelu(self.mix(x))
        return Output(self.head(hidden), hidden)


def dataclass_loss(outputs: Output, targets: Tensor) -> Tensor:
    return token_loss(outputs.logits, targets) + 0.01 * outputs.hidden.square().mean()


class Seq2SeqAttention(nn.Module):
    """An LSTM decodes word by word with teacher forcing, looking at what another encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(WIDTH, WIDTH)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.attn_in, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(2 * WIDTH, VOCABULARY),
        )

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(self.embed(src))
        h = torch.tanh(self.bridge(torch.cat((h[0], h[1]), dim=1)))
        c = torch.cat((c[0], c[1]), dim=1)
        embedded = self.embed(tgt)
        context, outputs = torch.zeros_like(h), []
        for step in range(embedded.shape[1]):
            h, c = self.cell(torch.cat((embedded[:, step], context), dim=1), (h, c))
            scores = torch.bmm(memory, self.attn_in(h).unsqueeze(2)).squeeze(2)
            context = torch.bmm(F.softmax(scores, dim=1).unsqueeze(1), memory).squeeze(1)
            outputs.append(self.out(torch.cat((h, context), dim=1)))
        return torch.stack(outputs, dim=1)


def two_texts(rows: int, random: torch.Generator) -> Batch:
    """Two texts, and what follows each token of the second."""
    src = torch.randint(0, VOCABULARY, (rows, 6), generator=random)
    tgt = torch.randint(0, VOCABULARY, (rows, 6), generator=random)
    return (src, tgt[:, :-1]), tgt[:, 1:]


class Complex(nn.Module):
    """Diagonal state space with complex parameters, by FFT; a global filter of a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.lam = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64) * 0.1)
        self.weight = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.complex64) * 0.1)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        n = x.shape[1]
        z = torch.fft.rfft(x, dim=1) * self.weight
        y = torch.fft.irfft(z, n=n, dim=1)
        t = torch.arange(n, device=x.device)
        kernel = torch.exp(self.lam * t[:, None] * 0.1).real
        return self.head((F.gelu(self.mix(y)) * kernel).mean(1))


class ViewAsReal(nn.Module):
    """Rotation by torch.view_as_complex, with a table of complex numbers in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        rates = 1.0 / (10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
        angles = torch.outer(torch.arange(32).float(), rates)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), False)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            z = torch.view_as_complex(layer(x).reshape(*x.shape[:-1], -1, 2))
            z = z * self.freqs_cis[: x.size(1)]
            x = x + torch.view_as_real(z).flatten(2).type_as(x).cumsum(1) / x.size(1)
        return self.head(x)


class Relative(nn.Module):
    """ALiBi slopes and a learned relative bias looked up by a table of differences."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.relative_bias_table = nn.Parameter(torch.zeros(2 * LENGTH - 1, HEADS))
        positions = torch.arange(LENGTH)
        self.register_buffer("index", positions[:, None] - positions[None, :] + LENGTH - 1)
        slopes = torch.tensor([2 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)])
        self.register_buffer("slopes", slopes.view(HEADS, 1, 1))
        nn.init.trunc_normal_(self.relative_bias_table, std=0.02)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        bias = self.relative_bias_table[self.index.view(-1)].view(LENGTH, LENGTH, -1)
        bias = bias.permute(2, 0, 1).contiguous() - self.slopes * (self.index - LENGTH + 1).abs()
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = qkv(x).view(x.size(0), LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            att = (q @ k.mT / math.sqrt(q.size(-1)) + bias.unsqueeze(0)).softmax(-1)
            x = x + out((att @ v).transpose(1, 2).reshape(x.shape))
        return self.head(x.mean(1))


ENTRIES: dict[str, Entry] = {
    "llama": Entry(Llama, tokens(), token_loss, "Llama by hand, tables of angles not saved"),
    "mingpt": Entry(MinGPT, tokens(), first_output_tokens, "minGPT, second output None"),
    "mingpt-targets": Entry(MinGPT, with_targets, second_output, "minGPT, targets among inputs"),
    "tied-head": Entry(TiedHead, tokens(), token_loss, "F.linear(x, embed.weight), cached mask"),
    "tied-modules": Entry(TiedModules, tokens(), token_loss, "head.weight = embed.weight"),
    "wavenet": Entry(WaveNet, tokens(), token_loss, "WaveNet"),
    "textcnn": Entry(TextCNN, token_classes, class_loss, "TextCNN, padding_idx"),
    "bag": Entry(Bag, token_classes, class_loss, "EmbeddingBag"),
    "universal": Entry(
        Universal, tokens(), token_loss, "one layer several times, adaptive halting"
    ),
    "early-exits": Entry(EarlyExits, tokens(), exits_loss, "a head after each layer, a list"),
    "dataclass": Entry(ReturnsDataclass, tokens(), dataclass_loss, "output is a dataclass"),
    "seq2seq": Entry(Seq2SeqAttention, two_texts, token_loss, "LSTM with attention, step by step"),
    "complex": Entry(Complex, sequences(), class_loss, "complex parameters, FFT"),
    "view-as-complex": Entry(ViewAsReal, tokens(), token_loss, "rotation by complex numbers"),
    "relative": Entry(Relative, sequences(), class_loss, "relative bias table, ALiBi"),
    "sparse-bag": Entry(
        partial(Bag, True),
        token_classes,
        class_loss,
        "EmbeddingBag(sparse=True)",
        optimizers=("sgd",),
    ),
}
