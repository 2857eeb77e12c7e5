"""Which of the tensors that autograd saves are activations that may leave the device.

The profiler counts with this rule and the swap manager moves by it, so what was predicted is what is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from parallax.model.block import plain_rows
from parallax.model.private import is_wrapped

# Cast, transpose, view, expand: the longest way from a parameter to its copy seen so far.
_CHAIN_LENGTH = 4
_SMALL_PART = 8  # moving a storage for less than this share of it costs more than it can free
NOT_PLAIN = "not plain strided memory"
# Parts of one memory that are no views of it count their changes each for itself (torch.unsafe_chunk; gates of an LSTM
# are such): one of them may change while a copy of the others, and so of it, is already under way.
PART = "part of a memory that it is no view of"
ELSEWHERE = "computed on another stream"
_LEAF = "view or cast of a parameter"
SMALL = "smaller than swap.minimum_bytes"
# Read a parameter at places that the data chose.
_LOOKUPS = "Embedding", "Index", "Gather", "Take"


def address(storage: UntypedStorage) -> int:
    """What tells storages apart: where their bytes are, or the storage itself where it has no bytes but a size."""
    return id(storage) if storage.device.type == "meta" else storage.data_ptr()


def _of_bytes(storage: UntypedStorage) -> int:
    """The same, the fast way first: only what has no bytes has no address."""
    return storage.data_ptr() or address(storage)


class Selector:
    """Decides by storage. Stay: parameters and buffers, copies made from a parameter alone (autocast's
    casts), what the caller holds anyway (tensors that collect a gradient, small slices of a batch), small
    tensors, parts of a memory that do not share its version, and anything that is not plain strided memory of the class
    ``plain``. ``streams`` knows parameters whose
    memory comes and goes, so that their addresses change."""

    def __init__(
        self,
        held: Iterable[Tensor],
        minimum_bytes: int,
        *,
        plain: type[Tensor] = Tensor,
        streams: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        held = list(held)
        self._streams = streams
        self._largest = max((tensor.numel() for tensor in held), default=0)
        # 0: no bytes at all.
        self._held = {0, *(address(tensor.untyped_storage()) for tensor in held)}
        self._plain = plain
        self._address = _of_bytes if plain is Tensor else address
        self._minimum = max(1, minimum_bytes)

    def moves(self, tensor: Tensor) -> bool:
        """Whether the storage of a saved ``tensor`` may be moved."""
        return self.why_kept(tensor) is None

    def why_kept(self, tensor: Tensor) -> str | None:
        """Why the storage of a saved ``tensor`` may not be moved; None: it may."""
        reason = self.why_kept_itself(tensor)
        return (
            _LEAF
            if reason is None and tensor.requires_grad and self._copied_from_leaf(tensor)
            else reason
        )

    def why_kept_itself(self, tensor: Tensor) -> str | None:
        """The same without a look at its history, for very many tensors: a node of the graph that Python has seen is
        freed not in a loop but inside the call that freed the node before, so of 100,000 the stack overflows."""
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
        if self._address(storage) in self._held or self._streams(tensor):
            return "parameter or buffer"
        if part < whole and not tensor._is_view():
            return PART
        if part * _SMALL_PART < whole and not _has_history(tensor):
            return "small part of a batch"
        if _of_leaf(tensor):
            return _LEAF
        return None

    def _copied_from_leaf(self, tensor: Tensor) -> bool:
        """A view of a tensor that collects a gradient, or a copy made from a parameter alone."""
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
    """Without one, rows of a batch or of a whole data set: the storage belongs to the caller, who still holds it."""
    return tensor.requires_grad or tensor.grad_fn is not None


def _of_leaf(tensor: Tensor) -> bool:
    """A tensor that collects a gradient, or a view of one or of any parameter. FSDP gathers parameters into memory that
    it empties between uses, frozen ones too: its address is not known."""
    base, trained = tensor._base, tensor.requires_grad
    if trained and tensor.is_leaf:
        return True
    if base is None:
        return False
    return isinstance(base, Parameter) or (trained and base.is_leaf and base.requires_grad)


class Saved:
    """The bytes that autograd saves for backward, told apart by storage."""

    def __init__(
        self, held: Sequence[Tensor], minimum_bytes: int, *, plain: type[Tensor] = Tensor
    ) -> None:
        self._held = {address(tensor.untyped_storage()) for tensor in held}
        self._selector = Selector(held, minimum_bytes, plain=plain)
        self._block: dict[int, tuple[int, bool]] = {}
        self._loss: dict[int, int] = {}
        self._alive: list[UntypedStorage] = []  # so that no address is used twice

    def by_block(self) -> saved_tensors_hooks:
        """What is saved inside, the block saves."""

        def pack(tensor: Tensor) -> Tensor:
            storage = plain_rows(tensor).untyped_storage()
            if address(storage) not in self._held:
                self._block[address(storage)] = (storage.nbytes(), self._selector.moves(tensor))
                self._alive.append(storage)
            return without_history(tensor)

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def by_loss(self) -> saved_tensors_hooks:
        """What is saved inside, the loss saves."""

        def pack(tensor: Tensor) -> Tensor:
            storage = plain_rows(tensor).untyped_storage()
            self._loss[address(storage)] = storage.nbytes()
            self._alive.append(storage)
            return without_history(tensor)

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def sums(
        self, entering: Sequence[Tensor], results: Sequence[Tensor]
    ) -> tuple[int, int, int, int]:
        """Bytes that may move, that stay, that the loss saves (it runs after the block, so they are neither offloaded
        nor recomputed), and all that a forward newly leaves behind."""
        block = {key: found for key, found in self._block.items() if key not in self._loss}
        before = {address(tensor.untyped_storage()) for tensor in entering}
        left = {key: size for key, (size, _) in block.items() if key not in before} | self._loss
        given = [plain_rows(tensor).untyped_storage() for tensor in results]
        left |= {address(storage): storage.nbytes() for storage in given}
        moved = sum(size for size, moves in block.values() if moves)
        stays = sum(size for size, moves in block.values() if not moves)
        return moved, stays, sum(self._loss.values()), sum(left.values())


def without_history(tensor: Tensor) -> Tensor:
    """What a hook may keep of a saved tensor: an output that holds what saved it is a cycle that no collector sees."""
    return tensor if tensor.is_leaf else tensor.detach()
