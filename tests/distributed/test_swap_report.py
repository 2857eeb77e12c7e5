"""A run of several ranks tells what the swap of each did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallax import cli
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.plan.plan import Directive
from parallax.report.occupancy import Occupancy
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.results import read_metrics

MINIMUM = 2048  # bytes: some activations of this model are smaller, some larger


class Rows:
    """Every batch alike."""

    def batch(self, rows: int) -> TensorRows:
        tokens = torch.arange(rows * 16).reshape(rows, 16) % 64
        return TensorRows(tokens, tokens)

    def validation(self, index: int, rows: int) -> TensorRows:
        return self.batch(rows)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert not state


def looping(folder: Path) -> None:
    """Two stages, the first on two replicas; only the first offloads."""
    model = GPTConfig(layers=2, hidden=32, heads=2, vocabulary=64, sequence=16)
    chain = describe(model.build)
    plan = make_plan(chain, replicas=(2, 1), directive="offload", global_batch=8, microbatch=4)
    last = replace(plan.stages[1], directives=(Directive.KEEP,) * len(plan.stages[1].directives))
    plan = replace(plan, stages=(plan.stages[0], last))
    if not torch.distributed.get_rank():
        plan.save(folder / "plan.yaml")
    swap = SwapConfig(tier="disk", minimum_bytes=MINIMUM)
    engine = Engine.build(chain, plan, loss=GPT.loss, swap=swap, scratch=folder / "swap")
    trainer = TrainerConfig(
        steps=3, global_batch=8, eval_every=0, eval_batches=1, checkpoint_every=0
    )
    try:
        train(
            engine,
            Rows(),
            trainer,
            LoggerConfig(to=[], events=False),
            folder,
            tokens_per_row=16,
        )
    finally:
        engine.close()


def test_each_rank_tells_of_its_own_swap(
    pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool.run(looping, 3, tmp_path)
    ranks = json.loads((tmp_path / "summary.json").read_text())["ranks"]
    assert [bool(rank["swap"]) for rank in ranks] == [True, True, False]
    for rank in ranks[:2]:
        decisions = rank["swap"]["last_step"]["decisions"]
        assert {
            "moved",
            "parameter or buffer",
            "smaller than swap.minimum_bytes",
        } <= decisions.keys()
        assert Occupancy.load(tmp_path, rank["rank"]).replica == rank["replica"]
    assert {path.name for path in tmp_path.glob("swap-rank*")} == {
        "swap-rank0.json",
        "swap-rank1.json",
    }
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    moved = sum(rank["swap"]["bytes_out_per_step"] for rank in ranks[:2])
    assert sum(record.get("offloaded_bytes", 0) for record in metrics) == pytest.approx(3 * moved)
    capfd.readouterr()
    assert cli.main(["explain", str(tmp_path), "--json", "--png", str(tmp_path / "swap.png")]) == 0
    reported = json.loads(capfd.readouterr().out)["swap"]
    assert [(rank["rank"], rank["stage"], rank["replica"]) for rank in reported] == [
        (0, 0, 0),
        (1, 0, 1),
    ]
    assert (tmp_path / "swap.png").is_file()
