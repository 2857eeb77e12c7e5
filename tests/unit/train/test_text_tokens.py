"""Text as tokens: the same as of whole files, kept once, in rows of streams, files and lines."""

from __future__ import annotations

import codecs
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from parallax.errors import ConfigError, DataError
from parallax.model.factory.gpt import GPTConfig
from parallax.train.data import text as text_module
from parallax.train.data import tokenizer as tokenizer_module
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.text import TextDataConfig, open_tokens
from parallax.train.data.token_file import TokenFile
from parallax.train.data.tokenizer import TextTokenizer, open_tokenizer
from tests.unit.train.tokenizers_ import END, KINDS, TEXT, byte_bpe, save, whole_bpe

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


def corpus(folder: Path, *texts: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for place, text in enumerate(texts):
        (folder / f"{place:03}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def tokens_of(folder: Path, tokenizer: Path, **options: Any) -> TokenFile:
    config = TextDataConfig(path=str(folder), tokenizer=str(tokenizer), **options)
    return open_tokens(config, GPTConfig(vocabulary=100_000))


def source(folder: Path, tokenizer: Path, sequence: int = 15, **options: Any) -> IndexedSource:
    config = TextDataConfig(path=str(folder), tokenizer=str(tokenizer), **options)
    return config.open(GPTConfig(vocabulary=1000, sequence=sequence), 0)


def plain_ids(backend: Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


lines = st.lists(
    st.tuples(
        st.sampled_from(["", "", "    ", "\t", " "]),
        st.sampled_from(["", "def loss", "one two three", "ünï 数字", "} else {", "a" * 30, "#"]),
        st.sampled_from(["\n", "\n", "\n\n", " \n", "\r\n"]),
    ),
    min_size=20,
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(parts=lines, piece=st.integers(20, 200))
def test_pieces_have_the_tokens_of_the_whole_file(
    tmp_path: Path, kind: str, parts: list[tuple[str, str, str]], piece: int
) -> None:
    text = "".join(map("".join, parts))
    backend = KINDS[kind]()
    folder = corpus(tmp_path / "texts", text)
    tokenizer = tmp_path / "tokenizer.json"
    backend.save(str(tokenizer))
    expected = plain_ids(backend, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PIECE_BYTES", piece)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / str(hash((text, piece)))))
        found = tokens_of(folder, tokenizer)
    assert found.tokens.tolist() == [*expected, 0]
    assert found.tokens.dtype == np.uint16


def test_a_long_file_is_read_in_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the property above would say nothing."""
    monkeypatch.setattr(tokenizer_module, "PIECE_BYTES", 500)
    tokenizer = open_tokenizer(str(save(tmp_path / "tokenizer", whole_bpe())))
    reader = tokenizer_module._Reader(tokenizer, lambda _: None, lines=False)
    text = "".join(TEXT) * 50
    folder = corpus(tmp_path / "texts", text)
    pieces = list(reader.pieces([(folder / "000.txt", len(text.encode()), True)]))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 10
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_files_are_separated_by_the_end_of_text(tmp_path: Path) -> None:
    found = tokens_of(corpus(tmp_path / "texts", *TEXT), save(tmp_path / "tokenizer"))
    expected = [[*plain_ids(byte_bpe(), text), 0] for text in TEXT]
    assert found.tokens.tolist() == list(itertools.chain(*expected))
    assert found.ends.tolist() == np.cumsum(list(map(len, expected))).tolist()


def test_the_end_of_text_is_the_one_of_the_settings(tmp_path: Path) -> None:
    folder = save(tmp_path / "tokenizer")
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(settings_file.read_text().replace(END, "<|im_end|>"))
    assert open_tokenizer(str(folder)).end == byte_bpe().token_to_id("<|im_end|>")
    assert open_tokenizer(str(folder / "tokenizer.json")).end == byte_bpe().token_to_id(END)
    settings_file.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json cannot be read"):
        open_tokenizer(str(folder))


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    """GPT-2's own format, a vocabulary and merges, from which transformers makes the same tokenizer."""
    folder = save(tmp_path / "tokenizer")
    byte_bpe().model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(
        settings_file.read_text().replace("PreTrainedTokenizerFast", "GPT2Tokenizer")
    )
    found = open_tokenizer(str(folder))
    assert found.encode(TEXT) == [plain_ids(byte_bpe(), text) for text in TEXT]
    assert found.end == 0


def test_tokenized_once_and_again_for_other_text_or_another_tokenizer(
    tmp_path: Path, cache: Path
) -> None:
    folder, tokenizer = corpus(tmp_path / "texts", *TEXT * 9), save(tmp_path / "tokenizer")
    first = tokens_of(folder, tokenizer)
    (written,) = cache.iterdir()
    stamp = written.stat().st_mtime_ns
    assert tokens_of(folder, tokenizer).digest == first.digest
    assert written.stat().st_mtime_ns == stamp
    save(tokenizer, byte_bpe(300))
    other = tokens_of(folder, tokenizer)
    assert other.digest != first.digest
    (folder / "000.txt").write_text("something else")
    assert tokens_of(folder, tokenizer).digest != other.digest
    assert len(list(cache.iterdir())) == 3


def test_ranks_of_a_host_tokenize_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tokenizer = corpus(tmp_path / "texts", *TEXT * 99), save(tmp_path / "tokenizer")
    opened = list[str]()

    def counted(path: str) -> TextTokenizer:
        opened.append(path)
        return open_tokenizer(path)

    monkeypatch.setattr(text_module, "open_tokenizer", counted)
    with ThreadPoolExecutor(4) as ranks:
        found = list(ranks.map(lambda _: tokens_of(folder, tokenizer).digest, range(4)))
    assert len(set(found)) == len(opened) == 1
    assert not list((tmp_path / "cache").rglob("*.lock"))


@pytest.mark.parametrize("kept", [0, 100, 600, -1])
def test_a_damaged_cache_file_is_made_again(tmp_path: Path, cache: Path, kept: int) -> None:
    folder, tokenizer = corpus(tmp_path / "texts", *TEXT), save(tmp_path / "tokenizer")
    first = tokens_of(folder, tokenizer).tokens.tolist()
    (written,) = cache.iterdir()
    written.write_bytes(written.read_bytes()[:kept])
    assert tokens_of(folder, tokenizer).tokens.tolist() == first


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    folder, tokenizer = corpus(tmp_path / "texts", *TEXT * 9), save(tmp_path / "tokenizer")
    first = source(folder, tokenizer).fingerprint
    folder.rename(tmp_path / "moved")
    tokenizer.rename(tmp_path / "its tokenizer")
    assert source(tmp_path / "moved", tmp_path / "its tokenizer").fingerprint == first


def test_packed_rows_are_windows_of_one_stream(tmp_path: Path) -> None:
    folder, tokenizer = corpus(tmp_path / "texts", *TEXT * 9), save(tmp_path / "tokenizer")
    stream = tokens_of(folder, tokenizer).tokens.tolist()
    text = source(folder, tokenizer, shuffle=False)
    batch = text.batch(len(text))
    for row, (inputs, targets) in enumerate(
        zip(batch.inputs(0, len(text)).tolist(), batch.targets(0, len(text)).tolist())
    ):
        assert inputs == stream[row * 16 : row * 16 + 15]
        assert targets == stream[row * 16 + 1 : row * 16 + 16]
    assert 0 < text.unigram_entropy < np.log(len(set(stream)))


def test_rows_of_lines_end_with_them(tmp_path: Path) -> None:
    """A line longer than a row continues in the next row."""
    folder = corpus(
        tmp_path / "texts", "one two\r\n\n  \nthree", "one two three four five six seven"
    )
    tokenizer = save(tmp_path / "tokenizer")
    text = source(
        folder, tokenizer, 4, documents="lines", shuffle=False, validation=0, pattern="*.txt"
    )
    whole = text.batch(len(text))
    expected_inputs, expected_targets = [], []
    for line in ("one two", "three", "one two three four five six seven"):
        ids = [*plain_ids(byte_bpe(), line), 0]
        for start in range(0, len(ids), 5):
            row = ids[start : start + 5]
            if len(row) > 1:
                expected_inputs.append((row + [0] * 5)[:4])
                expected_targets.append((row + [-100] * 5)[1:5])
    assert whole.inputs(0, len(text)).tolist() == expected_inputs
    assert whole.targets(0, len(text)).tolist() == expected_targets


def test_rows_of_files_never_hold_two(tmp_path: Path) -> None:
    folder, tokenizer = corpus(tmp_path / "texts", *TEXT), save(tmp_path / "tokenizer")
    text = source(folder, tokenizer, 200, documents="single", validation=0)
    assert len(text) == len(TEXT)
    targets = text.batch(4).targets(0, 4)
    assert sorted((targets != -100).sum(1).tolist()) == sorted(
        len(plain_ids(byte_bpe(), each)) for each in TEXT
    )


def test_text_that_is_not_utf8_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = corpus(
        tmp_path / "texts", "plain", "fünf".encode("latin-1"), "größer".encode("latin-1")
    )
    tokens_of(folder, save(tmp_path / "tokenizer"))
    (message,) = caplog.messages
    assert message.startswith("2 file(s) are not UTF-8")
    assert "001.txt first" in message


def test_max_bytes_never_cuts_a_character(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = corpus(tmp_path / "texts", "äöü" * 10)
    found = tokens_of(folder, save(tmp_path / "tokenizer"), max_bytes=5)
    assert byte_bpe().decode(found.tokens[:-1].tolist()) == "äö"
    assert not caplog.messages


def test_a_vocabulary_of_more_than_65536_tokens_takes_32_bits(tmp_path: Path) -> None:
    words = {f"word{i}": i for i in range(70_000)} | {"<unk>": 70_000, END: 70_001}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.add_special_tokens([END])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = tmp_path / "tokenizer.json"
    backend.save(str(tokenizer))
    folder = corpus(tmp_path / "texts", " ".join(f"word{i}" for i in range(69_000, 70_000)))
    found = tokens_of(folder, tokenizer)
    assert found.tokens.dtype == np.uint32
    assert found.tokens.tolist() == [*range(69_000, 70_000), 70_001]
    config = TextDataConfig(path=str(folder), tokenizer=str(tokenizer), validation=0)
    text = config.open(GPTConfig(vocabulary=70_002, sequence=9), 0)
    assert text.unigram_entropy == pytest.approx(np.log(1000))
    with pytest.raises(ConfigError, match=r"model.vocabulary=70001: .* has 70,002 tokens"):
        config.open(GPTConfig(vocabulary=70_001, sequence=9), 0)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"documents": "lines"}, "it needs a tokenizer"),
        ({"documents": "line", "tokenizer": "x"}, r"data.documents=line: accepted are .*'lines'"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        TextDataConfig(**options)


def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    (tmp_path / "empty").mkdir()
    for named, expected_message in (
        (tmp_path / "tokenizer.json", "is no tokenizer.json"),
        (tmp_path / "empty", "transformers cannot read it"),
        (tmp_path / "missing", "No such file"),
    ):
        with pytest.raises(DataError, match=expected_message) as error:
            open_tokenizer(str(named))
        assert "\n" not in str(error.value)
        assert "data.tokenizer" in str(error.value)


def test_text_without_any_line_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_BYTES", 100)
    monkeypatch.setattr(tokenizer_module, "LONGEST_PIECE", 1000)
    for documents in ("packed", "lines"):
        with pytest.raises(DataError, match=r"000.txt: in 1,000 characters there is no end"):
            tokens_of(
                corpus(tmp_path / "texts", "x" * 2000),
                save(tmp_path / "tokenizer"),
                documents=documents,
            )


def test_a_byte_order_mark_and_special_tokens_in_text_are_tokens(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "texts", codecs.BOM_UTF8 + f"one{END}two".encode())
    found = tokens_of(folder, save(tmp_path / "tokenizer")).tokens.tolist()
    assert found.count(0) == 2


def test_texts_in_json_objects_are_documents(tmp_path: Path) -> None:
    tokenizer, texts = save(tmp_path / "tokenizer"), ["one two\nthree", "größe", "", "four 😀" * 9]
    objects = [json.dumps({"id": place, "text": text}) for place, text in enumerate(texts)]
    folder = corpus(tmp_path / "texts", "\n".join([objects[0], "", *objects[1:3]]), objects[3])
    for place in folder.iterdir():
        place.rename(place.with_suffix(".jsonl"))
    found = tokens_of(folder, tokenizer, field="text")
    expected = [[*plain_ids(byte_bpe(), text), 0] for text in texts if text]
    assert found.tokens.tolist() == list(itertools.chain(*expected))
    assert found.ends.tolist() == np.cumsum(list(map(len, expected))).tolist()
    part = tokens_of(folder, tokenizer, field="text", max_bytes=len(objects[0]) + 9)
    assert part.tokens.tolist() == expected[0]
    assert len(source(folder, tokenizer, field="text", documents="single", validation=0)) >= 3


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("rows.parquet", "rows.parquet is a table: write its texts as JSON lines"),
        ("texts.tar.gz", "texts.tar.gz is an archive: unpack it"),
        ("weights.bin", "name another folder or pattern"),
    ],
)
def test_tables_and_archives_of_text_are_named(tmp_path: Path, name: str, remedy: str) -> None:
    """They were called no text; beside a README they were left out, and there was too little text."""
    folder = corpus(tmp_path / "rows")
    (folder / name).write_bytes(b"\x1f\0")
    config = TextDataConfig(path=str(folder))
    with pytest.raises(DataError, match=remedy):
        config.open(GPTConfig(), 1)
    corpus(folder, "short")
    with pytest.raises(DataError, match=remedy if name != "weights.bin" else "shorter sequence$"):
        config.open(GPTConfig(), 1)


def test_json_objects_that_are_no_texts_are_named(tmp_path: Path) -> None:
    tokenizer, folder = save(tmp_path / "tokenizer"), corpus(tmp_path / "texts", '{"text": "a"}\n')
    (place,) = folder.iterdir()
    refused = pytest.raises((DataError, ConfigError), match=r"000.txt is no .jsonl file")
    with refused:
        tokens_of(folder, tokenizer, field="text")
    place = place.rename(folder / "a.jsonl")
    for content, options, message in (
        ('{"text": "a"}', {}, "a.jsonl has texts in JSON objects; read them with data.field=text"),
        ('{"id": 1, "text": "a"}', {"field": "b"}, "line 1: it has no text b, but id, text; name"),
        ('{"text": "a"}\n{"text": 1}', {"field": "text"}, "line 2: it has no text text, but text"),
        ('{"text": "a"}\n[]', {"field": "text"}, "line 2: it has no text text, but list"),
        ('{"text": "a"}\n{', {"field": "text"}, "line 2: it is no JSON"),
        ('{"text": "a"}', {"field": "text", "documents": "lines"}, "data.field=text: it needs a"),
    ):
        place.write_text(content)
        with pytest.raises((DataError, ConfigError), match=message) as error:
            tokens_of(folder, tokenizer, **options)
        assert str(error.value).isprintable()
    place.write_text('{"id": 1}\n')  # as it is
    assert len(tokens_of(folder, tokenizer).tokens)
