"""Small models of every shape that a chain must carry, with a loss and batches: for tests of cutting and of training.

Nothing but torch's own modules, and transformers' by their configurations. All are without dropout, so that one
process and many compute the same, but for what a test adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from parallax.runtime.batch import TensorRows


@dataclass(frozen=True)
class Entry:
    """``build()`` makes the model; ``loss(outputs, targets)`` is the mean over rows; ``batch(rows, step)`` makes rows,
    inputs as the model takes them. ``buffers``: it counts statistics, so replicas do not see what one process sees."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batch: Callable[[int, int], TensorRows]
    buffers: bool = False

    def sample(self, rows: int) -> Any:
        """Inputs for ``describe``."""
        return self.batch(rows, 0).inputs(0, rows)


def _random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


# ---- images ----------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(entering, leaving, 3, padding=1)
        self.norm = nn.GroupNorm(2, leaving)
        self.two = nn.Conv2d(leaving, leaving, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.norm(self.one(x)))))


class UNet(nn.Module):
    """Skips jump over all that lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(3, 4), Convolutions(4, 8), Convolutions(8, 8)])
        self.middle = Convolutions(8, 8)
        self.up = nn.ModuleList([Convolutions(16, 8), Convolutions(16, 4), Convolutions(8, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([F.interpolate(x, size=skip.shape[2:]), skip], dim=1))
        return self.out(x)


def _segment(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def unet_batch(rows: int, step: int) -> TensorRows:
    random = _random(step)
    return TensorRows(
        torch.randn(rows, 3, 16, 16, generator=random),
        torch.randint(0, 2, (rows, 16, 16), generator=random),
    )


class Residual(nn.Module):
    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, leaving, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(leaving)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(leaving, leaving, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(leaving)
        self.short = nn.Sequential(nn.Conv2d(entering, leaving, 1), nn.BatchNorm2d(leaving))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.short(x)
        return self.relu(y)


class ResNet(nn.Module):
    """BatchNorm, in-place operations, and layers in nested Sequentials, as torchvision has them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.pool(x), 1))


def resnet_batch(rows: int, step: int) -> TensorRows:
    random = _random(step)
    return TensorRows(
        torch.randn(rows, 3, 8, 8, generator=random), torch.randint(0, 5, (rows,), generator=random)
    )


# ---- towers ----------------------------------------------------------------------------------------


class Towers(nn.Module):
    """A shared trunk runs on two inputs, given by name; a head for each of several branches, joined in the loss."""

    def __init__(self, branches: int = 4) -> None:
        super().__init__()
        self.query, self.item = nn.Linear(6, 8), nn.Linear(10, 8)
        self.trunk = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(branches))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, item: Tensor, weight: Tensor | None = None) -> dict[str, Any]:
        left, right = self.trunk(self.query(query)), self.trunk(self.item(item))
        heads = [branch(left) * self.scale for branch in self.branches]
        return {"heads": heads, "score": (left * right).sum(-1), "weight": weight}


def towers_loss(outputs: dict[str, Any], targets: tuple[Tensor, Tensor]) -> Tensor:
    classes, scores = targets
    heads = torch.stack([F.cross_entropy(head, classes) for head in outputs["heads"]])
    return heads.sum() + F.mse_loss(outputs["score"], scores)


def towers_batch(rows: int, step: int) -> TensorRows:
    random = _random(step)
    inputs = {
        "query": torch.randn(rows, 6, generator=random),
        "item": torch.randn(rows, 10, generator=random),
    }
    classes = torch.randint(0, 4, (rows,), generator=random)
    return TensorRows(inputs, (classes, torch.randn(rows, generator=random)))


# ---- recurrence ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """One recurrent module runs several times, its state going from one run to the next."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.mixers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.cell = kind(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        x = (
            self.embedding(tokens)
            + torch.arange(length, device=tokens.device)[None, :, None] / length
        )
        state = torch.zeros(1, rows, 8, device=tokens.device, dtype=x.dtype)
        state = (state, state) if isinstance(self.cell, nn.LSTM) else state
        for mixer in self.mixers:
            y, state = self.cell(torch.tanh(mixer(x)), state)
            x = x + y
        return self.head(x)


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def gru() -> nn.Module:
    return Recurrent(nn.GRU)


def tokens_batch(rows: int, step: int, length: int = 6, vocabulary: int = 16) -> TensorRows:
    tokens = torch.randint(0, vocabulary, (rows, length + 1), generator=_random(step))
    return TensorRows(tokens[:, :-1], tokens[:, 1:])


# ---- tables without rows


