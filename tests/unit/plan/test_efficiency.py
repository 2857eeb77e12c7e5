"""Seconds from work by hand, numbers that come back from what they predict, and files that say nonsense."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.plan.analytic.efficiency import (
    DEFAULTS,
    FIELDS,
    Efficiency,
    Observation,
    calibrate,
    default_efficiency,
    describe_figures,
    price,
)
from parallax.plan.analytic.hardware import DEVICE_KINDS, device_kind
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.profile import Affine
from parallax.plan.work import BlockWork, ModelWork, Work

A100 = device_kind("a100-80")


def block(
    name: str, flops: float, bytes_: float, kernels: float = 10.0, fixed: float = 0.0
) -> BlockWork:
    half = Work(flops=Affine(per_row=flops), bytes=Affine(fixed, bytes_), kernels=kernels)
    return BlockWork(
        name=name,
        parameters=500,
        parameter_bytes=1000,
        forward=half,
        input_gradient=half,
        weight_gradient=half,
        moved=Affine(per_row=5.0),
        stays=Affine(fixed=3.0),
        input=Affine(per_row=1.0),
        output=Affine(per_row=2.0),
    )


def model(*blocks: BlockWork, dtype: str = "fp16", master: float = 0.0) -> ModelWork:
    return ModelWork(
        model="m",
        fingerprint="f",
        precision="p",
        dtype=dtype,
        blocks=blocks,
        optimizer_bytes=2.0,
        master_bytes=master,
    )


SIZES = [
    model(block("a", flops, bytes_, kernels), block("b", share * flops, bytes_, 2.0))
    for flops in (1e7, 1e9, 1e11, 1e12)
    for bytes_ in (1e4, 1e8, 1e10)
    for kernels, share in ((10.0, 5.0), (60.0, 0.1))
]


def step_seconds(work: ModelWork, efficiency: Efficiency, *, rows: int = 4) -> float:
    """Something that depends on every number."""
    profile = price(work, A100, efficiency)
    compute = sum(b.forward_seconds.at(rows) + b.backward_seconds.at(rows) for b in profile.blocks)
    reduced = 1e9 / (240e9 * efficiency.network)
    fixed = efficiency.exchange_seconds * len(work.blocks[0].name) + efficiency.step_seconds
    return compute + reduced + fixed + 1e7 * profile.optimizer_seconds


def test_seconds_by_hand() -> None:
    efficiency = Efficiency(
        matmul=0.5, logits=0.5, bandwidth=0.25, kernel_seconds=1e-6, launch_seconds=1e-5
    )
    first, last = price(
        model(block("a", 312e9, 2039e6), block("b", 312e9, 2039e6)), A100, efficiency
    ).blocks
    assert first.forward_seconds == Affine(
        fixed=pytest.approx(1e-5), per_row=pytest.approx(6e-3), floor=1e-4
    )
    assert first.backward_seconds == Affine(
        fixed=pytest.approx(2e-5), per_row=pytest.approx(12e-3), floor=2e-4
    )
    assert first.weight_seconds == first.forward_seconds
    assert last.forward_seconds.per_row == pytest.approx(8e-3), (
        "the vocabulary's products reach half of the others"
    )


def test_narrow_products_reach_less_of_the_peak() -> None:
    """A square product reaches matmul / (1 + 2 · tile / width)."""
    efficiency = Efficiency(matmul=0.5, tile=512.0, kernel_seconds=0.0, launch_seconds=0.0)
    tokens = 8192
    for width, share in ((1024, 0.25), (3072, 0.375), (7168, 0.4375)):
        product = Work(
            flops=Affine(per_row=2.0 * tokens * width * width),
            operands=Affine(per_row=2.0 * tokens * width),
        )
        cost = price(
            model(replace(block("a", 0.0, 0.0), forward=product), block("b", 0.0, 0.0)),
            A100,
            efficiency,
        ).blocks[0]
        reached = product.flops.at(2) / cost.forward_seconds.at(2) / 312e12
        assert reached == pytest.approx(share), width


def test_attention_has_a_share_of_its_own() -> None:
    work = Work(flops=Affine(per_row=3e12), attention_flops=Affine(per_row=1e12))
    cost = price(
        model(replace(block("a", 0.0, 0.0), forward=work), block("b", 0.0, 0.0)),
        A100,
        Efficiency(matmul=0.8, attention=0.4, kernel_seconds=0.0, launch_seconds=0.0),
    ).blocks[0]
    assert cost.forward_seconds.at(1) == pytest.approx((2 / 0.8 + 1 / 0.4) / 312)


@pytest.mark.parametrize("name", DEVICE_KINDS)
def test_default_figures_name_their_software_and_their_error(name: str) -> None:
    message = describe_figures(name)
    assert f"figures of {name}, " in message
    assert "torch.compile" in message
    assert "%" in message or "third" in message


def test_a_decoder_on_h100s_is_priced_at_the_published_rate() -> None:
    """torchtitan: Llama 3.1 8B, sequence 8,192, two rows for each of eight H100s, eager 5,762 tokens per second and
    device. Selective checkpointing computes every other matrix product again, about half of each layer's forward."""
    llama = TransformerConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocabulary=128256,
        sequence=8192,
        gated=True,
        positions="rotary",
        bias=False,
        tied=False,
    )
    blocks = price(llama.work("bf16"), device_kind("h100")).blocks
    passes = sum(b.forward_seconds.at(2) + b.backward_seconds.at(2) for b in blocks)
    again = sum(b.forward_seconds.at(2) for b in blocks[1:-1]) / 2
    rate = 2 * llama.sequence / (passes + again)
    assert rate == pytest.approx(5762, rel=0.1)
    assert rate == pytest.approx(6667, rel=0.2)


