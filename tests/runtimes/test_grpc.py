"""A model server over gRPC. test_mlserver.py also runs these tests with tritonclient."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from gate import Verdict, check
from gate.errors import EvidenceError, RuntimeUnusable
from gate.runtimes.v2_protocol import DTYPES
from tests.runtimes.test_server import SAMPLES, TwoHeads, codes, export, open_session, policy

pytest.importorskip("tritonclient.grpc", reason="pip install 'parity-gate[server-grpc]'")
import grpc
from tritonclient.grpc import service_pb2 as pb

from gate.runtimes import v2_grpc

REFUSALS = {
    "refuses": grpc.StatusCode.INVALID_ARGUMENT,
    "breaks": grpc.StatusCode.INTERNAL,
    "busy": grpc.StatusCode.UNAVAILABLE,
    "full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unknown_model": grpc.StatusCode.NOT_FOUND,
    "denied": grpc.StatusCode.PERMISSION_DENIED,
}


class GrpcServer:
    """A server of one file as the model `net`. `fault`: the fault to simulate."""

    def __init__(self, file: Path, fault: str) -> None:
        self.data, self.fault = file.read_bytes(), fault
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(self.data, options)
        self.names = [each.name for each in self.session.get_outputs()]
        self.headers: dict[str, str] = {}
        self.url = ""

    def metadata(self, request: Any, context: Any) -> bytes:
        self.headers = dict(context.invocation_metadata())
        if self.fault == "silent_metadata":
            time.sleep(5)
        tensors = {
            kind: [
                pb.ModelMetadataResponse.TensorMetadata(name=each.name, datatype="FP32", shape=[-1])
                for each in each_kind
            ]
            for kind, each_kind in (
                ("inputs", self.session.get_inputs()),
                ("outputs", self.session.get_outputs()),
            )
        }
        stated = pb.ModelMetadataResponse(name="net", versions=["1"], platform="onnx", **tensors)
        if self.fault == "no_digest":
            return stated.SerializeToString()
        served = b"other" if self.fault == "other_digest" else self.data
        entry = pb.ModelInferRequest.ParametersEntry(
            key="sha256", value=pb.InferParameter(string_param=hashlib.sha256(served).hexdigest())
        ).SerializeToString()
        # field 6, as MLServer sends it
        return stated.SerializeToString() + bytes([6 << 3 | 2, len(entry)]) + entry

    def infer(self, request: Any, context: Any) -> bytes:
        fault = self.fault
        if fault in REFUSALS:
            context.abort(REFUSALS[fault], fault)
        if fault == "silent":
            time.sleep(5)
        if fault == "garbage":
            return b"\xff" * 40
        feed = {
            tensor.name: np.frombuffer(raw, DTYPES[tensor.datatype]).reshape(tuple(tensor.shape))
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        try:
            outputs = self.session.run(None, feed)
        except Exception as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return self.answer(request, outputs).SerializeToString()

    def answer(self, request: Any, outputs: list[np.ndarray]) -> Any:
        fault = self.fault
        if fault == "float16":
            outputs = [each.astype(np.float16).astype(np.float32) for each in outputs]
        answer = pb.ModelInferResponse(
            model_name="other" if fault == "other_model" else "net",
            model_version="1",
            id="stray" if fault == "other_id" else request.id,
        )
        for name, array in zip(self.names, outputs, strict=True):
            tensor = answer.outputs.add(name=name, datatype="FP32", shape=array.shape)
            if fault == "contents":
                tensor.contents.fp32_contents.extend(array.reshape(-1).tolist())
            else:
                raw = array.astype(np.float64 if fault == "other_dtype" else np.float32).tobytes()
                answer.raw_output_contents.append(raw[:-4] if fault == "truncated" else raw)
        last = answer.outputs[-1]
        last.datatype = {"other_dtype": "FP64", "strange_dtype": "BF16"}.get(fault, "FP32")
        if fault == "open_shape":
            last.shape[0] = -1
        if fault == "twice":
            last.name = self.names[0]
        if fault in ("missing", "too_few_bytes"):
            del answer.raw_output_contents[-1]
        if fault == "missing":
            del answer.outputs[-1]
        return answer


@contextmanager
def serving(file: Path, fault: str = "") -> Iterator[GrpcServer]:
    created = GrpcServer(file, fault)
    methods = {
        "ServerMetadata": (
            lambda *_: pb.ServerMetadataResponse(name="little", version="1").SerializeToString(),
            pb.ServerMetadataRequest,
        ),
        "ModelMetadata": (created.metadata, pb.ModelMetadataRequest),
        "ModelInfer": (created.infer, pb.ModelInferRequest),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, request_deserializer=request.FromString)
        for name, (method, request) in methods.items()
    }
    service = "inference.GRPCInferenceService"
    with ThreadPoolExecutor(40) as pool:
        server = grpc.server(pool, [grpc.method_handlers_generic_handler(service, handlers)])
        created.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}/v2/models/net"
        server.start()
        try:
            yield created
        finally:
            server.stop(None).wait()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    return {"model": export(TwoHeads(), folder / "model.onnx")}


def check_server(files: dict[str, Path], url: str, **options: Any) -> Any:
    return check(files["model"], TwoHeads().eval(), SAMPLES, policy(url, **options))


@pytest.mark.parametrize("fault", ["", "contents"])
def test_correct_grpc_server_passes_under_load(files: dict[str, Path], fault: str) -> None:
    with serving(files["model"], fault) as server:
        result = check_server(files, server.url, rate=400.0)
    assert result.decision.verdict is Verdict.PASS, codes(result, Verdict.FAIL)
    (runtime,) = result.evidence.runtimes
    assert [load.connections for load in runtime.concurrency] == [1, 8, 32, 32]
    assert runtime.session_options["encoding"] == "grpc"
    assert runtime.session_options["server"] == "little 1"
    assert ("server_file", "proven") in codes(result, Verdict.PASS)


@pytest.mark.parametrize(
    ("fault", "verdict", "name"),
    [
        ("float16", Verdict.FAIL, "noise_ratio"),
        ("other_digest", Verdict.FAIL, "runtime"),
        ("other_id", Verdict.FAIL, "runtime"),
        ("other_model", Verdict.FAIL, "runtime"),
        ("refuses", Verdict.FAIL, "runtime"),
        ("no_digest", Verdict.ERROR, "runtime"),
    ],
)
def test_wrong_grpc_server_fails(
    files: dict[str, Path], fault: str, verdict: Verdict, name: str
) -> None:
    with serving(files["model"], fault) as server:
        result = check_server(files, server.url, connections=[2])
    assert result.decision.verdict is verdict
    assert name in {check_name for check_name, _ in codes(result, verdict)}


@pytest.mark.parametrize(
    "fault",
    [
        "busy", "full", "unknown_model", "denied", "silent", "silent_metadata", "garbage",
        "other_dtype", "strange_dtype", "open_shape", "truncated", "missing", "too_few_bytes",
        "twice",
    ],
)  # fmt: skip
def test_invalid_answer_is_an_unusable_server(files: dict[str, Path], fault: str) -> None:
    with (
        serving(files["model"], fault) as server,
        pytest.raises(RuntimeUnusable),
        closing(open_session(files, url=server.url, timeout_s=1.0)) as session,
    ):
        session.run({"x": SAMPLES})


@pytest.mark.parametrize("fault", ["refuses", "breaks"])
def test_refused_request_is_not_an_unusable_server(files: dict[str, Path], fault: str) -> None:
    with (
        serving(files["model"], fault) as server,
        closing(open_session(files, url=server.url)) as session,
        pytest.raises(EvidenceError) as refused,
    ):
        session.run({"x": SAMPLES})
    assert not isinstance(refused.value, RuntimeUnusable)


def test_too_large_request_is_an_unusable_server(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert v2_grpc.MAX_REQUEST_BYTES < 1 << 31
    monkeypatch.setattr(v2_grpc, "MAX_REQUEST_BYTES", SAMPLES.nbytes)
    with serving(files["model"]) as server:
        with closing(open_session(files, url=server.url)) as session:
            session.run({"x": SAMPLES})
            with pytest.raises(RuntimeUnusable):
                session.run({"x": np.concatenate([SAMPLES, SAMPLES[:1]])})
        options = {"url": server.url, "max_batch_size": len(SAMPLES)}
        with closing(open_session(files, **options)) as session:
            session.run({"x": np.concatenate([SAMPLES, SAMPLES[:1]])})


def test_server_without_grpc_is_unusable(files: dict[str, Path]) -> None:
    # accepts the connection and sends nothing
    with socket.create_server(("127.0.0.1", 0)) as half_open:
        url = f"grpc://127.0.0.1:{half_open.getsockname()[1]}/v2/models/net"
        with pytest.raises(RuntimeUnusable):
            open_session(files, url=url, timeout_s=1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"grpc://127.0.0.1:{server.server_port}/v2/models/net"
        with pytest.raises(RuntimeUnusable):
            open_session(files, url=url, timeout_s=1.0)
        server.shutdown()


def test_token_is_read_from_the_environment(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "Bearer 123")
    with serving(files["model"]) as server:
        headers = {"Authorization": "env:SERVER_TOKEN"}
        open_session(files, url=server.url, headers=headers).close()
        assert server.headers["authorization"] == "Bearer 123"
        with pytest.raises(RuntimeUnusable) as refused:
            open_session(files, url=server.url, headers={"a b": "env:SERVER_TOKEN"})
        assert "123" not in str(refused.value)
        with pytest.raises(RuntimeUnusable):
            open_session(files, url=server.url, ca="missing.pem")
