"""A file that is open in a page, and the proof that it was this file and nothing else was asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import psutil

from gate.errors import EvidenceError, OutputMismatch
from gate.onnxfile.candidate import WithData
from gate.records.runtime import CPU_PROVIDER
from gate.runtimes.browser import frame, package
from gate.runtimes.browser.chromium_page import opened_page
from gate.runtimes.browser.placement import placed, strays
from gate.runtimes.browser.server import OnDisk, PageServer
from gate.runtimes.runtime import Array, Batch, Proof, RunnableFile, Session
from gate.storage.digest import Digest


@dataclass(frozen=True)
class Engine:
    """What of onnxruntime-web computes, and where."""

    provider: str
    """`wasm` or `webgpu`: of the session's `executionProviders`."""
    log_name: str
    """The same in ONNX Runtime's own log."""
    files: tuple[str, str, str]
    """The module, the glue of WebAssembly, and WebAssembly itself."""
    gpu: bool = False


ENGINES = {
    "wasm": Engine(
        "wasm",
        CPU_PROVIDER,
        ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
    ),
    "webgpu": Engine(
        "webgpu",
        "WebGpuExecutionProvider",
        (
            "ort.webgpu.min.mjs",
            "ort-wasm-simd-threaded.asyncify.mjs",
            "ort-wasm-simd-threaded.asyncify.wasm",
        ),
        gpu=True,
    ),
}
"""By provider, as a runtime promises it."""


@dataclass(frozen=True)
class PageSettings:
    """How the session is to be made."""

    threads: int
    level: str
    software: bool = False


