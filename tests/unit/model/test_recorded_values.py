"""Forwards that decide by values: what the sample says is taken for granted, and checked with every batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import DescribeError
from parallax.model.describe import Chain, as_tuple, describe
from parallax.model.materialise import materialise
from parallax.model.recording.expected import DiffersFromSample
from parallax.plan.task import PlanTask

WIDTH = 8
IMAGE = 3
Sample = Callable[[int], Any]


class Tokens(nn.Module):
    """An embedding, layers, and a head: what lies between is the matter of those that inherit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor, *more: Tensor) -> Tensor:
        x = self.between(self.embed(ids), ids, *more)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        head: Tensor = self.head(x)
        return head

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        raise NotImplementedError


class WithImages(Tokens):
    """Features take the places of image tokens, of which there must be as many."""

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        (features,) = more
        places = (ids == IMAGE).unsqueeze(-1).expand_as(x)
        if x[places].numel() != features.numel():
            raise ValueError(f"{(ids == IMAGE).sum()} tokens, {features.shape[1]} features")
        return x.masked_scatter(places, features)


class EndsAlike(Tokens):
    """Every row must have as many ends, as BART demands."""

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        ends = ids.eq(1)
        if len(torch.unique_consecutive(ends.sum(1))) > 1:
            raise ValueError("all rows must have as many ends")
        return x[ends, :].view(x.size(0), -1, x.size(-1))[:, -1, :]


class SomeOnly(Tokens):
    """Only some of the tokens are passed on; their number depends on values."""

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        chosen = x[ids > 7]
        return chosen.mean(0, keepdim=True) + chosen.new_full((chosen.shape[0], 1), 0.5).mean()


class NeverNaN(Tokens):
    """Asks activations whether they are finite."""

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        x = self.layers[0](x)
        if torch.isnan(x).any() or not bool(torch.isfinite(x.sum())):
            raise ValueError("NaN")
        return x


class RowByRow(Tokens):
    """A list of rows, joined again."""

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        rows = list(self.layers[0](x))
        return torch.cat(rows, dim=0).view(x.shape) + torch.stack(rows)


def ids(rows: int) -> Tensor:
    """Row i begins with an image's two tokens and ends with a 1."""
    found = 4 + (torch.arange(rows)[:, None] * 5 + torch.arange(6) * 3) % 12
    found[:, :2], found[:, -1] = IMAGE, 1
    return found


def with_features(rows: int) -> tuple[Tensor, Tensor]:
    return ids(rows), torch.linspace(-1, 1, rows * 2 * WIDTH).view(rows, 2, WIDTH)


def chained(model: type[nn.Module], sample: Sample) -> tuple[Chain, Callable[..., Any], nn.Module]:
    """The chain, its blocks in order as a function, and the plain model with the same values."""
    chain = describe(model, sample=sample)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    torch.manual_seed(0)
    plain = model()
    with torch.no_grad():
        for i, names in enumerate(chain.names):
            held = blocks[i].state_dict()
            for inner, name in names.items():
                plain.state_dict(keep_vars=True)[name].copy_(held[inner])

    return chain, lambda *inputs: in_order(chain, blocks, inputs), plain


def in_order(chain: Chain, blocks: list[nn.Module], inputs: tuple[Tensor, ...]) -> Any:
    """What the model returns, by its blocks."""
    values = chain.arguments(inputs)
    for block in blocks:
        values = as_tuple(block(*values))
    return chain.results(values)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "sample"),
    [
        (WithImages, with_features),
        (EndsAlike, ids),
        (SomeOnly, ids),
        (NeverNaN, ids),
        (RowByRow, ids),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_a_forward_that_reads_values_is_partitioned(
    model: type[nn.Module], sample: Sample, rows: int
) -> None:
    chain, run, plain = chained(model, sample)
    assert len(chain.blocks) > 1
    given = as_tuple(sample(rows))
    torch.testing.assert_close(run(*given), plain(*given), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "sample", "other"),
    [
        (WithImages, with_features, lambda: (ids(2).flip(1).fill_(5), with_features(2)[1])),
        (EndsAlike, ids, lambda: (ids(2).masked_fill(torch.tensor([[False], [True]]), 1),)),
        (NeverNaN, ids, None),
    ],
)
def test_a_batch_that_decides_otherwise_ends_in_one_line(
    model: type[nn.Module], sample: Sample, other: Callable[[], tuple[Tensor, ...]] | None
) -> None:
    chain = describe(model, sample=sample)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    if other is None:
        with torch.no_grad():
            for parameter in blocks[0].parameters():
                parameter.fill_(torch.nan)
    given = as_tuple(sample(2)) if other is None else other()
    with pytest.raises(
        DiffersFromSample, match=r"with this batch.*test_recorded_values.py:\d+"
    ) as caught:
        in_order(chain, blocks, given)
    assert "\n" not in str(caught.value)


