"""A release beside the one that serves: both compute the same samples by one chain."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.decision.champion import Champion
from gate.front_door import Reference, Verdicted, case_of, check
from gate.onnxfile.candidate import Candidate
from gate.parity.incumbent import Compared, measure_incumbent
from gate.parity.workload import Workload
from gate.policy.policy import Policy
from gate.records.incumbent import Incumbent
from tests.parts import tiny

POLICY = Policy.model_validate_json(
    '{"task": "auto", "instruments": {"probes": false, "search_inputs": 0}, "runtimes": {"ort-cpu":'
    ' {"required": "always", "bounds": {"max_abs_diff": 0.001, "top1_agreement": 0.9}}}}'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parts")
    tiny.exported(place)
    return place


@pytest.fixture(scope="module")
def good(folder: Path) -> Verdicted:
    return check(
        tiny.release(folder, encoder="encoder.onnx", head="head.onnx"),
        reference=Reference.load("tests.parts.tiny:build"),
        workload=Workload.open(folder / "x.npy", batch_size=8),
        policy=POLICY,
    )


def beside(folder: Path, good: Verdicted, champion: Candidate) -> Incumbent:
    tiny.release(folder, encoder="encoder.onnx", head="head.onnx")
    case = good.case
    evidence = good.evidence.model_copy(update={"subject": champion.subject})
    served = Champion(
        state="proven",
        version="1",
        sha256=champion.subject.sha256,
        onnx_path=champion.path,
        evidence=evidence,
    )
    compared = Compared(
        case.candidate, case.samples, None, case.batch_size, case.policy, case.chained
    )
    return measure_incumbent(served, beside=compared, evidence=good.evidence)


def other(folder: Path, place: Path, **files: str) -> Candidate:
    """A release of these files, in a folder of its own."""
    place.mkdir()
    for file in files.values():
        (place / file).write_bytes((folder / file).read_bytes())
    case = case_of(
        tiny.release(place, **files),
        reference=Reference.load("tests.parts.tiny:build"),
        workload=Workload.open(folder / "x.npy", batch_size=8),
        policy=POLICY,
    )
    return case.candidate


def test_both_chains_compute_all_samples(folder: Path, good: Verdicted, tmp_path: Path) -> None:
    old = other(folder, tmp_path / "old", encoder="encoder.onnx", head="yesterday.onnx")
    found = beside(folder, good, old)
    assert (found.state, found.samples) == ("compared", 24)
    assert found.champion_latency is not None


def test_a_release_is_not_compared_with_one_file(folder: Path, good: Verdicted) -> None:
    path = folder / "encoder.onnx"
    single = good.evidence.parts["encoder"].subject.model_copy(
        update={"outputs": good.evidence.subject.outputs, "inputs": good.evidence.subject.inputs}
    )
    found = beside(folder, good, Candidate(path, single))
    assert found.state == "incomparable"
    assert "one of the two is a release of several files" in str(found.absent)


def test_a_release_of_other_parts_is_incomparable(
    folder: Path, good: Verdicted, tmp_path: Path
) -> None:
    old = other(folder, tmp_path / "old", encoder="encoder.onnx", head="yesterday.onnx")
    old.path.write_text(old.path.read_text().replace("  head:", "  neck:"))
    found = beside(folder, good, old)
    assert found.state == "incomparable"
    assert "it has the parts encoder, neck" in str(found.absent)
