"""A client of the Open Inference Protocol V2 over gRPC, with the messages of tritonclient."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tritonclient.grpc import service_pb2

from gate.errors import EvidenceError, RuntimeUnusable
from gate.runtimes.v2_protocol import (
    DATATYPES,
    MAX_BYTES,
    InferenceResponse,
    ServerOptions,
    certificates_error,
    read_outputs,
    timeout_message,
)
from gate.storage.arrays import Batch

_SERVICE = "/inference.GRPCInferenceService"

_CHANNEL = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else all clients share one connection
)

MAX_REQUEST_BYTES = MAX_BYTES - (1 << 20)
"""Largest size of a request's tensors: a protobuf message must be below 2 GiB with all names."""

_REFUSED = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INTERNAL", "UNKNOWN")
"""Status codes that concern the request or the model; others concern the server or network."""

_METADATA_PARAMETERS = 6
"""Field number of the parameters in MLServer's model metadata, which Triton's messages lack."""

_CONTENTS = {
    "BOOL": "bool_contents", "BYTES": "bytes_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents",
    "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents",
    "UINT32": "uint_contents", "UINT64": "uint64_contents",
}  # fmt: skip

_HEADER = re.compile(r"[0-9a-z_.-]+(?<!-bin)")


class GrpcClient:
    """Sends requests to one server, with one connection per concurrent request."""

    encoding = "grpc"

    def __init__(self, options: ServerOptions, outputs: Sequence[str]) -> None:
        """`outputs`: names of the outputs to request.

        Raises RuntimeUnusable for a header that gRPC can't send, or certificates that can't be
        loaded.
        """
        self._options, self._outputs = options, outputs
        _, self._model, self._version = options.parts
        self._headers = [(name.lower(), value) for name, value in options.secret_headers()]
        for name, _ in self._headers:
            if not _HEADER.fullmatch(name):
                raise RuntimeUnusable(f"the header {name} can't be sent over gRPC.")
        self._certificates = None
        if options.ca is not None:
            try:
                self._certificates = Path(options.ca).read_bytes()
            except OSError as error:
                raise certificates_error(options.ca, error) from error
        self._idle: list[Any] = []
        self._channels: list[Any] = []

    def server(self) -> dict[str, Any]:
        """Return the metadata of the server."""
        request = service_pb2.ServerMetadataRequest()
        answer = self._call("ServerMetadata", request, service_pb2.ServerMetadataResponse)
        return {"name": answer.name, "version": answer.version}

    def model(self) -> dict[str, Any]:
        """Return the metadata of the model."""
        request = service_pb2.ModelMetadataRequest(name=self._model, version=self._version)
        answer = self._call("ModelMetadata", request, service_pb2.ModelMetadataResponse)
        inputs, outputs = (
            [{"name": tensor.name, "datatype": tensor.datatype} for tensor in tensors]
            for tensors in (answer.inputs, answer.outputs)
        )
        return {
            "platform": answer.platform,
            "inputs": inputs,
            "outputs": outputs,
            "parameters": _parameters(answer),
        }

    def infer(self, batch: Batch, identity: str) -> InferenceResponse:
        """Return the outputs for a batch.

        Raises EvidenceError if the server refuses it, RuntimeUnusable if gRPC can't send it.
        """
        size = sum(values.nbytes for values in batch.values())
        if size > MAX_REQUEST_BYTES:
            raise RuntimeUnusable(
                f"a batch has {size} bytes; a request over gRPC takes at most "
                f"{MAX_REQUEST_BYTES}. Send smaller batches (options: max_batch_size), or ask "
                "the server over HTTP."
            )
        inputs, contents = [], []
        for name, values in batch.items():
            array = np.ascontiguousarray(values)
            inputs.append(
                service_pb2.ModelInferRequest.InferInputTensor(
                    name=name, shape=array.shape, datatype=DATATYPES[array.dtype.name]
                )
            )
            contents.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
        output_request = service_pb2.ModelInferRequest.InferRequestedOutputTensor
        request = service_pb2.ModelInferRequest(
            model_name=self._model,
            model_version=self._version,
            id=identity,
            inputs=inputs,
            outputs=[output_request(name=name) for name in self._outputs],
            raw_input_contents=contents,
        )
        answer = self._call("ModelInfer", request, service_pb2.ModelInferResponse)
        return InferenceResponse(
            answer.id,
            answer.model_name or None,
            answer.model_version,
            read_outputs(self._options.url, _tensors(answer), self._outputs),
        )

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()

    def _call(self, method: str, request: Any, response: Any) -> Any:
        """Return the response to a request, as an object of the class `response`."""
        url, limit = self._options.url, self._options.timeout_s
        with self._channel() as channel:
            call = channel.unary_unary(f"{_SERVICE}/{method}", type(request).SerializeToString)
            try:
                received = call(request, timeout=limit, metadata=self._headers)
            except grpc.RpcError as error:
                code, details = error.code().name, (error.details() or "without a text")[:300]
                if code == "DEADLINE_EXCEEDED":
                    raise RuntimeUnusable(timeout_message(url, limit)) from error
                is_refusal = code in _REFUSED and method == "ModelInfer"
                kind = EvidenceError if is_refusal else RuntimeUnusable
                raise kind(f"{url} failed with the gRPC status {code}: {details}.") from error
        try:
            return response.FromString(received)
        except DecodeError as error:
            raise RuntimeUnusable(
                f"{url} did not answer with a {response.DESCRIPTOR.name}: {error}."
            ) from error

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Any]:
        try:
            channel = self._idle.pop()
        except IndexError:
            channel = self._connect()
            self._channels.append(channel)
        try:
            yield channel
        finally:
            self._idle.append(channel)

    def _connect(self) -> Any:
        parts = urlsplit(self._options.url)
        if parts.scheme == "grpc":
            return grpc.insecure_channel(parts.netloc, options=_CHANNEL)
        credentials = grpc.ssl_channel_credentials(root_certificates=self._certificates)
        return grpc.secure_channel(parts.netloc, credentials, options=_CHANNEL)


def _tensors(answer: Any) -> Iterator[tuple[Mapping[str, Any], memoryview | None]]:
    """Yield each output, with its bytes if the server sends them. Raises as `read_outputs`
    expects."""
    raw = answer.raw_output_contents
    if raw and len(raw) != len(answer.outputs):
        raise ValueError(f"{len(answer.outputs)} outputs with the bytes of {len(raw)}")
    for index, tensor in enumerate(answer.outputs):
        spec = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if raw:
            yield spec, memoryview(raw[index])
        else:
            data = list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
            yield {**spec, "data": data}, None


def _parameters(metadata: Any) -> dict[str, str]:
    """Return the parameters in a model's metadata as strings."""
    parameters = {}
    for field in UnknownFieldSet(metadata):
        if field.field_number == _METADATA_PARAMETERS and isinstance(field.data, bytes):
            with contextlib.suppress(DecodeError):
                entry = service_pb2.ModelInferRequest.ParametersEntry.FromString(field.data)
                parameters[entry.key] = entry.value.string_param
    return parameters
