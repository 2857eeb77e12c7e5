"""The HTTP application of the server: the Open Inference Protocol v2, ``/metrics`` and ``/replicas``."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from parallax.common.units import format_bytes
from parallax.serve.batching import Batcher
from parallax.serve.config import ServeConfig
from parallax.serve.metrics import ServeMetrics
from parallax.serve.model import BatchOutputs, ServedModel
from parallax.serve.tensors import (
    RequestError,
    json_numbers,
    metadata,
    read_request,
    shown,
    write_response,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
_TYPES = ("", "application/json", "application/octet-stream")
_DRAIN_RETRY_SECONDS = 5
_MOST_INLINE = 2**13  # numbers that the event loop writes as JSON itself
_GONE = 499  # as proxies log it; nobody reads this answer


class ServeApp:
    """The ASGI application that serves one model.

    ``token``       the token that a request must have, except requests for the server's health; empty: none needs one
    ``version``     the version of Parallax
    ``draining``    True while the server shuts down; queued requests are then still answered, and new ones refused
    ``unanswered``  the number of requests in progress
    """

    def __init__(
        self,
        model: ServedModel,
        config: ServeConfig,
        batcher: Batcher,
        metrics: ServeMetrics,
        token: bytes,
        version: str,
    ) -> None:
        self._model, self._config, self._version = model, config, version
        self._batcher, self._metrics, self._token = batcher, metrics, token
        self.draining, self.unanswered = False, 0
        paths: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/v2", self._server),
            ("GET", "/metrics", self._numbers),
        ]
        for of_model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            paths += [
                ("GET", of_model, self._described),
                ("GET", f"{of_model}/ready", self._model_ready),
                ("POST", f"{of_model}/infer", self._infer),
                ("GET", f"{of_model}/replicas", self._replicas),
                ("POST", f"{of_model}/replicas", self._scale),
            ]
        open_paths = [
            Route("/v2/health/live", self._live, methods=["GET"]),
            Route("/v2/health/ready", self._ready, methods=["GET"]),
        ]
        self.asgi = Starlette(
            routes=[
                *open_paths,
                *(
                    Route(path, self._guarded(call), methods=[method])
                    for method, path, call in paths
                ),
            ],
            exception_handlers={HTTPException: _http_error, RequestError: _request_error},
        )

    def _guarded(
        self, call: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that answers ``call(request)``, or status 401 if the request lacks the right token."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("latin-1", "replace")
            if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
                return _error(401, "the header is missing: Authorization: Bearer TOKEN", close=True)
            return await call(request)

        return guarded

    # ---- health and descriptions

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        ready = self._is_ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    @property
    def _is_ready(self) -> bool:
        return not self.draining and self._model.ready > 0

    async def _server(self, _: Request) -> Response:
        extensions = ["binary_tensor_data"]
        return JSONResponse(
            {"name": "parallax", "version": self._version, "extensions": extensions}
        )

    async def _described(self, request: Request) -> Response:
        self._check_address(request)
        return JSONResponse(metadata(self._model))

    async def _model_ready(self, request: Request) -> Response:
        self._check_address(request)
        ready = self._is_ready
        return JSONResponse({"name": self._model.name, "ready": ready}, 200 if ready else 503)

    async def _numbers(self, _: Request) -> Response:
        text = self._metrics.text(self._batcher.queued_rows, self._model)
        return Response(text, media_type=self._metrics.content_type)

    async def _replicas(self, request: Request) -> Response:
        self._check_address(request)
        model = self._model
        return JSONResponse({"replicas": model.replicas, "ready": model.ready, "most": model.most})

    async def _scale(self, request: Request) -> Response:
        self._check_address(request)
        body = await self._body(request)
        try:
            wanted = json.loads(body)["replicas"]
        except (ValueError, KeyError, TypeError, RecursionError):
            wanted = None
        if type(wanted) is not int or not 1 <= wanted <= self._model.most:
            raise RequestError(
                400, f'accepted is {{"replicas": 1}} to {self._model.most} (serve.replicas)'
            )
        if self.draining:
            raise RequestError(503, "the server ends", _DRAIN_RETRY_SECONDS)
        self._model.scale(wanted)
        return await self._replicas(request)

    def _check_address(self, request: Request) -> None:
        name = request.path_params["model"]
        version = request.path_params.get("version", self._model.version)
        if name != self._model.name:
            raise RequestError(
                404, f"there is no model {shown(name)}; this one is {self._model.name}"
            )
        if version != self._model.version:
            raise RequestError(
                404, f"there is no version {shown(version)}; this one is {self._model.version}"
            )

    # ---- inference

    async def _infer(self, request: Request) -> Response:
        self.unanswered += 1
        outcome = "500"
        try:
            response = await self._answer(request)
            outcome = str(response.status_code)
        except RequestError as error:
            response, outcome = _of(error), str(error.status)
        except ClientDisconnect:
            response = Response(status_code=_GONE)
        finally:
            self.unanswered -= 1
            self._metrics.requests.labels("gone" if outcome == str(_GONE) else outcome).inc()
        return response

    async def _answer(self, request: Request) -> Response:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.timeout
        self._check_address(request)
        if self.draining:
            raise RequestError(503, "the server ends", _DRAIN_RETRY_SECONDS)
        body = await self._body(request)
        parsed = read_request(
            body, request.headers.get(HEADER_LENGTH), self._model, self._config.max_batch_rows
        )
        answer = self._batcher.submit(parsed.tensors)
        outputs = await self._outputs(request, answer, deadline - loop.time())
        if outputs is None:
            return Response(status_code=_GONE)
        asked = request.path_params.get("version", outputs.version)
        if asked != outputs.version:
            raise RequestError(503, f"version {shown(asked)} is being replaced", 1)
        given = parsed, self._model, outputs
        if json_numbers(parsed, outputs) > _MOST_INLINE:  # meanwhile other requests are answered
            content, header_bytes = await asyncio.to_thread(write_response, *given)
        else:
            content, header_bytes = write_response(*given)
        headers = {"Server-Timing": _timing(outputs)}
        if header_bytes is None:
            return Response(content, headers=headers, media_type="application/json")
        headers[HEADER_LENGTH] = str(header_bytes)
        return Response(content, headers=headers, media_type="application/octet-stream")

    async def _body(self, request: Request) -> bytes:
        """Return the request's body.

        Raises :class:`RequestError` if the body is too large, arrives too slowly, or has an unsupported content type.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in _TYPES:
            raise RequestError(
                415, f"Content-Type: {shown(kind)}: accepted is {' or '.join(_TYPES[1:])}"
            )
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            raise RequestError(415, f"Content-Encoding: {shown(coding)}: send the body as it is")
        most = self._config.body_bytes
        too_large = RequestError(
            413, f"the body is larger than {format_bytes(most)} (serve.max_body_bytes)"
        )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 19 or int(declared) > most):
            raise too_large
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._config.timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise RequestError(
                408, f"the body did not arrive within {self._config.timeout:g} s"
            ) from None
        return b"".join(parts)

    async def _outputs(
        self, request: Request, answer: Future[BatchOutputs], seconds: float
    ) -> BatchOutputs | None:
        """Wait for ``answer``, and return its outputs; return None if the client closes the connection first.

        Raises :class:`RequestError` with status 504 if there is no answer after ``seconds``.
        """
        waiting = asyncio.wrap_future(answer)
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait(
                (waiting, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if waiting.done():
                return waiting.result()
            if leaving.done():
                return None
            raise RequestError(504, f"no answer within {self._config.timeout:g} s (serve.timeout)")
        finally:
            waiting.cancel()  # and with it the request, while it is queued
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await leaving


def _timing(outputs: BatchOutputs) -> str:
    """Return the value of a response's Server-Timing header: milliseconds in the queue and in the model."""
    queue, compute = 1e3 * outputs.queue_seconds, 1e3 * outputs.compute_seconds
    return f"queue;dur={queue:.3f}, compute;dur={compute:.3f}"


async def _left(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, reason: str, *, retry_seconds: int = 0, close: bool = False) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if retry_seconds:
        headers["Retry-After"] = str(retry_seconds)
    if close:  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse({"error": re.sub(r"\s+", " ", reason)}, status, headers)


def _of(error: RequestError) -> Response:
    unread = error.status in (404, 408, 413, 415)
    return _error(error.status, str(error), retry_seconds=error.retry_seconds, close=unread)


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _of(error)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, str(error.detail), close=True)
    response.headers.update(error.headers or {})
    return response
