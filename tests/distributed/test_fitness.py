"""Every rank distinguishes faults of some hosts from faults of all."""

from __future__ import annotations

import os

import torch.distributed as dist

from parallax.errors import ConfigError, UnfitHostError
from parallax.nodes.fitness import AT_HEAD, LEAST, Elastic, from_hosts
from parallax.nodes.places import Nodes
from parallax.run import preflight
from tests.distributed.pool import Pool


def nodes() -> Nodes:
    """Two hosts, the first with two ranks."""
    return Nodes(dist.get_rank(), ("a", "b"), (0, 0, 1), ("host a", "host a", "host b"))


def asks(failing: list[int]) -> tuple[str, str, dict[str, str]] | list[int]:
    def call() -> int:
        if dist.get_rank() in failing:
            raise ConfigError(f"rank {dist.get_rank()} has too little")
        return dist.get_rank()

    try:
        return from_hosts(call, nodes())
    except UnfitHostError as error:
        return "unfit", str(error), error.why
    except ConfigError as error:
        return "all", str(error), {}


def test_whose_error_it_is(pool: Pool) -> None:
    assert pool.run(asks, 3, []) == [[0, 2]] * 3
    assert pool.run(asks, 3, [1]) == [[0, 2]] * 3  # only the first rank of each node checks
    why = "rank 2 has too little"
    assert pool.run(asks, 3, [2]) == [("unfit", why, {"host b": why})] * 3
    assert pool.run(asks, 3, [0, 2]) == [("all", "rank 0 has too little", {})] * 3


def meets_head(odd: int) -> tuple[list[str], bool]:
    """Versions of ``odd`` differ, and the last host is HEAD: the unfit hosts, and whether the others continue."""
    found, plain, own = nodes(), preflight.versions, preflight.versions()
    environment = {LEAST: "1", AT_HEAD: str(int(found.rank == 2)), "TORCHELASTIC_MAX_RESTARTS": "1"}
    os.environ.update(environment)
    if found.rank == odd:
        preflight.versions = lambda: {**own, "torch": "2.9.1"}  # type: ignore[assignment]
    try:
        preflight.check_versions(found)
    except UnfitHostError as error:
        return [*error.why], Elastic.gather(found).goes_on(error.why, found)
    finally:
        preflight.versions = plain
        for key in environment:
            del os.environ[key]
    return [], False


def test_a_host_that_differs_from_head_is_unfit(pool: Pool) -> None:
    assert pool.run(meets_head, 3, -1) == [([], False)] * 3
    assert pool.run(meets_head, 3, 0) == [(["host a"], True)] * 3
    assert pool.run(meets_head, 3, 2) == [(["host a"], True)] * 3
