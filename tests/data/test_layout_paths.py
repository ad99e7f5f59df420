"""Champion comparison, quantization, recordings and worker processes with other batch axes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from gate.api import check
from gate.cli import main
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.decision.check_result import Verdict
from gate.distributed.external_runtime import Packing, Sending
from gate.distributed.worker_pool import CheckedFile
from gate.measure.champion import ComparisonJob, measure_incumbent
from gate.measure.job import EvaluationData, Reference
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.evidence import Source
from gate.runtimes.recorded import with_recordings
from gate.runtimes.recording_format import RecordingSource
from tests.exhaustive import exhaustive
from tests.runtimes import consumer

from .layouts import CASES, Arrays

LAYOUTS = ("recurrent", "voice", "graph", "picture")


def arrays(name: str) -> Arrays:
    case = CASES[name]
    return case.as_calls() if case.samples == 1 else case.own


@pytest.mark.parametrize("name", LAYOUTS)
def test_champion_is_compared_with_layout(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    new = case.export(tmp_path / "new.onnx")
    old = case.export(tmp_path / "old.onnx", right=False)
    reference = Reference(case.model(), Source(factory="tests:net"))
    result = check(new, reference=reference,
                   data=EvaluationData(SampleSet.from_arrays(arrays(name))))  # fmt: skip
    job, evidence = result.job, result.evidence
    before = evidence.model_copy(update={"subject": read_subject(old)})
    comparison = ComparisonJob(
        TestedFile(new, read_subject(new)), job.samples, None, 8, Policy.default()
    )
    champion = Champion(state="proven", version="7", sha256=before.subject.sha256, onnx_path=old,
                        evidence=before)  # fmt: skip
    actual = measure_incumbent(champion, comparison=comparison, evidence=evidence)
    assert actual.state == "compared", actual
    assert actual.samples == 12
    assert actual.latency is not None
    assert all(each.samples == 12 for each in actual.outputs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantized_twin_is_calibrated_on_samples(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    case.export(tmp_path / "model.onnx")
    np.savez(tmp_path / "x.npz", **arrays(name))
    output = tmp_path / "twin.onnx"
    arguments = ["quantize", str(tmp_path / "model.onnx"), "--calibration",
                 str(tmp_path / "x.npz"), "--output", str(output), "--json"]  # fmt: skip
    assert main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["export"]["settings"]["calibration_samples"] == 12


def record(model: Path, sent: Path, outputs: Path) -> None:
    """Run the file as the consumer of docs/recorded.md does, with one sample per call."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    header = json.loads((sent / "samples.json").read_text())
    axes = header["batch_axes"]
    outputs.mkdir()
    parts = {}
    for number, part in enumerate(header["parts"]):
        inputs = {
            each["name"]: np.fromfile(sent / each["raw"], each["dtype"]).reshape(each["shape"])
            for each in part["inputs"]
        }
        calls: list[list[np.ndarray]] = []
        try:
            for row in range(part["size"]):
                fed = {
                    name: np.asarray(array[row]) if (axis := axes["inputs"][name]) is None
                    else np.expand_dims(array[row], axis)
                    for name, array in inputs.items()
                }  # fmt: skip
                calls.append(session.run(header["outputs"], fed))
        except Exception as error:
            parts[part["name"]] = {"failed": str(error)}
            continue
        described = []
        for index, name in enumerate(header["outputs"]):
            axis = axes["outputs"][name]
            rows = [c[index] if axis is None else c[index].take(0, axis) for c in calls]
            file = f"{number}-{index}.raw"
            np.stack(rows).tofile(outputs / file)
            described.append(
                {"file": file, "dtype": rows[0].dtype.name, "shape": list(np.stack(rows).shape)}
            )
        parts[part["name"]] = {"outputs": described}
    (outputs / "outputs.json").write_text(json.dumps({"parts": parts}))


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("right", [True, False])
def test_recording_with_layout_is_checked(tmp_path: Path, name: str, right: bool) -> None:
    case = CASES[name]
    file = case.export(tmp_path / "model.onnx")
    second = file if right else case.export(tmp_path / "other.onnx", right=False)
    samples = SampleSet.from_arrays(arrays(name))
    tested = TestedFile(file, read_subject(file))
    Sending(tested, samples, Policy.default(), case.model()).write(tmp_path / "sent")
    record(second, tmp_path / "sent", tmp_path / "outputs")
    whence = RecordingSource.model_validate(consumer.META)
    packing = Packing(tested.subject, tmp_path / "sent", tmp_path / "outputs", whence)
    packing.write(tmp_path / "phone")
    result = check(
        file,
        reference=Reference(case.model(), Source(factory="tests:net")),
        data=EvaluationData(samples, recordings={"phone": tmp_path / "phone"}),
        policy=with_recordings(Policy.default(), {"phone": tmp_path / "phone"}),
    )
    problems = {(check.runtime, check.name) for check in result.decision.problems}
    assert {runtime for runtime, _ in problems} <= ({None} if right else {None, "phone"})
    assert (result.decision.verdict is Verdict.PASS) == right, result.decision.problems


@pytest.mark.proof
@pytest.mark.parametrize("name", ["recurrent", pytest.param("graph", marks=exhaustive)])
def test_worker_processes_measure_the_same(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    file = case.export(tmp_path / "model.onnx")
    many = {key: np.concatenate([array] * 4, axis=1 if key == "h0" else 0)
            for key, array in arrays(name).items()}  # fmt: skip
    np.savez(tmp_path / "x.npz", **many)
    reference = Reference.from_factory(f"tests.data.layouts:{name}_model")
    data = EvaluationData.open(tmp_path / "x.npz", batch_size=4)
    checked = CheckedFile(file, reference, data, Policy.default())
    with checked.by_processes(2) as workload:
        result = check(file, reference=reference, data=workload)
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    assert result.evidence.worker_pool is not None
    assert result.evidence.dataset.samples == 48
