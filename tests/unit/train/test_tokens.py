"""Rows of token files of other programs, and mixtures of them."""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parallax.config import compose, dump, load
from parallax.errors import ConfigError, DataError
from parallax.model.factory.gpt import GPTConfig
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.table import BOTH, INPUTS, TARGETS
from parallax.train.data.token_file import PackedRows, TokenTable
from parallax.train.data.tokens import MixedTable, TokensDataConfig


def source(path: Path | str = "", sequence: int = 4, vocabulary: int = 1000, **options: Any) -> Any:
    config = TokensDataConfig(path=str(path), **options)
    return config.open(GPTConfig(vocabulary=vocabulary, sequence=sequence), 0)


def in_order(path: Path | str, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    found = source(path, shuffle=False, validation=0, **options)
    batch, n = found.batch(len(found)), len(found)
    assert batch.inputs(0, n).dtype == batch.targets(0, n).dtype == torch.int64
    return batch.inputs(0, n).tolist(), batch.targets(0, n).tolist()


def windows(tokens: Any, length: int = 5) -> list[list[int]]:
    rows = len(tokens) // length
    return np.asarray(tokens)[: rows * length].reshape(rows, length).tolist()  # type: ignore[no-any-return]


def megatron(
    path: Path,
    sequences: list[list[int]],
    bounds: list[int] | None = None,
    code: int = 4,
    **wrong: Any,
) -> Path:
    """Write an indexed dataset as Megatron-LM's ``IndexedDatasetBuilder`` does."""
    dtype = {1: np.uint8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}.get(code, np.int32)
    path.with_suffix(".bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    lengths = np.array([len(s) for s in sequences], dtype=np.int32)
    sizes = lengths.astype(np.int64) * np.dtype(dtype).itemsize
    pointers = np.cumsum(sizes) - sizes
    bounds = list(range(len(sequences) + 1)) if bounds is None else bounds
    for key, value in wrong.items():
        if key == "pointer":
            pointers[-1] += value
        elif key == "length":
            lengths[-1] = value
    head = wrong.get("magic", b"MMIDIDX\x00\x00") + struct.pack("<Q", wrong.get("version", 1))
    head += struct.pack("<BQQ", code, wrong.get("count", len(sequences)), len(bounds))
    documents = np.array(bounds, dtype=np.int64).tobytes()
    index = head + lengths.tobytes() + pointers.tobytes() + documents + wrong.get("modes", b"")
    path.with_suffix(".idx").write_bytes(index[: wrong.get("end")])
    return path.with_suffix(".bin")


@pytest.mark.parametrize("dtype", ["auto", "uint16", "uint32"])
def test_numbers_of_nanogpt(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(103)
    tokens.astype("uint16" if dtype == "auto" else dtype).tofile(tmp_path / "train.bin")
    inputs, targets = in_order(tmp_path / "train.bin", dtype=dtype)
    assert inputs == [row[:-1] for row in windows(tokens)]
    assert targets == [row[1:] for row in windows(tokens)]


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)]
)
def test_files_of_llm_c(tmp_path: Path, magic: int, version: int, dtype: Any) -> None:
    head = np.zeros(256, dtype=np.int32)
    head[:3] = magic, version, 61
    content = head.tobytes() + np.arange(61, dtype=dtype).tobytes()
    (tmp_path / "train.bin").write_bytes(content)
    assert in_order(tmp_path / "train.bin")[0] == [row[:-1] for row in windows(np.arange(61))]
    refused(tmp_path, "train.bin", content[:-2], "its header promises 61 tokens in .* bytes")
    head[2] = -512
    refused(tmp_path, "train.bin", head.tobytes(), "its header promises -512 tokens")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">u4", "int64"])
def test_arrays_of_numpy(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(61).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    assert in_order(tmp_path / "tokens.npy")[0] == [row[:-1] for row in windows(tokens)]


@pytest.mark.parametrize("code", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("modes", [b"", b"\0\0\0\0"])
def test_indexed_datasets_of_megatron(tmp_path: Path, code: int, modes: bytes) -> None:
    sequences = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9, 10, 11, 12]]
    path = megatron(tmp_path / "text_document", sequences, code=code, modes=modes)
    assert in_order(path)[0] == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert in_order(path.with_suffix(".idx"))[0] == in_order(path)[0]


