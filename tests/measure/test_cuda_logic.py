"""Detection and proof of CUDA, with a fake device."""

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
    by_torch, *by_ort = measure_job(
        MeasurementJob(model, good, tiny.samples(), policy=policy)
    ).runtimes
    assert by_torch.absent_reason is None
    assert "PyTorch sees none" in by_torch.failure
    assert ("CUDA_VISIBLE_DEVICES is" in by_torch.failure) is (visible is not None)
    for runtime in by_ort:
        assert runtime.absent_reason is None
        assert f"could not load {CUDA} and used {CPU}" in runtime.failure
        assert "no reason" not in runtime.failure
        assert "\x1b" not in runtime.failure
    assert "onnxruntime" not in capfd.readouterr().err


def test_model_that_cannot_run_on_cuda_is_waived_when_optional(model, good, monkeypatch):
    def stays(*_, **__):
        raise RuntimeAbsent("the model runs on the CPU alone")

    monkeypatch.setattr(ort, "cuda_traces", lambda: ["a device"])
    monkeypatch.setattr(TorchCudaRuntime, "open", stays)
    for required, verdict in (("when_present", Verdict.WAIVED), ("always", Verdict.ERROR)):
        named = tiny.policy("ort-cpu", "torch-cuda").runtimes
        by_cuda = named["torch-cuda"].model_copy(update={"required": required})
        policy = tiny.policy(runtimes={**named, "torch-cuda": by_cuda})
        measurement = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
        by_torch = measurement.runtimes[1]
        assert by_torch.absent_reason == "the model runs on the CPU alone"
        assert by_torch.failure is None
        (check,) = [
            check
            for check in iter_checks(policy, tiny.stored(measurement))
            if check.runtime == "torch-cuda"
        ]
        assert check.verdict is verdict


def test_available_runtime_cannot_report_itself_absent(model, good, monkeypatch):
    def leaves(*_, **__):
        raise RuntimeAbsent("the file runs elsewhere alone")

    monkeypatch.setattr(OrtCpu, "open", leaves)
    (by_ort,) = measure_job(
        MeasurementJob(model, good, tiny.samples(), policy=tiny.policy("ort-cpu"))
    ).runtimes
    assert by_ort.absent_reason is None
    assert "the file runs elsewhere alone" in by_ort.failure


class FakeCudaSession:
    """A real session on the CPU that says it is on CUDA; its profile tells the truth."""

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
    result = iter_checks(policy, tiny.stored(measurement))
    return {check.name: check for check in result}


def test_cpu_nodes_are_read_from_the_profile(model, good, fake_cuda_session):
    policy = tiny.policy("ort-cuda")
    measurement = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
    (runtime,) = measurement.runtimes
    assert runtime.providers_active == (CUDA, CPU)
    assert CUDA not in runtime.nodes_per_provider
    assert any(node.startswith("Conv:") for node in runtime.fallback_nodes)
    judged = checks_by_name(good, measurement, policy)
    assert judged["provider"].verdict is Verdict.FAIL
    assert judged["session"].verdict is Verdict.PASS


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
    """A runner on 'cuda' whose outputs are on the CPU says CPU first, and the rule refuses it."""
    runner = TorchSession(
        model,
        bind_inputs(good.subject.inputs, tiny.samples().specs, count=20, batch_size=4),
        device="cpu",
    )
    runner._devices = {"cpu", "cuda"}
    assert runner.proof().providers_active[0] == CPU
