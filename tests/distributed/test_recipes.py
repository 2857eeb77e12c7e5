"""Each recipe of ``configs/experiment`` trains as its plain torch loop, written out here, under any plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR
from torch.optim.swa_utils import AveragedModel

from parallax.config import RunConfig, compose
from parallax.model.describe import parameter_names
from parallax.model.factory.gpt import GPTConfig
from parallax.model.materialise import materialise
from parallax.run.job import build_chain, build_loss, open_source, with_steps
from parallax.runtime.batch import Rows
from parallax.runtime.checkpoint import checkpoint_name
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.unit.train.tokenizers_ import CHATML, save

STEPS, ROWS, MICRO = 6, 8, 4
HERE = "tests.distributed.test_recipes"

# ---- models of one's own, without biases of keys (see defined)


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


# ---- data


def write_images(folder: Path) -> list[str]:
    from PIL import Image

    random = np.random.default_rng(0)
    for index in range(16):
        (folder / "images" / f"{index % 3}").mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index % 3}" / f"{index}.png")
    return [f"data.path={folder / 'images'}", "data.size=8", "data.validation=0"]


def write_text(folder: Path) -> list[str]:
    save(folder / "tokenizer", template=CHATML)
    (folder / "text.txt").write_text("\n".join(f"one two {n} three" for n in range(300)))
    return [f"data.path={folder / 'text.txt'}", f"data.tokenizer={folder / 'tokenizer'}"]


def write_chats(folder: Path) -> list[str]:
    save(folder / "tokenizer", template=CHATML)
    with (folder / "chat.jsonl").open("w") as file:
        for row in range(24):
            pair = {"question": "one " * (row % 4), "answer": "two" * (row * row % 7)}
            file.write(json.dumps(pair) + "\n")
    return [
        f"data.path={folder / 'chat.jsonl'}",
        f"data.tokenizer={folder / 'tokenizer'}",
        "data.validation=0",
    ]


def write_pairs(folder: Path) -> list[str]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    random = np.random.default_rng(0)
    source, target = (random.integers(1, 16, (32, length)) for length in (6, 5))
    labels = np.where(random.random((32, 4)) < 0.3, -100, target[:, 1:])
    columns = {"input_ids": source, "decoder_input_ids": target[:, :-1], "labels": labels}
    table = pa.table({name: each.tolist() for name, each in columns.items()})
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    return [f"data.path={folder / 'pairs.parquet'}", "data.validation=0"]


# ---- recipes in plain torch


def decayed(model: nn.Module, decay: float, **settings: Any) -> list[dict[str, Any]]:
    """Two groups: matrices and kernels with ``decay``, vectors without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": decay, **settings},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, **settings},
    ]


def ramp(step: int, warmup: int) -> float:
    return (step + 1) / (warmup + 1)


def resnet(model: nn.Module) -> Iterator[Callable[[], Any]]:
    optimizer = torch.optim.SGD(decayed(model, 1e-4), lr=0.1, momentum=0.9, nesterov=True)
    schedule = MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    for step in range(STEPS):
        yield optimizer.step
        optimizer.zero_grad()
        if (step + 1) % 2 == 0:  # 16 rows are two batches of 8
            schedule.step()


def nanogpt(model: nn.Module) -> Iterator[Callable[[], Any]]:
    hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("layers.")]
    others = [p for p in model.parameters() if all(p is not each for each in hidden)]
    matrices, vectors = [p for p in others if p.dim() > 1], [p for p in others if p.dim() == 1]
    muon = torch.optim.Muon(
        hidden, lr=1e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        if step < 2:
            return ramp(step, 2)
        return min(1.0, (STEPS - step) / (0.4 * STEPS))

    schedules = [LambdaLR(each, factor) for each in (muon, adamw)]
    for _ in range(STEPS):
        yield lambda: [
            nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            muon.step(),
            adamw.step(),
        ]
        model.zero_grad()
        for schedule in schedules:
            schedule.step()


def finetune(model: Any) -> Iterator[Callable[[], Any]]:
    for frozen in (model.model["embed_tokens"], *model.model["layers"][:4]):
        frozen.requires_grad_(False)
    body = decayed(model.model, 0.01)
    head = [{"params": list(model.lm_head.parameters()), "weight_decay": 0.01, "lr": 2e-4}]
    optimizer = torch.optim.AdamW([*body, *head], lr=2e-5, betas=(0.9, 0.999))
    yield from clipped(
        model,
        optimizer,
        lambda step: ramp(step, 2) if step < 2 else (STEPS - step) / (STEPS - 2),
        clip=1.0,
    )


def lora(model: nn.Module) -> Iterator[Callable[[], Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, betas=(0.9, 0.999), weight_decay=0)
    yield from clipped(
        model,
        optimizer,
        lambda step: (
            ramp(step, 2) if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))
        ),
        clip=1.0,
    )


