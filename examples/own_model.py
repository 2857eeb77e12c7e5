"""Train your own nn.Module, planned for the ranks that torchrun starts:

torchrun --standalone --nproc-per-node=2 examples/own_model.py
"""

import torch
import torch.distributed as dist
from torch import nn

import parallax


def build() -> nn.Module:
    """Return the model. For one that is no nn.Sequential, give `parallax.describe` a `sample` of its inputs."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def main() -> None:
    """Train on every rank; each holds only its own stage of the model and computes only its own rows."""
    dist.init_process_group("gloo")
    inputs = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    batch = parallax.TensorRows(inputs, inputs[:, :10].argmax(1))
    chain, loss = parallax.describe(build), nn.functional.cross_entropy
    cluster = parallax.ClusterConfig(kind="cpu", device_memory="64MiB")
    plan = parallax.plan_together(chain, loss, batch, cluster=cluster)
    engine = parallax.Engine.build(chain, plan, loss=loss, steps=30)
    for step in range(30):
        result = engine.step(batch)
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {result.loss:.4f}, {result.seconds * 1000:.0f} ms")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
