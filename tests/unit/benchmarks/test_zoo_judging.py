"""What the zoo's judge holds for equal, and what not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo.judging import difference, initial
from benchmarks.zoo.training import Trained


class Drawn(nn.Module):
    """A bit of everything that initial values can be."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.square = nn.Linear(16, 32), nn.Linear(16, 16, bias=False)
        nn.init.orthogonal_(self.square.weight)
        self.zero = nn.Linear(8, 8)
        nn.init.zeros_(self.zero.weight)
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.copy = nn.Linear(16, 32)
        self.copy.load_state_dict(self.linear.state_dict())
        self.register_buffer("table", torch.arange(6.0))
        self.single = nn.Parameter(torch.rand(()))


def drawn() -> dict[str, Tensor]:
    model = Drawn()
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(20))
def test_another_draw_is_the_factorys(seed: int) -> None:
    torch.manual_seed(seed)
    assert initial(Drawn, drawn(), torch.float32) == ""


SPOIL: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "constant": ("zero.weight", lambda t: torch.randn_like(t), "zero.weight: constant values"),
    "row": ("embedding.weight", lambda t: torch.randn_like(t), "embedding.weight: constant values"),
    "table": ("table", lambda t: t + 1, "table: constant values are off by 1"),
    "spread": ("linear.weight", lambda t: 2 * t, "linear.weight: spread is "),
    "mean": ("linear.weight", lambda t: t + 0.2, "linear.weight: mean"),
    "zeros": ("linear.weight", torch.zeros_like, "linear.weight: spread is 0.00"),
    "not finite": ("single", lambda t: t * math.nan, "single: not finite"),
    "angles": (
        "square.weight",
        lambda t: torch.randn_like(t) / 4,
        "square.weight: singular values spread",
    ),
    "no copy": ("copy.weight", lambda t: t[torch.randperm(32)], "copy.weight is no copy of linear"),
    "shape": ("table", lambda t: t[:3], "table: shape (3,), not (6,)"),
    "type": ("table", lambda t: t.double(), "table: type torch.float64, not torch.float32"),
}


@pytest.mark.parametrize("which", SPOIL)
def test_other_values_are_not(which: str) -> None:
    torch.manual_seed(1)
    name, change, expected = SPOIL[which]
    values = drawn()
    values[name] = change(values[name])
    assert initial(Drawn, values, torch.float32).startswith(expected)


def test_a_missing_parameter_is_named() -> None:
    values = drawn()
    del values["copy.bias"]
    assert initial(Drawn, values, torch.float32) == "copy.bias is nowhere"


def trained() -> Trained:
    before = {"w": torch.ones(4, 4), "b": torch.zeros(4), "n": torch.tensor(0)}
    after = {"w": torch.full((4, 4), 0.5), "b": torch.full((4,), 0.25), "n": torch.tensor(3)}
    gradients = [{"w": torch.ones(4, 4), "b": torch.full((4,), 0.1)} for _ in range(3)]
    return Trained([1.0, 0.9, 0.8], gradients, before, after)


def test_the_same_training_differs_by_nothing() -> None:
    assert difference(trained(), trained())[0] == 0.0


def _nan(found: Trained) -> None:
    found.after["b"] = found.after["b"] * math.nan


@pytest.mark.parametrize(
    ("spoil", "size", "where"),
    [
        (lambda t: t.losses.__setitem__(1, 0.90009), 1e-4, "loss of step 1"),
        (lambda t: t.gradients[2]["b"].mul_(1.001), 1e-3, "gradient of step 2: b"),
        (lambda t: t.gradients[0].pop("w"), math.inf, "step 0 has no gradient of w"),
        (lambda t: t.after.__setitem__("n", torch.tensor(4)), math.inf, "after the steps: n"),
        (lambda t: t.after.pop("b"), math.inf, "b is nowhere"),
        (_nan, math.nan, "after the steps: b"),
    ],
)
def test_a_difference_is_found(spoil: Callable[[Trained], None], size: float, where: str) -> None:
    piped = trained()
    spoil(piped)
    error, found = difference(piped, trained())
    assert error == pytest.approx(size, rel=0.1, nan_ok=True)
    assert where in found
