"""A training loop of your own: it validates and saves after each epoch, resumes, and stops early:

torchrun --standalone --nproc-per-node=2 examples/own_loop.py CHECKPOINTS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parallax
from parallax.runtime.checkpoint import Retention

EPOCHS, ROWS, PATIENCE = 20, 64, 2
OPTIMIZER, SCHEDULE = parallax.AdamWConfig(lr=1e-2), parallax.CosineSchedule(warmup=8)


def build() -> nn.Module:
    """Return the model."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 4))


def loader(rows: int, seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return batches, the same on all ranks; each rank's stage uses the rows that it computes on."""
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), ROWS)


def main(folder: Path) -> None:
    """Train until the validation loss has not improved for two epochs; the same command resumes."""
    dist.init_process_group("gloo")
    training, held_out, loss = loader(1024, 1), loader(256, 2), nn.functional.cross_entropy
    chain, sample = parallax.describe(build), parallax.TensorRows(*next(iter(training)))
    cluster = parallax.ClusterConfig(kind="cpu", device_memory="64MiB")
    plan = parallax.plan_together(chain, loss, sample, cluster=cluster, optimizer=OPTIMIZER)
    steps = EPOCHS * len(training)
    engine = parallax.Engine.build(
        chain, plan, loss=loss, optimizer=OPTIMIZER, schedule=SCHEDULE, steps=steps
    )
    found, _ = engine.checkpoints(folder)
    state = engine.load(found[-1]) if found else {"epoch": 0, "best": 1e9, "since": 0}
    for epoch in range(state["epoch"], EPOCHS):
        if state["since"] >= PATIENCE:
            break
        for batch in training:
            result = engine.step(parallax.TensorRows(*batch))
        losses = [engine.evaluate_weighted(parallax.TensorRows(*batch)) for batch in held_out]
        mean = sum(value * rows for value, rows in losses) / sum(rows for _, rows in losses)
        since = 0 if mean < state["best"] else state["since"] + 1
        state = {"epoch": epoch + 1, "best": min(mean, state["best"]), "since": since}
        engine.save(folder, state, retention=Retention(keep_last=2))
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {result.loss:.3f}, validation {mean:.3f}")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
