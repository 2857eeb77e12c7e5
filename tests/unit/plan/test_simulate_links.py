"""Messages and sums of gradients in a simulated step: latency, bandwidth, and who shares it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.plan.cluster import Link
from parallax.plan.cost.collective import all_reduce_seconds
from tests.unit.plan.simulated import nodes, run, times
from tests.unit.plan_fakes import FREE, block, stages


def test_messages_wait_for_the_latency_alone_and_share_the_bandwidth() -> None:
    """Ten messages sent at once: the latency of all passes together."""
    blocks = [block(forward=0, backward=0, output=10), block(forward=0, backward=0, input=10)]
    result = run(
        blocks,
        stages([0, 1, 2]),
        rows=10,
        micro=10,
        link=Link(bytes_per_second=100, latency_seconds=5),
    )
    assert result.step_seconds == pytest.approx(2 * (10 * 10 / 100 + 5))
    one = run(
        blocks,
        stages([0, 1, 2]),
        rows=1,
        micro=1,
        link=Link(bytes_per_second=100, latency_seconds=5),
    )
    assert one.step_seconds == pytest.approx(2 * (10 / 100 + 5))


def test_replicas_reduce_over_the_ring_while_the_last_backward_runs() -> None:
    link = Link(bytes_per_second=100)
    result = run([block(parameter_bytes=800)], stages([0, 1], [2]), rows=2, micro=1, link=link)
    # 2·(2−1)/2·800 bytes from second 1 on.
    assert times(result, "reduce") == {(r, -1): (3, 1 + 8) for r in range(2)}
    assert all(s.wait == pytest.approx(6) for s in result.spans if s.kind == "reduce")


def test_tied_parameters_are_reduced_across_stages() -> None:
    blocks = [block(parameter_bytes=100), block(parameter_bytes=100)]
    tied = run(
        blocks,
        stages([0, 1, 2]),
        rows=1,
        micro=1,
        ties=((100, (0, 1)),),
        link=Link(bytes_per_second=10),
    )
    assert tied.step_seconds == pytest.approx(6 + 10)
    inside = run(
        blocks,
        stages([0, 2]),
        rows=1,
        micro=1,
        ties=((100, (0, 1)),),
        link=Link(bytes_per_second=10),
    )
    assert inside.step_seconds == pytest.approx(6)


def test_messages_to_other_nodes_share_the_outgoing_link() -> None:
    """One rank feeds three replicas on another node: they share its card, not three links."""
    link = Link(bytes_per_second=10)
    blocks = [block(forward=0, backward=0, output=10), block(forward=1, backward=0)]
    apart = run(
        blocks, stages([0, 1, 2], [1, 3]), rows=3, micro=1, machines=nodes(1, 3, remote=link)
    )
    assert {start for start, _ in times(apart, "forward").values()} == {0, 3}
    together = run(
        blocks, stages([0, 1, 2], [1, 3]), rows=3, micro=1, machines=nodes(4, local=link)
    )
    assert {start for start, _ in times(together, "forward").values()} == {0, 1}
    gathered = run(
        [block(forward=0, backward=0, output=10), block(forward=1, backward=0)],
        stages([0, 1, 2], [3, 1]),
        rows=3,
        micro=1,
        machines=nodes(3, 1, remote=link),
    )
    assert times(gathered, "forward")[3, 0] == (3, 6)  # all come in over one card


@pytest.mark.parametrize(("over_host", "expected"), [(False, 2), (True, 3)])
def test_messages_may_share_the_wires_with_swapping(over_host: bool, expected: float) -> None:
    """A message of 1 s while a write of 2 s is under way: on shared wires it takes twice as long."""
    wire = Link(bytes_per_second=10)
    machines = nodes(2, local=wire, over_host=over_host, tier="host", write=wire, read=wire)
    blocks = [block(forward=1, backward=0, moved=20, output=10), block(forward=1, backward=0)]
    parts = [stages([0, 1], directive="offload")[0], stages([1, 2])[0]]
    parts[1] = replace(parts[1], start=1, stop=2)
    result = run(blocks, parts, rows=1, micro=1, machines=machines)
    assert times(result, "forward")[1, 0][0] == pytest.approx(expected)


def test_an_all_reduce_is_a_ring_inside_a_node_and_shares_between_nodes() -> None:
    local, remote = (
        Link(bytes_per_second=100, latency_seconds=1),
        Link(bytes_per_second=10, latency_seconds=2),
    )
    two = nodes(4, 4, local=local, remote=remote)
    assert all_reduce_seconds(800, [3], two) == 0
    measured = nodes(4, local=two.local, reduce_seconds=(0.0, 0.5, 2.0))
    assert all_reduce_seconds(800, [0, 1], measured) == pytest.approx(2 * 1 + 800 * 0.5)
    assert all_reduce_seconds(800, [0, 1, 2, 3], measured) == pytest.approx(6 * 1 + 800 * 2.0)
    assert all_reduce_seconds(800, [0, 1, 2, 3], two) == pytest.approx(2 * 3 * (1 + 2))
    assert all_reduce_seconds(800, [0, 4], two) == pytest.approx(2 * (2 + 40))
    assert all_reduce_seconds(800, range(8), two) == pytest.approx(2 * 3 * (1 + 2) + 2 * (2 + 10))
    assert all_reduce_seconds(800, [0, 1, 2, 4], two) == pytest.approx(
        2 * 2 * (1 + 800 / 3 / 100) + 2 * (2 + 40)
    )
    block_of_800 = block(parameter_bytes=800)
    result = run([block_of_800], stages([0, 1], [8]), rows=8, micro=1, machines=two)
    # From the last backward on.
    assert {end - start for start, end in times(result, "reduce").values()} == {18 + 24 - 2}


def test_placement_says_which_ranks_hold_a_pipeline_rank() -> None:
    """Stages of a replica next to each other: messages stay in the node, gradients do not."""
    local, remote = FREE, Link(bytes_per_second=1)
    machines = nodes(2, 2, local=local, remote=remote)
    blocks = [block(output=10), block(input=10)]
    parts = stages([0, 1, 2], [2, 2])
    far = run(blocks, parts, rows=2, micro=1, machines=machines)
    near = run(blocks, parts, rows=2, micro=1, machines=machines, placement=(0, 2, 1, 3))
    assert near.step_seconds == pytest.approx(6)
    assert far.step_seconds == pytest.approx(6 + 20)
    assert {span.rank: span.stage for span in near.spans} == {0: 0, 2: 0, 1: 1, 3: 1}


def test_ranks_of_a_node_may_share_its_network() -> None:
    """Two stages on each of two nodes, messages of one second from both ranks of one to both of the other."""
    blocks = [block(forward=0, backward=0, output=10), block(forward=1, backward=0)]
    link = Link(bytes_per_second=5)

    def step(remote_ways: float) -> float:
        two = replace(nodes(2, 2, remote=link), remote_ways=remote_ways)
        return run(blocks, stages([0, 1, 2], [2, 2]), rows=2, micro=1, machines=two).step_seconds

    own, shared = step(0.0), step(1.0)
    assert own == pytest.approx(2 + 1)
    assert shared == pytest.approx(4 + 1)
    assert own < step(1.5) < shared


def test_a_ring_over_shared_networks_leaves_each_node_once() -> None:
    link = Link(bytes_per_second=10, latency_seconds=1)
    shared = replace(nodes(2, 2, local=Link(bytes_per_second=1), remote=link), remote_ways=1.0)
    assert all_reduce_seconds(80, range(4), shared) == pytest.approx(2 * 3 * (1 + 2))
    assert all_reduce_seconds(80, [0, 2], shared) == pytest.approx(2 * (1 + 4))
    assert all_reduce_seconds(80, [0, 1], shared) == pytest.approx(2 * 40)
