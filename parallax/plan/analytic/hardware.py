"""Data-sheet figures of devices and links, for planning with machines that are not available.

Peak operations per second are for dense matrices. Where the vendor has one peak for accumulation in fp32 and another
for accumulation in fp16, the former is used. The share of a peak that training reaches is in
:mod:`parallax.plan.analytic.efficiency`. Device memory is the total that CUDA reports. It is a little below the size in
the data sheet, because firmware and error correction use the rest. Links have the data sheet's bytes per second in one
direction and the share that large transfers reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parallax.errors import ConfigError, check_choice
from parallax.plan.cluster import Link

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16")

_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    ``memory_bytes``      bytes that programs can allocate, the driver's context included
    ``flops``             peak floating-point operations per second of dense matrix products, by :data:`DTYPES`
    ``bytes_per_second``  peak bandwidth of the device memory
    ``context_bytes``     bytes of driver context and libraries (cuBLAS, NCCL) before the first tensor
    ``host_link``         name in :data:`LINK_KINDS` of the link to the host
    ``device_link``       name in :data:`LINK_KINDS` of the link to neighbours in the node
    ``source``            the source of the figures
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    bytes_per_second: float
    context_bytes: int
    host_link: str
    device_link: str
    source: str

    def __post_init__(self) -> None:
        if set(self.flops) != set(DTYPES):
            raise ConfigError(
                f"device kind {self.name}: flops must name {', '.join(DTYPES)}, not {sorted(self.flops)}"
            )
        figures = [self.memory_bytes, self.bytes_per_second, *self.flops.values()]
        sound = all(0 < figure < math.inf for figure in figures)
        if not sound or not 0 <= self.context_bytes < self.memory_bytes:
            raise ConfigError(
                f"device kind {self.name}: memory, bandwidth and peaks must be above zero and finite, and the "
                f"context of {self.context_bytes} bytes must fit the memory of {self.memory_bytes}"
            )

    def peak(self, dtype: str) -> float:
        """Return the peak floating-point operations per second of matrix products in ``dtype``."""
        check_choice("dtype", dtype, DTYPES)
        return self.flops[dtype]


@dataclass(frozen=True, kw_only=True)
class LinkKind:
    """One kind of link, with figures for one direction.

    ``raw_bytes_per_second`` is from the data sheet. ``reached`` is the share of it that large transfers reach. The
    latency is the seconds of the smallest transfer.
    """

    name: str
    raw_bytes_per_second: float
    reached: float
    latency_seconds: float
    source: str

    def __post_init__(self) -> None:
        usable = 0 < self.raw_bytes_per_second < math.inf and 0 < self.reached <= 1
        if not usable or not 0 <= self.latency_seconds < math.inf:
            raise ConfigError(
                f"link kind {self.name}: {self.raw_bytes_per_second} bytes/s must be above zero and finite, "
                f"reached={self.reached} above 0 and at most 1, latency_seconds={self.latency_seconds} not below zero"
            )

    @property
    def bytes_per_second(self) -> float:
        """Return the bytes per second of large transfers in one direction."""
        return self.raw_bytes_per_second * self.reached

    def link(self) -> Link:
        return Link(bytes_per_second=self.bytes_per_second, latency_seconds=self.latency_seconds)


CHANNELS, EDGE_CHANNELS = 16, 4
"""The limits that Parallax sets on NCCL's channels: of a group for all-reduces (NCCL_MAX_NCHANNELS), and of a
connection in one direction (NCCL_MAX_P2P_NCHANNELS). Without limits NCCL uses up to 64 channels, each with its own
buffers."""
_SIMPLE, _LL, _LL128 = 4 * _MIB, 8 * 512 * 8 * 16, 120 * 640 * 8 * 8
"""Bytes of a connection's buffers by protocol: NCCL_BUFFSIZE, 4 MiB as documented; the others are lines × threads ×
steps × bytes of NCCL's source (src/init.cc)."""
_TREE_AND_RING = (
    4  # receiving connections of a channel on a rank: of a ring one, of a double tree three
)


def collective_bytes(channels: int = CHANNELS) -> int:
    """Return the device bytes of the buffers of one NCCL communicator for all-reduces, for all protocols of NCCL.

    NCCL divides a transfer among up to ``channels`` channels, each of which has buffers of its own.
    """
    return channels * _TREE_AND_RING * (_SIMPLE + _LL + _LL128)


def edge_bytes(channels: int = EDGE_CHANNELS) -> int:
    """Return the device bytes of a point-to-point NCCL connection in one direction between two ranks.

    NCCL divides a transfer among up to ``channels`` channels, each of which has buffers of its own. NCCL's protocol
    LL128 has no buffers in such a connection.
    """
    return channels * (_SIMPLE + _LL)


def usual_context(name: str) -> int:
    """Return the bytes of a CUDA context on the device called ``name``.

    For an unknown device, return the largest of all known kinds.
    """
    plain, known = name.lower().replace(" ", ""), _with_context()
    alike = [kind for kind in known if kind.name.split("-")[0] in plain]
    return max(kind.context_bytes for kind in alike or known)


