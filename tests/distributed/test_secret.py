"""Ranks that share a secret know each other, and read nothing of anybody else."""

from __future__ import annotations

import os
import pickle
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallax.errors import ConfigError, TransportError
from parallax.nodes import objects
from parallax.nodes.objects import all_objects, object_of_first, sign_with
from parallax.nodes.secret import agree, run_secret
from parallax.nodes.together import from_all, from_first
from tests.distributed.pool import Pool

KEY = b"k" * 32


def agreed(*given: bytes) -> list[Any]:
    """What ranks with these secrets make of each other."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=20))

    def rank(number: int) -> Any:
        try:
            return agree(store, number, len(given), given[number])
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(rank, range(len(given))))


def test_those_who_know_it_have_a_key_of_this_start() -> None:
    first, second = agreed(KEY, KEY), agreed(KEY, KEY)
    assert first[0] == first[1] != second[0]
    assert len(first[0]) == 32
    assert agreed(b"", b"") == [b"", b""]


def test_those_who_do_not_are_named() -> None:
    one, other = agreed(KEY, b"another secret ...")
    assert one.startswith("rank 1 of 2 has another secret than rank 0: give all hosts the same")
    assert other.startswith("rank 0 of 2 has another secret than rank 1")
    said = set(agreed(KEY, b"", KEY, b""))
    assert said == {
        "ranks 1, 3 of 4 has no secret, and others have one: set PARALLAX_SECRET_FILE on all hosts"
    }


def test_a_store_that_repeats_a_start_is_not_believed() -> None:
    """It may have heard one, and answer with its nonces and proofs, for whose key it has recorded what was signed."""
    heard = dist.HashStore()  # type: ignore[attr-defined]
    heard.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: agree(heard, rank, 2, KEY), range(2)))

    class Repeats:
        def set(self, key: str, value: str) -> None: ...

        def get(self, key: str) -> bytes:
            return bytes(heard.get(key))

    with pytest.raises(ConfigError, match="has another secret"):
        agree(Repeats(), 0, 2, KEY)


def test_where_a_secret_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_secret() == b""
    monkeypatch.setenv("PARALLAX_SECRET", "too short")
    with pytest.raises(ConfigError, match=r"has 9 bytes, and 16 are the least"):
        run_secret()
    monkeypatch.setenv("PARALLAX_SECRET", "x" * 20)
    assert run_secret() == b"x" * 20
    file = tmp_path / "secret"
    monkeypatch.setenv("PARALLAX_SECRET_FILE", str(file))
    with pytest.raises(ConfigError, match="only one of them"):
        run_secret()
    monkeypatch.delenv("PARALLAX_SECRET")
    with pytest.raises(ConfigError, match="No such file"):
        run_secret()
    file.write_text("y" * 20 + "\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users can read it: chmod 600"):
        run_secret()
    file.chmod(0o600)
    assert run_secret() == b"y" * 20
    file.write_text("\n")
    with pytest.raises(ConfigError, match="it is empty"):
        run_secret()


def talks(keys: list[bytes]) -> Any:
    """Objects of all and of the first, by ranks with these keys."""
    rank = dist.get_rank()
    sign_with(keys[rank])
    try:
        every = all_objects({"rank": rank, "long": "x" * (rank * 1000)})
        first = object_of_first(("first", rank))
        both = from_all(lambda: rank), from_first(lambda: rank)
        return [each["rank"] for each in every], first, both
    except TransportError as error:
        return str(error)
    finally:
        sign_with(b"")


@pytest.mark.parametrize("key", [b"", KEY], ids=["unsigned", "signed"])
def test_objects_arrive(pool: Pool, key: bytes) -> None:
    assert pool.run(talks, 2, [key, key]) == [([0, 1], ("first", 0), ([0, 1], 0))] * 2


def test_objects_of_somebody_else_are_not_read(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(talks, 2, [KEY, b"other" * 8])):
        assert said.startswith(
            f"what came as rank {1 - rank}'s is not signed with the run's secret"
        )


class Trap:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def sends_a_pickle(mark: str, key: bytes) -> str:
    """Rank 1 has no key, and sends a pickle where objects are expected, as whoever reaches the port could."""
    if dist.get_rank() == 1:
        data = secrets.token_bytes(32) + pickle.dumps(Trap(mark))
        dist.all_gather(
            [torch.empty(1, dtype=torch.int64) for _ in range(2)], torch.tensor([len(data)])
        )
        padded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
        return ""
    sign_with(key)
    try:
        all_objects(None)
    except TransportError as error:
        return str(error)
    finally:
        sign_with(b"")
    return "read"


def test_a_pickle_of_a_stranger_is_not_loaded(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(sends_a_pickle, 2, str(tmp_path / "mark"), KEY)
    assert "was not read" in said[0]
    assert not (tmp_path / "mark").exists()


def says_a_huge_size() -> str:
    """Rank 1 announces more than there is memory for."""
    if dist.get_rank() == 1:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([2**50]))
        return ""
    try:
        all_objects(None)
    except TransportError as error:
        return str(error)
    return "read"


def test_no_object_is_larger_than_any_of_ours(pool: Pool) -> None:
    assert pool.run(says_a_huge_size, 2)[0].startswith(
        "rank 1 sends an object of 1.0 PiB, and 2.0 GiB are the most"
    )


def test_an_object_cannot_be_sent_again_or_as_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_key", KEY)
    sealed = objects._sealed("stop", "world 1", 0)
    assert objects._opened(sealed, "world 1", 0) == "stop"
    for label, rank in (("world 2", 0), ("other 1", 0), ("world 1", 1)):
        with pytest.raises(TransportError):
            objects._opened(sealed, label, rank)
