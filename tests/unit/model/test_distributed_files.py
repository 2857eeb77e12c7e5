"""Folders of torch's distributed checkpoint format are read as data: what they say is never executed."""

from __future__ import annotations

import collections
import os
import pickle
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from parallax.errors import CheckpointError
from parallax.model.files.distributed import DistributedFiles

TREE: dict[str, Any] = {
    "model": {
        "layer.weight": torch.randn(6, 4),
        "turned": torch.randn(4, 6).t(),
        "short": torch.randn(5).bfloat16(),
        "count": torch.tensor(3),
        "none": torch.empty(0, 2),
    },
    "optim": {"state": {"layer.weight": {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 1}]},
}


def written(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(TREE, checkpoint_id=folder, no_dist=True)
    return folder


def rewrite(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Change the index as the maker of the folder could have; in this process, which made it."""
    file = folder / ".metadata"
    index = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(index) or index))
    return folder


def test_all_tensors_are_there_as_they_were(tmp_path: Path) -> None:
    files = DistributedFiles(written(tmp_path))
    due: dict[str, Tensor] = {f"model.{name}": value for name, value in TREE["model"].items()}
    due["optim.state.layer.weight.step"] = torch.tensor(2.0)
    assert files.held.keys() == due.keys(), "and nothing that was pickled"
    for name, tensor in due.items():
        assert files.held[name].is_meta
        assert (files.held[name].shape, files.held[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(files.read(name), tensor), name


def test_parts_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)

    def in_two(index: Any) -> None:
        record = index.state_dict_metadata["model.layer.weight"]
        (chunk,) = record.chunks
        record.chunks = [type(chunk)(torch.Size([at, 0]), torch.Size([3, 4])) for at in (0, 3)]
        index.storage_data.pop(MetadataIndex("model.layer.weight", [0, 0]))
        for place, at in enumerate((0, 3)):
            file = tmp_path / f"__{place}_9.distcp"
            torch.save(whole[at : at + 3].clone(), file)
            info = type(next(iter(index.storage_data.values())))(file.name, 0, file.stat().st_size)
            index.storage_data[MetadataIndex("model.layer.weight", [at, 0])] = info

    files = DistributedFiles(rewrite(written(tmp_path), in_two))
    assert torch.equal(files.read("model.layer.weight"), whole)


# ---- made to do harm


class Payload:
    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def payloads(mark: Path) -> dict[str, Payload]:
    """What would make ``mark``, or lead there, were it executed."""
    code = f"open({str(mark)!r}, 'w')"
    return {
        "os.system": Payload(os.system, f"touch {mark}"),
        "mkdir": Payload(os.mkdir, str(mark)),
        "eval": Payload(eval, code),
        "exec": Payload(exec, code),
        "Popen": Payload(subprocess.Popen, ["touch", str(mark)]),
        "getattr": Payload(getattr, "text", "upper"),
        "torch's own": Payload(torch.load, str(mark)),
        "of a known module": Payload(collections.namedtuple, "a", "b"),
        "a module": Payload(nn.Linear, 2, 2),
    }


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "instead of it": lambda index, payload: payload,
    "planner_data": lambda index, payload: setattr(index, "planner_data", payload),
    "storage_meta": lambda index, payload: setattr(index, "storage_meta", payload),
    "a name's record": lambda index, payload: index.state_dict_metadata.update(
        {"model.layer.weight": payload}
    ),
    "a place": lambda index, payload: index.storage_data.update({payload: 1}),
    "a number format": lambda index, payload: setattr(
        index.state_dict_metadata["model.short"].properties, "dtype", payload
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_payload_is_executed(tmp_path: Path, place: str) -> None:
    mark = tmp_path / "executed"
    for name, payload in payloads(mark).items():
        folder = written(tmp_path / name)
        rewrite(folder, lambda index: PLACES[place](index, payload))  # noqa: B023
        with pytest.raises(CheckpointError, match="is damaged or malicious") as reported:
            DistributedFiles(folder)
        assert "which an index does not contain; it is not executed" in str(reported.value), name
        assert str(reported.value).isprintable()
        assert not mark.exists(), name


def test_no_payload_in_the_values_is_executed(tmp_path: Path) -> None:
    folder, mark = written(tmp_path / "from"), tmp_path / "executed"
    files = DistributedFiles(folder)
    for payload in payloads(mark).values():
        for path in folder.glob("*.distcp"):
            torch.save(payload, path)
            data = path.read_bytes()
            path.write_bytes(data.ljust(9999, b"\0"))
        rewrite(folder, whole_files(len(data)))
        files = DistributedFiles(folder)
        with pytest.raises(CheckpointError, match=r"model\.layer\.weight in __0_0\.distcp"):
            files.read("model.layer.weight")
        assert not mark.exists()


def whole_files(length: int) -> Callable[[Any], None]:
    """Every tensor is what its file begins with."""

    def change(index: Any) -> None:
        for info in index.storage_data.values():
            info.offset, info.length = 0, length

    return change


def _places(**changes: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for info in index.storage_data.values():
            for key, value in changes.items():
                setattr(info, key, value)

    return change


def _record(name: str, **changes: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for key, value in changes.items():
            setattr(index.state_dict_metadata[name], key, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_places(relative_path="../secret"), "files must be beside their index"),
        (_places(relative_path="/etc/passwd"), "files must be beside their index"),
        (_places(relative_path=".."), "files must be beside their index"),
        (_places(offset=-1), "is no tuple of non-negative integers"),
        (_places(length="x"), "is no tuple of non-negative integers"),
        (_places(transform_descriptors=["zstd"]), "compressed"),
        (_record("model.layer.weight", size=torch.Size([7, 4])), "do not cover it exactly once"),
        (_record("model.layer.weight", size=(10**15,)), "do not cover it exactly once"),
        (_record("model.layer.weight", size="x"), "is no tuple of non-negative integers"),
        (_record("model.layer.weight", chunks=[]), "do not cover it exactly once"),
        (_record("model.layer.weight", chunks=7), "not iterable"),
        (_record("model.layer.weight", properties=None), "model.layer.weight"),
        (lambda index: index.storage_data.clear(), "model."),
        (lambda index: setattr(index, "state_dict_metadata", [1]), "expected names of tensors"),
        (lambda index: [1], "state_dict_metadata"),
    ],
)
def test_what_an_index_says_is_checked(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as reported:
        DistributedFiles(rewrite(written(tmp_path), change))
    assert message in str(reported.value)
    assert str(reported.value).isprintable()


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no \.metadata"):
        DistributedFiles(tmp_path)
    for junk in (b"", b"\x80", b"nonsense", b"\x80\x04" + b"(" * 9999):
        (tmp_path / ".metadata").write_bytes(junk)
        with pytest.raises(CheckpointError, match="is damaged"):
            DistributedFiles(tmp_path)


def test_truncated_or_swapped_values_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    for damaged in (b"", data[:-100], b"x" * len(data)):
        file.write_bytes(damaged)
        files = DistributedFiles(folder)
        with pytest.raises(CheckpointError, match=r"in __0_0\.distcp: "):
            [files.read(name) for name in files.held]
    torch.save(torch.zeros(2), file)
    files = DistributedFiles(rewrite(folder, whole_files(file.stat().st_size)))
    with pytest.raises(CheckpointError, match="does not hold"):
        files.read("model.layer.weight")
