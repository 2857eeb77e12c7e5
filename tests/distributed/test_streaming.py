"""Offloaded parameters: blocks are fetched one after another, and results do not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.swap.parameters.offloaded import ResidentParameters
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CASE, training
from tests.distributed.test_engine import Case, gpt, half_frozen, make_batch, with_buffers
from tests.plans import stages_each

UNTIED = gpt(tied=False)
OFFLOADED = {"optimizer_offload": 1.0, "parameter_offload": 1.0}
WIDTH = 16


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x.transpose(1, 2))))
        return x + self.norm(found.transpose(1, 2))


class UsedTwice(nn.Module):
    """Of both parameters, gradients are computed in both passes; one is also the input of a product with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(torch.tanh(x @ self.matrix)) + x * self.matrix[0])
        product = F.linear(self.matrix.unsqueeze(0), self.linear.weight)
        data = F.linear(self.matrix.detach().unsqueeze(0), self.linear.weight)
        return self.linear(x @ self.matrix) + (product + data)[:, :1]


def of_all_products() -> nn.Module:
    partly, frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    partly.weight.requires_grad_(False)
    blocks = [Convolutions(), UsedTwice(), partly, Convolutions(), frozen.requires_grad_(False)]
    return nn.Sequential(nn.Embedding(64, WIDTH), *blocks, UsedTwice(), nn.Linear(WIDTH, 64))


