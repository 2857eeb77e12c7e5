"""A chain that is its model's forward passes without a message; any other is refused before it is trained."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.catalog import entries
from benchmarks.zoo.entry import EntryRows
from parallax.errors import DescribeError
from parallax.model.block import Block
from parallax.model.describe import Chain, describe
from parallax.model.recording.partitioning.segment import RecordedSegment
from parallax.model.verification.verify import Verdict, verify
from parallax.runtime.batch import TensorRows
from tests.zoo import FAMILIES, ZOO


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Net(nn.Module):
    """Everything that a partition may lose: dropout, a counter in a buffer, a residual, noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        self.calls += 1
        y = y.view(len(y), 2, 4).flatten(1)
        y = y + self.drop(self.norm(self.second(y)))
        y = F.dropout(y, 0.2, self.training)
        return self.last(y + 0.1 * torch.randn_like(y) * self.training)


def batch(rows: int = 8) -> TensorRows:
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, 6, generator=random)
    return TensorRows(inputs, torch.randint(0, 3, (rows,), generator=random))


def chain_of(model: Callable[[], nn.Module]) -> Chain:
    return describe(model, sample=lambda rows: torch.randn(rows, 6))


def with_block(chain: Chain, index: int, module: nn.Module) -> Chain:
    blocks = list(chain.blocks)
    blocks[index] = Block(blocks[index].name, module, blocks[index].unbatched)
    return dataclasses.replace(chain, blocks=tuple(blocks))


def altered(chain: Chain, old: str, new: str) -> tuple[Chain, int]:
    """``chain`` with other text in the first recorded block that has ``old``, and that block's place."""
    for index, block in enumerate(chain.blocks):
        module = block.module
        if isinstance(module, RecordedSegment) and old in module._code:
            found = dict(module._run.__globals__)
            exec(module._code.replace(old, new), found)
            members = {name: (part, True) for name, part in module.named_children()}
            members |= {name: (part, True) for name, part in module._buffers.items()}
            members |= {name: (part, True) for name, part in module._parameters.items()}
            code = module._code.replace(old, new)
            other = RecordedSegment(
                code,
                found["forward"],
                members,
                evaluates=module._evaluates,
                differentiates=module._differentiates,
            )
            return with_block(chain, index, other), index
    raise AssertionError(f"no block has {old}: {[b.module for b in chain.blocks]}")


def test_a_right_chain_passes_in_silence_and_is_checked_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    printed: list[str] = []
    chain = chain_of(Net)
    before = torch.get_rng_state()
    for _ in range(2):
        assert verify(chain, F.cross_entropy, batch(), progress=printed.append) == Verdict()
    assert printed == ["checking that the blocks compute what the model does"]
    assert torch.get_rng_state().equal(before)
    verify(chain, F.cross_entropy, batch(), when=True, progress=printed.append)
    verify(chain, F.cross_entropy, batch(), key="other rows", progress=printed.append)
    verify(chain, F.cross_entropy, batch(), when=False, key="never", progress=printed.append)
    assert len(printed) == 3
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("relu(", "sigmoid("),
        ("= dropout(v", "= (lambda y, **_: y)(v"),
        ("p=constant", "p=0.25"),
        ("self.part1(v2)", "v2"),
        ("add(x0", "(lambda a, b: a)(x0"),
        ("add_(self.own1, 1)", "add_(self.own1, 0)"),
        ("x0.shape[0], 2, 4", "2, 2, 4"),
        ("randn_like", "zeros_like"),
    ],
)
def test_a_block_that_does_something_else_is_refused_by_name(old: str, new: str) -> None:
    chain = chain_of(Net)
    wrong, index = altered(chain, old, new)
    expected = f"block {index + 1} of {len(chain.blocks)} ({chain.blocks[index].name}) of Net does"
    with pytest.raises(DescribeError) as caught:
        verify(wrong, F.cross_entropy, batch())
    assert str(caught.value).startswith(expected)
    assert "model.verify=false" in str(caught.value)
    assert "\n" not in str(caught.value)


class Noise(nn.Module):
    """Draws from a generator whose state the check does not know."""

    random = torch.Generator().manual_seed(1)

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=Noise.random)
        return x + noise if self.training or self.always else x


@pytest.mark.parametrize(
    ("always", "left"), [(False, "only evaluation was compared"), (True, "evaluation was not")]
)
def test_noise_of_its_own_is_not_compared(
    always: bool, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Noise(always), nn.Linear(8, 3))

    with caplog.at_level(logging.WARNING):
        assert verify(chain_of(build), F.cross_entropy, batch()).coupled, (
            "losses are never the same"
        )
    (record,) = caplog.records
    assert left in record.getMessage()


class Coupled(nn.Module):
    """Rows interact in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(F.relu(y - y.mean(0)))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class Counted:
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    def count(self, targets: Tensor) -> int:
        return int((targets != -100).sum())


class Tempered(nn.Module):
    """Features, and a temperature that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones([]))

    def blocks(self) -> list[nn.Module]:
        return [self]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.scale.exp()


class Auxiliary(Tempered):
    """The second output is of all rows of a micro-batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features: Tensor = self.layer(x)
        return features, features.square().mean() * self.scale


class Pairs(Tempered):
    """A number for each pair of rows."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        features: Tensor = self.layer(x)
        return features @ features.T * self.scale


