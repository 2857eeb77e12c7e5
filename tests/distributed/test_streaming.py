"""Offloaded parameters: blocks are fetched one after another, and results do not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.runtime.optim.optimizer import OptimizerConfig
from parallax.swap.parameters.offloaded import ResidentParameters
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CASE, training
from tests.distributed.test_engine import Case, gpt, half_frozen, make_batch, with_buffers

UNTIED = gpt(tied=False)
OFFLOADED = {"optimizer_offload": 1.0, "parameter_offload": 1.0}


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
def test_gradients_are_bit_identical(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], schedule: str
) -> None:
    case, world = Case(gpt(), dtype=torch.float32), sum(replicas)
    for directive in ("keep", "offload", "recompute"):
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
        *((UNTIED, (1,)), (gpt(), (1, 1)), (half_frozen, (1, 1)), (with_buffers, (1, 1))),
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
    case = replace(
        Case(factory, dtype=torch.float32), optimizer=OptimizerConfig(lr=3e-3, clip_norm=0.1)
    )
    expected = pool.run(
        training, sum(replicas), case.under(replicas), tmp_path / "device", 0, 4, None
    )
    for share in (0.5, 1.0):
        offloaded = case.under(replicas, optimizer_offload=1.0, parameter_offload=share)
        found = pool.run(
            training, sum(replicas), offloaded, tmp_path / f"offloaded-{share}", 0, 4, None
        )
        for one, other in zip(expected, found):
            assert (other.losses, other.norms) == (one.losses, one.norms)
            assert all(
                torch.equal(other.weights[name], weight) for name, weight in one.weights.items()
            )


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_stages_of_one_rank_share_a_window(pool: Pool, tmp_path: Path, tied: bool) -> None:
    case = Case(gpt(tied=tied), dtype=torch.float32)
    shape: dict[str, Any] = {"schedule": "interleaved", "interleave": 2}
    expected = pool.run(gradients_of, 2, case.under((1, 1), **shape), tmp_path, 8)
    found = pool.run(gradients_of, 2, case.under((1, 1), **shape, **OFFLOADED), tmp_path, 8)
    for (loss, gradients, _, _), (loss_offloaded, gradients_offloaded, held, limit) in zip(
        expected, found
    ):
        assert loss_offloaded == loss
        assert all(torch.equal(gradients_offloaded[name], each) for name, each in gradients.items())
        assert 0 < held <= limit


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, OFFLOADED), (OFFLOADED, {}), (OFFLOADED, OFFLOADED)],
    ids=["down", "up", "offloaded"],
)
def test_a_checkpoint_does_not_know_where_parameters_were(
    pool: Pool, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    whole = pool.run(training, 2, CASE.under((1, 1)), tmp_path / "whole", 0, 4, None)
    pool.run(training, 2, CASE.under((1, 1), **before), tmp_path, 0, 2, None)
    rest = pool.run(training, 2, CASE.under((1, 1), **after), tmp_path, 2, 4, 2)
    for one, other in zip(whole, rest):
        assert other.losses == one.losses[2:]
        assert all(torch.equal(other.weights[name], weight) for name, weight in one.weights.items())


def offloaded_names(case: Case, folder: Path) -> tuple[set[str], set[str]]:
    """The names of this rank's offloaded and of its resident parameters."""
    engine = case.engine(folder)
    stage = engine._stage
    named = {n: t for n, t in stage.named_tensors().items() if isinstance(t, nn.Parameter)}
    below = {name for name, parameter in named.items() if stage.is_offloaded(parameter)}
    engine.close()
    return below, named.keys() - below


@pytest.mark.parametrize("replicas", [(1,), (1, 1)], ids=str)
def test_a_shared_parameter_stays_and_the_rest_is_offloaded(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...]
) -> None:
    """The embedding and the head use one matrix: in one stage, or on two ranks, which sum its gradients."""
    case = Case(gpt(), dtype=torch.float32).under(replicas, **OFFLOADED)
    for below, resident in pool.run(offloaded_names, len(replicas), case, tmp_path):
        assert resident == {"embedding.token.weight"}
        assert len(below) > 5
