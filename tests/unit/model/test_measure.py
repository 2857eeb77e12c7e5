"""The profiler against bytes that can be worked out by hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.errors import DescribeError
from parallax.model.describe import Chain, describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling import clock
from parallax.model.profiling import measure as module
from parallax.model.profiling.measure import measure
from parallax.model.saved import SavedBytes
from parallax.plan.cost.forward import task_costs
from parallax.plan.cost.stage import load_stage
from parallax.plan.plan import Directive
from parallax.plan.profile import NOTHING, BlockCost, ModelProfile
from parallax.plan.task import PlanTask
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.plans import make_plan
from tests.unit.plan_fakes import cluster

CPU = torch.device("cpu")
WIDE, FLOAT = 64, 4


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "SECONDS_PER_BLOCK", 0.0)
    monkeypatch.setattr(clock, "disturbance", lambda *_: 1.0)  # whatever else runs here


class Both(nn.Module):
    """Linear, GELU, norm, linear: each saves something else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDE, 2 * WIDE),
            nn.LayerNorm(2 * WIDE),
            nn.Linear(2 * WIDE, WIDE),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        # Saves its output, which the next block's linear saves again.
        return torch.exp(self.linear(x))


def chain_of(*parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[part() for part in parts])


def linear(entering: int = WIDE, leaving: int = WIDE) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(entering, leaving)


def sample(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
    return (torch.randn(rows, WIDE),), torch.zeros(rows, WIDE)


def profile_of(
    factory: Callable[[], nn.Module], rows: tuple[int, ...] = (2, 4), **options: Any
) -> ModelProfile:
    dtype = options.get("precision", PrecisionConfig()).parameter_dtype
    return profile_of_chain(describe(factory, dtype=dtype), rows, **options)


def profile_of_chain(chain: Chain, rows: tuple[int, ...] = (2, 4), **options: Any) -> ModelProfile:
    fields: dict[str, Any] = {
        "device": CPU,
        "precision": PrecisionConfig(),
        "minimum_bytes": 1,
        "loss": F.mse_loss,
        "sample": sample,
        **options,
    }
    loss, batch = fields.pop("loss"), fields.pop("sample")
    return measure(chain, loss, batch, rows, **fields)


def numbers(block: BlockCost, rows: int) -> tuple[float, float, float, float]:
    return tuple(line.at(rows) for line in (block.moved, block.stays, block.input, block.output))  # type: ignore[return-value]


def test_saved_bytes_by_hand() -> None:
    found = profile_of(chain_of(linear(), Both, linear())).blocks
    row = WIDE * FLOAT
    assert numbers(found[0], 3) == (3 * row, 0, 3 * row, 3 * row)  # the rows of the batch
    # up saves its input, gelu, norm and down theirs; the norm's mean and inverse deviation are a number per row each.
    assert numbers(found[1], 3) == (3 * (row + 3 * 2 * row + 2 * FLOAT), 0, 3 * row, 3 * row)
    assert [block.parameters for block in found] == [
        WIDE * WIDE + WIDE,
        4 * WIDE * WIDE + 7 * WIDE,
        WIDE * WIDE + WIDE,
    ]
    assert [block.parameter_bytes for block in found] == [
        FLOAT * block.parameters for block in found
    ]


def test_small_tensors_stay() -> None:
    found = profile_of(chain_of(linear(), Both, linear()), minimum_bytes=100).blocks[1]
    row = WIDE * FLOAT
    assert found.moved.at(4) == 4 * (row + 3 * 2 * row)
    assert found.stays.at(4) == 4 * 2 * FLOAT


def test_the_loss_is_part_of_the_last_block() -> None:
    plain = profile_of(
        chain_of(linear(), linear()), loss=lambda outputs, targets: outputs.sum()
    ).blocks
    squared = profile_of(
        chain_of(linear(), linear()), loss=lambda outputs, targets: (outputs**2).sum() + 0
    ).blocks
    assert plain[0].moved == squared[0].moved
    assert squared[1].moved == plain[1].moved
    assert plain[1].by_loss.at(4) == 0
    assert squared[1].by_loss.at(4) == 4 * WIDE * FLOAT  # the square saves the outputs
    assert squared[0].by_loss.at(4) == 0
    assert squared[1].output.at(4) == 4 * WIDE * FLOAT  # of the block, not of the loss


def test_equal_blocks_are_measured_once() -> None:
    printed: list[str] = []
    found = profile_of(chain_of(linear(), *[Both] * 5, linear()), progress=printed.append).blocks
    measured = [text.split("(")[1].split(")")[0] for text in printed if "measuring" in text]
    assert measured == ["0", "1", "6"] * 2  # at each of two numbers of rows, and timed again
    assert [block.name for block in found] == [str(i) for i in range(7)]
    costs = {(b.forward_seconds, b.backward_seconds, b.moved) for b in found[1:6]}
    assert len(costs) == 1


def test_the_first_block_needs_no_gradient_of_its_input() -> None:
    printed: list[str] = []
    profile_of(chain_of(linear(), linear(), linear(), linear()), progress=printed.append)
    measured = [text.split("(")[1].split(")")[0] for text in printed if "measuring" in text]
    assert measured == ["0", "1", "3"] * 2


def test_the_name_is_the_callers_also_from_the_cache() -> None:
    assert profile_of(chain_of(linear()), name="one").model == "one"
    assert profile_of(chain_of(linear()), name="two").model == "two"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            chain_of(linear(), linear(32)),
            r"block Linear does not take what the block before it returns \(torch.float32 \(2, 64",
        ),
        (chain_of(linear(), lambda: nn.Bilinear(4, 4, 4)), "block Bilinear does not take"),
        (
            chain_of(linear(), lambda: nn.LSTM(WIDE, 8)),
            "a block returned tuple; it must return a tensor",
        ),
    ],
)
def test_blocks_that_do_not_fit_together(factory: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(DescribeError, match=message):
        profile_of(factory)


class Seen(nn.Linear):
    """Notes how products are made, or finds no memory."""

    products: ClassVar[set[str]] = set()
    full = False

    def forward(self, x: Tensor) -> Tensor:
        self.products.add(torch.get_float32_matmul_precision())
        if self.full and not x.is_meta:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"
            )
        return super().forward(x)


