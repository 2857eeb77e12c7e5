"""Rows of text: what is gathered, in which order it comes, and that a resumed run sees the same rows."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from parallax.errors import CheckpointError, ConfigError, DataError
from parallax.model.block import to_device
from parallax.model.factory.mlp import MLPConfig
from parallax.runtime.batch import Rows, TensorRows
from parallax.train.data.custom import CustomDataConfig
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.text import TextDataConfig, open_corpus
from tests.alone import alone


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12,000 bytes of text in three files, one file that is none, and what else lies around in folders."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in ("b.txt", "a.txt", "sub/c.md"):
        (root / name).write_bytes(draw.integers(32, 127, 4000, dtype=np.uint8).tobytes())
    (root / "binary.txt").write_bytes(b"PK\0\0" * 1000)
    (root / "empty.txt").touch()
    os.mkfifo(root / "pipe.txt")
    return root


def source(folder: Path, sequence: int = 31, seed: int = 0, **config: object) -> IndexedSource:
    settings = TextDataConfig(path=str(folder), **config)  # type: ignore[arg-type]
    return settings.indexed(MLPConfig(sequence=sequence), seed)


def rows_of(batch: Rows) -> list[bytes]:
    inputs = batch.inputs(0, len(batch))
    assert isinstance(inputs, torch.Tensor)
    return [bytes(row) for row in inputs.tolist()]


def test_gathers_only_text_in_sorted_order(folder: Path) -> None:
    corpus = open_corpus(TextDataConfig(path=str(folder)))
    expected = b"".join((folder / name).read_bytes() for name in ("a.txt", "b.txt", "sub/c.md"))
    assert corpus.bytes.tobytes() == expected
    assert isinstance(corpus.bytes, np.memmap)


def test_pattern_and_single_file(folder: Path) -> None:
    assert len(open_corpus(TextDataConfig(path=str(folder), pattern="*.md")).bytes) == 4000
    assert len(open_corpus(TextDataConfig(path=str(folder), pattern="sub/*")).bytes) == 4000
    assert len(open_corpus(TextDataConfig(path=str(folder / "a.txt"))).bytes) == 4000


def test_max_bytes_truncates_in_the_middle_of_a_file(folder: Path) -> None:
    corpus = open_corpus(TextDataConfig(path=str(folder), max_bytes=5000))
    assert (
        corpus.bytes.tobytes()
        == (folder / "a.txt").read_bytes() + (folder / "b.txt").read_bytes()[:1000]
    )


def test_gathered_once_and_again_when_a_file_changes(folder: Path, cache: Path) -> None:
    first = source(folder).fingerprint
    (written,) = cache.iterdir()
    stamp = written.stat().st_mtime_ns
    assert source(folder).fingerprint == first
    assert written.stat().st_mtime_ns == stamp
    (folder / "a.txt").write_bytes(b"x" * 4000)
    assert source(folder).fingerprint != first
    assert len(list(cache.iterdir())) == 2


def test_a_damaged_cache_file_is_gathered_again(folder: Path, cache: Path) -> None:
    first = open_corpus(TextDataConfig(path=str(folder))).bytes.tobytes()
    (written,) = cache.iterdir()
    written.write_bytes(written.read_bytes()[:100])
    assert open_corpus(TextDataConfig(path=str(folder))).bytes.tobytes() == first


def test_fingerprint_is_of_the_content_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    first = source(folder).fingerprint
    os.utime(folder / "a.txt", (1, 1))
    folder.rename(tmp_path / "moved")
    assert source(tmp_path / "moved").fingerprint == first


def test_the_standard_library_is_enough_to_start() -> None:
    text = TextDataConfig(max_bytes="1MiB").indexed(MLPConfig(sequence=256), 0)
    assert len(text) > 3000
    assert 2.5 < text.unigram_entropy < 4  # source code, in nats


def test_rows_are_windows_with_targets_one_byte_later(folder: Path) -> None:
    text = source(folder)
    corpus = open_corpus(TextDataConfig(path=str(folder))).bytes.tobytes()
    batch = text.batch(8)
    inputs, targets = batch.inputs(2, 5), batch.targets(2, 5)
    assert isinstance(inputs, torch.Tensor)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (3, 31)
    for row, following in zip(inputs.tolist(), targets.tolist()):
        place = corpus.find(bytes(row))
        assert place % 32 == 0
        assert bytes(following) == corpus[place + 1 : place + 32]
    assert rows_of(batch)[2:5] == [bytes(row) for row in inputs.tolist()]


def test_an_epoch_is_each_row_once_and_the_next_another_order(folder: Path) -> None:
    text = source(folder)
    n = len(text)
    first, second = rows_of(text.batch(n)), rows_of(text.batch(n))
    assert len(set(first)) == n
    assert sorted(first) == sorted(second)
    assert first != second


def test_batches_wrap_across_epochs(folder: Path) -> None:
    n = len(source(folder))
    whole = rows_of(source(folder).batch(3 * n))  # one batch may even span several epochs
    text, pieces = source(folder), []
    while len(pieces) < 3 * n:
        pieces += rows_of(text.batch(7))
    assert pieces[: 3 * n] == whole


def test_the_order_depends_on_the_seed_alone(folder: Path) -> None:
    assert rows_of(source(folder, seed=1).batch(50)) == rows_of(source(folder, seed=1).batch(50))
    assert rows_of(source(folder, seed=1).batch(50)) != rows_of(source(folder, seed=2).batch(50))
    assert len(rows_of(source(folder, seed=-1).batch(5))) == 5


def test_the_order_never_changes_between_versions(tmp_path: Path) -> None:
    """A checkpoint of today must continue in the same order on next year's numpy."""
    (tmp_path / "six.txt").write_text("aabbccddeeff" + "zzzz")
    text = source(tmp_path, sequence=1, seed=7, validation=0.25, pattern="six.txt")
    assert b"".join(rows_of(text.batch(12))) == b"cadebf" + b"ecafbd"


