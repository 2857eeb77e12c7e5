"""What a forward may do between its modules and still be recorded; and what is refused, in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.errors import DescribeError
from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows
from tests.unit.model.test_recorded import both, check_same
from tests.zoo import Entry

WIDTH = 8


class Layers(nn.Module):
    """Three layers, and what a test does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def rows_of(shape: tuple[int, ...]) -> Callable[[int, int], TensorRows]:
    def batch(rows: int, step: int) -> TensorRows:
        random = torch.Generator().manual_seed(step)
        return TensorRows(
            torch.randn(rows, *shape, generator=random), torch.randn(rows, WIDTH, generator=random)
        )

    return batch


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return -ctx.strength * gradient, None


class Teacher(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.layers[0](x)
        return self.run(x) - aim


class Turned(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) + Reversed.apply(self.layers[1](x), 0.5)


class Loops(Layers):
    """Python branches on sizes."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        states = x.new_zeros(rows, WIDTH)
        for t in range(int(length)):
            if t % 2 == 0:
                states = self.run(states + x[:, t])
        return states.view(rows * 2, WIDTH // 2).reshape(rows, -1)


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x += 1
            found[:, i] = x[:, 0]
        return found * x.relu_()


class Hooked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return self.layers[2](self.layers[1](x))


class Lower(Layers):
    """A region of autocast in the outermost forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[1](self.layers[0](x))
        return self.layers[2](x.float())


class Derivative(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = self.run(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


class Swapped(Layers):
    """A layer is called with another's weights."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.layers[0].weight * 2, "bias": self.layers[1].bias}
        return torch.func.functional_call(self.layers[2], weights, (self.run(x),))


class Cached(Layers):
    """A table is made once and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=torch.float32)
        return self.run(x + self.table)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        *(
            (kind, (WIDTH,))
            for kind in (Teacher, Turned, InPlace, Hooked, Derivative, Swapped, Cached)
        ),
        (Loops, (5, WIDTH)),
    ],
)
def test_what_lies_between_modules_is_recorded(
    model: type[nn.Module], shape: tuple[int, ...]
) -> None:
    entry = Entry(model, F.mse_loss, rows_of(shape))
    chain, blocks, plain = both(entry)
    for module in (*blocks, plain):
        module.train()
    for step, rows in enumerate([3, 5]):
        check_same(entry, chain, blocks, plain, rows, step)
    assert len(chain.blocks) > 1 or model in (Derivative, InPlace), "one block where it must be"


class Again(nn.Linear):
    """Computes itself again, as one module."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class AgainInside(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.again = Again()

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.run(x))  # type: ignore[no-any-return]


class AgainBetween(AgainInside):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, self.again(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class AgainReentrant(AgainBetween):
    reentrant = True


@pytest.mark.parametrize(
    ("model", "is_logged"), [(AgainInside, False), (AgainBetween, True), (AgainReentrant, True)]
)
def test_own_recomputation_between_modules_is_logged(
    model: type[nn.Module], is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    entry = Entry(model, F.mse_loss, rows_of((WIDTH,)))
    with caplog.at_level("INFO", logger="parallax"):
        chain, blocks, plain = both(entry)
    assert ("the plan decides there (plan.activations)" in caplog.text) == is_logged
    for module in (*blocks, plain):
        module.train()
    check_same(entry, chain, blocks, plain, 3)


def test_a_region_of_autocast_is_recorded() -> None:
    chain, blocks, plain = both(Entry(Lower, F.mse_loss, rows_of((WIDTH,))))
    x = torch.randn(3, WIDTH)
    values = chain.arguments(x)
    for block in blocks:
        values = block(*values) if isinstance(block(*values), tuple) else (block(*values),)
    assert torch.equal(chain.results(values), plain(x))


@dataclasses.dataclass
class Output:
    """What a model of one's own returns."""

    logits: Tensor
    cache: Any = None
    layers: int = 3


class Memory:
    """No tensor, and none in it that a loss may want."""


class Returning(Layers):
    def forward(self, inputs: dict[str, Any], scale: float = 1.0) -> Output:
        x, (y, note) = inputs["x"], inputs["more"]
        assert note == "as it is"
        return Output(self.run(x + y) * scale, cache=Memory())


def test_nests_come_in_and_outputs_keep_their_type(caplog: pytest.LogCaptureFixture) -> None:
    def nest(n: int) -> Any:
        return ({"x": torch.ones(n, WIDTH), "more": (torch.ones(n, WIDTH), "as it is")},)

    with caplog.at_level("INFO", logger="parallax"):
        chain = describe(Returning, sample=nest)
    assert "returns a Memory" in caplog.text
    values = chain.arguments(nest(2))
    assert len(values) == 2
    found = chain.results((torch.zeros(2, WIDTH),))
    assert isinstance(found, Output)
    assert (found.cache, found.layers) == (None, 3)
    with pytest.raises(
        DescribeError, match=r"inputs are 0.x, but the model was described with 0.x, 0.more.0"
    ):
        chain.arguments(({"x": torch.ones(2, WIDTH)},))


class Counting(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.run(x) / self.calls


class Remembering(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x if self.state is None else x + self.state.mean(0))
        self.state = x.detach()
        return x


class Following(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[2].weight.lerp_(self.layers[0].weight, 0.1)
        return self.run(x)


class Choosing(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) if x.mean() > 0 else x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Counting, "calls is kept from one forward to the next"),
        (Remembering, "state is kept from one forward to the next"),
        (Following, "layers.2.weight is a parameter that the forward itself changes"),
        (Choosing, r"it branches on the values of tensors, at .*test_recording.py:\d+"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(model: type[nn.Module], message: str) -> None:
    with pytest.raises(DescribeError, match=message):
        describe(model, sample=lambda n: torch.zeros(n, WIDTH))


def test_a_deep_model_is_divided_evenly() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
                for _ in range(6)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    chain = describe(Deep, sample=lambda n: torch.zeros(n, 5, 16))
    sizes = [sum(p.numel() for p in block.module.parameters()) for block in chain.blocks]
    assert max(sizes) < sum(sizes) / 8, "six layers for four stages: half layers"
