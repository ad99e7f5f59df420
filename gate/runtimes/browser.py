"""onnxruntime-web in headless Chromium: wasm and WebGPU."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import onnx
import psutil
from pydantic import BaseModel, ConfigDict, Field

from gate.errors import EvidenceError, OutputMismatch
from gate.installation import chromium_missing
from gate.onnx_file.reading import WithData
from gate.onnx_file.shape_nodes import is_shape_node, shape_nodes
from gate.records.runtime import CPU_PROVIDER
from gate.runtimes import browser_page
from gate.runtimes.browser_page import PageServer, opened_page
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch, RuntimeArray
from gate.storage.digest import Digest

# onnxruntime-web logs `Node(s) placed on [X]. Number of nodes: 3` and, with several providers, a
# line `Conv (/conv/Conv)` for each of their nodes.
_COUNT = re.compile(r"nodes placed on \[(\w+)\]\. Number of nodes: (\d+)", re.IGNORECASE)

_NODE = re.compile(r"(\w+) \((.*)\)")


def parse_placements(lines: Iterable[str]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return the number of nodes per provider and, with several providers, their names.

    Names are `op_type:node_name`. Raises EvidenceError if the log does not contain this.
    """
    counts: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    provider = ""
    for line in lines:
        count, node = _COUNT.search(line.replace("(s)", "s")), _NODE.fullmatch(line)
        if count:
            provider = count[1]
            counts[provider] = counts.get(provider, 0) + int(count[2])
        elif node and provider:
            names.setdefault(provider, []).append(f"{node[1]}:{node[2]}")
    if not counts:
        raise EvidenceError(
            "the log of onnxruntime-web does not name the provider of the nodes, so it is unknown "
            "what computed them. The log format may differ from that of the pinned version."
        )
    return dict(sorted(counts.items())), {name: tuple(nodes) for name, nodes in names.items()}


def fallback_nodes(
    names: Mapping[str, tuple[str, ...]], provider: str, model: Callable[[], onnx.ModelProto]
) -> tuple[str, ...]:
    """Return the nodes that are on another provider than `provider`, except shape computations.

    model: reads the file without external data.
    """
    fallbacks = [name for other in names if other != provider for name in names[other]]
    if not fallbacks:
        return ()
    excused = shape_nodes(model())
    return tuple(name for name in fallbacks if not is_shape_node(name, excused))


