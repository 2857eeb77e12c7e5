"""Model FLOP utilization: the operations that a model needs, and the peak that they are compared with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from parallax.common.units import plural
from parallax.model.profiling.meter import FlopMeter
from parallax.model.profiling.peak import known_kind, peak_flops
from parallax.plan.analytic.hardware import DEVICE_KINDS
from parallax.plan.profile import Utilization
from parallax.report.run import _utilization
from parallax.train.monitor import StepLine, _utilized

CPU = torch.device("cpu")


def counted(run: object) -> float:
    assert callable(run)
    with FlopMeter() as meter:
        run()
    return meter.flops


def test_a_linear_layer_needs_three_products() -> None:
    layer, rows = nn.Linear(32, 64), torch.randn(8, 32, requires_grad=True)
    assert counted(lambda: layer(rows).sum().backward()) == 3 * 2 * 8 * 32 * 64
    layer.requires_grad_(False)
    assert counted(lambda: layer(rows).sum().backward()) == 2 * 2 * 8 * 32 * 64


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_of_any_groups_needs_three_products(
    kind: type[nn.Conv2d | nn.ConvTranspose2d], groups: int
) -> None:
    layer = kind(16, 8, 3, stride=2, groups=groups, bias=False)
    rows = torch.randn(2, 16, 9, 9, requires_grad=True)
    places = 9 * 9 if kind is nn.ConvTranspose2d else 4 * 4
    forward = 2 * 2 * places * 3 * 3 * 16 * 8 / groups
    assert counted(lambda: layer(rows)) == forward
    assert counted(lambda: layer(rows).sum().backward()) == 3 * forward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_scores_that_a_kernel_computes_again_do_not_count(causal: bool, heads: int) -> None:
    query = torch.randn(2, 4, 64, 16, requires_grad=True)
    key = torch.randn(2, heads, 64, 16, requires_grad=True)

    def attend() -> Tensor:
        out: Tensor = scaled_dot_product_attention(
            query, key, key, is_causal=causal, enable_gqa=heads < 4
        )
        return out

    forward = 2 * 2 * (2 * 4 * 64 * 64 * 16) / (2 if causal else 1)
    assert counted(attend) == forward
    assert counted(lambda: attend().sum().backward()) == 3 * forward


def test_recomputation_in_a_checkpoint_would_count_so_blocks_are_counted_without() -> None:
    block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    rows = torch.randn(4, 16, requires_grad=True)
    plain = counted(lambda: block(rows).sum().backward())
    assert plain == 2 * 3 * 2 * 4 * 16 * 16


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None),
        ("AMD EPYC 7R13", None),
    ],
)
def test_devices_whose_data_sheet_is_known(name: str, kind: str | None) -> None:
    found = known_kind(name)
    assert (found and found.name.split("-")[0]) == kind


def test_the_peak_of_a_known_device_is_that_of_its_data_sheet() -> None:
    flops, source = peak_flops(torch.device("cuda", 0), "NVIDIA H100 80GB HBM3", "bf16")
    assert (flops, source) == (DEVICE_KINDS["h100"].peak("bf16"), "the data sheet of h100 in bf16")


@pytest.mark.parametrize("compute", ["fp32", "tf32", "fp64", "bf16"])
def test_the_peak_of_a_cpu_is_measured(compute: str) -> None:
    flops, source = peak_flops(CPU, "some processor", compute)
    assert flops > 1e6
    assert source == (
        f"the fastest {compute} matrix product measured here on {plural(torch.get_num_threads(), 'thread')}"
    )


def test_the_peak_of_a_cpu_is_at_least_the_rate_of_the_fastest_block() -> None:
    """A run had 104% of a peak that was measured in a slow moment."""
    flops, source = peak_flops(CPU, "some processor", "fp32", 1e18)
    assert flops == 1e18
    assert source.startswith("the model's fastest block measured here on ")
    known = peak_flops(torch.device("cuda", 0), "NVIDIA H100 80GB HBM3", "bf16", 1e18)
    assert known[0] == DEVICE_KINDS["h100"].peak("bf16")


def test_the_share_of_the_peak() -> None:
    used = Utilization(flops_per_row=50.0, peak_flops=1000.0)
    assert used.share(rows_per_second=8.0, ranks=4) == 0.1
    assert Utilization(flops_per_row=50.0).share(8.0, 4) is None
    assert Utilization(peak_flops=50.0).share(8.0, 4) is None


def test_a_share_above_all_is_said_to_be_impossible() -> None:
    line = StepLine(step=1, loss=1.0, rate=1.0, peak_bytes=1, budget_bytes=1, utilization=1.04)
    assert _utilized(line) == ["MFU 104% (impossible: the peak is too low)"]
    summary = {"mfu": 1.04, "peak_flops": 1e12, "peak_source": "a measurement"}
    assert _utilization(summary) == [
        "MFU 104.0% of 1 TFLOP/s per rank: a measurement; more than all of it: the peak was measured on a busy machine"
    ]
    assert _utilization({**summary, "mfu": 0.31}) == [
        "MFU 31.0% of 1 TFLOP/s per rank: a measurement"
    ]
    assert _utilization({}) == []
