"""One stage on its device: runs its blocks one after another, and keeps, recomputes or offloads their activations as
planned."""

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
from parallax.machine.host import memory_is_bounded, relieve_memory, trim_freed_memory
from parallax.model.describe import Chain, as_tuple, parameter_names
from parallax.model.layers.buffers import BufferSnapshot, ChangingBuffers
from parallax.model.layers.dropout import Draws, RowDropout, has_dropout
from parallax.model.layers.norms import BatchNorms
from parallax.model.layers.row_noise import RowNoise
from parallax.model.layers.sparse import make_gradients_dense
from parallax.model.materialise import materialise_each
from parallax.model.precision import AS_IT_IS, PrecisionConfig
from parallax.model.private import SAME_TENSORS
from parallax.model.recurrent import flattens_weights, recurrent_weights
from parallax.model.saved import Selector
from parallax.model.split_backward import WeightGradStore
from parallax.plan.plan import Directive, StagePlan
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.parameters.offloaded import OffloadedParameters, ResidentParameters

Stream = OffloadedParameters | ResidentParameters
OpenStream = Callable[[Chain, Sequence[int], float, Iterable[Iterable[nn.Parameter]]], Stream]


_ODD = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples are maximally spread, also in their lower 32 bits
_POSITIVE = 2**63 - 1


def keep_resident(
    chain: Chain, indices: Sequence[int], share: float, blocks: Iterable[Iterable[nn.Parameter]]
) -> Stream:
    """Iterate ``blocks``, which builds the blocks, and return the object that stands in for offloaded parameters in a
    stage whose parameters all stay on the device. The other arguments are ignored."""
    del chain, indices, share
    return ResidentParameters(blocks)


def _no_wait(parameters: Iterable[nn.Parameter]) -> None:
    """No-op: no optimizer on the host updates ``parameters``, so a forward has no update to wait for."""


class MicroBatchContext(NamedTuple):
    """The rows that a stage runs on: the step, the index of the first row in the global batch, and the number of rows.
    ``whole``: the number of rows of the micro-batch over all replicas."""

    step: int
    first: int
    rows: int
    whole: int


