"""A parameter without a gradient is not updated, for any stage boundaries between it and the loss that ignores it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, compare, plain_training, training
from tests.distributed.test_varying import in_turn

WIDTH = 16


class Enters(nn.Module):
    """Two uses of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(tokens), self.side(tokens)


class Passes(nn.Module):
    """Both uses, through separate layers."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        main, side = _both(given)
        return torch.tanh(self.main(main)), torch.tanh(self.side(side))


class Leaves(nn.Module):
    """Logits of the main way; of the side way too, where ``uses`` says so of a row."""

    def __init__(self, uses: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, 64)
        self._uses = uses

    def forward(self, *given: Any) -> Tensor:
        main, side = _both(given)
        if self._uses is not None:
            rows = self._uses(main).detach()
            if bool(rows.any()):
                main = main + side * rows[:, None, None]
        logits: Tensor = self.main(main)
        return logits


def _both(given: Any) -> tuple[Tensor, Tensor]:
    return given if len(given) == 2 else given[0]


def ignored() -> nn.Module:
    return nn.Sequential(Enters(), Passes(), Passes(), Leaves())


def ignored_and_tied() -> nn.Module:
    """The layers that the loss ignores are one in two blocks."""
    model = nn.Sequential(Enters(), Passes(), Passes(), Leaves())
    model[1].side.weight = model[2].side.weight
    return model


def _some(main: Tensor) -> Tensor:
    return main[:, 0, 0] > 0


def ignored_by_some_rows() -> nn.Module:
    return nn.Sequential(Enters(), Passes(), Passes(), Leaves(_some))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((1, 1), {}),
        ((1, 2), {}),
        ((2, 1), {"schedule": "zb-h1"}),
        ((1, 1), {"schedule": "zb-v", "interleave": 2}),
        ((2, 2), {"directive": "recompute"}),
        ((2, 1), {"parameter_offload": 1.0, "optimizer_offload": 1.0}),
    ],
    ids=str,
)
def test_what_the_loss_ignores_is_not_updated(
    pool: Pool, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Zeros came back instead of no gradient, and weight decay acted on them."""
    case = Case(ignored).under(replicas, **options)
    compare(pool.run(training, case.world, case), plain_training(case), 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((1, 1), {}),
        ((2, 1), {"schedule": "zb-h1"}),
        ((1, 1), {"schedule": "zb-v", "interleave": 2}),
        ((2, 2), {"schedule": "interleaved", "interleave": 2}),
    ],
    ids=str,
)
def test_what_the_loss_ignores_and_stages_share(
    pool: Pool, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    case = Case(ignored_and_tied).under(replicas, **options)
    compare(pool.run(training, case.world, case), plain_training(case), 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "replicas"),
    in_turn(["1f1b", "zb-h1"], [(1, 1), (1, 2), (2, 1), (2, 3)]),
    ids=str,
)
def test_a_gradient_that_only_some_rows_have(
    pool: Pool, replicas: tuple[int, ...], schedule: str
) -> None:
    """Of one replica's rows, or one micro-batch's, there is a gradient, and of another's there is none."""
    case = Case(ignored_by_some_rows).under(replicas, schedule=schedule, microbatch=3)
    compare(pool.run(training, case.world, case), plain_training(case), 1e-9)


@pytest.mark.parametrize("replicas", [(2,), (2, 3)], ids=str)
def test_an_offloaded_gradient_that_only_some_rows_have(
    pool: Pool, replicas: tuple[int, ...]
) -> None:
    offloaded = {"parameter_offload": 1.0, "optimizer_offload": 1.0}
    case = Case(ignored_by_some_rows).under(replicas, microbatch=3, **offloaded)
    compare(pool.run(training, case.world, case), plain_training(case), 1e-9)