def test_documents_of_megatron_are_rows_of_their_own(tmp_path: Path) -> None:
    sequences = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9, 10, 11, 12], [20]]
    path = megatron(tmp_path / "text", sequences, bounds=[0, 2, 3, 4, 5])
    inputs, targets = in_order(path, documents="single")
    assert inputs == [[1, 2, 3, 4], [5, 6, 7, 8], [10, 11, 12, 0]]
    assert targets == [[2, 3, 4, -100], [6, 7, 8, 9], [11, 12, -100, -100]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"magic": b"MMIDIDX\x00\x01"}, "does not begin with MMIDIDX"),
        ({"magic": b"TNTIDX\x00\x00\x00"}, "does not begin with MMIDIDX"),
        ({"version": 2}, "version 2 and type 4; accepted are version 1"),
        ({"code": 6}, "version 1 and type 6; accepted"),
        ({"end": 20}, "does not begin with MMIDIDX"),
        ({"end": -1}, r"promises 2 sequences and 3 document bounds in 82 bytes, and it has 81"),
        ({"count": 3}, "promises 3 sequences"),
        ({"count": 2**63}, "promises 9,223,372,036,854,775,808 sequences"),
        ({"count": 0}, "promises 0 sequences"),
        ({"pointer": 1}, "sequence 1 begins at byte 13 and has 3 tokens; .* at byte 12"),
        ({"pointer": -12}, "sequence 1 begins at byte 0"),
        ({"length": 4}, r"sequence 1 begins at byte 12 and has 4 tokens; .* the 6 tokens"),
        ({"length": -1}, "sequence 1 begins at byte 12 and has -1 tokens"),
        ({"bounds": [0, 2, 1]}, "do not lead from 0 to 2"),
        ({"bounds": [1, 2]}, "do not lead from 0 to 2"),
        ({"bounds": [0, 3, 2]}, "do not lead from 0 to 2"),
    ],
    ids=str,
)
def test_damaged_indexes_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = megatron(tmp_path / "text", [[1, 2, 3], [4, 5, 6]], **wrong)
    with pytest.raises(DataError, match=message) as error:
        source(path)
    assert str(tmp_path / "text.idx") in str(error.value)
    assert "\n" not in str(error.value)


@given(data=st.data())
def test_no_damage_to_an_index_reads_beyond_the_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("index")
    path = megatron(folder / "text", [[1, 2, 3], [4, 5, 6], [7]])
    index = path.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    index.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    with contextlib.suppress(DataError):
        assert all(len(row) == 2 for row in in_order(path, vocabulary=2**16, sequence=2)[0])


def test_files_of_a_folder_come_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    np.arange(100, 107, dtype=np.uint16).tofile(tmp_path / "sub" / "c.bin")
    np.save(tmp_path / "b.npy", np.arange(200, 206))
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "a.bin")  # less than a row
    megatron(tmp_path / "d", [[300, 301, 302], [303, 304]])
    (tmp_path / "readme.md").write_text("no tokens")
    assert in_order(tmp_path)[0] == [
        [200, 201, 202, 203],
        [300, 301, 302, 303],
        [100, 101, 102, 103],
    ]


def refused(tmp_path: Path, name: str, content: bytes, message: str, **options: Any) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        source(tmp_path / name, **options)
    assert "\n" not in str(error.value)


def test_wrong_files_are_refused_in_one_line(tmp_path: Path) -> None:
    refused(tmp_path, "odd.bin", bytes(101), "101 bytes are no whole number of uint16 tokens")
    refused(tmp_path, "odd.bin", bytes(102), "uint32 tokens, as data.dtype says", dtype="uint32")
    refused(tmp_path, "empty.bin", b"", "0 bytes are no whole number")
    refused(tmp_path, "short.bin", bytes(8), r"no file has 4 \+ 1 tokens")
    refused(tmp_path, "tokens.txt", b"1 2 3", "tokens.txt is no token file; accepted are .bin and")
    refused(tmp_path, "no.npy", b"1 2 3", "it is no array of numbers")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    refused(tmp_path, "object.npy", (tmp_path / "object.npy").read_bytes(), "no array of numbers")
    np.save(tmp_path / "float.npy", np.zeros(100))
    refused(
        tmp_path, "float.npy", (tmp_path / "float.npy").read_bytes(), "array of float64 with sh"
    )
    np.save(tmp_path / "two.npy", np.zeros((50, 5), dtype=np.uint16))
    refused(tmp_path, "two.npy", (tmp_path / "two.npy").read_bytes(), r"with shape \(50, 5\)")
    refused(tmp_path, "flat.bin", bytes(100), "documents=single: .*flat.bin", documents="single")
    (tmp_path / "nothing").mkdir()
    for path, message in ((tmp_path / "nothing", "no token files there"), ("", "it is empty")):
        with pytest.raises(DataError, match=message):
            source(path)
    with pytest.raises(ConfigError, match=r"data.dtype=int8: accepted are auto, uint16, uint32"):
        TokensDataConfig(dtype="int8")


