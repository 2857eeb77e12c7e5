"""KServe's client, in an environment of its own: ``python kserve_client.py ADDRESS MODEL ROWS.npz ANSWERS.npz``.

It sends the arrays of ROWS as inputs of the same names. ANSWERS gets the outputs of four requests, and ``report``, the
other answers as JSON: inputs and outputs are JSON or binary, ``json-binary/NAME`` being a JSON input's binary output.
"""

import asyncio
import itertools
import json
import sys
from typing import Any

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

DATATYPES = {"float32": "FP32", "int64": "INT64"}
FORMS = {"json": False, "binary": True}


def infer_input(name: str, array: Any, *, binary: bool) -> InferInput:
    found = InferInput(name, list(array.shape), DATATYPES[str(array.dtype)])
    found.set_data_from_numpy(array, binary_data=binary)
    return found


async def answers(address: str, model: str, rows: dict[str, Any]) -> dict[str, Any]:
    url, found, report = f"http://{address}", dict[str, Any](), dict[str, Any]()
    async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0)) as client:

        async def infer(
            inputs: list[InferInput], name: str = model, asked: list[RequestedOutput] | None = None
        ) -> Any:
            parameters = None if asked else {"binary_data_output": binary_output}
            request = InferRequest(name, inputs, "an id", None, False, parameters, asked)
            return await client.infer(url, request, model_name=name)

        for given, answered in itertools.product(FORMS, FORMS):
            binary_output = FORMS[answered]
            inputs = [infer_input(*each, binary=FORMS[given]) for each in rows.items()]
            response = await infer(inputs)
            for output in response.outputs:
                found[f"{given}-{answered}/{output.name}"] = output.as_numpy()
            report[f"{given}-{answered}"] = [response.id, response.model_name]
        last = response.outputs[-1].name
        alone = await infer(inputs, asked=[RequestedOutput(last, {"binary_data": True})])
        report["alone"] = [output.name for output in alone.outputs]
        report["live"] = await client.is_server_live(url)
        report["ready"] = await client.is_server_ready(url)
        report["model ready"] = await client.is_model_ready(url, model)
        report["other ready"] = await client.is_model_ready(url, "other")
        real = {name: array.astype(np.float32) for name, array in rows.items()}
        cases: dict[str, tuple[list[InferInput], str]] = {
            "another model": (inputs, "other"),
            "no inputs": ([], model),
            "real tokens": ([infer_input(*each, binary=True) for each in real.items()], model),
        }
        for what, (wrong, name) in cases.items():
            try:
                await infer(wrong, name)
            except httpx.HTTPStatusError as error:
                report[what] = [error.response.status_code, str(error)]
    return found | {"report": json.dumps(report)}


if __name__ == "__main__":
    server, served, read, written = sys.argv[1:]
    np.savez(written, **asyncio.run(answers(server, served, dict(np.load(read)))))
