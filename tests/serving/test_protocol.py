"""The Open Inference Protocol v2, with its public client and byte by byte."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from parallax.serve.model import DTYPES
from tests.serving.conftest import Server

tritonclient = pytest.importorskip("tritonclient.http")
ml_dtypes = pytest.importorskip("ml_dtypes")  # of the client
pytestmark = pytest.mark.usefixtures("client_loop")

VALUES: dict[str, Any] = {
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    "FP16": np.array([[0.1, -0.0, np.inf], [np.nan, 65504, 6e-8]], np.float16),
    "FP32": np.array([[0.1, -0.0, -np.inf], [np.nan, 1e38, 1e-45]], np.float32),
    "FP64": np.array([[0.1, -0.0, np.inf], [np.nan, 1e308, 5e-324]], np.float64),
    "BF16": np.array([[0.5, -0.0, np.inf], [np.nan, 2.0**100, -3]], ml_dtypes.bfloat16),
}
for name, kind in {
    "UINT8": np.uint8,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
}.items():
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    VALUES[name] = np.array([[low, 0, high], [1, 2, 3]], kind)
VALUES["INT64"] = np.array([[-(2**63), 2**53 + 1, 2**63 - 1], [1, 2, 3]], np.int64)


def inputs(*, binary: bool) -> list[Any]:
    found = []
    for name in DTYPES:
        given_ = tritonclient.InferInput(name, [2, 3], name)
        given_.set_data_from_numpy(VALUES[name], binary_data=binary or name == "BF16")
        found.append(given_)
    return found


def one_row() -> dict[str, Any]:
    """A request whose BF16 data follow the JSON part, six bytes."""
    entries = [
        {"name": name, "shape": [1, 3], "datatype": name, "data": [[name == "BOOL" and True] * 3]}
        for name in DTYPES
    ]
    for entry in entries:
        if entry["name"] == "BOOL":
            entry["data"] = [True, False, True]
        elif entry["name"] == "BF16":
            del entry["data"]
            entry["parameters"] = {"binary_data_size": 6}
        else:
            entry["data"] = [0, 1, 2]
    return {"inputs": entries, "outputs": [{"name": "INT64"}]}


def send(server: Server, tree: Any, binary: bytes = bytes(6)) -> Any:
    header = json.dumps(tree).encode()
    return server.infer(header + binary, Inference_Header_Content_Length=str(len(header)))


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("answer", [True, False])
def test_every_datatype_keeps_its_bits(echo: Server, binary: bool, answer: bool) -> None:
    client = tritonclient.InferenceServerClient(echo.address)
    outputs = [
        tritonclient.InferRequestedOutput(name, binary_data=answer or name == "BF16")
        for name in DTYPES
    ]
    found = client.infer("echo", inputs(binary=binary), outputs=outputs, request_id="an id")
    assert found.get_response()["id"] == "an id"
    for name in DTYPES:
        value = found.as_numpy(name)
        assert value.shape == (2, 3)
        nan = np.isnan(VALUES[name].astype(float))
        assert np.array_equal(np.isnan(value.astype(float)), nan)
        assert value[~nan].tobytes() == VALUES[name].astype(value.dtype)[~nan].tobytes()
    client.close()


def test_descriptions_and_health(echo: Server) -> None:
    client = tritonclient.InferenceServerClient(echo.address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "1")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    found = client.get_model_metadata("echo")
    assert found["inputs"] == [{"name": n, "datatype": n, "shape": [-1, 3]} for n in DTYPES]
    assert found["outputs"] == found["inputs"]
    assert found["versions"] == ["1"]
    client.close()
    assert echo.get("/v2/models/other").status == 404
    assert echo.get("/v2/models/echo/versions/2").status == 404
    assert echo.get("/nothing").status == 404
    assert echo.call("DELETE", "/v2").status == 405


def test_the_address_may_be_repeated_in_the_body_as_kserve_does(echo: Server) -> None:
    for more in ({"model_name": "echo"}, {"model_name": None, "model_version": None}):
        assert send(echo, one_row() | more).status == 200
    refused = send(echo, one_row() | {"model_name": "other"})
    assert (refused.status, refused.error) == (400, "model_name: other: accepted is echo")


def test_requested_outputs_come_alone_and_in_order(echo: Server) -> None:
    tree = one_row() | {"outputs": [{"name": "INT8"}, {"name": "BOOL"}]}
    found = send(echo, tree)
    assert found.status == 200, found.body
    assert [output["name"] for output in found.json["outputs"]] == ["INT8", "BOOL"]
    assert found.json["outputs"][0]["data"] == [0, 1, 2]
    assert "id" not in found.json


@pytest.mark.parametrize("binary", [True, False])
def test_an_answer_says_how_long_it_waited_and_computed(echo: Server, binary: bool) -> None:
    tree = one_row() | {"parameters": {"binary_data_output": binary}}
    timing = send(echo, tree).headers["server-timing"]
    found = re.fullmatch(r"queue;dur=(\d+\.\d{3}), compute;dur=(\d+\.\d{3})", timing)
    assert found is not None
    assert all(0 <= float(part) < 60_000 for part in found.groups())


def test_metrics_are_those_of_prometheus(echo: Server) -> None:
    before = echo.metric('parallax_requests_total{outcome="200"}')
    assert send(echo, one_row()).status == 200
    text = echo.get("/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"parallax_requests", "parallax_queue_seconds", "parallax_compute_seconds"} <= set(
        families
    )
    assert families["parallax_batch_rows"].type == "histogram"
    assert echo.metric('parallax_requests_total{outcome="200"}') == before + 1


def changed(name: str, /, **values: Any) -> dict[str, Any]:
    """The request with another entry of the input ``name``; None removes a key."""
    tree = one_row()
    for entry in tree["inputs"]:
        if entry["name"] == name:
            entry.update(values)
            for key in [key for key, value in values.items() if value is None]:
                del entry[key]
    return tree


WRONG: list[tuple[Any, str]] = [
    ([], "accepted is a JSON object"),
    ({"inputs": {}}, "inputs: accepted is a list"),
    ({"inputs": []}, "inputs lack BOOL"),
    ({"inputs": [3]}, "an input: accepted is a JSON object"),
    (one_row() | {"id": 3}, "id: accepted is text"),
    (one_row() | {"ids": "3"}, "has the key ids"),
    (one_row() | {"parameters": {"sequence_id": 3}}, "has the key sequence_id"),
    (one_row() | {"parameters": {"binary_data_output": 1}}, "accepted are true and false"),
    (one_row() | {"outputs": [{"name": "FP31"}]}, "did you mean 'FP32'"),
    (one_row() | {"outputs": [{"name": "FP32"}] * 2}, "requested twice"),
    (one_row() | {"outputs": [{"name": "BF16"}]}, "request binary_data"),
    (
        one_row() | {"outputs": [{"name": "FP32", "parameters": {"classification": 3}}]},
        "classification",
    ),
    (changed("INT8", name="INT7"), "did you mean 'INT8'"),
    (changed("INT8", name="FP32"), "has the datatype INT8"),
    (changed("INT8", datatype="BYTES"), "has the datatype BYTES; accepted is INT8"),
    (changed("INT8", shape=[1, 4]), "accepted is [-1, 3]"),
    (changed("INT8", shape=[3]), "accepted is [-1, 3]"),
    (changed("INT8", shape=[-1, 3]), "accepted is [-1, 3]"),
    (changed("INT8", shape=[2**62, 3]), "has the shape"),
    (changed("INT8", shape=[2**39, 3]), "has 3 values"),
    (changed("INT8", shape=[1.0, 3]), "has the shape"),
    (changed("INT8", shape=[True, 3]), "has the shape"),
    (changed("INT8", shape=None), "has the shape None"),
    (changed("INT8", data=None), "has no data"),
    (changed("INT8", data=[1, 2]), "has 2 values"),
    (changed("INT8", data=[1, 2, 3, 4]), "has 4 values"),
    (changed("INT8", data=[[1, 2], [3]]), "not nested as the shape"),
    (changed("INT8", data=[1, 2, 128]), "outside of -128 to 127"),
    (changed("INT8", data=[1, 2, 3.5]), "values of the type float"),
    (changed("INT8", data=[1, 2, True]), "values of the type bool"),
    (changed("INT64", data=[1, 2, 2**63]), "outside of"),
    (changed("FP32", data=[1, 2, "3"]), "values of the type str"),
    (changed("FP32", data=[1, 2, None]), "values of the type NoneType"),
    (changed("FP32", data=[1, 2, 1e300]), "cannot hold"),
    (changed("FP32", data=[1, 2, 10**400]), "cannot hold"),
    (changed("BOOL", data=[1, 0, 1]), "values of the type int"),
    (changed("BF16", data=[1, 2, 3]), "has data and binary_data_size"),
    (changed("BF16", parameters=None, data=[1, 2, 3]), "BF16 has no JSON form"),
    (changed("BF16", parameters={"binary_data_size": 5}), "takes 6"),
    (changed("BF16", parameters={"binary_data_size": -6}), "takes 6"),
    (changed("BF16", parameters={"shared_memory_region": "x"}), "shared_memory_region"),
    (changed("BF16", shape=[2, 3], parameters={"binary_data_size": 12}), "and 6 are left"),
    (changed("INT8", shape=[2, 3], data=[1] * 6), "all need the same"),
]


@pytest.mark.parametrize(("tree", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_a_wrong_request_gets_its_reason(echo: Server, tree: Any, reason: str) -> None:
    found = send(echo, tree)
    assert found.status == 400, found.body
    assert reason in found.error
    assert "\n" not in found.error


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"inputs": [{"shape": [' + b"9" * 5000 + b"]}]}", "cannot be read"),
    ],
    ids=["empty", "broken", "not UTF-8", "nested", "long number"],
)
def test_broken_json(echo: Server, body: bytes, reason: str) -> None:
    found = echo.infer(body)
    assert found.status == 400
    assert reason in found.error


@pytest.mark.parametrize("length", ["-1", "1e3", "99999999", "9" * 5000, "", "٣"])
def test_wrong_header_lengths(echo: Server, length: str) -> None:
    body = json.dumps(one_row()).encode()
    connection = echo.connection()
    connection.putrequest("POST", "/v2/models/echo/infer")
    connection.putheader("Inference-Header-Content-Length", length.encode())
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    found = connection.getresponse()
    assert found.status == 400
    assert b"Inference-Header-Content-Length" in found.read()
    connection.close()


def test_too_many_rows_and_none(echo: Server) -> None:
    for rows in (0, 9):
        entries = [
            {
                "name": n,
                "shape": [rows, 3],
                "datatype": n,
                "parameters": {"binary_data_size": 3 * rows * d.itemsize},
            }
            for n, d in DTYPES.items()
        ]
        size = sum(3 * rows * dtype.itemsize for dtype in DTYPES.values())
        found = send(echo, {"inputs": entries}, bytes(size))
        assert found.status == 400
        assert f"{rows} rows; accepted are 1 to 8" in found.error


def test_bytes_that_are_no_bool(echo: Server) -> None:
    tree = changed("BOOL", data=None, parameters={"binary_data_size": 3})
    found = send(echo, tree, b"\x01\x02\x00" + bytes(6))
    assert found.status == 400
    assert "bytes of BOOL are 0 and 1" in found.error


def test_data_after_the_last_input(echo: Server) -> None:
    found = send(echo, one_row(), bytes(7))
    assert found.status == 400
    assert "1 bytes follow" in found.error


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Content_Type": "application/json; charset=utf-8"}, 400),  # its content is wrong
    ],
    ids=str,
)
def test_wrong_content_types(echo: Server, headers: dict[str, str], status: int) -> None:
    assert echo.infer(b"{}", **headers).status == status


def test_a_body_above_the_limit(echo: Server) -> None:
    assert "serve.max_body_bytes" in echo.infer(bytes(100_001)).error
    raw = socket.create_connection(tuple(echo.address.split(":")), timeout=60)  # type: ignore[arg-type]
    raw.sendall(
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    found = b""
    with contextlib.suppress(OSError):  # the server closes while this sends
        for _ in range(2000):
            raw.sendall(b"1000\r\n" + bytes(0x1000) + b"\r\n")
    with contextlib.suppress(OSError):
        found = raw.recv(1000)
    assert found == b"" or b" 413 " in found.splitlines()[0]
    raw.close()
    assert echo.get("/v2").status == 200


# ---- hostile requests

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["name", "data", "INT8", "FP32", "BOOL", 2**63, 10**30, -1, 0, 3]),
)
_KEYS = st.sampled_from(
    [
        "name",
        "shape",
        "datatype",
        "data",
        "parameters",
        "inputs",
        "outputs",
        "binary_data_size",
        "id",
    ]
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=12,
)
_PATHS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def mutated(tree: Any, path: list[int], value: Any) -> Any:
    """``tree`` with ``value`` at a place that ``path`` leads to."""
    if not path or not isinstance(tree, list | dict) or not tree:
        return value
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = keys[path[0] % len(keys)]
    tree[key] = mutated(tree[key], path[1:], value)
    return tree


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(_TREES, st.builds(lambda p, v: mutated(one_row(), p, v), _PATHS, _TREES)),
    st.binary(max_size=12),
)
def test_hostile_trees(echo: Server, tree: Any, binary: bytes) -> None:
    found = send(echo, tree, binary)
    assert found.status in (200, 400), found.body
    assert found.status == 200 or found.error


@settings(max_examples=100)
@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(-5, 300).map(str)))
def test_hostile_bytes(echo: Server, body: bytes, length: str | None) -> None:
    headers = {} if length is None else {"Inference_Header_Content_Length": length}
    assert echo.infer(body, **headers).status == 400


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_hostile_http(echo: Server, content: bytes) -> None:
    host, _, port = echo.address.partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as raw,
        contextlib.suppress(OSError),
    ):
        raw.sendall(content + b"\r\n\r\n")
        raw.shutdown(socket.SHUT_WR)
        found = raw.recv(100)
        assert not found or found.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))


def test_it_lives_on(echo: Server) -> None:
    assert send(echo, one_row()).status == 200
    assert echo.process.poll() is None


def test_half_a_request_is_no_danger(echo: Server) -> None:
    """A connection that is reset in the middle of a body."""
    host, _, port = echo.address.partition(":")
    for _ in range(5):
        raw = socket.create_connection((host, int(port)))
        raw.sendall(
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
    assert send(echo, one_row()).status == 200