def vit(model: Any) -> Iterator[Callable[[], Any]]:
    layers, groups = len(model.blocks), []
    for name, parameter in model.named_parameters():
        first = name.startswith(("patch_embed", "cls_token", "pos_embed"))
        inside = name.startswith("blocks.")
        layer = 0 if first else int(name.split(".")[1]) + 1 if inside else layers + 1
        plain = parameter.dim() == 1 or name in ("pos_embed", "cls_token")
        groups.append(
            {
                "params": [parameter],
                "weight_decay": 0.0 if plain else 0.05,
                "lr": 5e-4 * 0.75 ** (layers + 1 - layer),
            }
        )
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))

    def factor(step: int) -> float:
        epoch = step // 2
        if epoch < 1:
            return ramp(epoch, 1)
        return 0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / 2))

    yield from clipped(model, optimizer, factor)


def seq2seq(model: nn.Module) -> Iterator[Callable[[], Any]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=7e-4, betas=(0.9, 0.98), eps=1e-9)
    yield from clipped(
        model, optimizer, lambda step: ramp(step, 2) if step < 2 else math.sqrt(2 / step)
    )


def clipped(
    model: nn.Module, optimizer: Optimizer, factor: Callable[[int], float], clip: float = 0.0
) -> Iterator[Callable[[], Any]]:
    """One step after the other with the rates of ``factor``, and the norm of all gradients at most ``clip``."""
    schedule = LambdaLR(optimizer, factor)
    for _ in range(STEPS):
        yield lambda: [
            nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None,
            optimizer.step(),
        ]
        model.zero_grad()
        schedule.step()


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


# ---- the recipes and what they need


@dataclass(frozen=True)
class Recipe:
    """``loop(model)`` yields what steps the optimizer, once for each step. ``written``: the data and its settings.
    ``fp32``: the relative error of weights in fp32."""

    model: Callable[[], nn.Module]
    loop: Callable[[Any], Iterator[Callable[[], Any]]]
    smoothing: float
    written: Callable[[Path], list[str]]
    settings: Sequence[str] = ()
    averages: bool = False
    fp32: float = 1e-6

    def overrides(self, folder: Path, precision: str) -> list[str]:
        name, epochs = self.loop.__name__, ["trainer.epochs=0", f"trainer.steps={STEPS}"]
        batch = [f"trainer.global_batch={ROWS}", f"trainer.microbatch={MICRO}"]
        chosen = [f"experiment={name}", f"precision={precision}", *epochs, *batch]
        return [*chosen, *self.written(folder), *self.settings]


def custom(target: str) -> list[str]:
    return ["model=custom", f"model.target={HERE}:{target}"]


DECODER = [*custom("Decoder"), "model.kwargs.sequence=24", "model.kwargs.vocabulary=400"]
GPT_SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8}
RECIPES = {
    "resnet": Recipe(
        ResNet, resnet, 0.1, write_images, [*custom("ResNet"), "schedule.milestones=[1,2]"]
    ),
    "nanogpt": Recipe(
        lambda: GPTConfig(**GPT_SIZES).build(),
        nanogpt,
        0.0,
        lambda folder: write_text(folder)[:1],
        [
            *(f"model.{key}={value}" for key, value in GPT_SIZES.items()),
            "schedule.warmup=2",
            "schedule.decay=0.4",
        ],
        fp32=1e-3,  # Muon orthogonalizes in bf16, which rounds differences of 1e-7 up
    ),
    "finetune": Recipe(Decoder, finetune, 0.0, write_text, [*DECODER, "schedule.warmup=2"]),
    "vit": Recipe(ViT, vit, 0.1, write_images, [*custom("ViT"), "schedule.warmup=1"], True),
    "seq2seq": Recipe(
        Seq2Seq, seq2seq, 0.1, write_pairs, [*custom("Seq2Seq"), "schedule.warmup=2"]
    ),
    "lora": Recipe(
        with_lora,
        lora,
        0.0,
        write_chats,
        [*DECODER, "model.kwargs.layers=2", "schedule.warmup=2"],
    ),
}


@dataclass
class Outcome:
    """``averages``: the averaged weights, if the recipe has them."""

    losses: list[float]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]


def configured(settings: Sequence[str]) -> tuple[RunConfig, list[Rows]]:
    config = with_steps(compose(settings))
    source = open_source(config)
    return config, [source.batch(ROWS) for _ in range(STEPS)]


def warmed_up(averages: Any, weights: Any, updates: Tensor | int) -> None:
    done = int(updates)
    torch._foreach_lerp_(averages, weights, 1 - min(0.9999, (1 + done) / (10 + done)))


