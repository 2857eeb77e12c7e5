"""A recorded constructor gives what the constructor gives: its constants, its distributions, its seeds, its shapes."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from parallax.model.construction.deferred import DeferredModel, deferred_init

CPU = torch.device("cpu")
OUTSIDE = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


def real(deferred: DeferredModel, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The whole with values."""
    parts = deferred.values().deepcopy_memo(deferred.model, dtype, {})
    model: nn.Module = copy.deepcopy(deferred.model, parts)
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def plain(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        return factory()


def check_as_plain(factory: Callable[[], nn.Module], made: nn.Module) -> None:
    """Check ``made`` against plain constructions: equal if two of them are, otherwise with their mean and deviation."""
    first, second = plain(factory, 11), plain(factory, 12)
    assert list(tensors(made)) == list(tensors(first))
    for name, tensor in tensors(made).items():
        one, other = tensors(first)[name], tensors(second)[name]
        assert type(tensor) is type(one), name
        assert (tensor.shape, tensor.requires_grad) == (one.shape, one.requires_grad), name
        assert tensor.stride() == one.stride(), name
        wide = torch.cdouble if one.is_complex() else torch.double
        found, one, other = (t.detach().to(tensor.dtype).to(wide) for t in (tensor, one, other))
        if torch.equal(one, other):
            assert torch.equal(found, one), name
            continue
        spread, error = one.abs().square().mean().sqrt(), 8 / math.sqrt(one.numel())
        assert not torch.equal(found, one), name
        assert (found.mean() - one.mean()).abs() <= error * spread, name
        ratio = found.abs().square().mean().sqrt() / spread
        assert 1 / (1 + error) <= ratio <= 1 + error, name
    ties = [
        [n for n, t in tensors(m).items() if t is u]
        for m in (made, first)
        for u in tensors(m).values()
    ]
    assert ties[: len(ties) // 2] == ties[len(ties) // 2 :]


# ---- constructors ------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen layer, a random A and a B of zeros; a plain tensor as its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.empty(4, 16)), nn.Parameter(torch.zeros(16, 4))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T * self.scale


class Vision(nn.Module):
    """ResNets', MobileNets', DenseNets' and ViTs' initialisation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16))
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.last_norm, self.classes = nn.BatchNorm2d(16), nn.Linear(16, 10)
        self.token, self.places = (
            nn.Parameter(torch.zeros(1, 1, 16)),
            nn.Parameter(torch.randn(1, 9, 16) * 0.02),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                bound = 1.0 / math.sqrt(module.weight.shape[0])
                nn.init.uniform_(module.weight, -bound, bound)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.last_norm.weight)
        nn.init.trunc_normal_(self.places, std=0.02)
        shares = [share.item() for share in torch.linspace(0, 0.3, 4)]
        self.drops = nn.ModuleList(nn.Dropout(share) for share in shares)


class Post(nn.Module):
    """Everything again by ``apply``, as ``post_init`` of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
        self.embedding, self.head = nn.Embedding(8, 16, padding_idx=0), nn.Linear(16, 8, bias=False)
        self.apply(self._init)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                parameter.data.normal_(0, 0.02 / math.sqrt(6))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if getattr(module, "padding_idx", None) is not None:
                module.weight.data[module.padding_idx].zero_()


class Odd(nn.Module):
    """Types, views, strides, places of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(30, dtype=torch.cfloat))
        self.conjugate = nn.Parameter((torch.ones(3, dtype=torch.cfloat) * 1j).conj())
        self.whole = nn.Parameter(torch.randint(0, 9, (40,), dtype=torch.int8), requires_grad=False)
        self.short = nn.Parameter(torch.randn(40).bfloat16())
        self.long = nn.Parameter(torch.full((2,), math.pi, dtype=torch.double))
        together = torch.randn(10, 10)
        self.above, self.below = nn.Parameter(together[:3]), nn.Parameter(together[3:])
        self.turned = nn.Parameter(torch.randn(4, 5).t())
        self.one = nn.Parameter(torch.tensor(3.0))
        self.copied = nn.Parameter(torch.empty(5))
        self.copied.data.copy_(torch.from_numpy(np.arange(5)))
        self.replaced = nn.Parameter(torch.empty(2))
        self.replaced.data = torch.arange(3.0) * 2
        self.register_buffer("mask", torch.rand(64) > 0.5)
        self.register_buffer("causal", torch.tril(torch.ones(4, 4)), persistent=False)
        self.register_buffer("hot", nn.functional.one_hot(torch.arange(3), 4))
        self.register_buffer("nothing", None)
        self.register_buffer("listed", torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]))
        self.register_buffer("set", torch.zeros(4, 4))
        self.set[1:3, torch.tensor([0, 2])] = 5.0
        self.set[self.set > 4] += 1
        self.set[range(2), [3, 2]] = 7.0
        self.register_buffer("chosen", torch.arange(12.0).view(3, 4)[[0, 2]][:, np.array([1, 3])])


class Mask(nn.Module):
    """A parametrisation with a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(16))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def masked() -> nn.Module:
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", Mask())
    return nn.Sequential(layer)


def pruned() -> nn.Module:
    """The mask is that of the values drawn."""
    layer = prune.l1_unstructured(nn.Linear(16, 16), "weight", amount=0.25)
    return nn.Sequential(layer)


def skipped() -> nn.Module:
    layer = nn.utils.skip_init(nn.Linear, 4, 4)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer)


