"""Models as people bring them train in two stages as they do by themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.zoo.__main__ import main
from benchmarks.zoo.catalog import VARIED, WAYS, entries
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.models.rows import class_loss, vectors
from benchmarks.zoo.runner import Job, judge_all
from benchmarks.zoo.training import USUAL
from benchmarks.zoo.verdict import Result, Verdict, counts
from parallax.errors import PlanError
from tests.alone import alone

EQUAL = (
    "torch/transformer-rows-second",
    "torch/gru-both-ways",
    "text/mingpt-targets",
    "science/graph-edges",
    "science/vqvae",
    "science/ppo",
)
GROUPS = sorted({name.rpartition("/")[0] for name in entries()})
TROUBLE = (Result.DIFFERENT, Result.CRASH, Result.NAN)


def verdicts_of(jobs: Iterable[tuple[str, int]]) -> list[Verdict]:
    """Models by name, each in one of its variants; 0 is the default."""
    known = entries()
    variants = (USUAL, *WAYS)
    return list(judge_all(Job(name, known[name], variants[variant]) for name, variant in jobs))


@pytest.fixture(scope="module")
def sample() -> dict[str, Verdict]:
    """All in one process, which imports what they need once."""
    return alone(_sample)


def _sample() -> dict[str, Verdict]:
    found = {verdict.name: verdict for verdict in verdicts_of((name, 0) for name in EQUAL)}
    return {**found, **{harm: spoilt(harm) for harm in HARMS}}


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_trains_as_by_itself(name: str, sample: dict[str, Verdict]) -> None:
    verdict = sample[name]
    assert (verdict.result, verdict.remark, verdict.initial) == (Result.EQUAL, "", "")
    assert verdict.blocks > 1
    assert 0 < verdict.largest < 1


@pytest.mark.thorough
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_refused_trains_as_by_itself(group: str) -> None:
    names = [name for name in entries() if name.rpartition("/")[0] == group]
    assert not _in_trouble(alone(verdicts_of, [(name, 0) for name in names], seconds=600.0))


@pytest.mark.thorough
@pytest.mark.parametrize("variant", range(len(WAYS)))
def test_some_of_all_shapes_train_in_all_variants(variant: int) -> None:
    jobs = [(name, variant + 1) for name in VARIED]
    assert not _in_trouble(alone(verdicts_of, jobs, seconds=600.0))


def _in_trouble(verdicts: list[Verdict]) -> list[str]:
    return [f"{v.name}: {v.result}, {v.remark}" for v in verdicts if v.result in TROUBLE]


# ---- what the judge sees -------------------------------------------------------------------------------


def spoilt(harm: str) -> Verdict:
    """The verdict on a net that fails in one way."""

    def build() -> nn.Module:
        if harm == "exit":
            os._exit(7)
        return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = class_loss(outputs, targets)
        if harm == "hang":
            time.sleep(60)
        if not dist.is_initialized():  # by itself
            return found
        match harm:
            case "off":
                return found * (1 + 1e-7)
            case "nan":
                return found * float("nan")
            case "raise":
                raise ValueError("no such\nluck")
            case "refuse":
                raise PlanError("not with this plan")
        return found

    job = Job("spoilt", Entry(build, vectors(), loss))
    (verdict,) = judge_all([job], limit_seconds=1.0 if harm == "hang" else 30.0)
    return verdict


HARMS: dict[str, tuple[Result, str]] = {
    "none": (Result.EQUAL, ""),
    "off": (Result.DIFFERENT, "off by 1e-07 in sgd: "),
    "nan": (Result.NAN, "the loss becomes nan"),
    "raise": (Result.CRASH, "ValueError: no such luck"),
    "refuse": (Result.REFUSED, "not with this plan"),
    "exit": (Result.CRASH, "the process ended with exit code 7"),
    "hang": (Result.CRASH, "no end within 1 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
def test_a_fault_is_seen_as_what_it_is(harm: str, sample: dict[str, Verdict]) -> None:
    verdict, (result, remark) = sample[harm], HARMS[harm]
    assert verdict.result == result
    assert remark in verdict.remark
    assert counts([verdict])[result] == 1


def test_unknown_names_end_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "no/such"]) == 2
    assert capsys.readouterr().out == "no model is called no/such\n"


def test_there_are_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == len(set(names)) >= 130
    assert set(VARIED) <= set(names)
