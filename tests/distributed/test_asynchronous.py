"""Asynchronous replicas: each run equals a loop in plain torch that replays which versions its gradients were of."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.common.events import Span, read_events
from parallax.errors import ConfigError, NonFiniteError, PlanError
from parallax.plan.config import PlanConfig
from parallax.runtime.asynchronous import Interval
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint import list_checkpoints
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.ema import Averages
from parallax.runtime.optim.emas.on import EmaOn
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.replicas.asynchronous import Use
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from parallax.train.nodes import events_path
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    POISON,
    SCHEDULE,
    STEPS,
    Case,
    Outcome,
    Weights,
    check_near,
    compare,
    gpt,
    make_batch,
    plain_blocks,
    poisoned,
    same,
    training,
    with_unused,
)
from tests.distributed.test_local_steps import normed, own_rows, torchs
from tests.plans import make_plan
from tests.results import read_metrics

FOUR = ReplicasConfig(mode="asynchronous", staleness=4)
ONE = replace(FOUR, staleness=1)
SIZES = (8, 3, 7, 4, 8, 6, 8, 5)
CASE = Case(gpt(tied=False), sizes=SIZES, together=FOUR)
MEETINGS = 3, 8  # the updates at which all ranks meet


class Late(TensorRows):
    """Rows whose reader waits until ``path`` exists, and makes ``own`` exist."""

    def __init__(self, batch: TensorRows, path: Path | None, own: Path | None) -> None:
        super().__init__(batch.inputs(0, len(batch))[0], batch.targets(0, len(batch)))
        self._path, self._own = path, own
        self.row_numbers = 0  # so that the comparison of rows between ranks does not read them

    def inputs(self, start: int, stop: int) -> tuple[Tensor, ...]:
        if self._own is not None:
            self._own.touch()
        while self._path is not None and not self._path.exists():
            time.sleep(0.005)
        if self._path is not None:
            time.sleep(0.1)  # for replicas that do not wait for this one
        return super().inputs(start, stop)


@dataclass
class Trained:
    outcome: Outcome
    uses: list[Use]
    staleness: dict[int, int]
    stage: int
    state_bytes: int


def asynchronously(case: Case, late: Path | None = None) -> Trained:
    """Train between meetings. With ``late``, replica 1 reads its first rows when another replica has begun the last
    update that the staleness allows."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        batches: list[TensorRows] = list(case.batches())
        if late is not None:
            path = late if engine.mesh.replica == 1 else None
            batches = [Late(each, path, None) for each in batches]
            if path is None:
                begun = case.together.staleness
                batches[begun] = Late(batches[begun], None, late)
        results, uses, reported = [], list[Use](), []
        for stop in MEETINGS if late is None else MEETINGS[-1:]:
            waiting = iter(batches[engine.completed_steps + 1 :])
            interval = Interval(
                stop, partial(next, waiting), lambda: False, lambda *each: reported.append(each)
            )
            results += engine.steps(batches[engine.completed_steps], interval)
            uses += engine._shares.uses
        assert [step for step, _ in reported] == (
            [*range(1, STEPS_HERE + 1)]
            if engine.mesh.replica == 0 and engine.mesh.pipeline_rank == 0
            else []
        )
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        with engine.averaged():
            averages = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        for name, tensor in engine.parameters.items():
            assert torch.equal(tensor, weights[name])
        states = engine.tier_bytes()["the optimizer's states"]
        stage, staleness = engine.mesh.pipeline_rank, engine.staleness
        engine.close()
    figures = [r.loss for r in results], [r.gradient_norm for r in results]
    outcome = Outcome(*figures, weights, averages=averages)
    return Trained(outcome, uses, staleness, stage, states)


STEPS_HERE = len(SIZES)


