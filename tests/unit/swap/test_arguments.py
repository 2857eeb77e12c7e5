"""What ``parallax.swap`` does not accept, and what goes wrong in it: one line each, in terms of its arguments."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parallax
from parallax.errors import BudgetExceeded, ConfigError, ParallaxError, SwapError
from parallax.machine.device import CpuCopies, copies_for
from parallax.machine.pinned import RegisteredArena
from parallax.swap.stores.remedies import ENGINE, SCOPE
from parallax.swap.stores.store import DiskStore, HostStore

WIDTH = 64


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def tight(model: nn.Module, free_bytes: int = 2**17) -> int:
    return 2 * sum(p.nbytes for p in model.parameters()) + free_bytes


def refused(call: Callable[[], Any], *parts: str) -> str:
    """The message of an error of ours: one line, without terms of a plan's configuration."""
    with pytest.raises(ParallaxError) as found:
        call()
    message = str(found.value)
    assert isinstance(found.value, ConfigError | BudgetExceeded | SwapError)
    for word in parts:
        assert word in message, message
    for other in ("\n", "cluster.", "trainer.", "plan.", " swap.", "swap.tier", "swap.directory"):
        assert other not in message, message
    chain = found.value.__cause__ if not found.value.__suppress_context__ else None
    assert "cluster." not in str(chain)
    del chain, found
    gc.collect()  # the frames of the error hold a graph, and with it the tier
    return message


# ---- at the call

SIZES: list[Any] = [
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "8 apples",
    "nan",
    "-5GiB",
    "0",
    b"8",
    [8],
]
COUNTS: list[Any] = [-1, "2", 2.5, True, float("nan"), [1], 1j]


@pytest.mark.parametrize("key", ["limit", "tier_bytes", "piece_bytes"])
def test_sizes(key: str) -> None:
    for value in SIZES:
        refused(lambda value=value: parallax.swap(build(), **{key: value}), f"{key}=")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("threads", [0, None]),
        ("minimum_bytes", [None, "64KiB"]),
        ("n_tensors", []),
        ("swapout_threshold", [None]),
        ("swapin_ahead", []),
        ("lb", []),
        ("swapin_groupby", [0, None]),
    ],
)
def test_counts(key: str, others: list[Any]) -> None:
    for value in [*COUNTS, *others]:
        refused(
            lambda value=value: parallax.swap(build(), **{key: value}), f"{key}=", "whole numbers"
        )  # type: ignore[misc]


def test_whole_numbers_of_any_kind() -> None:
    for limit in (2**30, 1e9, 2.0**30, torch.tensor(2**30), "1 GiB", "1e9"):
        assert parallax.swap(build(), limit)._options.limit in (2**30, 10**9)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["eager", "verify"])
def test_flags(key: str) -> None:
    for value in ("yes", None, 5, 1):
        refused(
            lambda value=value: parallax.swap(build(), **{key: value}), f"{key}=", "True and False"
        )  # type: ignore[misc]


def test_tiers() -> None:
    for value in ("none", "HOST", None, 5):
        refused(
            lambda value=value: parallax.swap(build(), tier=value), f"tier={value}", "host, disk"
        )  # type: ignore[misc]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: model.parameters(),
    "list of parameters": lambda model: list(model.parameters()),
    "None": lambda model: None,
    "None in a list": lambda model: [adam(model), None],
    "class": lambda model: torch.optim.AdamW,
    "class in a list": lambda model: [torch.optim.AdamW],
    "text": lambda model: "adamw",
    "number": lambda model: 5,
    "dictionary": lambda model: {"a": adam(model)},
    "states": lambda model: adam(model).state_dict(),
    "model": lambda model: model,
    "tensor": lambda model: torch.ones(2),
    "scheduler": lambda model: torch.optim.lr_scheduler.StepLR(adam(model), 1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_optimizers(make: Callable[[nn.Module], Any]) -> None:
    model = build()
    refused(
        lambda: parallax.swap(model, optimizer=make(model)),
        "optimizer=",
        "instance of torch.optim.Optimizer",
    )


def test_an_optimizer_twice() -> None:
    model = build()
    optimizer = adam(model)
    refused(lambda: parallax.swap(model, optimizer=[optimizer, optimizer]), "AdamW is given twice")


MODELS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "number": lambda: 5,
    "function": lambda: build,
    "class": lambda: nn.Linear,
    "list": lambda: [build()],
    "text": lambda: "model",
    "tensor": lambda: torch.ones(3),
    "parameters": lambda: build().parameters(),
    "states": lambda: build().state_dict(),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_no_models(make: Callable[[], Any]) -> None:
    refused(lambda: parallax.swap(make()), "model=", "nn.Module")


def test_a_model_without_shapes() -> None:
    message = refused(
        lambda: parallax.swap(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(5))), "1.weight"
    )
    assert "run one before" in message


def test_a_model_on_several_devices() -> None:
    model = build()
    model[0].to("meta")
    refused(lambda: parallax.swap(model), "Sequential is on cpu, meta")


def test_a_tier_too_small_for_anything() -> None:
    refused(
        lambda: parallax.swap(build(), "1GiB", tier_bytes=1000),
        "tier_bytes=1000",
        "minimum_bytes=65536",
    )


FOLDERS: list[Any] = [None, 5, b"/tmp/x", "", "a\0b", ["x"]]


def test_no_folders() -> None:
    for value in FOLDERS:
        refused(lambda value=value: parallax.swap(build(), directory=value), "directory=")  # type: ignore[misc]


# ---- on entry


def enter(directory: Path | str) -> None:
    with parallax.swap(build(), "1GiB", directory=directory):
        pass


