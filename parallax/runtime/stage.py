"""One stage on its device: its blocks, run one after another under their directives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.common.seeds import block_seed
from parallax.common.units import format_bytes
from parallax.errors import PlanError
from parallax.machine.accelerators import accelerator_of
from parallax.machine.host import memory_is_bounded, relieve_memory
from parallax.model.describe import Chain, as_tuple, parameter_names
from parallax.model.layers.buffers import BufferSnapshot, ChangingBuffers
from parallax.model.layers.dropout import Draws, RowDropout, has_dropout
from parallax.model.layers.norms import BatchNorms
from parallax.model.layers.row_noise import RowNoise
from parallax.model.layers.sparse import make_gradients_dense
from parallax.model.materialise import materialise_each
from parallax.model.precision import AS_IT_IS, PrecisionConfig
from parallax.model.private import SAME_TENSORS
from parallax.model.saved import Selector
from parallax.model.split_backward import WeightGradStore
from parallax.plan.plan import Directive, StagePlan
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.parameters.offloaded import OffloadedParameters, ResidentParameters

Stream = OffloadedParameters | ResidentParameters
OpenStream = Callable[[Chain, Sequence[int], float, Iterable[Iterable[nn.Parameter]]], Stream]


_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: multiples lie as far apart as can be, in the lower half, too
_POSITIVE = 2**63 - 1


def keep_all(
    chain: Chain, indices: Sequence[int], share: float, blocks: Iterable[Iterable[nn.Parameter]]
) -> Stream:
    """Make the ``blocks``, whose parameters stay on the device."""
    del chain, indices, share
    return ResidentParameters(blocks)


def _are_there(parameters: Iterable[nn.Parameter]) -> None:
    """Nobody has to wait for weights."""


class MicroBatchContext(NamedTuple):
    """What a stage runs on: ``rows`` of one micro-batch, the first of them in the global batch, and how many the
    micro-batch has over all replicas."""

    step: int
    first: int
    rows: int
    whole: int


class Stage(nn.Module):
    """The blocks of one rank with real parameters: of its stage, or of the several that share its pipeline rank.

    The random state of a block's forward depends on (seed, step, first row, block) alone, so a recomputed forward
    draws the same numbers, and so does another plan that cuts rows alike; dropout is the same under every plan
    (:mod:`parallax.model.layers.dropout`). ``norms`` takes charge of BatchNorms (:mod:`parallax.model.layers.norms`).

    With ``compile`` each block's forward is compiled for any number of rows. Modes that look at single operators see
    nothing in there: backwards are not split, dropout is drawn by the compiler's generator, which is seeded alike. And
    all that such a block has offloaded comes back at once, for which the plan's swap limit must have room.
    """

    def __init__(
        self,
        chain: Chain,
        plans: Mapping[int, StagePlan],
        device: torch.device,
        precision: PrecisionConfig,
        open_stream: OpenStream = keep_all,
        *,
        norms: BatchNorms | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self._indices = [index for plan in plans.values() for index in range(plan.start, plan.stop)]
        places = {index: place for place, index in enumerate(self._indices)}
        self._parts = {
            stage: range(places[plan.start], places[plan.stop - 1] + 1)
            for stage, plan in plans.items()
        }
        self._directives = [directive for plan in plans.values() for directive in plan.directives]
        self._seed, self._precision, self._device = chain.seed, precision, device
        self._names = parameter_names(chain, self._indices)
        self._arrive: Callable[[Iterable[nn.Parameter]], None] = _are_there
        self.norms = norms or BatchNorms()
        self._noise = RowNoise(device)
        self._compiled = compile
        self._seeded, self._seeds = -1, list[int]()  # a step, and its seed for each block
        self._draws: dict[int, bool] = {}  # by place, whether a block drops anything
        self._changes: dict[int, bool] = {}  # place → whether its inputs are changed in place
        self._changing: dict[
            int, ChangingBuffers
        ] = {}  # by the place of a block that is recomputed
        self._dense = False
        share = max(plan.parameter_offload for plan in plans.values())
        opened = open_stream if share > 0 else keep_all
        self.streamed = opened(chain, self._indices, share, self._make(chain, share, device))
        for place, block in enumerate(self.blocks):
            if self.streamed.parameters(place):
                self.streamed.attach(place, block)
        if share:
            self._check_share(share)
        self._by_place = tuple(self.blocks)  # the list of modules is slow to be asked
        for place, block in enumerate(self._by_place):
            self._prepare(place, block)
        self._owned = {
            stage: self._find_parameters(places) for stage, places in self._parts.items()
        }

    def _find_parameters(self, places: Iterable[int]) -> list[nn.Parameter]:
        return list(
            dict.fromkeys(p for place in places for p in self._by_place[place].parameters())
        )

    def _prepare(self, place: int, block: nn.Module) -> None:
        self.norms.add_block(place, block, compiled=self._compiled)
        if self._compiled:
            # The method, not the module: hooks on the block stay outside, and no name of a parameter changes. All
            # sizes are variable at once: with a second program for a second size, a recomputed forward could be
            # another program than the one whose saved tensors it replaces.
            block.forward = torch.compile(block.forward, dynamic=True)
            self._draws[place] = False
        elif has_dropout(block):
            self._draws[place] = True

    def train(self, mode: bool = True) -> Stage:
        """Frozen BatchNorms stay in evaluation mode."""
        super().train(mode)
        self.norms.freeze_statistics()
        return self

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """In evaluation mode while inside."""
        before = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(before)

    def _make(
        self, chain: Chain, share: float, device: torch.device
    ) -> Iterator[list[nn.Parameter]]:
        """Make block after block; of each, the parameters that live below: the last blocks' do."""
        sizes = [
            sum(p.nbytes for p in chain.blocks[index].module.parameters())
            for index in self._indices
        ]
        first = first_below(sizes, share)
        for place, block in enumerate(materialise_each(chain, self._indices, device)):
            self.blocks.append(block)
            yield [] if place < first else list(block.parameters())

    def _check_share(self, share: float) -> None:
        """Refuse a model that keeps more on the device than the plan was promised."""
        whole = sum(parameter.nbytes for parameter in self.parameters())
        held = {n: t.nbytes for n, t in self.named_tensors().items() if isinstance(t, nn.Parameter)}
        for name, tensor in self.named_tensors().items():
            if self.streams(tensor):
                held.pop(name, None)
        if sum(held.values()) > (1 - share) * whole:
            raise PlanError(
                f"the plan leaves {format_bytes(int((1 - share) * whole))} of parameters on the device, and "
                f"{format_bytes(sum(held.values()))} cannot leave it ({', '.join(sorted(held)[:3])}): they are shared "
                "or do not lie in one run of memory; plan with plan.parameters=device"
            )

    def named_tensors(self) -> dict[str, Tensor]:
        """Model-wide name → parameter or buffer; a shared parameter appears once."""
        states = {
            i: block.state_dict(keep_vars=True) for i, block in zip(self._indices, self.blocks)
        }
        return {name: states[i][inner] for name, (i, inner) in self._names.items()}

    def parameters_of(self, stage: int) -> Sequence[nn.Parameter]:
        """The parameters of one of the stages here; one that it shares with another here is in both."""
        return self._owned[stage]

    def held(self) -> list[Tensor]:
        """All parameters and buffers that stay on the device."""
        return [*self.resident(), *self.buffers()]

    def resident(self) -> list[nn.Parameter]:
        """The parameters that stay on the device."""
        return [parameter for parameter in self.parameters() if not self.streams(parameter)]

    def streams(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a parameter that lives below."""
        return isinstance(tensor, nn.Parameter) and self.streamed.is_offloaded(tensor)

    def streams_memory(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` is that of a parameter that lives below."""
        return self.streamed.holds_memory_of(tensor)

    def values(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Model-wide name, parameter or buffer, and its value, wherever that is; block by block."""
        below: dict[Tensor, Tensor] = {}
        for name, tensor in self.named_tensors().items():
            if self.streams(tensor) and tensor not in below:
                block = self._indices.index(self._names[name][0])
                below = dict(zip(self.streamed.parameters(block), self.streamed.read_full(block)))
            yield name, tensor, below.get(tensor, tensor.detach())

    def assign(self, values: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """New values, in the order and form of :meth:`values`."""
        below: dict[Tensor, Tensor] = {}
        for name, tensor, value in values:
            if not self.streams(tensor):
                tensor.detach().copy_(value)
                continue
            block = self._indices.index(self._names[name][0])
            below[tensor] = value
            wanted = self.streamed.parameters(block)
            if all(parameter in below for parameter in wanted):
                self.streamed.write_full(block, [below.pop(parameter) for parameter in wanted])

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a parameter, wherever it is."""
        if isinstance(tensor, nn.Parameter) and self.streamed.is_offloaded(tensor):
            return self.streamed.read_gradient(tensor)
        return tensor.grad

    def norm_terms(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What stands for the gradients of ``tensors`` in torch.nn.utils.get_total_norm."""
        trained = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        return self.streamed.norm_terms(trained)

    def wait_for_weights(self, arrive: Callable[[Iterable[nn.Parameter]], None]) -> None:
        """From now on a block runs forward when ``arrive`` has returned for its parameters."""
        self._arrive = arrive

    def skip(self) -> None:
        """There is nothing to run, but gradients are about to be used: wait as if there were."""
        self._arrive(self.parameters())

    def run(
        self,
        stage: int,
        inputs: tuple[Tensor, ...],
        *,
        where: MicroBatchContext,
        micro: int,
        swap: tuple[SwapManager, Selector] | None,
        halves: WeightGradStore | None = None,
    ) -> tuple[Tensor, ...]:
        """Forward of one of the stages here. ``swap`` opens offloading for ``micro``; ``halves`` puts weight gradients
        off, of blocks that keep what they save: others would have to keep it, too."""
        training = torch.is_grad_enabled()
        if training and not self._dense:
            make_gradients_dense(self.named_tensors())
            self._dense = True
        for place in self._parts[stage]:
            directive = self._directives[place]
            self._arrive(self._by_place[place].parameters())
            if training:
                self.norms.begin_micro_batch(place, where.whole)
            if directive is Directive.RECOMPUTE and training:
                inputs = checkpoint(
                    self._run_again,
                    BufferSnapshot(),
                    self._changes.get(place, True),
                    place,
                    where,
                    *inputs,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=self.norms.checkpoint_contexts(place, where.whole),
                    determinism_check=SAME_TENSORS,
                )
            elif directive is Directive.OFFLOAD and swap is not None and training:
                with offloading(*swap, micro):
                    inputs = self._run_block(place, where, None, *inputs)
            else:
                inputs = self._run_block(place, where, halves, *inputs)
            if training:
                _relieve_in_backward(inputs)
        return inputs

    def _run_again(
        self,
        found: BufferSnapshot,
        copy: bool,
        place: int,
        where: MicroBatchContext,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run a block the first time, or again."""
        if place not in self._changing:
            self._changing[place] = ChangingBuffers(
                self._by_place[place],
                self.norms.modules_of(place),
                self.streams,
                compiled=self._compiled,
            )
        buffers, again = self._changing[place], found.complete
        with (
            found.sizes.repeat(),
            buffers.repeated_forward(found) if again else buffers.first_forward(found),
        ):
            outputs = self._run_copies(copy, place, where, *inputs)
        buffers.end_forward()
        return outputs

    def _run_copies(
        self, copy: bool, place: int, where: MicroBatchContext, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Run a block that will be run again: its inputs must stay as they are, so one that changes them in place gets
        copies. The first run finds out. Both runs of one micro-batch copy or neither does: a copy may lie otherwise in
        memory, and a compiled block would run another program for it, which saves other tensors."""
        if not copy:
            return self._run_block(place, where, None, *inputs)
        copies = [tensor.clone() for tensor in inputs]
        before = [copied._version for copied in copies]
        outputs = self._run_block(place, where, None, *copies)
        self._changes[place] = before != [copied._version for copied in copies]
        return outputs

    def _seed_of(self, place: int, where: MicroBatchContext) -> int:
        """Unrelated between steps and blocks; of a block's micro-batches, as far apart as odd multiples can be."""
        if where.step != self._seeded:
            self._seeds = [block_seed(self._seed, where.step, index) for index in self._indices]
            self._seeded = where.step
        return (self._seeds[place] + where.first * _ODD) & _POSITIVE

    def _run_block(
        self, place: int, where: MicroBatchContext, halves: WeightGradStore | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        block, index = self._by_place[place], self._indices[place]
        relieve_memory()
        seed_block(self._device, self._seed_of(place, where))
        splitting = halves.splitting() if halves is not None and not self._compiled else AS_IT_IS
        with self._precision.autocast(self._device.type), splitting:
            if not self.training or not self._draws.get(place, True):
                return as_tuple(block(*inputs))
            draws = Draws(self._noise, self._seed, where.step, where.first, where.rows, index)
            with RowDropout(draws) as dropout:
                outputs = as_tuple(block(*inputs))
            # By calls, where no module says so.
            self._draws[place] = self._draws.get(place, False) or dropout.drew
            return outputs


def _relieve_in_backward(outputs: tuple[Tensor, ...]) -> None:
    """Let the backward of the block that has made ``outputs`` begin with :func:`relieve_memory`, as its forward did."""
    node = next((tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None), None)
    if node is not None and memory_is_bounded():
        node.register_prehook(_relieve)


def _relieve(gradients: tuple[Tensor, ...]) -> None:
    del gradients
    relieve_memory()


def first_below(sizes: Sequence[int], share: float) -> int:
    """The most that may come first for the others to have ``share`` of all bytes, or more."""
    above = (1 - share) * sum(sizes)
    return sum(1 for end in accumulate(sizes) if end <= above)


def seed_block(device: torch.device, seed: int) -> None:
    """Seed the generator that a block on ``device`` draws from (torch.manual_seed costs 70 times as much)."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        accelerator_of(device).generator(device.index or 0).manual_seed(seed)
