"""Averaged weights with local steps: those of the mean weights of the replicas after each step, under every plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.runtime.checkpoint import checkpoint_name
from parallax.runtime.optim.emas.average import EmaAverage
from parallax.runtime.optim.emas.on import EmaOn
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.swap.optimizer.averaging import AVERAGE
from parallax.swap.optimizer.outer import ROUND_START
from tests.distributed.pool import Pool
from tests.distributed.test_ema import copies, looping
from tests.distributed.test_engine import (
    Case,
    Weights,
    check_near,
    gpt,
    plain_blocks,
    poisoned,
    with_unused,
)
from tests.distributed.test_local_steps import DILOCO, LOCAL, PLANS, SIZES, plain_rounds
from tests.distributed.test_nonfinite import batches
from tests.held import held

EMA = EmaOn(decay=0.8)
CASE = Case(gpt(tied=False), sizes=(8, 3, 7, 4, 8, 6), together=DILOCO, ema=EMA)


@dataclass
class Averaged:
    """The weights of a rank at the end of a round, and its averages; whether the weights after the evaluation were
    those before it, and how many averages it keeps."""

    weights: Weights
    averages: Weights
    restored: bool
    kept: int


def averaging(case: Case, folder: Path, start: int = 0, stop: int = 99) -> Averaged:
    """Take the steps from ``start``, after loading the checkpoint of this step, if any; then save."""
    engine = case.engine(folder)
    if start:
        engine.load(folder / checkpoint_name(start))
    for batch in case.batches()[start:stop]:
        engine.step(batch)
    engine.end_round()
    before = held(engine)
    weights = copies(engine.parameters)
    with engine.averaged():
        averages = copies(engine.parameters)
        engine.evaluate(case.batches()[0])
    after = held(engine)
    engine.save(folder, {})
    engine.close()
    restored = all(torch.equal(value, after[name]) for name, value in before.items())
    return Averaged(weights, averages, restored, sum(name.startswith(AVERAGE) for name in after))


def plain(case: Case, replicas: int) -> Averaged:
    """The averages of the mean weights of the copies in a loop in plain torch."""
    names = [name for name, tensor in plain_blocks(case)[1].items() if tensor.requires_grad]
    averages: list[Tensor] = []
    done = 0

    def after(step: int, trained: list[list[Tensor]]) -> None:
        nonlocal averages, done
        means = [torch.stack([c.detach() for c in column]).mean(0) for column in zip(*trained)]
        if share := case.ema.share(step, done):
            averages = averages or [mean.clone() for mean in means]
            torch._foreach_lerp_(averages, means, share)
            done += 1

    weights = plain_rounds(case, replicas, after).weights
    return Averaged(weights, dict(zip(names, averages, strict=True)), True, 0)


def check(found: list[Averaged], expected: Averaged) -> None:
    for each in found:
        assert each.restored
        assert each.kept
        check_near(each.weights, expected.weights, 1e-9)
        check_near(each.averages, {**expected.weights, **expected.averages}, 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [DILOCO, LOCAL], ids=["diloco", "local"])
@pytest.mark.parametrize("plan", PLANS)
def test_averages_are_those_of_the_mean_weights(
    pool: Pool, tmp_path: Path, plan: str, rule: ReplicasConfig
) -> None:
    case = replace(CASE, together=rule).under(**PLANS[plan])
    expected = plain(case, PLANS[plan]["replicas"][0])
    check(pool.run(averaging, case.world, case, tmp_path), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("lengths", [(3, 2, 0), (3, 2, 1), (4, 2, 3)])
@pytest.mark.parametrize("ema", [EMA, EmaOn(decay=0.9, every=2), EmaAverage(start=2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (2, 2)},
        {"replicas": (2,), "optimizer_offload": 1.0, "parameter_offload": 0.5, "tier": "disk"},
        {"replicas": (4,), "shard": True, "groups": 2},
    ],
    ids=str,
)
def test_averages_of_fragments(
    pool: Pool, tmp_path: Path, options: dict[str, Any], ema: EmaOn, lengths: tuple[int, int, int]
) -> None:
    every, fragments, delay = lengths
    options = dict(options)
    rule = replace(
        DILOCO,
        sync_every=every,
        fragments=fragments,
        fragment_delay=delay,
        groups=options.pop("groups", "auto"),
    )
    case = replace(CASE, factory=gpt(tied=True), sizes=SIZES, together=rule, ema=ema)
    case = case.under(**options)
    expected = plain(case, options["replicas"][0])
    check(pool.run(averaging, case.world, case, tmp_path), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("factory", [gpt(tied=True), with_unused], ids=["tied", "unused"])
@pytest.mark.parametrize("replicas", [(2, 2), (3,)], ids=str)
def test_averages_of_models(
    pool: Pool, tmp_path: Path, factory: Callable[[], nn.Module], replicas: tuple[int, ...]
) -> None:
    """The third replica has no rows, and its weights change where rounds end."""
    case = replace(CASE, factory=factory).under(replicas)
    check(pool.run(averaging, case.world, case, tmp_path), plain(case, replicas[0]))


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_without_decay_the_averages_are_the_weights(
    pool: Pool, tmp_path: Path, compress: str
) -> None:
    """Also where the round ends early, and where the exchange is rounded."""
    rule = replace(DILOCO, sync_every=4, fragments=2, fragment_delay=1, outer_compress=compress)
    case = replace(CASE, together=rule, ema=EmaOn(decay=0.0)).under((2, 2))
    for found in pool.run(averaging, 4, case, tmp_path):
        check_near(found.averages, found.weights, 1e-12)


def test_a_round_of_one_step_has_the_averages_of_data_parallelism(
    pool: Pool, tmp_path: Path
) -> None:
    usual = SGDConfig(lr=0.1, momentum=0.9, clip_norm=0.0)
    case = replace(CASE, optimizer=usual, together=ReplicasConfig()).under((2, 2))
    expected = pool.run(averaging, 4, case, tmp_path / "usual")
    rounds = replace(case, together=replace(LOCAL, sync_every=1))
    for mine, theirs in zip(pool.run(averaging, 4, rounds, tmp_path / "rounds"), expected):
        check_near(mine.averages, theirs.averages, 1e-12)


def test_one_replica_with_an_outer_rate_of_one_averages_as_ever(pool: Pool, tmp_path: Path) -> None:
    case = replace(CASE, together=LOCAL).under((1, 1))
    usual = replace(case, together=ReplicasConfig())
    expected = pool.run(averaging, 2, usual, tmp_path / "usual")
    for mine, theirs in zip(pool.run(averaging, 2, case, tmp_path / "rounds"), expected):
        assert all(torch.equal(t, theirs.averages[n]) for n, t in mine.averages.items())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"replicas": (2, 2)}, "auto"),
        ({"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"}, "auto"),
        ({"replicas": (4,), "shard": True}, 2),
    ],
    ids=str,
)
def test_a_checkpoint_has_one_average(
    pool: Pool, tmp_path: Path, options: dict[str, Any], groups: Any
) -> None:
    """Runs that resume have it to the bit, with more or fewer replicas and without local steps, too."""
    case = replace(CASE, together=replace(DILOCO, groups=groups)).under(**options)
    saved = pool.run(averaging, 4, case, tmp_path, 0, 3)
    averages = {n: t for each in saved for n, t in each.averages.items()}
    for other in (
        case,
        case.under((3,)),
        replace(case.under((1, 2)), together=ReplicasConfig()),
    ):
        other = replace(other, together=replace(other.together, groups="auto"))
        if other.options == case.options:
            other = case
        for found in pool.run(averaging, other.world, other, tmp_path, 3, 3):
            assert all(torch.equal(tensor, averages[n]) for n, tensor in found.averages.items())


@pytest.mark.parametrize("averages", [True, False])
def test_validation_uses_the_averages(pool: Pool, tmp_path: Path, averages: bool) -> None:
    rule = replace(DILOCO, sync_every=3)
    case = replace(CASE, together=rule, ema=EmaOn(decay=0.8, evaluate=averages)).under((2,))
    found = pool.run(looping, 2, case, tmp_path / "run")
    (reported, trained, averaged), other = found
    assert trained != averaged
    assert reported == (averaged if averages else trained)
    assert other[1:] == (trained, averaged)


def skipping(case: Case, folder: Path) -> list[tuple[bool, bool]]:
    """Of each step whether it was skipped, and whether it changed an average."""
    engine, found = case.engine(folder), []
    for batch in batches():
        before, skipped = held(engine), bool(engine.step(batch).trouble)
        after = held(engine)
        changed = [n for n in before if n.startswith(AVERAGE) and not before[n].equal(after[n])]
        found.append((skipped, bool(changed)))
    assert any(name.startswith(ROUND_START) for name in after)
    engine.close()
    return found


def test_a_skipped_step_updates_no_average(pool: Pool, tmp_path: Path) -> None:
    """A round ends after it, which the averages take with the next step."""
    case = replace(CASE, loss=poisoned, skips=2).under((2,))
    for found in pool.run(skipping, 2, case, tmp_path):
        assert [skipped for skipped, _ in found] == [False, True, False, False]
        assert not found[1][1]
        assert found[2][1]
