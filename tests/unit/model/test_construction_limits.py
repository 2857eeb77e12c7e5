"""What a recorded constructor brings and leaves: files, caches, memory; and one that cannot be recorded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallax.errors import DescribeError
from parallax.model.construction import replay
from parallax.model.construction.deferred import deferred_init
from parallax.model.describe import describe, parameter_names
from parallax.model.materialise import materialise
from tests.unit.model.test_construction import (
    CONSTRUCTORS,
    OUTSIDE,
    Odd,
    check_as_plain,
    plain,
    real,
    tensors,
)

CPU = torch.device("cpu")

# ---- what comes from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["pt", "mapped", "safetensors"])
def test_a_constructor_that_loads(kind: str, assign: bool, tmp_path: Path) -> None:
    saved = nn.Linear(4, 4).state_dict()
    torch.save(saved, tmp_path / "a.pt")
    save_file(saved, tmp_path / "a.safetensors")

    def factory() -> nn.Module:
        if kind == "safetensors":
            state = load_file(tmp_path / "a.safetensors")
        else:
            state = torch.load(tmp_path / "a.pt", mmap=kind == "mapped")
        layer = nn.Linear(4, 4)
        layer.load_state_dict(state, assign=assign)
        layer.bias.data *= 2
        return nn.Sequential(layer)

    deferred = deferred_init(factory, 1)
    for _ in range(2):
        made = real(deferred)
        assert torch.equal(made.get_parameter("0.weight"), saved["weight"])
        assert torch.equal(made.get_parameter("0.bias"), saved["bias"] * 2)
        with torch.no_grad():  # training changes what was given, not what it was made of
            made.get_parameter("0.weight").zero_()
            made.get_parameter("0.bias").zero_()


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_a_constructor_that_begins_with_a_trained_model(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers", reason="it comes with the hf extra")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, vocab_size=32)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)

    def factory() -> nn.Module:
        model: nn.Module = getattr(transformers, head).from_pretrained(tmp_path)
        layer: Any = model.get_submodule("bert.encoder.layer.0.attention.self")
        layer.query = nn.Sequential(layer.query.requires_grad_(False), nn.Linear(16, 16))
        nn.init.zeros_(layer.query[1].weight)
        return model

    made = real(deferred_init(factory, 1))
    assert "on the host" not in caplog.text
    check_as_plain(factory, made)


def test_what_is_pickled_has_its_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(4, 4)
        torch.save(layer, tmp_path / "a.pt")
        return nn.Sequential(layer, torch.load(tmp_path / "a.pt", weights_only=False))

    made = real(deferred_init(factory, 1))
    assert "it pickles a tensor" in caplog.text
    assert made.get_parameter("0.weight").abs().max() > 0
    assert torch.equal(made.get_parameter("0.weight"), made.get_parameter("1.weight"))


def test_data_of_both_kinds() -> None:
    """A recorded tensor takes the data of one from outside, and the other way round."""

    def factory() -> nn.Module:
        model = nn.Sequential(nn.Embedding.from_pretrained(OUTSIDE), nn.Linear(4, 10))
        model[0].weight.data = model[0].weight.data * 2
        model[1].weight.data = OUTSIDE
        return model

    made = real(deferred_init(factory, 1))
    assert torch.equal(made.get_parameter("0.weight"), OUTSIDE * 2)
    assert torch.equal(made.get_parameter("1.weight"), OUTSIDE)


def test_a_loss_has_its_constants() -> None:
    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 3))
            self.shares = torch.tensor([1.0, 2.0, 3.0])

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(outputs, targets, weight=self.shares)

    model: Any = deferred_init(Model, 1).with_attributes()
    assert model[0].weight.is_meta
    outputs, targets = torch.randn(2, 3), torch.tensor([0, 2])
    assert torch.equal(model.loss(outputs, targets), Model().loss(outputs, targets))


def test_no_cache_keeps_a_tensor_without_bytes() -> None:
    @functools.lru_cache
    def table(size: int) -> Tensor:
        return torch.arange(size) * 1.0

    @functools.lru_cache
    def other(size: int) -> int:
        return size

    def factory() -> nn.Module:
        model = nn.Linear(5, other(5))
        model.register_buffer("table", table(5))
        model.register_buffer("twice", table(5) * 2, persistent=False)
        return nn.Sequential(model)

    made = real(deferred_init(factory, 1))
    assert torch.equal(made.get_buffer("0.twice"), torch.arange(5) * 2.0)
    assert torch.equal(table(5), torch.arange(5) * 1.0)
    assert other.cache_info().currsize == 1


class Registry:
    """Where a constructor keeps a table for the next one."""

    table: Tensor | None = None


def test_what_a_constructor_keeps_elsewhere_has_values() -> None:
    def factory() -> nn.Module:
        if Registry.table is None:
            Registry.table = torch.arange(4.0) * 3
        model = nn.Linear(4, 4)
        model.register_buffer("table", Registry.table)
        model.more = {"table": Registry.table * 2}
        return nn.Sequential(model)

    try:
        deferred = deferred_init(factory, 1)
        assert Registry.table is not None
        assert Registry.table.tolist() == [0, 3, 6, 9]
        assert deferred.model.get_buffer("0.table").is_meta
        for made in (real(deferred), real(deferred_init(factory, 1)), factory()):
            assert made.get_buffer("0.table").tolist() == [0, 3, 6, 9]
            more: Any = made.get_submodule("0")
            assert more.more["table"].tolist() == [0, 6, 12, 18]
    finally:
        Registry.table = None


# ---- numbers, errors, memory -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types_of_numbers(dtype: torch.dtype) -> None:
    deferred = deferred_init(Odd, 1)
    single, made = real(deferred), real(deferred, dtype)
    for name, tensor in tensors(made).items():
        was = tensors(plain(Odd, 1))[name].dtype
        complexes = torch.complex128 if dtype is torch.float64 else torch.complex64
        wanted = complexes if was.is_complex else dtype if was.is_floating_point else was
        assert tensor.dtype is wanted, name
        if name != "long":  # whose single precision is less
            assert torch.equal(tensor, tensors(single)[name].to(wanted)), name
    assert (
        made.get_parameter("long")[0].item()
        == torch.tensor(math.pi, dtype=torch.double).to(dtype).item()
    )


def test_a_parameter_that_was_never_written(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 3))
            self.bias = nn.Parameter(torch.zeros(3))

    def factory() -> nn.Module:
        return nn.Sequential(Model())

    with pytest.raises(
        DescribeError, match=r"0.weight of Sequential was never written by its const"
    ):
        describe(factory)
    save_file({"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3)}, tmp_path / "a.safetensors")
    (block,) = materialise(describe(factory, weights=tmp_path / "a.safetensors"), 0, 1, CPU)
    assert torch.equal(block.get_parameter("weight"), torch.ones(3, 3))


def test_files_fill_parametrised_names(tmp_path: Path) -> None:
    saved = CONSTRUCTORS["weight_norm"]()
    save_file(saved.state_dict(), tmp_path / "a.safetensors")
    chain = describe(CONSTRUCTORS["weight_norm"], weights=tmp_path / "a.safetensors")
    (block,) = materialise(chain, 0, 1, CPU)
    assert torch.equal(block(torch.ones(16)), saved(torch.ones(16)))


def test_values_are_freed_when_no_longer_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a larger tensor does not keep the whole, and what is in between is freed."""
    peak = 0

    class Watched(replay._Memory):
        def free(self, cell: Any) -> None:
            nonlocal peak
            peak = max(peak, sum(held.nbytes() for held in self._held.values()))
            super().free(cell)

    def factory() -> nn.Module:
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(20)])
        for layer in model:
            nn.init.orthogonal_(layer.weight)
            layer.weight.data = (layer.weight * 2 + 1)[:32]
        return model

    monkeypatch.setattr(replay, "_Memory", Watched)
    deferred = deferred_init(factory, 1)
    parts = deferred.values().deepcopy_memo(deferred.model, torch.float32, {})
    one = 64 * 64 * 4
    assert sum(t.untyped_storage().nbytes() for t in parts.values()) == 20 * one // 2
    assert peak <= 20 * one + 6 * one