class Stage(nn.Module):
    """The blocks of one rank with real parameters: of its stage, or of all its virtual stages.

    The random state of a block's forward depends only on seed, step, first row and block. So a recomputed forward draws
    the same numbers, and so does another plan with the same micro-batches. Dropout is the same under every plan
    (:mod:`parallax.model.layers.dropout`). ``norms`` handles BatchNorms (:mod:`parallax.model.layers.norms`).
    ``open_stream`` opens the store of offloaded parameters.

    With ``compile``, the forward of each block is compiled for any number of rows. A compiled block hides its operators
    from dispatch modes. So its backward is not split, and its dropout draws from the compiler's generator, which has
    the same seed. Its offloaded activations are fetched all at once, for which the plan's swap limit must be large
    enough.

    Without ``trains``, no memory is reserved for gradients. Even then, parameters require a gradient if those of the
    model do, because some operators, such as torch.matmul of a tensor of three dimensions, choose their kernels by this
    flag even where gradients are disabled.
    """

    def __init__(
        self,
        chain: Chain,
        plans: Mapping[int, StagePlan],
        device: torch.device,
        precision: PrecisionConfig,
        open_stream: OpenStream = keep_resident,
        *,
        norms: BatchNorms | None = None,
        compile: bool = False,
        trains: bool = True,
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
        self._wait_for: Callable[[Iterable[nn.Parameter]], None] = _no_wait
        self.norms = norms or BatchNorms()
        self._noise = RowNoise(device)
        self._compiled = compile
        self._seeded, self._seeds = -1, list[int]()  # a step, and the seeds of its blocks
        self._draws: dict[int, bool] = {}  # place → whether the block draws dropout
        self._changes: dict[int, bool] = {}  # place → whether the block changes its inputs in place
        self._changing: dict[int, ChangingBuffers] = {}  # place of a recomputed block → its buffers
        self._dense = False
        self._trains, self._trained = trains, list[nn.Parameter]()
        share = max(plan.parameter_offload for plan in plans.values())
        opened = open_stream if share > 0 else keep_resident
        self.offloaded = opened(chain, self._indices, share, self._make(chain, share, device))
        for place, block in enumerate(self.blocks):
            if self.offloaded.parameters(place):
                self.offloaded.attach(place, block)
        if share:
            self._check_share(chain, share)
        self._require_gradients()
        self._by_place = tuple(self.blocks)  # indexing an nn.ModuleList is slow
        for place, block in enumerate(self._by_place):
            self._prepare(place, block)
        self._owned = {
            stage: self._find_parameters(places) for stage, places in self._parts.items()
        }

    def _require_gradients(self) -> None:
        for parameter in self._trained:
            parameter.requires_grad_()
        self._trained.clear()

    def _find_parameters(self, places: Iterable[int]) -> list[nn.Parameter]:
        return list(
            dict.fromkeys(p for place in places for p in self._by_place[place].parameters())
        )

    def _prepare(self, place: int, block: nn.Module) -> None:
        self.norms.add_block(place, block, compiled=self._compiled)
        if self._compiled:
            # Compile the method, not the module, so that hooks on the block run outside and parameter names stay. With
            # dynamic sizes from the start there is one program: a recomputed forward must be the same program as the
            # forward whose saved tensors it replaces.
            block.forward = torch.compile(block.forward, dynamic=True)
            self._draws[place] = False
        elif has_dropout(block):
            self._draws[place] = True

    def train(self, mode: bool = True) -> Stage:
        """Set the training mode of all modules except frozen BatchNorms, which stay in evaluation mode."""
        super().train(mode)
        self.norms.freeze_statistics()
        return self

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode within the context."""
        before = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(before)

    def _make(
        self, chain: Chain, share: float, device: torch.device
    ) -> Iterator[list[nn.Parameter]]:
        """Make the blocks in order, and yield for each block a list of the parameters to offload.

        The last blocks offload all parameters that :func:`offloadable` returns: as many blocks as are needed to offload
        at least a fraction ``share`` of the bytes of all such parameters. The other blocks have empty lists.
        """
        sizes = [
            sum(p.nbytes for p in offloadable(chain, index, chain.blocks[index].module, device))
            for index in self._indices
        ]
        first = first_offloaded(sizes, share)
        for place, block in enumerate(materialise_each(chain, self._indices, device)):
            if (
                not self._trains
            ):  # until the stage is built, so that offloading reserves nothing for gradients
                self._trained += [p for p in block.parameters() if p.requires_grad]
                block.requires_grad_(False)
            self.blocks.append(block)
            if place < first:
                yield []
                continue
            yield offloadable(chain, self._indices[place], block, device)
            trim_freed_memory()  # frees a block's temporary memory before the next block is made

    def _check_share(self, chain: Chain, share: float) -> None:
        """Raise :class:`PlanError` if more parameter bytes stay on the device than the plan counts, because some
        parameters cannot be offloaded. The plan offloads at least a fraction ``share`` of the bytes."""
        may_go = {
            p
            for i, block in zip(self._indices, self.blocks)
            for p in offloadable(chain, i, block, self._device)
        }
        whole = sum(parameter.nbytes for parameter in may_go)
        held = {
            name: tensor.nbytes
            for name, tensor in self.named_tensors().items()
            if tensor in may_go and not self.is_offloaded(tensor)
        }
        if sum(held.values()) > (1 - share) * whole:
            raise PlanError(
                f"the plan keeps {format_bytes(int((1 - share) * whole))} of parameters on the device, and "
                f"{format_bytes(sum(held.values()))} cannot be offloaded ({', '.join(sorted(held)[:3])}): they share "
                "memory or are not contiguous in it; plan with plan.parameters=device"
            )

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers, by their names in the model. A shared parameter has one entry."""
        states = {
            i: block.state_dict(keep_vars=True) for i, block in zip(self._indices, self.blocks)
        }
        return {name: states[i][inner] for name, (i, inner) in self._names.items()}

    def parameters_of(self, stage: int) -> Sequence[nn.Parameter]:
        """Return the parameters of ``stage``, the number of a stage of this rank. A parameter that two stages share
        belongs to both."""
        return self._owned[stage]

    def held(self) -> list[Tensor]:
        """Return all tensors of the stage on the device: resident parameters, and buffers."""
        return [*self.resident(), *self.buffers()]

    def resident(self) -> list[nn.Parameter]:
        """Return the parameters that stay on the device."""
        return [parameter for parameter in self.parameters() if not self.is_offloaded(parameter)]

    def is_offloaded(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an offloaded parameter."""
        return isinstance(tensor, nn.Parameter) and self.offloaded.is_offloaded(tensor)

    def holds_offloaded_memory(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` uses the memory of an offloaded parameter."""
        return self.offloaded.holds_memory_of(tensor)

    def values(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name in the model, parameter or buffer, its value), block by block. Values of offloaded parameters are
        read from the tier."""
        offloaded: dict[Tensor, Tensor] = {}
        for name, tensor in self.named_tensors().items():
            if self.is_offloaded(tensor) and tensor not in offloaded:
                block = self._indices.index(self._names[name][0])
                offloaded = dict(
                    zip(self.offloaded.parameters(block), self.offloaded.read_full(block))
                )
            yield name, tensor, offloaded.get(tensor, tensor.detach())

    def assign(self, values: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Set new ``values``, in the same order and form as :meth:`values` yields them."""
        offloaded: dict[Tensor, Tensor] = {}
        for name, tensor, value in values:
            if not self.is_offloaded(tensor):
                tensor.detach().copy_(value)
                continue
            block = self._indices.index(self._names[name][0])
            offloaded[tensor] = value
            wanted = self.offloaded.parameters(block)
            if all(parameter in offloaded for parameter in wanted):
                self.offloaded.write_full(block, [offloaded.pop(parameter) for parameter in wanted])

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """Return the gradient of a resident or offloaded parameter; None if it has none."""
        if isinstance(tensor, nn.Parameter) and self.offloaded.is_offloaded(tensor):
            return self.offloaded.read_gradient(tensor)
        return tensor.grad

    def hold_gradients(self, stage: int, hold: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a backward of ``stage`` runs (:meth:`OffloadedParameters.hold_gradients`).

        With ``hold``, gradients of offloaded parameters stay on the device until the next backward. This has an effect
        only if the stage has a single block. In a stage of several blocks, other blocks run between two backwards of a
        block.
        """
        return self.offloaded.hold_gradients(hold and len(self._parts[stage]) == 1)

    def norm_terms(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return tensors whose total norm (torch.nn.utils.get_total_norm) equals the total norm of the gradients of
        ``tensors``."""
        trained = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        return self.offloaded.norm_terms(trained)

    def wait_for_weights(self, wait: Callable[[Iterable[nn.Parameter]], None]) -> None:
        """Make every block call ``wait`` with its parameters before each forward."""
        self._wait_for = wait

    def skip(self) -> None:
        """Wait for the weights of all blocks, as a forward does.

        A rank without rows of a micro-batch calls this method in place of the forward, because the gradients of its
        parameters are used next.
        """
        self._wait_for(self.parameters())

    def run(
        self,
        stage: int,
        inputs: tuple[Tensor, ...],
        *,
        where: MicroBatchContext,
        micro: int,
        swap: tuple[SwapManager, Selector] | None,
        weight_gradients: WeightGradStore | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the forward of stage number ``stage`` on ``inputs``, the rows ``where``, and return its outputs.

        ``swap`` offloads activations; ``micro`` is the number by which it identifies the micro-batch.
        ``weight_gradients`` defers the weight gradients of blocks that keep their activations; for an offloaded or
        recomputed block, deferring would hold the activations in memory.
        """
        training = torch.is_grad_enabled()
        if training and not self._dense:
            make_gradients_dense(self.named_tensors())
            self._dense = True
        for place in self._parts[stage]:
            directive = self._directives[place]
            self._wait_for(self._by_place[place].parameters())
            if training:
                self.norms.begin_micro_batch(place, where.whole)
            if directive is Directive.RECOMPUTE and training:
                inputs = checkpoint(
                    self._run_recomputed,
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
                inputs = self._run_block(place, where, weight_gradients, *inputs)
            if training:
                _relieve_in_backward(inputs)
        return inputs

    def _run_recomputed(
        self,
        found: BufferSnapshot,
        copy: bool,
        place: int,
        where: MicroBatchContext,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the forward of a block that is recomputed, and return its outputs.

        The first call for a micro-batch is the original forward, the second its repetition in the backward; ``found``
        keeps the state of the block's buffers between the two. If ``copy`` is True, the block gets copies of
        ``inputs``. ``place`` is the index of the block among the blocks of this rank.
        """
        if place not in self._changing:
            self._changing[place] = ChangingBuffers(
                self._by_place[place],
                self.norms.modules_of(place),
                self.is_offloaded,
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
        """Run the block at index ``place`` of this rank, which will be recomputed, and leave ``inputs`` unchanged.

        With ``copy``, the block gets copies of the inputs. Only blocks that change their inputs in place need this, and
        the first run of a block, always with copies, detects whether it changes them. If the forward of a micro-batch
        copies the inputs, its repetition in the backward must copy them too: a copy may have other strides, for which a
        compiled block would run another program and save other tensors.
        """
        if not copy:
            return self._run_block(place, where, None, *inputs)
        copies = [tensor.clone() for tensor in inputs]
        before = [copied._version for copied in copies]
        outputs = self._run_block(place, where, None, *copies)
        self._changes[place] = before != [copied._version for copied in copies]
        return outputs

    def _seed_of(self, place: int, where: MicroBatchContext) -> int:
        """Return the random seed for the block at index ``place`` of this rank, on the rows of ``where``. Seeds of
        different steps and blocks are unrelated. Within a step, the seeds of a block differ by multiples of
        ``_ODD``."""
        if where.step != self._seeded:
            self._seeds = [block_seed(self._seed, where.step, index) for index in self._indices]
            self._seeded = where.step
        return (self._seeds[place] + where.first * _ODD) & _POSITIVE

    def _run_block(
        self,
        place: int,
        where: MicroBatchContext,
        weight_gradients: WeightGradStore | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        block, index = self._by_place[place], self._indices[place]
        relieve_memory()
        seed_block(self._device, self._seed_of(place, where))
        splitting = (
            weight_gradients.splitting()
            if weight_gradients is not None and not self._compiled
            else AS_IT_IS
        )
        with self._precision.autocast(self._device.type), splitting:
            if not self.training or not self._draws.get(place, True):
                return as_tuple(block(*inputs))
            draws = Draws(self._noise, self._seed, where.step, where.first, where.rows, index)
            with RowDropout(draws) as dropout:
                outputs = as_tuple(block(*inputs))
            # Dropout that the block calls as a function is found only here.
            self._draws[place] = self._draws.get(place, False) or dropout.drew
            return outputs


def _relieve_in_backward(outputs: tuple[Tensor, ...]) -> None:
    """Make the backward of a block call :func:`relieve_memory` first, as the block's forward does.

    ``outputs`` are the block's outputs.
    """
    node = next((tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None), None)
    if node is not None and memory_is_bounded():
        node.register_prehook(_relieve)


def _relieve(gradients: tuple[Tensor, ...]) -> None:
    del gradients
    relieve_memory()


def offloadable(
    chain: Chain, index: int, block: nn.Module, device: torch.device
) -> list[nn.Parameter]:
    """Return the parameters that may be offloaded from ``device`` among those of ``block``, the chain's block
    ``index``: parameters that no other block uses and that are not in a shared buffer."""
    stay = recurrent_weights(block) if flattens_weights(device) else set()
    stay |= {
        block.get_parameter(name)
        for users in chain.ties.values()
        for user, name in users
        if user == index and any(other != index for other, _ in users)
    }
    return [parameter for parameter in block.parameters() if parameter not in stay]


def first_offloaded(sizes: Sequence[int], share: float) -> int:
    """Return how many of the first blocks can stay resident.

    The remaining blocks must hold at least a fraction ``share`` of all bytes. ``sizes`` are the bytes of each block.
    """
    resident = (1 - share) * sum(sizes)
    return sum(1 for end in accumulate(sizes) if end <= resident)


def seed_block(device: torch.device, seed: int) -> None:
    """Seed the generator that blocks on ``device`` draw from. torch.manual_seed would cost 70 times as much."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        accelerator_of(device).generator(device.index or 0).manual_seed(seed)
