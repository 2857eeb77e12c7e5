"""A model becomes a chain; its weights do not depend on the boundaries of its stages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.common.seeds import block_seed
from parallax.errors import DescribeError
from parallax.model.describe import Chain, as_tuple, describe, parameter_names
from parallax.model.factory.gpt import GPTConfig
from parallax.model.factory.mlp import MLPConfig
from parallax.model.materialise import materialise
from parallax.model.verification.verify import verify
from parallax.runtime.batch import TensorRows

CPU = torch.device("cpu")
GPT = GPTConfig(layers=3, hidden=16, heads=2, vocabulary=32, sequence=8)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))  # initialised in __init__ only
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Named(nn.Module):
    """No chain of its own accord."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 8)


class Returning(nn.Module):
    """``blocks()`` returns the given value."""

    def __init__(self, found: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.second, self.found = nn.Linear(4, 4), nn.Linear(4, 4), found

    def blocks(self) -> Any:
        return self.found(self)


def weights(
    factory: Callable[[], nn.Module], bounds_inside: list[int], **options: Any
) -> dict[str, Tensor]:
    """All parameters and buffers by their names in the model, materialised stage by stage."""
    chain = describe(factory, **options)
    bounds = [0, *bounds_inside, len(chain.blocks)]
    found: dict[str, Tensor] = {}
    for low, high in itertools.pairwise(bounds):
        blocks = materialise(chain, low, high, CPU)
        for name, (i, inner) in parameter_names(chain, range(low, high)).items():
            tensor = blocks[i - low].state_dict(keep_vars=True)[inner]
            if name in found:
                assert torch.equal(found[name], tensor), name
            found[name] = tensor
    return found


def test_the_three_ways_to_describe_a_chain() -> None:
    assert [b.name for b in describe(GPT.build).blocks] == [
        "embedding",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]
    assert [b.name for b in describe(MLPConfig(layers=2).build).blocks] == ["0", "1", "2", "3"]
    named = describe(Named, blocks=["embed", "layers.*", "head"])
    assert [b.name for b in named.blocks] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert named.names[:2] == (
        {"weight": "embed.weight"},
        {"weight": "layers.0.weight", "bias": "layers.0.bias"},
    )
    assert all(p.is_meta for b in named.blocks for p in b.module.parameters())


class Wrong(nn.Module):
    """Its second layer does not fit its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_an_error_of_the_models_forward_has_its_line() -> None:
    with pytest.raises(DescribeError) as caught:
        describe(Wrong, sample=lambda rows: torch.zeros(rows, 8))
    assert "shapes cannot be multiplied (4x8 and 9x8), at " in str(caught.value)
    assert re.search(
        r"test_describe.py:\d+; correct it if plain PyTorch raises it, too\)", str(caught.value)
    )


def test_members_of_a_list_stay_in_their_order() -> None:
    chain = describe(lambda: Named(12), blocks=["embed", "layers.*", "head"])
    assert [b.name for b in chain.blocks][1:-1] == [f"layers.{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("factory", "blocks", "message"),
    [
        (
            Named,
            (),
            r"Named cannot be partitioned into blocks \(it has no forward\): give the model a method blocks\(\)",
        ),
        (nn.Sequential, (), r"Sequential cannot be partitioned into blocks"),
        (
            Named,
            ["embed", "layer.*"],
            r"model.blocks: layer.\* matches no module of Named; it has embed, layers, head",
        ),
        (Named, ["embed", "head"], r"layers.0.weight is in no block: give the model"),
        (
            Named,
            ["layers", "layers.*"],
            r"Linear is in block layers and in block layers.0: a module belongs to one",
        ),
        (
            lambda: Returning(lambda m: [m.first, m.second, m.first]),
            (),
            "Linear is in block first and in block first",
        ),
        (
            lambda: Returning(lambda m: []),
            (),
            r"blocks\(\) of Returning must return modules, at least one; got \[\]",
        ),
        (
            lambda: Returning(lambda m: [1, 2]),
            (),
            r"must return modules, at least one; got \[1, 2\]",
        ),
        (lambda: Returning(lambda m: None), (), r"must return modules, at least one; got None"),
        (lambda: Returning(lambda m: 7), (), r"must return modules, at least one; got 7"),
        (
            lambda: Returning(lambda m: [nn.ReLU()]),
            (),
            r"returned a ReLU that is not part of the model",
        ),
        (lambda: 3, (), r"the model factory returned a int; it must return an nn.Module"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            (),
            r"1.weight and 1 more of Sequential was never written by its constructor; initialize it there",
        ),
        (
            lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
            (),
            r"0 is scripted \(torch.jit.script\), so its tensors are not accessible one by one: let",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(2)),
            (),
            r"0.weight of Sequential has no shape yet \(LazyLinear\): specify the size of its inputs, or let",
        ),
    ],
)
def test_errors_say_what_to_do(factory: Any, blocks: Any, message: str) -> None:
    with pytest.raises(DescribeError, match=message):
        describe(factory, blocks=blocks)


@pytest.mark.parametrize(
    "factory", [GPT.build, MLPConfig(layers=3, hidden=8, embedding=2, sequence=4).build]
)
def test_weights_are_the_same_under_every_plan(factory: Callable[[], nn.Module]) -> None:
    whole = weights(factory, [], seed=3)
    count = len(describe(factory).blocks)
    for bounds_inside in [[1], [2], [1, 2, 3], list(range(1, count))]:
        parts = weights(factory, bounds_inside, seed=3)
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)
    other = weights(factory, [], seed=4)
    assert any(not torch.equal(other[name], whole[name]) for name in whole)
    assert set(whole) <= set(dict(factory().state_dict()))


def test_tied_parameters() -> None:
    chain = describe(GPT.build, seed=2)
    assert chain.ties == {"embedding.token.weight": ((0, "token.weight"), (4, "linear.weight"))}
    whole = materialise(chain, 0, 5, CPU)
    assert whole[4].get_parameter("linear.weight") is whole[0].get_parameter("token.weight")
    (head,) = materialise(chain, 4, 5, CPU)
    (embedding,) = materialise(chain, 0, 1, CPU)
    assert torch.equal(head.get_parameter("linear.weight"), embedding.get_parameter("token.weight"))
    assert torch.equal(head.get_parameter("linear.weight"), whole[0].get_parameter("token.weight"))
    assert parameter_names(chain, range(4, 5))["embedding.token.weight"] == (4, "linear.weight")
    names = parameter_names(chain, range(0, 5))
    assert names["embedding.token.weight"] == (0, "token.weight")
    assert "head.linear.weight" not in names


def test_a_parameter_tied_in_three_places_takes_its_first_users_values() -> None:
    def factory() -> nn.Module:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        model[2].weight = model[3].weight = model[1].weight
        return model

    whole = materialise(describe(factory), 0, 4, CPU)
    (alone,) = materialise(
        describe(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])), 1, 2, CPU
    )
    assert torch.equal(whole[1].weight, alone.weight)
    assert whole[1].weight is whole[2].weight is whole[3].weight
    later = materialise(describe(factory), 2, 4, CPU)
    assert later[0].weight is later[1].weight
    assert torch.equal(later[0].weight, whole[1].weight)


def test_a_parameter_tied_inside_one_block_is_one_parameter() -> None:
    def factory() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        inner[1].weight = inner[0].weight
        return nn.Sequential(nn.Linear(4, 4), inner)

    chain = describe(factory)
    (block,) = materialise(chain, 1, 2, CPU)
    assert block[0].weight is block[1].weight
    assert sorted(parameter_names(chain, range(1, 2))) == ["1.0.bias", "1.0.weight", "1.1.bias"]


def test_what_only_the_constructor_initialises(caplog: pytest.LogCaptureFixture) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Head(), nn.Linear(4, 4))

    whole = weights(factory, [], seed=3)
    assert not caplog.text
    assert torch.equal(whole["1.scale"], torch.ones(4))
    for bounds_inside in ([1], [2], [1, 2]):
        parts = weights(factory, bounds_inside, seed=3)
        assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_ties_beside_what_only_the_constructor_initialises() -> None:
    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), Head(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    whole, parts = weights(factory, []), weights(factory, [1, 2])
    assert "2.weight" not in whole
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    blocks = materialise(describe(factory), 0, 3, CPU)
    assert blocks[0].weight is blocks[2].weight


class _Allocated(TorchDispatchMode):
    """Bytes of CPU storages that operators create."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._seen = 0, {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, Tensor) else []:
            storage = tensor.untyped_storage()
            if not tensor.is_meta and storage.data_ptr() not in self._seen:
                self._seen[storage.data_ptr()] = storage  # alive, so that no address comes twice
                self.bytes += storage.nbytes()
        return result


def test_a_rank_allocates_its_own_stage_only() -> None:
    chain = describe(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]))
    with _Allocated() as seen:
        blocks = materialise(chain, 2, 4, CPU)
    held = sum(p.nbytes for block in blocks for p in block.parameters())
    assert held == 2 * (64 * 64 + 64) * 4
    assert held <= seen.bytes <= held + 1024
    with _Allocated() as seen:
        describe(GPT.build)
    assert seen.bytes == 0


