"""A prediction keeps nothing of the rows that it has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predict_memory import BATCH, measure
from parallax.run import predictions


@pytest.mark.parametrize("suffix", ["npy", "parquet", "jsonl"])
def test_no_tensor_is_kept_from_the_first_row_to_the_last(tmp_path: Path, suffix: str) -> None:
    part = predictions._PART_BATCHES * BATCH
    found = measure(6 * part, suffix, tmp_path)
    assert found.rows == [part * (number + 1) for number in range(6)]
    assert len(set(found.live[1:])) == 1
