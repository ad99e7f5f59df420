"""ONNX Runtime with any configured provider needs the same proof as with CUDA."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest
import torch

from gate import MeasurementJob, Policy, Verdict, decide, locate
from gate.api import measure_job
from gate.errors import PolicyError
from gate.onnx_file.sessions import open_session, session_options
from gate.policy.runtime_options import OrtOptions, OrtSettings, OrtSetup
from gate.policy.sections import RuntimePolicy
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER
from gate.runtimes import ort
from gate.runtimes.ort import Ort, OrtCuda, OrtSession
from gate.runtimes.runtime import Conditions, RunnableFile
from gate.summary.render import render_check
from tests.measure import tiny

XNNPACK, TENSORRT = "XnnpackExecutionProvider", "TensorrtExecutionProvider"
RTX = "NvTensorRTRTXExecutionProvider"
NO_XNNPACK = pytest.mark.skipif(
    XNNPACK in onnxruntime.get_available_providers(), reason="this build has XNNPACK"
)


def policy(name: str, options: dict[str, Any], **wanted: Any) -> Policy:
    plain = tiny.policy("ort-cpu")
    bounds = plain.runtimes["ort-cpu"].bounds
    wanted = {"required": "always", "bounds": bounds, "options": options} | wanted
    runtimes = {**plain.runtimes, name: RuntimePolicy(**wanted)}
    return Policy.model_validate({**dict(plain), "runtimes": runtimes})


def measure_and_decide(model, good, wanted: Policy, name: str):
    """Return the runtime's record, its checks by name, and the verdict."""
    measured = measure_job(MeasurementJob(model, good, tiny.samples(), policy=wanted))
    evidence = tiny.stored(measured)
    decision = decide(wanted, evidence, decided_at="now")
    checks = {check.name: check for check in decision.checks if check.runtime == name}
    return evidence.runtime(name), checks, decision.verdict


SETTINGS = {
    "disabled_optimizers": ["MatmulTransposeFusion"],
    "config": {"session.disable_prepacking": "1"},
    "threads": 1,
}


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("plain", "ort", {"providers": [CPU_PROVIDER], "graph_optimization_level": "ORT_ENABLE_BASIC"}),
        ("ort-cpu-optimized", None, {}),
    ],
)  # fmt: skip
def test_settings_are_applied_and_recorded(model, good, monkeypatch, name, kind, own):
    disabled = []
    original = onnxruntime.InferenceSession

    def session(*arguments, **keywords):
        disabled.append(keywords.get("disabled_optimizers"))
        return original(*arguments, **keywords)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    custom_policy = policy(name, SETTINGS | own, kind=kind)
    record, checks, verdict = measure_and_decide(model, good, custom_policy, name)
    assert verdict is Verdict.PASS
    assert ["MatmulTransposeFusion"] in disabled
    options = record.session_options
    assert options["disabled_optimizers"] == "MatmulTransposeFusion"
    assert options["session.disable_prepacking"] == "1"
    assert options["intra_op_num_threads"] == "1"
    assert record.identity.options == SETTINGS | own
    assert record.identity.versions == {"onnxruntime": onnxruntime.__version__}
    assert checks["session"].verdict is checks["provider"].verdict is Verdict.PASS
    again = decide(
        policy(name, {**SETTINGS, **own, "threads": 2}, kind=kind),
        tiny.stored(measure_job(MeasurementJob(model, good, tiny.samples(), policy=custom_policy))),
        decided_at="now",
    )
    (session_check,) = (c for c in again.checks if (c.runtime, c.name) == (name, "session"))
    assert session_check.verdict is Verdict.FAIL
    assert "other_options" in {p["code"] for p in session_check.params["problems"]}


@NO_XNNPACK
def test_provider_missing_in_the_build_is_absent(model, good):
    options = {"providers": [XNNPACK, CPU_PROVIDER]}
    custom_policy = policy("xnn", options, kind="ort", required="when_present")
    record, checks, verdict = measure_and_decide(model, good, custom_policy, "xnn")
    assert f"does not have {XNNPACK}" in record.absent_reason
    assert checks["runtime"].verdict is Verdict.WAIVED
    assert verdict is Verdict.PASS


