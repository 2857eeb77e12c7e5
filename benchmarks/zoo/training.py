"""Three steps of one entry: by itself in one process, and as stages under a plan.

Both do the same steps on the same rows, so nothing but the way can make a difference: the plain model goes through the
micro-batches of a step one by one and adds up their gradients, or through all rows at once where they meet in the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.zoo.entry import Entry, EntryRows, call
from parallax import AdamWConfig, SGDConfig
from parallax.model.describe import Chain
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig

ROWS, MICRO_BATCHES, STEPS, SEED = 7, 2, 3, 3
GIB = 2**30


@dataclass(frozen=True)
class Way:
    """How the stages are trained."""

    schedule: str = "1f1b"
    directive: str = "keep"
    replicas: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}, {self.directive}, {self.replicas} replicas"


USUAL = Way()


@dataclass
class Trained:
    """What three steps leave, by the names of the whole model: of each step the loss and the gradients where they
    are not clipped; parameters and buffers before and after."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)

    def join(self, other: Trained) -> None:
        """Add what another rank has."""
        self.before.update(other.before)
        self.after.update(other.after)
        for mine, others in zip(self.gradients, other.gradients):
            mine.update(others)


def optimizer_config(name: str) -> AdamWConfig | SGDConfig:
    """A constant rate. AdamW's ``eps`` is above the noise of gradients that are zero but for rounding: it would make
    full steps of that."""
    if name == "sgd":
        return SGDConfig(lr=0.05, momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    return AdamWConfig(lr=1e-3, eps=1e-4)


# ---- by itself -------------------------------------------------------------------------------------


def plain_model(entry: Entry, dtype: torch.dtype) -> nn.Module:
    """The model as its factory makes it, in the given number format, which is fp32 as it is made."""
    torch.manual_seed(SEED)
    model = entry.build()
    return model.double() if dtype == torch.float64 else model


def train_plain(
    entry: Entry, weights: dict[str, Tensor], optimizer: str, dtype: torch.dtype
) -> Trained:
    """The model with ``weights`` in one process."""
    model = plain_model(entry, dtype)
    tensors = named_tensors(model)
    with torch.no_grad():
        for name, value in weights.items():
            tensors[name].copy_(value)
    found = Trained(before=_clones(tensors))
    config = optimizer_config(optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps = _optimizer(trained, config)
    for step in range(STEPS):
        batch = EntryRows(entry, ROWS, step, dtype)
        model.zero_grad()
        total = 0.0
        for low, high in [(0, ROWS)] if entry.gathered else micro_batches():
            outputs = call(model, batch.inputs(low, high))
            loss = entry.loss(outputs, batch.targets(low, high)) * ((high - low) / ROWS)
            loss.backward()
            total += loss.item()
        found.losses.append(total)
        given = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.gradients.append(_clones(given) if not config.clip_norm else {})
        if config.clip_norm:
            nn.utils.clip_grad_norm_(trained, config.clip_norm, foreach=False)
        steps.step()
    found.after = _clones(named_tensors(model))
    return found


def micro_batches() -> list[tuple[int, int]]:
    """First and last row of each micro-batch of a step."""
    bounds = [ROWS * m // MICRO_BATCHES for m in range(MICRO_BATCHES + 1)]
    return list(itertools.pairwise(bounds))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are saved, one of each that is shared under its first name. Others are tables that a
    model can make again."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def _optimizer(
    trained: list[nn.Parameter], config: AdamWConfig | SGDConfig
) -> torch.optim.Optimizer:
    if isinstance(config, SGDConfig):
        return torch.optim.SGD(trained, lr=config.lr)
    decay, rest = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


# ---- as stages -------------------------------------------------------------------------------------


def train_stages(entry: Entry, chain: Chain, plan: Plan, optimizer: str, scratch: Path) -> Trained:
    """This rank's part of the steps; torch.distributed is initialised where the plan has several ranks."""
    precision = "fp64" if chain.dtype == torch.float64 else "fp32"
    config = optimizer_config(optimizer)
    engine = Engine.build(
        chain,
        plan,
        loss=entry.loss,
        optimizer=config,
        precision=PrecisionConfig(parameters=precision, compute=precision),
        swap=SwapConfig(minimum_bytes=1),
        scratch=scratch,
    )
    found = Trained(before=_clones(engine.parameters))
    for step in range(STEPS):
        result = engine.step(EntryRows(entry, ROWS, step, chain.dtype))
        found.losses.append(result.loss)
        found.gradients.append(_clones(engine.gradients_by_name) if not config.clip_norm else {})
    found.after = _clones(engine.parameters)
    engine.close()
    return found


def two_stages(chain: Chain, way: Way, *, gather_loss: bool = False) -> Plan:
    """A plan of two stages with about half of the parameters each, of one where there is one block. One loss of all
    rows has the schedule that can have it."""
    sizes = block_sizes(chain)
    cut = _middle(sizes)
    bounds = [0, cut, len(sizes)] if cut else [0, len(sizes)]
    stages = tuple(
        StagePlan(
            start=low,
            stop=high,
            replicas=way.replicas,
            directives=(Directive(way.directive),) * (high - low),
            swap_limit_bytes=GIB,
            tier_bytes=GIB,
            state_bytes=GIB,
            streamed_bytes=GIB,
        )
        for low, high in itertools.pairwise(bounds)
    )
    rank = RankPrediction(
        peak_bytes=0, budget_bytes=1, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
    return Plan(
        model="zoo",
        fingerprint=chain.fingerprint(),
        schedule="gpipe" if gather_loss else way.schedule if cut else "1f1b",
        global_batch=ROWS,
        microbatch=-(-ROWS // MICRO_BATCHES),
        stages=stages,
        tier="disk",
        gather_loss=gather_loss,
        prediction=Prediction(
            step_seconds=0.0, bubble=0.0, ranks=(rank,) * (way.replicas * len(stages))
        ),
    )


def block_sizes(chain: Chain) -> list[int]:
    """Parameters of each block, those of several blocks with their first."""
    seen: set[int] = set()
    sizes = []
    for block in chain.blocks:
        fresh = [p for p in block.module.parameters() if id(p) not in seen]
        seen |= {id(p) for p in fresh}
        sizes.append(sum(p.numel() for p in fresh))
    return sizes


def _middle(sizes: Sequence[int]) -> int:
    """Return the boundary at which both sides are closest to half; 0 if there is only one block."""
    whole = sum(sizes)
    return min(range(1, len(sizes)), key=lambda cut: abs(2 * sum(sizes[:cut]) - whole), default=0)


def _clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    return {n: t.to_dense() if t.is_sparse else t.clone() for n, t in found.items()}
