"""Ranks with other versions are named before anything is planned."""

from __future__ import annotations

from parallax.errors import PreflightError
from parallax.nodes.places import Nodes
from parallax.run import preflight
from tests.distributed.pool import Pool


def meets(odd: int) -> str:
    nodes = Nodes.gather()
    plain, own = preflight.versions, preflight.versions()
    if nodes.rank == odd:
        preflight.versions = lambda: {**own, "torch": "2.9.1"}  # type: ignore[assignment]
    try:
        preflight.check_versions(nodes)
    except PreflightError as error:
        return str(error)
    finally:
        preflight.versions = plain
    return ""


def test_other_versions_are_named(pool: Pool) -> None:
    assert pool.run(meets, 2, -1) == ["", ""]
    output = set(pool.run(meets, 2, 1))
    assert len(output) == 1
    (line,) = output
    assert line.startswith("rank 1 on ")
    assert " has torch 2.9.1, and rank 0 on " in line
    assert line.endswith("install the same versions on all hosts")
