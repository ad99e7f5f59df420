"""The runtime browser-wasm: correct files pass, and faults of the page never pass."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from gate import MeasurementJob, Policy, Verdict, decide
from gate.api import measure_job
from gate.errors import EvidenceError
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Bounds, RuntimePolicy
from gate.runtimes import browser
from gate.runtimes.browser_page import PageServer
from gate.runtimes.runtime import Conditions, RunnableFile
from gate.runtimes.selection import SelectedRuntime
from tests.measure import tiny
from tests.runtimes.browser.pages import BROWSER, change_script, in_this_process

__all__ = ["in_this_process"]
WASM = "browser-wasm"


def measure_and_decide(model, file, count=20):
    bounds = exact_bounds("cpu", classes=True)
    custom_policy = {WASM: RuntimePolicy(required="always", bounds=bounds)}
    policy = Policy.model_validate({**dict(tiny.policy()), "runtimes": custom_policy})
    measured = measure_job(MeasurementJob(model, file, tiny.samples(count), policy=policy))
    decision = decide(policy, tiny.stored(measured), decided_at="now")
    return measured.runtimes[0], decision


@pytest.mark.further
@BROWSER
def test_correct_file_passes_with_cpu_bounds(model, good):
    runtime, decision = measure_and_decide(model, good)
    assert runtime.failure is None
    assert decision.verdict is Verdict.PASS, decision.problems
    assert runtime.identity.kind == WASM
    assert runtime.identity.precision == "float32"
    assert set(runtime.identity.versions) == {"onnxruntime-web", "Chromium"}
    assert runtime.outputs[0].samples == 20
    assert runtime.outputs[0].stability is not None
    assert runtime.probes
    assert runtime.latency.median_ms > 0
    (provider,) = [check for check in decision.checks if check.name == "provider"]
    assert (provider.code, provider.params["wanted"]) == ("ran", "wasm")


@pytest.mark.proof
@BROWSER
@pytest.mark.usefixtures("in_this_process")
def test_wrong_bytes_for_the_page_never_pass(model, good, tmp_path, monkeypatch):
    second = tiny.export(tiny.net(1), tmp_path / "other.onnx").path.read_bytes()
    put = PageServer.put
    monkeypatch.setattr(
        PageServer, "put",
        lambda self, place, served: put(self, place, second if place == "file-0" else served),
    )  # fmt: skip
    runtime, decision = measure_and_decide(model, good, 4)
    assert "the file in the page has digest" in runtime.failure
    assert decision.verdict is Verdict.FAIL


@pytest.mark.proof
@BROWSER
@pytest.mark.usefixtures("in_this_process")
def test_page_with_another_model_fails(model, good, tmp_path, monkeypatch):
    second = tiny.export(tiny.net(1), tmp_path / "other.onnx").path.read_bytes()
    read = "create(bytes, {"
    change_script(
        monkeypatch, tmp_path, read, read.replace("bytes", f"Uint8Array.from({list(second)})")
    )
    runtime, decision = measure_and_decide(model, good, 4)
    assert runtime.failure is None
    assert {c.name for c in decision.problems} >= {"noise_ratio", "noise_diff"}


@pytest.mark.proof
@BROWSER
def test_chromium_ends_with_a_killed_process(good):
    custom_policy = RuntimePolicy(required="always", bounds=Bounds(max_abs_diff=1.0))
    chosen, before = SelectedRuntime(WASM, custom_policy), psutil.Process().children(recursive=True)
    session = chosen.open(
        RunnableFile(good), conditions=Conditions(), example={"input": tiny.images(1)}
    )
    started = [p for p in psutil.Process().children(recursive=True) if p not in before]
    (worker,) = (process for process in started if process.ppid() == os.getpid())
    assert any("chrom" in process.name() for process in started)
    os.killpg(worker.pid, signal.SIGKILL)
    with pytest.raises(EvidenceError, match="ended with code -9"):
        session.run({"input": np.zeros((1, 3, 8, 8), np.float32)})
    assert psutil.wait_procs(started, timeout=20)[1] == []
    session.close()


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"graph_optimization_level": "most"}, {"software_adapter": True}]
)
def test_unknown_options_are_refused(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        browser.WasmOptions.model_validate(options)


@pytest.mark.parametrize("kind", [browser.BrowserWasmRuntime, browser.BrowserWebGpuRuntime])
def test_missing_browser_or_package_has_a_remedy(kind, monkeypatch, tmp_path):
    options = kind.options()
    monkeypatch.setattr(browser, "chromium_missing", lambda extra: f"no browser: {extra}")
    assert kind().absent_reason(options) == "no browser: browser"
    monkeypatch.setattr(browser, "chromium_missing", lambda _: None)
    monkeypatch.setenv("GATE_RUNTIMES", str(tmp_path))
    assert kind().absent_reason(options).endswith("gate runtimes install browser-wasm")


@BROWSER
@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (None, "requestAdapter() gives null"),
        ({"software": True, "description": "", "architecture": "soft"}, "on the CPU: soft"),
        ({"software": False}, None),
    ],
)
def test_webgpu_is_absent_without_an_adapter(monkeypatch, tmp_path, adapter, words):
    class Page:
        def call(self, function):
            assert function == "adapter"
            return adapter

    monkeypatch.setattr(browser, "_GPU_DEVICES", (tmp_path,))
    monkeypatch.setattr(browser, "opened_page", lambda *_, **__: nullcontext(Page()))
    reason = browser.BrowserWebGpuRuntime().absent_reason(browser.WebGpuOptions())
    assert (reason is None) if words is None else (words in reason)
    monkeypatch.setattr(browser, "_GPU_DEVICES", (tmp_path / "none",))
    monkeypatch.setattr(browser.sys, "platform", "linux")
    reason = browser.BrowserWebGpuRuntime().absent_reason(browser.WebGpuOptions())
    assert "no GPU on this machine" in reason


@BROWSER
@pytest.mark.proof
def test_webgpu_computes_with_an_adapter(good):
    """Use Chromium's software adapter, which some builds lack."""
    options = browser.WebGpuOptions(software_adapter=True)
    runtime = browser.BrowserWebGpuRuntime()
    absent = runtime.absent_reason(options)
    if absent:
        pytest.skip(absent)
    session = runtime.open(RunnableFile(good), options=options, conditions=Conditions(), example={})
    with_webgpu = session.run({"input": tiny.images(4)})[0]
    assert with_webgpu.shape == (4, tiny.CLASSES)
    proof = session.proof()
    assert proof.providers_active == ("webgpu",)
    assert proof.nodes_per_provider["WebGpuExecutionProvider"] > 0
    assert proof.device.endswith("(software)")
    session.close()
