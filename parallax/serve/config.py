"""The keys of ``serve``: address, batches and limits of ``parallax serve``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from parallax.common.units import parse_bytes, parse_seconds
from parallax.errors import ConfigError, check_positive, printable
from parallax.plan.tier import AUTO

SERVER_LIBRARIES = "starlette", "uvicorn", "prometheus_client"
_LEAST_TOKEN = 16  # characters


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How ``parallax serve`` answers requests.

    ``host``: the address to listen on; 0.0.0.0 listens on all addresses of this machine.
    ``port``: the port; 0 chooses a free one.
    ``max_batch_rows``: the largest number of rows in a batch, and so in a request.
    ``max_wait``: how long a request waits for other requests to share its batch, in seconds, or as text such as 5ms.
        With 0, a request waits only while the model is busy. With auto, the wait is chosen that has the smallest
        predicted 99th percentile of latency at ``requests_per_second``.
    ``requests_per_second``: the expected rate of requests of one row, for which latencies are predicted; 0: no
        prediction.
    ``p99``: the time within which 99% of the requests at this rate should be answered, in seconds, or as text such as
        50ms; 0: no target.
    ``batch_invariant``: pad each batch to ``max_batch_rows`` rows, so that the bits of an answer do not depend on the
        other requests in its batch.
    ``queue_rows``: the largest number of rows in the queue; further requests get status 503.
    ``timeout``: seconds after which an unanswered request gets status 504, and within which a client must have sent its
        request.
    ``max_body_bytes``: the largest body of a request; a larger one gets status 413.
    ``replicas``: the number of copies of the model, each on an equal part of ``cluster.devices``; a copy that fails is
        restarted while the others answer.
    ``follow``: load each new checkpoint that the run saves.
    ``token_file``: a file with the token that clients must send as ``Authorization: Bearer TOKEN``; empty: no token is
        needed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch_rows: int = 32
    max_wait: float | str = 0.0
    requests_per_second: float = 0.0
    p99: float | str = 0.0
    batch_invariant: bool = False
    queue_rows: int = 1024
    timeout: float = 60.0
    max_body_bytes: int | str = "64MiB"
    replicas: int = 1
    follow: bool = False
    token_file: str = ""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("serve.host: it is empty; accepted is an address, such as 127.0.0.1")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"serve.port={self.port}: accepted are 0 to {2**16 - 1}")
        check_positive("serve.max_batch_rows", self.max_batch_rows)
        check_positive("serve.replicas", self.replicas)
        check_positive("serve.requests_per_second", self.requests_per_second, zero=True)
        parse_seconds(0.0 if self.max_wait == AUTO else self.max_wait, "serve.max_wait")
        check_positive("serve.timeout", self.timeout)
        for key in ("requests_per_second", "timeout"):
            if math.isinf(getattr(self, key)):
                raise ConfigError(f"serve.{key}=inf: accepted is a finite number")
        if parse_seconds(self.p99, "serve.p99") and not self.requests_per_second:
            raise ConfigError(
                f"serve.p99={self.p99}: latencies depend on the rate; add serve.requests_per_second=N"
            )
        if self.queue_rows < self.max_batch_rows:
            raise ConfigError(
                f"serve.queue_rows={self.queue_rows}: accepted are {self.max_batch_rows} (serve.max_batch_rows) or more"
            )
        parse_bytes(self.max_body_bytes, "serve.max_body_bytes")

    @property
    def waits_auto(self) -> bool:
        """Whether ``max_wait`` is auto."""
        return self.max_wait == AUTO

    @property
    def wait_seconds(self) -> float:
        """``max_wait`` in seconds; 0 if it is auto."""
        return 0.0 if self.max_wait == AUTO else parse_seconds(self.max_wait, "serve.max_wait")

    @property
    def p99_seconds(self) -> float:
        return parse_seconds(self.p99, "serve.p99")

    @property
    def body_bytes(self) -> int:
        return parse_bytes(self.max_body_bytes, "serve.max_body_bytes")

    def token(self) -> bytes:
        """Return the token in ``token_file``; empty if no file is configured."""
        if not self.token_file:
            return b""
        key = f"serve.token_file={printable(self.token_file)}"
        try:
            with Path(self.token_file).expanduser().open("rb") as file:
                token = file.read(4097).strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{key}: {printable(str(reason))}; name a readable file") from None
        if not _LEAST_TOKEN <= len(token) <= 4096 or not all(33 <= byte < 127 for byte in token):
            raise ConfigError(
                f"{key}: accepted is one token of {_LEAST_TOKEN} to 4096 printable ASCII characters, for example the "
                "output of: openssl rand -hex 32"
            )
        return token
