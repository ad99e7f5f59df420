"""A pass that measures units for another one is judged by the other's floor, and leaves it as it is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gate.data.array_files import HeldShard, MappedRows
from gate.data.samples import SampleSet
from gate.errors import DigestMismatch, EvidenceError
from gate.measure.job import MeasurementJob
from gate.measure.run import SamplePass
from gate.measure.runtime_measurement import floor_of
from gate.measure.work_units import FirstUnitState, RuntimeUnitResult
from gate.policy.policy import Policy
from gate.storage.digest import Digest
from tests.parity import tiny


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> MeasurementJob:
    """Of a file that is a little off, in every sample."""
    model = tiny.net()
    file = tiny.export(model, tmp_path_factory.mktemp("pass") / "model.onnx")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 1e-5)
    return MeasurementJob(model, file, tiny.samples(120), tiny.policy("ort-cpu"), batch_size=4)


def ready(case: MeasurementJob, *, noise: bool) -> Iterator[SamplePass]:
    with SamplePass.open(case, noise=noise) as sample_pass:
        sample_pass.open_runtimes()
        yield sample_pass


@pytest.fixture
def here(case: MeasurementJob) -> Iterator[SamplePass]:
    """The lead is done."""
    for sample_pass in ready(case, noise=True):
        sample_pass.run(sample_pass.units[0], lambda _count: None)
        sample_pass.end_unit()
        yield sample_pass


@pytest.fixture
def there(case: MeasurementJob) -> Iterator[SamplePass]:
    yield from ready(case, noise=False)


def test_the_floor_stays_what_the_head_gave(here: SamplePass, there: SamplePass) -> None:
    lead = here.lead()
    there.judge_by(FirstUnitState.from_json(lead.to_json()))
    part = there.part(there.units[2])
    assert [floor_of(track) for track in there.tracks] == list(lead.floors.values())
    assert '"NoiseFloor"' in lead.to_json()
    assert there.tracks[0].suspicion > 1.0  # else it would not be asked for
    assert part.unit == here.units[2]


def test_what_was_measured_there_is_taken_here(here: SamplePass, there: SamplePass) -> None:
    there.judge_by(here.lead())
    for unit in here.units[1:]:
        here.take(there.part(unit), unit)
    for track in here.tracks:
        track.fold()
    (output,) = here.tracks[0].evidence().outputs
    assert output.samples == 120


@pytest.mark.parametrize("floor", [None, 7, {"$": "Moments", "v": {}}])
def test_without_a_floor_nothing_is_judged(there: SamplePass, floor: object) -> None:
    with pytest.raises(EvidenceError, match="noise floor"):
        there.judge_by(FirstUnitState(floors={"ort-cpu": floor}))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (RuntimeUnitResult(failure="out of memory"), "out of memory"),
        (RuntimeUnitResult(absent_reason="no such device"), "no such device"),
        (RuntimeUnitResult(), "ran otherwise in another process"),
    ],
)
def test_a_part_that_measured_nothing_fails_its_runtime(
    here: SamplePass, there: SamplePass, part: RuntimeUnitResult, says: str
) -> None:
    there.judge_by(here.lead())
    whole = there.part(there.units[1])
    here.take(whole.model_copy(update={"runtimes": {"ort-cpu": part}}), here.units[1])
    assert says in str(here.tracks[0].failure)
    assert not here.tracks[0].evidence().measured


def test_the_reference_answers_a_part_again_to_the_last_bit(
    here: SamplePass, there: SamplePass
) -> None:
    there.judge_by(here.lead())
    part = there.part(there.units[1])
    assert here.answers(here.units[1]) == part.answers
    with torch.no_grad():
        next(here.model.parameters()).add_(1e-3)
    assert here.answers(here.units[1]) != part.answers


def test_a_runtime_that_ran_otherwise_there_has_failed(here: SamplePass, there: SamplePass) -> None:
    there.judge_by(here.lead())
    whole = there.part(there.units[1])
    track = whole.runtimes["ort-cpu"]
    assert track.proof is not None
    proof = track.proof.model_copy(update={"providers_active": ("AcmeExecutionProvider",)})
    runtimes = {"ort-cpu": track.model_copy(update={"proof": proof})}
    here.take(whole.model_copy(update={"runtimes": runtimes}), here.units[1])
    assert "AcmeExecutionProvider" in str(here.tracks[0].failure)


def test_the_policy_may_take_other_machines(case: MeasurementJob) -> None:
    assert Policy.default().environments == "same"
    any_ = case.policy.model_copy(update={"environments": "any"})
    for sample_pass in ready(dataclasses.replace(case, policy=any_), noise=True):
        sample_pass.run(sample_pass.units[0], lambda _count: None)
        sample_pass.end_unit()
        sample_pass.lead()
        part = sample_pass.part(sample_pass.units[1])
        other = part.environment.model_copy(update={"cpu": "another"})
        sample_pass.take(part.model_copy(update={"environment": other}), sample_pass.units[1])
        assert sample_pass.environments[1:] == (other,)


def relabelled(case: MeasurementJob, labels: list[int]) -> MeasurementJob:
    return dataclasses.replace(case, labels=np.array(labels))


@pytest.mark.parametrize("what", ["samples", "labels", "unit"])
def test_what_was_measured_on_something_else_is_refused(case: MeasurementJob, what: str) -> None:
    case = relabelled(case, [0] * 120)
    others = {
        "samples": dataclasses.replace(case, samples=tiny.samples(120, seed=1)),
        "labels": relabelled(case, [0] * 119 + [1]),
        "unit": case,
    }
    with contextlib.ExitStack() as opened:
        here, there = (
            opened.enter_context(SamplePass.open(each, noise=noise))
            for each, noise in ((case, True), (others[what], False))
        )
        for sample_pass in (here, there):
            sample_pass.open_runtimes()
        here.run(here.units[0], lambda _count: None)
        here.end_unit()
        there.judge_by(here.lead())
        part = there.part(there.units[-1])
        expected = here.units[1] if what == "unit" else here.units[-1]
        with pytest.raises(DigestMismatch, match=f"unit {expected.index} .*other samples or"):
            here.take(part, expected)


def test_a_lead_of_another_machine_judges_the_first_unit_too(
    here: SamplePass, case: MeasurementJob
) -> None:
    with torch.no_grad(), SamplePass.open(case) as other:
        other.open_runtimes()
        other.run(other.units[1], lambda _count: None)  # as if that were the first
        other.end_unit()
        lead = other.lead()
    assert lead != here.lead()
    here.judge_by(lead)
    here.end_unit()
    for track in here.tracks:
        track.fold()
    assert [floor_of(track) for track in here.tracks] == list(lead.floors.values())


def test_labels_that_come_with_samples_are_read_once(
    here: SamplePass, case: MeasurementJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, places = np.arange(120) % 7, []
    shard = HeldShard({"input": tiny.images(120)})
    rows = MappedRows([shard], origin="the source", labels=labels)
    read = rows.labels
    monkeypatch.setattr(rows, "labels", lambda span: (places.append(span), read(span))[1])
    labelled = dataclasses.replace(case, samples=SampleSet(rows), source_labels=True)
    for there in ready(labelled, noise=False):
        there.judge_by(here.lead())
        part = there.part(there.units[1])
    unit = part.unit
    assert places == [range(unit.start, unit.stop)]
    assert part.labels_sha256 == Digest.of_bytes(labels[unit.start : unit.stop].tobytes())