def test_buffers_have_their_values() -> None:
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 4), Buffered()))
    (block,) = materialise(chain, 1, 2, CPU)
    assert torch.equal(block.norm.running_mean, torch.zeros(4))
    assert torch.equal(block.norm.running_var, torch.ones(4))
    assert block.norm.num_batches_tracked.item() == 0
    assert block.norm.num_batches_tracked.dtype is torch.int64
    assert torch.equal(block.mask, torch.tril(torch.ones(3, 3)))
    assert torch.equal(block.hidden, torch.arange(3.0))
    assert "1.mask" in parameter_names(chain, range(1, 2))
    assert "1.hidden" not in parameter_names(chain, range(1, 2))


def test_the_callers_random_state_is_untouched() -> None:
    for factory in (GPT.build, lambda: nn.Sequential(nn.Linear(4, 4), Head())):
        before = torch.random.get_rng_state()
        chain = describe(factory)
        first = materialise(chain, 0, 1, CPU)
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(99)
        again = materialise(chain, 0, 1, CPU)
        assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), again[0].parameters()))


def test_types_of_numbers() -> None:
    chain = describe(GPT.build, dtype=torch.float64)
    (block,) = materialise(chain, 0, 1, CPU)
    assert {p.dtype for p in block.parameters()} == {torch.float64}
    single = materialise(describe(GPT.build), 0, 1, CPU)[0]
    for a, b in zip(single.parameters(), block.parameters()):
        assert torch.equal(a.double(), b)  # the same numbers