def test_products_are_as_in_a_step() -> None:
    """In full fp32 those of tf32 took eight times as long on an A100."""
    chain = describe(chain_of(linear(), lambda: Seen(WIDE, WIDE)))
    Seen.products.clear()
    before = torch.get_float32_matmul_precision()
    profile_of_chain(chain, precision=PrecisionConfig(compute="tf32"))
    assert Seen.products == {"high"}
    assert torch.get_float32_matmul_precision() == before


def test_a_block_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = describe(chain_of(linear(), lambda: Seen(WIDE, WIDE)))
    monkeypatch.setattr(Seen, "full", True)
    with pytest.raises(
        DescribeError,
        match=r"block 1 \(1\) does not fit the device while 2 row\(s\) .*: CUDA out of memory; give it shorter",
    ):
        profile_of_chain(chain)


def test_peaks_by_hand() -> None:
    """Linear-sized tensors: exp(x + 1) · 2 holds one temporary beyond what stays."""

    class Temporaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDE))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight  # saves x; y is saved by exp's successor only
            return torch.exp(y + 1)  # saves its output

    row = 1024 * WIDE * FLOAT

    def big(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.randn(rows * 1024, WIDE),), torch.zeros(rows * 1024, WIDE)

    found = profile_of(chain_of(linear(), Temporaries, linear()), sample=big).blocks[1]
    # Forward: y and y + 1 live beside the output while exp runs.
    assert found.forward_work.at(2) == pytest.approx(2 * 2 * row, rel=0.1)
    # Backward: exp's gradient, the input's gradient, x · gradient for the weight before it is summed.
    assert 2 * row <= found.backward_work.at(1) <= 3.2 * row