def tempered(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return contrastive(outputs[0] * outputs[1], targets)


def own_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Over some of the targets, which no cross-entropy tells."""
    kept = targets >= 0
    each = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * kept).sum() / kept.sum().clamp(min=1)


def uneven() -> TensorRows:
    """Of the first rows none is ignored."""
    rows = batch(8)
    targets = rows.targets(0, 8).clone()
    targets[6:] = -100
    return TensorRows(rows.inputs(0, 8)[0], targets)


@pytest.mark.parametrize(
    ("model", "loss", "rows", "coupled", "in_model"),
    [
        (plain, F.cross_entropy, batch(), False, False),
        (plain, contrastive, batch(), True, False),
        (plain, F.cross_entropy, uneven(), False, False),
        (plain, own_mean, uneven(), True, False),
        (plain, Counted(), uneven(), False, False),
        (plain, lambda outputs, targets: outputs.sum(), batch(), True, False),
        (Coupled, F.cross_entropy, batch(), True, True),
        (Coupled, F.cross_entropy, batch(1), False, False),
        (Coupled, contrastive, batch(), True, True),
        (Pairs, F.cross_entropy, batch(), True, True),
        (Tempered, tempered, batch(), True, False),
        (Auxiliary, tempered, batch(), True, True),
    ],
)
def test_rows_that_meet_are_found(
    model: Callable[[], nn.Module], loss: Any, rows: TensorRows, coupled: bool, in_model: bool
) -> None:
    """In the loss, where gathering all outputs helps, or before it."""
    chain = chain_of(model)
    first = verify(chain, loss, rows)
    assert bool(first.coupled) is coupled, first
    assert bool(first.gathered) is in_model, first
    assert verify(chain, loss, rows) == first  # as it was remembered


def test_blocks_that_are_not_the_forward_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def blocks(self) -> list[nn.Module]:
            return [self.first, self.last]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.first(x)))

    with pytest.raises(DescribeError, match=r"block 2 of 2 \(last\) of Scaled does not compute"):
        verify(chain_of(Scaled), F.cross_entropy, batch())


def test_a_detached_gradient_is_refused() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def blocks(self) -> list[nn.Module]:
            return list(self.parts)

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0](x)
            return self.parts[2](self.parts[1](x.detach()))

    with pytest.raises(DescribeError, match=r"block 1 of 3 \(parts.0\).*gradient parts.0.weight"):
        verify(chain_of(Detached), F.cross_entropy, batch())


class Averaged(nn.Module):
    """Puts another buffer in the place of one in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.averaged, self.last = nn.Linear(6, 8), Averaged(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.averaged(self.first(x)))
        return out


def test_a_buffer_that_is_replaced_is_no_difference() -> None:
    verify(chain_of(Averages), F.cross_entropy, batch(), when=True)


def test_nothing_hides_behind_a_head_of_zeros() -> None:
    class Zeros(nn.Module):
        def __init__(self, detached: bool) -> None:
            super().__init__()
            self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.detached = detached
            for linear in (self.gate, self.last):
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)

        def blocks(self) -> list[nn.Module]:
            return [self.first, self.gate, self.last]

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(self.gate(x.detach() if self.detached else x))

    assert verify(chain_of(lambda: Zeros(False)), F.cross_entropy, batch()) == Verdict()
    with pytest.raises(DescribeError, match=r"\(first\) of Zeros .* gradient first.weight differs"):
        verify(chain_of(lambda: Zeros(True)), F.cross_entropy, batch(), key="detached")


def test_a_loss_that_differs_is_named() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"logits": super().forward(x), "scale": 2.0}

    def loss(results: dict[str, Any], targets: Tensor) -> Tensor:
        return F.cross_entropy(results["logits"], targets) * results["scale"]

    chain = chain_of(lambda: Scaled(6, 3))
    assert verify(chain, loss, batch(), when=True) == Verdict()
    other = dataclasses.replace(chain, template={**chain.template, "scale": 3.0})
    with pytest.raises(DescribeError, match="own forward does: loss differs, by"):
        verify(other, loss, batch(), when=True)


def test_what_does_not_fit_the_host_is_not_checked_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chain = describe(lambda: nn.Sequential(nn.Linear(2**20, 2**20), nn.ReLU()))
    with caplog.at_level(logging.WARNING, logger="parallax"):
        assert verify(chain, F.cross_entropy, batch()) == Verdict()
    (record,) = caplog.records
    assert (
        "it was not checked that the blocks compute what the model does: model, chain and gradients need"
        in record.message
    )
    assert "model.verify=true" in record.message


def test_a_loss_that_refuses_the_targets_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def refused(outputs: Tensor, targets: Tensor) -> Tensor:
        raise DescribeError("the targets are wrong")

    with pytest.raises(DescribeError, match="the targets are wrong"):
        verify(chain_of(Net), refused, batch())
    assert not caplog.records


MODELS = {**ZOO, **FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",  # every second one; those below are more varied
    [
        pytest.param(name, marks=[pytest.mark.thorough] if i % 2 else [])
        for i, name in enumerate(MODELS)
    ],
)
def test_no_false_alarm_on_the_zoo(name: str) -> None:
    entry = MODELS[name]
    chain = describe(entry.build, sample=entry.sample)
    assert verify(chain, entry.loss, entry.batch(6, 0)) == Verdict()


VARIED = {
    "torch/encoder-causal": False,
    "torch/gru-both-ways": False,
    "torch/batch-norms": False,
    "vision/diffusion": False,
    "vision/densenet": False,
    "text/tied-modules": False,
    "text/wavenet": False,
    "text/sparse-bag": False,
    "practice/nested": False,
    "practice/unused": False,
    "practice/spectral-norm": False,
    "science/dlrm": False,
    "science/two-towers": True,
    "science/graph-edges": False,
    "science/real-nvp": False,
    "science/physics": False,
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", VARIED)
def test_of_varied_models_only_rows_that_meet_are_found(name: str) -> None:
    entry = entries()[name]
    rows = EntryRows(entry, 7, 0, torch.float32)
    chain = describe(entry.build, sample=lambda count: rows.inputs(0, count))
    assert bool(verify(chain, entry.loss, rows).coupled) is VARIED[name]
