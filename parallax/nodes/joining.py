"""Initialise torch.distributed on all ranks within a time limit, and report missing ranks."""

from __future__ import annotations

import datetime
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from parallax.errors import AbsentError, ConfigError, printable
from parallax.machine.host import interface_of, own_address
from parallax.machine.variables import unset_hint
from parallax.nodes.meeting import OpenMeeting, ask

TIMEOUT = datetime.timedelta(minutes=10)  # of an operation on any group
JOIN_SECONDS = 300.0  # for all ranks to join
NOTE_SECONDS = 10.0  # after which the missing ranks are named
_POLL_SECONDS = 0.05
_JOIN = "PARALLAX_JOIN_SECONDS"
_NAMED = 5  # ranks that a message names
_LATE_SECONDS = 5.0  # seconds by which torch may exceed its own limit


def start_processes(file: str | None = None) -> None:
    """Initialise the default process group over gloo. With CUDA devices, gloo stages tensors through the host.

    If all ranks are on one host, they join at ``file``. Otherwise they join at torchrun's address, separate from ranks
    of an earlier start (:mod:`parallax.nodes.meeting`). Gloo then uses the network interface on the route to that
    address, unless the user names another interface. By default gloo would look up this host's name, which often means
    loopback.
    """
    store: Any
    answer: Callable[[], object] = _nothing
    if file is None:
        store, answer, rank, size = _network_store()
    else:
        rank, size, restart = (
            int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        )
        store = dist.FileStore(f"{file}-{restart}", size)  # type: ignore[attr-defined]
    addresses = dist.PrefixStore("addresses", store)  # type: ignore[attr-defined]
    own = own_address(os.environ.get("MASTER_ADDR", "")) if file is None else ""
    addresses.set(str(rank), own)
    roll_call = dist.PrefixStore("roll-call", store)  # type: ignore[attr-defined]
    limit = join_seconds()
    wait_for_all(
        roll_call,
        rank,
        size,
        join_seconds=limit,
        note_seconds=_note_seconds(limit),
        meanwhile=answer,
    )
    if file is None:
        _choose_card(own, [addresses.get(str(other)).decode() for other in range(size)])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def _choose_card(own: str, addresses: Sequence[str]) -> None:
    """Set the network interface of gloo and NCCL to the one on the route to the other hosts, unless the user has set
    one.

    ``own`` is this host's address on that route. On the rendezvous host it is empty, because its route to itself is
    loopback. There the interface on the route to the first non-empty address in ``addresses`` is used.
    """
    others = [address for address in addresses if address]
    card = interface_of(own or (own_address(others[0]) if others else ""))
    if card:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
        os.environ.setdefault(
            "NCCL_SOCKET_IFNAME", f"={card}"
        )  # matches the whole name instead of its beginning


def join_seconds() -> float:
    """Return the time limit for all ranks to join: ``PARALLAX_JOIN_SECONDS``, or :data:`JOIN_SECONDS`."""
    given = os.environ.get(_JOIN, "")
    if given and not given.isdecimal():
        raise ConfigError(f"{_JOIN}={printable(given)}: accepted is a whole number of seconds")
    return float(given or JOIN_SECONDS)