def ran_once() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    model(torch.ones(2, 16))
    return model


def in_half() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    finally:
        torch.set_default_dtype(torch.float32)


def by_numpy() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].weight.data = torch.from_numpy(np.random.randn(16, 16)).float()  # noqa: NPY002
    return model


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "lora": LoRA,
    "vision": Vision,
    "post_init": Post,
    "odd": Odd,
    "masked": masked,
    "pruned": pruned,
    "skip_init": skipped,
    "ran_once": ran_once,
    "in_half": in_half,
    "by_numpy": by_numpy,
    "outside": lambda: nn.Sequential(nn.Embedding.from_pretrained(OUTSIDE), nn.Linear(4, 4)),
    "trained_outside": lambda: nn.Sequential(nn.Embedding.from_pretrained(OUTSIDE, freeze=False)),
    "explicit_device": lambda: nn.Sequential(nn.Linear(4, 4, device="cpu")).to("cpu"),
    "there_and_back": lambda: nn.Sequential(nn.Linear(16, 16)).double().float().share_memory(),
    "sparse_gradients": lambda: nn.Sequential(nn.Embedding(9, 16, padding_idx=1, sparse=True)),
    "old_weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 16))),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16))),
    "old_spectral_norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 16))),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16))),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16))),
    "lstm": lambda: nn.Sequential(nn.LSTM(8, 16, 2, bidirectional=True)),
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(16, 2, add_bias_kv=True)),
    "transformer": lambda: nn.Transformer(16, 2, 2, 1, 32),
}


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_values_are_the_constructors(name: str, caplog: pytest.LogCaptureFixture) -> None:
    deferred = deferred_init(CONSTRUCTORS[name], 1)
    assert caplog.text == ""
    assert all(t.is_meta for t in tensors(deferred.model).values())
    made = real(deferred)
    check_as_plain(CONSTRUCTORS[name], made)
    values = [t for t in made.parameters() if t.numel() > 20 and (t != t.flatten()[0]).any()]
    for i, one in enumerate(values):  # no two are drawn alike but for copies
        twins = [t for t in values[:i] if t.shape == one.shape and torch.equal(t, one)]
        assert not twins or name in ("post_init", "transformer")
    again = real(deferred_init(CONSTRUCTORS[name], 1))
    for key, tensor in tensors(again).items():
        assert torch.equal(tensor, tensors(made)[key]), key


def test_a_stage_and_the_whole_have_the_same_values() -> None:
    deferred = deferred_init(Post, 5)
    whole = tensors(real(deferred))
    values = deferred.values()
    for path in ["layers.2", "head", "layers.0.linear2", "embedding", "layers.1"]:
        module = deferred.model.get_submodule(path)
        part: nn.Module = copy.deepcopy(module, values.deepcopy_memo(module, torch.float32, {}))
        for name, tensor in tensors(part).items():
            assert torch.equal(tensor, whole[f"{path}.{name}"]), (path, name)
    assert not torch.equal(
        whole["layers.0.linear1.weight"],
        tensors(real(deferred_init(Post, 6)))["layers.0.linear1.weight"],
    )


def test_plain_tensors_have_values_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.tables = [torch.arange(3.0), {"x": torch.ones(2)}]
            self.same = self.linear.weight

    deferred = deferred_init(Model, 1)
    assert set(deferred.attributes) == {"tables.0", "tables.1.x"}
    made: Any = real(deferred, torch.bfloat16)
    assert torch.equal(made.tables[0], torch.arange(3.0))  # Module.to leaves such as they are
    assert torch.equal(made.tables[1]["x"], torch.ones(2))
    assert made.same is made.linear.weight


