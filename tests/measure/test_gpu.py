"""Every runtime is measured and passes on a machine with a CUDA device."""

import pytest

from gate import MeasurementJob, Policy, Verdict, decide
from gate.api import measure_job
from gate.records.runtime import CUDA_PROVIDER, RUNTIMES
from gate.runtimes.ort import cuda_absent_reason
from gate.summary.render import render_check
from tests.measure import tiny

ABSENT = cuda_absent_reason()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))]


def test_each_runtime_passes_on_cuda(tmp_path):
    model = tiny.net()
    candidate = tiny.export(model, tmp_path / "model.onnx")
    policy = Policy.default()
    measurement = measure_job(
        MeasurementJob(model, candidate, tiny.samples(64), policy=policy, batch_size=8)
    )
    evidence = tiny.stored(measurement)
    decision = decide(policy, evidence, decided_at="2026-01-01T00:00:00+00:00")
    assert decision.verdict is Verdict.PASS, [render_check(check) for check in decision.problems]
    assert decision.runtimes == tuple(RUNTIMES)
    assert decision.waived == ()
    on_device = evidence.runtime("ort-cuda")
    assert on_device is not None
    assert on_device.nodes_per_provider[CUDA_PROVIDER] > 0
    assert evidence.environment.gpu
