"""Objects between ranks are values and records of Parallax; nothing that a stranger sends is executed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallax.common.events import Span
from parallax.errors import InfeasiblePlan, TransportError
from parallax.nodes.objects import all_gather_object, broadcast_object, read_object, write_object
from parallax.nodes.together import all_gather_result, broadcast_result
from parallax.plan.cluster import Link
from parallax.plan.plan import Directive
from parallax.run.sweep import job  # noqa: F401  # a class that could be called
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool


def talks() -> Any:
    rank = dist.get_rank()
    every = all_gather_object({"rank": rank, "long": "x" * (rank * 1000)})
    first = broadcast_object(("first", rank))
    return (
        [each["rank"] for each in every],
        first,
        all_gather_result(lambda: rank),
        broadcast_result(lambda: rank),
    )


def test_objects_arrive(pool: Pool) -> None:
    assert pool.run(talks, 2) == [([0, 1], ("first", 0), [0, 1], 0)] * 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, float("inf"), "text", b"bytes", True],
        {(0, 1): {"a": {1, 2}, "b": frozenset([3])}},
        (Path("a/b"), torch.float32, torch.Size([2, 3]), torch.device("cpu")),
        Link(bytes_per_second=1.0, latency_seconds=2.0),
        Directive.KEEP,
        Span._make([*map(str, range(len(Span._fields)))]),
        InfeasiblePlan,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_and_records_are_read(value: object) -> None:
    assert read_object(write_object(value), 0) == value


@pytest.mark.parametrize(
    "value",
    [object(), print, np.int64(1), {"a": [Engine]}],
    ids=lambda value: type(value).__name__,
)
def test_other_values_cannot_be_sent(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent between ranks"):
        write_object(value)


class Calls:
    """A pickle that calls a function where it is loaded."""

    def __init__(self, call: Any, *given: Any) -> None:
        self.call, self.given = call, given

    def __reduce__(self) -> Any:
        return self.call, self.given


def test_code_of_a_stranger_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    records = (
        "os:mkdir",
        "posixpath:join",
        "parallax.nodes.objects:json",
        "parallax.nodes.objects:read_object",
        "parallax.runtime.engine:Engine",
        "parallax.run.sweep.job:PointJob",
        "parallax.__main__:main",
        "parallax.plan.cluster:Link.__init__",
        "builtins:print",
    )
    hostile = [json.dumps({"#": "record", "of": [name, [str(mark)]]}).encode() for name in records]
    hostile += [json.dumps({"#": kind, "of": "load"}).encode() for kind in ("dtype", "error", "x")]
    hostile += [pickle.dumps(Calls(os.mkdir, str(mark))), b"no data", b'{"#": 1}', b"[" * 10**5]
    for data in hostile:
        with pytest.raises(TransportError, match="rank 3 sent something that is not data"):
            read_object(data, 3)
    assert not mark.exists()


def says_a_huge_size() -> str:
    """Rank 1 announces more than there is memory for."""
    if dist.get_rank() == 1:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([2**50]))
        return ""
    try:
        all_gather_object(None)
    except TransportError as error:
        return str(error)
    return "read"


def test_no_object_is_larger_than_any_of_ours(pool: Pool) -> None:
    assert pool.run(says_a_huge_size, 2)[0].startswith(
        "rank 1 sends an object of 1.0 PiB, and 2.0 GiB are the most"
    )
