"""Local steps: every plan equals a loop over replicas in plain torch, and rounds end where they should, also when a run
resumes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.errors import ConfigError, ParallaxError, PlanError
from parallax.plan.config import PlanConfig
from parallax.plan.rows import micro_batch_count, micro_batch_rows, replica_rows
from parallax.runtime.batch import TensorRows
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.replicas.config import ReplicasConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    SCHEDULE,
    STEPS,
    Case,
    Outcome,
    Weights,
    compare,
    gpt,
    plain_blocks,
    plain_training,
    same,
    training,
    with_unused,
)
from tests.plans import make_plan

LOCAL = ReplicasConfig(mode="local", sync_every=2)
DILOCO = replace(LOCAL, outer_lr=0.7, outer_momentum=0.9)
SIZES = (8, 3, 7, 4, 8, 6, 8, 5, 7)
CASE = Case(gpt(tied=False), sizes=(8, 3, 7, 4, 8, 6), together=DILOCO)
PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": (2,)},
    "stages": {"replicas": (2, 2)},
    "one replica": {"replicas": (1, 1)},
    "more replicas than rows": {"replicas": (3,)},
    "virtual stages": {"replicas": (2, 2), "schedule": "interleaved", "interleave": 2},
    "split backward": {"replicas": (2, 2), "schedule": "zb-h1"},
    "states on the host": {"replicas": (2,), "optimizer_offload": 0.5, "tier": "host"},
    "states on disk": {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"},
    "streamed": {
        "replicas": (2,),
        "optimizer_offload": 1.0,
        "parameter_offload": 0.5,
        "tier": "host",
    },
}


def own_rows(batch: TensorRows, replicas: int, mine: Sequence[int]) -> TensorRows | None:
    """The rows of the replicas ``mine``, of all micro-batches of two rows."""
    count, rows = micro_batch_count(len(batch), 2), []
    for micro in range(count):
        first, stop = micro_batch_rows(len(batch), count, micro)
        for replica in mine:
            low, high = replica_rows(stop - first, replicas, replica)
            rows += range(first + low, first + high)
    if not rows:
        return None
    (inputs,) = batch.inputs(0, len(batch))
    return TensorRows(inputs[rows], batch.targets(0, len(batch))[rows])


def torchs(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return config.create([{**group} for group in groups])


def plain_rounds(
    case: Case,
    replicas: int,
    after: Callable[[int, list[list[Tensor]]], None] = lambda step, trained: None,
) -> Outcome:
    """Train copies of the model by local steps, each with its own optimizer, and an outer SGD of torch. ``after`` gets
    the number of each step and the weights of all copies after it."""
    groups = case.together.local_groups or replicas
    copies = [plain_blocks(case) for _ in range(groups)]
    each = replicas // groups
    trained = [[t for t in found.values() if t.requires_grad] for _, found in copies]
    optimizers = [
        torchs(
            case.optimizer,
            [
                {
                    "params": [p for p in mine if p.dim() > 1],
                    "weight_decay": case.optimizer.weight_decay,
                },
                {"params": [p for p in mine if p.dim() == 1], "weight_decay": 0.0},
            ],
        )
        for mine in trained
    ]
    together, outcome = case.together, Outcome([], [], copies[0][1])
    fragments = [
        PlainFragment(together, columns) for columns in divided(trained, together.fragments)
    ]
    for step, batch in enumerate(case.batches()):
        losses, squares = 0.0, 0.0
        for group, ((blocks, _), mine) in enumerate(zip(copies, trained)):
            optimizers[group].zero_grad(set_to_none=False)
            rows = own_rows(batch, replicas, range(group * each, (group + 1) * each))
            if rows is not None:
                (x,) = rows.inputs(0, len(rows))
                for block in blocks:
                    x = block(x)
                share = len(rows) / len(batch)
                loss = case.loss(x, rows.targets(0, len(rows))) * share
                (loss * groups).backward()
                losses += loss.item()
            norm = float(nn.utils.clip_grad_norm_(mine, case.optimizer.clip_norm))
            squares += norm * norm / groups
            for settings in optimizers[group].param_groups:
                settings["lr"] = case.optimizer.lr * SCHEDULE.factor(step, STEPS)
            optimizers[group].step()
        outcome.losses.append(losses)
        outcome.norms.append(squares**0.5)
        for number, fragment in enumerate(fragments, start=1):
            fragment.stepped(step + 1 - number * together.sync_every // together.fragments)
        for fragment in fragments if step + 1 == len(case.sizes) else ():
            fragment.end()
        after(step + 1, trained)
    return outcome


def divided(trained: list[list[Tensor]], count: int) -> list[list[tuple[Tensor, ...]]]:
    """The parameters of all copies, column by column, each in the fragment that had the fewest elements."""
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in range(count)]
    for column in zip(*trained):
        min(found, key=lambda each: sum(c[0].numel() for c in each)).append(column)
    return found


class PlainFragment:
    """Some parameters, in each copy of the model, and their outer optimizer."""

    def __init__(self, together: ReplicasConfig, columns: list[tuple[Tensor, ...]]) -> None:
        self.columns, self.together = columns, together
        self.start = [nn.Parameter(column[0].detach().clone()) for column in columns]
        self.begun: list[list[Tensor]] = []
        self.late = 0
        self.outer = torch.optim.SGD(
            self.start,
            lr=together.outer_lr,
            momentum=together.outer_momentum,
            nesterov=together.outer_momentum > 0,
        )

    def stepped(self, past: int) -> None:
        self.late += 1
        if past % self.together.sync_every == 0:
            self.begin()
        if self.begun and self.late == self.together.fragment_delay:
            self.finish()

    def end(self) -> None:
        if self.begun:
            self.finish()
        if self.late:
            self.begin()
            self.finish()

    @torch.no_grad()
    def begin(self) -> None:
        self.late = 0
        self.begun = [[copy.clone() for copy in column] for column in self.columns]
        for parameter, copies in zip(self.start, self.begun):
            parameter.grad = parameter - torch.stack(copies).mean(0)

    @torch.no_grad()
    def finish(self) -> None:
        self.outer.step()
        for parameter, column, begun in zip(self.start, self.columns, self.begun):
            for copy, before in zip(column, begun):
                copy.add_(parameter - before)
        self.begun = []


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [DILOCO, LOCAL], ids=["diloco", "local"])
@pytest.mark.parametrize("plan", PLANS)
def test_local_steps_are_those_of_plain_torch(pool: Pool, plan: str, rule: ReplicasConfig) -> None:
    case = replace(CASE, together=rule).under(**PLANS[plan])
    expected = plain_rounds(case, PLANS[plan]["replicas"][0])
    compare(pool.run(training, case.world, case), expected, 1e-9)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "lengths", [(3, 2, 0), (3, 2, 1), (3, 3, 2), (4, 3, 0), (4, 2, 3), (2, 1, 1)]
)
@pytest.mark.parametrize("rule", [DILOCO, LOCAL], ids=["diloco", "local"])
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (2,)},
        {"replicas": (2, 2)},
        {"replicas": (2,), "optimizer_offload": 0.5, "tier": "host"},
        {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"},
        {"replicas": (2,), "optimizer_offload": 1.0, "parameter_offload": 0.5, "tier": "host"},
        {"replicas": (4,), "shard": True, "groups": 2},
    ],
    ids=str,
)
def test_fragments_are_those_of_plain_torch(
    pool: Pool, options: dict[str, Any], rule: ReplicasConfig, lengths: tuple[int, int, int]
) -> None:
    """Rounds of some steps, in some fragments, whose exchange takes some steps."""
    every, fragments, delay = lengths
    options = dict(options)
    rule = replace(
        rule,
        sync_every=every,
        fragments=fragments,
        fragment_delay=delay,
        groups=options.pop("groups", "auto"),
    )
    case = replace(CASE, factory=gpt(tied=True), sizes=SIZES, together=rule).under(**options)
    compare(pool.run(training, case.world, case), plain_rounds(case, options["replicas"][0]), 1e-9)


@pytest.mark.parametrize("rule", [DILOCO, LOCAL], ids=["diloco", "local"])
def test_fragments_exchanged_together_equal_none(
    pool: Pool, tmp_path: Path, rule: ReplicasConfig
) -> None:
    """The round ends before the first fragment is due, so all are exchanged after the same step."""
    case = replace(CASE, together=replace(rule, sync_every=60)).under((2, 2))
    expected = pool.run(weights_of, 4, case, tmp_path, 0, 6, False)
    for fragments in (2, 3):
        divided = replace(case, together=replace(case.together, fragments=fragments))
        for mine, theirs in zip(pool.run(weights_of, 4, divided, tmp_path, 0, 6, False), expected):
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.sampled
@pytest.mark.parametrize("factory", [gpt(tied=True), gpt(tied=False)], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("groups", "options"),
    [
        (1, {"replicas": (2,)}),
        (2, {"replicas": (4,)}),
        (2, {"replicas": (4,), "shard": True}),
        (2, {"replicas": (4,), "optimizer_offload": 0.5, "tier": "host"}),
        (2, {"replicas": (4,), "optimizer_offload": 1.0, "parameter_offload": 1.0, "tier": "disk"}),
        (1, {"replicas": (2, 2), "schedule": "zb-h1"}),
        (3, {"replicas": (3,)}),
    ],
    ids=str,
)
def test_groups_sum_their_gradients(
    pool: Pool, groups: int, options: dict[str, Any], factory: Callable[[], nn.Module]
) -> None:
    case = replace(CASE, factory=factory, together=replace(DILOCO, groups=groups)).under(**options)
    compare(pool.run(training, case.world, case), plain_rounds(case, options["replicas"][0]), 1e-9)


# Lion steps by the sign of gradients, which for some biases of attention are rounding errors.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("factory", "optimizer"),
    [
        (gpt(tied=True), AdamWConfig(lr=3e-3, clip_norm=0.5)),
        (gpt(tied=True), SGDConfig(lr=0.01, clip_norm=0.5)),
        (with_unused, AdamWConfig(lr=3e-3, clip_norm=0.5)),
        (with_unused, LionConfig(lr=1e-4)),
    ],
    ids=["adamw-tied", "sgd-tied", "adamw-unused", "lion-unused"],
)
def test_models_and_optimizers(
    pool: Pool, factory: Callable[[], nn.Module], optimizer: OptimizerConfig
) -> None:
    case = replace(CASE, factory=factory, optimizer=optimizer).under((2, 2))
    compare(pool.run(training, 4, case), plain_rounds(case, 2), 1e-9)


def test_a_round_of_one_step_of_sgd_is_data_parallelism(pool: Pool) -> None:
    usual = SGDConfig(lr=0.1, momentum=0.9, clip_norm=0.0)
    exact = replace(CASE, optimizer=usual, together=ReplicasConfig()).under((2, 2))
    expected = pool.run(training, 4, exact)
    for rule in (
        replace(LOCAL, sync_every=1),
        replace(LOCAL, sync_every=1, outer_lr=1 - 1e-16),
    ):
        found = pool.run(training, 4, replace(exact, together=rule))
        for mine, theirs in zip(found, expected):
            assert mine.losses == pytest.approx(theirs.losses, rel=1e-12)
            for name, tensor in mine.weights.items():
                torch.testing.assert_close(tensor, theirs.weights[name], rtol=1e-10, atol=1e-12)


def test_one_replica_with_an_outer_rate_of_one_trains_as_ever(pool: Pool) -> None:
    case = replace(CASE, together=LOCAL).under((1, 1))
    usual = replace(case, together=ReplicasConfig())
    same(pool.run(training, 2, case), pool.run(training, 2, usual))


def test_replicas_exchange_nothing_within_a_round(pool: Pool) -> None:
    case = CASE.under((2,))
    for compress, size in (("none", 8), ("bf16", 2), ("fp16", 2)):
        rule = replace(DILOCO, outer_compress=compress)
        for sent, numbers, all_reduces, differs in pool.run(
            exchanging, 2, replace(case, together=rule)
        ):
            assert all_reduces == 0
            assert differs == [True, False] * 3
            assert sent == 3 * numbers * size
        divided = replace(rule, fragments=2, fragment_delay=1)
        for sent, numbers, all_reduces, differs in pool.run(
            exchanging, 2, replace(case, together=divided)
        ):
            assert all_reduces == 0
            assert all(differs)
            assert sent == 3 * numbers * size


def exchanging(case: Case, *_: Any) -> tuple[int, int, int, list[bool]]:
    """Bytes sent, weights, gradient reductions; after each step, whether replicas have different weights."""
    with tempfile.TemporaryDirectory() as folder:
        engine, differs = case.engine(folder), []
        for batch in case.batches():
            engine.step(batch)
            total = torch.stack([p.detach().double().sum() for p in engine.parameters.values()])
            both = [torch.empty_like(total) for _ in range(2)]
            dist.all_gather(both, total)
            differs.append(not torch.equal(*both))
        numbers = sum(p.numel() for p in engine.parameters.values())
        found = engine.synced_bytes, numbers, engine.all_reduces, differs
        engine.close()
    return found


def under_way(case: Case) -> list[int]:
    """The bytes that exchanges hold after each step."""
    with tempfile.TemporaryDirectory() as folder:
        engine, found = case.engine(folder), []
        state: dict[Any, Any] = engine._optimizer._on_device.optimizer.state
        for batch in case.batches():
            engine.step(batch)
            runs = [run for runs in state.get("exchanges_under_way", {}).values() for run in runs]
            found.append(sum(run.flat.nbytes + run.weights.nbytes for run in runs))
        engine.end_round()
        engine.close()
    return found


@pytest.mark.parametrize("rule", [DILOCO, LOCAL], ids=["diloco", "local"])
def test_an_exchange_under_way_holds_two_copies_of_its_fragment(
    pool: Pool, rule: ReplicasConfig
) -> None:
    rule = replace(rule, sync_every=4, fragments=2, fragment_delay=1)
    case = replace(CASE, together=rule).under((2,))
    trained = [t for t in plain_blocks(case)[1].values() if t.requires_grad]
    first, second = (2 * sum(t.nbytes for (t,) in fragment) for fragment in divided([trained], 2))
    for found in pool.run(under_way, 2, case):
        assert found == [0, first, 0, second, 0, first]


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 16), nn.Flatten(), nn.BatchNorm1d(256), nn.Linear(256, 1024), Unflatten()
    )


class Unflatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 16, 64)


def statistics(case: Case) -> list[Weights]:
    """The statistics of BatchNorms after each step."""
    with tempfile.TemporaryDirectory() as folder:
        engine, found = case.engine(folder), []
        for batch in case.batches():
            engine.step(batch)
            known = {n: t.clone() for n, t in engine.parameters.items() if "running" in n}
            found.append(known)
        engine.close()
    return found


@pytest.mark.parametrize("groups", ["auto", 2])
def test_statistics_of_batches_are_averaged_with_the_weights(pool: Pool, groups: Any) -> None:
    rule = replace(DILOCO, groups=groups)
    case = replace(CASE, factory=normed, sizes=(8,) * 4, together=rule).under((4,), microbatch=8)
    first, *others = pool.run(statistics, 4, case)
    for step, mine in enumerate(first):
        equal = [all(torch.equal(mine[n], other[step][n]) for n in mine) for other in others]
        assert all(equal) if step % 2 else not any(equal)


def weights_of(case: Case, folder: Path, start: int, steps: int, saves: bool) -> Weights:
    """Load the last checkpoint if there is one, train, and save or return the weights."""
    engine = case.engine(folder)
    paths, _ = engine.checkpoints(folder / "checkpoints")
    if start:
        engine.load(paths[-1])
    for batch in case.batches()[start : start + steps]:
        engine.step(batch)
    if saves:
        engine.save(folder / "checkpoints", {})
    else:
        engine.end_round()
    found = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    engine.close()
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (2, 2)},
        {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"},
        {"replicas": (4,), "shard": True, "groups": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_resumed_run_goes_on_bit_for_bit(
    pool: Pool, tmp_path: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    options = dict(options)
    groups = options.pop("groups", "auto")
    case = replace(CASE, dtype=dtype, together=replace(DILOCO, groups=groups)).under(**options)
    expected = pool.run(weights_of, 4, case, tmp_path / "whole", 0, 6, False)
    pool.run(weights_of, 4, case, tmp_path, 0, 4, True)
    found = pool.run(weights_of, 4, case, tmp_path, 4, 2, False)
    for mine, theirs in zip(found, expected):
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def reloaded(case: Case, folder: Path) -> tuple[Weights, Weights]:
    """Save after four steps, and return the weights after two more steps, twice: the second time after loading."""
    engine, batches, found = case.engine(folder), case.batches(), []
    for batch in batches[:4]:
        engine.step(batch)
    engine.end_round()
    path = engine.save(folder / "checkpoints", {})
    for last in (engine.end_round, lambda: engine.load(path), engine.end_round):
        for batch in batches[4:6]:
            engine.step(batch)
        last()
        found.append({n: tensor.detach().clone() for n, tensor in engine.parameters.items()})
    engine.close()
    return found[0], found[2]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [{"replicas": (2, 2)}, {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"}],
    ids=str,
)
def test_a_run_resumes_with_exchanges_under_way(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Saving ends the exchange of one fragment, and loading drops that of another."""
    rule = replace(DILOCO, sync_every=4, fragments=2, fragment_delay=1)
    case = replace(CASE, together=rule).under(**options)
    found = pool.run(reloaded, 4, case, tmp_path)
    resumed = pool.run(weights_of, 4, case, tmp_path, 4, 2, False)
    for (saved, loaded), weights in zip(found, resumed):
        for name, tensor in weights.items():
            assert torch.equal(tensor, saved[name]), name
            assert torch.equal(tensor, loaded[name]), name


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [(1,), (3,), (1, 1)], ids=str)
@pytest.mark.parametrize("rule", [DILOCO, ReplicasConfig()], ids=["local", "synchronous"])
def test_a_run_resumes_with_other_replicas(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], rule: ReplicasConfig
) -> None:
    saved = pool.run(weights_of, 2, CASE.under((2,)), tmp_path, 0, 4, True)
    case = replace(CASE, together=rule).under(replicas)
    loaded = pool.run(weights_of, case.world, case, tmp_path, 4, 0, False)
    for found in loaded:
        assert all(torch.equal(tensor, saved[0][name]) for name, tensor in found.items())
    for found in pool.run(weights_of, case.world, case, tmp_path, 4, 2, False):
        assert not any(torch.equal(tensor, saved[0][name]) for name, tensor in found.items())


