"""The Open Inference Protocol V2: server options, and what both transports share."""

# The protocol: https://github.com/kserve/open-inference-protocol, with its binary tensor extension.

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self
from urllib.parse import unquote, urlsplit

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gate.errors import RuntimeUnusable
from gate.storage.arrays import Batch, RuntimeArray
from gate.storage.safe_text import shorten

DTYPES = {
    "BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
}  # fmt: skip

DATATYPES = {dtype: name for name, dtype in DTYPES.items()}

MAX_BYTES = (1 << 31) - 1
"""Largest size of a response, in bytes; it is also the largest limit that gRPC supports."""

_MODEL_URL = re.compile(r"((?i:https?|grpcs?)://.+/v2)/models/([^/]+)(?:/versions/([^/]+))?/?")

_GRPC = ("grpc", "grpcs")

_ENVIRONMENT = "env:"


class ServerOptions(BaseModel):
    """Address of the server and its model, and how requests are sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """`http://host:port/v2/models/NAME`, with `/versions/N` for one version. Schemes: `http`,
    `https`, and `grpc`, `grpcs` for gRPC."""
    headers: dict[str, Annotated[str, StringConstraints(pattern=r"^env:\w+$")]] = {}
    """Headers of each request to the host of `url`. Each value names an environment variable:
    `env:TOKEN`."""
    ca: str | None = None
    """File with certificates to trust instead of the system's."""
    timeout_s: Annotated[float, Field(gt=0.0, le=300.0)] = 30.0
    """Time limit for each request, from its first to its last byte, in seconds."""
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Larger batches are split into several requests, as clients of such a server do."""
    encoding: Literal["auto", "json", "binary"] = "auto"
    """Encoding over HTTP; `auto`: binary tensors if the server lists that extension."""
    connections: tuple[Annotated[int, Field(ge=1, le=256)], ...] = (1, 8, 32)
    """Numbers of concurrent clients; empty: concurrency is not measured."""
    rate: Annotated[float, Field(gt=0.0)] | None = None
    """Requests per second of the open-loop measurement; None: no open loop."""
    digest_url: str | None = None
    """URL of JSON with the `sha256` of the served file: the manifest of a deployed store."""
    allow_unproven_file: bool = False
    """Accept a server that does not report the digest of its file. The verdict states this."""

    @model_validator(mode="after")
    def _valid(self) -> Self:
        match = _MODEL_URL.fullmatch(self.url)
        if match is None or (self.is_grpc and urlsplit(match[1]).path != "/v2"):
            raise ValueError(
                f"url is '{self.url}', expected http(s)://HOST:PORT/v2/models/NAME, or the same "
                "with grpc(s), with /versions/N for one version"
            )
        if self.is_grpc and self.encoding != "auto":
            raise ValueError(f"encoding '{self.encoding}' is for http; leave it out with grpc")
        for url in filter(None, (self.url, self.digest_url)):
            parts = urlsplit(url)
            is_web = parts.scheme in ("http", "https") or url == self.url
            if not is_web or not parts.hostname:
                raise ValueError(f"the URL is '{url}', expected http(s)://HOST/PATH")
            if "@" in parts.netloc or (url == self.url and parts.query):
                raise ValueError("url: give tokens by headers: {Authorization: env:NAME}")
        return self

    @property
    def parts(self) -> tuple[str, str, str | None]:
        """Return the base address of the protocol, the model and its version."""
        match = _MODEL_URL.fullmatch(self.url)
        assert match is not None  # validated
        return match[1], unquote(match[2]), match[3] and unquote(match[3])

    @property
    def is_grpc(self) -> bool:
        """Return whether requests are sent over gRPC."""
        return urlsplit(self.url).scheme in _GRPC

    def secret_headers(self) -> Iterator[tuple[str, str]]:
        """Yield the headers with their values.

        Raises RuntimeUnusable for a variable that is unset or not a valid header.
        """
        for name, value in self.headers.items():
            variable = value.removeprefix(_ENVIRONMENT)
            if variable not in os.environ:
                raise RuntimeUnusable(f"the variable {variable} of the header {name} is not set.")
            text = os.environ[variable]
            if not (text.isascii() and text.isprintable() and text == text.strip()):
                raise RuntimeUnusable(  # without the text, which is a secret
                    f"the variable {variable} of the header {name} has a line break, a space at an "
                    "end or a character beyond ASCII, expected printable ASCII."
                )
            yield name, text


@dataclass(frozen=True)
class InferenceResponse:
    """The response of a server to one request."""

    identity: str | None
    """ID of the request, if the server returns it."""
    model: str | None
    version: str
    """Version of the model; empty: not stated."""
    outputs: Mapping[str, RuntimeArray]


class Client(Protocol):
    """Sends requests to one server, each with a deadline.

    Every method raises RuntimeUnusable if no complete answer arrives.
    """

    @property
    def encoding(self) -> str:
        """Encoding of the tensors."""

    def server(self) -> Mapping[str, Any]:
        """Return the metadata of the server."""

    def model(self) -> Mapping[str, Any]:
        """Return the metadata of the model."""

    def infer(self, batch: Batch, identity: str) -> InferenceResponse:
        """Return the outputs for a batch. Raises EvidenceError if the server refuses it."""

    def close(self) -> None:
        """Close the connections."""


def certificates_error(path: str, error: OSError) -> RuntimeUnusable:
    """Return the error for certificates that can't be loaded."""
    return RuntimeUnusable(
        f"the certificates of ca: {path} can't be loaded: {error.strerror or error}. Expected a "
        "file in PEM format."
    )


def timeout_message(url: str, limit: float) -> str:
    """Return the message for a server that exceeds the time limit."""
    return (
        f"{url} did not answer within {limit:g} s. Look at the server's log, or allow more "
        "(options: timeout_s)."
    )


def read_outputs(
    url: str, tensors: Iterable[tuple[Mapping[str, Any], memoryview | None]], names: Sequence[str]
) -> dict[str, RuntimeArray]:
    """Return the outputs with these names. Raises RuntimeUnusable for invalid tensors.

    tensors: name, datatype, shape and, without raw bytes, data of each output.
    """
    outputs: dict[str, RuntimeArray] = {}
    try:
        for tensor, raw in tensors:
            name = tensor["name"]
            if name not in names:
                continue
            if name in outputs:
                raise ValueError(f"the output {name!r} occurs twice")
            outputs[name] = _array(tensor, raw)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise RuntimeUnusable(
            f"{url} answered with outputs that can't be read: {type(error).__name__}: "
            f"{shorten(str(error), 200)}."
        ) from error
    return outputs


def _array(tensor: Mapping[str, Any], raw: memoryview | None) -> RuntimeArray:
    """Return one output. Raises KeyError, TypeError or ValueError for an invalid tensor."""
    dtype = np.dtype(DTYPES[tensor["datatype"]])
    shape = tuple(tensor["shape"])
    if any(type(size) is not int or size < 0 for size in shape):  # NumPy would infer -1
        raise ValueError(f"invalid shape {tensor['shape']}")
    if raw is None:
        plain = np.array(tensor["data"])
        with np.errstate(over="ignore"):  # becomes an infinity
            flat = np.array(tensor["data"], dtype=dtype)
        is_text = plain.dtype.kind == "U"
        if is_text or (dtype.kind in "biu" and not np.array_equal(flat, plain)):
            raise ValueError(f"its data are no numbers of {tensor['datatype']}")
    else:
        flat = np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)
    return flat.reshape(shape)
