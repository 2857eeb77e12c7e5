"""Whatever is in a file that Parallax reads, a command ends soon with its result or with one line."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from parallax import cli
from parallax.common import trust
from parallax.common.events import read_events
from parallax.errors import CheckpointError, ConfigError, PlanError, UserError
from parallax.model.construction.weights import CheckpointWeights, OwnLayout
from parallax.plan.inputs import Inputs
from parallax.plan.plan import MOST_MOVES, Plan
from parallax.plan.profile import ModelProfile
from parallax.run.resume import read_stored
from parallax.run.sweep.points import PointOutcome
from parallax.runtime.checkpoint import CheckpointReader, write_parts
from parallax.runtime.checkpoint import folder as checkpoint_folder
from tests.faults.commands import DGX, one_line

ODD: list[Any] = [
    0,
    -1,
    10**9,
    10**18,
    10**30,
    10**40,
    1e300,
    1e-300,
    0.5,
    None,
    True,
    [],
    {},
    "x",
    "",
]
ODD += [
    "a\x1b[31m\nb",
    "9" * 400,
    [[]],
    float("nan"),
    float("inf"),
    "../../etc/passwd",
    "/dev/zero",
]
MANY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in plain data."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def changed(tree: Any, draw: random.Random) -> Any:
    """The same with one thing gone, or another in its place."""
    tree = json.loads(json.dumps(tree))
    *above, last = draw.choice(list(places(tree)))
    node = tree
    for key in above:
        node = node[key]
    if draw.random() < 0.2:
        del node[last]
    else:
        node[last] = draw.choice(ODD)
    return tree


@pytest.fixture
def planned(here: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    own = ["plan.stages=2", "plan.schedule=1f1b", "trainer.microbatch=4"]
    assert cli.main(["plan", *DGX, *own]) == 0
    capfd.readouterr()
    return here


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))]
)
@pytest.mark.parametrize("name", ["plan.yaml", "plan.inputs.json"])
def test_a_plan_or_its_inputs_with_something_odd(
    planned: Path, capfd: pytest.CaptureFixture[str], name: str, seed: int
) -> None:
    good = (planned / name).read_text()
    tree = yaml.safe_load(good) if name == "plan.yaml" else json.loads(good)
    draw, refused = random.Random(seed), 0
    for _ in range(40):
        odd = changed(tree, draw)
        text = yaml.safe_dump(odd) if name == "plan.yaml" else json.dumps(odd)
        (planned / name).write_text(text)
        for command in (["explain", "plan.yaml"], ["simulate", "plan.yaml", "--json"]):
            code = cli.main(command)
            err = capfd.readouterr().err
            assert code in (0, 2), text
            if code == 2:
                refused += 1
                assert len(one_line(err)) < 900
    assert refused > 10


@pytest.mark.parametrize("kind", ["a pipe", "without end", "a folder"])
def test_what_is_no_plain_file(planned: Path, kind: str) -> None:
    path = planned / "odd"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    run = planned / "run"
    run.mkdir()
    path.rename(run / "config.yaml")
    for read in (Plan.load, Inputs.load, ModelProfile.load):
        with pytest.raises(PlanError):
            read(run / "config.yaml")
    with pytest.raises(ConfigError):
        read_stored(run)
    with pytest.raises(ConfigError):
        list(read_events(run / "config.yaml"))
    (run / "config.yaml").rename(run / "point.json")
    with pytest.raises(ConfigError):
        PointOutcome.load(run)


def test_a_plan_of_more_moves_than_can_be_listed(planned: Path) -> None:
    tree = yaml.safe_load((planned / "plan.yaml").read_text())
    (planned / "plan.yaml").write_text(
        yaml.safe_dump({**tree, "global_batch": MOST_MOVES + 1, "microbatch": 1})
    )
    with pytest.raises(PlanError, match=r"use more rows per micro-batch"):
        Plan.load(planned / "plan.yaml")


@MANY
@given(data=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "point.json"
    path.write_bytes(data)
    readers: list[Callable[[], object]] = [
        lambda: Plan.load(path),
        lambda: Inputs.load(path),
        lambda: ModelProfile.load(path),
        lambda: list(read_events(path)),
        lambda: PointOutcome.load(tmp_path),
    ]
    for read in readers:
        with contextlib.suppress(UserError):
            read()


def test_the_list_of_trusted_class_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the user's own, but a full disk or another program may have spoilt it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "parallax").mkdir()
    file = tmp_path / "parallax" / "named-class-paths.txt"
    for spoilt in (b"\xff\xfe", b"x" * (17 * 2**20)):
        file.write_bytes(spoilt)
        with pytest.raises(ConfigError, match=r"add model.target=a:b"):
            trust.check_named(tmp_path / "config.yaml", {"model.target": "a:b"})


# ---- checkpoints and weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    partial = checkpoint_folder.partial_folder(tmp_path, 3)
    checkpoint_folder.begin(partial)
    written = write_parts(partial, "stage-00", [("model/w", torch.ones(4))])
    index = {
        "step": 3,
        "state": {},
        "fingerprint": "f",
        "optimizer": [],
    }
    index |= {"checksums": written.checksums}
    checkpoint_folder.finish(partial, index)
    return tmp_path / "step-00000003"


def test_a_manifest_with_something_odd(checkpoint: Path) -> None:
    path = checkpoint / "checkpoint.json"
    tree, draw = json.loads(path.read_text()), random.Random(0)
    del tree["sha256"]  # as one that older versions wrote: otherwise any change is found by it
    for _ in range(200):
        path.write_text(json.dumps(changed(tree, draw)))
        with contextlib.suppress(CheckpointError):
            reader = CheckpointReader(checkpoint)
            reader.check_names({"w"}, "f")
            reader.check_optimizer("AdamW")
            reader.check({"w": torch.ones(4)})


HEADERS = {
    "longer than the file": struct.pack("<Q", 2**63) + b"{}",
    "a hundred gigabytes": struct.pack("<Q", 100 * 2**30) + b"{}",
    "no JSON": struct.pack("<Q", 8) + b"notjson!",
    "outside": struct.pack("<Q", 64)
    + b'{"model/w":{"dtype":"F32","shape":[4],"data_offsets":[0,9999]}} ',
    "overlapping": struct.pack("<Q", 120)
    + b'{"model/w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    + b'"model/v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(60)
    + b"\0" * 4,
    "an overflowing shape": struct.pack("<Q", 96)
    + b'{"model/w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'.ljust(96),
    "deep": struct.pack("<Q", 100_000) + b"[" * 100_000,
}


@pytest.mark.parametrize("how", HEADERS)
def test_a_header_that_lies(checkpoint: Path, how: str) -> None:
    """The library checks them; neither a traceback nor memory may come of it."""
    part = checkpoint / "stage-00.safetensors"
    part.write_bytes(HEADERS[how])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        CheckpointReader(checkpoint).check({"w": torch.ones(4)})
    with pytest.raises(CheckpointError):
        CheckpointWeights(part, OwnLayout()).check({"model/w": torch.ones(4)}, {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_pipe_among_the_files_of_a_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "stage-00.safetensors").unlink()
    os.mkfifo(checkpoint / "stage-00.safetensors")
    with pytest.raises(CheckpointError, match="no readable"):
        CheckpointReader(checkpoint).check({"w": torch.ones(4)})


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"w": "../outside.safetensors"}},
        {"weight_map": {"w": "/etc/passwd"}},
        {"weight_map": {"w": "a/b.safetensors"}},
        {"weight_map": {"w": ".."}},
        {"weight_map": {"w": ""}},
        {"weight_map": ["w"]},
        {"weight_map": 7},
        [],
    ],
    ids=str,
)
def test_an_index_names_nothing_outside_of_its_folder(tmp_path: Path, index: object) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        CheckpointWeights(folder, OwnLayout())