def within_a_round(case: Case, folder: Path) -> list[str]:
    engine = case.engine(folder)
    batch = case.batches()[0]
    engine.step(batch)
    found = []
    for call in (
        partial(engine.evaluate, batch),
        partial(engine.predict, batch),
        partial(engine.save, folder / "checkpoints", {}),
    ):
        with pytest.raises(ParallaxError) as error:
            call()
        found.append(str(error.value))
    engine.end_round()
    engine.evaluate(batch)
    engine.close()
    return found


def test_nothing_is_read_within_a_round(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(within_a_round, 2, CASE.under((2,)), tmp_path):
        assert all("engine.end_round()" in text for text in texts)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"mode": "global"}, "accepted"),
        ({"sync_every": 10}, "use replicas=local"),
        ({"outer_momentum": 0.5}, "use replicas=local"),
        ({"mode": "local", "sync_every": 0}, "sync_every"),
        ({"fragments": 2}, "use replicas=local"),
        ({"mode": "local", "fragments": 51}, "at most 50 in rounds of 50 steps"),
        ({"mode": "local", "fragment_delay": 50}, "at most 49 in rounds of 50 steps"),
        ({"mode": "local", "outer_momentum": 1.0}, "outer_momentum"),
        ({"mode": "local", "compress": "bf16"}, "outer_compress=bf16"),
        ({"mode": "local", "batchnorm": "sync"}, "batchnorm=replica"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        ReplicasConfig(**settings)


def test_plans_that_local_steps_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.replicas=2, or"):
        DILOCO.check_requested(PlanConfig(replicas=[1, 3]))
    with pytest.raises(ConfigError, match=r"plan\.shard=none"):
        DILOCO.check_requested(PlanConfig(shard="optimizer"))
    chain = CASE.chain()
    for options in ({"replicas": (1, 2)}, {"replicas": (2,), "shard": True}):
        with pytest.raises(PlanError, match="plan again"):
            make_plan(chain, local_steps=2, **options)
    with pytest.raises(PlanError, match="rounds of 2 local steps"):
        DILOCO.check(make_plan(chain, replicas=(2,)))
    delayed = replace(DILOCO, fragments=2, fragment_delay=1)
    with pytest.raises(PlanError, match=r"fragments=2, and.*fragments=2, fragment_delay=1"):
        delayed.check(make_plan(chain, replicas=(2,), local_steps=2, fragments=2))
    with pytest.raises(PlanError, match="gradients summed in every step"):
        ReplicasConfig().check(make_plan(chain, replicas=(2,), local_steps=2))
    for changed, way_out in (
        ({"gather_loss": True}, "replicas=default"),
        ({"delays": True}, "trainer.updates=synchronous"),
    ):
        with pytest.raises(ConfigError, match=way_out):
            DILOCO.check_beside(**{"gather_loss": False, "delays": False, **changed})


def test_the_first_loss_is_that_of_synchronous_training(pool: Pool) -> None:
    """Up to the first step, and the loss of a step is of the rows of all replicas."""
    case = CASE.under((2,))
    assert pool.run(training, 2, case)[0].losses[0] == pytest.approx(
        plain_training(case).losses[0], rel=1e-12
    )
