"""Merged units equal the evidence of one process, or raise an error that names the unit."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gate import Digest, EvaluationData, Evidence, Policy, Reference, collect_evidence
from gate.api import build_job
from gate.distributed.plan import MeasurementPlan, MergedParts, UnitFile, measure_unit
from gate.errors import DataError, DigestMismatch, EvidenceError, PolicyError
from gate.measure.work_units import RunProof, UnitResult
from gate.policy.sections import ChampionPolicy
from gate.reference.torch_reference import TorchReference
from tests.distributed.test_processes import remove_times
from tests.distributed.tiny import rare

SAMPLES, BATCH, UNITS = 250, 8, 6


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merging")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            rare(), (torch.zeros(2, 6),), path / "model.onnx", dynamo=False, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip
    rows = np.random.default_rng(0).normal(size=(SAMPLES, 6)).astype(np.float32)
    np.save(path / "x.npy", rows)
    return path


def request_arguments(
    folder: Path, **policy: Any
) -> tuple[Path, Reference, EvaluationData, Policy]:
    reference = Reference.from_factory("tests.distributed.tiny:rare")
    workload = replace(EvaluationData.open(folder / "x.npy", batch_size=BATCH), units=UNITS - 1)
    return folder / "model.onnx", reference, workload, Policy.default().model_copy(update=policy)


def create_plan(folder: Path, **policy: Any) -> MeasurementPlan:
    onnx, reference, workload, chosen = request_arguments(folder, **policy)
    case = build_job(onnx, reference=reference, data=workload, policy=chosen)
    return MeasurementPlan.from_job(case, reference, workload, threads=1)


@pytest.fixture(scope="module")
def plan(folder: Path) -> MeasurementPlan:
    return create_plan(folder)


@pytest.fixture(scope="module")
def measured(folder: Path, plan: MeasurementPlan) -> dict[int, Path]:
    """The measured parts of all units; the last one did not use the state of the first unit."""
    paths = {index: folder / f"part-{index}.json" for index in range(len(plan.units))}
    for index, path in paths.items():
        lead = paths[0] if 0 < index < UNITS - 1 else None
        measure_unit(plan, index, lead=lead).save(path)
    return paths


@pytest.fixture
def parts(measured: dict[int, Path], tmp_path: Path) -> dict[int, Path]:
    """Copies of the parts, which a test may change."""
    return {i: Path(shutil.copy(path, tmp_path)) for i, path in measured.items()}


def merge(folder: Path, plan: MeasurementPlan, paths: list[Path], **policy: Any) -> Evidence:
    onnx, reference, workload, chosen = request_arguments(folder, **policy)
    workload = replace(workload, workers=MergedParts.from_files(plan, paths))
    return collect_evidence(onnx, reference=reference, data=workload, policy=chosen)


@pytest.fixture(scope="module")
def single_process(folder: Path) -> dict[str, Any]:
    onnx, reference, workload, policy = request_arguments(folder)
    evidence = collect_evidence(onnx, reference=reference, data=workload, policy=policy)
    (output,) = next(runtime for runtime in evidence.runtimes if runtime.measured).outputs
    assert output.noise is not None
    assert output.noise.rounding_rms is not None  # the noise floor that all units must share
    return remove_times(evidence.to_plain())


@pytest.mark.rows(3)
@pytest.mark.parametrize("seed", range(3))
def test_parts_in_any_order_give_the_evidence_of_one_process(
    seed: int,
    folder: Path,
    plan: MeasurementPlan,
    parts: dict[int, Path],
    single_process: dict[str, Any],
) -> None:
    chance = random.Random(seed)
    paths = [parts[index] for index in parts if index or seed]
    paths += chance.choices(paths, k=3)
    chance.shuffle(paths)
    evidence = merge(folder, plan, paths)
    assert evidence.worker_pool is not None
    assert (evidence.worker_pool.engine, evidence.worker_pool.environments) == ("parts", ())
    assert remove_times(evidence.to_plain()) == single_process


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    index = next(i for i in range(len(data) // 2, len(data)) if chr(data[i]).isalpha())
    data[index] ^= 0x20
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def renumber(path: Path) -> None:
    path.write_text(path.read_text().replace('"unit": 2', '"unit": 3', 1))


TAMPERED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "cannot read .*part-2"),
    "empty": (lambda path: path.write_text(""), "part-2.json is not a complete part"),
    "torn": (truncate, r"\(unit 2\) is not a complete part"),
    "a flipped bit": (flip_bit, r"\(unit 2\)"),
    "another number": (renumber, "has the data of another unit"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot read .*part-2"),
}


@pytest.mark.parametrize("name", ["unit", "plan_sha256", "lead_sha256", "body_sha256"])
def test_changed_header_of_the_first_unit_is_refused(
    plan: MeasurementPlan, parts: dict[int, Path], name: str
) -> None:
    part = UnitFile.open(parts[0], plan=plan)
    second = 1 if name == "unit" else Digest.from_bytes(b"another")
    part.model_copy(update={name: second}).save(parts[0])
    with pytest.raises(EvidenceError):
        MergedParts.from_files(plan, list(parts.values()))


def write_changed_copy(folder: Path, to: Path, *, row: int, column: str) -> None:
    """Copy the folder's files with one sample or label changed."""
    for name in ("model.onnx", "x.npy", "labels.npy"):
        shutil.copy(folder / name, to)
    array = np.load(to / column)
    array[row] = array[row] + 1 if column == "x.npy" else 1 - array[row]
    np.save(to / column, array)


