"""A multi-file release and the champion compute the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gate.api import EvaluationResult, build_job, check
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.errors import ModelError
from gate.measure.champion import ComparisonJob, measure_incumbent
from gate.measure.job import EvaluationData, Reference
from gate.multi_file.chain_model import ChainFunction, ChainModel
from gate.multi_file.chain_session import Interfaces
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
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


def chain_of(function: ChainFunction) -> ChainModel:
    model = tiny.build()
    assert isinstance(model, tiny.Detector)
    return ChainModel(function, {"encoder": model.encoder, "head": model.head}, ["input"])


def test_signature_is_taken_from_one_call_per_module(
    folder: Path, passing_result: EvaluationResult
) -> None:
    taken = 0

    def batches() -> Iterator[dict[str, np.ndarray]]:
        nonlocal taken
        for batch in SampleSet.open(folder / "x.npy").batches(8):
            taken += 1
            yield batch

    interfaces = Interfaces.from_batches(chain_of(tiny.run), batches())
    assert taken == 1
    path = tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    result = interfaces.open_release(TestedFile(path, passing_result.evidence.subject))
    (batch,) = SampleSet.open(folder / "x.npy").batches(24)
    names = [spec.name for spec in passing_result.evidence.subject.outputs]
    computed = dict(zip(names, result.run(names, batch), strict=True))
    assert computed["boxes"].shape == (24, 3)


def test_part_must_be_called_at_least_once(folder: Path) -> None:
    def call_head_late(parts: Mapping[str, Any], batch: Mapping[str, torch.Tensor]) -> Any:
        voxels = parts["encoder"](batch["input"]).mean(dim=(2, 3))
        calls.append(len(voxels))
        return parts["head"](voxels) if len(calls) > 2 else voxels

    calls: list[int] = []
    interfaces = Interfaces.from_batches(
        chain_of(call_head_late), SampleSet.open(folder / "x.npy").batches(8)
    )
    assert calls == [8, 8, 8]
    assert set(interfaces.by_part) == {"encoder", "head"}
    with pytest.raises(ModelError, match="never calls the part head"):
        Interfaces.from_batches(
            chain_of(tiny.never_calls_head), SampleSet.open(folder / "x.npy").batches(8)
        )
