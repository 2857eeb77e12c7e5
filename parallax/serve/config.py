"""The keys of ``serve``: address, batches and limits of ``parallax serve``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from parallax.common.units import parse_bytes
from parallax.errors import ConfigError, check_positive, printable

_LEAST_TOKEN = 16  # characters


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How ``parallax serve`` answers requests.

    ``host``: the address to listen on; 0.0.0.0 for all of this machine. ``port``: 0 chooses a free one.
    ``max_batch_rows``: the most rows that the model computes at once, and so the most rows of a request. ``max_wait``:
    seconds that a request waits for others to share its batch; with 0 the model takes the requests that arrived while
    it computed. ``batch_invariant``: pad each batch to ``max_batch_rows`` rows, so that the bits of an answer do not
    depend on the other requests in its batch. ``queue_rows``: the most rows that wait; further requests get 503.
    ``timeout``: seconds until a request gets 504, and in which a client must have sent it. ``max_body_bytes``: a
    larger request gets 413. ``token_file``: a file with the token that clients send as ``Authorization: Bearer TOKEN``;
    empty: no token is needed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch_rows: int = 32
    max_wait: float = 0.0
    batch_invariant: bool = False
    queue_rows: int = 1024
    timeout: float = 60.0
    max_body_bytes: int | str = "64MiB"
    token_file: str = ""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("serve.host: it is empty; accepted is an address, such as 127.0.0.1")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"serve.port={self.port}: accepted are 0 to {2**16 - 1}")
        check_positive("serve.max_batch_rows", self.max_batch_rows)
        check_positive("serve.max_wait", self.max_wait, zero=True)
        check_positive("serve.timeout", self.timeout)
        for key in ("max_wait", "timeout"):
            if math.isinf(getattr(self, key)):
                raise ConfigError(f"serve.{key}=inf: accepted is a number of seconds")
        if self.queue_rows < self.max_batch_rows:
            raise ConfigError(
                f"serve.queue_rows={self.queue_rows}: accepted are {self.max_batch_rows} (serve.max_batch_rows) or more"
            )
        parse_bytes(self.max_body_bytes, "serve.max_body_bytes")

    @property
    def body_bytes(self) -> int:
        return parse_bytes(self.max_body_bytes, "serve.max_body_bytes")

    def token(self) -> bytes:
        """Return the token in ``token_file``; empty without a file."""
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
