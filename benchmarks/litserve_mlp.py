"""The MLP of :mod:`benchmarks.serve` behind LitServe: ``python -m benchmarks.litserve_mlp PORT WAIT_SECONDS``.

It needs ``pip install litserve``, in an environment of its own if its versions conflict with others. A request is the
JSON of a row's numbers; an answer is the outputs in base64.
"""

import base64
import sys

import litserve
import torch
from starlette.requests import Request
from torch import Tensor

from benchmarks.serve import LAYERS, ROWS, TOKENS, WIDTH
from parallax.model.factory.mlp import MLPConfig


class Api(litserve.LitAPI):
    """LitServe's interface to the MLP, with batches of the requests that have arrived."""

    def setup(self, device: str) -> None:
        assert device == "cpu"
        torch.set_num_threads(1)
        self.model = MLPConfig(hidden=WIDTH, layers=LAYERS, sequence=TOKENS).build().eval()

    def decode_request(self, request: Request) -> list[int]:
        # LitServe reads the annotation, and gives the JSON.
        return list(request["tokens"])

    def batch(self, inputs: list[list[int]]) -> Tensor:
        return torch.tensor(inputs)

    def predict(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model(x)

    def unbatch(self, output: Tensor) -> list[Tensor]:
        return list(output)

    def encode_response(self, output: Tensor) -> dict[str, str]:
        return {"output": base64.b64encode(output.numpy().tobytes()).decode()}


if __name__ == "__main__":
    api = Api(max_batch_size=ROWS, batch_timeout=float(sys.argv[2]))
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
    )