def test_an_id_beyond_the_vocabulary_is_named_with_file_and_place(tmp_path: Path) -> None:
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "a.bin")
    tokens = np.arange(100, dtype=np.uint16)
    tokens[37] = 999
    tokens.tofile(tmp_path / "b.bin")
    with pytest.raises(DataError, match=r"b.bin: token 37 is 999, and model.vocabulary=999"):
        in_order(tmp_path, vocabulary=999)
    assert in_order(tmp_path, vocabulary=1000)
    np.save(tmp_path / "masked.npy", np.array([1, 2, 3, 4, -100, 5]))
    with pytest.raises(DataError, match=r"masked.npy: token 4 is -100"):
        in_order(tmp_path / "masked.npy")
    np.array([1, 2, 3, 4, 2**31 + 5], dtype=np.uint32).tofile(tmp_path / "large.bin")
    with pytest.raises(DataError, match=r"large.bin: token 4 is 2147483653"):
        in_order(tmp_path / "large.bin", dtype="uint32")


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    tokens = np.arange(50_000, dtype=np.uint16) % 1000
    tokens.tofile(tmp_path / "a.bin")
    first = source(tmp_path / "a.bin").fingerprint
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    assert source(tmp_path / "b.bin").fingerprint == first
    assert source(tmp_path / "b.bin", sequence=8).fingerprint != first
    for place in (0, -1):
        changed = tokens.copy()
        changed[place] += 1
        changed.tofile(tmp_path / "b.bin")
        assert source(tmp_path / "b.bin").fingerprint != first


def test_entropy_of_files_and_mixtures(tmp_path: Path) -> None:
    np.tile(np.arange(4, dtype=np.uint16), 500).tofile(tmp_path / "four.bin")
    np.tile(np.arange(4, 20, dtype=np.uint16), 500).tofile(tmp_path / "sixteen.bin")
    assert source(tmp_path / "four.bin").unigram_entropy == pytest.approx(np.log(4))
    mixed = source(tmp_path, mixture={"four.bin": 1, "sixteen.bin": 1}, vocabulary=200_000)
    expected = np.log(2) + (np.log(4) + np.log(16)) / 2
    assert mixed.unigram_entropy == pytest.approx(expected, rel=1e-3)


# ------------------------------------------------------------------------------------------ mixtures


def numbered(rows: int, first: int) -> TokenTable:
    """A table of which each row has its own first token."""
    tokens = np.repeat(np.arange(first, first + rows), 2)
    return TokenTable(PackedRows(tokens, 2), f"{rows} from {first}", first + rows)