def test_costs_are_lines_in_the_rows() -> None:
    factory = chain_of(linear(), Both, linear())
    narrow, wide = profile_of(factory, (2, 4)).blocks, profile_of(factory, (8, 16)).blocks
    for a, b in zip(narrow, wide):
        assert numbers(a, 12) == numbers(b, 12)
    single = profile_of(factory, (4,)).blocks
    assert numbers(single[1], 4) == numbers(narrow[1], 4)


def test_ties() -> None:
    config = GPTConfig(layers=2, hidden=16, heads=2, vocabulary=32, sequence=8)

    def tokens(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.randint(0, 32, (rows, 8)),), torch.randint(0, 32, (rows, 8))

    found = profile_of(config.build, loss=GPT.loss, sample=tokens)
    assert found.ties == ((32 * 16 * FLOAT, (0, 3)),)
    total = sum(p.numel() for p in config.build().parameters()) * FLOAT
    assert found.unique_parameter_bytes(range(4)) == total


def test_casts_of_weights_stay() -> None:
    plain = profile_of(chain_of(linear(), linear(), linear())).blocks[1]
    cast = profile_of(
        chain_of(linear(), linear(), linear()), precision=PrecisionConfig(compute="bf16")
    ).blocks[1]
    assert plain.stays.at(4) == 0
    assert plain.moved.at(4) == 4 * WIDE * FLOAT  # its input
    assert cast.stays.fixed >= WIDE * WIDE * 2  # autocast's copy of the weight
    assert cast.moved.at(4) < WIDE * WIDE * 2
    assert cast.output.at(4) == 4 * WIDE * 2


def test_buffers_and_numbers_in_double_precision() -> None:
    class Normed(nn.BatchNorm1d):
        pass

    found = profile_of(
        chain_of(linear(), lambda: Normed(WIDE), linear()),
        precision=PrecisionConfig(parameters="fp64", compute="fp64"),
        sample=lambda n: (
            (torch.randn(n, WIDE, dtype=torch.float64),),
            torch.zeros(n, WIDE, dtype=torch.float64),
        ),
    ).blocks[1]
    assert found.buffer_bytes == 2 * (2 * WIDE * 8 + 8)  # and as they were before the step
    assert found.parameter_bytes == 2 * WIDE * 8


def test_nothing_that_was_measured_stays() -> None:
    """Every block stayed, with its gradients and what it had saved: a graph held it, which was held by what it held."""

    def alive() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        return sum(tensor.nbytes for tensor in tensors)

    profile_of(chain_of(linear()))  # what torch makes once
    before = alive()
    profile_of(chain_of(Both, Twice, linear()))
    assert alive() - before < WIDE * WIDE * FLOAT


def test_measuring_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    batch = sample(4)
    before = torch.random.get_rng_state()
    first_rows = lambda n: ((batch[0][0][:n],), batch[1][:n])  # noqa: E731
    profile_of(chain_of(linear(), lambda: nn.Dropout(0.5), linear()), sample=first_rows)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(compute="bf16")], ids=str)
def test_what_is_predicted_is_what_the_swap_manager_moves(
    precision: PrecisionConfig, scratch: Path
) -> None:
    """Once 6% apart: a block's input was taken for a leaf that stays, and what the loss saves for offloaded."""
    config = GPTConfig(layers=2, hidden=64, heads=2, vocabulary=64, sequence=32)
    chain, tokens = describe(config.build), torch.randint(0, 64, (4, 33))
    found = profile_of(
        config.build,
        loss=GPT.loss,
        sample=lambda n: ((tokens[:n, :-1],), tokens[:n, 1:]),
        precision=precision,
        minimum_bytes=1100,  # more than the tokens
    )
    batch = TensorRows(tokens[:, :-1], tokens[:, 1:])
    engine = Engine.build(
        chain,
        make_plan(chain, global_batch=4, microbatch=4, directive="offload"),
        loss=GPT.loss,
        precision=precision,
        swap=SwapConfig(minimum_bytes=1100),
        scratch=scratch,
    )
    try:
        engine.gradients(batch)
        assert engine._manager is not None
        statistics = engine._manager.take_statistics()
    finally:
        engine.close()
    assert statistics.bytes_out + statistics.bytes_cancelled == sum(
        block.moved.at(4) for block in found.blocks
    )


