"""A multi-file release and the champion compute the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import EvaluationData, EvaluationResult, Policy, Reference, TestedFile, check
from gate.api import build_job
from gate.decision.champion import Champion
from gate.measure.champion import ComparisonJob, measure_incumbent
from gate.records.champion_comparison import ChampionComparison
from tests.multi_file import tiny

POLICY = Policy.model_validate_json(
    '{"task": "auto", "instruments": {"probes": false, "search_inputs": 0}, "runtimes": {"ort-cpu":'
    ' {"required": "always", "bounds": {"max_abs_diff": 0.001, "top1_agreement": 0.9}}}}'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    tiny.export_files(path)
    return path


@pytest.fixture(scope="module")
def passing_result(folder: Path) -> EvaluationResult:
    return check(
        tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx"),
        reference=Reference.from_factory("tests.multi_file.tiny:build"),
        data=EvaluationData.open(folder / "x.npy", batch_size=8),
        policy=POLICY,
    )


def compare_with(
    folder: Path, passing_result: EvaluationResult, champion: TestedFile
) -> ChampionComparison:
    tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    case = passing_result.job
    evidence = passing_result.evidence.model_copy(update={"subject": champion.subject})
    champion_record = Champion(
        state="proven",
        version="1",
        sha256=champion.subject.sha256,
        onnx_path=champion.path,
        evidence=evidence,
    )
    compared = ComparisonJob(
        case.candidate, case.samples, None, case.batch_size, case.policy, case.chained
    )
    return measure_incumbent(champion_record, comparison=compared, evidence=passing_result.evidence)


def make_candidate(folder: Path, target: Path, **files: str) -> TestedFile:
    """Write a release of these files in a separate folder and return its candidate."""
    target.mkdir()
    for file in files.values():
        (target / file).write_bytes((folder / file).read_bytes())
    case = build_job(
        tiny.write_release(target, **files),
        reference=Reference.from_factory("tests.multi_file.tiny:build"),
        data=EvaluationData.open(folder / "x.npy", batch_size=8),
        policy=POLICY,
    )
    return case.candidate


def test_both_chains_compute_all_samples(
    folder: Path, passing_result: EvaluationResult, tmp_path: Path
) -> None:
    old = make_candidate(folder, tmp_path / "old", encoder="encoder.onnx", head="yesterday.onnx")
    result = compare_with(folder, passing_result, old)
    assert (result.state, result.samples) == ("compared", 24)
    assert result.champion_latency is not None


def test_multi_file_release_is_not_compared_with_one_file(
    folder: Path, passing_result: EvaluationResult
) -> None:
    path = folder / "encoder.onnx"
    single = passing_result.evidence.parts["encoder"].subject.model_copy(
        update={
            "outputs": passing_result.evidence.subject.outputs,
            "inputs": passing_result.evidence.subject.inputs,
        }
    )
    result = compare_with(folder, passing_result, TestedFile(path, single))
    assert result.state == "incomparable"
    assert "one is a release of several files" in str(result.absent)


def test_release_with_other_parts_is_incomparable(
    folder: Path, passing_result: EvaluationResult, tmp_path: Path
) -> None:
    old = make_candidate(folder, tmp_path / "old", encoder="encoder.onnx", head="yesterday.onnx")
    old.path.write_text(old.path.read_text().replace("  head:", "  neck:"))
    result = compare_with(folder, passing_result, old)
    assert result.state == "incomparable"
    assert "its parts are encoder, neck" in str(result.absent)
