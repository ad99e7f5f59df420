"""CUDA providers are detected and verified, here with a fake device."""

from __future__ import annotations

from typing import Any, ClassVar

import onnxruntime
import pytest
import torch

from gate import MeasurementJob, Verdict
from gate.api import measure_job
from gate.data.input_binding import bind_inputs
from gate.decision.decide import iter_checks
from gate.errors import RuntimeAbsent
from gate.reference.torch_session import TorchSession
from gate.runtimes import ort
from gate.runtimes.ort import OrtCpu
from gate.runtimes.torch_cuda import TorchCudaRuntime
from tests.measure import tiny

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
NO_DEVICE = pytest.mark.skipif(bool(ort.cuda_traces()), reason="a CUDA device is here")


@pytest.fixture
def fake_cuda_device(monkeypatch):
    monkeypatch.setattr(ort, "cuda_traces", lambda: ["/dev/nvidiactl exists"])


@NO_DEVICE
def test_cuda_runtimes_without_device_are_absent(model, good):
    policy = tiny.policy("ort-cpu", "torch-cuda", "ort-cuda", "ort-cuda-optimized")
    cpu, *cuda = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy)).runtimes
    assert cpu.outputs
    for runtime in cuda:
        assert "no CUDA device on this machine" in runtime.absent_reason
        assert runtime.failure is None
        assert runtime.outputs == ()


@NO_DEVICE
@pytest.mark.parametrize("visible", [None, "-1"])
def test_unusable_cuda_device_is_a_failure(
    model, good, fake_cuda_device, monkeypatch, capfd, visible
):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    policy = tiny.policy("torch-cuda", "ort-cuda", "ort-cuda-optimized")
    torch_runtime, *ort_runtimes = measure_job(
        MeasurementJob(model, good, tiny.samples(), policy=policy)
    ).runtimes
    assert torch_runtime.absent_reason is None
    assert "PyTorch sees none" in torch_runtime.failure
    assert ("CUDA_VISIBLE_DEVICES is" in torch_runtime.failure) is (visible is not None)
    for runtime in ort_runtimes:
        assert runtime.absent_reason is None
        assert f"could not load {CUDA} and used {CPU}" in runtime.failure
        assert "no reason" not in runtime.failure
        assert "\x1b" not in runtime.failure
    assert "onnxruntime" not in capfd.readouterr().err


def test_model_that_cannot_run_on_cuda_is_waived_when_optional(model, good, monkeypatch):
    def raise_absent(*_, **__):
        raise RuntimeAbsent("the model runs on the CPU alone")

    monkeypatch.setattr(ort, "cuda_traces", lambda: ["a device"])
    monkeypatch.setattr(TorchCudaRuntime, "open", raise_absent)
    for required, verdict in (("when_present", Verdict.WAIVED), ("always", Verdict.ERROR)):
        runtimes = tiny.policy("ort-cpu", "torch-cuda").runtimes
        optional = runtimes["torch-cuda"].model_copy(update={"required": required})
        policy = tiny.policy(runtimes={**runtimes, "torch-cuda": optional})
        measurement = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
        torch_runtime = measurement.runtimes[1]
        assert torch_runtime.absent_reason == "the model runs on the CPU alone"
        assert torch_runtime.failure is None
        (check,) = [
            check
            for check in iter_checks(policy, tiny.stored(measurement))
            if check.runtime == "torch-cuda"
        ]
        assert check.verdict is verdict


def test_available_runtime_cannot_report_itself_absent(model, good, monkeypatch):
    def raise_absent(*_, **__):
        raise RuntimeAbsent("the file runs elsewhere alone")

    monkeypatch.setattr(OrtCpu, "open", raise_absent)
    (ort_runtime,) = measure_job(
        MeasurementJob(model, good, tiny.samples(), policy=tiny.policy("ort-cpu"))
    ).runtimes
    assert ort_runtime.absent_reason is None
    assert "the file runs elsewhere alone" in ort_runtime.failure


class FakeCudaSession:
    """A CPU session that reports the CUDA provider; its profile shows the real provider."""

    options: ClassVar[dict[str, Any]] = {}
    last: ClassVar[Any] = None

    def __init__(self, path, options, providers):
        FakeCudaSession.last = providers
        self._real = onnxruntime.capi.onnxruntime_inference_collection.InferenceSession(
            path, options, providers=[CPU]
        )

    def __getattr__(self, name):
        return getattr(self._real, name)

    def get_providers(self):
        return [CUDA, CPU]

    def get_provider_options(self):
        requested = dict(FakeCudaSession.last[0][1])
        return {CPU: {}, CUDA: {**requested, "device_id": 0, **FakeCudaSession.options}}


@pytest.fixture
def fake_cuda_session(monkeypatch, fake_cuda_device):
    monkeypatch.setattr(FakeCudaSession, "options", {})
    monkeypatch.setattr(onnxruntime, "InferenceSession", FakeCudaSession)


def checks_by_name(candidate, measurement, policy):
    checks = iter_checks(policy, tiny.stored(measurement))
    return {check.name: check for check in checks}


def test_cpu_nodes_are_read_from_the_profile(model, good, fake_cuda_session):
    policy = tiny.policy("ort-cuda")
    measurement = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
    (runtime,) = measurement.runtimes
    assert runtime.providers_active == (CUDA, CPU)
    assert CUDA not in runtime.nodes_per_provider
    assert any(node.startswith("Conv:") for node in runtime.fallback_nodes)
    checks = checks_by_name(good, measurement, policy)
    assert checks["provider"].verdict is Verdict.FAIL
    assert checks["session"].verdict is Verdict.PASS


@pytest.mark.parametrize(("reported", "verdict"), [
    ({"do_copy_in_default_stream": "true", "use_tf32": False}, Verdict.PASS),
    ({"use_tf32": "1"}, Verdict.FAIL),
    ({"cudnn_conv_algo_search": "EXHAUSTIVE"}, Verdict.FAIL),
])  # fmt: skip
def test_provider_options_are_read_from_the_session(
    model, good, fake_cuda_session, monkeypatch, reported, verdict
):
    monkeypatch.setattr(FakeCudaSession, "options", reported)
    policy = tiny.policy("ort-cuda")
    measurement = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
    assert measurement.runtimes[0].session_options["device_id"] == "0"
    assert checks_by_name(good, measurement, policy)["session"].verdict is verdict


def test_torch_session_reports_the_device_of_its_outputs(model, good):
    binding = bind_inputs(good.subject.inputs, tiny.samples().specs, count=20, batch_size=4)
    runner = TorchSession(model, binding, device="cpu")
    with torch.inference_mode():
        runner.run({"input": tiny.images(4)})
    assert runner.proof().providers_active == (CPU,)


def test_model_with_cpu_outputs_is_not_on_cuda(model, good, monkeypatch):
    """Report the CPU provider first if a model on 'cuda' returns outputs on the CPU; the check then
    fails.
    """
    runner = TorchSession(
        model,
        bind_inputs(good.subject.inputs, tiny.samples().specs, count=20, batch_size=4),
        device="cpu",
    )
    runner._devices = {"cpu", "cuda"}
    assert runner.proof().providers_active[0] == CPU
