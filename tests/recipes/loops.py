"""The recipes as plain torch loops: each yields what steps the optimizer, once for each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, MultiStepLR, OneCycleLR

STEPS = 6


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


def mobilenet(model: nn.Module) -> Iterator[Callable[[], Any]]:
    groups = decayed(model, 4e-5)
    optimizer = torch.optim.RMSprop(groups, lr=0.045, alpha=0.9, momentum=0.9, eps=0.0316)
    schedule = ExponentialLR(optimizer, gamma=0.98)
    for step in range(STEPS):
        yield optimizer.step
        optimizer.zero_grad()
        if (step + 1) % 2 == 0:  # 16 rows are two batches of 8
            schedule.step()


def bert(model: nn.Module) -> Iterator[Callable[[], Any]]:
    optimizer = torch.optim.AdamW(decayed(model, 0.01), lr=1e-4, betas=(0.9, 0.999), eps=1e-6)
    yield from clipped(
        model,
        optimizer,
        lambda step: ramp(step, 2) if step < 2 else 1 - (step - 2) / (STEPS - 2),
        clip=1.0,
    )


def speech(model: Any) -> Iterator[Callable[[], Any]]:
    optimizer = torch.optim.SGD(decayed(model, 5e-4), lr=0.1, momentum=0.9, nesterov=True)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS, cycle_momentum=False)
    for _ in range(STEPS):
        yield lambda: [
            nn.utils.clip_grad_value_(model.gru.parameters(), 0.1),
            optimizer.step(),
        ]
        optimizer.zero_grad()
        schedule.step()


def t5(model: nn.Module) -> Iterator[Callable[[], Any]]:
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    yield from clipped(model, optimizer, lambda step: 1.0)