def test_what_is_copied_stays_equal() -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Linear(8, 8)
            self.target = copy.deepcopy(self.online)
            self.third = nn.Linear(8, 8)
            self.third.load_state_dict(self.online.state_dict())
            self.fourth = nn.Linear(8, 8)
            self.fourth.weight.data = self.online.weight.data.clone()
            nn.init.orthogonal_(self.fourth.weight)

    deferred = deferred_init(Target, 1)
    found: dict[str, Tensor] = {}
    for name in ("third", "target", "online", "fourth"):  # each in a replay of its own
        module = deferred.model.get_submodule(name)
        parts = deferred.values().deepcopy_memo(module, torch.float32, {})
        found[name] = copy.deepcopy(module, parts).get_parameter("weight").detach()
    assert torch.equal(found["online"], found["target"])
    assert torch.equal(found["online"], found["third"])
    torch.testing.assert_close(found["fourth"] @ found["fourth"].T, torch.eye(8))


# ---- values that a constructor asks for ----------------------------------------------------------------


def test_a_constructor_may_ask_for_values() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.linspace(0, 1, 5)
            self.answers = (
                table.tolist(),
                table[1].item(),
                float(table[2]),
                int(torch.arange(4)[3]),
                bool((table > 0.5).any()),
                np.asarray(table).tolist(),
                table.numpy().sum().item(),
                f"{table[1]:.2f}",
                repr(torch.ones(2)),
                0.25 in table,
                torch.allclose(table, table),
                table.nonzero().shape,
                list(range(torch.tensor(2))),
                str(table.device),
                table.is_meta,
                torch.ones(2).data_ptr() == torch.ones(2).data_ptr(),
                torch.unique(torch.tensor([3, 1, 3])).tolist(),
                torch.equal(table, table * 1),
                math.sqrt(torch.tensor(4.0)),
                torch.tensor([table[1], table[2]]).tolist(),
            )
            self.linear = nn.Linear(4, 4)
            self.sum = self.linear.weight.sum().item()

    deferred = deferred_init(Asking, 1)
    found: Any = deferred.model
    assert found.answers == plain(Asking, 1).answers
    made: Any = real(deferred)
    assert made.linear.weight.sum().item() == pytest.approx(found.sum)


# ---- seeds -------------------------------------------------------------------------------------------


def seeded() -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.orthogonal_(model[0].weight)
    return model


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def kept_state() -> nn.Module:
    torch.manual_seed(2)
    first = nn.Linear(4, 4)
    state = torch.get_rng_state()
    second = nn.Linear(4, 4)
    torch.set_rng_state(state)
    return nn.Sequential(first, second, nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("factory", [seeded, own_generator, kept_state])
def test_a_seed_of_the_constructors_own_decides(factory: Callable[[], nn.Module]) -> None:
    wanted = tensors(plain(factory, 1))
    deferred = deferred_init(factory, 5)
    values = deferred.values()
    for name, module in [*deferred.model.named_children()][::-1]:
        parts = values.deepcopy_memo(module, torch.float32, {})
        for inner, tensor in tensors(copy.deepcopy(module, parts)).items():
            assert torch.equal(tensor, wanted[f"{name}.{inner}"]), (name, inner)


def test_a_seed_for_a_part_leaves_the_rest_to_ours() -> None:
    def factory() -> nn.Module:
        first = nn.Linear(4, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            second = nn.Linear(4, 4)
        return nn.Sequential(first, second, nn.Linear(4, 4))

    one, other = (tensors(real(deferred_init(factory, seed))) for seed in (1, 2))
    assert torch.equal(one["1.weight"], tensors(plain(factory, 9))["1.weight"])
    assert torch.equal(one["1.weight"], other["1.weight"])
    assert not torch.equal(one["0.weight"], other["0.weight"])
    assert not torch.equal(one["2.weight"], other["2.weight"])
    assert not torch.equal(one["2.weight"], one["0.weight"])


def test_every_generator_is_as_before() -> None:
    generator = torch.Generator().manual_seed(3)

    def factory() -> nn.Module:
        random.random()
        np.random.rand()  # noqa: NPY002
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(4, 4), nn.Embedding(3, 4, _weight=torch.randn(3, 4, generator=generator))
        )

    def states() -> list[Any]:
        numpys = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
        torchs = [torch.get_rng_state().tolist(), generator.get_state().tolist()]
        return [random.getstate(), numpys, *torchs]

    before = states()
    deferred = deferred_init(factory, 1)
    assert states() == before
    real(deferred)
    assert states() == before