def test_resume_is_exact_also_across_an_epoch_and_with_another_batch_size(folder: Path) -> None:
    text = source(folder, seed=3)
    text.batch(len(text) - 5)
    state = json.loads(json.dumps(text.state_dict()))
    expected = rows_of(text.batch(16))
    resumed = source(folder, seed=99)  # the checkpoint's seed continues, not the new one
    resumed.load_state_dict(state)
    assert rows_of(resumed.batch(4)) + rows_of(resumed.batch(12)) == expected
    assert resumed.state_dict() == text.state_dict()


def resumed(folder: Path, state: str) -> list[bytes]:
    text = source(folder)
    text.load_state_dict(json.loads(state))
    return rows_of(text.batch(20))


def test_resume_in_a_new_process(folder: Path) -> None:
    text = source(folder)
    text.batch(100)
    assert alone(resumed, folder, json.dumps(text.state_dict())) == rows_of(text.batch(20))


@pytest.mark.parametrize("change", [{"validation": 0.2}, {"sequence": 15}, {"pattern": "*.md"}])
def test_refuses_to_resume_on_other_rows(folder: Path, change: dict[str, object]) -> None:
    state, other = source(folder).state_dict(), source(folder, **change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as error:
        other.load_state_dict(state)
    assert state["fingerprint"] in str(error.value)
    assert other.fingerprint in str(error.value)


def test_validation_is_fixed_and_not_trained_on(folder: Path) -> None:
    text = source(folder, validation=0.25)
    first = rows_of(text.validation(0, 8))
    trained = set(rows_of(text.batch(len(text))))
    assert rows_of(text.validation(0, 8)) == first
    assert rows_of(text.validation(1, 8)) != first
    assert not trained & {row for i in range(4) for row in rows_of(text.validation(i, 8))}
    assert len(rows_of(text.validation(0, 1000))) == text.validation_rows == 93
    with pytest.raises(IndexError, match="93 held-out rows"):
        text.validation(1, 1000)


def test_no_more_is_held_out_than_is_soon_evaluated() -> None:
    """A twentieth of 64 MiB took as long as thousands of steps, every few steps."""
    auto = TextDataConfig()
    assert [auto.held_out(size) for size in (1000, 2**20, 2**26)] == [50, 52429, 2**17]
    assert TextDataConfig(validation=0.5).held_out(2**26) == 2**25
    for wrong in ("some", 1, -0.5):
        with pytest.raises(ConfigError, match="accepted are auto, shares from 0 to 1, and sets"):
            TextDataConfig(validation=wrong)


def test_unigram_entropy(tmp_path: Path) -> None:
    (tmp_path / "four.txt").write_bytes(b"abcd" * 5000)
    text = source(tmp_path / "four.txt", sequence=3)
    assert text.unigram_entropy == pytest.approx(math.log(4))


def test_errors_name_the_value_and_the_remedy(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.path=.*nowhere: there is no .*name a folder"):
        source(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no text in files that match data.pattern=\*.rs"):
        source(folder, pattern="*.rs")
    with pytest.raises(
        DataError, match=r"holds 12,000 bytes .* 4096 \+ 1 bytes .* shorter sequence"
    ):
        source(folder, sequence=4096)
    with pytest.raises(ConfigError, match=r"data.max_bytes"):
        source(folder, max_bytes="many")


def test_the_advised_size_is_enough(tmp_path: Path) -> None:
    for share in (0.01, 0.05, 0.5, 0.9):
        (tmp_path / "t.txt").write_bytes(b"x")
        with pytest.raises(DataError) as error:
            source(tmp_path, sequence=100, validation=share, pattern="t.txt")
        advised = int(str(error.value).split("need about ")[1].split(";")[0].replace(",", ""))
        (tmp_path / "t.txt").write_bytes(b"x" * advised)
        source(tmp_path, sequence=100, validation=share, pattern="t.txt")


def test_an_unwritable_cache_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        source(folder)


def test_tuples_with_names_hold_rows() -> None:
    scores = torch.rand(4, 3)
    batch = TensorRows(scores, scores.max(1))
    part = to_device(batch.targets(1, 3), torch.device("cpu"))
    assert type(part) is torch.return_types.max
    assert torch.equal(part.indices, scores.argmax(1)[1:3])


def test_open_a_source(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "class Half:\n    def batch(self, rows): ...\n    def state_dict(self): ...\n"
        "class Whole(Half):\n    def __init__(self, n): self.n = n\n"
        "    def validation(self, index, rows): ...\n    def load_state_dict(self, state): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = MLPConfig(sequence=31)
    assert TextDataConfig(path=str(folder)).open(model, 0).validation(0, 1).inputs(0, 1).shape == (
        1,
        31,
    )
    built = CustomDataConfig(target="mine:Whole", kwargs={"n": 3}).open(model, 0)
    assert built.n == 3  # type: ignore[attr-defined]
    with pytest.raises(
        DataError, match="mine:Half returned a Half without validation, load_state_dict"
    ):
        CustomDataConfig(target="mine:Half").open(model, 0)