def replayed(case: Case, found: Sequence[Trained], replicas: int) -> Outcome:
    """Train one copy of the model, with gradients of the versions that the owners of the stages have used."""
    blocks, tensors = plain_blocks(case)
    owners = [each for each in found if each.uses]
    trained = {name: t for name, t in tensors.items() if t.requires_grad}
    matrices = [p for p in trained.values() if p.dim() > 1]
    others = [p for p in trained.values() if p.dim() == 1]
    optimizer = torchs(
        case.optimizer,
        [
            {"params": matrices, "weight_decay": case.optimizer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
    )
    versions: list[Weights] = []
    outcome = Outcome([], [], tensors, averages=dict(tensors))
    averages = Averages(case.ema)
    for update, batch in enumerate(case.batches()):
        versions.append({name: p.detach().clone() for name, p in trained.items()})
        sums: dict[str, Tensor] = {}
        losses = 0.0
        for part in range(replicas):
            for owner in owners:
                (use,) = (u for u in owner.uses if u.share == (update, part))
                for name in owner.outcome.weights.keys() & trained.keys():
                    trained[name].data.copy_(versions[use.version][name])
            rows = own_rows(batch, replicas, [part])
            if rows is None:
                continue
            (x,) = rows.inputs(0, len(rows))
            for block in blocks:
                x = block(x)
            loss = case.loss(x, rows.targets(0, len(rows))) * len(rows) / len(batch)
            optimizer.zero_grad()
            loss.backward()
            losses += loss.item()
            for name, p in trained.items():
                if p.grad is not None:
                    known = sums.get(name)
                    sums[name] = p.grad.clone() if known is None else known + p.grad
        for name, p in trained.items():
            p.data.copy_(versions[-1][name])
            p.grad = sums.get(name)
        outcome.losses.append(losses)
        outcome.norms.append(
            float(nn.utils.clip_grad_norm_([*trained.values()], case.optimizer.clip_norm))
        )
        for group in optimizer.param_groups:
            group["lr"] = case.optimizer.lr * SCHEDULE.factor(update, STEPS)
        optimizer.step()
        share = averages.share(update + 1)
        for name, p in trained.items() if share else ():
            outcome.averages[name] = torch.lerp(outcome.averages[name].detach(), p.detach(), share)
    return outcome


def check(found: Sequence[Trained], case: Case, replicas: int) -> None:
    stages = {each.stage for each in found}
    owners = [each for each in found if each.uses]
    assert {each.stage for each in owners} == stages
    assert len(owners) == len(stages)
    for each in owners:
        shares = Counter(use.share for use in each.uses)
        assert shares == Counter((u, p) for u in range(STEPS_HERE) for p in range(replicas))
        assert all(0 <= use.staleness <= case.together.staleness for use in each.uses)
    for each in found:
        assert sum(each.staleness.values()) == len(stages) * STEPS_HERE * replicas
        assert max(each.staleness) <= case.together.staleness
        assert (each.state_bytes > 0) == bool(each.uses)
    expected = replayed(case, found, replicas)
    compare([each.outcome for each in found], expected, 1e-9)
    for each in found:
        check_near(each.outcome.averages, expected.averages, 1e-9)


PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": (2,)},
    "stages": {"replicas": (2, 2)},
    "three replicas": {"replicas": (3,)},
    "virtual stages": {"replicas": (2, 2), "schedule": "interleaved", "interleave": 2},
    "split backward": {"replicas": (2, 2), "schedule": "zb-h1"},
    "states on the host": {"replicas": (2,), "optimizer_offload": 0.5, "tier": "host"},
    "states on disk": {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", [ONE, FOUR], ids=["1", "4"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_is_its_replay_in_plain_torch(pool: Pool, plan: str, rule: ReplicasConfig) -> None:
    case = replace(CASE, together=rule).under(**PLANS[plan])
    check(pool.run(asynchronously, case.world, case), case, PLANS[plan]["replicas"][0])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("factory", "optimizer"),
    [
        (gpt(tied=True), AdamWConfig(lr=3e-3, clip_norm=0.5)),
        (gpt(tied=False), SGDConfig(lr=0.1, momentum=0.9, clip_norm=0.5)),
        (with_unused, AdamWConfig(lr=3e-3, clip_norm=0.5)),
    ],
    ids=["adamw-tied", "sgd", "adamw-unused"],
)
def test_models_and_optimizers(
    pool: Pool, factory: Callable[[], nn.Module], optimizer: OptimizerConfig
) -> None:
    case = replace(CASE, factory=factory, optimizer=optimizer).under((2,))
    check(pool.run(asynchronously, 2, case), case, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("plan", ["three replicas", "stages", "states on disk"])
@pytest.mark.parametrize("factory", [gpt(tied=False), with_unused], ids=["gpt", "unused"])
def test_all_replicas_have_the_averages_of_the_owner(
    pool: Pool, plan: str, factory: Callable[[], nn.Module]
) -> None:
    case = replace(CASE, factory=factory, ema=EmaOn(decay=0.8)).under(**PLANS[plan])
    found = pool.run(asynchronously, case.world, case)
    check(found, case, PLANS[plan]["replicas"][0])
    for each in found:
        changed = [
            n for n, t in each.outcome.averages.items() if not t.equal(each.outcome.weights[n])
        ]
        assert changed


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [ONE, FOUR], ids=["1", "4"])
@pytest.mark.parametrize("replicas", [(2,), (2, 2)], ids=str)
def test_a_late_replica_is_waited_for_at_the_bound(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], rule: ReplicasConfig
) -> None:
    case = replace(CASE, together=rule, sizes=(8,) * STEPS_HERE).under(replicas)
    found = pool.run(asynchronously, case.world, case, tmp_path / "begun")
    check(found, case, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "optimizer", [AdamWConfig(lr=3e-3), SGDConfig(lr=0.1)], ids=["adamw", "sgd"]
)
def test_without_staleness_replicas_are_synchronous(
    pool: Pool, replicas: tuple[int, ...], optimizer: OptimizerConfig
) -> None:
    case = replace(CASE, optimizer=optimizer, together=replace(FOUR, staleness=0)).under(replicas)
    usual = replace(case, together=ReplicasConfig())
    same(pool.run(training, case.world, case), pool.run(training, case.world, usual))


def test_one_replica_trains_as_ever(pool: Pool) -> None:
    case = CASE.under((1, 1))
    usual = replace(case, together=ReplicasConfig())
    same(pool.run(training, 2, case), pool.run(training, 2, usual))


def weights_after(case: Case, folder: Path, steps: int, saves: bool) -> Weights:
    """Load the last checkpoint if there is one, train, and save. Return the weights."""
    engine = case.engine(folder)
    paths, _ = engine.checkpoints(folder / "checkpoints")
    if paths:
        assert engine.load(paths[-1]) == {"mine": 1}
    done = engine.completed_steps
    for batch in case.batches()[done : done + steps]:
        engine.step(batch)
    if saves:
        engine.save(folder / "checkpoints", {"mine": 1})
    found = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    engine.close()
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("saved", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("replicas", [(1,), (3,), (2, 2), (1, 2)], ids=str)
def test_a_run_resumes_under_another_plan(
    pool: Pool, tmp_path: Path, saved: tuple[int, ...], replicas: tuple[int, ...]
) -> None:
    """With all states: one update of an interval has no stale gradients, so the next step is the same everywhere."""
    case = CASE.under(saved)
    expected = pool.run(weights_after, case.world, case, tmp_path, 4, True)
    usual = replace(case, together=ReplicasConfig())
    for other in (usual.under((1,)), usual.under(replicas), case.under(replicas)):
        if len(set(other.options["replicas"])) > 1 and other.together is FOUR:
            continue
        loaded = pool.run(weights_after, other.world, other, tmp_path, 0, False)
        for found in loaded:
            assert all(torch.equal(tensor, _in(expected, name)) for name, tensor in found.items())
    further = pool.run(weights_after, case.world, case, tmp_path, 1, False)
    plain = pool.run(weights_after, 1, usual.under((1,)), tmp_path, 1, False)
    for mine in further:
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, plain[0][name], rtol=1e-9, atol=1e-12)
            assert not torch.equal(tensor, _in(expected, name)) or not tensor.is_floating_point()


def _in(found: Sequence[Weights], name: str) -> Tensor:
    return next(each[name] for each in found if name in each)


def with_poison(case: Case) -> tuple[str, list[str]]:
    """Train on a batch whose loss is not finite; the error, and why steps were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        batches = [make_batch(8, step) for step in range(STEPS_HERE)]
        batches[3].targets(0, 8)[2] = POISON
        waiting = iter(batches[1:])
        interval = Interval(STEPS_HERE, partial(next, waiting), lambda: False, lambda *_: None)
        try:
            results = engine.steps(batches[0], interval)
        except NonFiniteError as error:
            return str(error), []
        finally:
            engine.close()
        assert all(bool(torch.isfinite(t).all()) for t in engine.parameters.values())
    return "", [result.trouble for result in results]


@pytest.mark.parametrize("replicas", [(2,), (2, 2)], ids=str)
def test_an_update_that_is_not_finite(pool: Pool, replicas: tuple[int, ...]) -> None:
    case = replace(CASE, loss=poisoned).under(replicas)
    for text, _ in pool.run(with_poison, case.world, case):
        assert text.startswith("step 3: loss nan")
        assert "lower optimizer.lr" in text
    for text, troubles in pool.run(with_poison, case.world, replace(case, skips=2)):
        assert text == ""
        assert [bool(trouble) for trouble in troubles] == [step == 3 for step in range(STEPS_HERE)]
        assert "loss nan" in troubles[3]


def ended_early(case: Case) -> list[int]:
    """How many updates two intervals have: until the rows end, and until a rank of another replica asks for the end."""
    with tempfile.TemporaryDirectory() as folder:
        engine, taken = case.engine(folder), []
        asks = engine.mesh.replica > 0 and engine.mesh.is_last
        for rows, ends in ((3, False), (10**6, asks)):
            place = iter(range(engine.completed_steps + 1, rows))

            def fetch(place: Iterator[int] = place) -> TensorRows | None:
                return next((make_batch(8, step) for step in place), None)

            interval = Interval(10**6, fetch, partial(bool, ends), lambda *_: None)
            batch = make_batch(8, engine.completed_steps)
            taken.append(len(engine.steps(batch, interval)))
        engine.close()
    return taken


@pytest.mark.parametrize("replicas", [(2,), (2, 2)], ids=str)
def test_intervals_end_with_the_rows_and_on_request(pool: Pool, replicas: tuple[int, ...]) -> None:
    case = CASE.under(replicas)
    taken = pool.run(ended_early, case.world, case)
    assert all(each == taken[0] for each in taken)
    rows, requested = taken[0]
    assert rows == 3
    assert requested > 0


def looped(case: Case, folder: Path, rows: int) -> tuple[dict[str, Any], list[str]]:
    """Return the summary of a training loop over ``rows`` batches, and the checkpoints."""
    engine = case.engine(folder)
    trainer = TrainerConfig(steps=9, global_batch=8, eval_every=3, checkpoint_every=4)
    logger = LoggerConfig(to=[], events=True)
    summary = train(engine, Batches(rows), trainer, logger, folder, tokens_per_row=1)
    engine.close()
    return summary, [each.name for each in list_checkpoints(folder / "checkpoints")]


class Batches:
    """A source of ``count`` batches."""

    def __init__(self, count: int) -> None:
        self._count, self._taken = count, 0

    def batch(self, rows: int) -> TensorRows:
        if self._taken == self._count:
            raise StopIteration
        self._taken += 1
        return make_batch(rows, self._taken)

    def validation(self, index: int, rows: int) -> TensorRows:
        if index:
            raise StopIteration
        return make_batch(rows, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]


@pytest.mark.parametrize("replicas", [(2,), (2, 2)], ids=str)
def test_a_loop_reports_each_update_once(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...]
) -> None:
    case = CASE.under(replicas)
    for summary, saved in pool.run(looped, case.world, case, tmp_path, 5):
        assert (summary["ended"], summary["steps"]) == ("rows", 5)
        assert saved[-1] == "step-00000005"
        assert sum(summary["staleness"].values()) == 5 * case.world
        assert max(summary["staleness"]) <= FOUR.staleness
    for summary, saved in pool.run(looped, case.world, case, tmp_path, 99):
        assert (summary["ended"], summary["steps"]) == ("steps", 9)
        assert saved[-1] == "step-00000009"
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [each["step"] for each in metrics if "loss" in each] == [*range(1, 10)]
    assert [each["step"] for each in metrics if "validation_loss" in each] == [3, 5, 6, 9]
    shares = [(span.step, span.kind) for r in range(case.world) for span in spans_of(tmp_path, r)]
    forwards = Counter(step for step, kind in shares if kind == "forward")
    assert forwards == Counter(dict.fromkeys(range(9), 4 * case.world))


def spans_of(folder: Path, rank: int) -> list[Span]:
    return [*read_events(events_path(folder, rank))]


def statistics(case: Case) -> list[Weights]:
    with tempfile.TemporaryDirectory() as folder:
        engine, found = case.engine(folder), []
        for batch in case.batches():
            engine.step(batch)
            found.append({n: t.clone() for n, t in engine.parameters.items() if "running" in n})
        engine.close()
    return found


def refused(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ConfigError) as error:
        case.engine(folder)
    return str(error.value)


def test_statistics_of_batches_are_averaged_at_meetings(pool: Pool) -> None:
    case = replace(CASE, factory=normed, sizes=(8,) * 4).under((2,), microbatch=8)
    for text in pool.run(refused, 2, replace(case, skips=1)):
        assert "use replicas.batchnorm=frozen" in text
    first, second = pool.run(statistics, 2, case)
    for mine, others in zip(first, second, strict=True):
        assert mine
        assert all(torch.equal(tensor, others[name]) for name, tensor in mine.items())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"staleness": 2}, "use replicas=asynchronous"),
        ({"mode": "asynchronous", "staleness": -1}, "replicas.staleness"),
        ({"mode": "asynchronous", "staleness": 1, "sync_every": 10}, "replicas=local"),
        ({"mode": "asynchronous", "staleness": 1, "compress": "bf16"}, "replicas.compress=none"),
        ({"mode": "asynchronous", "staleness": 1, "batchnorm": "sync"}, "batchnorm=replica"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        ReplicasConfig(**settings)


def test_plans_and_settings_that_cannot_run_are_refused() -> None:
    for config, way_out in (
        (PlanConfig(replicas=[1, 3]), r"plan\.replicas=2, or"),
        (PlanConfig(shard="optimizer"), r"plan\.shard=none"),
        (PlanConfig(parameters="host"), r"plan\.parameters=device"),
    ):
        with pytest.raises(ConfigError, match=way_out):
            FOUR.check_requested(config)
    for setting, way_out in (
        ("gather_loss", "trainer.gather_loss=false"),
        ("delays", "trainer.updates=synchronous"),
        ("scales", "precision=bf16 precision.loss_scale=auto"),
    ):
        given = dict.fromkeys(("gather_loss", "delays", "scales"), False)
        with pytest.raises(ConfigError, match=way_out):
            FOUR.check_beside(**{**given, setting: True})
        replace(FOUR, staleness=0).check_beside(**{**given, "scales": True})
    chain = CASE.chain()
    streamed = {"optimizer_offload": 1.0, "parameter_offload": 0.5, "tier": "host"}
    for options in ({"replicas": (1, 2)}, {"replicas": (2,), **streamed}):
        with pytest.raises(PlanError, match="plan again"):
            make_plan(chain, staleness=2, **options)
    for planned in (0, 1):
        with pytest.raises(PlanError, match="plan again with these settings"):
            FOUR.check(make_plan(chain, replicas=(2,), staleness=planned))
