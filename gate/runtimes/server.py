"""A live model server, asked over the Open Inference Protocol V2 (HTTP; JSON or binary tensors)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gate.errors import DigestMismatch, EvidenceError, PolicyError, RuntimeUnusable
from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.records.evidence import BatchAxes, TensorSpec
from gate.records.runtime import SERVER, RuntimeName
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch, RuntimeArray
from gate.storage.digest import Digest

# The protocol: https://github.com/kserve/open-inference-protocol, with its binary tensor extension.


_DATATYPES = {
    "BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
}  # fmt: skip

_NAMES = {dtype: name for name, dtype in _DATATYPES.items()}

_BINARY = "binary_tensor_data"
"""The extension's name in the metadata of a server."""

_HEADER_LENGTH = "Inference-Header-Content-Length"

_MOST_BYTES = 1 << 31
"""Of one response: a server that sends without end is cut off."""

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})", re.IGNORECASE)

_DIGEST_KEYS = ("sha256", "model_sha256", "content_sha256")
"""Parameters of a model's metadata that may hold the digest of its file."""

_TRANSIENT = (429, 502, 503, 504)

_MODEL_URL = re.compile(r"(.+/v2)/models/([^/]+)(?:/versions/([^/]+))?/?")

_ENVIRONMENT = "env:"