@pytest.mark.parametrize("column", ["x.npy", "labels.npy"])
@pytest.mark.parametrize("unit", [0, 2])
def test_changed_samples_or_labels_in_a_unit_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int, column: str
) -> None:
    np.save(folder / "labels.npy", np.arange(SAMPLES) % 2)
    monkeypatch.chdir(folder)
    reference = Reference.from_factory("tests.distributed.tiny:rare")
    workload = EvaluationData.open(Path("x.npy"), labels=Path("labels.npy"), batch_size=BATCH)
    case = build_job(
        Path("model.onnx"), reference=reference, data=workload, policy=Policy.default()
    )
    labelled = MeasurementPlan.from_job(
        replace(case, units=UNITS - 1), reference, workload, threads=1
    )
    write_changed_copy(folder, tmp_path, row=labelled.unit(unit).start + 1, column=column)
    monkeypatch.chdir(tmp_path)
    what = "samples" if column == "x.npy" else "labels"
    with pytest.raises(DigestMismatch, match=rf"unit {unit} .*the {what} are"):
        measure_unit(labelled, unit)


def test_first_unit_must_have_the_planned_samples(
    folder: Path, plan: MeasurementPlan, parts: dict[int, Path], tmp_path: Path
) -> None:
    del parts[0]
    np.save(folder / "labels.npy", np.arange(SAMPLES) % 2)
    second = tmp_path / "other"
    second.mkdir()
    write_changed_copy(folder, second, row=1, column="x.npy")
    with pytest.raises(DigestMismatch, match="unit 0 "):
        merge(second, plan, list(parts.values()))


@pytest.mark.parametrize(("tamper", "says"), TAMPERED.values(), ids=TAMPERED)
def test_incomplete_part_is_named(
    plan: MeasurementPlan, parts: dict[int, Path], tamper: Callable[[Path], Any], says: str
) -> None:
    tamper(parts[2])
    with pytest.raises((EvidenceError, DigestMismatch), match=says):
        MergedParts.from_files(plan, list(parts.values()))


def test_missing_unit_is_named(plan: MeasurementPlan, parts: dict[int, Path]) -> None:
    with pytest.raises(EvidenceError, match=r"2 of 6 units are missing: 2, 4\. Measure them: gate"):
        MergedParts.from_files(plan, [parts[index] for index in (0, 1, 3, 5)])


def test_part_of_another_plan_is_named(folder: Path, parts: dict[int, Path]) -> None:
    second = create_plan(folder, max_age_days=7.0)
    with pytest.raises(EvidenceError, match=r"part-0.json \(unit 0\) belongs to another plan"):
        MergedParts.from_files(second, list(parts.values()))


def edit_unit(
    path: Path, plan: MeasurementPlan, change: Callable[[UnitResult], UnitResult]
) -> None:
    file = UnitFile.open(path, plan=plan)
    body = change(file.part)
    file.model_copy(update={"body": body, "body_sha256": body.digest()}).save(path)


def remove_runtime(part: UnitResult) -> UnitResult:
    return part.model_copy(update={"runtimes": {}})


def test_contradicting_parts_of_one_unit_are_refused(
    plan: MeasurementPlan, parts: dict[int, Path]
) -> None:
    twice = parts[2].with_name("again.json")
    shutil.copy(parts[2], twice)
    edit_unit(twice, plan, remove_runtime)
    with pytest.raises(EvidenceError, match="unit 2 has two parts with different numbers"):
        MergedParts.from_files(plan, [*parts.values(), twice])


def test_unit_without_a_runtime_does_not_pass(
    folder: Path, plan: MeasurementPlan, parts: dict[int, Path]
) -> None:
    edit_unit(parts[2], plan, remove_runtime)
    evidence = merge(folder, plan, list(parts.values()))
    assert not any(runtime.measured for runtime in evidence.runtimes)
    assert "no result from the worker" in {runtime.failure for runtime in evidence.runtimes}


def change_machine(part: UnitResult) -> UnitResult:
    versions = {**part.environment.versions, "onnxruntime": "1.0.0"}
    environment = part.environment.model_copy(update={"versions": versions, "kernel": "other"})
    runtimes = {
        name: track.model_copy(update={"proof": change_library(track.proof)})
        for name, track in part.runtimes.items()
        if track.proof is not None
    }
    return part.model_copy(
        update={"environment": environment, "runtimes": {**part.runtimes, **runtimes}}
    )