def test_as_many_as_there_are_may_vary() -> None:
    """A size that follows from values alone is read from the tensor in each batch."""
    _, run, plain = chained(SomeOnly, ids)
    given = torch.tensor([[8, 1, 9, 2], [3, 3, 3, 15]])
    torch.testing.assert_close(run(given), plain(given), rtol=0, atol=0)


def test_assumptions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="parallax"):
        describe(EndsAlike, sample=ids)
    output = [text for text in caplog.messages if "branches on values" in text]
    assert output
    assert all("test_recorded_values.py:" in text for text in output)


class Undecided(Tokens):
    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        return x * 2 if ids.sum() % 2 else x


class ByActivations(Tokens):
    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        return x * 2 if self.layers[0](x).sum() > 0 else x


class ByItsMean(Tokens):
    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        return x * ids.float().mean().item()


@pytest.mark.parametrize("model", [Undecided, ByActivations, ByItsMean])
def test_a_decision_that_varies_is_refused(model: type[nn.Module]) -> None:
    with pytest.raises(DescribeError, match="branches on the values of tensors, at"):
        describe(model, sample=ids)


def test_a_sample_without_values_decides_nothing() -> None:
    with pytest.raises(DescribeError, match="branches on the values of tensors"):
        describe(EndsAlike, sample=lambda n: torch.empty(n, 6, dtype=torch.int64, device="meta"))


class Scan(nn.Module):
    """Begins with the state that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.run = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x if self.state is None else x + self.state)
        self.state = x.detach()
        return x


class Resetting(nn.Module):
    """Empties the state of a part before each use, from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.scan, self.out = Scan(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.scan.state = None
        out: Tensor = self.out(self.scan(x))
        return out


class Recurrent(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Resetting() for _ in range(8))

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        for mixer in self.mixers:
            x = mixer(x)
        return x


def test_a_part_whose_state_another_resets_stays_with_it() -> None:
    chain, run, plain = chained(Recurrent, ids)
    assert any(isinstance(b.module, Resetting) for b in chain.blocks)
    for rows in (3, 2, 5):
        torch.testing.assert_close(run(ids(rows)), plain(ids(rows)), rtol=0, atol=0)


class RescaledForEvaluation(Tokens):
    """Changes its weights when the mode changes, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.rescaled = False

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        if self.training == self.rescaled:
            with torch.no_grad():
                self.layers[1].weight.mul_(2.0 if self.training else 0.5)
            self.rescaled = not self.training
        return x


def test_weights_changed_in_evaluation_leave_training_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="parallax"):
        chain, run, plain = chained(RescaledForEvaluation, ids)
    assert "recorded for training only" in caplog.text
    torch.testing.assert_close(run(ids(3)), plain(ids(3)), rtol=0, atol=0)
    block = materialise(chain, 0, 1, torch.device("cpu"))[0].eval()
    with pytest.raises(DescribeError, match="only training was recorded"):
        block(ids(3))


class Padded(nn.Module):
    """As many places as the longest row has."""

    def __init__(self) -> None:
        super().__init__()
        self.run = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        longest = int(mask.sum(1).max())
        out: Tensor = self.run(x[:, :longest])
        return out.reshape(x.shape[0], longest * WIDTH)


class UsesPadded(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.padded, self.after = Padded(), nn.Linear(6 * WIDTH, WIDTH)

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        out: Tensor = self.after(self.padded(x, *more))
        return out


def test_an_untraced_part_runs_on_sample_values() -> None:
    def sample(rows: int) -> tuple[Tensor, Tensor]:
        return ids(rows), torch.ones(rows, 6, dtype=torch.int64)

    chain, run, plain = chained(UsesPadded, sample)
    assert len(chain.blocks) > 2
    torch.testing.assert_close(run(*sample(3)), plain(*sample(3)), rtol=0, atol=0)


class OtherInEvaluation(Tokens):
    """Computes something else in evaluation."""

    def between(self, x: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
        return x if self.training else torch.relu(x) * 2.0


@pytest.mark.parametrize("task", [PlanTask.EVALUATION, PlanTask.INFERENCE])
def test_a_model_that_is_recorded_for_evaluation_warns_of_no_training(
    caplog: pytest.LogCaptureFixture, task: PlanTask
) -> None:
    with caplog.at_level(logging.INFO, logger="parallax"):
        chain = describe(OtherInEvaluation, sample=ids, task=task)
    assert not chain.trains
    assert "recorded for evaluation only" in caplog.text
    assert "recorded for training only" not in caplog.text
    caplog.clear()
    describe(OtherInEvaluation, sample=ids)
    assert "recorded for training only" in caplog.text
