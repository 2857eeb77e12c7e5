"""Copy to this node the files of a checkpoint that its ranks need and that are on another node.

Nodes without a shared directory each have the files of their own ranks. A run that resumes may need more files: those
with a parameter that two stages share, with optimizer states that one replica holds for all replicas, or with tensors
of ranks that have moved to another node. The files are copied over the network into the node's own folder::

    node a    stage-00 ──copied, where a rank of node b needs a tensor of it──> node b    stage-00, stage-01
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
import torch.distributed as dist

from parallax.common.files import replacing
from parallax.errors import CheckpointError, printable
from parallax.machine.host import node_name
from parallax.nodes.places import DirectoryGroups
from parallax.nodes.together import all_gather_result
from parallax.runtime.checkpoint import CheckpointReader

_CHUNK_BYTES = 16 * 2**20
_PART_BYTES = 2**30  # after which all ranks synchronize

_Done = TypeVar("_Done")


def collect(directory: Path, names: Iterable[str], groups: DirectoryGroups) -> None:
    """Copy to this node the missing files of the checkpoint ``directory`` that hold tensors of the parameters
    ``names``, which this rank needs.

    ``groups`` says which ranks share the directory. Every rank of torch's default group calls this function. Tensors
    that no node has stay missing.
    """
    if groups.shared:
        return
    lacking, files = zip(
        *all_gather_result(lambda: _search(CheckpointReader(directory), names, groups))
    )
    wanted: dict[str, set[int]] = {}  # file → the leaders to copy it to
    holders: dict[str, int] = {}
    for rank, missing in enumerate(lacking):
        for name in missing:
            for holder, held in enumerate(files):
                if name in held:
                    wanted.setdefault(held[name], set()).add(groups.leaders[rank])
                    holders.setdefault(held[name], holder)
                    break
    for file in sorted(wanted):
        _Copy(directory / file, holders[file], wanted[file], groups.rank).run()


def _search(
    reader: CheckpointReader, names: Iterable[str], groups: DirectoryGroups
) -> tuple[list[str], dict[str, str]]:
    """Return two results: the full names of those tensors of the parameters ``names`` that this node lacks; and a dict
    from the full name of each tensor on this node to the name of its file.

    One rank of each group of ranks that share a directory returns the dict; it is empty on all other ranks.
    """
    return reader.missing(names), reader.files() if groups.leads else {}


class _Copy:
    """Copies the file ``path`` from the node of the rank ``holder`` to the nodes of the ranks ``takers``. ``rank`` is
    this rank. All ranks synchronize after each part of the file, so that every rank learns of a failure, and no wait
    exceeds the timeout of collectives."""

    def __init__(self, path: Path, holder: int, takers: Collection[int], rank: int) -> None:
        self._path, self._holder, self._takers = path, holder, sorted(takers)
        self._holds, self._takes = rank == holder, rank in takers
        self._file: BinaryIO | None = None

    def run(self) -> None:
        """Copy the file. Raises :class:`CheckpointError` on all ranks if one rank fails."""
        with contextlib.ExitStack() as stack:
            left = all_gather_result(lambda: self._checked(lambda: self._open(stack)))[self._holder]
            while left:
                part = min(left, _PART_BYTES)
                all_gather_result(partial(self._checked, partial(self._move, part)))
                left -= part
            all_gather_result(lambda: self._checked(stack.close))

    def _open(self, stack: contextlib.ExitStack) -> int:
        """Open the file on the holder and on the takers, until ``stack`` is closed. Return the file's size on the
        holder, and 0 on all other ranks."""
        if self._holds:
            self._file = stack.enter_context(self._path.open("rb"))
            return self._path.stat().st_size
        if self._takes:
            self._file = stack.enter_context(replacing(self._path))
        return 0

    def _move(self, left: int) -> None:
        """Copy the next ``left`` bytes. A rank whose file cannot be read or written keeps sending or receiving, and
        raises at the end."""
        failure: OSError | None = None
        file = self._file
        while file is not None and left:
            chunk = torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8)
            content = memoryview(chunk.numpy().data)
            try:
                if self._holds and file.readinto(content) != len(content):  # type: ignore[attr-defined]
                    raise OSError(errno.EIO, "the file has become shorter")
            except OSError as error:
                failure = error
            for taker in self._takers if self._holds else ():
                dist.send(chunk, taker)
            if self._takes:
                dist.recv(chunk, self._holder)
                try:
                    file.write(content)
                except OSError as error:
                    failure = error
            left -= len(chunk)
        if failure is not None:
            raise failure

    def _checked(self, call: Callable[[], _Done]) -> _Done:
        try:
            return call()
        except OSError as error:
            raise CheckpointError(
                f"cannot copy {printable(str(self._path))} between nodes ({node_name()}: {error.strerror}), of which "
                "another node's ranks need parts: free disk space, or set checkpoint.directory to a folder that all "
                "nodes share"
            ) from error
