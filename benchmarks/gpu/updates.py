"""How a way of the GPU benchmark steps its parameters: AdamW on the device, on the host, or FSDP2's own on the host."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.models import Task
from parallax.machine.device import copies_for
from parallax.swap.optimizer.host import HostOptimizer

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Update = Callable[[], None]


def stepper(optimizer: torch.optim.Optimizer) -> Update:
    """Step, and forget the gradients."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def full_precision(parameters: list[nn.Parameter]) -> Update:
    """AdamW on fp32 copies of bf16 weights, all on the device: 16 bytes of states for each parameter."""
    copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(copies, fused=True, **SETTINGS)

    @torch.no_grad()
    def update() -> None:
        for parameter, copy in zip(parameters, copies):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for parameter, copy in zip(parameters, copies):
            parameter.copy_(copy)

    return update


def on_host(
    model: nn.Module, device: torch.device, stack: contextlib.ExitStack
) -> tuple[Update, Callable[[], None]]:
    """AdamW on the host beside the next forward, and what waits for its end."""
    parameters = list(model.parameters())
    meant = torch.optim.AdamW(parameters, fused=True, **SETTINGS)
    host = HostOptimizer(meant, parameters, copies=copies_for(device))
    stack.callback(host.close)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(host.reduced)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            module.register_forward_pre_hook(lambda module, inputs, own=own: host.ready(own))
    return host.commit, host.finish


def sharded(
    model: nn.Module, task: Task, device: torch.device, stack: contextlib.ExitStack, *, fp32: bool
) -> nn.Module:
    """FSDP2 on one rank: its parameters, gradients and optimizer are on the host, a block's weights come and go."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parallax-benchmark-"))
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=0,
        world_size=1,
    )
    stack.callback(dist.destroy_process_group)
    kind = next(model.parameters()).dtype
    host = model.cpu().float() if fp32 else model.cpu()
    host = host.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # FSDP2 knows no other
    shard = functools.partial(
        fully_shard,
        mesh=init_device_mesh(device.type, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=kind if fp32 else None),
        offload_policy=CPUOffloadPolicy(pin_memory=cuda),
    )
    for block in task.blocks(host):
        shard(block)
    shard(host)
    for module in host.modules():  # it moves parameters only
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return host


def pageable_bytes(model: nn.Module) -> int:
    """Of weights on the host, what a device would have to copy through pageable memory: such a peer would be none."""
    local = [getattr(each, "to_local", lambda each=each: each)() for each in model.parameters()]
    return sum(tensor.nbytes for tensor in local if not tensor.is_cuda and not tensor.is_pinned())