class Rectified(nn.Module):
    """Ends with a ReLU, whose output the next block saves, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x) + x)


def test_what_the_block_before_saves_too_counts_once(scratch: Path) -> None:
    factory = chain_of(Rectified, Rectified, Rectified, Both, linear())
    rows, chain = 4, describe(factory)
    (x,), y = sample(rows)
    found = profile_of_chain(chain)
    row = rows * WIDE * FLOAT
    shared = [block.shared.at(rows) for block in found.blocks]
    assert shared == [0, row, row, row, 0], "Both does not save its output"
    model = factory()
    once = SavedBytes(list(model.parameters()), 1)
    with once.block_hooks():
        model(x)
    whole = sum(once.movable_sizes())
    device = cluster(1).devices[0]
    for directive in (Directive.KEEP, Directive.OFFLOAD):
        load = load_stage(found, 0, [directive] * len(found.blocks), rows, device=device)
        by_loss = sum(block.loss_bytes for block in load.blocks)
        assert load.moved_bytes + load.kept_bytes - by_loss == whole
    without = task_costs(found, PlanTask.INFERENCE)
    assert all(block.shared == NOTHING for block in without.blocks)
    mixed = [
        Directive.KEEP,
        Directive.OFFLOAD,
        Directive.OFFLOAD,
        Directive.RECOMPUTE,
        Directive.KEEP,
    ]
    load = load_stage(found, 0, mixed, rows, device=device)
    assert [block.shared_bytes for block in load.blocks] == [0, 0, shared[2], 0, 0]
    plan = make_plan(chain, global_batch=rows, microbatch=rows, directive="offload")
    engine = Engine.build(
        chain, plan, loss=F.mse_loss, swap=SwapConfig(minimum_bytes=1), scratch=scratch
    )
    try:
        engine.gradients(TensorRows(x, y))
        assert engine._manager is not None
        statistics = engine._manager.take_statistics()
    finally:
        engine.close()
    assert statistics.decisions["moved"][1] == whole


def test_more_rows_are_measured_while_they_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    plain = module._Bench.run
    monkeypatch.setattr(
        module._Bench, "run", lambda self, *rest: runs.append(rest[0]) or plain(self, *rest)
    )
    found = profile_of(chain_of(linear()), (2, 4, 8, 16))
    assert runs == [2, 4, 8, 16]
    assert found.blocks[0].moved.at(3) == 3 * WIDE * FLOAT
    runs.clear()
    monkeypatch.setattr(module, "_CHEAP_SECONDS", 0.0)
    monkeypatch.setattr(module, "_GROWN", 0.0)
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.0)
    first = profile_of(chain_of(linear()), (2, 4, 8, 32))
    assert runs == [2, 4, 8]
    assert profile_of(chain_of(linear()), (2, 4, 8, 16, 32, 64)) == first
    assert runs == [2, 4, 8], "a larger batch needs no other measurement"
    profile_of(chain_of(linear()), (2, 4, 8))
    assert runs == [2, 4, 8] * 2, "with these rows it might have gone on"


def test_many_rows_are_only_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of 32 rows were predicted from 8 rows to take twice as long as they do."""
    monkeypatch.setattr(module, "_CHEAP_SECONDS", 0.0)
    monkeypatch.setattr(module, "_GROWN", 0.0)
    monkeypatch.setattr(module._Bench, "_few_seconds", lambda self, passes: [0.0, 5.0, 7.0])
    monkeypatch.setattr(module, "_MOST_SECONDS", 100.0)
    (found,) = profile_of(chain_of(linear()), (1, 2, 4, 8, 32)).blocks
    assert (found.forward_seconds.at(8), found.backward_seconds.at(32)) == (5.0, 7.0)
    assert found.backward_seconds.points[-1] == (32, 7.0)
    assert 0 <= found.weight_seconds.at(32) <= 7.0
    assert found.moved.points[-1][0] == 4
    assert found.moved.at(32) == 32 * WIDE * FLOAT
    monkeypatch.setattr(module, "_MOST_SECONDS", 40.0)  # 32 rows would take 48 s
    (found,) = profile_of(chain_of(linear()), (1, 2, 4, 8, 33)).blocks
    assert found.forward_seconds.points[-1] == (8, 5.0)


