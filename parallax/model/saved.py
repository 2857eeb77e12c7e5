"""Decide which of the tensors that autograd saves are activations that may be offloaded.

The profiler and the swap manager share this rule, so that predicted and offloaded bytes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from parallax.model.block import plain_rows
from parallax.model.private import is_wrapped

# Cast, transpose, view, expand: the longest observed chain from a parameter to its copy.
_CHAIN_LENGTH = 4
_SMALL_PART = 8  # offloading a storage for a tensor below this share of it costs more than it frees
NOT_PLAIN = "not plain strided memory"
# Slices that are no views (torch.unsafe_chunk, as in the gates of an LSTM) have version counters of their own: one may
# change while the shared storage is being copied.
PART = "part of a memory that it is no view of"
ELSEWHERE = "computed on another stream"
_LEAF = "view or cast of a parameter"
SMALL = "smaller than swap.minimum_bytes"
# Read a parameter at indices from the data.
_LOOKUPS = "Embedding", "Index", "Gather", "Take"


def address(storage: UntypedStorage) -> int:
    """Return a key that identifies a storage: its address, or on the meta device its object id."""
    return id(storage) if storage.device.type == "meta" else storage.data_ptr()


def _of_bytes(storage: UntypedStorage) -> int:
    """Return the same key as :func:`address`, but faster, for a storage that is not on the meta device.

    The address of an empty storage is 0; only then is the slower function called.
    """
    return storage.data_ptr() or address(storage)


class Selector:
    """Decides whether the storage of a saved tensor may be offloaded.

    These storages stay on the device:

    * parameters and buffers, and copies of a single parameter, such as autocast's casts
    * tensors that the caller keeps alive anyway: leaves with a gradient, and small slices of a batch
    * small tensors
    * slices that have a separate version counter
    * tensors that are not plain strided memory of class ``plain``

    ``held``: the parameters and buffers. ``minimum_bytes``: smaller storages count as small. ``streams(tensor)``
    returns whether a tensor is an offloaded parameter, whose address changes.
    """

    def __init__(
        self,
        held: Iterable[Tensor],
        minimum_bytes: int,
        *,
        plain: type[Tensor] = Tensor,
        streams: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        held = list(held)
        self._is_offloaded = streams
        self._largest = max((tensor.numel() for tensor in held), default=0)
        # 0: the address of an empty storage
        self._held = {0, *(address(tensor.untyped_storage()) for tensor in held)}
        self._plain = plain
        self._address = _of_bytes if plain is Tensor else address
        self._minimum = max(1, minimum_bytes)

    def moves(self, tensor: Tensor) -> bool:
        """Return whether the storage of a saved ``tensor`` may be offloaded."""
        return self.why_kept(tensor) is None

    def why_kept(self, tensor: Tensor) -> str | None:
        """Return why the storage of a saved ``tensor`` must stay on the device; None if it may be offloaded."""
        reason = self.why_kept_itself(tensor)
        return (
            _LEAF
            if reason is None and tensor.requires_grad and self._copied_from_leaf(tensor)
            else reason
        )

    def why_kept_itself(self, tensor: Tensor) -> str | None:
        """Return the same as :meth:`why_kept`, but do not search the autograd graph.

        So copies and views of leaves are not recognized if only the graph shows what they are. Use this for steps with
        very many tensors: torch frees graph nodes by recursion once Python has accessed them, and 100,000 nodes would
        overflow the stack.
        """
        if type(tensor) is not self._plain or tensor.layout is not torch.strided:
            return NOT_PLAIN
        if (
            tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or is_wrapped(tensor)
        ):
            return NOT_PLAIN
        storage, part = tensor.untyped_storage(), tensor.nbytes
        whole = storage.nbytes()
        if whole < self._minimum:
            return SMALL
        if self._address(storage) in self._held or self._is_offloaded(tensor):
            return "parameter or buffer"
        if part < whole and not tensor._is_view():
            return PART
        if part * _SMALL_PART < whole and not _has_history(tensor):
            return "small part of a batch"
        if _of_leaf(tensor):
            return _LEAF
        return None

    def _copied_from_leaf(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a view of a leaf or a copy of a single parameter, according to the autograd
        graph.
        """
        storage = tensor.untyped_storage()
        numbers = storage.nbytes() // tensor.element_size()
        if numbers > self._largest:
            return False
        node = tensor.grad_fn
        for _ in range(_CHAIN_LENGTH):
            if node is None or node.name().startswith(_LOOKUPS):
                return False
            variable = getattr(node, "variable", None)
            if variable is not None:
                source = address(variable.untyped_storage())
                small = numbers <= variable.numel()
                return source == address(storage) or (source in self._held and small)
            parents = node.next_functions
            if len(parents) != 1:
                return False
            node = parents[0][0]
        return False


