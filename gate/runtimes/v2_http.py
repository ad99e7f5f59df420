"""A client of the Open Inference Protocol V2 over HTTP, with JSON or binary tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

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
from gate.storage.bounded_http import BoundedHttp
from gate.storage.safe_text import make_printable

_BINARY = "binary_tensor_data"
"""Name of the extension in a server's metadata."""

_HEADER_LENGTH = "Inference-Header-Content-Length"

_UNAVAILABLE = (401, 403, 404, 408, 429, 502, 503, 504)
"""Status codes about the server or the way to it; others from 400 on are about the request."""


class HttpClient:
    """Sends requests to one server, each with a deadline."""

    def __init__(self, options: ServerOptions, outputs: Sequence[str] = ()) -> None:
        """`outputs`: names of the outputs to request.

        Raises RuntimeUnusable for a variable that is unset or not a valid header, or certificates
        that can't be loaded.
        """
        self._options, self._outputs = options, outputs
        self._binary = options.encoding == "binary"
        self._headers = dict(options.secret_headers())
        count = max((1, *options.connections))
        try:
            # Connecting again is safe; a request that was sent may have been computed.
            self._http = BoundedHttp(options.timeout_s, ca=options.ca, connections=count, retries=2)
        except OSError as error:  # also of ssl
            raise certificates_error(str(options.ca), error) from error

    @property
    def encoding(self) -> str:
        """Encoding of the tensors."""
        return "binary" if self._binary else "json"

    def get(self, url: str) -> dict[str, Any]:
        """Return the JSON object at a URL. Raises RuntimeUnusable."""
        status, _, body = self._exchange("GET", url)
        if status != 200:
            raise RuntimeUnusable(_refusal(url, status, body))
        return _parse_object(url, body)

    def server(self) -> dict[str, Any]:
        """Return the server's metadata, whose extensions determine the encoding."""
        metadata = self.get(self._options.parts[0])
        if self._options.encoding == "auto":
            extensions = metadata.get("extensions")
            self._binary = isinstance(extensions, list) and _BINARY in extensions
        return metadata

    def model(self) -> dict[str, Any]:
        """Return the metadata of the model."""
        return self.get(self._options.url.rstrip("/"))

    def infer(self, batch: Batch, identity: str) -> InferenceResponse:
        """Return the outputs for a batch."""
        header, data = self._encode(batch, identity)
        headers = {"Content-Type": "application/json"}
        if self._binary:
            headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
        url = self._options.url.rstrip("/")
        content = b"".join([header, *data])
        status, received, body = self._exchange("POST", f"{url}/infer", content, headers)
        if status != 200:
            is_refusal = status >= 400 and status not in _UNAVAILABLE
            raise (EvidenceError if is_refusal else RuntimeUnusable)(_refusal(url, status, body))
        return self._parse(received, body)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _encode(self, batch: Batch, identity: str) -> tuple[bytes, list[bytes]]:
        """Return the JSON of a request, and the bytes of binary tensors."""
        inputs, data = [], []
        for name, values in batch.items():
            array = np.ascontiguousarray(values)
            tensor: dict[str, Any] = {
                "name": name,
                "shape": list(array.shape),
                "datatype": DATATYPES[array.dtype.name],
            }
            if self._binary:
                raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
                tensor["parameters"] = {"binary_data_size": len(raw)}
                data.append(raw)
            else:
                tensor["data"] = array.reshape(-1).tolist()
            inputs.append(tensor)
        outputs: list[dict[str, Any]] = [{"name": name} for name in self._outputs]
        if self._binary:
            outputs = [{**output, "parameters": {"binary_data": True}} for output in outputs]
        return json.dumps({"id": identity, "inputs": inputs, "outputs": outputs}).encode(), data

    def _parse(self, headers: Mapping[str, str], body: bytes) -> InferenceResponse:
        url = self._options.url
        length = headers.get(_HEADER_LENGTH)
        try:
            split = len(body) if length is None else int(length)
        except ValueError as error:
            raise RuntimeUnusable(f"{url}: {_HEADER_LENGTH} is {length!r}.") from error
        answer, rest = _parse_object(url, body[:split]), memoryview(body)[split:]
        if "outputs" not in answer:
            raise RuntimeUnusable(_refusal(url, 200, body))

        def tensors() -> Iterator[tuple[Mapping[str, Any], memoryview | None]]:
            nonlocal rest
            for tensor in answer["outputs"]:
                size = (tensor.get("parameters") or {}).get("binary_data_size")
                if size is not None and not 0 <= size <= len(rest):
                    raise ValueError(f"{len(rest)} bytes are left of {size}")
                yield tensor, None if size is None else rest[:size]
                rest = rest[size or 0 :]

        outputs = read_outputs(url, tensors(), self._outputs)
        if rest:
            raise RuntimeUnusable(f"{url} answered with {len(rest)} bytes too many.")
        return InferenceResponse(
            answer.get("id"), answer.get("model_name"), str(answer.get("model_version") or ""),
            outputs,
        )  # fmt: skip

    def _exchange(
        self,
        method: str,
        url: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        import httpx

        # digest_url may have another host, which must not receive the server's token.
        secret = self._headers if _origin(url) == _origin(self._options.url) else {}
        headers = {**secret, **(headers or {})}
        # A server may close an idle connection just when it is reused. Repeating the computation is
        # safe.
        with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            return self._exchange_once(method, url, content, headers)
        try:
            return self._exchange_once(method, url, content, headers)
        except httpx.HTTPError as error:
            raise RuntimeUnusable(_no_answer_message(url, error)) from error

    def _exchange_once(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        import httpx

        try:
            with self._http.exchange(method, url, content, headers) as response:
                encoding = response.headers.get("content-encoding", "identity")
                if encoding != "identity":
                    raise RuntimeUnusable(
                        f"{url} answered with the content encoding {encoding!r:.200}, expected "
                        "none. Let no proxy compress its answers."
                    )
                if response.is_redirect:
                    target = response.headers.get("location", "nowhere")
                    raise RuntimeUnusable(
                        f"{url} redirects to {target:.200}, and redirects are not followed. Give "
                        "the URL of the server itself."
                    )
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise RuntimeUnusable(f"{url} sent more than {MAX_BYTES} bytes.")
                return response.status_code, response.headers, bytes(body)
        except TimeoutError as error:
            raise RuntimeUnusable(timeout_message(url, self._options.timeout_s)) from error
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            raise
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise RuntimeUnusable(_no_answer_message(url, error)) from error


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _no_answer_message(url: str, error: Exception) -> str:
    return (
        f"no answer from {url}: {type(error).__name__}: {error}. Look whether the server runs, and "
        "at proxies and certificates."
    )


def _refusal(url: str, status: int, body: bytes) -> str:
    text = make_printable(body[:300].decode(errors="replace"))
    return f"{url} answered with status {status}: {text or 'without a text'}."


def _parse_object(url: str, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RuntimeUnusable(f"{url} did not answer with JSON: {error}.") from error
    if not isinstance(value, dict):
        raise RuntimeUnusable(f"{url} answered with {type(value).__name__}, expected an object.")
    return value
