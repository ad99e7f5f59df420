"""A measurement run may measure units for another run and use its noise floor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gate import MeasurementJob
from gate.errors import EvidenceError
from gate.measure.run import MeasurementRun
from gate.measure.work_units import FirstUnitState, RuntimeUnitResult
from tests.measure import tiny


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A job whose file has a small error in every sample."""
    model = tiny.net()
    file = tiny.export(model, tmp_path_factory.mktemp("pass") / "model.onnx")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 1e-5)
    return MeasurementJob(model, file, tiny.samples(120), tiny.policy("ort-cpu"), batch_size=4)


def iter_open_runs(case: MeasurementJob, *, noise: bool) -> Iterator[MeasurementRun]:
    with MeasurementRun.open(case, noise=noise) as run:
        run.open_runtimes()
        yield run


@pytest.fixture
def local_run(case):
    """A run that has measured its first unit."""
    for run in iter_open_runs(case, noise=True):
        run.measure(run.units[0], lambda _count: None)
        run.end_unit()
        yield run


@pytest.fixture
def remote_run(case):
    yield from iter_open_runs(case, noise=False)


@pytest.mark.parametrize("floor", [None, 7, {"$": "Moments", "v": {}}])
def test_missing_floor_is_refused(remote_run, floor):
    with pytest.raises(EvidenceError, match="noise floor"):
        remote_run.use_first_unit(FirstUnitState(floors={"ort-cpu": floor}))


@pytest.mark.parametrize(("part", "says"), [
    (RuntimeUnitResult(failure="out of memory"), "out of memory"),
    (RuntimeUnitResult(absent_reason="no such device"), "no such device"),
    (RuntimeUnitResult(), "ran differently in another process"),
])  # fmt: skip
def test_unit_without_result_fails_its_runtime(local_run, remote_run, part, says):
    remote_run.use_first_unit(local_run.first_unit_state())
    result = remote_run.measure_for(remote_run.units[1])
    local_run.merge(result.model_copy(update={"runtimes": {"ort-cpu": part}}), local_run.units[1])
    assert says in str(local_run.runtimes[0].failure)
    assert not local_run.runtimes[0].evidence().measured


def test_runtime_with_different_proof_fails(local_run, remote_run):
    remote_run.use_first_unit(local_run.first_unit_state())
    result = remote_run.measure_for(remote_run.units[1])
    runtime = result.runtimes["ort-cpu"]
    assert runtime.proof is not None
    proof = runtime.proof.model_copy(update={"providers_active": ("AcmeExecutionProvider",)})
    runtimes = {"ort-cpu": runtime.model_copy(update={"proof": proof})}
    local_run.merge(result.model_copy(update={"runtimes": runtimes}), local_run.units[1])
    assert "AcmeExecutionProvider" in str(local_run.runtimes[0].failure)
