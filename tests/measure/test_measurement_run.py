"""A measurement run may measure units for another run and use its noise floor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gate import Digest, MeasurementJob, Policy, SampleSet
from gate.data.array_files import MappedRows, Shard
from gate.errors import DigestMismatch, EvidenceError
from gate.measure.run import MeasurementRun
from gate.measure.work_units import FirstUnitState, RuntimeUnitResult, UnitResult
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


def test_remote_run_uses_the_floor_of_the_first_unit(local_run, remote_run):
    lead = local_run.first_unit_state()
    remote_run.use_first_unit(FirstUnitState.from_json(lead.to_json()))
    part = remote_run.measure_for(remote_run.units[2])
    assert [runtime.floor_state() for runtime in remote_run.runtimes] == list(lead.floors.values())
    assert '"NoiseFloor"' in lead.to_json()
    assert (
        remote_run.runtimes[0].comparison.floor.suspicion() > 1.0
    )  # The suspicion must exceed 1, or the floor is not requested.
    assert part.unit == local_run.units[2]


def test_remote_units_are_merged(local_run, remote_run):
    remote_run.use_first_unit(local_run.first_unit_state())
    for unit in local_run.units[1:]:
        local_run.merge(remote_run.measure_for(unit), unit)
    for runtime in local_run.runtimes:
        runtime.fold()
    (output,) = local_run.runtimes[0].evidence().outputs
    assert output.samples == 120


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


def test_reference_digest_of_a_unit_is_reproducible(local_run, remote_run):
    remote_run.use_first_unit(local_run.first_unit_state())
    part = remote_run.measure_for(remote_run.units[1])
    assert digests(local_run.measure_for(local_run.units[1])) == digests(part)
    with torch.no_grad():
        next(local_run.model.module.parameters()).add_(1e-3)
    assert digests(local_run.measure_for(local_run.units[1])) != digests(part)


def digests(part: UnitResult) -> tuple[object, ...]:
    digests = part.samples_sha256, part.labels_sha256, part.answers_sha256
    return (part.unit, *digests)


def test_runtime_with_different_proof_fails(local_run, remote_run):
    remote_run.use_first_unit(local_run.first_unit_state())
    result = remote_run.measure_for(remote_run.units[1])
    runtime = result.runtimes["ort-cpu"]
    assert runtime.proof is not None
    proof = runtime.proof.model_copy(update={"providers_active": ("AcmeExecutionProvider",)})
    runtimes = {"ort-cpu": runtime.model_copy(update={"proof": proof})}
    local_run.merge(result.model_copy(update={"runtimes": runtimes}), local_run.units[1])
    assert "AcmeExecutionProvider" in str(local_run.runtimes[0].failure)


def test_policy_can_accept_different_environments(case):
    assert Policy.default().environments == "same"
    policy = case.policy.model_copy(update={"environments": "any"})
    for run in iter_open_runs(dataclasses.replace(case, policy=policy), noise=True):
        run.measure(run.units[0], lambda _count: None)
        run.end_unit()
        run.first_unit_state()
        part = run.measure_for(run.units[1])
        other_environment = part.environment.model_copy(update={"cpu": "another"})
        run.merge(part.model_copy(update={"environment": other_environment}), run.units[1])
        assert run.environments[1:] == (other_environment,)


def with_labels(case: MeasurementJob, labels: list[int]) -> MeasurementJob:
    return dataclasses.replace(case, labels=np.array(labels))


@pytest.mark.parametrize("what", ["samples", "labels", "unit"])
def test_unit_of_other_samples_or_labels_is_refused(case, what):
    case = with_labels(case, [0] * 120)
    cases = {
        "samples": dataclasses.replace(case, samples=tiny.samples(120, seed=1)),
        "labels": with_labels(case, [0] * 119 + [1]),
        "unit": case,
    }
    with contextlib.ExitStack() as opened:
        local_run, remote_run = (
            opened.enter_context(MeasurementRun.open(each, noise=noise))
            for each, noise in ((case, True), (cases[what], False))
        )
        for run in (local_run, remote_run):
            run.open_runtimes()
        local_run.measure(local_run.units[0], lambda _count: None)
        local_run.end_unit()
        remote_run.use_first_unit(local_run.first_unit_state())
        part = remote_run.measure_for(remote_run.units[-1])
        expected = local_run.units[1] if what == "unit" else local_run.units[-1]
        with pytest.raises(DigestMismatch, match=f"unit {expected.index} .*different samples or"):
            local_run.merge(part, expected)


def test_first_unit_of_another_machine_is_used(local_run, case):
    with torch.no_grad(), MeasurementRun.open(case) as other_run:
        other_run.open_runtimes()
        # Measured here as if it were the first unit.
        other_run.measure(other_run.units[1], lambda _count: None)
        other_run.end_unit()
        lead = other_run.first_unit_state()
    assert lead != local_run.first_unit_state()
    local_run.use_first_unit(lead)
    local_run.end_unit()
    for runtime in local_run.runtimes:
        runtime.fold()
    assert [runtime.floor_state() for runtime in local_run.runtimes] == list(lead.floors.values())


def test_labels_of_samples_are_read_once(local_run, case, monkeypatch):
    labels, spans = np.arange(120) % 7, []
    shard = Shard({"input": tiny.images(120)})
    rows = MappedRows([shard], origin="the source", labels=labels)
    read = rows.labels
    monkeypatch.setattr(rows, "labels", lambda span: (spans.append(span), read(span))[1])
    labelled = dataclasses.replace(case, samples=SampleSet(rows), source_labels=True)
    for remote_run in iter_open_runs(labelled, noise=False):
        remote_run.use_first_unit(local_run.first_unit_state())
        part = remote_run.measure_for(remote_run.units[1])
    unit = part.unit
    assert spans == [range(unit.start, unit.stop)]
    assert part.labels_sha256 == Digest.from_bytes(labels[unit.start : unit.stop].tobytes())
