"""Measure a live model server over the Open Inference Protocol V2 (HTTP or gRPC)."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np

from gate.errors import DigestMismatch, EvidenceError, PolicyError, RuntimeUnusable
from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.records.evidence import BatchAxes, TensorSpec
from gate.records.runtime import SERVER, RuntimeName
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.runtimes.v2_http import HttpClient
from gate.runtimes.v2_protocol import DATATYPES, Client, InferenceResponse, ServerOptions
from gate.storage.arrays import Batch, RuntimeArray
from gate.storage.digest import Digest
from gate.storage.safe_text import make_printable

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})", re.IGNORECASE)

_DIGEST_KEYS = ("sha256", "model_sha256", "content_sha256")
"""Parameters of a model's metadata that may contain the digest of its file."""

_LONGEST_NAME = 200
"""Maximum length of names and versions from a server."""


@dataclass(frozen=True)
class ServedFile:
    """The file that a server must have."""

    sha256: Digest
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    batch_axes: BatchAxes | None = None
    """None: axis 0 of all inputs and outputs."""

    def parts(self, batch: Batch, limit: int) -> list[Batch]:
        """Split a batch into parts of at most `limit` samples; not if an input or output has no
        batch axis."""
        axes = {name: self._axis("inputs", name) for name in batch}
        if any(axis is not None and batch[name].ndim <= axis for name, axis in axes.items()):
            return [batch]
        sizes = {batch[name].shape[axis] for name, axis in axes.items() if axis is not None}
        is_indivisible = any(self._axis("outputs", spec.name) is None for spec in self.outputs)
        if is_indivisible or len(sizes) != 1:
            return [batch]
        return [
            {
                name: array if axes[name] is None else _slice_rows(array, axes[name], start, limit)
                for name, array in batch.items()
            }
            for start in range(0, sizes.pop(), limit)
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


def _slice_rows(array: RuntimeArray, axis: int | None, start: int, count: int) -> RuntimeArray:
    return array[(slice(None),) * (axis or 0) + (slice(start, start + count),)]


class ServerSession(Session):
    """One model of one server."""

    def __init__(self, file: ServedFile, options: ServerOptions, example: Batch) -> None:
        """Raises DigestMismatch if the server has another file, RuntimeUnusable if it does not
        answer or does not prove which file it has."""
        self._options, self._file = options, file
        self.connections = options.connections
        self.rate = options.rate
        _, self._model, self._version = options.parts
        self._client = _connect(options, [spec.name for spec in file.outputs])
        self._numbers = itertools.count()
        try:
            self._server = self._client.server()
            self._metadata = self._client.model()
            self._check_datatypes()
            self._digest_source = self._verify_digest()
            self._check_inputs()
            self._answered = self._version or ""
            self._example = example
            self._check_strictness()
        except BaseException:
            self._client.close()
            raise

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Run a batch. Raises EvidenceError if the server refuses the request, RuntimeUnusable for
        an answer that is missing, incomplete, or invalid."""
        limit = self._options.max_batch_size
        parts = [batch] if limit is None else self._file.parts(batch, limit)
        outputs = [self._infer(part) for part in parts]
        return outputs[0] if len(outputs) == 1 else self._file.joined(outputs)

    def run_at_once(
        self, batches: Sequence[Batch], connections: int, rate: float | None = None
    ) -> tuple[list[list[RuntimeArray]], list[float], float]:
        """Send each batch as one request from `connections` concurrent clients.

        Return the outputs in the order of `batches`, the seconds of each request, and the total
        seconds. `rate`: requests per second of an open loop, which does not wait for answers; each
        request is timed from its scheduled time.
        """
        with ThreadPoolExecutor(connections) as pool:
            list(pool.map(lambda _: self.run(self._example), range(connections)))  # warm-up
            start = time.perf_counter()

            def run_when_due(index: int) -> tuple[list[RuntimeArray], float]:
                due = start + index / rate if rate else time.perf_counter()
                time.sleep(max(0.0, due - time.perf_counter()))
                outputs = self.run(batches[index])
                return outputs, time.perf_counter() - due

            results = list(pool.map(run_when_due, range(len(batches))))
            total = time.perf_counter() - start
        return [outputs for outputs, _ in results], [seconds for _, seconds in results], total

    def proof(self) -> Proof:
        """Return the proof from the metadata of the server and its model."""
        name, version, platform = (
            make_printable(str(text or ""))[:_LONGEST_NAME]
            for text in (
                self._server.get("name", "unknown"),
                self._server.get("version"),
                self._metadata.get("platform"),
            )
        )
        return Proof(
            providers_active=(SERVER,),
            session_options={
                "server": f"{name} {version}".strip(),
                "model": self._model,
                "model_version": make_printable(self._answered)[:_LONGEST_NAME] or "not stated",
                "platform": platform or "not stated",
                "file": self._digest_source or "not proven",
                "encoding": self._client.encoding,
                "wrong_shape": "refused" if self._is_strict else "answered",
            },
            versions={name: version},
            own_process=True,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _check_datatypes(self) -> None:
        for spec in (*self._file.inputs, *self._file.outputs):
            if spec.dtype not in DATATYPES:
                raise RuntimeUnusable(
                    f"'{spec.name}' is {spec.dtype} in the file, which can't be exchanged with a "
                    f"server yet. Expected one of {', '.join(DATATYPES)}."
                )

    def _check_inputs(self) -> None:
        """Compare names and datatypes in the server's metadata with those of the file."""
        for kind, specs in (("inputs", self._file.inputs), ("outputs", self._file.outputs)):
            stated = self._metadata.get(kind) or []
            try:
                datatypes = {tensor["name"]: tensor["datatype"] for tensor in stated}
            except (TypeError, KeyError) as error:
                raise RuntimeUnusable(
                    f"the metadata of {self._model} lists its {kind} as {stated!r:.200}, expected "
                    "objects with name and datatype."
                ) from error
            expected = {spec.name: DATATYPES.get(spec.dtype, spec.dtype) for spec in specs}
            if datatypes and not expected.items() <= datatypes.items():
                raise EvidenceError(
                    f"the server's model {self._model} has the {kind} {datatypes!s:.500}, the file "
                    f"has {expected}. It serves another model."
                )

    def _verify_digest(self) -> str:
        """Return the proof that the server has this file; empty if unproven files are allowed."""
        expected = self._file.sha256.hex
        sources: list[str] = []
        for source, stated in self._reported_digests():
            sources.append(source)
            if stated != expected:
                raise DigestMismatch(
                    f"{source} of the server states the file sha256:{stated[:12]}, this one is "
                    f"sha256:{expected[:12]}. Deploy this file, or check the one that is served."
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
            with closing(HttpClient(self._options)) as client:
                digests = set(_digests_in(client.get(self._options.digest_url)))
            expected = self._file.sha256.hex
            for digest in [expected] if expected in digests else sorted(digests):
                yield "the digest URL", digest

    def _check_strictness(self) -> None:
        """Record whether the server refuses a request of a wrong shape, as it should."""
        self._is_strict = True
        batch = {name: array[..., np.newaxis, np.newaxis] for name, array in self._example.items()}
        try:
            outputs = self._infer(batch)
        except RuntimeUnusable:
            self._infer(self._example)  # raises if the server can't be asked at all
            return
        except EvidenceError:
            return
        usual = self._infer(self._example)
        self._is_strict = [output.shape for output in outputs] != [output.shape for output in usual]

    def _infer(self, batch: Batch) -> list[RuntimeArray]:
        """Return the outputs in the file's order."""
        identity = f"gate-{next(self._numbers)}"
        answer = self._client.infer(batch, identity)
        self._check_answer(answer, identity)
        arrays = []
        for spec in self._file.outputs:
            array = answer.outputs.get(spec.name)
            if array is None or array.dtype != spec.dtype:
                problem = "without it" if array is None else f"with {array.dtype}"
                raise RuntimeUnusable(
                    f"output '{spec.name}' is {spec.dtype} in the file; {self._options.url} "
                    f"answered {problem}."
                )
            arrays.append(array)
        return arrays

    def _check_answer(self, answer: InferenceResponse, identity: str) -> None:
        """Raise EvidenceError for an answer of another request, model or version."""
        if answer.identity not in (None, "", identity):
            raise EvidenceError(
                f"the server answered the request {answer.identity!r:.200} when '{identity}' was "
                "sent."
            )
        if answer.model not in (None, self._model):
            raise EvidenceError(
                f"the model {answer.model!r:.200} answered, '{self._model}' was asked."
            )
        version = answer.version
        if version and self._answered and version != self._answered:
            raise EvidenceError(
                f"version {version!r:.200} of {self._model} answered, '{self._answered}' did so "
                "far or was asked. Name one version in the URL (/versions/N)."
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


def _connect(options: ServerOptions, outputs: Sequence[str]) -> Client:
    if options.is_grpc:
        from gate.runtimes.v2_grpc import GrpcClient

        return GrpcClient(options, outputs)
    return HttpClient(options, outputs)


class ServerRuntime(Runtime):
    """A running model server."""

    name: ClassVar[RuntimeName] = SERVER
    promises = Promises(SERVER, "device")
    options = ServerOptions
    limit_s: ClassVar[float] = 600.0

    def absent_reason(self, options: Any) -> str | None:
        """Return that a client package is missing, or None. `open` contacts the server."""
        needed = [("httpx", "server")]
        if options.is_grpc:
            needed.append(("tritonclient", "server-grpc"))
        for package, extra in needed:
            if find_spec(package) is None:
                return (
                    f"the package {package} is not installed: pip install 'parity-gate[{extra}]'."
                )
        return None

    def versions(self) -> dict[str, str]:
        """Return the version of the HTTP client."""
        import httpx

        return {"httpx": httpx.__version__}

    def open(
        self, file: RunnableFile, *, options: Any, conditions: Conditions, example: Batch
    ) -> Session:
        """Open a session. Raises DigestMismatch, EvidenceError, RuntimeUnusable."""
        subject = file.subject
        served = ServedFile(subject.sha256, subject.inputs, subject.outputs, conditions.batch_axes)
        return ServerSession(served, options, example)


def with_server(policy: Policy, url: str) -> Policy:
    """Return the policy with the server at this URL.

    Without an entry in the policy, the built-in device bounds apply. Raises PolicyError if the
    policy has another URL.
    """
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