_GPU_DEVICES = (Path("/dev/dri"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""If none of these exists, Linux has no GPU, and Chromium need not be started to find out."""

Level = Literal["disabled", "basic", "extended", "layout", "all"]


class WasmOptions(BaseModel):
    """The options that a page passes to `InferenceSession.create`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of threads; None: as for the other runtimes."""
    graph_optimization_level: Level = "all"


class WebGpuOptions(WasmOptions):
    """The options of WebAssembly, and the accepted adapters."""

    software_adapter: bool = False
    """Accept an adapter that computes on the CPU: for testing shaders, not a device."""


class BrowserWasmRuntime(Runtime):
    """onnxruntime-web with WebAssembly and SIMD."""

    promises = Promises("wasm")
    options: ClassVar[type[BaseModel]] = WasmOptions

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - no option brings it
        """Return what is missing: Playwright, Chromium or onnxruntime-web."""
        return chromium_missing("browser") or browser_page.missing()

    def versions(self) -> dict[str, str]:
        """Return the version of onnxruntime-web.

        Raises DigestMismatch if one of its files was changed.
        """
        for name in browser_page.FILES:
            browser_page.read(name)
        return {browser_page.NAME: browser_page.VERSION}

    def install(self) -> bool:
        """Install onnxruntime-web (`gate.runtimes.browser_page.install`)."""
        return browser_page.install()

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,
        conditions: Conditions,
        example: Batch,  # noqa: ARG002 - nothing is traced
    ) -> Session:
        """Open a `BrowserSession`."""
        settings = PageSettings(
            threads=options.threads or conditions.threads,
            level=options.graph_optimization_level,
            software=isinstance(options, WebGpuOptions) and options.software_adapter,
        )
        return BrowserSession(file, ENGINES[self.promises.provider], settings)


class BrowserWebGpuRuntime(BrowserWasmRuntime):
    """onnxruntime-web with WebGPU."""

    promises = Promises("webgpu", "device")
    options: ClassVar[type[BaseModel]] = WebGpuOptions

    def absent_reason(self, options: Any) -> str | None:
        """Return what is missing, including a WebGPU adapter, which Chromium is asked for."""
        return super().absent_reason(options) or self._without_adapter(options)

    def _without_adapter(self, options: WebGpuOptions) -> str | None:
        software = options.software_adapter
        on_linux = sys.platform == "linux"
        if on_linux and not software and not any(device.exists() for device in _GPU_DEVICES):
            devices = ", ".join(map(str, _GPU_DEVICES))
            return f"no GPU on this machine, so no WebGPU adapter: there is none of {devices}."
        with PageServer() as server, opened_page(server, gpu=True, software=software) as page:
            adapter = page.call("adapter")
        if adapter is None:
            return "Chromium finds no WebGPU adapter: navigator.gpu.requestAdapter() gives null."
        if adapter["software"] and not software:
            return (
                "Chromium finds only a WebGPU adapter that computes on the CPU: "
                f"{adapter['description'] or adapter['architecture']}. It takes a GPU and its "
                "Vulkan driver, or options: {software_adapter: true}."
            )
        return None


@dataclass(frozen=True)
class Engine:
    """An execution backend of onnxruntime-web, and its device."""

    provider: str
    """`wasm` or `webgpu`, for the session's `executionProviders`."""
    log_name: str
    """Name of the provider in ONNX Runtime's log."""
    files: tuple[str, str, str]
    """The JavaScript module, the WebAssembly glue code, and the WebAssembly file."""
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
"""Engines by the provider of a runtime."""


@dataclass(frozen=True)
class PageSettings:
    """Settings for opening a session in the page."""

    threads: int
    level: str
    software: bool = False


class BrowserSession(Session):
    """A session in one page for the whole measurement."""

    def __init__(self, file: RunnableFile, engine: Engine, settings: PageSettings) -> None:
        """Open the file in a page.

        Raises DigestMismatch if the file or onnxruntime-web has other bytes, OutputMismatch if
        inputs and outputs differ from the record, EvidenceError if the page fails.
        """
        self._subject = file.subject
        self._engine = engine
        self._settings = settings
        with contextlib.ExitStack() as stack:
            self._server = stack.enter_context(PageServer())
            request = self._open_request(file)
            self._page = stack.enter_context(
                opened_page(self._server, gpu=engine.gpu, software=settings.software)
            )
            self._adapter = self._page.call("adapter") if engine.gpu else None
            self._before = _chromium_bytes()
            start = time.perf_counter()
            self._state: Mapping[str, Any] = self._page.call("open", request)
            self.open_seconds = time.perf_counter() - start
            for _, path in request["files"]:
                self._server.remove(path)
            self._check()
            self._node_counts, names = parse_placements(self._state["placements"])
            self._fallback_nodes = fallback_nodes(names, engine.log_name, file.parsed)
            self._stack = stack.pop_all()

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Run a batch. Raises OutputMismatch for unexpected outputs, EvidenceError if the page
        fails."""
        self._server.put("batch", browser_page.pack(batch))
        seconds = float(self._page.call("run"))
        body = self._server.take_outputs()
        if body is None:
            raise EvidenceError(
                "the page ran a batch but sent no outputs. Measure again; if this repeats, the "
                "page is not the gate's."
            )
        outputs = browser_page.unpack(body)
        self._check_names("outputs", list(outputs))
        self.seconds = seconds
        return list(outputs.values())

    def proof(self) -> Proof:
        """Return the proof. Raises EvidenceError if the page requested anything beyond
        127.0.0.1."""
        if self._page.external_requests:
            raise EvidenceError(
                f"the page requested {self._page.external_requests[0]}, expected nothing beyond "
                "127.0.0.1. The request was refused, but another program than the installed one "
                f"may have computed the outputs. Find out why {browser_page.NAME} requests it."
            )
        ran = self._node_counts.get(self._engine.log_name, 0) > 0
        return Proof(
            providers_active=(self._engine.provider,) if ran else tuple(self._node_counts),
            nodes_per_provider=self._node_counts,
            fallback_nodes=self._fallback_nodes,
            session_options={
                "graphOptimizationLevel": self._settings.level,
                "numThreads": str(self._state["threads"]),
                "crossOriginIsolated": str(self._state["isolated"]).lower(),
            },
            versions={browser_page.NAME: self._state["version"], "Chromium": self._page.version},
            device=_describe_adapter(self._adapter),
            precision="float32",
            memory_bytes=self._memory_growth(),
            own_process=True,
        )

    def _memory_growth(self) -> int | None:
        current = _chromium_bytes()
        return None if current is None or self._before is None else max(0, current - self._before)

    def close(self) -> None:
        """End Chromium."""
        self._stack.close()

    def _open_request(self, file: RunnableFile) -> dict[str, Any]:
        """Return the request for the page to open a file, after serving all files that it needs."""
        module, glue, wasm = self._engine.files
        for name in self._engine.files:
            self._server.put(name, browser_page.read(name))
        return {
            "provider": self._engine.provider,
            "engine": self._server.address + module,
            "glue": self._server.address + glue,
            "wasm": wasm,
            "threads": self._settings.threads,
            "level": self._settings.level,
            "files": [
                (name, self._server.put(f"file-{index}", content))
                for index, (name, content) in enumerate(_contents(file).items())
            ],
        }

    def _check(self) -> None:
        """Verify that the page opened the requested file, by digests and settings."""
        digests = dict(self._state["digests"])
        wasm = self._engine.files[2]
        expected = Digest(browser_page.FILES[wasm])
        expected.verify(Digest(digests.pop("")), label=f"{wasm} in the page")
        if self._subject.external_data:
            digest = Digest.from_json(digests)
        else:
            (digest_hex,) = digests.values()
            digest = Digest(digest_hex)
        self._subject.sha256.verify(digest, label="the file in the page")
        if self._state["version"] != browser_page.VERSION:
            raise EvidenceError(
                f"the page has {browser_page.NAME} {self._state['version']}, expected "
                f"{browser_page.VERSION}. Install it again: gate runtimes install browser-wasm."
            )
        if self._state["threads"] != self._settings.threads:
            raise EvidenceError(
                f"the page computes with {self._state['threads']} threads, expected "
                f"{self._settings.threads}. This Chromium allows no more: set options: "
                f"{{threads: {self._state['threads']}}}."
            )
        self._check_names("inputs", self._state["inputs"])
        self._check_names("outputs", self._state["outputs"])

    def _check_names(self, side: str, names: list[str]) -> None:
        specs = self._subject.inputs if side == "inputs" else self._subject.outputs
        expected = [spec.name for spec in specs]
        if names != expected:
            raise OutputMismatch(
                f"the page has the {side} {names}, the record of the file says {expected}. Another "
                "file is open in it, or not all of its outputs came back."
            )


def _contents(file: RunnableFile) -> dict[str, bytes | Path]:
    """Return the file's bytes by name, model first; external data is read on request."""
    name = file.path.name
    loadable = file.candidate.loadable()
    if isinstance(loadable, bytes):
        return {name: loadable}
    if isinstance(loadable, WithData):
        return {name: loadable.model, **loadable.data}
    names = (name, *file.subject.external_data)
    return {file_name: file.path.parent / file_name for file_name in names}


def _describe_adapter(adapter: Mapping[str, Any] | None) -> str | None:
    if adapter is None:
        return None
    words = (adapter["vendor"], adapter["architecture"], adapter["description"])
    text = " ".join(word for word in words if word) or "an adapter without a name"
    return f"{text} (software)" if adapter["software"] else text


def _chromium_bytes() -> int | None:
    """Return the private memory of Chromium's processes; most other memory is shared.

    None if there are no processes, or if the sandbox denies access to one.
    """
    sizes = []
    try:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                sizes.append(process.memory_full_info().uss)
    except (psutil.Error, OSError):
        return None
    return int(sum(sizes)) if sizes else None