def drawn(table: Any, rows: Any) -> list[int]:
    rows = np.asarray(rows, dtype=np.int64)
    found = table.read(rows, np.zeros(len(rows), np.uint64), BOTH)
    assert torch.equal(found[INPUTS], found[TARGETS])
    return found[INPUTS][:, 0].tolist()  # type: ignore[no-any-return]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 12), min_size=5, max_size=5),
    shuffle=st.booleans(),
)
@example(sizes=[37, 1], weights=[3, 1, 1, 1, 1], shuffle=False)
def test_shares_of_a_mixture(sizes: list[int], weights: list[int], shuffle: bool) -> None:
    parts = [numbered(size, 1000 * place) for place, size in enumerate(sizes)]
    shares = [Fraction(each, sum(weights[: len(sizes)])) for each in weights[: len(sizes)]]
    mixed = MixedTable(parts, shares, shuffle=shuffle)
    found = drawn(mixed, range(len(mixed)))
    counts = Counter(each // 1000 for each in found)
    for place, (size, share) in enumerate(zip(sizes, shares)):
        assert abs(counts[place] - share * len(mixed)) < 1
        times = Counter(each for each in found if each // 1000 == place)
        assert len(times) == size  # each row, and no row much more often than another
        assert max(times.values()) - min(times.values()) <= 1
    assert any(counts[place] == size for place, size in enumerate(sizes))  # the shortest such epoch
    for taken in range(len(found)):
        so_far = Counter(each // 1000 for each in found[:taken])
        for place, share in enumerate(shares):
            assert abs(so_far[place] - share * taken) <= len(sizes) + 1
    assert drawn(mixed, range(len(mixed))[::-1]) == found[::-1]


def test_sources_in_order_begin_again_in_order() -> None:
    mixed = MixedTable(
        [numbered(3, 0), numbered(8, 100)], [Fraction(1), Fraction(1)], shuffle=False
    )
    found = drawn(mixed, range(16))
    assert [each for each in found if each < 100] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [each for each in found if each >= 100] == list(range(100, 108))


def test_a_mixture_of_a_trillion_rows_is_computed_not_stored() -> None:
    class Large:
        fingerprint, whole = "large", False

        def __init__(self, rows: int) -> None:
            self.rows, self.read_rows = rows, list[int]()

        def __len__(self) -> int:
            return self.rows

        def read(self, rows: Any, seeds: Any, parts: frozenset[str]) -> Any:
            self.read_rows += rows.tolist()
            return {INPUTS: torch.from_numpy(rows)[:, None]}

    one, other = Large(3 * 10**12), Large(10**9)
    mixed = MixedTable([one, other], [Fraction("0.75"), Fraction("0.25")], shuffle=False)
    assert len(mixed) == 4 * 10**12
    rows = np.arange(len(mixed) - 4, len(mixed))
    mixed.read(rows, np.zeros(4, np.uint64), frozenset({INPUTS}))
    assert one.read_rows == [3 * 10**12 - 3, 3 * 10**12 - 2, 3 * 10**12 - 1]
    assert other.read_rows == [10**9 - 1]


def test_held_out_rows_of_a_mixture_are_never_trained_on(tmp_path: Path) -> None:
    """Also not where a source is short and comes again."""
    np.repeat(np.arange(20, dtype=np.uint16), 5).tofile(tmp_path / "short.bin")
    np.repeat(np.arange(100, 500, dtype=np.uint16), 5).tofile(tmp_path / "long.bin")
    mixed: IndexedSource = source(
        tmp_path, mixture={"short.bin": 0.5, "long.bin": 0.5}, validation=0.1
    )
    trained = set(mixed.batch(len(mixed)).inputs(0, len(mixed))[:, 0].tolist())
    assert list(mixed.validation_sets) == ["short.bin", "long.bin"]
    held_out = {
        name: set(rows.validation(0, 100).inputs(0, 100)[:, 0].tolist())
        for name, rows in mixed.validation_sets.items()
    }
    assert [len(each) for each in held_out.values()] == [2, 40]
    assert not trained & set.union(*held_out.values())
    assert trained | set.union(*held_out.values()) == {*range(20), *range(100, 500)}


def test_sources_are_files_or_folders_of_their_own_or_below_the_path(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    np.zeros(100, dtype=np.uint16).tofile(tmp_path / "web" / "a.bin")
    np.ones(100, dtype=np.uint16).tofile(tmp_path / "code.bin")
    below = source(tmp_path, mixture={"web": 3, "code.bin": 1}, validation=0)
    alone = source(mixture={str(tmp_path / "web"): 3, str(tmp_path / "code.bin"): 1}, validation=0)
    assert below.fingerprint == alone.fingerprint
    assert below.batch(40).inputs(0, 40).float().mean() == pytest.approx(0.25, abs=0.15)
    with pytest.raises(DataError, match=r"data.mixture.books: .*/books: No such file"):
        source(tmp_path, mixture={"books": 1})
    for weight in (0, -1, "much", float("nan"), float("inf"), True):
        with pytest.raises(ConfigError, match=r"data.mixture.web=.*: accepted are numbers above 0"):
            TokensDataConfig(path=str(tmp_path), mixture={"web": weight})


def test_weights_are_read_from_the_command_line(tmp_path: Path) -> None:
    braces = ["data.mixture={web: 0.7, sub/code.bin: 3}"]
    found = compose(["data=tokens", f"data.path={tmp_path}", *braces])
    assert isinstance(found.data, TokensDataConfig)
    assert found.data.mixture == {"web": 0.7, "sub/code.bin": 3}
    assert load(dump(found)).data == found.data
    dotted = compose(["data=tokens", "data.mixture.web=0.7", "data.mixture.code=3"])
    assert dotted.data.mixture == {"web": 0.7, "code": 3}  # type: ignore[union-attr]


def test_a_resumed_mixture_continues_with_the_same_rows(tmp_path: Path) -> None:
    np.repeat(np.arange(20, dtype=np.uint16), 5).tofile(tmp_path / "a.bin")
    np.repeat(np.arange(100, 150, dtype=np.uint16), 5).tofile(tmp_path / "b.bin")
    one, other = (source(tmp_path, mixture={"a.bin": 1, "b.bin": 2}) for _ in range(2))
    one.batch(30)
    state = one.state_dict()
    expected = [one.batch(32).inputs(0, 32).tolist() for _ in range(3)]
    other.load_state_dict(state)
    assert [other.batch(32).inputs(0, 32).tolist() for _ in range(3)] == expected
