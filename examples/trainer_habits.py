"""The settings of Hugging Face's Trainer, by its own names, over stages of a model of transformers:

torchrun --standalone --nproc-per-node=2 examples/trainer_habits.py OUTPUT_DIR
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import parallax

ARGS = SimpleNamespace(
    num_train_epochs=2, per_device_train_batch_size=16, learning_rate=5e-3, warmup_steps=4
)
OPTIMIZER = parallax.AdamWConfig(lr=ARGS.learning_rate, weight_decay=0.0)
SCHEDULE = parallax.LinearSchedule(warmup=ARGS.warmup_steps)
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def model_init() -> nn.Module:
    """Return the model, here with random weights; `from_pretrained` would give those of a folder."""
    config = transformers.BertConfig(num_attention_heads=4, num_labels=2, **SIZES)
    return transformers.BertForSequenceClassification(config)


def dataset(rows: int, seed: int) -> list[dict[str, Any]]:
    """Return rows as tokenizers make them; the label says whether the first token is large."""
    ids = torch.randint(32, (rows, 8), generator=torch.Generator().manual_seed(seed))
    return [
        {"input_ids": row, "attention_mask": row * 0 + 1, "label": int(row[0] > 15)} for row in ids
    ]


def compute_metrics(predictions: Tensor, labels: Tensor) -> dict[str, float]:
    """Return metrics by name, from the class scores of all held-out rows."""
    return {"accuracy": (predictions.argmax(-1) == labels).float().mean().item()}


def compute_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Return the loss of a micro-batch."""
    return nn.functional.cross_entropy(outputs.logits, labels)


def batch_of(features: list[dict[str, Any]]) -> parallax.TensorRows:
    """Return a batch from Trainer's own collator: labels are the targets, all else are inputs."""
    inputs = transformers.default_data_collator(features)
    return parallax.TensorRows(inputs, inputs.pop("labels"))


def main(output_dir: Path) -> None:
    """Train, evaluate and save after each epoch, as with eval_strategy="epoch" and save_strategy="epoch"."""
    dist.init_process_group("gloo")
    rows = ARGS.per_device_train_batch_size * dist.get_world_size()
    train = DataLoader(dataset(512, 1), rows, collate_fn=batch_of)
    test, sample = dataset(128, 2), next(iter(train))
    chain = parallax.describe(model_init, sample=lambda count: sample.inputs(0, count))
    cluster = parallax.ClusterConfig(kind="cpu", device_memory="64MiB")
    plan = parallax.plan_together(chain, compute_loss, sample, cluster=cluster, optimizer=OPTIMIZER)
    steps = ARGS.num_train_epochs * len(train)
    engine = parallax.Engine.build(
        chain, plan, loss=compute_loss, optimizer=OPTIMIZER, schedule=SCHEDULE, steps=steps
    )
    for epoch in range(ARGS.num_train_epochs):
        for batch in train:
            result = engine.step(batch)
        parts: list[Any] = [None] * dist.get_world_size()
        mine = {first: outputs.logits for first, outputs in engine.predict(batch_of(test))}
        dist.all_gather_object(parts, mine)  # ranks of the last stage have the outputs
        rows_of = {first: part for held in parts for first, part in held.items()}
        scores = torch.cat([rows_of[first] for first in sorted(rows_of)])
        metrics = compute_metrics(scores, torch.tensor([row["label"] for row in test]))
        engine.save(output_dir, {"epoch": epoch + 1, **metrics})
        if dist.get_rank() == 0:
            print({"epoch": epoch + 1, "loss": round(result.loss, 4), **metrics})
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
