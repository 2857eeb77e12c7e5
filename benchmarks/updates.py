"""What delayed updates, local steps and asynchronous replicas cost in loss, and what they save.

::

    python -m benchmarks.updates loss      the validation loss after 400 steps of a GPT over bytes, by rule and seed
    python -m benchmarks.updates bubble    steps of two stages and four micro-batches, with and without a bubble
    python -m benchmarks.updates link      steps over a link of 100 Mbit/s between two hosts; needs root
    python -m benchmarks.updates slow      steps of four replicas, of which one takes twice as long

``loss`` trains the same model on the same rows with two replicas, once for each rule and seed. ``bubble`` runs the
schedules in turn; without a bubble, a step takes as long as the passes and the update of the slowest stage. ``link``
runs two replicas on two network namespaces, each with a core, in turn over a slow and a fast link, and samples the
bytes that one of them sends.
The blocks of ``slow`` wait instead of computing, as a host waits for its device, so that four replicas do not compete
for cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.hosts import ROOT, Host, HostError, TwoHosts
from parallax import TensorRows

LION, SGD = (
    ("optimizer=lion", "optimizer.lr=3e-4"),
    ("optimizer=sgd", "optimizer.lr=0.03", "optimizer.clip_norm=1"),
)
DELAYED = ("trainer.updates=delayed",)
CORRECTED = (*DELAYED, "optimizer.delay_correction=true")
DILOCO = ("replicas=diloco", "replicas.sync_every=50")
RULES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "local SGD, 10 steps": ("replicas=local", "replicas.sync_every=10"),
    "local SGD, 50 steps": ("replicas=local", "replicas.sync_every=50"),
    "DiLoCo, 10 steps": ("replicas=diloco", "replicas.sync_every=10"),
    "DiLoCo, 50 steps": DILOCO,
    "DiLoCo, 50 steps, 5 fragments": (*DILOCO, "replicas.fragments=5"),
    "DiLoCo, 50 steps, 5 fragments, delay 5": (
        *DILOCO,
        "replicas.fragments=5",
        "replicas.fragment_delay=5",
    ),
    "asynchronous, s=1": ("replicas=asynchronous", "replicas.staleness=1"),
    "asynchronous, s=4": ("replicas=asynchronous", "replicas.staleness=4"),
    "delayed": DELAYED,
    "delayed, corrected": CORRECTED,
    "Lion, synchronous": LION,
    "Lion, delayed": (*LION, *DELAYED),
    "Lion, delayed, corrected": (*LION, *CORRECTED),
    "SGD, synchronous": SGD,
    "SGD, delayed": (*SGD, *DELAYED),
    "SGD, delayed, corrected": (*SGD, *CORRECTED),
}
GPT = (
    "model=gpt",
    "model.layers=2",
    "model.hidden=96",
    "model.heads=4",
    "model.sequence=64",
    "data=text",
    "data.max_bytes=4MiB",
    "trainer.global_batch=16",
    "trainer.eval_every=0",
    "trainer.eval_batches=40",
    "trainer.checkpoint_every=0",
    "cluster.devices=2",
    "plan.stages=1",
    "plan.replicas=2",
)
# Of 10 million parameters, whose gradients take 3.4 s over the slow link.
LARGE = (
    "model=gpt",
    "data=text",
    "data.max_bytes=4MiB",
    "trainer.global_batch=16",
    "trainer.eval_batches=1",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=0",
    "cluster.device_memory=auto",
    "swap=off",
    "plan.stages=1",
    "plan.replicas=2",
)
# Of 16 equal layers.
EVEN = (
    "model=mlp",
    "model.layers=16",
    "data=text",
    "data.max_bytes=4MiB",
    "trainer.updates=delayed",
    "trainer.global_batch=8192",
    "trainer.microbatch=2048",
    "trainer.eval_batches=1",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=0",
    "plan.stages=2",
    "plan.replicas=1",
    "plan.activations=keep",
)
SLOW, FAST = "100mbit", "10gbit"
LINKED = {
    name: RULES[name]
    for name in (
        "synchronous",
        "DiLoCo, 50 steps",
        "DiLoCo, 50 steps, 5 fragments",
        "DiLoCo, 50 steps, 5 fragments, delay 5",
    )
}
WINDOW_SECONDS, SAMPLE_SECONDS = 5.0, 0.1
BESIDE = {name: RULES[name] for name in ("synchronous", "asynchronous, s=1", "asynchronous, s=4")}
BLOCKS, BLOCK_SECONDS = 12, 0.01
WAITING = (
    "model=custom",
    "model.target=benchmarks.updates:waiting",
    "data=custom",
    "data.target=benchmarks.updates:Ones",
    "trainer.global_batch=8",
    "trainer.microbatch=8",
    "trainer.eval_every=0",
    "trainer.eval_batches=1",
    "trainer.checkpoint_every=0",
    "cluster.devices=4",
    "plan.stages=1",
    "plan.replicas=4",
    "swap=off",
)
ENDS_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["loss", "bubble", "link", "slow"])
    parser.add_argument(
        "--steps", type=int, default=0, help="400 of loss, 16 of bubble, 52 of link, 60 of slow"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="of bubble")
    parser.add_argument("--only", default="", help="rules whose names begin so; not of bubble")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if parsed.part == "loss":
            rules = {name: words for name, words in RULES.items() if name.startswith(parsed.only)}
            found = losses(Path(folder), rules, parsed.steps or 400, parsed.seeds)
            print(json.dumps(found, indent=1))
            return 0
        if parsed.part == "bubble":
            print(json.dumps(bubbles(Path(folder), parsed.steps or 16, parsed.repeats), indent=1))
            return 0
        if parsed.part == "slow":
            rules = {name: words for name, words in BESIDE.items() if name.startswith(parsed.only)}
            found = beside_a_slow_rank(Path(folder), rules, parsed.steps or 60)
            print(json.dumps(found, indent=1))
            return 0
        try:
            ways = {name: words for name, words in LINKED.items() if name.startswith(parsed.only)}
            found = over_links(Path(folder), parsed.steps or 52, ways)
        except HostError as error:
            print(f"no hosts: {error}", file=sys.stderr)
            return 2
    print(json.dumps(found, indent=1))
    return 0


def losses(
    folder: Path, rules: dict[str, tuple[str, ...]], steps: int, seeds: int
) -> dict[str, dict[str, float]]:
    """Return the mean, lowest and highest validation loss of each rule."""
    found: dict[str, list[float]] = {rule: [] for rule in rules}
    for seed in range(seeds):
        for rule, settings in rules.items():
            name = f"{len(found[rule])}-{list(rules).index(rule)}"
            words = (*GPT, *settings, f"seed={seed}", f"trainer.steps={steps}")
            summary = trained(folder, name, words)
            found[rule].append(summary["validation_loss"])
            print(f"seed {seed}, {rule}: {found[rule][-1]:.4f}", file=sys.stderr, flush=True)
    return {
        rule: {
            "mean": round(statistics.mean(values), 4),
            "lowest": round(min(values), 4),
            "highest": round(max(values), 4),
        }
        for rule, values in found.items()
    }


def trained(folder: Path, name: str, words: Sequence[str], ranks: int = 1) -> dict[str, Any]:
    """Train, and return the run's summary."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [*(torchrun if ranks > 1 else [sys.executable]), "-m", "parallax", "train"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *words, f"name={name}"],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    summary: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return summary