def _has_history(tensor: Tensor) -> bool:
    """Return whether autograd tracks the tensor.

    :class:`Selector` takes an untracked tensor that covers a small part of its storage for a slice of a batch or data
    set, whose storage the caller keeps alive.
    """
    return tensor.requires_grad or tensor.grad_fn is not None


def _of_leaf(tensor: Tensor) -> bool:
    """Return whether the tensor is a leaf with a gradient, a view of such a leaf, or a view of a parameter.

    Such tensors cannot be recognized by their address alone. FSDP gathers parameters, also frozen ones, into memory
    that it frees between uses.
    """
    base, trained = tensor._base, tensor.requires_grad
    if trained and tensor.is_leaf:
        return True
    if base is None:
        return False
    return isinstance(base, Parameter) or (trained and base.is_leaf and base.requires_grad)


class SavedBytes:
    """Counts the bytes that autograd saves for backward. Each storage counts once.

    The arguments are those of :class:`Selector`, which decides whether bytes are offloadable.
    """

    def __init__(
        self, held: Sequence[Tensor], minimum_bytes: int, *, plain: type[Tensor] = Tensor
    ) -> None:
        self._held = {address(tensor.untyped_storage()) for tensor in held}
        self._selector = Selector(held, minimum_bytes, plain=plain)
        self._block: dict[int, tuple[int, bool]] = {}
        self._loss: dict[int, int] = {}
        self._alive: list[UntypedStorage] = []  # keeps storages alive, so that no address is reused

    def block_hooks(self) -> saved_tensors_hooks:
        """Return saved-tensor hooks that count the tensors which the block saves."""

        def pack(tensor: Tensor) -> Tensor:
            storage = plain_rows(tensor).untyped_storage()
            if address(storage) not in self._held:
                self._block[address(storage)] = (storage.nbytes(), self._selector.moves(tensor))
                self._alive.append(storage)
            return without_history(tensor)

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def loss_hooks(self) -> saved_tensors_hooks:
        """Return saved-tensor hooks that count the tensors which the loss saves."""

        def pack(tensor: Tensor) -> Tensor:
            storage = plain_rows(tensor).untyped_storage()
            self._loss[address(storage)] = storage.nbytes()
            self._alive.append(storage)
            return without_history(tensor)

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def movable_sizes(self) -> tuple[int, ...]:
        """Return the bytes of each storage that may be offloaded, in the order in which they were saved."""
        block = [(key, *found) for key, found in self._block.items() if key not in self._loss]
        return tuple(size for _, size, moves in block if moves)

    def movable_bytes(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return, for each of ``tensors``, the bytes of its storage if the block saves it and it may be offloaded, and
        0 otherwise. A storage of several tensors counts for the first of them."""
        seen = set(self._loss)
        sizes = []
        for tensor in tensors:
            key = address(plain_rows(tensor).untyped_storage())
            size, moves = self._block.get(key, (0, False))
            sizes.append(size if moves and key not in seen else 0)
            seen.add(key)
        return tuple(sizes)

    def byte_totals(
        self, entering: Sequence[Tensor], results: Sequence[Tensor]
    ) -> tuple[int, int, int, int]:
        """Return four numbers of bytes, in which each storage counts once:

        1. the offloadable bytes that the block saves for backward
        2. the resident bytes that the block saves for backward
        3. the bytes that the loss saves
        4. all bytes that exist after the forward and did not exist before it

        ``entering`` and ``results`` are the inputs and outputs of the forward. The loss runs after the block, so the
        tensors that the loss saves are neither offloaded nor recomputed.
        """
        block = {key: found for key, found in self._block.items() if key not in self._loss}
        before = {address(tensor.untyped_storage()) for tensor in entering}
        left = {key: size for key, (size, _) in block.items() if key not in before} | self._loss
        given = [plain_rows(tensor).untyped_storage() for tensor in results]
        left |= {address(storage): storage.nbytes() for storage in given}
        moved = sum(size for size, moves in block.values() if moves)
        stays = sum(size for size, moves in block.values() if not moves)
        return moved, stays, sum(self._loss.values()), sum(left.values())


def without_history(tensor: Tensor) -> Tensor:
    """Return the tensor detached from autograd, unless it is a leaf.

    A node may save its own output. If the saved tensor referenced the node, this would be a reference cycle that the
    garbage collector cannot find.
    """
    return tensor if tensor.is_leaf else tensor.detach()