def _network_store() -> tuple[Any, Callable[[], object], int, int]:
    """Return torch's store at MASTER_ADDR, a function to call repeatedly until all ranks have joined, this rank, and
    the number of ranks.

    Only rank 0 can list the missing ranks. If rank 0 itself is missing, the other ranks report that and exit. torch
    alone would wait without a message, and for ever if another program listens at the port.
    """
    limit = join_seconds()
    rank, size = (os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE"))
    place = printable(":".join(os.environ.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT")))
    absent = (
        f"rank 0 of {size} has not joined at {place} within {limit:g} s: check why its process does not start, or "
        f"its host, or whether another program has that port{unset_hint()}"
    )

    def end() -> None:
        os.write(2, f"parallax: {absent}\n".encode())
        os._exit(AbsentError.exit_code)

    waits = f"parallax: waiting for rank 0 of {size} at {place}, up to {limit:g} s\n".encode()
    timers = [
        threading.Timer(_note_seconds(limit), lambda: os.write(2, waits)),
        threading.Timer(limit + _LATE_SECONDS, end),
    ]
    begun = time.monotonic()
    for timer in timers if rank != "0" else []:
        timer.daemon = True
        timer.start()
    try:
        store, answer = _store(int(rank), int(size), limit)
    except (dist.DistError, TimeoutError) as error:
        if rank == "0" or time.monotonic() - begun < limit:
            raise
        raise AbsentError(absent) from error
    finally:
        for timer in timers:
            timer.cancel()
    store.set_timeout(TIMEOUT)
    return store, answer, int(rank), int(size)


def _store(rank: int, size: int, limit: float) -> tuple[Any, Callable[[], object]]:
    """Return a store, and a function that rank 0 calls repeatedly until all ranks have joined. ``rank`` is this rank of
    ``size`` ranks, and ``limit`` is how many seconds to wait for rank 0.

    If torchrun's agent keeps a store (``TORCHELASTIC_USE_AGENT_STORE``), the result is a part of that store, which
    outlives the ranks. Otherwise rank 0 opens a new store, without waiting for the other ranks to connect.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    end = time.monotonic() + limit
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        size,
        is_master=rank == 0 and not outlives,
        timeout=datetime.timedelta(seconds=limit),
        wait_for_workers=False,
    )
    if not outlives:
        return store, _nothing
    if rank == 0:
        meeting = OpenMeeting(store)
        return meeting.part, meeting.answer
    return ask(store, max(0.0, end - time.monotonic())), _nothing


def _nothing() -> None:
    """No-op, for ranks that have nothing to do repeatedly while they wait for all ranks to join."""


def _note_seconds(limit: float) -> float:
    return min(NOTE_SECONDS, limit / 3)


def wait_for_all(
    store: Any,
    rank: int,
    size: int,
    *,
    join_seconds: float = JOIN_SECONDS,
    note_seconds: float = NOTE_SECONDS,
    meanwhile: Callable[[], object] = _nothing,
) -> None:
    """Wait until all ``size`` ranks have called this function with the same ``store``, and report the ranks that are
    missing.

    torch itself would wait twice as long and name no rank. After ``note_seconds`` the lowest rank that is present
    prints the missing ranks on stderr. ``meanwhile`` is called repeatedly while waiting.

    Raises :class:`AbsentError` after ``join_seconds``, and :class:`ConfigError` if another rank was started with
    another number of ranks.
    """
    _check_size(store, rank, size)
    store.set(f"rank {rank}", "")
    store.add("here", 1)
    start, noted = time.monotonic(), False
    while store.add("here", 0) < size:
        meanwhile()
        if store.check(["another size"]):
            raise ConfigError(store.get("another size").decode())
        seconds = time.monotonic() - start
        if seconds > min(join_seconds, note_seconds if not noted else join_seconds):
            absent = [each for each in range(size) if not store.check([f"rank {each}"])]
            if seconds > join_seconds and absent:
                raise AbsentError(
                    f"{_names(absent)} of {size} {'has' if len(absent) == 1 else 'have'} not joined within "
                    f"{join_seconds:g} s: check why its process does not start, or its host{unset_hint()}"
                )
            if absent and rank < min(set(range(size)) - set(absent) - {rank}, default=size):
                who = f"{len(absent)} of {size} ranks: {_names(absent)}"
                print(
                    f"parallax: waiting for {printable(who)}; up to {join_seconds:g} s",
                    file=sys.stderr,
                )
            noted = True
        time.sleep(_POLL_SECONDS)


def _names(ranks: Sequence[int]) -> str:
    """Return a text for messages with the first few of ``ranks`` and the number of the others."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"


def _check_size(store: Any, rank: int, size: int) -> None:
    """Raise :class:`ConfigError` if ``size``, this rank's number of ranks, differs from the number that the first rank
    wrote into ``store``."""
    known = store.compare_set("size", "", f"{size} {rank}").decode()
    first, _, other = known.partition(" ")
    if int(first) != size:
        text = (
            f"rank {rank} was started as one of {size} (WORLD_SIZE) and rank {other} as one of {first}: start all with "
            "the same number"
        )
        store.set("another size", text)
        time.sleep(1.0 if rank == 0 else 0.0)  # rank 0's store ends with its process
        raise ConfigError(text)


def stop_processes() -> None:
    """Destroy the default process group. If it still exists when the interpreter ends, the process may abort."""
    if dist.is_initialized():
        # Objects in reference cycles that hold groups would otherwise be freed after the interpreter has ended.
        gc.collect()
        dist.destroy_process_group()