def usual_contexts() -> tuple[int, int]:
    """Return the smallest and the largest bytes of a context among the known kinds of devices."""
    found = [kind.context_bytes for kind in _with_context()]
    return min(found), max(found)


def _with_context() -> list[DeviceKind]:
    return [kind for kind in DEVICE_KINDS.values() if kind.host_link != "disk"]


def device_kind(name: str) -> DeviceKind:
    """Return the kind of device called ``name``.

    Raises :class:`ConfigError` for an unknown name. The message suggests the most similar known name.
    """
    check_choice("device kind", name, DEVICE_KINDS)
    return DEVICE_KINDS[name]


def link_kind(name: str) -> LinkKind:
    """Return the kind of link called ``name``.

    Raises :class:`ConfigError` for an unknown name. The message suggests the most similar known name.
    """
    check_choice("link kind", name, LINK_KINDS)
    return LINK_KINDS[name]


def _tera(fp64: float, fp32: float, tf32: float, fp16: float, bf16: float) -> Mapping[str, float]:
    """Return peak rates, given in units of 10¹² operations per second, by dtype."""
    return MappingProxyType(
        {name: peak * 1e12 for name, peak in zip(DTYPES, (fp64, fp32, tf32, fp16, bf16))}
    )


_DEVICES = (
    DeviceKind(
        name="v100",
        memory_bytes=int(31.7 * _GIB),
        flops=_tera(
            fp64=7.8, fp32=15.7, tf32=15.7, fp16=125.0, bf16=15.7
        ),  # no tf32 or bf16 units: fp32 does them
        bytes_per_second=900e9,
        context_bytes=450 * _MIB,
        host_link="pcie3",
        device_link="nvlink2",
        source="NVIDIA V100 Tensor Core GPU data sheet (2020), SXM2 32 GB",
    ),
    DeviceKind(
        name="a100-40",
        memory_bytes=int(39.4 * _GIB),
        flops=_tera(fp64=19.5, fp32=19.5, tf32=156.0, fp16=312.0, bf16=312.0),
        bytes_per_second=1555e9,
        context_bytes=500 * _MIB,
        host_link="pcie4",
        device_link="nvlink3",
        source="NVIDIA A100 Tensor Core GPU data sheet (2021), SXM4 40 GB",
    ),
    DeviceKind(
        name="a100-80",
        memory_bytes=int(79.1 * _GIB),
        flops=_tera(fp64=19.5, fp32=19.5, tf32=156.0, fp16=312.0, bf16=312.0),
        bytes_per_second=2039e9,
        context_bytes=500 * _MIB,
        host_link="pcie4",
        device_link="nvlink3",
        source="NVIDIA A100 Tensor Core GPU data sheet (2021), SXM4 80 GB",
    ),
    DeviceKind(
        name="h100",
        memory_bytes=int(79.1 * _GIB),
        flops=_tera(fp64=67.0, fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5),
        bytes_per_second=3350e9,
        context_bytes=600 * _MIB,
        host_link="pcie5",
        device_link="nvlink4",
        source="NVIDIA H100 Tensor Core GPU data sheet (2023), SXM5 80 GB; the sheet's tensor peaks are with sparsity",
    ),
    DeviceKind(
        name="h200",
        memory_bytes=int(139.7 * _GIB),
        flops=_tera(fp64=67.0, fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5),
        bytes_per_second=4800e9,
        context_bytes=600 * _MIB,
        host_link="pcie5",
        device_link="nvlink4",
        source="NVIDIA H200 Tensor Core GPU data sheet (2024), SXM 141 GB; the sheet's tensor peaks are with sparsity",
    ),
    DeviceKind(
        name="l4",
        memory_bytes=int(22.0 * _GIB),
        flops=_tera(fp64=0.47, fp32=30.3, tf32=60.0, fp16=121.0, bf16=121.0),
        bytes_per_second=300e9,
        context_bytes=300 * _MIB,
        host_link="pcie4",
        device_link="pcie4",
        source="NVIDIA L4 Tensor Core GPU data sheet (2023), 24 GB; tensor peaks with sparsity; fp64 is fp32 / 64",
    ),
    DeviceKind(
        name="rtx4090",
        memory_bytes=int(23.6 * _GIB),
        flops=_tera(fp64=1.29, fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2),
        bytes_per_second=1008e9,
        context_bytes=400 * _MIB,
        host_link="pcie4",
        device_link="pcie4",
        source="NVIDIA Ada GPU Architecture white paper v2.1 (2023), GeForce RTX 4090, fp32 accumulation",
    ),
    DeviceKind(
        name="b200",
        memory_bytes=int(178.3 * _GIB),
        flops=_tera(fp64=37.0, fp32=75.0, tf32=1125.0, fp16=2250.0, bf16=2250.0),
        bytes_per_second=7700e9,
        context_bytes=800 * _MIB,
        host_link="pcie5",
        device_link="nvlink5",
        source="NVIDIA HGX platform and DGX B200 data sheets (2024), one of eight; tensor peaks with sparsity",
    ),
    DeviceKind(
        name="cpu-core",
        memory_bytes=4 * _GIB,
        flops=_tera(
            fp64=0.08, fp32=0.16, tf32=0.16, fp16=0.16, bf16=0.16
        ),  # 16-bit products are computed in fp32
        bytes_per_second=20e9,
        context_bytes=250 * _MIB,
        host_link="disk",
        device_link="shared-memory",
        source="Intel 64 optimization manual (2023): AVX-512, 2 × 16 fp32 multiply-adds a cycle at 2.5 GHz; 4 GiB and "
        "20 GB/s: a core's usual share of a cloud server; context: a Python process with torch",
    ),
)

