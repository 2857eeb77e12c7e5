"""Find complete checkpoints if the nodes share no folder. A checkpoint is complete if the present nodes together have
all its tensors.

A node may be lost together with its files, may have come back with old files, or may be new to the run::

    node a    step-20  stage-00, stage-01      step-40  stage-00       step 40: its stage-01 was on b, and is lost
    node c    has just joined                                          step 20: whole; c gets its index, and the
                                                                       files that its ranks need when it is loaded

If a run was started twice, checkpoints of the later start are preferred, even those with fewer steps, because the
earlier start may have trained alone behind a network partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.errors import CheckpointError, printable
from parallax.machine.host import node_name
from parallax.nodes.places import DirectoryGroups, Nodes
from parallax.nodes.together import all_gather_result
from parallax.runtime.checkpoint import CheckpointReader, digest, list_checkpoints, step_of
from parallax.runtime.checkpoint.folder import INDEX


@dataclass(frozen=True, slots=True)
class HeldParts:
    """The files of a checkpoint that one node has.

    ``digest`` is the SHA-256 of the checkpoint's index file, which distinguishes checkpoints of the same step.
    ``absent`` maps the name of each tensor that is not on this node to the node that saved it. ``started`` is the time
    of the start that saved the checkpoint.
    """

    digest: str
    started: float
    absent: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Together:
    """A complete checkpoint.

    ``name`` is the name of its folder, and ``started`` the time of the start of the run that saved the checkpoint.
    ``holders`` are the ranks whose node has its index file.
    """

    name: str
    started: float
    holders: tuple[int, ...]


def whole_checkpoints(
    directory: Path, groups: DirectoryGroups, nodes: Nodes
) -> tuple[list[Together], list[str]]:
    """Return the checkpoints in ``directory`` that are complete over all nodes, and messages about the incomplete ones.

    Nodes that lack the index of a complete checkpoint get it. Every rank of torch's default group calls this function.
    """
    found = all_gather_result(lambda: _held(directory, nodes) if groups.leads else ({}, []))
    damaged = [line for _, lines in found for line in lines]
    whole, lost = _complete_checkpoints([held for held, _ in found])
    lost = [
        f"{directory}: {text}: start the nodes that saved it, or copy its folder here; "
        "checkpoint.directory=FOLDER sets a folder that all nodes share, and trainer.resume=never with another name "
        "starts a new run"
        for text in lost
    ]
    for each in whole:
        _write_missing_index(directory, each, groups)
    return whole, damaged + lost


def _held(directory: Path, nodes: Nodes) -> tuple[dict[str, HeldParts], list[str]]:
    """Return a dict from the name of each checkpoint on this node to a description of its files here, and messages
    about damaged checkpoints."""
    held, damaged = dict[str, HeldParts](), list[str]()
    # A folder without its index is reported as damaged.
    named = {path for path in directory.glob("step-*") if step_of(path) is not None}
    for path in sorted({*list_checkpoints(directory), *named}):
        try:
            reader = CheckpointReader(path)
        except CheckpointError as error:
            damaged.append(f"{error} (on {node_name()})" if nodes.several else str(error))
            continue
        held[path.name] = HeldParts(digest(path), reader.started, reader.elsewhere())
    return held, damaged


def _complete_checkpoints(
    found: Sequence[Mapping[str, HeldParts]],
) -> tuple[list[Together], list[str]]:
    """Return the complete checkpoints, and a message for each incomplete one, latest first. ``found``: the result of
    :func:`_held` on each rank."""
    whole, lost = dict[str, Together](), list[str]()
    every = {(name, each.digest) for held in found for name, each in held.items()}
    for name, mark in sorted(every, reverse=True):
        having = {
            rank: each
            for rank, held in enumerate(found)
            if (each := held.get(name)) is not None and each.digest == mark
        }
        first = next(iter(having.values()))
        absent = set(first.absent).intersection(*(each.absent for each in having.values()))
        if absent:
            places = ", ".join(sorted({printable(first.absent[each]) for each in absent}))
            lost.append(
                f"{name} is not whole: {len(absent)} tensors that {places} saved are not here"
            )
            continue
        better = Together(name, first.started, tuple(having))
        if name not in whole or whole[name].started < better.started:
            whole[name] = better
    return list(whole.values()), lost


def _write_missing_index(directory: Path, wanted: Together, groups: DirectoryGroups) -> None:
    """Write the index of the checkpoint ``wanted`` on nodes that lack it. If such a node has another checkpoint with
    the same name, that folder is renamed first."""
    leaders = sorted(set(groups.leaders))
    if all(rank in wanted.holders for rank in leaders):
        return
    path = directory / wanted.name / INDEX
    holder = wanted.holders[0]
    text = all_gather_result(lambda: path.read_text("utf-8") if groups.rank == holder else "")[
        holder
    ]

    def write() -> None:
        if not groups.leads or groups.rank in wanted.holders:
            return
        try:
            if path.parent.exists():
                aside = f"other-{digest(path.parent)[:8]}-{wanted.name}"
                path.parent.rename(directory / aside)
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: {error.strerror}; free disk space"
            ) from error

    all_gather_result(write)
