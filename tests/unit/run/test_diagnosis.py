"""``parallax why`` names the cause that was put into the stored files of a run, and predicts what its removal gains.

The files are those that a run leaves: its spans are simulated with a cause that the plan's inputs do not have.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parallax import cli, config
from parallax.commands import why as why_command
from parallax.common.events import EventLog, Span
from parallax.plan.cluster import Cluster, Link
from parallax.plan.config import PlanConfig
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.search import search
from parallax.plan.simulation.predict import predict
from parallax.report.ranks import RankSnapshot
from parallax.run.diagnosis.fitted import (
    fit,
    slow_ranks,
    with_host_tier,
    with_reads,
    with_tier_speed,
)
from parallax.run.diagnosis.measured import INPUT, STALL, TERMS, Measured
from parallax.train.nodes import events_path
from tests.unit import plan_fakes as fakes

ROWS, STEPS, GAP = 8, 8, 0.01
MIB = 2**20
SHAPE = ("plan.stages=2", "plan.replicas=1", "trainer.microbatch=1")
CLOSE = 0.05  # of a step: how far a prediction may be off


def costs(**fields: Any) -> ModelProfile:
    """Eight blocks of 20 ms forward and 20 ms backward for a row, which save a MiB that can be offloaded."""
    usual: dict[str, Any] = {"moved": MIB, "input": 1024, "output": 1024}
    blocks = [fakes.block(f"b{n}", 0.02, 0.02, **usual) for n in range(8)]
    return fakes.profile(blocks, **fields)


def machine(memory: int = 10**15, rate: float = 1e9, **fields: Any) -> Cluster:
    return fakes.cluster(2, memory, write=Link(bytes_per_second=rate), **fields)


def planned(profile: ModelProfile, cluster: Cluster, asked: Sequence[str]) -> Plan:
    settings = config.compose(
        ["model=mlp", "trainer.steps=8", f"trainer.global_batch={ROWS}", *asked]
    )
    return search(
        profile,
        cluster,
        settings.plan,
        global_batch=ROWS,
        microbatch=settings.trainer.microbatch,
        swap=settings.swap.offloads,
    )[0]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the files of a run in ``runs/run``: planned with ``profile`` and ``cluster``, and measured with ``true``
    ones. ``reads``: seconds of reading in a step, by rank; ``fetch``: between steps."""
    monkeypatch.chdir(tmp_path)

    def store(
        profile: ModelProfile,
        cluster: Cluster,
        asked: Sequence[str] = (),
        *,
        true: Cluster | None = None,
        reads: Sequence[float] = (0.0, 0.0),
        fetch: float = 0.0,
    ) -> Path:
        folder = Path("runs/run")
        folder.mkdir(parents=True)
        constraints = [*SHAPE, *asked]
        plan = planned(profile, cluster, constraints)
        plan.save(folder / "plan.yaml")
        Inputs(profile, cluster).save(inputs_path(folder / "plan.yaml"))
        words = ["name=run", "model=mlp", "trainer.steps=8", f"trainer.global_batch={ROWS}"]
        words += ["data=dataset", "data.target=nowhere:rows", "data.workers=0", *constraints]
        (folder / "config.yaml").write_text(config.dump(config.compose(words)))
        found = predict(with_reads(profile, plan, reads), true or cluster, plan)
        reading = {0: "forward", len(plan.stages) - 1: "forward"}  # stage → action that reads
        counts = Counter(s.rank for s in found.spans if s.kind == reading.get(s.stage))
        length = found.step_seconds + fetch + GAP
        for rank in range(plan.world_size):
            read = reads[rank] / counts[rank]
            spans = [
                s._replace(wait=s.wait + read, read=read) if s.kind == reading.get(s.stage) else s
                for s in found.spans
                if s.rank == rank
            ]
            with EventLog(events_path(folder, rank)) as events:
                for step in range(STEPS):
                    events.extend([_later(span, step, length) for span in spans])
            place = plan.coordinate(rank)
            RankSnapshot(
                rank=rank,
                ranks=plan.world_size,
                stage=place.pipeline_rank,
                replica=place.replica,
                host="here",
                time=0.0,
                steps=STEPS,
                fetch_seconds=fetch,
            ).save(folder)
        return folder

    return store


def _later(span: Span, step: int, length: float) -> Span:
    late = step * length
    return span._replace(step=step, start=span.start + late, end=span.end + late)