def plain(name: str, folder: Path, settings: Sequence[str]) -> Outcome:
    """The recipe in one process, from the weights with which the engine begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        config, batches = configured(settings)
        chain = build_chain(config)
    dtype, recipe = config.precision.parameter_dtype, RECIPES[name]
    model = recipe.model().to(dtype)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    states = [block.state_dict() for block in blocks]
    names = parameter_names(chain, range(len(blocks)))
    begun = {n: states[i][inner] for n, (i, inner) in names.items() if inner in states[i]}
    model.load_state_dict({n: begun[n] for n in model.state_dict() if n in begun}, strict=False)
    losses, average = [], AveragedModel(model, multi_avg_fn=warmed_up)
    for batch, step in zip(batches, recipe.loop(model), strict=True):
        total, loss = int((as_tensors(batch.targets(0, ROWS)) != -100).sum()), 0.0
        for first in range(0, ROWS, MICRO):
            inputs, targets = (each(first, first + MICRO) for each in (batch.inputs, batch.targets))
            scores = called(model, as_tensors(inputs, dtype)).flatten(0, -2)
            targets = as_tensors(targets).flatten().long()
            summed = F.cross_entropy(
                scores, targets, label_smoothing=recipe.smoothing, reduction="sum"
            )
            part = summed / total
            part.backward()
            loss += part.item()
        step()
        losses.append(loss)
        average.update_parameters(model)
    found = [
        {name: tensor.detach() for name, tensor in [*m.named_parameters(), *m.named_buffers()]}
        for m in (model, average.module)
    ]
    return Outcome(losses, found[0], found[1] if recipe.averages else {})


def as_tensors(values: Any, dtype: torch.dtype | None = None) -> Any:
    """``values`` as tensors, of which those of float32 become ``dtype``."""
    if isinstance(values, dict):
        return {name: as_tensors(each, dtype) for name, each in values.items()}
    if isinstance(values, tuple):
        return tuple(as_tensors(each, dtype) for each in values)
    found = torch.as_tensor(values)
    return found.to(dtype) if found.is_floating_point() else found


def trained(
    name: str, folder: Path, settings: Sequence[str], plan: dict[str, Any], first: int, last: int
) -> Outcome:
    """Steps ``first`` to ``last``, from the checkpoint of step ``first``; then saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        config, batches = configured(settings)
        chain = build_chain(config)
    made = make_plan(chain, **{"global_batch": ROWS, "microbatch": MICRO, **plan})
    engine = Engine.build(
        chain,
        made,
        loss=build_loss(config),
        steps=config.trainer.steps,
        optimizer=config.optimizer,
        schedule=config.schedule,
        precision=config.precision,
        replicas=config.replicas,
        ema=config.ema,
        swap=SwapConfig(minimum_bytes=1),
        scratch=folder / "swap",
    )
    if first:
        engine.load(folder / "saved" / checkpoint_name(first))
    losses = [engine.step(batch).loss for batch in batches[first:last]]
    weights, averages = copies(engine), {}
    if RECIPES[name].averages:
        with engine.averaged():
            averages = copies(engine)
    engine.save(folder / "saved", {})
    engine.close()
    return Outcome(losses, weights, averages)


def copies(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}


def defined(name: str, weight: Tensor) -> Tensor:
    """``weight`` without the keys' biases, whose gradients are rounding errors that Adam scales up."""
    if name.endswith("qkv.bias"):
        query, _, value = weight.chunk(3)
        weight = torch.cat([query, value])
    return weight.double()


def compare(
    found: list[Outcome], expected: Outcome, first: int, losses: float, weights: float
) -> None:
    for outcome in found:
        assert outcome.losses == pytest.approx(expected.losses[first:], rel=losses)
    for key in ("weights", "averages"):
        of_loop, names = getattr(expected, key), set[str]()
        for name, weight in (pair for each in found for pair in getattr(each, key).items()):
            names.add(name)
            one, other = defined(name, weight), defined(name, of_loop[name])
            error = float((one - other).norm() / other.norm().clamp(min=0.1))
            assert error <= weights, f"{key} {name}: {error}"
        assert names == of_loop.keys()


PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two stages": {"replicas": (1, 1)},
    "two replicas": {"replicas": (2,)},
    "offloaded": {"replicas": (1, 1), "optimizer_offload": 1.0, "parameter_offload": 1.0},
}


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_its_plain_loop(
    pool: Pool, tmp_path: Path, name: str, precision: str
) -> None:
    losses, weights = (1e-10, 1e-10) if precision == "fp64" else (1e-6, RECIPES[name].fp32)
    settings = RECIPES[name].overrides(tmp_path, precision)
    (expected,) = pool.run(plain, 1, name, tmp_path, settings)
    for plan in PLANS.values():
        world = sum(plan.get("replicas", (1,)))
        found = pool.run(trained, world, name, tmp_path, settings, plan, 0, STEPS)
        compare(found, expected, 0, losses, weights)


@pytest.mark.sampled
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resumes_under_another_plan(pool: Pool, tmp_path: Path, name: str) -> None:
    settings = RECIPES[name].overrides(tmp_path, "fp64")
    (expected,) = pool.run(plain, 1, name, tmp_path, settings)
    first, second = PLANS["two replicas"], PLANS["offloaded"]
    pool.run(trained, 2, name, tmp_path, settings, first, 0, 3)
    found = pool.run(trained, 2, name, tmp_path, settings, second, 3, STEPS)
    compare(found, expected, 3, 1e-10, 1e-10)
