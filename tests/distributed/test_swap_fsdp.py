"""``parallax.swap`` around torch's FSDP: parameters are parts of tensors, and their memory comes and goes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import parallax
from parallax.swap.lms.wrapped import local_bytes
from tests.distributed.pool import Pool
from tests.unit.swap_fakes import assert_equal

MIB = 2**20
WIDTH = 128


class Layer(nn.Module):
    """Its weight is saved by autograd as a view of a view of a view of a view of itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        weight = (
            self.weight.view(-1)
            .view(2, -1)
            .view(-1)
            .view_as(self.weight)
            .unsqueeze(0)
            .squeeze(0)
            .t()
        )
        return x + F.gelu(self.norm(x) @ weight)


def build(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(WIDTH)) for _ in range(4)],
        nn.Linear(WIDTH, 4),
    )
    for layer in [*model][1:3] if frozen else []:
        layer.requires_grad_(False)
    return model


def shard(kind: str, model: nn.Sequential) -> nn.Module:
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (2,)),
        "reshard_after_forward": kind != "no reshard",
    }
    if kind == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for layer in [*model] if kind != "root only" else []:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


Optimize = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimize] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
}


def values(found: Any) -> Any:
    """What is compared: parts of this rank instead of what wraps them."""
    if isinstance(found, dict):
        return {key: values(value) for key, value in found.items()}
    if isinstance(found, list):
        return [values(value) for value in found]
    return found.to_local().clone() if isinstance(found, DTensor) else copy.deepcopy(found)


def train(
    directory: Path | None, kind: str, optimize: str, habits: tuple[str, ...]
) -> tuple[Any, tuple[int, ...]]:
    """A few steps; with a limit where there is a directory."""
    model = shard(kind, build("frozen" in habits))
    optimizer = OPTIMIZERS[optimize]([p for p in model.parameters() if p.requires_grad])
    free_bytes = MIB // 4 if kind == "mixed" else MIB * 3 // 4
    limit = 2 * sum(local_bytes(p) for p in model.parameters()) + free_bytes
    options = {"directory": directory, "minimum_bytes": 1024, "piece_bytes": MIB // 8}
    scope = (
        parallax.swap(model, limit, optimizer=optimizer, **options)
        if directory
        else contextlib.nullcontext()
    )
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    with scope as swapping:
        for number in range(5):
            x = torch.randn(256, WIDTH, generator=generator)
            if "eval" in habits:
                with torch.no_grad():
                    losses.append(model(x).sum().item())
            if "accumulate" in habits:
                model.set_requires_gradient_sync(number % 2 == 1)
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in habits):
                output = (
                    checkpoint(model, x, use_reentrant=False)
                    if "checkpoint" in habits
                    else model(x)
                )
                loss = F.cross_entropy(output.float(), x[:, :4].argmax(1))
            loss.backward()
            if "clip" in habits:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if "accumulate" not in habits or number % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        inside = values(optimizer.state_dict())
    found = losses, values(model.state_dict()), values(optimizer.state_dict())
    moved = (
        (swapping.statistics.bytes_out, swapping.statistics.bytes_in)
        if swapping is not None
        else ()
    )
    return ([*found, inside], (*moved, swapping.states[0].bytes_in) if swapping is not None else ())


def both(*arguments: Any) -> tuple[Any, Any]:
    directory, *rest = arguments
    return train(None, *rest), train(directory, *rest)


CASES = [
    ("fsdp2", "fused", ("clip", "eval")),
    ("fsdp2", "momentum", ("accumulate", "frozen")),
    ("fsdp2", "adamw", ("autocast",)),
    ("no reshard", "adamw", ("frozen", "eval")),
    ("hsdp", "adamw", ("clip", "frozen")),
    ("mixed", "adamw", ("frozen",)),
    ("root only", "adamw", ("eval", "frozen")),
    ("fsdp1", "momentum", ("frozen", "eval")),
]


PLAIN = [("fsdp2", "adamw", ()), ("fsdp1", "adamw", ())]  # each with habits above


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kind", "optimize", "habits"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.thorough) for each in PLAIN)],
    ids=str,
)
def test_every_rank_is_exact(
    kind: str, optimize: str, habits: tuple[str, ...], pool: Pool, scratch: Path
) -> None:
    for (expected, _), (found, moved) in pool.run(both, 2, scratch, kind, optimize, habits):
        assert_equal(found, expected)
        assert all(moved), moved


def test_checkpointed(pool: Pool, scratch: Path) -> None:
    """Everything is recomputed with torch's own hooks, so activations need no memory."""
    for (expected, _), (found, _) in pool.run(both, 2, scratch, "fsdp2", "adamw", ("checkpoint",)):
        assert_equal(found, expected)