def change_library(proof: RunProof) -> RunProof:
    nodes = {name: count + 1 for name, count in proof.nodes_per_provider.items()}
    return proof.model_copy(
        update={"versions": {"onnxruntime": "1.0.0"}, "nodes_per_provider": nodes}
    )


@pytest.mark.proof
def test_other_library_version_is_refused_unless_allowed(
    folder: Path, plan: MeasurementPlan, parts: dict[int, Path]
) -> None:
    edit_unit(parts[4], plan, change_machine)
    with pytest.raises(EvidenceError, match=r"unit 4 .*version of onnxruntime 1\.0\.0, here"):
        merge(folder, plan, list(parts.values()))
    evidence = merge(folder, plan, list(parts.values()), environments="any")
    assert evidence.worker_pool is not None
    assert [e.versions["onnxruntime"] for e in evidence.worker_pool.environments] == ["1.0.0"]
    assert any(runtime.measured for runtime in evidence.runtimes)


def test_part_with_another_header_is_refused(
    folder: Path, plan: MeasurementPlan, parts: dict[int, Path]
) -> None:
    file = UnitFile.open(parts[1], plan=plan)
    second = Policy.default().digest()
    file.model_copy(update={"lead_sha256": second}).save(parts[1])
    with pytest.raises(EvidenceError, match="unit 1 .* used another noise floor"):
        merge(folder, plan, list(parts.values()))


def test_changed_samples_are_detected_when_measuring(
    folder: Path, plan: MeasurementPlan, measured: dict[int, Path]
) -> None:
    rows = np.load(folder / "x.npy")
    try:
        np.save(folder / "x.npy", rows[::-1])
        with pytest.raises(DigestMismatch, match="unit 3 .*shuffled or changed"):
            measure_unit(plan, 3, lead=measured[0])
    finally:
        np.save(folder / "x.npy", rows)


@pytest.mark.parametrize("index", [-1, UNITS, 10**9])
def test_unknown_unit_is_refused(plan: MeasurementPlan, index: int) -> None:
    with pytest.raises(DataError, match="has no unit"):
        measure_unit(plan, index)


def test_plan_of_other_code_is_refused(plan: MeasurementPlan) -> None:
    with pytest.raises(EvidenceError, match=r"made by parity-gate 0\.0\.0"):
        measure_unit(plan.model_copy(update={"parity_gate": "0.0.0"}), 1)


def test_unshareable_input_is_not_planned(folder: Path) -> None:
    onnx, reference, workload, policy = request_arguments(folder)
    reference = replace(reference, loaded=False)
    case = build_job(onnx, reference=reference, data=workload, policy=policy)
    with pytest.raises(PolicyError, match="with one job"):
        MeasurementPlan.from_job(case, reference, workload, threads=1)


def test_changed_samples_are_detected_when_merging(
    folder: Path, plan: MeasurementPlan, parts: dict[int, Path]
) -> None:
    rows = np.load(folder / "x.npy")
    try:
        changed = rows.copy()
        changed[200, 3] += 1.0
        np.save(folder / "x.npy", changed)
        with pytest.raises(DigestMismatch, match="different samples or labels"):
            merge(folder, plan, list(parts.values()))
        np.save(folder / "x.npy", np.concatenate([rows, rows]))
        with pytest.raises(EvidenceError, match="were planned"):
            merge(folder, plan, list(parts.values()))
    finally:
        np.save(folder / "x.npy", rows)


def test_changed_code_or_weights_are_detected(plan: MeasurementPlan) -> None:
    second = Policy.default().digest()
    for field in ("code_sha256", "model_sha256", "subject_sha256"):
        assignment = plan.assignment.model_copy(update={field: second})
        with pytest.raises(DigestMismatch, match="was planned"):
            measure_unit(plan.model_copy(update={"assignment": assignment}), 1)


def test_plan_contains_no_password(folder: Path) -> None:
    onnx, reference, workload, policy = request_arguments(folder)
    assert workload.origin is not None
    origin = replace(workload.origin, inputs="s3://key:secret@bucket/x.npy")
    case = build_job(onnx, reference=reference, data=workload, policy=policy)
    with pytest.raises(PolicyError, match="has a password") as refused:
        MeasurementPlan.from_job(case, reference, replace(workload, origin=origin), threads=1)
    assert "secret" not in str(refused.value)


def test_policy_beyond_samples_is_not_planned(folder: Path) -> None:
    with pytest.raises(PolicyError, match="incumbent, which units can"):
        create_plan(folder, incumbent=ChampionPolicy(min_agreement=0.9))


def test_in_memory_tensors_are_not_planned() -> None:
    model = rare()
    model.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(PolicyError, match="can't be compared between processes"):
        TorchReference(model).weights_digest()
