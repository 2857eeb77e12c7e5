"""Run directories with a checkpoint, made in this process without a plan that is measured."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from parallax.plan.plan import Plan
from parallax.run.job import build_chain, build_loss, model_factory, open_source
from parallax.run.resume import StoredRun
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints
from parallax.runtime.engine import Engine
from tests.faults.commands import prepared


def trained_run(*settings: str, name: str = "run") -> Path:
    """Return the directory of a run after a step on its first batch, ``runs/NAME`` in the working directory."""
    run = prepared(*settings, "trainer.steps=1", "logger=none", name=name, replicas=(1,))
    config = StoredRun.read(run).config
    engine = Engine.build(
        build_chain(config),
        Plan.load(run / "plan.yaml"),
        loss=build_loss(config),
        optimizer=config.optimizer,
        precision=config.precision,
    )
    engine.step(open_source(config).batch(config.trainer.global_batch))
    engine.save(run / "checkpoints", {})
    engine.close()
    return run


def own_model(run: Path, step: int = -1) -> nn.Module:
    """Return the model of a run in torch alone, in evaluation mode with the weights of a checkpoint."""
    config = StoredRun.read(run).config
    reader = CheckpointReader(list_checkpoints(run / "checkpoints")[step])
    torch.manual_seed(config.seed)
    model = model_factory(config)().to(config.precision.parameter_dtype)
    model.load_state_dict(
        {n: reader.read(f"model/{n}") for n in reader.model_tensors()}, strict=False
    )
    return model.eval()
