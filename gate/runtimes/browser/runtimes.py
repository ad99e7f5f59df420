"""The runtimes of a browser, for the registry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gate.bounded.chromium import chromium_missing
from gate.runtimes.browser import package
from gate.runtimes.runtime import (
    Batch,
    Conditions,
    Promises,
    RunnableFile,
    Runtime,
    Session,
)

_GPU_DEVICES = (Path("/dev/dri"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Without any of them Linux has no GPU, and Chromium need not be started to ask it."""
Level = Literal["disabled", "basic", "extended", "layout", "all"]


class WasmOptions(BaseModel):
    """As a page has them, which passes them to `InferenceSession.create`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: Annotated[int, Field(ge=1, le=64)] | None = None
    """None: as many as the other runtimes have."""
    graph_optimization_level: Level = "all"


class WebGpuOptions(WasmOptions):
    """The same, and which adapters count."""

    software_adapter: bool = False
    """An adapter that computes on the CPU will do: for tests of shaders, not of a device."""


class BrowserWasm(Runtime):
    """onnxruntime-web by WebAssembly, with SIMD."""

    promises = Promises("wasm")
    options: ClassVar[type[BaseModel]] = WasmOptions

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - no option brings it
        """Without Playwright, Chromium or onnxruntime-web."""
        return chromium_missing("browser") or package.missing()

    def versions(self) -> dict[str, str]:
        """Of onnxruntime-web. Raises DigestMismatch where a file of it was changed."""
        for name in package.FILES:
            package.read(name)
        return {package.NAME: package.VERSION}

    def install(self) -> bool:
        """Bring onnxruntime-web here, as `gate.runtimes.browser.package.install`."""
        return package.install()

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,
        conditions: Conditions,
        example: Batch,  # noqa: ARG002 - nothing is traced
    ) -> Session:
        """As `BrowserSession`."""
        from gate.runtimes.browser.session import ENGINES, BrowserSession

        engine = ENGINES[self.promises.provider]
        return BrowserSession(file, engine, _settings(options, conditions))


class BrowserWebGpu(BrowserWasm):
    """onnxruntime-web by WebGPU."""

    promises = Promises("webgpu", "cuda")
    options: ClassVar[type[BaseModel]] = WebGpuOptions

    def absent_reason(self, options: Any) -> str | None:
        """The same, and without an adapter, for which Chromium is asked."""
        return super().absent_reason(options) or self._without_adapter(options)

    def _without_adapter(self, options: WebGpuOptions) -> str | None:
        from gate.runtimes.browser.chromium_page import opened_page
        from gate.runtimes.browser.server import PageServer

        software = options.software_adapter
        on_linux = sys.platform == "linux"
        if on_linux and not software and not any(place.exists() for place in _GPU_DEVICES):
            places = ", ".join(map(str, _GPU_DEVICES))
            return f"no GPU on this machine, so no WebGPU adapter: there is none of {places}."
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


def _settings(options: WasmOptions, conditions: Conditions) -> Any:
    from gate.runtimes.browser.session import PageSettings

    return PageSettings(
        threads=options.threads or conditions.threads,
        level=options.graph_optimization_level,
        software=isinstance(options, WebGpuOptions) and options.software_adapter,
    )
