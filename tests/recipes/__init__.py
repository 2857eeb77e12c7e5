"""The recipes of ``configs/experiment`` as tests run them: small models and rows, and each as a plain torch loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallax.model.factory.gpt import GPTConfig
from tests.recipes import loops, models, rows
from tests.recipes.loops import STEPS

ROWS, MICRO = 8, 4


@dataclass(frozen=True)
class Recipe:
    """``loop(model)`` yields what steps the optimizer, once for each step. ``written``: the data and its settings.
    ``loss``: keywords of the cross-entropy. ``averages``: arguments of an ``AveragedModel`` of the weights since step
    ``averages_since``. ``fp32``: the relative error of weights in fp32."""

    model: Callable[[], nn.Module]
    loop: Callable[[Any], Iterator[Callable[[], Any]]]
    written: Callable[[Path], list[str]]
    settings: Sequence[str] = ()
    loss: Mapping[str, Any] = field(default_factory=dict)
    averages: Mapping[str, Any] | None = None
    averages_since: int = 1
    fp32: float = 1e-6

    def overrides(self, folder: Path, precision: str) -> list[str]:
        name, epochs = self.loop.__name__, ["trainer.epochs=0", f"trainer.steps={STEPS}"]
        batch = [f"trainer.global_batch={ROWS}", f"trainer.microbatch={MICRO}"]
        chosen = [f"experiment={name}", f"precision={precision}", *epochs, *batch]
        return [*chosen, *self.written(folder), *self.settings]


def custom(target: str) -> list[str]:
    return ["model=custom", f"model.target={models.__name__}:{target}"]


def warmed_up(averages: Any, weights: Any, updates: Tensor | int) -> None:
    done = int(updates)
    torch._foreach_lerp_(averages, weights, 1 - min(0.9999, (1 + done) / (10 + done)))


DECODER = [*custom("Decoder"), "model.kwargs.sequence=24", "model.kwargs.vocabulary=400"]
GPT_SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8}
SMOOTHED = {"label_smoothing": 0.1}
EXPONENTIAL = {"multi_avg_fn": warmed_up}
RECIPES = {
    "resnet": Recipe(
        models.ResNet,
        loops.resnet,
        rows.write_images,
        [*custom("ResNet"), "schedule.milestones=[1,2]"],
        SMOOTHED,
    ),
    "nanogpt": Recipe(
        lambda: GPTConfig(**GPT_SIZES).build(),
        loops.nanogpt,
        lambda folder: rows.write_text(folder)[:1],
        [
            *(f"model.{key}={value}" for key, value in GPT_SIZES.items()),
            "schedule.warmup=2",
            "schedule.decay=0.4",
        ],
        fp32=1e-3,  # Muon orthogonalizes in bf16, which rounds differences of 1e-7 up
    ),
    "finetune": Recipe(
        models.Decoder, loops.finetune, rows.write_text, [*DECODER, "schedule.warmup=2"]
    ),
    "vit": Recipe(
        models.ViT,
        loops.vit,
        rows.write_images,
        [*custom("ViT"), "schedule.warmup=1"],
        SMOOTHED,
        EXPONENTIAL,
    ),
    "seq2seq": Recipe(
        models.Seq2Seq,
        loops.seq2seq,
        rows.write_pairs,
        [*custom("Seq2Seq"), "schedule.warmup=2"],
        SMOOTHED,
    ),
    "lora": Recipe(
        models.with_lora,
        loops.lora,
        rows.write_chats,
        [*DECODER, "model.kwargs.layers=2", "schedule.warmup=2"],
    ),
    "mobilenet": Recipe(
        models.MobileNet,
        loops.mobilenet,
        rows.write_images,
        custom("MobileNet"),
        averages=EXPONENTIAL,
    ),
    "bert": Recipe(
        models.Bert, loops.bert, rows.write_masked, [*custom("Bert"), "schedule.warmup=2"]
    ),
    "speech": Recipe(
        models.Speech,
        loops.speech,
        rows.write_sounds,
        [*custom("Speech"), "loss.kwargs.weight=[1,2,0.5]"],
        {"weight": [1, 2, 0.5]},
    ),
    "t5": Recipe(
        models.with_tied_head,
        loops.t5,
        rows.write_pairs,
        [*custom("with_tied_head"), "ema.start=3", "ema.every=1"],
        averages={},
        averages_since=3,
    ),
}
