"""A Dataset of one's own: the same rows for any workers, splits, kills and resumes; what is refused, in one line."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallax.errors import CheckpointError, ConfigError, DataError
from parallax.model.factory.custom import CustomModelConfig
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.dataset import DatasetDataConfig
from parallax.train.data.indexed import SIZES_OF, IndexedSource
from parallax.train.data.stream import StreamSource
from parallax.train.data.table import check_collated, digest_of
from tests.alone import alone

HERE = "tests.unit.train.datasets"
Step = tuple[Tensor, Tensor]


@contextmanager
def opened(target: str, seed: int = 3, **settings: Any) -> Iterator[Any]:
    source = DatasetDataConfig(target=f"{HERE}:{target}", **settings).open(MLPConfig(), seed)
    if isinstance(source, IndexedSource):
        source.start()
    try:
        yield source
    finally:
        if isinstance(source, IndexedSource):
            source.close()


def read(source: Any, rows: int, parts: int, *, targets_alone: bool = False) -> Step:
    """Return a batch that is read in ``parts`` micro-batches: inputs and targets, or targets first as another rank."""
    batch = source.batch(rows)
    bounds = [len(batch) * each // parts for each in range(parts + 1)]
    spans = [(a, b) for a, b in pairwise(bounds) if a < b]
    targets = [batch.targets(*span) for span in spans] if targets_alone else []
    inputs = [batch.inputs(*span) for span in spans]
    inputs = [next(iter(each.values())) if isinstance(each, dict) else each for each in inputs]
    targets = targets or [batch.targets(*span) for span in spans]
    return torch.cat(inputs), torch.cat(targets)


def read_many(source: Any, steps: int, rows: int) -> list[Step]:
    return [read(source, rows, 2) for _ in range(steps)]


def equal(one: list[Step], other: list[Step]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for left, right in zip(one, other) for a, b in zip(left, right)
    )


@settings(max_examples=6)
@given(
    workers=st.sampled_from([0, 1, 3]),
    plans=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=3),
    last=st.sampled_from(["continue", "keep", "drop", "repeat"]),
)
def test_rows_are_the_same_for_any_workers_splits_and_resumes(
    workers: int, plans: list[tuple[int, int]], last: str
) -> None:
    """Each plan splits its batches in another way, and begins where the plan before it was ended."""
    total = sum(steps for steps, _ in plans)
    with opened("Augmented", kwargs={"rows": 23}, last_batch=last) as source:
        expected = [read(source, 8, 1) for _ in range(total)]
    found: list[Step] = []
    state: Any = None
    for steps, parts in plans:
        with opened(
            "Augmented", seed=4, kwargs={"rows": 23}, last_batch=last, workers=workers
        ) as source:
            source.load_state_dict(state or {**source.state_dict(), "seed": 3})
            found += [read(source, 8, parts, targets_alone=parts == 3) for _ in range(steps)]
            state = json.loads(json.dumps(source.state_dict()))
    assert equal(found, expected)


def test_the_model_draws_what_it_would_without_the_data() -> None:
    with opened("Augmented", kwargs={"rows": 40}, workers=0) as source:
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]  # noqa: NPY002
        read(source, 8, 2)
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_rows_are_read_ahead_by_workers_within_the_limit() -> None:
    with opened("Augmented", kwargs={"rows": 400}, workers=2, prefetch="1KiB") as source:
        for _ in range(4):
            read(source, 8, 2)
        # 4 rows are 4 × (16 + 8) bytes: ten requests fit.
        assert len(source._training._ahead) == 1024 // (4 * 24)
        assert len(source._workers) == 2
    with opened("Augmented", kwargs={"rows": 400}, workers=2, prefetch=1) as source:
        for _ in range(4):
            read(source, 8, 2)
        assert len(source._training._ahead) == 1


def test_a_worker_that_dies_is_replaced_and_its_rows_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"rows": 64, "bad": 33, "mark": str(tmp_path / "mark")}
    # Three epochs: a worker that reads ahead may die on the row of the third while the other reads that of the second.
    with opened("Augmented", kwargs={"rows": 64}, validation=0) as source:
        expected = [read(source, 8, 2) for _ in range(24)]
    with opened("Fatal", kwargs=settings, workers=2, validation=0) as source:
        found = [read(source, 8, 2) for _ in range(24)]
    assert equal(found, expected)
    assert (tmp_path / "mark").exists()
    assert "was killed by signal 9: replaced" in caplog.text


def test_rows_that_kill_each_worker_are_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rows": 64, "bad": 33, "mark": str(tmp_path / "never")}
    with (
        opened("Fatal", kwargs=settings, workers=2, validation=0) as source,
        pytest.raises(
            DataError, match=r"was killed by signal 9 while it read row .*data.workers=0"
        ),
    ):
        read_many(source, 16, 8)


def test_workers_end_with_their_rank() -> None:
    pid = os.fork()
    if not pid:
        with opened("Augmented", kwargs={"rows": 64}, workers=2) as source:
            read(source, 8, 2)
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    children = psutil.Process(pid).children(recursive=True)
    assert len(children) == 2
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_the_dataset_is_one_line_with_row_and_place(workers: int) -> None:
    with opened("Broken", kwargs={"rows": 9}, workers=workers, validation=0) as source:
        wanted = r"^data.target=.*: row 5: ValueError: row five is broken \(.*datasets.py:\d+\)$"
        with pytest.raises(DataError, match=wanted) as error:
            read_many(source, 4, 4)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        ("Impure", {"rows": 9}, "reading row 0 twice gives other values"),
        ("Counting", {"rows": 9}, "reading row 0 twice gives other values"),
        ("Augmented", {"rows": 0}, "has no rows"),
        ("loader", {"rows": 8, "kind": "batch"}, "batch_sampler of its own .*global_batch"),
        ("loader", {"rows": 8, "kind": "weighted"}, "sampler of its own .*Subset"),
        (
            "Mappings",
            {"keys": ["a", "b"]},
            "no key is known as targets; the keys are a, b: set data.inputs",
        ),
        (
            "Mappings",
            {"keys": ["input_ids"]},
            "the keys are input_ids: for a language model, return .*; otherwise set data.inputs",
        ),
    ],
)
def test_what_cannot_repeat_its_rows_is_refused(
    target: str, kwargs: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises((DataError, ConfigError), match=message) as error,
        opened(target, kwargs=kwargs),
    ):
        pass
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "splits",
            r"a dict with the keys train, test: return one dataset \(data.kwargs.split=train",
        ),
        ("tensors", "a dict with the keys x, y: return one dataset"),
        ("pair", "a tuple of 2 datasets: return one"),
        ("loaders", "a list of 2 datasets: return one"),
        ("class", "the class Augmented: return an object of it"),
        ("frame", r"a DataFrame of pandas: return datasets.Dataset.from_pandas\(frame\)"),
        ("batches", "batch_size=None, so its dataset makes the batches"),
        ("batches of a stream", "batch_size=None, so its dataset makes the batches"),
    ],
)
def test_what_is_no_dataset_is_named(kind: str, message: str) -> None:
    if kind == "frame":
        pytest.importorskip("pandas")
    with (
        pytest.raises((DataError, ConfigError), match=message) as error,
        opened("in_place_of_a_dataset", kwargs={"kind": kind}),
    ):
        pass
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exit", r"row 5: SystemExit: the disk is gone \(.*datasets.py:\d+\)$"),
        ("length", r"its __len__: TypeError: 'str' object .* \(.*:\d+\)$"),
        (
            "none",
            r"rows 0, 1, 2, 3: no batch .*; row 3 is None: leave it out .torch.*Subset.*",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_cannot_be_read_are_one_line(kind: str, message: str, workers: int) -> None:
    settings: dict[str, Any] = {"kwargs": {"rows": 10, "kind": kind}, "shuffle": False}

    def read_some() -> None:
        with opened("Leaving", **settings, validation=0, workers=workers) as source:
            read_many(source, 2, 9)

    with pytest.raises(DataError, match=f"^data.target=.*: {message}") as error:
        read_some()
    assert str(error.value).isprintable()


def test_a_collate_function_that_leaves_examples_out_is_refused() -> None:
    settings: dict[str, Any] = {"collate": f"{HERE}:without_none", "validation": 0, "workers": 0}
    with opened("Leaving", kwargs={"rows": 12, "kind": "plain"}, **settings) as source:
        assert read(source, 12, 3)[0].shape == (12, 4)
    with (
        opened("Leaving", kwargs={"rows": 12, "kind": "none"}, **settings) as source,
        pytest.raises(DataError, match=r"collate function returns 11 row\(s\) of 12 example\(s\)"),
    ):
        read(source, 12, 1)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"inputs": torch.ones(4, 3), "targets": torch.ones(4)}, False),
        ({"inputs": (torch.ones(8, 3), np.ones((8, 2))), "targets": {"y": torch.ones(8)}}, False),
        ({"inputs": torch.ones(9, 3), "targets": torch.ones(4)}, False),  # nodes of graphs
        ({"inputs": [torch.ones(2)] * 4, "targets": [torch.ones(())] * 4}, False),
        ({"inputs": torch.ones(4, 3), "targets": torch.tensor(1)}, False),
        ({"inputs": ["text"], "targets": None}, False),
        ({"inputs": torch.ones(4, 3), "targets": {"y": torch.ones(4), "name": ["text"]}}, False),
        ({"inputs": torch.ones(3, 3), "targets": torch.ones(3)}, True),
        ({"inputs": torch.ones(0, 3), "targets": torch.ones(0)}, True),
        ({"inputs": torch.ones(1, 12), "targets": torch.ones(1, 12)}, True),  # packed
    ],
)
def test_rows_are_as_many_as_examples(values: dict[str, Any], refused: bool) -> None:
    if refused:
        with pytest.raises(DataError, match=r"returns \d row\(s\) of 4 example\(s\)"):
            check_collated("here", values, 4)
    else:
        check_collated("here", values, 4)


def test_targets_that_are_texts_are_refused() -> None:
    for targets in (["a", "b"], {"path": ("a", "b")}, "a"):
        with pytest.raises(DataError, match=r"here: the targets are texts, such as a: number them"):
            check_collated("here", {"inputs": torch.ones(2), "targets": targets}, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_is_set_for_each_row(workers: int) -> None:
    settings: dict[str, Any] = {"kwargs": {"rows": 10}, "workers": workers, "validation": 0.2}
    with opened("Epochs", **settings) as source:
        for step in range(8):  # of 8 rows an epoch
            inputs, _ = read(source, 6, 1 + step % 3)
            assert inputs[:, 1].tolist() == [row // 8 for row in range(6 * step, 6 * step + 6)]
        assert source.validation(0, 2).inputs(0, 2)[:, 1].tolist() == [0, 0]


def test_the_targets_of_a_named_tuple_are_named() -> None:
    with opened("Leaving", kwargs={"rows": 9, "kind": "named"}, validation=0) as source:
        inputs, targets = read(source, 9, 2)
        assert torch.equal(inputs[:, 0].long() % 7, targets)
    settings: dict[str, Any] = {"kwargs": {"rows": 9, "kind": "named"}, "targets": "x"}
    with opened("Leaving", **settings, validation=0) as source:
        inputs, targets = read(source, 9, 2)
        assert torch.equal(targets[:, 0].long() % 7, inputs)


def test_rows_of_several_sizes_need_a_collate_function() -> None:
    with (
        opened("Ragged", kwargs={"rows": 30}, workers=0) as source,
        pytest.raises(
            DataError, match=r"no batch can be made: .*pad or resize them .*data\.collate"
        ),
    ):
        read(source, 8, 1)
    for target in ("loader", "with_collate"):
        with opened(target, kwargs={"rows": 30}, workers=0) as source:
            assert read(source, 8, 2)[0].shape == (8, 3)
    with opened("Ragged", kwargs={"rows": 30}, collate=f"{HERE}:padded") as source:
        assert read(source, 8, 2)[0].shape == (8, 3)


@pytest.mark.parametrize("target", ["mixing", "mixing_stream"])
def test_rows_that_are_mixed_in_collating_do_not_depend_on_the_micro_batches(target: str) -> None:
    found: list[list[Step]] = []
    for workers, parts in ((0, 1), (1, 4), (0, 3)):
        with opened(target, kwargs={"rows": 23}, workers=workers, validation=0) as source:
            found.append([read(source, 8, parts, targets_alone=parts == 3) for _ in range(5)])
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    rows = [row[0].item() for inputs, _ in found[0] for row in inputs]
    assert any(row != round(row) for row in rows)  # they are mixed


@pytest.mark.parametrize("target", ["Ragged", "padding_stream"])
def test_rows_that_are_padded_to_the_longest_do_not_depend_on_the_micro_batches(
    target: str,
) -> None:
    found: list[list[Step]] = []
    settings: dict[str, Any] = {"kwargs": {"rows": 23}}
    if target == "Ragged":
        settings["collate"] = f"{HERE}:to_longest"
    for workers, parts in ((0, 1), (1, 4), (0, 3)):
        with opened(target, workers=workers, validation=0, **settings) as source:
            found.append([read(source, 4, parts, targets_alone=parts == 3) for _ in range(6)])
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    with opened(target, workers=0, validation=0, **settings) as source:
        sampled = source.sample(1).inputs(0, 1).shape[1]  # to plan with
        widths = [source.batch(1).inputs(0, 1).shape[1] for _ in range(SIZES_OF)]
        assert len(set(widths)) > 1
        assert sampled == max(widths)


def test_a_collate_function_that_pads_to_the_longest_is_noted() -> None:
    settings: dict[str, Any] = {"kwargs": {"rows": 23}, "collate": f"{HERE}:to_longest"}
    with opened("Ragged", workers=0, validation=0.2, **settings) as source:
        (remark,) = source.remarks
        assert "pads rows to the longest of their batch" in remark


def test_a_collate_function_that_draws_is_noted() -> None:
    with opened("mixing", kwargs={"rows": 23}, validation=0.2) as source:
        assert "its collate function draws random numbers" in source.remarks[0]
    for target in ("Augmented", "with_collate"):
        with opened(target, kwargs={"rows": 23}) as source:
            assert source.remarks == []


def test_rows_that_draw_rarely_are_those_that_are_read_alone() -> None:
    for workers in (0, 1):
        with opened(
            "Rarely", kwargs={"rows": 40}, workers=workers, validation=0, shuffle=False
        ) as one:
            together = [read(one, 20, 1) for _ in range(4)]
        with opened("Rarely", kwargs={"rows": 40}, validation=0, shuffle=False) as other:
            assert equal(together, [read(other, 20, 20) for _ in range(4)])


def test_rows_by_lists_of_numbers_alone_and_batches_that_are_dataclasses() -> None:
    found = []
    for parts in (1, 4):
        with opened("AtOnce", validation=0) as source:
            found.append(
                read_many(source, 3, 8) if parts == 4 else [read(source, 8, 1) for _ in range(3)]
            )
    assert equal(*found)
    with opened("Augmented", kwargs={"rows": 9}, collate=f"{HERE}:paired", validation=0) as source:
        inputs, targets = read(source, 9, 2)
        assert inputs.shape == (9, 4)
        assert sorted(inputs[:, 0].tolist()) == list(range(9))
        assert torch.equal(targets, inputs[:, 0].long() % 7)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("row", r"row 5 of epoch 0: ValueError: row five is broken \(.*datasets.py:\d+\)$"),
        ("collate", r"no batch can be made of its rows: RuntimeError: .* \(.*:\d+\)$"),
        ("state", r"its state_dict: ValueError: no state \(.*datasets.py:\d+\)$"),
        (
            "load",
            r"its load_state_dict does not take what its state_dict gave: KeyError: 'next' .*",
        ),
    ],
)
def test_an_exception_of_an_iterable_dataset_is_one_line(place: str, message: str) -> None:
    def read_some() -> None:
        with opened("Failing", kwargs={"place": place}) as source:
            source.sample(2)
            read_many(source, 4, 4)

    with pytest.raises(DataError, match=f"^data.target=.*: {message}") as error:
        read_some()
    assert len(str(error.value).splitlines()) == 1


def test_an_iterator_that_can_be_read_once_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="returned a generator, which can be read once alone"),
        opened("once"),
    ):
        pass


def test_the_keys_of_mappings() -> None:
    settings: dict[str, Any] = {"kwargs": {"keys": ["input_ids", "attention_mask", "labels"]}}
    with opened("Mappings", **settings) as source:
        batch = source.batch(4)
        assert list(batch.inputs(0, 2)) == ["input_ids", "attention_mask"]
        assert batch.targets(0, 2)[:, 1].tolist() == [2, 2]
    with opened("Mappings", inputs=["attention_mask"], targets="input_ids", **settings) as source:
        batch = source.batch(4)
        assert list(batch.inputs(0, 2)) == ["attention_mask"]
        assert batch.targets(0, 2)[:, 1].tolist() == [0, 0]
    config = DatasetDataConfig(target=f"{HERE}:Mappings", **settings)
    llama = HuggingFaceConfig(architecture="LlamaForCausalLM")
    assert list(config.open(llama, 0).batch(4).inputs(0, 1)) == [
        "input_ids",
        "attention_mask",
        "labels",
    ]


@pytest.mark.parametrize(("factory", "takes"), [("causal", True), ("headless", False)])
def test_labels_are_given_to_a_model_of_ones_own_that_takes_them(factory: str, takes: bool) -> None:
    model = CustomModelConfig(target=f"{HERE}:{factory}")
    keys = ["input_ids", "labels"]
    config = DatasetDataConfig(target=f"{HERE}:Mappings", kwargs={"keys": keys}, validation=0)
    batch = config.open(model, 0).batch(4)
    assert list(batch.inputs(0, 1)) == keys[: 1 + takes]
    assert batch.targets(0, 1)[0, 1] == 1  # the second key


def test_held_out_rows_and_sets_of_them() -> None:
    with opened("Augmented", kwargs={"rows": 60}, validation=0.25) as source:
        held_out = [
            int(row) for index in range(4) for row in source.validation(index, 4).inputs(0, 4)[:, 0]
        ]
        trained = {int(row) for row in read(source, 45, 1)[0][:, 0]}
        assert source.validation_rows == 15
        assert len(held_out) == 15
        assert trained | set(held_out) == set(range(60))
        again = source.validation(1, 4).inputs(0, 4)[:, 0].tolist()
        assert again == held_out[4:8]
    sets = {"few": {"kwargs": {"rows": 5}}, "many": {"kwargs": {"rows": 50}}}
    with opened("Augmented", kwargs={"rows": 60}, validation=sets, workers=2) as source:
        assert len(source) == 60
        assert {name: each.validation_rows for name, each in source.validation_sets.items()} == {
            "few": 5,
            "many": 50,
        }
        for index in range(12):
            many = source.validation_sets["many"].validation(index, 4)
            assert many.inputs(0, 4)[:, 0].tolist() == list(
                range(4 * index, min(50, 4 * index + 4))
            )
    with pytest.raises(ConfigError, match=r"data.validation.dev.rows: a set has the keys of data"):
        DatasetDataConfig(target="a:b", validation={"dev": {"rows": 3}})


def check_resumes(target: str, kwargs: dict[str, Any]) -> None:
    with opened(target, kwargs=kwargs) as source:
        assert isinstance(source, StreamSource)
        source.sample(6)
        expected = [digest_of(read(source, 7, 1)) for _ in range(12)]
    assert len(set(expected)) > 2
    for ended in (0, 1, 2, 5, 9):
        with opened(target, kwargs=kwargs) as source:
            first = [digest_of(read(source, 7, 2)) for _ in range(ended)]
            state = json.loads(json.dumps(source.state_dict()))
        with opened(target, kwargs=kwargs) as source:
            source.load_state_dict(state)
            assert first + [digest_of(read(source, 7, 7)) for _ in range(12 - ended)] == expected


@pytest.mark.parametrize(
    ("target", "kwargs"),
    [
        ("Numbers", {"rows": 10}),
        ("Numbers", {"rows": 30, "shuffled": True}),  # its state leaves out a buffer
        ("Stateless", {}),
    ],
)
def test_an_iterable_dataset_resumes_exactly(target: str, kwargs: dict[str, Any]) -> None:
    check_resumes(target, kwargs)


def test_an_iterable_dataset_of_other_rows_is_refused() -> None:
    with opened("Numbers", kwargs={"rows": 40}) as source:
        read_many(source, 3, 8)
        state = source.state_dict()
    with (
        opened("Numbers", kwargs={"rows": 20}) as source,
        pytest.raises(CheckpointError, match="gives other rows than those"),
    ):
        source.load_state_dict(state)


def test_a_resume_on_other_rows_is_refused() -> None:
    with opened("Augmented", kwargs={"rows": 30}) as source:
        state = source.state_dict()
    for other in ({"kwargs": {"rows": 31}}, {"kwargs": {"rows": 30}, "shuffle": False}):
        with (
            opened("Augmented", **other) as source,
            pytest.raises(CheckpointError, match="restore"),
        ):
            source.load_state_dict(state)


def test_memory_does_not_grow_over_many_batches() -> None:
    with opened("Augmented", kwargs={"rows": 5000}, workers=2) as source:
        process = psutil.Process()
        for _ in range(50):
            read(source, 64, 2)
        before, files = process.memory_info().rss, process.num_fds()
        for _ in range(300):
            read(source, 64, 2)
        assert process.num_fds() <= files + 64  # one for each result that was read ahead
        assert process.memory_info().rss - before < 4 * 2**20


def test_large_requests_and_results_do_not_block_each_other() -> None:
    """More bytes on the way, in both directions, than a socket holds."""
    with opened("Texts", kwargs={"rows": 40_000}, workers=1, targets="y", validation=0) as source:
        read_names = 0
        for _ in range(4):
            batch = source.batch(6000)
            for first in range(0, 6000, 2000):
                read_names += len(set(batch.inputs(first, first + 2000)["name"]))
        assert read_names == 24_000


def check_hugging_face() -> None:
    with opened("hugging_face", kwargs={"rows": 40}, validation=0, shuffle=False) as source:
        batch = source.batch(6)
        assert batch.inputs(2, 4)["input_ids"].tolist() == [[2, 3], [3, 4]]
        assert batch.targets(2, 4).tolist() == [2, 0]
    found: list[list[Step]] = []
    for workers, parts in ((0, 1), (2, 4)):
        settings: dict[str, Any] = {"kwargs": {"rows": 40, "kind": "drawing"}, "workers": workers}
        with opened("hugging_face", validation=0, **settings) as source:
            found.append([read(source, 8, parts) for _ in range(6)])
    assert equal(*found)
    drawn = torch.cat([inputs for inputs, _ in found[0]])
    assert len(set((drawn % 1).tolist())) == len(drawn)
    for kind in ("arrow", "pandas", "numpy", "plain iterable"):
        settings = {"kwargs": {"rows": 40, "kind": kind}, "inputs": "input_ids"}
        with opened("hugging_face", validation=0, **settings) as source:
            batch = source.batch(6)
            assert batch.inputs(2, 4)["input_ids"].shape == (2, 2)
            rows = torch.as_tensor(batch.inputs(0, 6)["input_ids"])[:, 0]
            assert torch.equal(rows % 3, torch.as_tensor(batch.targets(0, 6)))
    for kind, message in (
        ("dictionary", "a DatasetDict with the keys train, test: return one dataset"),
        ("dates", r"row 0: TypeError: .*datetime64"),
    ):
        with (
            pytest.raises(DataError, match=message),
            opened("hugging_face", kwargs={"rows": 4, "kind": kind}),
        ):
            pass
    for kind in (
        "iterable",
        "plain iterable",
        "shuffled",
    ):  # of which the state leaves out a buffer
        check_resumes("hugging_face", {"rows": 60, "kind": kind})


def test_datasets_of_hugging_face() -> None:
    """In a process of its own: the library keeps threads and shared memory."""
    pytest.importorskip("datasets")
    alone(check_hugging_face)
