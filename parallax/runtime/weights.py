"""Load the weights of a stage from a checkpoint that was saved under any plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from parallax.model.describe import Chain, parameter_names
from parallax.nodes.places import DirectoryGroups, Nodes, find_directory_groups
from parallax.nodes.together import all_gather_result, broadcast_result
from parallax.runtime.checkpoint import CheckpointReader, mark
from parallax.runtime.checkpoint.masters import HeldMasters
from parallax.runtime.parts.collecting import collect
from parallax.runtime.stage import Stage


def groups_of(directory: Path, nodes: Nodes) -> DirectoryGroups:
    """Return the groups of ranks that share ``directory`` or, if rank 0 does not find it, its nearest existing parent.

    All ranks call this function.
    """
    # A relative directory stays relative: nodes may start in different working directories.
    nearest = broadcast_result(
        lambda: next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    )
    return find_directory_groups(nearest, nodes)


def open_checkpoint(
    chain: Chain,
    stage: Stage,
    directory: Path,
    groups: DirectoryGroups,
    check_more: Callable[[CheckpointReader], None] = lambda _: None,
    *,
    averaged: bool = False,
) -> CheckpointReader:
    """Return the reader of the checkpoint ``directory``, after every rank has checked the tensors that its ``stage``
    needs.

    All ranks call this function. Files that only other nodes have are copied first; ``groups`` says which ranks share
    the directory. ``check_more`` may refuse the checkpoint by an exception, which all ranks raise. If ``averaged`` is
    True, the reader returns the averages of weights that have one.
    """
    left_out, names = chain.left_out, saved_tensors(chain, stage)
    collect(directory, names, groups)

    def check() -> CheckpointReader:
        reader = CheckpointReader(directory, averaged=averaged)
        whole = chain.whole
        reader.check_names(
            set(parameter_names(whole, range(len(whole.blocks)))) - left_out,
            whole.fingerprint(),
            whole.structure(),
            str(chain.dtype),
        )
        check_more(reader)
        reader.check_base(chain.base, _marks(chain, stage), str(chain.dtype))
        HeldMasters(reader).check(names)
        return reader

    found: list[CheckpointReader] = []
    all_gather_result(lambda: found.append(check()))
    return found[0]


def assign_weights(chain: Chain, stage: Stage, reader: CheckpointReader) -> None:
    """Set the weights and buffers of ``stage`` to those that ``reader`` reads, from a checkpoint that
    :func:`open_checkpoint` has checked."""
    with torch.no_grad():
        stage.assign(_loaded(chain, stage, HeldMasters(reader)))


def saved_tensors(chain: Chain, stage: Stage) -> dict[str, Tensor]:
    """Return the tensors of ``stage`` that checkpoints hold."""
    return {n: t for n, t in stage.named_tensors().items() if n not in chain.left_out}


def _loaded(chain: Chain, stage: Stage, held: HeldMasters) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor, new value) for the stage's tensors that the checkpoint holds. ``held`` reads the values.

    An offloaded block is written as a whole. So its tensors that the checkpoint leaves out are yielded too, with their
    present values.
    """
    if not chain.left_out:
        for name, tensor in stage.named_tensors().items():
            yield name, tensor, held.weight(name, tensor).to(tensor.dtype)
        return
    for name, tensor, value in stage.values():
        if name not in chain.left_out:
            yield name, tensor, held.weight(name, tensor).to(tensor.dtype)
        elif stage.is_offloaded(tensor):
            yield name, tensor, value


def _marks(chain: Chain, stage: Stage) -> dict[str, int]:
    """Return the checksums of the stage's parameters that checkpoints leave out, by name."""
    if not chain.left_out:
        return {}
    return {n: mark(value) for n, _, value in stage.values() if n in chain.left_out}