@pytest.fixture
def why(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Call the command for a run; with ``printed`` also compare what it prints."""

    def call(folder: Path, *, printed: bool = False) -> dict[str, Any]:
        words = ["why", str(folder), "data.target=nowhere:rows"]
        assert cli.main([*words, "--json"]) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert sum(found["terms"].values()) == pytest.approx(found["step_seconds"])
        for terms in found["ranks"].values():
            assert sum(terms.values()) == pytest.approx(found["step_seconds"])
        if printed:
            assert cli.main(words) == 0
            text = capsys.readouterr().out
            assert found["sentence"] in text
            for change in found["changes"]:
                assert all(word in text for word in change["overrides"])
        return found

    return call


@pytest.mark.parametrize("fetch", [0.0, 0.4])
def test_slow_input_is_named(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]], fetch: float
) -> None:
    profile, cluster = costs(), machine()
    folder = stored(profile, cluster, reads=(1.2, 1.2), fetch=fetch)
    found = why(folder)
    plain = predict(profile, cluster, Plan.load(folder / "plan.yaml")).step_seconds + GAP
    assert found["cause"] == "slow input"
    assert found["terms"][INPUT] == pytest.approx(1.2 + fetch)
    change = found["changes"][0]
    assert change["overrides"] == ["data.workers=2"]
    assert change["seconds"] == pytest.approx(plain, rel=CLOSE)


def test_a_slow_rank_is_named(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]]
) -> None:
    profile, cluster = costs(), machine()
    slowed = cluster.slowed({1: 4.0})
    found = why(stored(profile, cluster, true=slowed), printed=True)
    assert found["cause"] == "slow rank"
    assert "rank 1 (stage 1, replica 0) takes 4.0 times as long" in found["sentence"]
    by_words = {change["overrides"][0]: change["seconds"] for change in found["changes"]}
    assert set(by_words) == {"plan.replan=auto", "cluster.devices=1"}
    better = planned(profile, slowed, SHAPE)
    assert by_words["plan.replan=auto"] == pytest.approx(
        better.prediction.step_seconds + GAP, rel=CLOSE
    )
    alone = planned(profile, cluster.first(1), ["plan.stages=1", "trainer.microbatch=1"])
    assert by_words["cluster.devices=1"] == pytest.approx(
        alone.prediction.step_seconds + GAP, rel=CLOSE
    )


def test_slow_computing_on_all_ranks_is_named(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]]
) -> None:
    """As beside other programs: it cost most, and checkpoints or nothing were named."""
    profile, cluster = costs(), machine()
    asked = ["plan.stages=auto", "plan.replicas=auto", "trainer.microbatch=auto"]
    folder = stored(profile, cluster, asked, true=cluster.slowed({0: 3.0, 1: 3.0}))
    found = why(folder)
    assert found["cause"] == "slow computing"
    assert found["sentence"] == "blocks take 3.0 times as long as planned, on all ranks"
    change = found["changes"][0]
    assert change["overrides"] == []
    as_planned = Plan.load(folder / "plan.yaml").prediction.step_seconds + GAP
    assert change["seconds"] == pytest.approx(as_planned, rel=CLOSE)


@pytest.mark.parametrize("width", [80, 200])
def test_the_page_fits_the_terminal(
    stored: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setattr(why_command, "console_of", lambda parsed: terminal(width))
    stored(costs(), machine(), reads=(1.2, 1.2))
    assert cli.main(["why", "run", "data.target=nowhere:rows"]) == 0
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    lines = [line.rpartition("\r")[2].rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= width
    assert (
        " a step: mean of 2 ranks, 4 steps    measured  share  planned              most" in lines
    )
    waiting = next(line for line in lines if "waiting for rows" in line)
    assert re.fullmatch(r" waiting for rows +1\.20 s +\d+% +1\.20 s, rank \d", waiting), "unplanned"
    assert "  data.workers=2" in lines, "to be copied as it is"


def terminal(width: int) -> Console:
    return Console(width=width, force_terminal=True, color_system=None)


def test_a_small_budget_is_named(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]]
) -> None:
    profile, cluster = costs(), machine(4 * MIB, 100e6)
    asked = ["plan.schedule=1f1b", "plan.activations=auto"]
    found = why(stored(profile, cluster, ["cluster.device_memory=4MiB", *asked]))
    assert found["cause"] == "small budget"
    change = found["changes"][0]
    (setting,) = change["overrides"]
    key, _, memory = setting.partition("=")
    assert key == "cluster.device_memory"
    roomy = machine(int(memory.removesuffix("MiB")) * MIB, 100e6)
    better = planned(profile, roomy, [*SHAPE, *asked])
    assert change["seconds"] == pytest.approx(better.prediction.step_seconds + GAP, rel=CLOSE)
    assert change["gain"] > 0.03


def test_a_slow_disk_is_named(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]]
) -> None:
    profile, cluster = costs(), machine(7 * MIB)
    slow = with_tier_speed(cluster, 0.01)
    folder = stored(profile, cluster, ["cluster.device_memory=7MiB"], true=slow)
    found = why(folder)
    assert found["cause"] == "slow offload tier"
    assert found["sentence"].startswith("the offload tier, disk, moves ")
    assert found["terms"][STALL] > found["planned_terms"][STALL]
    assert found["changes"][0]["cause"] == "slow offload tier"
    assert found["changes"][0]["gain"] > 0.1


def test_host_memory_is_proposed_in_place_of_a_slow_disk(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]]
) -> None:
    profile, asked = costs(), ["cluster.device_memory=7MiB"]
    cluster = machine(7 * MIB, host_link=Link(bytes_per_second=5e9), host_bytes=32 * MIB)
    found = why(stored(profile, cluster, asked, true=with_tier_speed(cluster, 0.01)))
    assert found["cause"] == "slow offload tier"
    change = next(each for each in found["changes"] if each["overrides"] == ["swap.tier=host"])
    hosts = with_host_tier(cluster)
    assert hosts is not None
    assert {(each.tier, each.tier_bytes) for each in hosts.devices} == {("host", 32 * MIB)}
    better = planned(profile, hosts, [*SHAPE, *asked])
    assert sum(rank.offloaded_bytes for rank in better.prediction.ranks) > 0
    assert change["seconds"] == pytest.approx(better.prediction.step_seconds + GAP, rel=CLOSE)
    assert change["gain"] > 0.1
    assert "offload to host memory, " in change["text"]


@pytest.mark.parametrize("known", [True, False])
def test_host_memory_that_is_full_or_unknown_is_not_proposed(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]], known: bool
) -> None:
    host = {"host_link": Link(bytes_per_second=5e9), "host_bytes": 1024} if known else {}
    cluster = machine(7 * MIB, **host)
    slow = with_tier_speed(cluster, 0.01)
    found = why(stored(costs(), cluster, ["cluster.device_memory=7MiB"], true=slow))
    assert found["cause"] == "slow offload tier"
    assert all("swap.tier=host" not in each["overrides"] for each in found["changes"])


def test_the_speed_of_the_tier_is_found_from_the_stalls(stored: Callable[..., Path]) -> None:
    profile, cluster = costs(), machine(7 * MIB)
    folder = stored(
        profile, cluster, ["cluster.device_memory=7MiB"], true=with_tier_speed(cluster, 0.01)
    )
    measured = Measured.read(folder, Plan.load(folder / "plan.yaml"))
    assert fit(measured, profile, cluster).tier_speed == pytest.approx(0.01, rel=0.2)


def test_a_run_as_planned_has_no_cause(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]]
) -> None:
    profile, cluster = costs(), machine()
    asked = ["plan.stages=auto", "plan.replicas=auto", "trainer.microbatch=auto"]
    found = why(stored(profile, cluster, asked), printed=True)
    assert (found["cause"], found["changes"]) == ("nothing in particular", [])
    assert set(found["terms"]) == set(TERMS)


def test_a_better_layout_is_proposed(
    stored: Callable[..., Path], why: Callable[..., dict[str, Any]]
) -> None:
    profile, cluster = costs(), machine()
    found = why(stored(profile, cluster, ["trainer.microbatch=4"]))
    assert found["cause"] == "layout"
    best = search(profile, cluster, PlanConfig(), global_batch=ROWS)[0]
    change = found["changes"][0]
    assert f"plan.replicas={best.stages[0].replicas}" in change["overrides"]
    assert change["seconds"] == pytest.approx(best.prediction.step_seconds + GAP, rel=CLOSE)


def test_ranks_whose_blocks_were_predicted_wrong_are_not_slow() -> None:
    def spans(*seconds: float) -> list[Span]:
        return [Span(rank, 0, "forward", rank, 0, 0.0, each) for rank, each in enumerate(seconds)]

    apart = fakes.pipeline(fakes.stages([0, 1, 2, 3]))
    predicted = spans(1.0, 1.0, 1.0)
    assert slow_ranks(predicted, spans(1.0, 4.0, 1.0), apart) == {1: 4.0}
    assert slow_ranks(predicted, spans(3.0, 3.1, 2.9), apart) == {}
    assert slow_ranks(predicted, spans(0.3, 1.0, 0.3), apart) == {}, "no longer than predicted"
    assert slow_ranks(predicted, spans(1.0, 2.2, 1.0), apart) == {}
    alike = fakes.pipeline(fakes.stages([0, 1], [3]))
    assert slow_ranks(predicted, spans(1.0, 2.2, 1.0), alike) == {1: 2.2}


def test_wrong_input_ends_in_one_line(
    stored: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["why", "absent"]) == 2
    assert "absent: no run has this name in runs/" in capsys.readouterr().err
    folder = stored(costs(), machine())
    assert cli.main(["why", "run"]) == 2
    assert "config.yaml names data.target=nowhere:rows" in capsys.readouterr().err
    for path in folder.glob("events-*"):
        path.unlink()
    assert cli.main(["why", "run", "data.target=nowhere:rows"]) == 2
    err = capsys.readouterr().err
    assert "runs/run has recorded no steps after the first 2" in err
    assert len(err.splitlines()) == 1


def test_the_profile_is_left_alone_by_reading_nothing() -> None:
    profile = costs()
    plan = planned(profile, machine(), ["plan.stages=2", "plan.replicas=1"])
    assert with_reads(profile, plan, [0.0, 0.0]) is profile
    read = with_reads(profile, plan, [0.8, 0.0])
    assert read.blocks[1:] == profile.blocks[1:]
    assert (
        replace(read.blocks[0], forward_seconds=profile.blocks[0].forward_seconds)
        == (profile.blocks[0])
    )