@pytest.mark.parametrize("required", ["always", "when_present"])
@pytest.mark.parametrize(
    "providers", [["TensorRTExecutionProvider"], ["NoSuchExecutionProvider", CPU_PROVIDER]]
)
def test_unknown_provider_is_a_policy_error(model, good, providers, required):
    custom_policy = policy("trt", {"providers": providers}, kind="ort", required=required)
    with pytest.raises(PolicyError, match=f"does not support {providers[0]}"):
        measure_job(MeasurementJob(model, good, tiny.samples(), policy=custom_policy))


@pytest.mark.parametrize("provider", [RTX, TENSORRT, CUDA_PROVIDER])
def test_build_is_checked_before_the_device(monkeypatch, provider):
    monkeypatch.setattr(ort, "cuda_traces", lambda: ["/dev/nvidiactl exists"])
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU_PROVIDER])
    options = OrtOptions(providers=(provider, CPU_PROVIDER))
    assert f"does not have {provider}" in Ort().absent_reason(options)
    # a CUDA build of ONNX Runtime is required if a CUDA device is present
    assert OrtCuda().absent_reason(OrtSettings()) is None
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [provider, CPU_PROVIDER])
    assert Ort().absent_reason(options) is None
    monkeypatch.setattr(ort, "cuda_traces", list)
    assert "no CUDA device" in Ort().absent_reason(options)


@pytest.mark.skipif(bool(ort.cuda_traces()), reason="a CUDA device is here")
def test_unloadable_provider_is_absent_only_without_device(model, good, monkeypatch):
    if TENSORRT not in onnxruntime.get_available_providers():
        pytest.skip("this build of ONNX Runtime knows no TensorRT")
    custom_policy = policy("trt", {"providers": [TENSORRT]}, kind="ort")
    record, _, _ = measure_and_decide(model, good, custom_policy, "trt")
    assert "no CUDA device" in record.absent_reason
    monkeypatch.setattr(ort, "cuda_traces", lambda: ["/dev/nvidiactl exists"])
    record, _, verdict = measure_and_decide(model, good, custom_policy, "trt")
    assert f"could not load {TENSORRT} and used {CPU_PROVIDER}" in record.failure
    assert record.unusable
    assert verdict is Verdict.ERROR


class FakeXnnpackSession:
    """A real CPU session that claims to use XNNPACK; its profile shows the CPU."""

    reported: ClassVar[dict[str, Any]] = {}

    def __init__(self, path, options, providers, **keywords):
        self._real = onnxruntime.capi.onnxruntime_inference_collection.InferenceSession(
            path, options, providers=[CPU_PROVIDER], **keywords
        )

    def __getattr__(self, name):
        return getattr(self._real, name)

    def get_providers(self):
        return [XNNPACK, CPU_PROVIDER]

    def get_provider_options(self):
        return {CPU_PROVIDER: {}, XNNPACK: FakeXnnpackSession.reported}


@pytest.mark.parametrize("providers", [[XNNPACK], [XNNPACK, CPU_PROVIDER]])
def test_silent_fallback_of_nodes_fails(model, good, monkeypatch, providers):
    monkeypatch.setattr(onnxruntime, "InferenceSession", FakeXnnpackSession)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [XNNPACK, CPU_PROVIDER])
    custom_policy = policy("xnn", {"providers": providers}, kind="ort")
    record, checks, _ = measure_and_decide(model, good, custom_policy, "xnn")
    assert record.providers_active[0] == XNNPACK
    assert checks["provider"].verdict is Verdict.FAIL
    assert f"No node is recorded to have run on {XNNPACK}" in render_check(checks["provider"])
    listed = CPU_PROVIDER in providers
    assert bool(record.fallback_nodes) is not listed
    assert ("compute nodes ran on the CPU" in render_check(checks["provider"])) is not listed


