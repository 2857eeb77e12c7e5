"""A module that has its model, loss, loaders and metrics in one place, as Lightning's, and a `fit` that calls it:

torchrun --standalone --nproc-per-node=2 examples/lightning_habits.py CHECKPOINTS
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import parallax

Loader = DataLoader[tuple[Tensor, ...]]


class Classifier:
    """What training needs to know of a model."""

    def __init__(self) -> None:
        self.accuracy = MulticlassAccuracy(4, average="micro")

    def configure_model(self) -> nn.Module:
        """Return the model; every rank makes the parameters of its own stage only."""
        layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
        return nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 4))

    def configure_optimizers(self) -> tuple[parallax.AdamWConfig, parallax.CosineSchedule]:
        """Return the optimizer and the schedule of its learning rate."""
        return parallax.AdamWConfig(lr=1e-2), parallax.CosineSchedule(warmup=8)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.05)

    def validation_step(self, scores: Tensor, labels: Tensor) -> None:
        """Count the outputs of some rows; only ranks of the last stage have outputs."""
        self.accuracy.update(scores, labels)

    def on_validation_epoch_end(self) -> dict[str, float]:
        """Return the metrics of an epoch. All ranks call it: torchmetrics adds up what each has counted."""
        warnings.filterwarnings(
            "ignore", "The ``compute`` method of metric"
        )  # of ranks without outputs
        found = {"accuracy": float(self.accuracy.compute())}
        self.accuracy.reset()
        return found


def fit(module: Classifier, train: Loader, held_out: Loader, epochs: int, folder: Path) -> None:
    """Train ``module`` on all ranks; the checkpoint of each epoch has its metrics."""
    chain, sample = (
        parallax.describe(module.configure_model),
        parallax.TensorRows(*next(iter(train))),
    )
    cluster = parallax.ClusterConfig(kind="cpu", device_memory="64MiB")
    (optimizer, schedule), loss = module.configure_optimizers(), module.loss
    plan = parallax.plan_together(chain, loss, sample, cluster=cluster, optimizer=optimizer)
    steps = epochs * len(train)
    engine = parallax.Engine.build(
        chain, plan, loss=loss, optimizer=optimizer, schedule=schedule, steps=steps
    )
    for epoch in range(epochs):
        for batch in train:
            result = engine.step(parallax.TensorRows(*batch))
        for inputs, labels in held_out:
            for first, scores in engine.predict(parallax.TensorRows(inputs, labels)):
                module.validation_step(scores, labels[first : first + len(scores)])
        metrics = module.on_validation_epoch_end()
        engine.save(folder, {"epoch": epoch + 1, "metrics": metrics})
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {result.loss:.3f}, {metrics}")
    engine.close()


def loader(rows: int, seed: int) -> Loader:
    """Return batches, the same on all ranks."""
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=64)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    fit(Classifier(), loader(1024, 1), loader(256, 2), 3, Path(sys.argv[1]))
    dist.destroy_process_group()
