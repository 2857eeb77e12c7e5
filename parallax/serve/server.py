"""Run the HTTP server until a signal requests its end. Accepted requests are answered before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from parallax.common.signals import handled_signals
from parallax.errors import ConfigError, printable
from parallax.serve.app import ServeApp
from parallax.serve.batching import Batcher
from parallax.serve.config import ServeConfig
from parallax.serve.metrics import ServeMetrics
from parallax.serve.model import ServedModel

_CHECK_SECONDS = 0.05  # between two looks whether all requests are answered
_KEEP_ALIVE_SECONDS = 30
_SENDING_SECONDS = 10  # for the last answers to reach their clients
_BACKLOG = 2048


def serve(
    model: ServedModel,
    config: ServeConfig,
    announce: Callable[[str], None],
    version: str = "",
    end_requested: Callable[[], object] = lambda: False,
) -> None:
    """Serve ``model`` until ``end_requested`` returns true or, on the main thread, until a signal requests the end.

    ``announce(address)`` is called when the server listens. ``version``: the version of Parallax. Raises
    :class:`ConfigError` if the server cannot listen on the configured address.
    """
    token = config.token()
    listening = _listen(config)
    metrics = ServeMetrics()
    batcher = Batcher(model, config, metrics)
    app = ServeApp(model, config, batcher, metrics, token, version)
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _HttpServer(app, config, end_requested, lambda: announce(address))
    batcher.start()
    try:
        asyncio.run(server.serve(sockets=[listening]))
    finally:
        batcher.close()
        listening.close()


def _listen(config: ServeConfig) -> socket.socket:
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listening = socket.create_server(address, family=family, backlog=_BACKLOG)
        # Connections inherit it. Without it the second packet of an answer waits 40 ms for the client's delayed ACK.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, UnicodeError) as error:
        reason = printable(str(getattr(error, "strerror", None) or error))
        raise ConfigError(
            f"serve.host={printable(config.host)} serve.port={config.port}: cannot listen there: {reason}; choose "
            "another, or serve.port=0 for a free port"
        ) from None


def http_settings(app: ServeApp, config: ServeConfig) -> uvicorn.Config:
    """Return uvicorn's settings for the application ``app``."""
    return uvicorn.Config(
        app.asgi,
        http=_protocol(config.timeout),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # requests that are not HTTP would fill a log
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SENDING_SECONDS,
    )


class _HttpServer(uvicorn.Server):
    """A server that ends gracefully when requested: it refuses new requests, and ends when all accepted ones are
    answered.

    The end is requested by a signal, or when ``end_requested()`` returns true. A second signal ends the server at once.
    ``started()`` is called when the server listens.
    """

    def __init__(
        self,
        app: ServeApp,
        config: ServeConfig,
        end_requested: Callable[[], object],
        started: Callable[[], None],
    ) -> None:
        super().__init__(http_settings(app, config))
        self._app, self._end_requested, self._started = app, end_requested, started
        self._tasks = set[asyncio.Task[None]]()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call ``started``. Signals are already handled at this time."""
        await super().startup(sockets)
        self._started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A context in which a signal, or a true result of ``end_requested()``, ends the server gracefully."""
        self._tasks.add(asyncio.ensure_future(self._until_requested()))
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in handled_signals()}
        for number in before:
            loop.add_signal_handler(number, self._request_end)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _request_end(self) -> None:
        if self._app.draining:
            self.should_exit = self.force_exit = True
            return
        self._app.draining = True
        self._tasks.add(asyncio.ensure_future(self._drain()))

    async def _until_requested(self) -> None:
        while not (self._app.draining or self._end_requested()):
            await asyncio.sleep(_CHECK_SECONDS)
        if not self._app.draining:
            self._request_end()

    async def _drain(self) -> None:
        while self._app.unanswered:
            await asyncio.sleep(_CHECK_SECONDS)
        self.should_exit = True


def _protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's HTTP protocol with a time limit for requests.

    The subclass closes a connection if the request line and headers do not arrive within ``seconds``. uvicorn's own
    protocol waits for ever.
    """

    class PromptProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._stop()  # the keep-alive timeout counts until the next byte

        def _expect_head(self) -> None:
            """Start the timer at the beginning of a request, and stop it when the request's headers are complete."""
            if self.conn.their_state is not h11.IDLE:
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return PromptProtocol