class BrowserSession(Session):
    """One page for the whole measurement."""

    def __init__(self, file: RunnableFile, engine: Engine, settings: PageSettings) -> None:
        """Raises DigestMismatch for a file or an onnxruntime-web of other bytes, OutputMismatch
        for another file's inputs and outputs, EvidenceError where the page breaks."""
        self._subject = file.subject
        self._engine = engine
        self._settings = settings
        with contextlib.ExitStack() as stack:
            self._server = stack.enter_context(PageServer())
            question = self._question(file)
            self._page = stack.enter_context(
                opened_page(self._server, gpu=engine.gpu, software=settings.software)
            )
            self._adapter = self._page.call("adapter") if engine.gpu else None
            self._before = _chromium_bytes()
            start = time.perf_counter()
            self._opened: Mapping[str, Any] = self._page.call("open", question)
            self.open_seconds = time.perf_counter() - start
            for _, place in question["files"]:
                self._server.remove(place)
            self._check()
            self._placed, names = placed(self._opened["placements"])
            self._elsewhere = strays(names, engine.log_name, lambda: _model(file))
            self._stack = stack.pop_all()

    def run(self, batch: Batch) -> list[Array]:
        """Raises OutputMismatch for outputs that are not the file's, EvidenceError where the page
        breaks."""
        self._server.put("batch", frame.pack(batch))
        seconds = float(self._page.call("run"))
        body = self._server.take_outputs()
        if body is None:
            raise EvidenceError(
                "the page ran a batch and sent no outputs, expected all of the file. "
                "Measure again; if it stays so, the page is not the gate's."
            )
        outputs = frame.unpack(body)
        self._same("outputs", list(outputs))
        self.seconds = seconds
        return list(outputs.values())

    def proof(self) -> Proof:
        """Raises EvidenceError where the page asked for anything beyond 127.0.0.1."""
        if self._page.strange:
            raise EvidenceError(
                f"the page asked for {self._page.strange[0]}, expected nothing beyond 127.0.0.1: "
                "what computes may be something else than what was installed. It got no answer; "
                f"find out where {package.NAME} has that from."
            )
        ran = self._placed.get(self._engine.log_name, 0) > 0
        return Proof(
            providers_active=(self._engine.provider,) if ran else tuple(self._placed),
            nodes_per_provider=self._placed,
            fallback_nodes=self._elsewhere,
            session_options={
                "graphOptimizationLevel": self._settings.level,
                "numThreads": str(self._opened["threads"]),
                "crossOriginIsolated": str(self._opened["isolated"]).lower(),
            },
            versions={package.NAME: self._opened["version"], "Chromium": self._page.version},
            device=_device(self._adapter),
            precision="float32",
            memory_bytes=self._grown(),
            own_process=True,
        )

    def _grown(self) -> int | None:
        now = _chromium_bytes()
        return None if now is None or self._before is None else max(0, now - self._before)

    def close(self) -> None:
        """End Chromium."""
        self._stack.close()

    def _question(self, file: RunnableFile) -> dict[str, Any]:
        """What the page is to open, with all of it on the server."""
        module, glue, wasm = self._engine.files
        for name in self._engine.files:
            self._server.put(name, package.read(name))
        return {
            "provider": self._engine.provider,
            "engine": self._server.address + module,
            "glue": self._server.address + glue,
            "wasm": wasm,
            "threads": self._settings.threads,
            "level": self._settings.level,
            "files": [
                (name, self._server.put(f"file-{place}", content))
                for place, (name, content) in enumerate(_contents(file).items())
            ],
        }

    def _check(self) -> None:
        """What was opened is what was to be opened, by what the page computed and says."""
        digests = dict(self._opened["digests"])
        wasm = self._engine.files[2]
        Digest(package.FILES[wasm]).verify(Digest(digests.pop("")), what=f"{wasm} in the page")
        if self._subject.external_data:
            found = Digest.of_json(digests)
        else:
            (only,) = digests.values()
            found = Digest(only)
        self._subject.sha256.verify(found, what="the file in the page")
        if self._opened["version"] != package.VERSION:
            raise EvidenceError(
                f"the page has {package.NAME} {self._opened['version']}, expected "
                f"{package.VERSION}. Install it again: gate runtimes install browser-wasm."
            )
        if self._opened["threads"] != self._settings.threads:
            raise EvidenceError(
                f"the page computes with {self._opened['threads']} threads, asked for "
                f"{self._settings.threads}. This Chromium gives a page no more: set options: "
                f"{{threads: {self._opened['threads']}}}."
            )
        self._same("inputs", self._opened["inputs"])
        self._same("outputs", self._opened["outputs"])

    def _same(self, side: str, names: list[str]) -> None:
        specs = self._subject.inputs if side == "inputs" else self._subject.outputs
        wanted = [spec.name for spec in specs]
        if names != wanted:
            raise OutputMismatch(
                f"the page has the {side} {names}, the record of the file says {wanted}. Another "
                "file is open in it, or not all of its outputs came back."
            )


def _contents(file: RunnableFile) -> dict[str, bytes | OnDisk]:
    """Bytes by name, the model first; those of external data are read when the page asks."""
    name = file.path.name
    loadable = file.candidate.loadable()
    if isinstance(loadable, bytes):
        return {name: loadable}
    if isinstance(loadable, WithData):
        return {name: loadable.model, **loadable.data}
    names = (name, *file.subject.external_data)
    return {each: OnDisk(file.path.parent / each) for each in names}


def _model(file: RunnableFile) -> onnx.ModelProto:
    """Of the very bytes that are in the page, without external data."""
    model = file.candidate.loadable()
    if isinstance(model, str):
        return onnx.load(model, load_external_data=False)
    parsed = onnx.ModelProto()
    parsed.ParseFromString(model.model if isinstance(model, WithData) else model)
    return parsed


def _device(adapter: Mapping[str, Any] | None) -> str | None:
    if adapter is None:
        return None
    words = (adapter["vendor"], adapter["architecture"], adapter["description"])
    text = " ".join(word for word in words if word) or "an adapter without a name"
    return f"{text} (software)" if adapter["software"] else text


def _chromium_bytes() -> int | None:
    """Memory that the processes of Chromium have for themselves; most of the rest is shared. None:
    there is one that may not be looked at, as in Chromium's own sandbox, or there is none."""
    found = []
    try:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                found.append(process.memory_full_info().uss)
    except (psutil.Error, OSError):
        return None
    return int(sum(found)) if found else None
