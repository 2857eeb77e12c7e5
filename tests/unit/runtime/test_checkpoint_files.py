"""Files of checkpoints: no bit of them changes unseen, old ones are read as they are, and those stay that should."""

from __future__ import annotations

import json
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parallax.errors import CheckpointError, ConfigError
from parallax.machine.pinned import PlainArena
from parallax.runtime.checkpoint import (
    CheckpointReader,
    Retention,
    SnapshotMemory,
    begin,
    finish,
    list_checkpoints,
    partial_folder,
    remove,
    remove_partial,
    write_parts,
)
from parallax.runtime.checkpoint.config import CheckpointConfig

TENSORS = {
    "model/weight": torch.arange(3000, dtype=torch.float32).reshape(100, 30),
    "model/flags": torch.tensor([True, False, True]),
    "model/short": torch.linspace(-1, 1, 77).bfloat16(),
    "model/wide": torch.randn(5, 3, dtype=torch.float64),
    "model/nothing": torch.empty(0, 4),
    "exp_avg/weight": torch.randn(30, 100).T,  # lies otherwise in memory
    "step/weight": torch.tensor(7.0),
}


def written(root: Path, step: int = 1, *, part_bytes: int = 2**20, **reported: Any) -> Path:
    """A checkpoint of ``TENSORS``."""
    partial = partial_folder(root, step)
    begin(partial)
    parts = write_parts(partial, "stage-00", TENSORS.items(), part_bytes)
    index = {"step": step, "state": {"position": 31}, "fingerprint": "x", **reported}
    kinds = {"optimizer": ["exp_avg", "step"], "checksums": parts.checksums}
    finish(partial, {**index, **kinds, "files": parts.files})
    return list_checkpoints(root)[-1]


def read_all(path: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in TENSORS}


@pytest.mark.parametrize("part_bytes", [2**20, 1000])
def test_what_is_written_is_read(tmp_path: Path, part_bytes: int) -> None:
    path = written(tmp_path, part_bytes=part_bytes)
    files = sorted(path.glob("*.safetensors"))
    assert (len(files) > 1) == (part_bytes == 1000)
    plain = {name: tensor for file in files for name, tensor in load_file(file).items()}
    found = read_all(path)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(plain[name], tensor)
        assert found[name].dtype is tensor.dtype


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def test_a_flipped_bit_is_seen_wherever_it_is(tmp_path: Path) -> None:
    path = written(tmp_path)
    (file,) = path.glob("*.safetensors")
    for target, stride in ((file, 331), (path / "checkpoint.json", 1)):
        good = target.read_bytes()
        for at in range(0, len(good), stride):
            flipped(target, at)
            with pytest.raises(CheckpointError) as error:
                read_all(path)
            assert target.name in str(error.value), at
            assert str(error.value).isprintable()
        target.write_bytes(good)
    assert read_all(path)


def test_damage_names_file_and_tensor_on_any_rank(tmp_path: Path) -> None:
    path = written(tmp_path)
    (file,) = path.glob("*.safetensors")
    length = int.from_bytes(file.read_bytes()[:8], "little")
    start, _ = json.loads(file.read_bytes()[8 : 8 + length])["exp_avg/weight"]["data_offsets"]
    flipped(file, 8 + length + start)
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(path).read("model/flags")
    assert str(error.value) == (
        f"{file}: exp_avg/weight in it is damaged (checksum); use an earlier checkpoint"
    )


def test_one_without_digests_is_read_as_ever(tmp_path: Path) -> None:
    path = written(tmp_path)
    index = json.loads((path / "checkpoint.json").read_text())
    del index["files"], index["sha256"]
    (path / "checkpoint.json").write_text(json.dumps(index))
    assert read_all(path).keys() == TENSORS.keys()
    (file,) = path.glob("*.safetensors")
    flipped(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_all(path)


def test_an_index_says_nothing_else_than_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    index = json.loads((path / "checkpoint.json").read_text())
    index["state"]["position"] = 32
    (path / "checkpoint.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: it is damaged \(SHA-256\)"):
        CheckpointReader(path)


def test_checksums_are_those_of_the_tensors(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, "x", TENSORS.items())
    for name, tensor in TENSORS.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert parts.checksums[name] == zlib.crc32(data)


def test_a_number_format_that_no_file_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"spin is of torch\.complex128"):
        write_parts(tmp_path, "x", [("spin", torch.zeros(2, dtype=torch.complex128))])


# ---- memory


def test_memory_is_taken_again_and_never_exceeded() -> None:
    memory = SnapshotMemory(PlainArena, 100)
    first, second = memory.acquire(60), memory.acquire(40)
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.append(memory.acquire(60).data_ptr()))
    waiting.start()
    waiting.join(0.05)
    assert not taken
    memory.release(second)
    address = first.data_ptr()
    memory.release(first)
    waiting.join(5)
    assert taken == [address]
    assert memory.held_bytes <= 100
    memory.close()
    assert memory.held_bytes == 60


def test_a_tensor_larger_than_the_free_memory_is_held_alone() -> None:
    memory = SnapshotMemory(PlainArena, 10)
    memory.release(memory.acquire(50))
    memory.release(memory.acquire(8))
    assert memory.held_bytes == 8


def test_memory_that_is_not_there_is_waited_for_where_some_is() -> None:
    def two(size: int) -> PlainArena:
        if len(made) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        made.append(size)
        return PlainArena(size)

    made: list[int] = []
    memory = SnapshotMemory(two, 1000)
    first, _ = memory.acquire(10), memory.acquire(10)
    timer = threading.Timer(0.05, lambda: memory.release(first))
    timer.start()
    assert memory.acquire(10).data_ptr() == first.data_ptr()
    timer.join()
    none = SnapshotMemory(two, 1000)
    with pytest.raises(CheckpointError, match=r"cannot allocate 20 B of host memory"):
        none.acquire(20)


# ---- which stay


def going(retention: Retention, losses: dict[int, float | None]) -> list[int]:
    """The steps that stay where one after another is saved."""
    held: dict[int, float | None] = {}
    for step, loss in losses.items():
        held[step] = loss
        for gone in retention.superseded(held, step):
            del held[gone]
    return list(held)


LOSSES: dict[int, float | None] = {
    **{10: 5.0, 20: 3.0, 30: 4.0, 40: None},
    **{50: float("nan"), 60: 3.0, 70: 9.0, 80: 6.0},
}


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(), list(LOSSES)),
        (Retention(keep_last=2), [70, 80]),
        (Retention(keep_last=1, keep_every=30), [30, 60, 80]),
        (Retention(keep_last=1, best=1), [60, 80]),
        (Retention(keep_last=1, best=2), [20, 60, 80]),
    ],
    ids=str,
)
def test_which_stay(retention: Retention, stay: list[int]) -> None:
    assert going(retention, LOSSES) == stay


def test_later_ones_do_not_count() -> None:
    """Another training left them; it went on from an earlier one."""
    held: dict[int, float | None] = dict.fromkeys((10, 20, 90, 100))
    assert Retention(keep_last=1).superseded(held, 20) == [10]


def test_what_is_removed_loses_its_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        written(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed before anything is deleted
        remove(tmp_path, [1, 7])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert len(list(tmp_path.iterdir())) == 2
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_every": -1}, r"checkpoint\.keep_every=-1"),
        ({"best": -2}, r"checkpoint\.best=-2"),
    ],
)
def test_settings_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**options)
