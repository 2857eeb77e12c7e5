"""Predicted memory and time against the published Mist runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.validation import mist
from benchmarks.validation.table import Table, read_rows
from parallax.errors import DataError
from parallax.plan.catalog import GAP_TENSORS
from parallax.plan.plan import Directive

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "validation" / "mist_l4.csv"
HEADER = (
    "model,flash,L4s,seq,global_batch,micro_batches,mb_size,partition,DP_per_stage,ckpt_layers,optimizer_offload,"
    "act_offload,iter_s,peak_alloc_MB,peak_reserved_MB"
)
UNEVEN = "gpt1.3b,F,3,1024,24,6,2,10/14,1/2,4/0,.5/0,.5/0,3.0,12000/13000,14000/15000"
WHOLE = "llama1.3b,T,8,2048,64,8,1,24,8,24,0,0,9.0,14000,16000"


@pytest.fixture(scope="module")
def published() -> Table:
    if not PUBLISHED.exists():
        pytest.skip(f"{PUBLISHED} is not here")
    return mist.check(PUBLISHED)


def cases(folder: Path, *lines: str) -> list[mist.Case]:
    path = folder / "runs.csv"
    path.write_text("\n".join((HEADER, *lines)) + "\n", encoding="utf-8")
    return [mist.parse(line) for line in read_rows(path)]


def test_reserved_memory_of_every_stage_is_met_within_5_percent_and_never_under_estimated(published: Table) -> None:
    reserved = [row for row in published.rows if row.quantity == "reserved"]
    assert len(reserved) == 8
    for row in reserved:
        assert 0 <= row.error <= 0.05, row
    assert published.summary["memory_underestimates"] == 0


def test_the_number_fitted_to_the_allocator_holds_for_a_run_that_it_was_not_found_with() -> None:
    if not PUBLISHED.exists():
        pytest.skip(f"{PUBLISHED} is not here")
    runs = [mist.parse(line) for line in read_rows(PUBLISHED)]
    for left_out in runs:
        found = middle([stage for run in runs if run is not left_out for stage in stage_sizes(run)])
        assert found == pytest.approx(GAP_TENSORS, rel=0.2)
        for rest, tensor, reserved in stage_sizes(left_out):
            assert 0 <= (rest + found * tensor) / reserved - 1 <= 0.05, (left_out.name, found)
    assert middle([stage for run in runs for stage in stage_sizes(run)]) == GAP_TENSORS


def stage_sizes(run: mist.Case) -> list[tuple[float, float, float]]:
    """Of each stage, bytes: predicted without the gaps, of a tensor between layers, and reserved."""
    found = []
    for index, (memory, reserved) in enumerate(zip(run.memory(), run.reserved)):
        tensor = run.work.blocks[1].output.at(run.rows(index))
        found.append((sum(memory.values()) - GAP_TENSORS * tensor, tensor, reserved * mist.MIB))
    return found


def middle(stages: list[tuple[float, float, float]]) -> int:
    """The number of tensors that leaves most room on both sides of 0 to 5 % in all ``stages``."""

    def room(count: int) -> float:
        errors = [(rest + count * tensor) / reserved - 1 for rest, tensor, reserved in stages]
        return min(*errors, *(0.05 - error for error in errors))

    return max(range(500), key=room)


def test_tensors_never_take_more_than_predicted_for_them(published: Table) -> None:
    allocated = [row for row in published.rows if row.quantity == "allocated"]
    assert len(allocated) == 8
    assert all(0 <= row.error <= 0.12 for row in allocated)


def test_seconds_of_a_step_are_met_within_8_percent_also_for_runs_left_out(published: Table) -> None:
    assert published.summary["time_mean_error"] <= 0.08
    assert published.summary["time_unseen_error"] <= 0.08
    assert {row.quantity for row in published.rows} == {"reserved", "allocated", "step", "step, unseen"}


def test_a_line_becomes_the_stages_of_a_plan(tmp_path: Path) -> None:
    (case,) = cases(tmp_path, UNEVEN)
    profile = case.profile(mist.START, 1)
    first, last = case.stages(profile)
    assert (first.start, first.stop, last.start, last.stop) == (0, 11, 11, 26)
    counts = [[stage.directives.count(directive) for directive in Directive] for stage in (first, last)]
    assert counts == [[4, 3, 4], [15, 0, 0]]  # keep, offload, recompute; embedding and head are kept
    assert first.swap_limit_bytes == 2 * profile.blocks[1].moved.at(4)
    assert (first.optimizer_offload, last.optimizer_offload) == (0.5, 0.0)
    assert (case.microbatch, case.rows(0), case.rows(1)) == (4, 4, 2)


def test_each_replica_holds_its_shard_of_the_optimizer_less_what_is_offloaded(tmp_path: Path) -> None:
    (case,) = cases(tmp_path, UNEVEN)
    first, last = case.memory()
    # 12 bytes of states per parameter, which itself takes 2.
    assert first["optimizer"] + first["master"] == pytest.approx(0.5 * 6 * first["parameters"])
    assert last["optimizer"] + last["master"] == pytest.approx(0.5 * 6 * last["parameters"])
    assert first["gradients"] == first["parameters"]


def test_recomputing_all_layers_keeps_their_inputs_alone(tmp_path: Path) -> None:
    recomputing, keeping = cases(tmp_path, WHOLE, WHOLE.replace(",8,24,0,", ",8,0,0,"))
    (less,), (more,) = recomputing.memory(), keeping.memory()
    assert less["activations"] < more["activations"] / 5
    assert less["workspace"] > more["workspace"] / 2
    assert recomputing.step_seconds(mist.START) > 1.2 * keeping.step_seconds(mist.START)


def test_one_run_is_predicted_without_any_to_learn_from(tmp_path: Path) -> None:
    cases(tmp_path, UNEVEN)
    table = mist.check(tmp_path / "runs.csv")
    (unseen,) = [row for row in table.rows if row.quantity == "step, unseen"]
    (case,) = cases(tmp_path, UNEVEN)
    assert unseen.predicted == case.step_seconds(mist.START)
    assert table.summary["time_mean_error"] < table.summary["time_unseen_error"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("10/14", "10/13"), ("gpt1.3b", "gpt9b"), (",1/2,", ",1/x,"), ("4/0,.5/0", "4/0/0,.5/0"), (",3,1024", ",4,1024")],
)
def test_lines_that_contradict_themselves_are_refused(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(DataError, match="not a run of the Mist table"):
        cases(tmp_path, UNEVEN.replace(old, new))