class ServerOptions(BaseModel):
    """The server and the model to ask, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """`http://host:port/v2/models/NAME`, with `/versions/N` for one version."""
    headers: dict[str, Annotated[str, StringConstraints(pattern=r"^env:\w+$")]] = {}
    """Headers of each request to the host of `url`; each value names a variable of the environment:
    `env:TOKEN`."""
    ca: str | None = None
    """A file of certificates to trust in place of the system's."""
    timeout_s: Annotated[float, Field(gt=0.0, le=300.0)] = 30.0
    """Within which each request must be answered, from its first to its last byte."""
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Larger batches are sent in several requests, as a client of such a server does."""
    encoding: Literal["auto", "json", "binary"] = "auto"
    """`auto`: binary tensors if the server lists that extension."""
    connections: tuple[Annotated[int, Field(ge=1, le=256)], ...] = (1, 8, 32)
    """Numbers of clients that ask at once; empty: concurrency is not measured."""
    rate: Annotated[float, Field(gt=0.0)] | None = None
    """Requests per second of the open loop; None: no open loop."""
    digest_url: str | None = None
    """JSON that states the `sha256` of the served file: the manifest of a deployed store."""
    allow_unproven_file: bool = False
    """Accept a server that does not state the digest of its file; the verdict says so."""

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if not _MODEL_URL.fullmatch(self.url) or urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(
                f"url is '{self.url}', expected http(s)://HOST:PORT/v2/models/NAME, with "
                "/versions/N for one version"
            )
        for url in filter(None, (self.url, self.digest_url)):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"the URL is '{url}', expected http(s)://HOST/PATH")
            if "@" in parts.netloc or (url == self.url and parts.query):
                raise ValueError("url: give tokens by headers: {Authorization: env:NAME}")
        return self

    @property
    def parts(self) -> tuple[str, str, str | None]:
        """The address of the protocol, the model and its version."""
        match = _MODEL_URL.fullmatch(self.url)
        assert match is not None  # validated
        return match[1], match[2], match[3]


_WATCH_S = 0.2
"""Seconds between two looks at the requests that are under way."""


class _Watchdog:
    """Cuts the connections of a client once a request takes longer than its limit: httpx limits
    each read alone, and a server may send one byte of a header after the other."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.has_cut = limit_s, False
        self._ends: dict[int, float] = {}
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-server-watchdog", daemon=True)
        self._thread.start()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep each new connection: the extension `trace` of httpx."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._streams.add(info["return_value"])

    @contextlib.contextmanager
    def watching(self) -> Iterator[float]:
        """Watch the request of the `with` block; gives the moment at which it must be over."""
        number, end = next(self._numbers), time.monotonic() + self.limit_s
        self._ends[number] = end
        try:
            yield end
        finally:
            del self._ends[number]

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_WATCH_S):
            if any(end < time.monotonic() for end in list(self._ends.values())):
                self.has_cut = True
                for stream in list(self._streams):
                    with contextlib.suppress(OSError):
                        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class _Client:
    """Requests to one server, each within a deadline."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises RuntimeUnusable for a variable that is not set or can't be a header, and for
        certificates that can't be loaded."""
        import httpx

        self._options = options
        verify: Any = True
        if options.ca is not None:
            import ssl

            try:
                verify = ssl.create_default_context(cafile=options.ca)
            except OSError as error:  # also of ssl
                raise RuntimeUnusable(
                    f"the certificates of ca: {options.ca} can't be loaded: "
                    f"{error.strerror or error}. Expected a file in PEM format."
                ) from error
        most = max((1, *options.connections))
        # Connecting again is safe; a request that was sent may have been computed.
        transport = httpx.HTTPTransport(
            verify=verify, retries=2, limits=httpx.Limits(max_connections=most)
        )
        self._headers = dict(_from_environment(options.headers))
        self._watchdog = _Watchdog(options.timeout_s)
        self._http = httpx.Client(
            transport=transport,
            timeout=options.timeout_s,
            trust_env=False,
        )

    def get(self, url: str) -> dict[str, Any]:
        """Return the JSON object at a URL. Raises RuntimeUnusable."""
        status, _, body = self._exchange("GET", url)
        if status != 200:
            raise RuntimeUnusable(_refusal(url, status, body))
        return _object(url, body)

    def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body. Raises RuntimeUnusable where no whole answer comes."""
        return self._exchange("POST", url, body, headers)

    def close(self) -> None:
        self._watchdog.close()
        self._http.close()

    def _exchange(
        self,
        method: str,
        url: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        import httpx

        # The host of a digest_url may be another, which must not get the server's token.
        secret = self._headers if _origin(url) == _origin(self._options.url) else {}
        headers = {**secret, **(headers or {})}
        # A server may close a connection that it kept, just when it is used again. To compute the
        # same again is safe.
        with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            return self._exchange_once(method, url, content, headers)
        try:
            return self._exchange_once(method, url, content, headers)
        except httpx.HTTPError as error:
            raise RuntimeUnusable(_no_answer(url, error)) from error

    def _exchange_once(
        self, method: str, url: str, content: bytes | None, headers: Any
    ) -> tuple[int, Mapping[str, str], bytes]:
        import httpx

        limit = self._options.timeout_s
        options: Any = {"headers": headers, "extensions": {"trace": self._watchdog.trace}}
        try:
            with (
                self._watchdog.watching() as end,
                self._http.stream(method, url, content=content, **options) as response,
            ):
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > _MOST_BYTES:
                        raise RuntimeUnusable(f"{url} sent more than {_MOST_BYTES} bytes.")
                    if time.monotonic() > end:
                        raise RuntimeUnusable(_slow(url, limit))
                if response.is_redirect:
                    raise RuntimeUnusable(
                        f"{url} redirects to {response.headers.get('location', 'nowhere')}, and "
                        "redirects are not followed. Give the URL of the server itself."
                    )
                return response.status_code, response.headers, bytes(body)
        except httpx.TimeoutException as error:
            raise RuntimeUnusable(_slow(url, limit)) from error
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            if self._watchdog.has_cut:
                raise RuntimeUnusable(_slow(url, limit)) from error
            raise
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise RuntimeUnusable(_no_answer(url, error)) from error


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _no_answer(url: str, error: Exception) -> str:
    return (
        f"no answer from {url}: {type(error).__name__}: {error}. Look whether the server runs, and "
        "at proxies and certificates."
    )


def _slow(url: str, limit: float) -> str:
    return (
        f"{url} did not answer within {limit:g} s. Look at the server's log, or allow more "
        "(options: timeout_s)."
    )


def _from_environment(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        variable = value.removeprefix(_ENVIRONMENT)
        if variable not in os.environ:
            raise RuntimeUnusable(f"the variable {variable} of the header {name} is not set.")
        text = os.environ[variable]
        if not (text.isascii() and text.isprintable() and text == text.strip()):  # it is a secret
            raise RuntimeUnusable(
                f"the variable {variable} of the header {name} has a line break, a space at an end "
                "or a character beyond ASCII, expected printable ASCII."
            )
        yield name, text


def _refusal(url: str, status: int, body: bytes) -> str:
    text = body[:300].decode(errors="replace").strip()
    return f"{url} answered with status {status}: {text or 'without a text'}."


def _object(url: str, body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise RuntimeUnusable(f"{url} did not answer with JSON: {error}.") from error
    if not isinstance(found, dict):
        raise RuntimeUnusable(f"{url} answered with {type(found).__name__}, expected an object.")
    return found


@dataclass(frozen=True)
class ServedFile:
    """The file that a server must have."""

    sha256: Digest
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    batch_axes: BatchAxes | None = None
    """None: axis 0 of all inputs and outputs."""

    def parts(self, batch: Batch, most: int) -> list[Batch]:
        """Split a batch into parts of at most `most` samples; a call that has no batch axis, or
        gives an output without one, stays whole."""
        axes = {name: self._axis("inputs", name) for name in batch}
        if any(axis is not None and batch[name].ndim <= axis for name, axis in axes.items()):
            return [batch]
        sizes = {batch[name].shape[axis] for name, axis in axes.items() if axis is not None}
        whole = any(self._axis("outputs", spec.name) is None for spec in self.outputs)
        if whole or len(sizes) != 1:
            return [batch]
        return [
            {
                name: array if axes[name] is None else _rows(array, axes[name], start, most)
                for name, array in batch.items()
            }
            for start in range(0, sizes.pop(), most)
        ] or [batch]

    def joined(self, parts: Sequence[Sequence[RuntimeArray]]) -> list[RuntimeArray]:
        """Join the outputs of the parts of a batch."""
        axes = [self._axis("outputs", spec.name) for spec in self.outputs]
        return [
            np.concatenate(arrays, axis=axis or 0)
            for axis, arrays in zip(axes, zip(*parts, strict=True), strict=True)
        ]

    def _axis(self, kind: Literal["inputs", "outputs"], name: str) -> int | None:
        return 0 if self.batch_axes is None else getattr(self.batch_axes, kind).get(name, 0)


def _rows(array: RuntimeArray, axis: int | None, start: int, count: int) -> RuntimeArray:
    return array[(slice(None),) * (axis or 0) + (slice(start, start + count),)]


class ServerSession(Session):
    """One model of one server."""

    def __init__(self, file: ServedFile, options: ServerOptions, example: Batch) -> None:
        """Raises DigestMismatch if the server has another file, RuntimeUnusable if it can't be
        asked or does not prove which file it has."""
        self._options, self._file = options, file
        self.connections = options.connections
        self.rate = options.rate
        base, self._model, self._version = options.parts
        self._client = _Client(options)
        self._numbers = itertools.count()
        try:
            self._server = self._client.get(base)
            self._metadata = self._client.get(options.url.rstrip("/"))
            self._binary = self._takes_binary()
            self._check_datatypes()
            self._proven_by = self._verify_digest()
            self._check_inputs()
            self._answered = self._version or ""
            self._example = example
            self._check_strictness()
        except BaseException:
            self._client.close()
            raise

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Raises EvidenceError for a request that the server refuses, RuntimeUnusable for an
        answer that is missing, incomplete, or not of this protocol."""
        most = self._options.max_batch_size
        parts = [batch] if most is None else self._file.parts(batch, most)
        outputs = [self._infer(part) for part in parts]
        return outputs[0] if len(outputs) == 1 else self._file.joined(outputs)

    def run_at_once(
        self, batches: Sequence[Batch], connections: int, rate: float | None = None
    ) -> tuple[list[list[RuntimeArray]], list[float], float]:
        """Run each batch as one request from so many clients: outputs in the order of `batches`,
        seconds by request, and seconds of all together.

        `rate`: requests per second at which they are sent, whether earlier ones were answered or
        not; a request that waits for a client is timed from when it was due.
        """
        with ThreadPoolExecutor(connections) as pool:
            list(pool.map(lambda _: self.run(self._example), range(connections)))  # warm-up
            start = time.perf_counter()

            def run_when_due(place: int) -> tuple[list[RuntimeArray], float]:
                due = start + place / rate if rate else time.perf_counter()
                time.sleep(max(0.0, due - time.perf_counter()))
                outputs = self.run(batches[place])
                return outputs, time.perf_counter() - due

            found = list(pool.map(run_when_due, range(len(batches))))
            whole = time.perf_counter() - start
        return [outputs for outputs, _ in found], [seconds for _, seconds in found], whole

    def proof(self) -> Proof:
        """Return what the server states about itself and its model."""
        name, version = str(self._server.get("name", "unknown")), self._server.get("version", "")
        return Proof(
            providers_active=(SERVER,),
            session_options={
                "server": f"{name} {version}".strip(),
                "model": self._model,
                "model_version": self._answered or "not stated",
                "platform": str(self._metadata.get("platform") or "not stated"),
                "file": self._proven_by or "not proven",
                "encoding": "binary" if self._binary else "json",
                "wrong_shape": "refused" if self._strict else "answered",
            },
            versions={name: str(version)},
            own_process=True,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _takes_binary(self) -> bool:
        extensions = self._server.get("extensions")
        listed = isinstance(extensions, list) and _BINARY in extensions
        if self._options.encoding == "auto":
            return listed
        return self._options.encoding == "binary"

    def _check_datatypes(self) -> None:
        for spec in (*self._file.inputs, *self._file.outputs):
            if spec.dtype not in _NAMES:
                raise RuntimeUnusable(
                    f"'{spec.name}' is {spec.dtype} in the file, which can't be exchanged with a "
                    f"server yet. Expected one of {', '.join(_NAMES)}."
                )

    def _check_inputs(self) -> None:
        """Compare names and datatypes that the server states with those of the file."""
        for kind, wanted in (("inputs", self._file.inputs), ("outputs", self._file.outputs)):
            stated = self._metadata.get(kind) or []
            try:
                found = {each["name"]: each["datatype"] for each in stated}
            except (TypeError, KeyError) as error:
                raise RuntimeUnusable(
                    f"the metadata of {self._model} lists its {kind} as {stated!r:.200}, expected "
                    "objects with name and datatype."
                ) from error
            expected = {spec.name: _NAMES.get(spec.dtype, spec.dtype) for spec in wanted}
            if found and not expected.items() <= found.items():
                raise EvidenceError(
                    f"the server's model {self._model} has the {kind} {found}, the file has "
                    f"{expected}. It serves another model."
                )

    def _verify_digest(self) -> str:
        """Return what proves that the server has this file; empty: nothing, which is allowed."""
        wanted = self._file.sha256.hex
        sources: list[str] = []
        for source, stated in self._reported_digests():
            sources.append(source)
            if stated != wanted:
                raise DigestMismatch(
                    f"{source} of the server states the file sha256:{stated[:12]}, this one is "
                    f"sha256:{wanted[:12]}. Deploy this file, or check the one that is served."
                )
        if sources:
            return f"sha256 by {sources[0]}"
        if not self._options.allow_unproven_file:
            raise RuntimeUnusable(
                f"the server does not state which file {self._model} is. Add the parameter sha256 "
                "to the model's metadata, name a digest_url, or accept that (options: "
                "allow_unproven_file: true)."
            )
        return ""

    def _reported_digests(self) -> Iterator[tuple[str, str]]:
        parameters = self._metadata.get("parameters")
        if isinstance(parameters, Mapping):
            for key in _DIGEST_KEYS:
                if match := _DIGEST.fullmatch(str(parameters.get(key, ""))):
                    yield "the metadata", match[1].lower()
                    break
        if self._options.digest_url is not None:
            found = set(_digests_in(self._client.get(self._options.digest_url)))
            wanted = self._file.sha256.hex
            for digest in [wanted] if wanted in found else sorted(found):
                yield "the digest URL", digest

    def _check_strictness(self) -> None:
        """Send a request of a wrong shape, which a server must refuse. A model that has no input
        with axes can't be asked so."""
        self._strict = True
        batch = {name: array[..., np.newaxis, np.newaxis] for name, array in self._example.items()}
        status, headers, body = self._send(batch, "shape")
        if status in _TRANSIENT:
            self._infer(self._example)  # raises if the server refuses every request
        if status == 200:
            try:
                outputs = self._parsed(headers, body, "shape")
                usual = self._infer(self._example)
            except (EvidenceError, RuntimeUnusable):
                return
            shapes = [output.shape for output in outputs]
            self._strict = shapes != [output.shape for output in usual]

    def _infer(self, batch: Batch) -> list[RuntimeArray]:
        identity = f"gate-{next(self._numbers)}"
        status, headers, body = self._send(batch, identity)
        if status in _TRANSIENT or status in (401, 403, 404):
            raise RuntimeUnusable(_refusal(self._options.url, status, body))
        if status != 200:
            raise EvidenceError(_refusal(self._options.url, status, body))
        return self._parsed(headers, body, identity)

    def _send(self, batch: Batch, identity: str) -> tuple[int, Mapping[str, str], bytes]:
        inputs, data = [], []
        for name, values in batch.items():
            array = np.ascontiguousarray(values)
            tensor: dict[str, Any] = {
                "name": name,
                "shape": list(array.shape),
                "datatype": _NAMES[array.dtype.name],
            }
            if self._binary:
                raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
                tensor["parameters"] = {"binary_data_size": len(raw)}
                data.append(raw)
            else:
                tensor["data"] = array.reshape(-1).tolist()
            inputs.append(tensor)
        outputs: list[dict[str, Any]] = [{"name": spec.name} for spec in self._file.outputs]
        if self._binary:
            outputs = [{**each, "parameters": {"binary_data": True}} for each in outputs]
        header = json.dumps({"id": identity, "inputs": inputs, "outputs": outputs}).encode()
        headers = {"Content-Type": "application/json"}
        if self._binary:
            headers = {
                "Content-Type": "application/octet-stream",
                _HEADER_LENGTH: str(len(header)),
            }
        url = f"{self._options.url.rstrip('/')}/infer"
        return self._client.post(url, b"".join([header, *data]), headers)

    def _parsed(self, headers: Mapping[str, str], body: bytes, identity: str) -> list[RuntimeArray]:
        """Return the outputs in the file's order."""
        url = self._options.url
        length = headers.get(_HEADER_LENGTH)
        try:
            split = len(body) if length is None else int(length)
        except ValueError as error:
            raise RuntimeUnusable(f"{url}: {_HEADER_LENGTH} is {length!r}.") from error
        answer, rest = _object(url, body[:split]), memoryview(body)[split:]
        self._check_answer(answer, identity)
        found = {}
        try:
            for tensor in answer["outputs"]:
                size = (tensor.get("parameters") or {}).get("binary_data_size")
                if size is not None and not 0 <= size <= len(rest):
                    raise ValueError(f"{len(rest)} bytes are left of {size}")
                if tensor["name"] in found:
                    raise ValueError(f"the output '{tensor['name']}' is there twice")
                found[tensor["name"]] = _tensor(tensor, None if size is None else rest[:size])
                rest = rest[size or 0 :]
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise RuntimeUnusable(
                f"{url} answered with outputs that can't be read: {type(error).__name__}: {error}."
            ) from error
        if rest:
            raise RuntimeUnusable(f"{url} answered with {len(rest)} bytes too many.")
        arrays = []
        for spec in self._file.outputs:
            array = found.get(spec.name)
            if array is None or array.dtype != spec.dtype:
                what = "without it" if array is None else f"with {array.dtype}"
                raise RuntimeUnusable(
                    f"output '{spec.name}' is {spec.dtype} in the file; {url} answered {what}."
                )
            arrays.append(array)
        return arrays

    def _check_answer(self, answer: Mapping[str, Any], identity: str) -> None:
        """Raise EvidenceError for an answer of another request, model or version."""
        stated = answer.get("id")
        if stated not in (None, "", identity):
            raise EvidenceError(
                f"the server answered the request '{stated}' when '{identity}' was sent."
            )
        model, version = answer.get("model_name"), str(answer.get("model_version") or "")
        if model not in (None, self._model):
            raise EvidenceError(f"the model '{model}' answered, '{self._model}' was asked.")
        if version and self._answered and version != self._answered:
            raise EvidenceError(
                f"version '{version}' of {self._model} answered, '{self._answered}' did so far or "
                "was asked. Name one version in the URL (/versions/N)."
            )
        self._answered = self._answered or version


def _digests_in(value: Any) -> Iterator[str]:
    """Yield each `sha256` within a JSON value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            match = _DIGEST.fullmatch(inner) if isinstance(inner, str) else None
            if key in _DIGEST_KEYS and match:
                yield match[1].lower()
            yield from _digests_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _digests_in(inner)


def _tensor(tensor: Mapping[str, Any], raw: memoryview | None) -> RuntimeArray:
    """Return one output. Raises KeyError, TypeError or ValueError for an invalid tensor."""
    dtype = np.dtype(_DATATYPES[tensor["datatype"]])
    shape = tuple(int(size) for size in tensor["shape"])
    if any(size < 0 for size in shape):  # NumPy would infer it
        raise ValueError(f"its shape is {tensor['shape']}")
    if raw is None:
        flat = np.array(tensor["data"], dtype=dtype)
        if dtype.kind in "biu" and not np.array_equal(flat, np.array(tensor["data"])):
            raise ValueError(f"its data are no numbers of {tensor['datatype']}")
    else:
        flat = np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)
    return flat.reshape(shape)


class ServerRuntime(Runtime):
    """A model server that runs elsewhere."""

    name: ClassVar[RuntimeName] = SERVER
    promises = Promises(SERVER, "device")
    options = ServerOptions
    limit_s: ClassVar[float] = 600.0

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - a server is asked at `open`
        """Return that httpx is missing, or None."""
        if find_spec("httpx") is not None:
            return None
        return "the package httpx is not installed: pip install 'parity-gate[server]'."

    def versions(self) -> dict[str, str]:
        """Return the version of the HTTP client."""
        import httpx

        return {"httpx": httpx.__version__}

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,
        conditions: Conditions,
        example: Batch,
    ) -> Session:
        """Raises DigestMismatch, EvidenceError, RuntimeUnusable, as `ServerSession`."""
        subject = file.subject
        served = ServedFile(subject.sha256, subject.inputs, subject.outputs, conditions.batch_axes)
        return ServerSession(served, options, example)


def with_server(policy: Policy, url: str) -> Policy:
    """Return the policy with the server at this URL, by the built-in bounds of devices, if the
    policy has no entry for it. Raises PolicyError for another URL than the policy's."""
    plain = policy.to_plain()
    stated = policy.runtimes.get(SERVER)
    if stated is None:
        bounds = exact_bounds("device", classes=policy.task != "tensors").to_plain()
        plain["runtimes"][SERVER] = {"bounds": bounds, "options": {}}
    entry = plain["runtimes"][SERVER]
    entry["required"] = "always"
    entry["options"] = {**entry.get("options", {}), "url": url}
    try:
        return Policy.from_json(json.dumps(plain))
    except EvidenceError as error:
        raise PolicyError(f"the policy with the server {url}: {error}") from error