class Beside(nn.Module):
    """A linear layer, beside which the model's input passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        given = x if given is None else given
        return self.linear(x) + given, given


def test_an_input_of_the_model_has_a_gradient_only_in_a_later_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients of images that all branches of a network read were half of the predicted backward, and a stage
    that has the images from the data computes none of them."""
    timed, plain = list[tuple[bool, ...]](), module._Bench._times

    def times(self: Any, passes: Any) -> dict[str, float]:
        timed.append(tuple(leaf.requires_grad for leaf in passes.leaves))
        return plain(self, passes) | {"forward_seconds": 1.0, "backward_seconds": 2.0}

    monkeypatch.setattr(module._Bench, "_times", times)
    monkeypatch.setattr(module._Bench, "_few_seconds", lambda self, passes: [0.0, 1.0, 2.5])
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.0)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs[0], targets)

    found = profile_of(chain_of(Beside, Beside), (2, 4, 8), loss=loss).blocks
    assert timed[:2] == [(False,), (True, False)]
    assert [block.received_seconds.at(8) for block in found] == [0.0, 0.5]


def test_statistics_over_replicas_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Bench, "_few_seconds", lambda self, passes: [0.0, 300.0, 400.0])
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.0)
    model = chain_of(linear(), lambda: nn.Sequential(nn.BatchNorm1d(WIDE), nn.BatchNorm1d(WIDE)))
    found = profile_of(model, (2, 4, 8), shared_norms=True).blocks
    assert [block.norms for block in found] == [0, 2]
    assert found[0].norm_seconds.at(8) == 0
    assert 600 < found[1].norm_seconds.at(8) <= 700
    assert not any(block.norms for block in profile_of(model, (2, 4, 8)).blocks)


def test_rows_that_do_not_fit_the_device_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger micro-batches are a choice: what one and two rows cost is enough to plan with."""
    plain = module._Bench.run

    def run(self: Any, rows: int, *rest: Any) -> list[Any]:
        with module._fitting("block 0", rows, "free it"):
            if rows > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return plain(self, rows, *rest)

    monkeypatch.setattr(module._Bench, "run", run)
    found = profile_of(chain_of(linear()), (1, 2, 4, 8))
    assert found.blocks[0].moved.at(3) == 3 * WIDE * FLOAT


def test_seconds_at_few_rows_are_measured_not_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone took 1.27 times as long as one of four, and was predicted to take as long: plans had micro-batches of
    one row, the slowest there are."""
    plain = module._Bench.run
    seconds = {1: 4.0, 2: 5.0, 4: 8.0}

    def run(self: Any, rows: int, *rest: Any) -> list[Any]:
        return [
            replace(found, forward_seconds=seconds[rows], backward_seconds=seconds[rows])
            for found in plain(self, rows, *rest)
        ]

    monkeypatch.setattr(module._Bench, "run", run)
    monkeypatch.setattr(module._Bench, "run_again", lambda self, n, i, t, known, offload: known)
    forward = profile_of(chain_of(linear()), (1, 2, 4)).blocks[0].forward_seconds
    assert [forward.at(rows) for rows in (1, 2, 3, 4)] == [4, 5, 6.5, 8]
    assert forward.at(7) == pytest.approx(12)  # by the line from 1 row to 4