# ---- what cannot be recorded --------------------------------------------------------------------------


class Held(nn.Linear):
    """Its forward is a function that holds a tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        scale, forward = torch.full((4,), 2.0), super().forward
        self.forward = lambda x: forward(x) * scale  # type: ignore[method-assign]


class HeldInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        scales = [torch.full((4,), 2.0)]
        self.forward = lambda x: x * scales[0]


class HeldInDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = {"scale": nn.Linear(4, 4)}
        self.scale = layers["scale"]
        self.forward = lambda x: layers["scale"](x)


class Written(nn.Linear):
    """Its values are put there by numpy."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.detach().numpy()[:] = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", (torch.eye(4) * 2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.to_dense()


def one_memory_for_all() -> nn.Module:
    """What is read from a file goes through one array."""
    array = np.zeros((4, 4), dtype=np.float32)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for i, layer in enumerate(model):
        array[:] = i + 1
        layer.weight.data.copy_(torch.from_numpy(array))
    return model


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), Held(), nn.Linear(4, 4)), "1.forward holds a"),
        (lambda: nn.Sequential(nn.Linear(4, 4), HeldInList()), "1.forward holds a"),
        (lambda: nn.Sequential(nn.Linear(4, 4), HeldInDict()), "1.forward holds a"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Written()), "writes into what numpy"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Sparse()), "makes a tensor of type torch.float32"),
        (one_memory_for_all, "reuses the memory"),
    ],
)
def test_an_unrecordable_constructor_builds_the_whole_model(
    factory: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.random.get_rng_state()
    chain = describe(factory, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    (record,) = caplog.records
    assert record.getMessage().endswith("every process builds the whole model on the host")
    assert reason in record.getMessage()
    assert all(t.is_meta for t in tensors(chain.model).values())
    wanted = plain(factory, 3)
    whole = materialise(chain, 0, len(chain.blocks), CPU)
    x = torch.randn(2, 4)
    assert torch.equal(nn.Sequential(*whole)(x), wanted(x))
    for i, block in enumerate(whole):
        (alone,) = materialise(chain, i, i + 1, CPU)
        for name, tensor in tensors(block).items():
            found = tensors(alone)[name]
            assert torch.equal(found.to_dense(), tensor.to_dense()), name
    (half,) = materialise(describe(factory, dtype=torch.bfloat16), 0, 1, CPU)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_ties_survive_when_the_whole_model_is_built() -> None:
    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), Written(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    chain = describe(factory)
    blocks = materialise(chain, 0, 3, CPU)
    assert blocks[0].weight is blocks[2].weight
    (alone,) = materialise(chain, 2, 3, CPU)
    assert torch.equal(alone.weight, blocks[0].weight)
    assert parameter_names(chain, range(2, 3))["0.weight"] == (2, "weight")


def test_an_error_of_the_constructors_own_is_raised_as_it_is() -> None:
    def factory() -> nn.Module:
        raise LookupError("no such size")

    with pytest.raises(LookupError, match="no such size") as caught:
        describe(factory)
    assert caught.value.__context__ is None
