"""Plans, profiles and clusters as data: what is written comes back, what is wrong is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallax.errors import PlanError
from parallax.plan.cluster import Cluster, Link
from parallax.plan.edge import Edge
from parallax.plan.explained import explain
from parallax.plan.plan import Alternative, Directive, Plan, RankPrediction, StagePrediction
from parallax.plan.profile import Affine, ModelProfile
from parallax.report.profile import parameters_of
from tests.unit.plan_fakes import FREE, block, cluster, plan, profile, stages

MODEL = profile(
    [block("a", parameter_bytes=8, moved=Affine(3, 2.5)), block("b", parameter_bytes=8)],
    ties=((8, (0, 1)),),
)


def test_a_shared_parameter_is_counted_once() -> None:
    blocks = [block(name, parameters=5, parameter_bytes=20) for name in "ab"]
    assert profile(blocks).parameters == 10
    frozen = [replace(each, frozen_bytes=12) for each in blocks]
    tied = profile(frozen, ties=((8, (0, 1)),), frozen_ties=((12, (0, 1)),))
    assert (tied.parameters, tied.trained) == (5, 2)
    assert parameters_of(profile(blocks, ties=((8, (0, 1)),))) == "8 parameters"


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan().save(path)
    assert Plan.load(path) == plan()
    assert path.read_text().startswith(f"# parallax plan {plan().hash()}\n")
    assert Plan.from_dict(plan().to_dict()) == plan()
    ahead = plan(stages=(replace(plan().stages[0], inputs_ahead=True), *plan().stages[1:]))
    assert Plan.from_dict(ahead.to_dict()) == ahead


def test_the_hash_is_stable_and_notices_every_field() -> None:
    assert plan().hash() == plan().hash() == "af89c43d2f7d7e2b"
    changed = [
        plan(schedule="gpipe"),
        plan(global_batch=9),
        plan(microbatch=3),
        plan(fingerprint="g"),
        plan(tier="host"),
        plan(gather_loss=True),
        plan(stages=tuple(stages([0, 1, 3], [1, 2], "offload"))),
        plan(stages=tuple(stages([0, 2, 3], [2, 1], "offload"))),
        plan(stages=tuple(stages([0, 2, 3], [1, 2], "keep"))),
        plan(stages=tuple(stages([0, 2, 3], [1, 2], "offload", limit=5))),
        plan(stages=tuple(replace(stage, shard_optimizer=True) for stage in plan().stages)),
        plan(stages=tuple(replace(stage, bucket_bytes=2**23) for stage in plan().stages)),
        plan(stages=(replace(plan().stages[0], inputs_ahead=True), *plan().stages[1:])),
    ]
    assert len({p.hash() for p in [plan(), *changed]}) == len(changed) + 1


def test_states_that_replicas_share_are_explained() -> None:
    sharded = tuple(replace(stage, shard_optimizer=stage.replicas > 1) for stage in plan().stages)
    texts = explain(plan(stages=sharded))
    assert "sharded over replicas" not in texts[1]
    assert texts[2].endswith("; optimizer states are sharded over replicas.")


def test_diff_names_what_changed() -> None:
    other = plan(schedule="gpipe", stages=tuple(stages([0, 2, 3], [1, 2], "keep")))
    assert plan().diff(plan()) == []
    assert plan().diff(other) == [
        "schedule: 1f1b -> gpipe",
        "stages[0].directives[0]: offload -> keep",
        "stages[0].directives[1]: offload -> keep",
        "stages[1].directives[0]: offload -> keep",
    ]
    shorter = plan(stages=tuple(stages([0, 3], [3], "offload")))
    assert "stages[1].start: 2 -> (none)" in plan().diff(shorter)


def test_explain_says_it_in_numbers() -> None:
    rank = RankPrediction(
        peak_bytes=2048,
        budget_bytes=4096,
        tier_peak_bytes=0,
        offloaded_bytes=1024,
        stall_seconds=0.5,
    )
    terms = StagePrediction(
        memory={"parameters": 1024, "swap": 512, "loss": 0}, seconds={"forward": 1.0, "idle": 0.25}
    )
    prediction = replace(plan().prediction, ranks=(rank,) * 3, stages=(terms, terms))
    mixed = replace(
        stages([0, 2])[0], directives=(Directive.OFFLOAD, Directive.KEEP), optimizer_offload=0.5
    )
    other = Alternative(
        description="gpipe", step_seconds=1.5, reason="50.0% slower: +0.5 s of idle"
    )
    chosen = plan(
        stages=(mixed, *stages([2, 3], [2])),
        prediction=prediction,
        candidates=7,
        exact=False,
        bound_seconds=0.8,
        alternatives=(other,),
    )
    assert explain(chosen) == [
        "8 rows run as 4 micro-batches of up to 2 rows through 2 stages under 1f1b; 25% of the time is bubble.",
        "stage 0: blocks 0–1 on 1 replica; activations: keep 1, offload 1; peak 2.0 KiB of 4.0 KiB (parameters "
        "1.0 KiB, swap 512 B); forward 1.00 s, idle 250 ms; 1.0 KiB to disk per step, 500 ms not hidden; 50% of the "
        "optimizer states in disk.",
        "stage 1: block 2 on 2 replicas; activations: keep 1; peak 2.0 KiB of 4.0 KiB (parameters 1.0 KiB, swap "
        "512 B); forward 1.00 s, idle 250 ms; 1.0 KiB to disk per step, 500 ms not hidden.",
        "7 candidates compared by predicted step time, not all there are; by the planner's formula none can take less "
        "than 800 ms, so this one is at most 25.0% above the best.",
        "not chosen: gpipe: 1.50 s, 50.0% slower: +0.5 s of idle.",
    ]
    exact = explain(replace(chosen, exact=True))
    assert exact[-2].endswith("can be faster by the planner's formula.")
    assert explain(replace(chosen, bound_seconds=0.0))[-2].endswith("a better plan may exist.")


def test_pipeline_ranks_and_placement() -> None:
    uneven = plan(
        stages=tuple(stages([0, 1, 2, 3, 4], [2, 1, 2, 1])), interleave=2, placement=(2, 0, 1)
    )
    assert (uneven.pipeline_ranks, uneven.world_size, uneven.blocks) == (2, 3, 4)
    assert [uneven.ranks(s) for s in range(4)] == [(2, 0), (1,), (2, 0), (1,)]
    assert [uneven.coordinate(rank) for rank in range(3)] == [(0, 1, 0), (1, 0, 0), (0, 0, 0)]
    assert Plan.from_dict(uneven.to_dict()) == uneven
    for changes, message in (
        ({"interleave": 3}, "4 stages cannot be split into 3"),
        ({"placement": (0, 1, 1)}, "must name each of 3 ranks once"),
        (
            {"stages": tuple(stages([0, 1, 2, 3, 4], [2, 1, 1, 2]))},
            "its pipeline rank has another number",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            replace(uneven, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": tuple(stages([1, 3], [3]))}, "stage 0 holds blocks 1..3; it must start at 0"),
        (
            {"stages": (*stages([0, 2]), *stages([3, 4], [2]))},
            "stage 1 holds blocks 3..4; it must start at 2",
        ),
        (
            {"stages": (*stages([0, 2]), *stages([1, 4], [2]))},
            "stage 1 holds blocks 1..4; it must start at 2",
        ),
        ({"stages": (*stages([0, 2]), *stages([2, 2], [2]))}, "stage 1 holds blocks 2..2"),
        ({"stages": ()}, "a stage"),
        ({"stages": tuple(stages([0, 2, 3]))}, "2 ranks but predictions for 3"),
        ({"stages": tuple(stages([0, 2, 3], [3, 0]))}, "stage 1 needs one replica or more"),
        ({"stages": (replace(stages([0, 3], [3])[0], directives=()),)}, "one directive for each"),
        ({"version": 2}, "plan version 2: this Parallax reads version 3; plan again"),
        ({"schedule": "fast\x1b[31m"}, r"plan schedule fast\x1b[31m: known are gpipe, 1f1b"),
        ({"global_batch": 0}, "needs rows"),
        ({"microbatch": 0}, "micro-batches of 1 row or more"),
    ],
)
def test_a_plan_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(**changes)
    assert message in str(error.value)


def test_a_plan_over_its_budget_is_no_plan() -> None:
    rank = replace(plan().prediction.ranks[0], peak_bytes=3 * 2**20, budget_bytes=2**20)
    with pytest.raises(
        PlanError,
        match=r"rank 1 would need 3.0 MiB of 1.0 MiB: the plan exceeds its budget; plan again",
    ):
        plan(prediction=replace(plan().prediction, ranks=(plan().prediction.ranks[0], rank, rank)))


def test_coordinate() -> None:
    assert [plan().coordinate(r) for r in range(3)] == [(0, 0, 0), (1, 0, 0), (1, 1, 0)]
    assert [list(plan().ranks(s)) for s in range(2)] == [[0], [1, 2]]
    assert [plan(microbatch=3).micro_batches(n) for n in (8, 9, 2)] == [3, 3, 1]
    with pytest.raises(PlanError, match="rank 3: the plan has ranks 0 to 2"):
        plan().coordinate(3)


HOSTILE = [
    "!!python/object/apply:os.system ['touch {mark}']",
    "model: !!python/object/apply:os.system ['touch {mark}']",
    "!!python/object/new:os.system ['touch {mark}']",
    "!!python/name:os.system",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_tags_that_make_objects_are_refused_as_data(tmp_path: Path, text: str) -> None:
    path, mark = tmp_path / "plan.yaml", tmp_path / "mark"
    path.write_text(text.format(mark=mark))
    with pytest.raises(PlanError, match="cannot read plan"):
        Plan.load(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "a: b", "stages: 4", "[[", "\x00", "- 1\n- 2", "stages: [1]\nprediction: {}"],
)
def test_files_that_are_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError):
        Plan.load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x80")
    for path in (binary, tmp_path, tmp_path / "absent.yaml"):
        with pytest.raises(PlanError, match="cannot read plan"):
            Plan.load(path)
        with pytest.raises(PlanError, match="cannot read profile"):
            ModelProfile.load(path)


def test_a_plan_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan().save(path)
    text = path.read_text()
    for length in range(0, len(text) - 1, 7):
        path.write_text(text[:length])
        try:
            assert Plan.load(path) == plan()  # nothing but the end of the line may be missing
        except PlanError:
            continue


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("microbatch",), "2"),
        (("microbatch",), 1.5),
        (("global_batch",), True),
        (("stages", 0, "start"), "0"),
        (("stages", 0, "stop"), 2.0),
        (("stages", 0, "replicas"), None),
        (("stages", 0, "replicas"), 1.0),
        (("stages", 0, "directives"), ["forget", "keep"]),
        (("stages", 0, "swap_limit_bytes"), -1),
        (("stages", 0, "tier_bytes"), "1GiB"),
        (("stages", 0, "shard_optimizer"), 1),
        (("stages", 0, "unknown"), 1),
        (("prediction", "ranks", 0, "peak_bytes"), "a"),
        (("prediction", "ranks", 0, "peak_bytes"), math.nan),
        (("prediction", "step_seconds"), "soon"),
        (("unknown",), 1),
        (("version",), "1"),
        (("schedule",), ["1f1b"]),
        (("model",), 5),
    ],
)
def test_wrong_types_and_unknown_keys(tmp_path: Path, where: tuple[Any, ...], value: Any) -> None:
    data: Any = plan().to_dict()
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError):
        Plan.load(path)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(MODEL.to_json())
    assert ModelProfile.load(path) == MODEL
    assert MODEL.unique_parameter_bytes([0, 1]) == 8
    assert MODEL.unique_parameter_bytes([1]) == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parameters", -1),
        ("parameter_bytes", math.inf),
        ("buffer_bytes", "8"),
        ("moved", {"fixed": -1.0, "per_row": 1.0}),
        ("forward_seconds", {"fixed": 0.0, "per_row": math.nan}),
        ("forward_seconds", {"fixed": "now", "per_row": 1.0}),
        ("forward_seconds", None),
        ("output", {"fixed": 0.0, "slope": 1.0}),
        ("colour", 1),
    ],
)
def test_blocks_of_impossible_cost(key: str, value: Any) -> None:
    data = json.loads(MODEL.to_json())
    data["blocks"][1][key] = value
    with pytest.raises(PlanError):
        ModelProfile.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": []},
        {"blocks": [1]},
        {"blocks": None},
        {"ties": [[8, [0, 2]]]},
        {"ties": [[8, [0, 0]]]},
        {"ties": [[8, []]]},
        {"ties": [[0, [0, 1]]]},
        {"ties": [[8, [-1, 0]]]},
        {"ties": 4},
        {"optimizer_bytes": -1},
        {"optimizer_seconds": math.nan},
        {"gradient_bytes": "1"},
        {"unknown": 1},
    ],
)
def test_profiles_that_contradict_themselves(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        ModelProfile.from_json(json.dumps({**json.loads(MODEL.to_json()), **changes}))


@pytest.mark.parametrize("text", ["", "[]", "3", '"x"', "null", "{", MODEL.to_json()[:-20]])
def test_text_that_is_no_profile(text: str) -> None:
    with pytest.raises(PlanError, match="measure it again"):
        ModelProfile.from_json(text)


def test_a_measured_cost_is_interpolated_and_extrapolated_linearly() -> None:
    cost = Affine.measured([(1, 4.0), (2, 5.0), (4, 8.0), (8, 16.0)])
    assert [cost.at(rows) for rows in (0, 0.5, 1, 1.5, 2, 3, 8)] == [0, 3.5, 4, 4.5, 5, 6.5, 16]
    assert cost.at(14) == pytest.approx(27)  # 11 s more for the six rows from 2 to 8
    assert cost.scaled(2).at(3) == 13
    assert cost.scaled(2).at(14) == pytest.approx(54)
    assert Affine.measured([(2, 5.0), (4, 8.0)]) == Affine.through((2, 5.0), (4, 8.0))
    assert Affine.measured([]) == Affine()
    kept = profile([block("a", offload_seconds=cost)])
    assert ModelProfile.from_json(kept.to_json()) == kept


def test_lines_through_two_measurements() -> None:
    line = Affine.through((2, 10.0), (4, 16.0))
    assert (line.fixed, line.per_row) == (4.0, 3.0)
    assert line.at(0) == 0.0
    assert line.at(3) == 13.0
    assert Affine.through((2, 10.0), (4, 8.0)) == Affine(8.0, 0.0)  # noise: never falling
    assert Affine.through((2, 1.0), (4, 16.0)) == Affine(0.0, 4.0)  # never below zero at zero rows
    assert Affine.through((4, 8.0), (4, 8.0)) == Affine(0.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "no devices: set cluster.devices to 1 or more"),
        ({"memory": 0}, "device 0: memory 0 B"),
        ({"memory": -5}, "must be above zero"),
        ({"tier": -1}, "must be above zero"),
        ({"reserve": -1}, "reserve"),
        ({"link": Link(bytes_per_second=0)}, "local link: 0 bytes/s must be above zero"),
        ({"write": Link(bytes_per_second=-1)}, "device 0 write link: -1 bytes/s"),
        ({"read": Link(bytes_per_second=math.nan)}, "device 0 read link"),
        ({"read": Link(bytes_per_second=math.inf)}, "device 0 read link"),
        ({"link": Link(bytes_per_second=1, latency_seconds=-1)}, "local link"),
        ({"link": Link(bytes_per_second=1, latency_seconds=math.nan)}, "local link"),
        ({"concurrent": 0}, "node n: concurrent=0 must be above zero"),
        ({"concurrent": math.nan}, "node n: concurrent=nan"),
    ],
)
def test_clusters_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        cluster(**{"devices": 2, **changes})
    assert message in str(error.value)


def test_links_between_nodes() -> None:
    one = cluster(2)
    both = Cluster(
        nodes=(*one.nodes, *one.nodes),
        local=FREE,
        remote=Link(bytes_per_second=2, latency_seconds=1),
    )
    assert both.node_of == (0, 0, 1, 1)
    assert both.link(0, 1) is FREE
    assert both.link(1, 2).seconds(4) == 3
    assert both.link(1, 2).seconds(0) == 0


def test_edges_lead_from_each_stage_to_the_next() -> None:
    found = plan()
    assert found.edges() == (Edge(sender=0, receiver=1, block=1),)
    assert (found.entering(0), found.leaving(0)) == (None, found.edges()[0])
    assert (found.entering(1), found.leaving(1)) == (found.edges()[0], None)
    assert not found.is_local(found.edges()[0])
