"""Which checkpoints the nodes that are there hold together, where they share no folder.

A node may have been lost with what it had saved, come back with what it has, or never have seen the run. What counts is
whether all parts of a checkpoint are somewhere::

    node a    step-20  stage-00, stage-01      step-40  stage-00       step 40: its stage-01 was on b, and is lost
    node c    has just joined                                          step 20: whole; c gets its index, and the
                                                                       files that its ranks need when it is loaded

Of two starts of a run the later one counts, however far the other has come: a half that was cut off has trained alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.errors import CheckpointError, printable
from parallax.machine.host import node_name
from parallax.nodes.places import Nodes, Sites
from parallax.nodes.together import from_all
from parallax.runtime.checkpoint import CheckpointReader, digest, list_checkpoints, step_of
from parallax.runtime.checkpoint.folder import INDEX


@dataclass(frozen=True, slots=True)
class HeldParts:
    """What a node has of a checkpoint: all but the tensors that are ``absent``, each with the node that saved it.
    ``started``: when its run was started."""

    digest: str
    started: float
    absent: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Together:
    """A checkpoint that is whole: its folder's name, and the ranks that have its index."""

    name: str
    started: float
    holders: tuple[int, ...]


def whole_checkpoints(
    directory: Path, sites: Sites, nodes: Nodes
) -> tuple[list[Together], list[str]]:
    """The checkpoints below ``directory`` of which the nodes have all parts, with their index on every node; and what
    is to be said of others. Called by every rank of torch's world."""
    told = from_all(lambda: _held(directory, nodes) if sites.leads else ({}, []))
    damaged = [line for _, lines in told for line in lines]
    whole, lost = _sorted_out([held for held, _ in told])
    lost = [
        f"{directory}: {words}: start the nodes that have saved it, or copy its folder here; "
        "checkpoint.directory=FOLDER names a place that all nodes share, and trainer.resume=never with another name "
        "starts anew"
        for words in lost
    ]
    for each in whole:
        _make_known(directory, each, sites)
    return whole, damaged + lost


def _held(directory: Path, nodes: Nodes) -> tuple[dict[str, HeldParts], list[str]]:
    """What this node has, and what is wrong with the rest."""
    held, damaged = dict[str, HeldParts](), list[str]()
    # One that has lost its index says so, as any other that is damaged.
    named = {path for path in directory.glob("step-*") if step_of(path) is not None}
    for path in sorted({*list_checkpoints(directory), *named}):
        try:
            reader = CheckpointReader(path)
        except CheckpointError as error:
            damaged.append(f"{error} (on {node_name()})" if nodes.several else str(error))
            continue
        held[path.name] = HeldParts(digest(path), reader.started, reader.elsewhere())
    return held, damaged


def _sorted_out(found: Sequence[Mapping[str, HeldParts]]) -> tuple[list[Together], list[str]]:
    """Those that are whole, and why others are not, the last first."""
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


def _make_known(directory: Path, wanted: Together, sites: Sites) -> None:
    """Put the index of a checkpoint where a node does not have it; another one of its name goes aside."""
    leaders = sorted(set(sites.leaders))
    if all(rank in wanted.holders for rank in leaders):
        return
    path = directory / wanted.name / INDEX
    holder = wanted.holders[0]
    text = from_all(lambda: path.read_text("utf-8") if sites.rank == holder else "")[holder]

    def write() -> None:
        if not sites.leads or sites.rank in wanted.holders:
            return
        try:
            if path.parent.exists():
                aside = f"other-{digest(path.parent)[:8]}-{wanted.name}"
                path.parent.rename(directory / aside)
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}; make room") from error

    from_all(write)