def test_fingerprints_of_different_models_differ() -> None:
    base = describe(GPT.build).fingerprint()
    assert base == describe(GPT.build, seed=9).fingerprint()
    for change in (
        {"hidden": 18},
        {"layers": 4},
        {"tied": False},
        {"vocabulary": 33},
        {"dropout": 0.5},
    ):
        other = GPTConfig(
            **{"layers": 3, "hidden": 16, "heads": 2, "vocabulary": 32, "sequence": 8, **change}
        )  # type: ignore[arg-type]
        assert describe(other.build).fingerprint() != base, change
    assert describe(GPT.build, dtype=torch.float64).fingerprint() != base


class Quantised(nn.Module):
    """It tells of its values, which a model that is only described has not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.scale
        return scaled

    def extra_repr(self) -> str:
        return f"scale={self.scale.item():.2f}"


class OfQuantised(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Quantised(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_modules_that_cannot_be_printed_without_values() -> None:
    """I-BERT's: describing it ended in a traceback."""

    def described(width: int) -> Chain:
        return describe(partial(OfQuantised, width), sample=lambda rows: torch.zeros(rows, width))

    chain = described(4)
    assert len(chain.blocks) > 1
    assert chain.fingerprint() == described(4).fingerprint() != described(6).fingerprint()
    rows = TensorRows(torch.randn(4, 4), torch.randn(4, 4))
    verify(chain, torch.nn.functional.mse_loss, rows, when=True)


def test_block_seeds_are_pinned_and_unrelated() -> None:
    assert block_seed(1, 2, 3) == block_seed(1, 2, 3)
    assert len({block_seed(s, *w) for s in range(5) for w in [(0,), (1,), (0, 1), (1, 0)]}) == 20
    assert 0 <= block_seed(0) < 2**63


@pytest.mark.parametrize("value", [None, 3, [], {"a": torch.ones(1)}, (torch.ones(1), 2)])
def test_blocks_return_tensors(value: Any) -> None:
    if value == []:
        assert as_tuple(value) == ()
    else:
        with pytest.raises(DescribeError, match="must return a tensor or a tuple of tensors"):
            as_tuple(value)
