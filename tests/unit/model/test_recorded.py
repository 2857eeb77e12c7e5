"""A model whose forward was recorded and partitioned computes what the plain model computes."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallax.errors import DescribeError
from parallax.model.block import flatten
from parallax.model.describe import Chain, as_tuple, describe, parameter_names
from parallax.model.materialise import materialise
from tests.zoo import ZOO, Entry, tokens_batch

CPU = torch.device("cpu")


def both(entry: Entry, *, seed: int = 1) -> tuple[Chain, list[nn.Module], nn.Module]:
    """The chain, its blocks, and a plain model with the same values."""
    chain = describe(entry.build, sample=entry.sample, seed=seed)
    blocks = materialise(chain, 0, len(chain.blocks), CPU)
    plain = entry.build()
    state = plain.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, (i, inner) in parameter_names(chain, range(len(blocks))).items():
            state[name].copy_(blocks[i].state_dict()[inner])
    return chain, blocks, plain


def run(chain: Chain, blocks: list[nn.Module], inputs: Any) -> Any:
    values = chain.arguments(inputs)
    for block in blocks:
        values = as_tuple(block(*values))
    return chain.results(values)


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*as_tuple(inputs))


def check_same(
    entry: Entry, chain: Chain, blocks: list[nn.Module], plain: nn.Module, rows: int, step: int = 0
) -> None:
    """Outputs, loss and every gradient."""
    batch = entry.batch(rows, step)
    inputs, targets = batch.inputs(0, rows), batch.targets(0, rows)
    for module in (*blocks, plain):
        module.zero_grad()
    mine, theirs = run(chain, blocks, inputs), call(plain, inputs)
    loss, expected = entry.loss(mine, targets), entry.loss(theirs, targets)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    names = parameter_names(chain, range(len(blocks)))
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert set(gradients) <= set(names)
    for name, gradient in gradients.items():
        i, inner = names[name]
        found = blocks[i].get_parameter(inner).grad
        assert (found is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6, msg=name)
    for name, buffer in ((n, b) for n, b in plain.named_buffers() if n in names):
        torch.testing.assert_close(blocks[names[name][0]].get_buffer(names[name][1]), buffer)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ZOO)
def test_a_chain_computes_what_the_model_computes(name: str) -> None:
    entry = ZOO[name]
    chain, blocks, plain = both(entry)
    for step, rows in enumerate([2, 5]):
        check_same(entry, chain, blocks, plain, rows, step)
    for module in (*blocks, plain):
        module.eval()
    batch = entry.batch(3, 9)
    mine, theirs = (
        flatten(run(chain, blocks, batch.inputs(0, 3)))[0],
        flatten(call(plain, batch.inputs(0, 3)))[0],
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        (
            "unet",
            [
                *("down.0.one", "down.0.norm", "down.1.one", "down.1.norm", "down.2.one"),
                *("down.2.norm", "middle.one", "middle.norm", "up.0.one", "up.0.norm"),
                *("up.1.one", "up.1.norm", "up.2.one", "up.2.norm"),
            ],
        ),
        (
            "resnet",
            [
                *("conv1", "bn1", "layer1.0.bn1", "layer1.0.bn2", "layer1.1.conv1", "layer1.1.bn1"),
                *("layer1.1.bn2", "layer2.0.conv1", "layer2.0.bn1", "layer2.0.bn2"),
                *("layer2.1.conv1", "layer2.1.bn1", "layer2.1.bn2", "fc"),
            ],
        ),
        ("mixture", ["embedding", "layers.0", "layers.1", "layers.2", "head"]),
        (
            "lstm",
            [
                "embedding",
                "mixers.0",
                "cell",
                "mixers.1",
                "cell (2)",
                "mixers.2",
                "cell (3)",
                "head",
            ],
        ),
    ],
)
def test_blocks_are_modules_small_enough_to_be_balanced(name: str, blocks: list[str]) -> None:
    assert [
        block.name for block in describe(ZOO[name].build, sample=ZOO[name].sample).blocks
    ] == blocks


def test_a_skip_passes_every_block_between() -> None:
    entry = ZOO["unet"]
    chain, blocks, _ = both(entry)
    values = chain.arguments(entry.sample(2))
    kept: list[Tensor] = []
    for block in blocks:
        entered = values
        values = as_tuple(block(*entered))
        kept += [value for value in values if any(value is other for other in entered)]
    assert len({id(value) for value in kept}) == 3, "three skips, unchanged on their way"
    assert not any(block.unbatched for block in chain.blocks)


def test_a_module_that_runs_several_times_is_tied() -> None:
    chain = describe(ZOO["lstm"].build, sample=ZOO["lstm"].sample)
    assert {name.partition(".")[0] for name in chain.ties} == {"cell"}
    assert {len(users) for users in chain.ties.values()} == {3}
    chain, blocks, _ = both(ZOO["towers"])
    assert blocks[-1] is not blocks[0]
    assert "trunk.0.weight" in chain.ties


def test_a_module_with_buffers_that_runs_several_times_is_in_one_block() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.layers[1](self.layers[0](x)))
            return self.layers[3](self.norm(self.layers[2](x)))

    entry = Entry(Shared, F.mse_loss, lambda rows, step: _floats(rows, step))
    chain, blocks, plain = both(entry)
    assert [block.name for block in chain.blocks] == ["layers.0", "layers.1", "norm", "layers.3"]
    assert not chain.ties
    check_same(entry, chain, blocks, plain, 4)


def _floats(rows: int, step: int, width: int = 4) -> Any:
    from parallax.runtime.batch import TensorRows

    random = torch.Generator().manual_seed(step)
    return TensorRows(
        torch.randn(rows, width, generator=random), torch.randn(rows, width, generator=random)
    )


def test_what_is_made_of_sizes_alone_is_made_by_every_block_that_uses_it() -> None:
    entry = ZOO["positions"]
    chain, blocks, plain = both(entry)
    assert not any(block.unbatched for block in chain.blocks)
    for length in (4, 7, 12):
        longer = Entry(
            entry.build, entry.loss, lambda rows, step, n=length: tokens_batch(rows, step, n)
        )
        check_same(longer, chain, blocks, plain, 2)
    with pytest.raises(RuntimeError, match="must match"):
        run(chain, blocks, tokens_batch(2, 0, 13).inputs(0, 2))
    assert "embed.weight" in chain.ties, "the head's product uses the embedding's weight"


def test_no_boundary_where_rows_mix() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            mean = self.layers[1](x).mean(0)  # of all rows
            return self.layers[3](self.layers[2](x) + mean)

    entry = Entry(Mixing, F.mse_loss, _floats)
    chain, blocks, plain = both(entry)
    assert [block.name for block in chain.blocks] == [
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
    ]
    assert "mean" in repr(chain.blocks[2].module), "from the rows to what has none, and back"
    assert not any(block.unbatched for block in chain.blocks)
    check_same(entry, chain, blocks, plain, 4)


class Branches(nn.Module):
    """Puts what its branches make into the list that it is given, as high-resolution nets do."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        for i, branch in enumerate(self.branches):
            x[i] = branch(x[i])
        return [x[0], x[0] + x[1]]


class HighResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.stages = nn.ModuleList(Branches() for _ in range(20))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x, self.inner(x)]
        for stage in self.stages:
            parts = stage(parts)
        out: Tensor = self.head(torch.cat(parts, dim=1))
        return out


def test_a_part_may_change_the_list_that_it_is_given() -> None:
    entry = Entry(HighResolution, F.mse_loss, _floats)
    chain, blocks, plain = both(entry)
    assert len(chain.blocks) > 3
    check_same(entry, chain, blocks, plain, 3)


def test_training_and_evaluation() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.dropout(layer(x), 0.5, self.training)
            return x

    chain, blocks, plain = both(
        Entry(Dropping, F.mse_loss, lambda rows, step: _floats(rows, step, 64))
    )
    x = torch.randn(2, 64)
    for training in (True, False):
        for module in (*blocks, plain):
            module.train(training)
        torch.manual_seed(3)
        expected = plain(x)
        torch.manual_seed(3)
        assert torch.equal(run(chain, blocks, x), expected)
    assert int((plain.train()(x) == 0).sum()) > 0


class Deciding(nn.Module):
    """Decides by values in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) if x.sum() > 0 else self.layers[1](x)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Deciding(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_what_cannot_be_recorded_says_why_and_what_to_write() -> None:
    with pytest.raises(
        DescribeError,
        match=r"Deciding cannot be partitioned.*branches on the values of tensors, at .*test_recorded.py:\d+\)(?s:.*)"
        r"def blocks",
    ):
        describe(Deciding, sample=lambda n: torch.randn(n, 4))
    with pytest.raises(DescribeError, match="describe\\(\\) was given no sample"):
        describe(Deciding)
    whole = describe(Deciding, blocks=[""])
    assert len(whole.blocks) == 1


def test_a_part_that_decides_by_values_is_one_block(caplog: pytest.LogCaptureFixture) -> None:
    entry = Entry(Wrapped, F.mse_loss, _floats)
    with caplog.at_level(logging.INFO, logger="parallax"):
        chain, blocks, plain = both(entry)
    assert [block.name for block in chain.blocks] == ["body", "head"]
    assert "body stays whole" in caplog.text
    for step in range(3):
        check_same(entry, chain, blocks, plain, 3, step)


def test_one_part_is_one_block_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    chain = describe(lambda: nn.Linear(4, 4))
    assert len(chain.blocks) == 1
    assert "Linear is one block: one part holds all parameters" in caplog.text


def test_inputs_by_name_and_optional_inputs() -> None:
    chain, _, _ = both(ZOO["towers"])
    inputs = ZOO["towers"].sample(2)
    assert chain.inputs == ("query", "item")
    assert (
        chain.results(chain.arguments({"item": inputs["item"], "query": inputs["query"]}) * 6)[
            "weight"
        ]
        is None
    )
    with pytest.raises(
        DescribeError, match="inputs are query, items, but the model takes query, item"
    ):
        chain.arguments({"query": inputs["query"], "items": inputs["item"]})
    with pytest.raises(DescribeError, match="inputs are item, but the model takes query, item"):
        chain.arguments({"item": inputs["item"]})
    more = describe(
        ZOO["towers"].build, sample=lambda n: {**ZOO["towers"].sample(n), "weight": torch.ones(n)}
    )
    assert more.inputs == ("query", "item", "weight")
    made = materialise(more, 0, len(more.blocks), CPU)
    assert torch.equal(
        run(more, made, {**inputs, "weight": torch.ones(2)})["weight"], torch.ones(2)
    )


def test_blocks_that_do_the_same_look_the_same() -> None:
    chain = describe(ZOO["mixture"].build, sample=ZOO["mixture"].sample)
    assert len({repr(block.module) for block in chain.blocks[1:4]}) == 1
    assert (
        chain.fingerprint()
        == describe(ZOO["mixture"].build, sample=ZOO["mixture"].sample).fingerprint()
    )
    assert copy.deepcopy(chain.blocks[1].module) is not chain.blocks[1].module


def test_unused_parameters_stay_in_the_model() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.spare = (
                nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
                nn.Linear(4, 7),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    entry = Entry(Unused, F.mse_loss, _floats)
    chain, blocks, plain = both(entry)
    assert "spare.weight" in parameter_names(chain, range(2))
    check_same(entry, chain, blocks, plain, 3)


# ---- random graphs -----------------------------------------------------------------------------------


class Graph(nn.Module):
    """Each node mixes some of the values before it, through a layer of its own or one that others use too."""

    def __init__(self, nodes: list[tuple[int, int, int, str]]) -> None:
        super().__init__()
        self.nodes = nodes
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        values: list[Tensor] = [x]
        for first, second, layer, what in self.nodes:
            a, b = values[first % len(values)], values[second % len(values)]
            if what == "layer":
                values.append(torch.tanh(self.layers[layer](a)) + b)
            elif what == "chunk":
                left, right, _ = torch.cat([a, b], dim=-1).chunk(3, dim=-1)
                values.append(self.layers[layer](torch.cat([left, right[..., :1]], dim=-1)))
            elif what == "shape":
                values.append((a.view(a.size(0), -1) * b.shape[1]) / a.shape[0])
            else:
                values.append(a * torch.arange(a.shape[-1], device=a.device))
        return {"first": values[1], "last": values[-1], "some": (values[len(values) // 2], None)}


def _sum(outputs: Any, targets: Tensor) -> Tensor:
    return ((outputs["first"] + outputs["last"]) * targets).sum() + outputs["some"][
        0
    ].square().mean()


NODE = st.tuples(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from(["layer", "layer", "chunk", "shape", "table"]),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(nodes=st.lists(NODE, min_size=1, max_size=9), rows=st.integers(1, 4))
def test_random_graphs(nodes: list[tuple[int, int, int, str]], rows: int) -> None:
    nodes = [(0, 0, 0, "layer"), *nodes]
    build: Callable[[], nn.Module] = lambda: Graph(nodes)  # noqa: E731
    entry = Entry(build, _sum, lambda n, step: _floats(n, step, 3))
    chain, blocks, plain = both(entry)
    check_same(entry, chain, blocks, plain, rows)
    values = chain.arguments(entry.sample(rows + 4))
    for block, described in zip(blocks[:-1], chain.blocks):
        values = as_tuple(block(*values))
        for i, value in enumerate(values):
            assert (i in described.unbatched) == (value.shape[0] != rows + 4)


def test_inputs_of_sizes_that_were_not_recorded_are_refused() -> None:
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x.flatten(1)[:, : x.shape[1] * 4])
            return x

    chain = describe(Flattening, sample=lambda n: torch.zeros(n, 6, 4))
    assert len(chain.blocks) == 2
    assert chain.arguments(torch.zeros(5, 6, 4))
    with pytest.raises(
        DescribeError, match=r"has shape \(5, 8, 4\), but .* recorded for \(any, 6, 4\)"
    ):
        chain.arguments(torch.zeros(5, 8, 4))


class DropsLayers(nn.Module):
    """A layer is skipped with a probability, as models of speech do."""

    def __init__(self, probability: float, source: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.probability, self.source = probability, source

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([]) if self.source == "torch" else random.random()
            if not (self.training and drawn < self.probability):
                x = layer(x)
        return x


@pytest.mark.parametrize(
    ("probability", "source", "refused"),
    [
        (0.0, "torch", ""),
        (0.5, "torch", "branches on random numbers"),
        (0.0, "python", "draws random numbers of Python or numpy"),
    ],
)
def test_what_is_drawn_is_no_part_of_a_record(
    probability: float, source: str, refused: str
) -> None:
    def make() -> Chain:
        return describe(
            lambda: DropsLayers(probability, source), sample=lambda n: torch.zeros(n, 8)
        )

    if refused:
        with pytest.raises(DescribeError, match=refused):
            make()
    else:
        assert len(make().blocks) == 4


def test_a_part_that_train_keeps_in_evaluation_mode_stays_there() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.drop = nn.Dropout(0.5)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.drop.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.drop(self.layers[0](x)))

    entry = Entry(Frozen, F.mse_loss, lambda rows, step: _floats(rows, step, 8))
    chain, blocks, plain = both(entry)
    for module in (*blocks, plain):
        module.train()
    check_same(entry, chain, blocks, plain, 3)
