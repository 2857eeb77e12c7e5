"""The published bubble rates and speeds of the Zero Bubble paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.validation.table import read_rows
from benchmarks.validation.zero_bubble import COLUMNS, Case, Overhead, calibrate, check

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "validation" / "zero_bubble.csv"
LINE = {
    **{
        "model": "tiny",
        "layers": "6",
        "heads": "2",
        "hidden": "64",
        "seq": "8",
        "p": "4",
        "b": "2",
        "m": "12",
    },
    **{
        "TF_ms": "10",
        "TB_ms": "10",
        "TW_ms": "10",
        "Tcomm_ms": "0",
        "bub_1F1B": "0.2",
        "thr_1F1B": "10",
    },
}


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published table is not here")
def test_the_published_table() -> None:
    table = check(PUBLISHED)
    assert set(read_rows(PUBLISHED)[0]) >= COLUMNS
    assert table.summary["bubble_1f1b_max_error"] < 1e-4
    assert table.summary["bubble_other_max_error"] < 0.01
    assert table.summary["throughput_mean_error"] < 0.02
    searched = [
        abs(row.error) for row in table.rows if row.quantity in ("bubble zb-1p", "bubble zb-2p")
    ]
    assert len(searched) == 12
    assert max(searched) < 1e-4


def test_bubbles_by_hand() -> None:
    """Equal B and W passes, free messages: 1F1B waits for three stages, ZB-H1 for a third of that, ZB-H2 not at all."""
    case = Case.of(LINE)
    assert case.bubbles == {"1f1b": 0.2}
    assert case.bubble("1f1b") == pytest.approx(3 / 15)
    assert case.bubble("zb-h1") == pytest.approx(1 / 13)
    assert case.bubble("zb-h2") == pytest.approx(0, abs=1e-9)
    assert case.bubble("interleaved") == pytest.approx(1.5 / 13.5)


def test_the_overhead_comes_back_from_other_rows() -> None:
    truth = Overhead(0.0004, 0.03)
    case = replace(Case.of(LINE), send=0.0005)
    others = []
    for micro in (8, 16, 32):
        other = replace(case, micro_batches=micro)
        speeds = {name: other.throughput(name, truth) for name in ("1f1b", "interleaved", "zb-1p")}
        others.append(replace(other, samples_per_second=speeds))
    found = calibrate(others, case)
    assert found.message_seconds == pytest.approx(truth.message_seconds, rel=1e-3)
    assert found.slowdown == pytest.approx(truth.slowdown, rel=1e-3)


def test_without_other_models_a_message_holds_its_ranks_for_as_long_as_it_takes(
    tmp_path: Path,
) -> None:
    case = replace(Case.of(LINE), send=0.002)
    assert calibrate([], case) == Overhead(0.002, 0.0)
    path = tmp_path / "one.csv"
    path.write_text(",".join(LINE) + "\n" + ",".join(LINE.values()) + "\n", encoding="utf-8")
    table = check(path)
    assert [row.quantity for row in table.rows] == ["bubble 1f1b", "samples 1f1b"]
    assert table.summary["bubble_1f1b_max_error"] == pytest.approx(0, abs=1e-12)
    assert table.rows[1].predicted == pytest.approx(12 * 2 / (15 * 0.03) / 4, rel=1e-3)