def test_the_shorter_of_two_measurements_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were timed while another process had the machine were planned as slow ones."""
    looks = iter([9.0] * 4 + [1.0] * 4)
    monkeypatch.setattr(
        module._Bench,
        "_times",
        lambda self, passes: dict.fromkeys(
            ("forward_seconds", "backward_seconds", "weight_seconds", "split_seconds"), next(looks)
        ),
    )
    found = profile_of(chain_of(linear(), linear())).blocks
    assert [block.forward_seconds.at(4) for block in found] == [1.0, 1.0]


def test_more_rows_are_measured_while_what_they_cost_is_the_same_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wide layers read their weights for as long as two rows compute, and four: lines through such points promised a
    micro-batch of 256 rows in a seventh of its time."""
    plain, runs = module._Bench.run, []

    def run(self: Any, rows: int, *rest: Any) -> list[Any]:
        runs.append(rows)
        seconds = 1.0 + 0.1 * rows
        return [
            replace(found, forward_seconds=seconds, backward_seconds=seconds)
            for found in plain(self, rows, *rest)
        ]

    monkeypatch.setattr(module._Bench, "run", run)
    monkeypatch.setattr(module._Bench, "run_again", lambda self, n, i, t, known, offload: known)
    found = profile_of(chain_of(linear()), (2, 4, 8, 16, 32, 64))
    assert runs == [2, 4, 8, 16, 32]  # 4.2 s are more than one and a half times 2.6 s
    assert found.blocks[0].forward_seconds.at(256) == pytest.approx(26.6)


def test_what_others_do_is_not_counted() -> None:
    """One thread's work is read from its own processor time: a sleep, like another process, takes none of it."""

    class Sleeper(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            return super().forward(x)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = profile_of(chain_of(lambda: Sleeper(WIDE, WIDE)))
    finally:
        torch.set_num_threads(threads)
    assert found.blocks[0].forward_seconds.at(4) < 0.01


class Skipping(nn.Module):
    """Hands on what it was given beside what it makes of it, as a block does whose input a later one needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, 2 * WIDE)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x), x, mask


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDE, WIDE)

    def forward(self, wide: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        return (self.linear(wide) + x) * mask


class PassesOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Skipping(), Joining()])

    def blocks(self) -> list[nn.Module]:
        return list(self.stages)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.stages[1](*self.stages[0](x, mask))


def test_all_boundary_tensors_are_priced() -> None:
    """What was made, what is handed on, and a mask without a gradient."""

    def masked(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.randn(rows, WIDE), torch.ones(rows, WIDE, dtype=torch.int16)), torch.zeros(
            rows, WIDE
        )

    first, second = profile_of(PassesOn, sample=masked).blocks
    row = WIDE * FLOAT
    assert first.input.at(3) == 3 * (row + row // 2)
    assert first.output.at(3) == second.input.at(3) == 3 * (2 * row + row + row // 2)
    assert second.output.at(3) == 3 * row


def test_split_backward_costs_match_hand_computed_ones() -> None:
    """Between the input-gradient and the weight-gradient pass a linear layer holds its input and the gradient of its
    output. The norm's gradients are computed in the input-gradient pass, which frees the saved tensors of norm and
    GELU."""
    found = profile_of(chain_of(linear(), Both, nn.GELU, linear())).blocks
    row = WIDE * FLOAT
    assert found[1].deferred.at(3) == 3 * (row + 2 * row + 2 * row + row)
    assert found[2].deferred.at(3) == 0
    assert found[2].weight_seconds.at(3) == 0
    for block in (found[0], found[1], found[3]):
        assert 0 < block.weight_seconds.at(4) <= block.backward_seconds.at(4)
        assert block.split_work.at(4) > 0
    assert found[1].largest_bytes == 2 * WIDE * WIDE * FLOAT


def test_a_model_that_takes_no_single_row_is_measured_from_two_on() -> None:
    """BatchNorm refuses one row, and the profile began there."""
    found = profile_of(chain_of(linear(), lambda: nn.BatchNorm1d(WIDE), linear()), (1, 2, 4))
    assert found.blocks[1].input.at(3) == 3 * WIDE * FLOAT
