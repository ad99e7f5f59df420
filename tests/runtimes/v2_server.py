"""A small Open Inference Protocol server that runs a real file and can simulate faults."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

TYPES = {"float32": "FP32", "float16": "FP16", "float64": "FP64", "int64": "INT64"}
DTYPES = {name: dtype for dtype, name in TYPES.items()}
INVALID_BODIES = {
    "no_json": b"<html>",
    "nested_json": b"[" * 200_000,
    "no_outputs": b'{"outputs": null}',
    "numbers_as_outputs": b'{"outputs": [1]}',
    "shape_as_text": b'{"outputs": [{"name": "left", "datatype": "FP32", "shape": "12", "data": [1, 2]}]}',
    "error": b'{"error": "out of memory"}',
    "long_number": b'{"outputs": [' + b"9" * 5000 + b"]}",
}


FAULTY_RESPONSES: dict[str, tuple[Any, ...]] = {
    "redirect": (307, b"", {"Location": "http://127.0.0.2:1/v2/models/net/infer"}),
    "busy": (503, b"overloaded"),
    **{fault: (200, body) for fault, body in INVALID_BODIES.items()},
}


class V2Server(ThreadingHTTPServer):
    """A server of one file as the model `net`.

    `fault`: the fault to simulate. `when`: tells which requests get a faulty response.
    """

    daemon_threads = True

    def __init__(
        self, file: Path, *, fault: str = "", binary: bool = False, other: Path | None = None,
        when: Callable[[V2Server], bool] = lambda _: True,
    ):  # fmt: skip
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.binary, self.when = fault, binary, when
        self.load(file, other)
        self.requests = self.at_work = 0
        self.lock = threading.Lock()
        self.last: list[np.ndarray] = []
        self.headers: list[dict[str, str]] = []
        self.shapes: list[dict[str, tuple[int, ...]]] = []

    def load(self, file: Path, other: Path | None = None) -> None:
        self.data = file.read_bytes()
        self.sessions = [_session(file), _session(other or file)]

    def largest(self, name: str, *, axis: int) -> int:
        """Return the largest size of an axis in all earlier requests that have this axis."""
        return max(s[name][axis] for s in self.shapes if len(s[name]) > axis)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v2/models/net"

    def handle_error(self, *_: object) -> None:
        """Ignore errors of clients that closed the connection."""

    def metadata(self) -> dict[str, Any]:
        session = self.sessions[0]
        sha256 = hashlib.sha256(b"other" if self.fault == "other_digest" else self.data).hexdigest()
        stated = sha256.upper() if self.fault == "upper_case" else sha256
        parameters = {} if self.fault == "no_digest" else {"sha256": stated}
        return {
            "name": "net",
            "versions": ["1"],
            "platform": "onnx",
            "inputs": [{"name": i.name, "datatype": "FP32", "shape": [-1]} for i in session.get_inputs()],
            "outputs": [{"name": o.name, "datatype": "FP32", "shape": [-1]} for o in session.get_outputs()],
            "parameters": parameters,
        }  # fmt: skip

    def infer(
        self, feed: dict[str, np.ndarray], *, pinned: bool = False, version: str = "1"
    ) -> list[np.ndarray]:
        """Run the file, or another file for version 2. `pinned`: a cookie selects a correct
        worker."""
        with self.lock:
            self.requests += 1
            self.at_work += 1
            self.shapes.append({name: array.shape for name, array in feed.items()})
            mine = self.requests
        try:
            rows = len(next(iter(feed.values())))
            if self.fault == "refuses" or (self.fault == "single_samples" and rows > 1):
                raise ValueError(f"refused: {rows} samples")
            if self.fault in ("mixed", "swapped_under_load", "float16_under_load"):
                time.sleep(0.002)  # so that requests overlap
            wrong = mine % 4 == 0 and not pinned
            stale = self.fault == "stale" or version == "2"
            worker = wrong if self.fault == "one_worker" else stale
            if self.fault == "normalized_twice":
                feed = {name: (array - 0.5) / 0.5 for name, array in feed.items()}
            outputs = self.sessions[int(worker)].run(None, feed)
            if self.fault == "float16" or (self.fault == "float16_under_load" and self.at_work > 1):
                outputs = [o.astype(np.float16).astype(np.float32) for o in outputs]
            if self.fault == "outputs_swapped":
                outputs = outputs[::-1]
            if self.fault == "mixed" and self.at_work > 1:
                outputs = [np.roll(o, 1, axis=0) for o in outputs]
            if self.fault == "swapped_under_load" and self.at_work > 1:
                with self.lock:
                    outputs, self.last = (self.last or outputs), outputs
            return outputs
        finally:
            with self.lock:
                self.at_work -= 1


def _session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(file), options)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for an acknowledgment
    server: V2Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        matches = {
            "/v2": {
                "name": "\ud800" if self.server.fault == "surrogate" else "little",
                "version": "1",
                "extensions": ["binary_tensor_data"] if self.server.binary else [],
            },
            "/v2/models/net": self.server.metadata(),
            "/v2/models/net/versions/1": self.server.metadata(),
            "/v2/models/net/versions/2": self.server.metadata(),
            "/manifest.json": {"slots": {"exact": {"sha256": hashlib.sha256(self.server.data).hexdigest()}}},
            "/other.json": {"sha256": "0" * 64},
        }.get(self.path)  # fmt: skip
        self._answer(200 if matches else 404, json.dumps(matches or {"error": "unknown"}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        split = int(self.headers.get("Inference-Header-Content-Length") or len(body))
        request, rest, feed = json.loads(body[:split]), body[split:], {}
        for tensor in request["inputs"]:
            size = tensor.get("parameters", {}).get("binary_data_size")
            dtype = DTYPES[tensor["datatype"]]
            flat = (
                np.array(tensor["data"], dtype)
                if size is None
                else np.frombuffer(rest[:size], dtype)
            )
            rest = rest[size or 0 :]
            feed[tensor["name"]] = flat.reshape(tensor["shape"])
        version = "2" if "/versions/2/" in self.path else "1"
        try:
            outputs = self.server.infer(feed, pinned="Cookie" in self.headers, version=version)
        except Exception as error:
            if self.server.fault == "answers_anything":
                outputs = self.server.infer({n: a.reshape(a.shape[:-2]) for n, a in feed.items()})
            else:
                self._answer(400, json.dumps({"error": str(error)}).encode())
                return
        self._outputs(request, outputs, version)

    def _outputs(self, request: dict[str, Any], outputs: list[np.ndarray], version: str) -> None:
        fault, names = self.server.fault, [o.name for o in self.server.sessions[0].get_outputs()]
        if fault == "silent":
            time.sleep(5)
            self.close_connection = True
            return
        if fault in FAULTY_RESPONSES and self.server.when(self.server):
            self._answer(*FAULTY_RESPONSES[fault])
            return
        if fault == "other_dtype":
            outputs = [o.astype(np.float64) for o in outputs]
        tensors, data = [], []
        for name, array in zip(names, outputs, strict=True):
            shape = [-1, *array.shape[1:]] if fault == "open_shape" else list(array.shape)
            tensor = {"name": name, "shape": shape, "datatype": TYPES[array.dtype.name]}
            if fault == "other_name":
                tensor["name"] += "_"
            if self.server.binary:
                raw = array.tobytes()
                tensor["parameters"] = {"binary_data_size": len(raw)}
                data.append(raw[:-4] if fault == "truncated" else raw)
            else:
                flat = array.reshape(-1).astype(str if fault == "texts" else array.dtype).tolist()
                tensor["data"] = flat[:-1] if fault in ("truncated", "wrong_length") else flat
            tensors.append(tensor)
        if fault == "more_outputs":
            tensors.append({"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]})
        times = 2 if fault == "twice" else 1
        tensors, data = tensors * times, data * times
        answer = {
            "id": "stray" if fault == "other_id" else request.get("id"),
            "model_name": "net2" if fault == "other_model" else "net",
            "model_version": str(self.server.requests % 2) if fault == "two_versions" else version,
            "outputs": tensors,
        }
        header = json.dumps(answer).encode()
        extra = {"Set-Cookie": "worker=1"} if fault == "one_worker" else {}
        if self.server.binary:
            extra["Inference-Header-Content-Length"] = str(len(header))
        body = header + b"".join(data)
        if fault == "compressed":
            body, extra = gzip.compress(body), {"Content-Encoding": "gzip"}
        self._answer(206 if fault == "partial" else 200, body, extra)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        promised = len(body) + (100 if self.server.fault == "half_open" and status == 200 else 0)
        self.send_header("Content-Length", str(promised))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if promised > len(body):
            self.close_connection = True


@contextmanager
def serving(file: Path, **options: Any) -> Iterator[V2Server]:
    with V2Server(file, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            with suppress(OSError):
                server.shutdown()
            thread.join()