class Positions(nn.Module):
    """A table of positions and a mask made from the sequence's length, used by all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.table = nn.Parameter(torch.randn(1, 12, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("decay", torch.linspace(0, 1, 12), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.size()
        assert length <= 12, "longer than the table"
        x = self.embed(tokens) + self.table[:, :length]
        mask = torch.ones(length, length, dtype=x.dtype, device=tokens.device).tril()
        for layer in self.layers:
            x = layer(x + mask @ x) * self.decay[:length, None]
        return F.linear(x, self.embed.weight).view(rows, -1, 16)


# ---- decisions about values ------------------------------------------------------------------------


class Round(torch.autograd.Function):
    """Rounds forward, passes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 64).round() / 64

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Mixture(nn.Module):
    """Every token goes to one expert; an expert without tokens does not run. The router's bias is frozen."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.router.bias.requires_grad_(False)
        nn.init.normal_(self.router.weight)  # clear choices: rounding must not turn one over
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        share, chosen = shares.max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():  # asks for values
                result[mine] = (Round.apply(expert(x[mine])) * share[mine].unsqueeze(-1)).to(
                    result.dtype
                )
        return x + result


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Mixture(8, 3) for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = F.layer_norm(layer(x), x.shape[-1:])
        return self.head(x)


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition that begins at zero: a normed weight, a masked one, constants in a table
    and in an attribute. Only its constructor knows what they begin with."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = parametrizations.weight_norm(nn.Linear(width, width))
        self.base.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.empty(rank, width)),
            nn.Parameter(torch.zeros(width, rank)),
        )
        nn.init.orthogonal_(self.a)
        self.out = nn.Linear(width, width)
        parametrize.register_parametrization(self.out, "weight", _Masked(width))
        self.register_buffer("table", torch.linspace(0.5, 1.5, width), persistent=False)
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        changed = self.base(x) + x @ self.a.T @ self.b.T * self.scale
        return x + self.out(torch.tanh(changed) * self.table)


class _Masked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(width, width)))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def adapted() -> nn.Module:
    """No module of it could initialise itself."""
    return nn.Sequential(nn.Embedding(16, 8), *[Adapted(8, 2) for _ in range(3)], nn.Linear(8, 16))


# ---- transformers ----------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT = {"vocab_size": 64, "max_position_embeddings": 32}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, **_TEXT, **_TOKENS, num_key_value_heads=2))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=4, n_positions=32, **drops, **_TOKENS
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES, **_TEXT, **_NO_DROPOUT, **_TOKENS))


def bert_classes() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(**_SIZES, **_TEXT, **_NO_DROPOUT, **_TOKENS, num_labels=5)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(**_SIZES, **_NO_DROPOUT, image_size=8, patch_size=4, num_labels=5)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            **sizes,
        )
    )


def padded_batch(rows: int, step: int, length: int = 8) -> TensorRows:
    """Text by name; every second row is shorter."""
    random = _random(step)
    tokens = torch.randint(3, 64, (rows, length + 1), generator=random)
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[::2, length - 2 :] = 0
    return TensorRows({"input_ids": tokens[:, :-1], "attention_mask": mask}, tokens[:, 1:])


def padded_classes_batch(rows: int, step: int) -> TensorRows:
    inputs = padded_batch(rows, step).inputs(0, rows)
    inputs["token_type_ids"] = inputs["input_ids"] % 2
    return TensorRows(inputs, torch.randint(0, 5, (rows,), generator=_random(step)))


def t5_batch(rows: int, step: int) -> TensorRows:
    source, target = padded_batch(rows, step), tokens_batch(rows, step, vocabulary=64)
    (ids,) = target.inputs(0, rows)
    inputs = source.inputs(0, rows)
    return TensorRows(
        {
            "input_ids": inputs["input_ids"],
            "decoder_input_ids": ids,
            "attention_mask": inputs["attention_mask"],
        },
        target.targets(0, rows),
    )


def logits_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of logits, whether they come alone or as transformers return them."""
    return _cross_entropy(getattr(outputs, "logits", outputs), targets)


ZOO: dict[str, Entry] = {
    "unet": Entry(UNet, _segment, unet_batch),
    "resnet": Entry(ResNet, _cross_entropy, resnet_batch, buffers=True),
    "towers": Entry(Towers, towers_loss, towers_batch),
    "lstm": Entry(lstm, _cross_entropy, tokens_batch),
    "gru": Entry(gru, _cross_entropy, tokens_batch),
    "positions": Entry(Positions, _cross_entropy, tokens_batch),
    "mixture": Entry(Mixtures, _cross_entropy, tokens_batch),
}
"""Partitioned by recording their forward."""

FAMILIES: dict[str, Entry] = {
    "llama": Entry(llama, logits_loss, padded_batch),
    "gpt2": Entry(gpt2, logits_loss, padded_batch),
    "bert": Entry(bert, logits_loss, padded_batch),
    "bert_classes": Entry(bert_classes, logits_loss, padded_classes_batch),
    "vit": Entry(vit, logits_loss, resnet_batch),
    "t5": Entry(t5, logits_loss, t5_batch),
}
"""Models of transformers: these need it to be installed."""

ADAPTED = {"adapted": Entry(adapted, _cross_entropy, tokens_batch)}
"""Initialised by its constructor alone."""
