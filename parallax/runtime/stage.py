"""One stage on its device: its blocks, run one after another under their directives."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.model.describe import Chain, as_tuple, block_seed, materialise, parameter_names
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.plan.plan import Directive, StagePlan
from parallax.swap.activations import offloading
from parallax.swap.manager import SwapManager


class Stage(nn.Module):
    """The blocks of a stage with real parameters.

    The random state of a block's forward depends on (seed, step, first row, block) alone, so a recomputed forward
    draws the same numbers, and so does another plan.
    """

    def __init__(self, chain: Chain, plan: StagePlan, device: torch.device, precision: PrecisionConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(materialise(chain, plan.start, plan.stop, device))
        self._first, self._seed = plan.start, chain.seed
        self._directives: Sequence[Directive] = plan.directives
        self._precision, self._device = precision, device
        self._names = parameter_names(chain, plan.start, plan.stop)

    def named_tensors(self) -> dict[str, Tensor]:
        """Model-wide name → parameter or buffer; a shared parameter appears once."""
        states = {i: block.state_dict(keep_vars=True) for i, block in enumerate(self.blocks, self._first)}
        return {name: states[i][inner] for name, (i, inner) in self._names.items()}

    def held(self) -> list[Tensor]:
        """All parameters and buffers."""
        return [*self.parameters(), *self.buffers()]

    def run(
        self,
        inputs: tuple[Tensor, ...],
        *,
        where: tuple[int, int],
        micro: int,
        swap: tuple[SwapManager, Selector] | None,
    ) -> tuple[Tensor, ...]:
        """Forward. ``where`` is (step, first row of the global batch); ``swap`` opens offloading for ``micro``."""
        for offset, (block, directive) in enumerate(zip(self.blocks, self._directives)):
            seed = block_seed(self._seed, *where, self._first + offset)
            if directive is Directive.RECOMPUTE and torch.is_grad_enabled():
                inputs = checkpoint(
                    self._run_block, block, seed, *inputs, use_reentrant=False, preserve_rng_state=False
                )
            elif directive is Directive.OFFLOAD and swap is not None and torch.is_grad_enabled():
                with offloading(*swap, micro):
                    inputs = self._run_block(block, seed, *inputs)
            else:
                inputs = self._run_block(block, seed, *inputs)
        return inputs

    def _run_block(self, block: nn.Module, seed: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        seed_block(self._device, seed)
        with self._precision.autocast(self._device.type):
            return as_tuple(block(*inputs))


def seed_block(device: torch.device, seed: int) -> None:
    """Seed the generator that a block on ``device`` draws from (torch.manual_seed costs 70 times as much)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def private_random_state(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keep the caller's random state untouched by :func:`seed_block`."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
