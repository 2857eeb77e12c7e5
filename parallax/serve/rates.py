"""Predict the latencies of a server at the rate ``serve.requests_per_second``.

The prediction determines the wait for ``serve.max_wait=auto``, and the number of copies of the pipeline that the rate
needs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from parallax.common.units import format_seconds
from parallax.machine.host import usable_cores
from parallax.plan.serving import (
    MOST_COPIES,
    BatchTimes,
    Load,
    Server,
    best_wait,
    copies_needed,
    simulate,
)
from parallax.serve.config import ServeConfig


def server_of(
    times: BatchTimes,
    config: ServeConfig,
    *,
    http: tuple[float, float],
    kind: str,
    threads: int,
    copies: int = 1,
) -> Server:
    """Return the description of a server, from which :mod:`parallax.plan.serving` predicts latencies.

    ``times``    the seconds of the model's batches
    ``http``     the HTTP thread's processor seconds for each request, and for each batch
    ``kind``     the type of the devices, such as cpu
    ``threads``  the number of threads with which all ranks together compute on a CPU
    ``copies``   the number of copies of the pipeline
    """
    if config.batch_invariant:
        times = times.padded()
    return Server(
        times=times,
        copies=copies,
        request_seconds=http[0],
        batch_seconds=http[1],
        shares_core=kind == "cpu" and threads + 1 > usable_cores(),
    )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The predicted latencies of ``server`` under the settings ``config``, which include a rate of requests.

    ``max_wait``: the wait for further requests in seconds, as configured or as chosen for auto. ``load``: the predicted
    latencies.
    """

    server: Server
    config: ServeConfig
    max_wait: float
    load: Load

    @classmethod
    def of(cls, server: Server, config: ServeConfig) -> Rates:
        wait = _wait(server, config)
        load = simulate(server, config.requests_per_second, wait)
        return cls(server=server, config=config, max_wait=wait, load=load)

    def lines(self) -> list[str]:
        """Return lines for the user: the wait for further requests, if ``max_wait`` is auto, and the predicted
        latencies."""
        found = [self._wait_line()] if self.config.waits_auto else []
        at, limit = f"at {self.load.rate:g} requests/s", self.config.p99_seconds
        if self.load.saturated:
            most = self.server.most_per_second
            line = f"{at}: saturated, since at most {most:.4g} requests/s are answered"
        else:
            p50, p99 = format_seconds(self.load.p50), format_seconds(self.load.p99)
            rows = f"{self.load.batch_rows:.3g} rows in a batch"
            line = f"{at}: predicted latency p50 {p50}, p99 {p99}, {rows}"
        if limit:
            verdict = "meets" if self.load.p99 <= limit else "misses"
            line += f"; it {verdict} serve.p99={self.config.p99}"
        return [*found, line]

    def _wait_line(self) -> str:
        line = f"serve.max_wait=auto is {format_seconds(self.max_wait)}"
        if not self.max_wait:
            return (
                f"{line}: a longer wait would not shorten the p99 at {self.load.rate:g} requests/s"
            )
        without = simulate(self.server, self.load.rate, 0.0).p99
        return f"{line}: without it the p99 at {self.load.rate:g} requests/s is {format_seconds(without)}"

    @property
    def copies(self) -> int | None:
        """The smallest number of pipeline copies that is enough for the configured rate; None if no number is enough.

        A number is enough if requests are answered as fast as they arrive and, if ``serve.p99`` is set, 99% of them are
        answered within this time.
        """
        return copies_needed(
            self.server,
            self.config.requests_per_second,
            self.config.p99_seconds,
            lambda server: _wait(server, self.config),
        )

    def copies_line(self, copies: int | None, devices: int, present: int) -> str:
        """Return a line that says how many pipeline copies the rate needs.

        ``copies``: the needed number; None: no number is enough. ``devices``: the number of devices of one copy.
        ``present``: the number of devices that are available.
        """
        wanted = f"{self.config.requests_per_second:g} requests/s"
        if self.config.p99_seconds:
            wanted += f" within serve.p99={self.config.p99}"
        if copies is None:
            return f"{wanted}: no number of copies of the pipeline is enough: {self._obstacle()}"
        needed = copies * devices
        what = f"{copies} {'copy' if copies == 1 else 'copies'} of the pipeline"
        line = f"{wanted}: {what} on {needed} device{'' if needed == 1 else 's'}"
        return f"{line}; only {present} at hand" if needed > present else line

    def _obstacle(self) -> str:
        """Return the reason why no number of copies is enough."""
        row = self.server.times.latency[0] + self.server.request_seconds + self.server.batch_seconds
        if (limit := self.config.p99_seconds) and row > limit:
            return f"a row alone takes {format_seconds(row)}"
        if (http := self.server.request_seconds) and self.config.requests_per_second * http >= 1:
            return f"one process reads and answers at most {1 / http:.4g} requests/s"
        return f"the p99 of up to {MOST_COPIES} is longer"

    def to_dict(self, copies: int | None) -> dict[str, Any]:
        """Return the prediction as plain data. ``copies``: the needed number of pipeline copies; None: no number is
        enough.
        """
        load = asdict(self.load)
        return {
            **{key: None if math.isinf(value) else value for key, value in load.items()},
            "copies": copies,
            "most_per_second": self.server.most_per_second,
            "request_seconds": self.server.request_seconds,
            "batch_seconds": self.server.batch_seconds,
        }


def _wait(server: Server, config: ServeConfig) -> float:
    if not config.waits_auto:
        return config.wait_seconds
    return best_wait(server, config.requests_per_second)


def unrated_lines(config: ServeConfig) -> list[str]:
    """Return a line for the user about ``serve.max_wait=auto`` without a configured rate; no line for a fixed wait."""
    if not config.waits_auto:
        return []
    return ["serve.max_wait=auto is 0 s, since no rate is stated: add serve.requests_per_second=N"]