class Sequences(nn.Module):
    """The outputs of a recurrent module, without its states."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.cells(x)[0]
        return outputs


def recurrent(kind: Callable[..., nn.RNNBase] = nn.LSTM) -> nn.Module:
    return nn.Sequential(nn.Embedding(256, WIDTH), Sequences(kind), nn.Linear(WIDTH, 256))


def gradients_of(case: Case, folder: Path, batch: int) -> tuple[float, dict[str, Tensor], int, int]:
    """Loss and gradients, the most that streamed parameters held on the device, and what they may hold."""
    engine = case.engine(folder)
    # A first round, so that the one compared runs on re-used state.
    engine.gradients(make_batch(batch, 0))
    loss = engine.gradients(make_batch(batch, 0))
    gradients = {name: gradient.clone() for name, gradient in engine.gradients_by_name.items()}
    streamed = engine._stage.offloaded
    held, limit = (
        (0, 0)
        if isinstance(streamed, ResidentParameters)
        else (streamed.take_statistics().high_water, streamed.limit_bytes)
    )
    engine.close()
    return loss, gradients, held, limit


@pytest.mark.parametrize(
    "replicas",
    [
        (1, 2),
        # One rank trains offloaded.
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in ((1,), (3,), (1, 1), (2,), (2, 1))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.thorough), "1f1b"])
@pytest.mark.parametrize(
    "directive",
    ["offload", *(pytest.param(each, marks=pytest.mark.slow) for each in ("keep", "recompute"))],
)
def test_gradients_are_bit_identical(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], schedule: str, directive: str
) -> None:
    case, world = Case(gpt(), dtype=torch.float32), sum(replicas)
    here = case.under(replicas, directive, schedule=schedule)
    expected = pool.run(gradients_of, world, here, tmp_path, 7)
    for share in (0.5, 1.0):
        offloaded = case.under(
            replicas,
            directive,
            schedule=schedule,
            optimizer_offload=1.0,
            parameter_offload=share,
        )
        found = pool.run(gradients_of, world, offloaded, tmp_path, 7)
        for (loss, gradients, _, _), (loss_offloaded, gradients_offloaded, held, limit) in zip(
            expected, found
        ):
            assert loss_offloaded == loss
            assert gradients_offloaded.keys() == gradients.keys()
            if (len(replicas) == 1 and replicas[0] < 3) or max(replicas) == 1:
                assert all(
                    torch.equal(gradients_offloaded[name], gradient)
                    for name, gradient in gradients.items()
                )
            else:  # DDP sums in buckets, streaming one by one: rings of three begin elsewhere
                for name, gradient in gradients.items():
                    torch.testing.assert_close(
                        gradients_offloaded[name], gradient, rtol=1e-5, atol=1e-7
                    )
            assert held <= limit
        assert max(held for _, _, held, _ in found) > 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("factory", "replicas"),
    [
        *(
            (recurrent, (1,)),
            (UNTIED, (1,)),
            (gpt(), (1, 1)),
            (half_frozen, (1, 1)),
            (with_buffers, (1, 1)),
        ),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (
                *((UNTIED, (1, 1)), (UNTIED, (2,)), (gpt(), (1,)), (gpt(), (1, 2)), (gpt(), (2,))),
                *((half_frozen, (1,)), (with_buffers, (1,))),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_training_is_bit_identical(
    pool: Pool, tmp_path: Path, factory: Callable[[], nn.Module], replicas: tuple[int, ...]
) -> None:
    compare_training(pool, tmp_path, factory, replicas)


@pytest.mark.parametrize(
    ("replicas", "shape"),
    [
        ((1, 1), {"schedule": "zb-h1"}),
        ((2, 2), {"schedule": "zb-v", "interleave": 2}),
        pytest.param((2,), {"schedule": "zb-h2"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_training_with_split_backwards_is_bit_identical(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], shape: dict[str, Any]
) -> None:
    compare_training(pool, tmp_path, of_all_products, replicas, **shape)


def compare_training(
    pool: Pool,
    folder: Path,
    factory: Callable[[], nn.Module],
    replicas: tuple[int, ...],
    **shape: Any,
) -> None:
    case = replace(
        Case(factory, dtype=torch.float32), optimizer=AdamWConfig(lr=3e-3, clip_norm=0.1)
    )
    expected = pool.run(
        training, sum(replicas), case.under(replicas, **shape), folder / "device", 0, 4, None
    )
    for share in (0.5, 1.0):
        offloaded = case.under(replicas, **shape, optimizer_offload=1.0, parameter_offload=share)
        found = pool.run(
            training, sum(replicas), offloaded, folder / f"offloaded-{share}", 0, 4, None
        )
        for one, other in zip(expected, found):
            assert (other.losses, other.norms) == (one.losses, one.norms)
            assert all(
                torch.equal(other.weights[name], weight) for name, weight in one.weights.items()
            )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("replicas", [(1, 1), (2, 2), (1,), (1, 2)], ids=str)
@pytest.mark.parametrize("compute", ["", "bf16"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v"])
def test_split_backwards_are_bit_identical(
    pool: Pool, tmp_path: Path, schedule: str, compute: str, replicas: tuple[int, ...]
) -> None:
    case = Case(of_all_products, dtype=torch.float32, compute=compute)
    world, shape = sum(replicas), {"schedule": schedule, "interleave": stages_each(schedule, 2)}
    if len(replicas) == 1:
        shape = {"schedule": "zb-h1" if schedule == "zb-v" else schedule}
    expected = pool.run(gradients_of, world, case.under(replicas, **shape), tmp_path, 7)
    for share in (0.5, 1.0):
        offloaded = case.under(
            replicas, **shape, optimizer_offload=1.0, parameter_offload=share, microbatch=2
        )
        found = pool.run(gradients_of, world, offloaded, tmp_path, 7)
        for one, (loss, gradients, held, limit) in zip(expected, found):
            assert loss == one[0]
            assert gradients.keys() == one[1].keys()
            for name, gradient in one[1].items():
                assert torch.equal(gradients[name], gradient), name
            assert held <= limit
        assert max(held for _, _, held, _ in found) > 0


@pytest.mark.parametrize(
    ("replicas", "tied"),
    [
        ((1, 1), True),
        ((2, 2), True),
        pytest.param((1, 1), False, marks=pytest.mark.thorough),
        pytest.param((2, 2), False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_stages_of_one_rank_share_a_window(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], tied: bool
) -> None:
    """Replicas sum the gradients of a rank when those of all its stages are complete. (The second stage failed.)"""
    case = Case(gpt(tied=tied), dtype=torch.float32)
    shape: dict[str, Any] = {"schedule": "interleaved", "interleave": 2}
    world = sum(replicas)
    expected = pool.run(gradients_of, world, case.under(replicas, **shape), tmp_path, 8)
    found = pool.run(gradients_of, world, case.under(replicas, **shape, **OFFLOADED), tmp_path, 8)
    for (loss, gradients, _, _), (loss_offloaded, gradients_offloaded, held, limit) in zip(
        expected, found
    ):
        assert loss_offloaded == loss
        assert all(torch.equal(gradients_offloaded[name], each) for name, each in gradients.items())
        assert 0 < held <= limit


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, OFFLOADED),
        (OFFLOADED, {}),
        (OFFLOADED, OFFLOADED),
        ({"schedule": "zb-h1"}, {**OFFLOADED, "schedule": "zb-h1"}),
        ({**OFFLOADED, "schedule": "zb-h1"}, {"schedule": "zb-h1"}),
    ],
    ids=["down", "up", "offloaded", "down, split", "up, split"],
)
def test_a_checkpoint_does_not_know_where_parameters_were(
    pool: Pool, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    schedule = {key: before[key] for key in ("schedule",) if key in before}
    whole = pool.run(training, 2, CASE.under((1, 1), **schedule), tmp_path / "whole", 0, 4, None)
    pool.run(training, 2, CASE.under((1, 1), **before), tmp_path, 0, 2, None)
    rest = pool.run(training, 2, CASE.under((1, 1), **after), tmp_path, 2, 4, 2)
    for one, other in zip(whole, rest):
        assert other.losses == one.losses[2:]
        assert all(torch.equal(other.weights[name], weight) for name, weight in one.weights.items())


def test_recurrent_weights_are_offloaded_on_a_cpu(pool: Pool, tmp_path: Path) -> None:
    case = Case(recurrent, dtype=torch.float32).under((1,), **OFFLOADED)
    ((offloaded, resident),) = pool.run(offloaded_names, 1, case, tmp_path)
    assert any("cells.weight" in name for name in offloaded)
    assert not resident


def offloaded_names(case: Case, folder: Path) -> tuple[set[str], set[str]]:
    """The names of this rank's offloaded and of its resident parameters."""
    engine = case.engine(folder)
    stage = engine._stage
    named = {n: t for n, t in stage.named_tensors().items() if isinstance(t, nn.Parameter)}
    offloaded = {name for name, parameter in named.items() if stage.is_offloaded(parameter)}
    engine.close()
    return offloaded, named.keys() - offloaded


@pytest.mark.parametrize("replicas", [(1,), (1, 1)], ids=str)
def test_a_shared_parameter_stays_and_the_rest_is_offloaded(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...]
) -> None:
    """The embedding and the head use one matrix: in one stage, or on two ranks, which sum its gradients."""
    case = Case(gpt(), dtype=torch.float32).under(replicas, **OFFLOADED)
    for offloaded, resident in pool.run(offloaded_names, len(replicas), case, tmp_path):
        assert resident == {"embedding.token.weight"}
        assert len(offloaded) > 5