def test_small_kernels_take_their_launch() -> None:
    efficiency = Efficiency(kernel_seconds=2e-6, launch_seconds=5e-6)
    cost = price(model(block("a", 1.0, 1.0)), A100, efficiency).blocks[0]
    assert cost.forward_seconds.at(1) == pytest.approx(50e-6)
    assert cost.forward_seconds.at(0) == 0.0


def test_bytes_whatever_the_rows_are_fixed_seconds() -> None:
    cost = price(
        model(block("a", 0.0, 0.0, 0.0, fixed=2039e6)), A100, Efficiency(bandwidth=0.5)
    ).blocks[0]
    assert cost.forward_seconds == Affine(fixed=pytest.approx(2e-3))


def test_update_moves_states_gradients_and_parameters() -> None:
    full = price(model(block("a", 1.0, 1.0)), A100, Efficiency(update=0.5))
    assert full.optimizer_seconds == pytest.approx(7 / (0.5 * 2039e9)), (
        "fp32 AdamW: 28 bytes for 4 of a parameter"
    )
    mixed = price(model(block("a", 1.0, 1.0), master=2.0), A100, Efficiency(update=0.5))
    assert mixed.optimizer_seconds == pytest.approx(10 / (0.5 * 2039e9))


def test_bytes_and_names_are_passed_on() -> None:
    work = model(block("a", 1.0, 1.0))
    profile = price(work, A100)
    assert (profile.device, profile.source, profile.model) == ("a100-80", "analytic", "m")
    assert (profile.blocks[0].moved, profile.blocks[0].output) == (
        work.blocks[0].moved,
        work.blocks[0].output,
    )


def test_peak_is_the_one_of_the_dtype() -> None:
    quick, slow = (
        price(model(block("a", 1e12, 1.0), dtype=d), A100).blocks[0].forward_seconds
        for d in ("fp16", "fp32")
    )
    assert slow.per_row / quick.per_row == pytest.approx(312 / 19.5)


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=5).map(sorted), st.sampled_from(SIZES))
def test_more_rows_never_take_less(rows: list[int], work: ModelWork) -> None:
    for cost in price(work, A100).blocks:
        for times in (cost.forward_seconds, cost.backward_seconds, cost.weight_seconds):
            assert all(times.at(few) <= times.at(many) for few, many in pairwise(rows))


@given(st.floats(1.0, 100.0), st.sampled_from(("flops", "bytes", "kernels")), st.integers(1, 64))
def test_more_work_never_takes_less(factor: float, what: str, rows: int) -> None:
    less = {"flops": 1e9, "bytes_": 1e7, "kernels": 20.0}
    more = {
        name: value * (factor if name.rstrip("_") == what else 1.0) for name, value in less.items()
    }
    before, after = (price(model(block("a", **sizes)), A100).blocks[0] for sizes in (less, more))
    assert before.forward_seconds.at(rows) <= after.forward_seconds.at(rows)
    assert before.backward_seconds.at(rows) <= after.backward_seconds.at(rows)


@pytest.mark.parametrize("name", DEVICE_KINDS)
def test_every_kind_has_defaults(name: str) -> None:
    assert default_efficiency(DEVICE_KINDS[name]) is DEFAULTS[name]


def test_json_round_trip() -> None:
    efficiency = Efficiency(matmul=0.123, step_seconds=0.0)
    assert Efficiency.from_json(efficiency.to_json()) == efficiency
    assert Efficiency.from_json('{"matmul": 0.5}') == Efficiency(matmul=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not an efficiency file"),
        ("[1, 2]", "an object of numbers"),
        ('{"matmull": 0.5}', "did you mean 'matmul'"),
        ('{"matmul": 1.5}', "up to 1"),
        ('{"matmul": 0}', "above 0"),
        ('{"matmul": "half"}', "a number is wanted"),
        ('{"matmul": true}', "a number is wanted"),
        ('{"step_seconds": -1}', "finite seconds from 0"),
        ('{"step_seconds": Infinity}', "finite seconds from 0"),
        ('{"step_seconds": NaN}', "finite seconds from 0"),
        ('{"tile": -1}', "finite numbers from 0"),
    ],
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Efficiency.from_json(text)