DEVICE_KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in _DEVICES}
"""By name, oldest first."""


_PCIE = "PCI-SIG base specification {} ({}), ×16 after 128b/130b coding; reached and latency: pinned cudaMemcpy"
_NVLINK = (
    "NVIDIA {} data sheet ({}), half of the bidirectional figure; reached: nccl-tests send/receive"
)
_ETHERNET = "IEEE {}; reached: TCP with 9000-byte frames; latency: one switch and two kernels"
_INFINIBAND = "InfiniBand Trade Association roadmap, {} 4×; reached and latency: perftest ib_write"

_LINKS = (
    LinkKind(
        name="pcie3",
        raw_bytes_per_second=15.75e9,
        reached=0.80,
        latency_seconds=10e-6,
        source=_PCIE.format("3.0", 2010),
    ),
    LinkKind(
        name="pcie4",
        raw_bytes_per_second=31.5e9,
        reached=0.80,
        latency_seconds=10e-6,
        source=_PCIE.format("4.0", 2017),
    ),
    LinkKind(
        name="pcie5",
        raw_bytes_per_second=63.0e9,
        reached=0.83,
        latency_seconds=10e-6,
        source=_PCIE.format("5.0", 2019),
    ),
    LinkKind(
        name="nvlink2",
        raw_bytes_per_second=150e9,
        reached=0.80,
        latency_seconds=10e-6,
        source=_NVLINK.format("V100", 2020),
    ),
    LinkKind(
        name="nvlink3",
        raw_bytes_per_second=300e9,
        reached=0.80,
        latency_seconds=10e-6,
        source=_NVLINK.format("A100", 2021),
    ),
    LinkKind(
        name="nvlink4",
        raw_bytes_per_second=450e9,
        reached=0.80,
        latency_seconds=10e-6,
        source=_NVLINK.format("H100", 2023),
    ),
    LinkKind(
        name="nvlink5",
        raw_bytes_per_second=900e9,
        reached=0.75,
        latency_seconds=10e-6,
        source=_NVLINK.format("DGX B200", 2024),
    ),
    LinkKind(
        name="ethernet-10g",
        raw_bytes_per_second=1.25e9,
        reached=0.94,
        latency_seconds=50e-6,
        source=_ETHERNET.format("802.3ae (2002)"),
    ),
    LinkKind(
        name="ethernet-25g",
        raw_bytes_per_second=3.125e9,
        reached=0.92,
        latency_seconds=50e-6,
        source=_ETHERNET.format("802.3by (2016)"),
    ),
    LinkKind(
        name="ethernet-100g",
        raw_bytes_per_second=12.5e9,
        reached=0.85,
        latency_seconds=30e-6,
        source=_ETHERNET.format("802.3bj (2014)"),
    ),
    LinkKind(
        name="ethernet-200g",
        raw_bytes_per_second=25e9,
        reached=0.85,
        latency_seconds=30e-6,
        source=_ETHERNET.format("802.3bs (2017)"),
    ),
    LinkKind(
        name="infiniband-hdr",
        raw_bytes_per_second=25e9,
        reached=0.95,
        latency_seconds=5e-6,
        source=_INFINIBAND.format("HDR 200 Gbit/s (2018)"),
    ),
    LinkKind(
        name="infiniband-ndr",
        raw_bytes_per_second=50e9,
        reached=0.95,
        latency_seconds=5e-6,
        source=_INFINIBAND.format("NDR 400 Gbit/s (2022)"),
    ),
    LinkKind(
        name="shared-memory",
        raw_bytes_per_second=20e9,
        reached=0.15,
        latency_seconds=100e-6,
        source="typical of gloo through the loopback interface, some five passes over a core's memory",
    ),
    LinkKind(
        name="disk",
        raw_bytes_per_second=1.0e9,
        reached=1.0,
        latency_seconds=200e-6,
        source="typical of a cloud server's NVMe disk, unbuffered reads",
    ),
)

LINK_KINDS: dict[str, LinkKind] = {kind.name: kind for kind in _LINKS}
"""By name."""
