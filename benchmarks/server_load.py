"""Measure the client's memory over many requests to a model server.

    python -m benchmarks.server_load [--requests 50000]

Prints the resident memory after a tenth of the requests and at the end. Fails if it grew by 50 MB
or more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn

from gate.onnx_file.reading import read_subject
from gate.runtimes.server import ServedFile, ServerSession
from gate.runtimes.v2_protocol import ServerOptions
from tests.runtimes.v2_server import serving

_LIMIT_MB = 50.0


def main() -> int:
    """Run the benchmark. Return 1 if the memory grows too much, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "model.onnx")
        torch.onnx.export(
            nn.Linear(16, 4), (torch.zeros(2, 16),), str(path), dynamo=False, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip
        batch = {"x": np.zeros((4, 16), np.float32)}
        with serving(path, binary=True) as server:
            subject = read_subject(path)
            file = ServedFile(subject.sha256, subject.inputs, subject.outputs)
            session = ServerSession(file, ServerOptions(url=server.url), batch)
            early = _send_requests(session, batch, requests // 10)
            late = _send_requests(session, batch, requests - requests // 10)
            session.close()
    print(f"{requests} requests: {early:.1f} MB after a tenth, {late:.1f} MB at the end")
    return int(late - early >= _LIMIT_MB)


def _send_requests(session: ServerSession, batch: dict[str, np.ndarray], count: int) -> float:
    """Send `count` requests from 8 clients.

    Returns the resident memory of this process, which also runs the server, in MB.
    """
    for start in range(0, count, 1000):
        session.run_at_once([batch] * min(1000, count - start), 8)
    return float(psutil.Process().memory_info().rss / 1e6)


if __name__ == "__main__":
    sys.exit(main())