def test_provider_options_without_effect_fail(model, good, monkeypatch):
    monkeypatch.setattr(onnxruntime, "InferenceSession", FakeXnnpackSession)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [XNNPACK, CPU_PROVIDER])
    options = {"providers": [XNNPACK], "provider_options": {XNNPACK: {"n": "2"}}}
    for reported, verdict in (({"n": "2"}, Verdict.PASS), ({"n": "1"}, Verdict.FAIL), ({}, Verdict.FAIL)):  # fmt: skip
        monkeypatch.setattr(FakeXnnpackSession, "reported", reported)
        _, checks, _ = measure_and_decide(model, good, policy("xnn", options, kind="ort"), "xnn")
        assert checks["session"].verdict is verdict


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [("ortt", {}, r"no runtime named 'ortt'.*Did you mean 'ort'\?")],
)
def test_unknown_runtime_kind_is_a_policy_error(model, good, kind, options, words):
    with pytest.raises(PolicyError, match=words):
        measure_job(
            MeasurementJob(model, good, tiny.samples(), policy=policy("x", options, kind=kind))
        )


def test_configured_runtime_is_localized(model, good):
    custom_policy = policy("plain", {"providers": [CPU_PROVIDER]}, kind="ort")
    result = locate(
        MeasurementJob(model, good, tiny.samples(), policy=custom_policy), runtime="plain"
    )
    assert result.runtime == "plain"
    assert result.layers
    assert not result.diverges
    with pytest.raises(PolicyError, match="the policy names no runtime 'plane'"):
        locate(MeasurementJob(model, good, tiny.samples(), policy=custom_policy), runtime="plane")


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_one_session_proves_placement_and_computes(good, level, monkeypatch):
    opened = []

    def counted(self, options):
        opened.append(original(self, options))
        return opened[-1]

    original = OrtSession._create
    monkeypatch.setattr(OrtSession, "_create", counted)
    setup = OrtSetup.from_options(
        {"providers": [CPU_PROVIDER], "graph_optimization_level": level}, {}
    )
    batch = {"input": tiny.images(4)}
    session = OrtSession(
        RunnableFile(good, lambda device: None), setup, conditions=Conditions(), example=batch
    )
    assert len(opened) == 1
    assert sum(session.proof().nodes_per_provider.values()) > 0
    plain = open_session(
        good.path.read_bytes(), session_options(setup, threads=1, deterministic=False), setup
    )
    for count in (1, 4, 9):
        fed = {"input": tiny.images(count)}
        for custom, second in zip(session.run(fed), plain.run(None, fed), strict=True):
            assert np.array_equal(custom, second)


@pytest.fixture
def no_device(monkeypatch, tmp_path):
    """A machine without CUDA devices; returns the paths of the device files."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    locations = {}
    for name in ("_DRIVER", "_CONTROL_DEVICE", "_WSL_DEVICE", "_WSL_LIBRARY"):
        locations[name] = tmp_path / name
        monkeypatch.setattr(ort, name, locations[name])
    return locations


@pytest.mark.parametrize("trace", ["_DRIVER", "_CONTROL_DEVICE"])
def test_driver_file_is_a_cuda_trace(no_device, trace):
    no_device[trace].mkdir()
    assert ort.cuda_absent_reason() is None
    assert str(no_device[trace]) in ort.cuda_unusable_reason()


def test_hidden_device_is_unusable_but_not_absent(no_device, monkeypatch):
    no_device["_DRIVER"].mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ort.cuda_absent_reason() is None
    assert "CUDA_VISIBLE_DEVICES is ''" in ort.cuda_unusable_reason()


def test_wsl_device_needs_the_nvidia_library(no_device):
    no_device["_WSL_DEVICE"].touch()
    assert ort.cuda_absent_reason() is not None
    no_device["_WSL_LIBRARY"].touch()
    assert ort.cuda_absent_reason() is None


def test_device_of_pytorch_is_usable(no_device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ort.cuda_absent_reason() is None
    assert ort.cuda_unusable_reason() is None
    assert ort.cuda_traces() == ["PyTorch sees 2 CUDA devices"]