def test_unusable_folders_raise_on_entry(tmp_path: Path) -> None:
    """Not in the middle of a step, and also where nothing may ever move."""
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "somebody's").touch()
    names = [
        "file",
        "file/sub",
        "dangling",
        "dangling/sub",
        "link",
        "shared",
        "x" * 300,
        f"new/{'x' * 300}",
        "x/" * 3000,
    ]
    before = sorted(tmp_path.rglob("*"))
    for name in names:
        assert len(refused(lambda name=name: enter(tmp_path / name), "set directory")) < 1000  # type: ignore[misc]
    for place in ("/proc/swap", "/dev/null", "/dev/null/swap"):
        refused(lambda place=place: enter(place), "set directory", place)  # type: ignore[misc]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    for name in ("closed", "closed/sub"):
        refused(lambda name=name: enter(tmp_path / name), "Permission denied", "set directory")  # type: ignore[misc]


def test_a_usable_folder_is_not_made_before_it_is_needed(tmp_path: Path) -> None:
    for name in ("new", "new/below/it"):
        enter(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir(mode=0o700)
    enter(tmp_path / "old")
    assert list((tmp_path / "old").iterdir()) == []


def test_left_on_another_thread(tmp_path: Path) -> None:
    """torch's hooks are those of a thread; theirs is the word of an internal error otherwise."""
    swapping = parallax.swap(build(), "1GiB", directory=tmp_path / "swap")
    failures: list[BaseException] = []

    def leave() -> None:
        try:
            swapping.__exit__(None, None, None)
        except BaseException as error:
            failures.append(error)

    swapping.__enter__()
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert isinstance(failures[0], SwapError)
    assert "entered on another thread" in str(failures[0])
    assert swapping.open
    swapping.__exit__(None, None, None)
    assert not swapping.open


# ---- in a step


def loop(limit: int, scratch: Path, *, rows: int = 256, **options: Any) -> None:
    model = build()
    optimizer = adam(model)
    settings = {"directory": scratch, "minimum_bytes": 1024, "piece_bytes": 2**15, **options}
    with parallax.swap(model, limit, optimizer=optimizer, **settings):
        for _ in range(3):
            model(torch.randn(rows, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_full_tier_names_its_setting(scratch: Path) -> None:
    message = refused(
        lambda: loop(tight(build()), scratch, tier_bytes=2**16),
        "is full",
        "raise tier_bytes",
        "limit",
    )
    assert "directory" in message


def test_a_limit_that_is_too_small_names_itself(scratch: Path) -> None:
    model = build()
    for limit, rows in (
        (1000, 256),
        (tight(model, 2**12), 256),
        (tight(model, 2**16), 1024),
        (tight(model, 2**14), 8),
    ):
        refused(lambda limit=limit, rows=rows: loop(limit, scratch, rows=rows), "raise limit")  # type: ignore[misc]


def test_a_failing_disk_names_the_directory(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", fail)
    refused(
        lambda: loop(tight(build()), scratch),
        "No space left on device",
        "free space or set directory",
    )


def test_a_damaged_file_names_the_directory(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, view, at: real(handle, bytes(len(view)), at))
    refused(
        lambda: loop(tight(build()), scratch), "not what was written", "set directory to another"
    )


def test_the_report_names_arguments(scratch: Path) -> None:
    model = build()
    with parallax.swap(model, "1GiB", directory=scratch) as swapping:
        model(torch.ones(2, WIDTH)).sum().backward()
    assert "smaller than minimum_bytes" in swapping.report()
    assert "swap.minimum_bytes" not in swapping.report()


def test_the_report_says_why_nothing_moves(scratch: Path) -> None:
    """The report claimed that all tensors fit, although no limit moves these tensors."""
    for least, output in (
        (65536, "none may move: they are smaller than minimum_bytes=65536; "),
        (1, "all fitted"),
    ):
        model = build()
        with parallax.swap(model, "1GiB", directory=scratch, minimum_bytes=least) as swapping:
            model(torch.ones(2, WIDTH)).sum().backward()
        assert f"activations: {output}" in swapping.report()


def test_host_memory_errors_use_the_callers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SwapError, match=r"cannot allocate .*; lower tier_bytes, .*ulimit -l.*, or set tier=disk$"
    ):
        RegisteredArena(
            2**60, lambda *_: 0, lambda _: 0, synchronize=lambda: None, remedy=SCOPE.pinning
        )
    with pytest.raises(SwapError, match=r"or set swap\.tier=disk$"):
        RegisteredArena(2**60, lambda *_: 0, lambda _: 0, synchronize=lambda: None)
    monkeypatch.setattr("torch.Stream", lambda device: None)
    for name in ("cudart", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: None)
    copies = copies_for(torch.device("cuda", 0), remedy=SCOPE.pinning)
    with pytest.raises(SwapError, match="lower tier_bytes"):
        copies.arena(2**60)


def test_the_engine_keeps_its_keys(scratch: Path) -> None:
    for remedies, parts in (
        (ENGINE, r"\(cluster\.host_memory\)"),
        (SCOPE, "raise tier_bytes, or raise limit"),
    ):
        store = HostStore(4096, CpuCopies(), remedies)
        with pytest.raises(SwapError, match=f"the host tier is full: .*{parts}"):
            store.write(torch.zeros(5000, dtype=torch.uint8))
        store.close()
    disk = DiskStore(scratch, 4096, CpuCopies(), threads=1)
    with contextlib.closing(disk), pytest.raises(SwapError, match=r"is full: .*\(cluster\.disk\)"):
        disk.write(torch.zeros(5000, dtype=torch.uint8))
