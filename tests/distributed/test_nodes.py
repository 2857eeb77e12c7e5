"""Several hosts as one, simulated by processes of this host, each in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallax.config import compose
from parallax.errors import CheckpointError, ConfigError
from parallax.machine.local import ClusterConfig
from parallax.machine.probes import ALONE
from parallax.nodes import links
from parallax.nodes.places import Nodes, find_directory_groups
from parallax.nodes.together import all_gather_result, broadcast_result
from parallax.run.nodes import _between
from parallax.run.processes import together
from parallax.runtime.checkpoint import CheckpointReader, checkpoint_name
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CASE, STATE

SPREAD = CASE.under([1, 2])  # ranks 1 and 2 are replicas


@contextmanager
def on_host(name: str, folder: Path) -> Iterator[None]:
    """What runs inside believes to be on another host, and starts in a folder of that host."""
    before = Path.cwd()
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    try:
        with (
            mock.patch("parallax.nodes.places.host_identity", return_value=name),
            mock.patch("parallax.nodes.places.node_name", return_value=name),
            mock.patch("parallax.nodes.places._SEEN_SECONDS", 0.1),
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}),
        ):
            yield
    finally:
        os.chdir(before)


def there(hosts: list[str], folder: Path, call: Callable[..., Any], *args: Any) -> Any:
    with on_host(hosts[dist.get_rank()], folder):
        return call(*args)


# ---- jobs


def gathered() -> tuple[Any, ...]:
    nodes = Nodes.gather()
    return nodes.names, nodes.of, nodes.mine, nodes.local_count, nodes.leads


def groups(directory: Path) -> tuple[bool, bool, bool]:
    found = find_directory_groups(directory, Nodes.gather())
    assert directory.is_dir()
    dist.barrier()  # each takes its mark away
    assert not list(directory.iterdir())
    return found.shared, found.leads, found.sees_rank_0


def unwritable(directory: Path) -> str:
    if dist.get_rank() == 1:
        directory.parent.write_text("no folder")
    try:
        find_directory_groups(directory, Nodes.gather())
    except ConfigError as error:
        return str(error)
    return ""


def refusing() -> tuple[str, str]:
    def second() -> None:
        if dist.get_rank() == 1:
            raise ConfigError("of rank 1")

    reported = []
    for call in (lambda: all_gather_result(second), lambda: broadcast_result(second)):
        try:
            call()
            reported.append("")
        except ConfigError as error:
            reported.append(str(error))
    return reported[0], reported[1]


def probed() -> tuple[float, float, float, bool]:
    nodes, cpu = Nodes.gather(), torch.device("cpu")
    with mock.patch.object(links, "_LONG_SECONDS", 0.002):
        first = links.probe_links(nodes, cpu)
        again = links.probe_links(nodes, cpu)
    return (
        first.link.bytes_per_second,
        first.link.latency_seconds,
        first.full_speed_ranks,
        again == first,
    )


def timed_before_anything_came() -> bool:
    """Whether the first message between two ranks is one that is timed."""
    early = []

    class Connection(links._Connection):
        carried = False

        def rate(self, latency: float, *, down: bool = False) -> float:
            early.append(not self.carried)
            return super().rate(latency, down=down)

        def _carry(self, tensor: torch.Tensor, *, sends: bool) -> None:
            super()._carry(tensor, sends=sends)
            self.carried = True

    with (
        mock.patch.object(links, "_Connection", Connection),
        mock.patch.object(links, "_LONG_SECONDS", 0.002),
    ):
        links.probe_links(Nodes.gather(), torch.device("cpu"), fresh=True)
    assert early
    return any(early)


def offset(late: float) -> float:
    clock = time.perf_counter
    shift = late if dist.get_rank() else 0.0
    with mock.patch.object(links.time, "perf_counter", side_effect=lambda: clock() + shift):
        return links.clock_offset(Nodes.gather())


def trained(folder: Path, first: int, last: int) -> Any:
    """Steps ``first`` to ``last`` of a run with checkpoints where its rank starts."""
    engine = SPREAD.engine(folder)
    checkpoints = Path("checkpoints")
    if first:
        found, remarks = engine.checkpoints(checkpoints)
        assert [path.name for path in found] == [checkpoint_name(first)]
        assert not remarks
        engine.load(found[-1])
    losses = [engine.step(batch).loss for batch in SPREAD.batches()[first:last]]
    weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    engine.save(checkpoints, STATE)
    engine.close()
    return losses, weights


def usable(folder: Path) -> Any:
    engine = SPREAD.engine(folder)
    try:
        found, remarks = engine.checkpoints(Path("checkpoints"))
        return [path.name for path in found], remarks
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()


def joined(kinds: list[str]) -> Any:
    """The cluster that ranks of these processors are, where a step takes as many seconds as the name is long."""
    rank = dist.get_rank()
    with (
        mock.patch("parallax.run.nodes.cpu_model", return_value=kinds[rank]),
        mock.patch("parallax.run.nodes.probe_together", return_value=ALONE),
        mock.patch.object(together, "_step_seconds", return_value=float(len(kinds[rank]))),
        mock.patch.object(links, "_LONG_SECONDS", 0.002),
    ):
        nodes = Nodes.gather()
        config = compose(["cluster.devices=3", "cluster.threads=1"])
        return together._join(config, nodes).cluster


def between(link: str) -> tuple[float, float, float]:
    found = _between(ClusterConfig(link=link), Nodes.gather())
    return found.link.bytes_per_second, found.link.latency_seconds, found.full_speed_ranks


# ---- tests


def test_ranks_that_follow_each_other_on_a_host_are_a_node(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(there, 4, ["x", "y", "y", "x"], tmp_path, gathered)
    assert found == [
        (("x-0", "y", "x-2"), (0, 1, 1, 2), 0, 2, True),
        (("x-0", "y", "x-2"), (0, 1, 1, 2), 1, 2, True),
        (("x-0", "y", "x-2"), (0, 1, 1, 2), 1, 2, False),
        (("x-0", "y", "x-2"), (0, 1, 1, 2), 2, 2, True),
    ]


def test_a_directory_is_shared_where_all_see_the_same_file(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(there, 2, ["x", "y"], tmp_path, groups, tmp_path / "shared") == [
        (True, True, True),
        (True, False, True),
    ]
    assert pool.run(there, 3, ["x", "y", "y"], tmp_path, groups, Path("own")) == [
        (False, True, True),
        (False, True, False),
        (False, False, False),
    ]


def test_a_node_that_cannot_write_is_named_on_all(pool: Pool, tmp_path: Path) -> None:
    reported = pool.run(there, 2, ["x", "y"], tmp_path, unwritable, Path("runs/one"))
    assert reported[0] == reported[1]
    assert reported[0].startswith("cannot write runs/one on node")


def test_the_error_of_one_is_that_of_all(pool: Pool) -> None:
    assert pool.run(refusing, 2) == [("of rank 1", "")] * 2


def test_links_are_measured_once(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(there, 4, ["x", "x", "y", "y"], tmp_path, probed)
    assert len(set(found)) == 1
    rate, latency, full_speed_ranks, kept = found[0]
    assert 1e6 < rate < 1e12
    assert 0 < latency < 1
    assert full_speed_ranks == 0 or 1 <= full_speed_ranks <= 2
    assert kept
    assert len(list((tmp_path / "cache").rglob("link-*.json"))) == 1


def test_links_are_measured_after_they_were_made(pool: Pool, tmp_path: Path) -> None:
    """NCCL connects with the first message; a way that took 0.2 s for it carried 1 MB/s, and was all there was."""
    found = pool.run(there, 4, ["x", "x", "y", "y"], tmp_path, timed_before_anything_came)
    assert found == [False] * 4


@pytest.mark.parametrize("count", range(2, 9))
def test_neighbours_are_measured_without_a_node_in_two_pairs(count: int) -> None:
    rounds = list(links._rounds(count))
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(set(nodes)) == len(nodes)
    pairs = {frozenset(pair) for turn in rounds for pair in turn}
    assert pairs == {frozenset((node, (node + 1) % count)) for node in range(count)}
    assert sum(map(len, rounds)) == len(pairs)


def test_clock_offsets_between_nodes_are_measured(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(there, 3, ["x", "y", "y"], tmp_path, offset, 1000.0)
    assert found[0] == 0
    assert found[1] == found[2] == pytest.approx(-1000, abs=0.1)


def test_checkpoints_on_nodes_resume_on_other_nodes(pool: Pool, tmp_path: Path) -> None:
    """Stages that share a parameter, and replicas that have theirs on another node, need what others have saved."""
    hosts = ["x", "x", "y"]
    pool.run(there, 3, hosts, tmp_path, trained, tmp_path, 0, 2)
    kept = [
        {path.name for path in (tmp_path / host / "checkpoints").rglob("*.safetensors")}
        for host in "xy"
    ]
    assert kept[0] == {"stage-00.safetensors", "stage-01.safetensors"}
    assert kept[1] == {"stage-01-replica-01.safetensors"}  # of states that it alone knows: none
    folder = tmp_path / "y/checkpoints" / checkpoint_name(2)
    assert set(json.loads((folder / "checkpoint.json").read_text())["nodes"].values()) == {"x"}
    with pytest.raises(
        CheckpointError, match=r"this node has the files of no node, and .* is on x"
    ):
        CheckpointReader(folder).check_whole()
    # The nodes' ranks come in another order.
    again = pool.run(there, 3, ["y", "x", "x"], tmp_path, trained, tmp_path, 2, 4)
    straight = pool.run(there, 3, ["z"] * 3, tmp_path, trained, tmp_path, 0, 4)
    for (losses, weights), (due_losses, due_weights) in zip(again, straight):
        assert losses == due_losses[2:]
        assert weights.keys() == due_weights.keys()
        assert all(torch.equal(weights[name], due) for name, due in due_weights.items())


def test_a_node_that_has_lost_its_checkpoints_is_named(pool: Pool, tmp_path: Path) -> None:
    hosts = ["x", "y", "y"]
    pool.run(there, 3, hosts, tmp_path, trained, tmp_path, 0, 1)
    newer = tmp_path / "x" / "checkpoints" / checkpoint_name(9)
    shutil.copytree(newer.with_name(checkpoint_name(1)), newer)
    found = pool.run(there, 3, hosts, tmp_path, usable, tmp_path)
    assert found == found[:1] * 3
    for usable_ones, (remark,) in found:
        assert usable_ones == [checkpoint_name(1)]
        assert re.match(
            f"checkpoints: {checkpoint_name(9)} is not whole: [0-9]+ tensors that y saved are not here",
            remark,
        )
    (tmp_path / "y" / "checkpoints").rename(tmp_path / "lost")
    found = pool.run(there, 3, hosts, tmp_path, usable, tmp_path)
    assert len(set(found)) == 1
    assert re.match(
        f"checkpoints: {checkpoint_name(1)} is not whole: [0-9]+ tensors that y saved", found[0]
    )


@pytest.mark.parametrize(("kinds", "speeds"), [("xxx", (1, 1, 1)), (["xx", "xx", "x"], (1, 1, 2))])
def test_nodes_are_one_cluster(
    kinds: list[str], speeds: tuple[float, ...], pool: Pool, tmp_path: Path
) -> None:
    found = pool.run(there, 3, ["x", "x", "y"], tmp_path, joined, list(kinds))
    assert found[0] == found[1] == found[2]
    cluster = found[0]
    assert [node.name for node in cluster.nodes] == ["x", "y"]
    assert cluster.node_of == (0, 0, 1)
    assert tuple(device.speed for device in cluster.devices) == speeds
    assert cluster.remote.bytes_per_second > 0
    assert cluster.remote_ways == 1.0  # of one rank on y
    # Of one kind they are equal but for their speed, so that replicas of a stage may be on several.
    if len(set(kinds)) == 1:
        assert len(set(cluster.devices)) == 1


def test_a_known_link_is_not_measured(pool: Pool, tmp_path: Path) -> None:
    nodes = pool.run(there, 2, ["x", "y"], tmp_path, between, "125MB")
    assert nodes == [(125e6, 0.0, 1.0)] * 2
    assert not list(tmp_path.rglob("link-*.json"))