def observe(efficiency: Efficiency, works: list[ModelWork]) -> list[Observation]:
    return [
        Observation(partial(step_seconds, work), step_seconds(work, efficiency)) for work in works
    ]


# Shrinking would take minutes.
@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(  # an optimum that a descent from small kernels does not find
    Efficiency(
        matmul=0.69, logits=0.81, bandwidth=1 / 3, kernel_seconds=1.94e-5, launch_seconds=5.28e-5
    )
)
@given(
    st.builds(
        Efficiency,
        matmul=st.floats(0.55, 0.85),
        logits=st.floats(0.3, 1.0),
        bandwidth=st.floats(0.3, 0.9),
        kernel_seconds=st.floats(2e-6, 2e-5),
        launch_seconds=st.floats(3e-5, 1e-4),
    )
)
def test_calibration_finds_what_was_there(truth: Efficiency) -> None:
    fitted = calibrate(Efficiency(), observe(truth, SIZES))
    for work in SIZES:
        assert step_seconds(work, fitted) == pytest.approx(step_seconds(work, truth), rel=0.05)
    for name in ("matmul", "logits", "bandwidth", "launch_seconds"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.1), name


def test_what_is_not_observed_stays() -> None:
    truth = replace(Efficiency(), matmul=0.5, update=0.2)
    compute = [
        Observation(
            partial(lambda work, e: price(work, A100, e).blocks[0].forward_seconds.at(4), work),
            seconds,
        )
        for work in SIZES
        for seconds in [price(work, A100, truth).blocks[0].forward_seconds.at(4)]
    ]
    fitted = calibrate(Efficiency(), compute)
    assert fitted.matmul == pytest.approx(0.5, rel=0.03)
    unseen = (
        "tile",
        "attention",
        "logits",
        "update",
        "network",
        "exchange_seconds",
        "step_seconds",
    )
    assert all(
        getattr(fitted, name) == pytest.approx(getattr(Efficiency(), name)) for name in unseen
    )


def test_one_measurement_moves_little() -> None:
    work = SIZES[-1]
    alone = calibrate(
        Efficiency(),
        [Observation(partial(step_seconds, work), 1.2 * step_seconds(work, Efficiency()))],
    )
    assert step_seconds(work, alone) == pytest.approx(
        1.2 * step_seconds(work, Efficiency()), rel=0.02
    )
    assert all(0.4 < getattr(alone, name) / getattr(Efficiency(), name) < 2.5 for name in FIELDS)


def test_an_accident_does_not_spoil_the_rest() -> None:
    truth = Efficiency(matmul=0.6, bandwidth=0.5)
    sound = observe(truth, SIZES)
    spoiled = [replace(sound[0], seconds=3 * sound[0].seconds), *sound[1:]]
    fitted = calibrate(Efficiency(), spoiled)
    errors = [abs(step_seconds(work, fitted) / step_seconds(work, truth) - 1) for work in SIZES]
    assert sum(errors) / len(errors) < 0.03


def test_shares_stay_below_what_is_reached_anywhere() -> None:
    quick = [replace(o, seconds=o.seconds / 3) for o in observe(Efficiency(), SIZES)]
    fitted = calibrate(Efficiency(), quick)
    assert fitted.matmul <= 0.9
    assert fitted.bandwidth <= 0.95
    assert fitted.network <= 1.0


def test_nothing_to_learn_from_changes_nothing() -> None:
    assert calibrate(Efficiency(), []) == Efficiency()
    assert calibrate(Efficiency(), observe(Efficiency(matmul=0.2), SIZES), ()) == Efficiency()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_measurements_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="must be above zero and finite"):
        calibrate(Efficiency(), [Observation(lambda e: e.matmul, seconds)])


def test_impossible_requests_are_refused() -> None:
    observed = [Observation(lambda e: e.matmul, 1.0)]
    with pytest.raises(ConfigError, match="did you mean 'matmul'"):
        calibrate(Efficiency(), observed, ["matmull"])
    with pytest.raises(ConfigError, match="launch_seconds=0"):
        calibrate(Efficiency(launch_seconds=0.0), observed, ["launch_seconds"])
    with pytest.raises(ConfigError, match="a prediction of"):
        calibrate(Efficiency(), [Observation(lambda e: 0.0, 1.0)])