def bubbles(folder: Path, steps: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return, for each schedule and repetition, seconds per step, predicted and measured, and the fraction of them in
    which the slowest stage neither computes nor updates."""
    found: dict[str, list[dict[str, float]]] = {"1f1b": [], "2bw": []}
    for repeat in range(repeats):
        for schedule, results in found.items():
            words = (*EVEN, f"plan.schedule={schedule}", f"trainer.steps={steps}")
            summary = trained(folder, f"{schedule}-{repeat}", words, 2)
            results.append(
                {
                    name: round(number, 4)
                    for name, number in (
                        ("predicted_seconds", summary["predicted_step_seconds"]),
                        ("measured_seconds", summary["step_seconds_median"]),
                        ("predicted_bubble", _idle(summary, "predicted_")),
                        ("measured_bubble", _idle(summary, "")),
                    )
                }
            )
            print(f"{schedule}: {results[-1]}", file=sys.stderr, flush=True)
    return found


def _idle(summary: dict[str, Any], prefix: str) -> float:
    """Return the fraction of a step in which the slowest rank neither computes nor updates."""
    step = summary["predicted_step_seconds" if prefix else "step_seconds_median"]
    busy = [
        sum(rank[f"{prefix}seconds"][term] for term in ("forward", "backward"))
        for rank in summary["ranks"]
    ]
    # The update of one rank includes its wait for the others.
    update = min(rank[f"{prefix}seconds"]["update"] for rank in summary["ranks"])
    return 1 - (max(busy) + update) / float(step)


class WaitingBlock(nn.Linear):
    """A block that takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(16, 16)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return super().forward(x)


def waiting(slow: int) -> nn.Module:
    """Blocks that take twice as long on rank ``slow``."""
    factor = 2 if os.environ.get("RANK") == str(slow) else 1
    return nn.Sequential(*(WaitingBlock(factor * BLOCK_SECONDS) for _ in range(BLOCKS)))


class Ones:
    """Rows of ones."""

    def batch(self, rows: int) -> TensorRows:
        return TensorRows(torch.ones(rows, 16), torch.zeros(rows, dtype=torch.int64))

    def validation(self, index: int, rows: int) -> TensorRows:
        del index
        return self.batch(rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def beside_a_slow_rank(
    folder: Path, rules: dict[str, tuple[str, ...]], steps: int
) -> dict[str, dict[str, Any]]:
    """Return seconds per step without a slow rank and with one, the part of the speed that it costs, and the gradients
    by staleness. Rank 0 owns the state of asynchronous replicas."""
    found: dict[str, dict[str, Any]] = {}
    for number, (rule, settings) in enumerate(rules.items()):
        alike = 0.0
        for slow in (-1, 3, 0):
            name = f"{number}-{slow + 1}"
            words = (*WAITING, f"+model.kwargs={{slow:{slow}}}", f"trainer.steps={steps}")
            summary = trained(folder, name, (*words, *settings))
            seconds = summary["step_seconds_median"]
            alike = alike or seconds
            key = f"{rule}, {f'rank {slow} slow' if slow >= 0 else 'all equal'}"
            found[key] = {
                "step_seconds": round(seconds, 4),
                "lost": round(1 - alike / seconds, 3),
                "staleness": summary["staleness"],
            }
            print(f"{key}: {found[key]}", file=sys.stderr, flush=True)
    return found


def over_links(
    folder: Path, steps: int, ways: dict[str, tuple[str, ...]]
) -> dict[str, dict[str, float]]:
    """Return seconds per step, predicted and measured, of each way over both links, and the bytes that a host sends."""
    found: dict[str, dict[str, float]] = {}
    for number, (way, settings) in enumerate(ways.items()):
        count = steps if settings else 8
        for rate in (FAST, SLOW):
            with TwoHosts(folder / f"{rate}-{number}", rate) as hosts:
                words = ("name=run", f"trainer.steps={count}", *LARGE, *settings)
                processes = hosts.start(1, words)
                most = _most_sent(processes[0], hosts.a, count)
                codes = [process.wait(ENDS_SECONDS) for process in processes]
                if codes != [0, 0]:
                    output = "\n".join((h.folder / "out.txt").read_text() for h in hosts.hosts)
                    raise RuntimeError(f"{' '.join(words)} ended with {codes}:\n{output}")
                run = hosts.a.folder / "runs" / "run"
                summary = json.loads((run / "summary.json").read_text())
                kept = kept_speed((run / "metrics.jsonl").read_text(), settings)
            found[f"{way}, {rate}"] = {
                "measured_seconds": round(summary["step_seconds_median"], 4),
                "kept_speed": round(kept, 4),
                "predicted_seconds": round(summary["predicted_step_seconds"], 4),
                "exchanged_bytes_per_step": summary["synced_bytes"] / count,
                "most_sent_bytes": most,
            }
            print(f"{way}, {rate}: {found[f'{way}, {rate}']}", file=sys.stderr, flush=True)
    return found


def kept_speed(lines: str, settings: Sequence[str]) -> float:
    """Return the speed of a run of local steps relative to steps without an exchange, from the ``lines`` of its
    metrics; 1 without local steps. An exchange costs the seconds by which the step in which it ends is longer than the
    median."""
    named = dict(each.removeprefix("replicas.").split("=") for each in settings)
    every, count, delay = (
        int(named.get(key, usual))
        for key, usual in (("sync_every", 0), ("fragments", 1), ("fragment_delay", 0))
    )
    rows = [json.loads(line) for line in lines.splitlines()]
    seconds = {row["step"]: row["step_seconds"] for row in rows if "step_seconds" in row}
    begun = {(k + 1) * every // count % every for k in range(count)} if every else set()
    ends = [step for step in seconds if step > delay and every and (step - delay) % every in begun]
    if not ends:
        return 1.0
    usual = statistics.median(each for step, each in seconds.items() if step not in ends)
    cost = statistics.mean(seconds[step] - usual for step in ends) * count / every
    return usual / (usual + cost)


def _most_sent(process: subprocess.Popen[bytes], host: Host, steps: int) -> int:
    """Wait until ``process`` has ended. Return the most bytes that ``host`` has sent within ``WINDOW_SECONDS``, between
    the first of ``steps`` steps and the last one, after which local steps exchange all weights."""
    counter = re.compile(rf"{host.interface}:" + r"\s*(?:\d+\s+){8}(\d+)")
    counters, metrics = Path(f"/proc/{process.pid}/net/dev"), host.folder / "runs/run/metrics.jsonl"
    counts = list[int]()
    while process.poll() is None:
        with contextlib.suppress(OSError):
            found = counter.search(counters.read_text())
            if found and 0 < metrics.read_bytes().count(b"\n") < steps - 1:
                counts.append(int(found[1]))
        time.sleep(SAMPLE_SECONDS)
    window = round(WINDOW_SECONDS / SAMPLE_SECONDS)
    return max((b - a for a, b in zip(counts, counts[window:])), default=0)


if __name__ == "__main__":
    sys.exit(main())
