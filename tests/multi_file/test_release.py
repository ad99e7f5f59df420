"""Several files are checked as one release, and each problem names its part."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from gate.api import EvaluationResult, build_job
from gate.api import check as check_
from gate.decision.catalog import CHAIN
from gate.decision.check_result import Verdict
from gate.decision.decide import decide
from gate.distributed.worker import JobSpec
from gate.errors import DataError, GateError, InputMismatch, ModelError, PolicyError
from gate.golden.folder import read_golden
from gate.golden.tolerance import refit
from gate.golden.verify import verify_golden
from gate.measure.artifacts import write_golden_of
from gate.measure.job import EvaluationData, Reference
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.registry.release import EvaluatedFile, GoldenFolder, VerificationRules
from gate.report.error_charts import bound_usage_chart
from gate.report.model_charts import depth_chart
from gate.summary.render import render_check
from gate.summary.summarize import summarize
from tests.multi_file import tiny

POLICY = Policy.model_validate_json(
    '{"task": "auto", "instruments": {"probes": false, "search_inputs": 0, "stability_samples": 0},'
    ' "runtimes": {"ort-cpu": {"required": "always", "bounds": {"noise_ratio": 1.5}}}}'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    tiny.export_files(path)
    return path


def check_release(
    path: Path, *, model: str = "build", policy: Policy = POLICY, batch_size: int = 8
) -> EvaluationResult:
    return check_(
        path,
        reference=Reference.from_factory(f"tests.multi_file.tiny:{model}"),
        data=EvaluationData.open(path.with_name("x.npy"), batch_size=batch_size),
        policy=policy,
    )


def check_files(folder: Path, **files: str) -> EvaluationResult:
    return check_release(tiny.write_release(folder, **files))


def copy_release(folder: Path, target: Path) -> Path:
    """Copy the files of a release, so that a test can change them."""
    for name in ("encoder.onnx", "head.onnx", "x.npy"):
        shutil.copy(folder / name, target)
    return target


def write_release_file(folder: Path, chain: str, parts: str) -> Path:
    path = folder / "release.yaml"
    path.write_text(f"chain: tests.multi_file.tiny:{chain}\nparts: {{{parts}}}\n")
    return path


@pytest.fixture(scope="module")
def passing_result(folder: Path) -> EvaluationResult:
    path = tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    return check_release(path, policy=Policy.default())


@pytest.fixture(scope="module")
def outdated(folder: Path) -> EvaluationResult:
    """The result for a release whose head has other weights."""
    return check_files(folder, encoder="encoder.onnx", head="yesterday.onnx")


def summary(result: EvaluationResult) -> Any:
    return summarize(result.decision, result.evidence, explanation=result.explanation).headline


def test_good_release_passes(passing_result: EvaluationResult) -> None:
    evidence = passing_result.evidence
    assert passing_result.decision.passed, passing_result.decision.problems
    assert set(evidence.parts) == {"encoder", "head"} == set(evidence.subject.parts)
    assert [spec.name for spec in evidence.subject.outputs] == ["boxes", "peak"]
    assert evidence.subject.external_data == ("encoder.onnx", "head.onnx")
    runtime = evidence.runtime("ort-cpu")
    assert runtime is not None
    assert [output.name for output in runtime.outputs] == ["boxes", "peak"]
    assert runtime.nodes_per_provider["CPUExecutionProvider"] >= 2
    assert (
        evidence.parts["head"].dataset.samples == 24
    )  # the inputs that the chain passed to the head
    assert evidence.parts["head"].graph is not None
    assert {check.part for check in passing_result.decision.checks} == {None, "encoder", "head"}


def test_digest_covers_all_files(
    folder: Path, passing_result: EvaluationResult, outdated: EvaluationResult
) -> None:
    assert outdated.evidence.subject.sha256 != passing_result.evidence.subject.sha256
    tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    passing_result.job.candidate.verify()


def test_outdated_part_is_named(folder: Path, outdated: EvaluationResult) -> None:
    assert outdated.decision.verdict is Verdict.FAIL
    headline = summary(outdated)
    assert headline.sentence.startswith(
        "In the part head: weight differs from the model's in 4 of 12 elements"
    )
    assert headline.blamed == "head: weight"
    assert {c.part for c in outdated.decision.problems} == {None, "head"}
    result = outdated.explanation.localisation
    assert result is not None
    assert result.part == "head"
    chart = depth_chart(result)
    assert chart is not None
    assert chart.title.startswith("Error along the depth of the part head (")
    assert "in the part head: " in (
        EvaluatedFile(
            onnx_path=folder / "release.yaml",
            evidence=outdated.evidence,
            decision=outdated.decision,
        ).refusal_reason
        or ""
    )
    words = summarize(
        outdated.decision, outdated.evidence, explanation=outdated.explanation
    ).check_rows
    numbers = bound_usage_chart(words)
    assert numbers is not None
    assert "head / noise_ratio" in numbers.svg


def test_layout_mismatch_between_parts_is_named(folder: Path) -> None:
    result = check_files(folder, encoder="turned.onnx", head="head.onnx")
    assert result.decision.verdict is Verdict.FAIL
    assert "In the part encoder" in summary(result).sentence
    runtime = result.evidence.runtime("ort-cpu")
    assert runtime is not None
    assert "at the seam before the part head: the chain passes float32 1×5 as 'x'" in str(
        runtime.failure
    )
    (broken,) = [c for c in result.decision.problems if c.name == "runtime" and c.part is None][:1]
    assert render_check(broken, "remedy") == CHAIN


def test_recording_is_refused_for_a_multi_file_release(folder: Path) -> None:
    path = tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    arguments = {"phone": folder}
    workload = EvaluationData.open(folder / "x.npy", batch_size=8)
    with pytest.raises(PolicyError, match="a recording is about one file"):
        build_job(
            path, reference=Reference.from_factory("tests.multi_file.tiny:build"),
            data=replace(workload, recordings=arguments), policy=Policy.default(),
        )  # fmt: skip


def test_swapped_parts_are_named(folder: Path) -> None:
    with pytest.raises(InputMismatch, match="the part encoder: "):
        check_files(folder, encoder="head.onnx", head="encoder.onnx")


@pytest.mark.parametrize(
    ("chain", "text"),
    [
        ("never_calls_head", "the chain never calls the part head"),
        (
            "breaks",
            r"the chain fails with the PyTorch modules: KeyError: 'image'. Its batch has input",
        ),
        ("nothing", "has no function 'nothing' for the chain"),
    ],
)
def test_failing_chain_is_an_error(folder: Path, chain: str, text: str) -> None:
    path = tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    path.write_text(path.read_text().replace("tiny:run", f"tiny:{chain}"))
    with pytest.raises(GateError, match=text):
        check_release(path)


def test_missing_module_is_named(folder: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no submodule 'neck' for the part neck; its submodules: encoder"
    ):
        check_files(folder, neck="encoder.onnx", head="head.onnx")


def update_evidence(evidence: Evidence, **update: Any) -> Evidence:
    return evidence.model_copy(update=update)


@pytest.mark.parametrize("lost", ["encoder", "head"])
def test_evidence_without_a_part_does_not_pass(passing_result: EvaluationResult, lost: str) -> None:
    parts = {name: part for name, part in passing_result.evidence.parts.items() if name != lost}
    decision = decide(
        passing_result.policy,
        update_evidence(passing_result.evidence, parts=parts),
        decided_at="now",
    )
    assert decision.verdict is Verdict.ERROR
    assert any(c.part == lost and c.code == "unmeasured" for c in decision.problems)


def test_evidence_of_another_file_does_not_pass(passing_result: EvaluationResult) -> None:
    parts = passing_result.evidence.parts
    same_parts = {"encoder": parts["encoder"], "head": parts["encoder"]}
    decision = decide(
        passing_result.policy,
        update_evidence(passing_result.evidence, parts=same_parts),
        decided_at="now",
    )
    assert decision.verdict is Verdict.ERROR


def test_failing_part_fails_the_release(passing_result: EvaluationResult) -> None:
    """The chain itself still passes."""
    head = passing_result.evidence.parts["head"]
    runtimes = tuple(
        r.model_copy(update={"outputs": (), "failure": "broken"}) if r.runtime == "ort-cpu" else r
        for r in head.runtimes
    )
    parts = {**passing_result.evidence.parts, "head": update_evidence(head, runtimes=runtimes)}
    decision = decide(
        passing_result.policy,
        update_evidence(passing_result.evidence, parts=parts),
        decided_at="now",
    )
    assert decision.verdict is not Verdict.PASS


def test_release_is_measured_by_one_process(passing_result: EvaluationResult, folder: Path) -> None:
    reference = Reference.from_factory("tests.multi_file.tiny:build")
    with pytest.raises(PolicyError, match="only a single file"):
        JobSpec.from_job(passing_result.job, reference, EvaluationData.open(folder / "x.npy"))


def test_golden_vectors_cover_each_part_and_the_chain(
    passing_result: EvaluationResult, folder: Path, tmp_path: Path
) -> None:
    tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    golden = write_golden_of(tmp_path, passing_result.job, evidence=passing_result.evidence)
    assert [output.name for output in golden.outputs] == ["boxes", "peak"]
    assert {name: part.model.file for name, part in golden.parts.items()} == {
        "encoder": "encoder.onnx",
        "head": "head.onnx",
    }
    vectors = read_golden(tmp_path)
    verification = verify_golden(passing_result.job.candidate.path, tmp_path)
    assert verification.passed, verification.problems
    assert [(o.part, o.name) for o in verification.outputs] == [
        ("encoder", "voxels"),
        ("head", "boxes"),
    ]
    again = refit(
        tmp_path, tmp_path / "again", policy=passing_result.policy, evidence=passing_result.evidence
    )
    assert again == golden
    assert vectors.parts["head"].inputs["x"].shape == (8, 4)
    evaluated = EvaluatedFile(
        onnx_path=passing_result.job.candidate.path,
        evidence=passing_result.evidence,
        decision=passing_result.decision,
        golden=GoldenFolder.open(tmp_path),
    )
    evaluated.verified(passing_result.policy, VerificationRules())


def test_part_with_data_in_a_subfolder_is_verified(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "release"
    (path / "sub").mkdir(parents=True)
    for name in ("encoder.onnx", "x.npy"):
        shutil.copy(folder / name, path)
    onnx.save(
        onnx.load(folder / "head.onnx"), path / "sub/head.onnx", save_as_external_data=True,
        location="head.data", size_threshold=0,
    )  # fmt: skip
    result = check_files(path, encoder="encoder.onnx", head="sub/head.onnx")
    assert result.evidence.parts["head"].subject.external_data == ("head.data",)
    write_golden_of(tmp_path / "golden", result.job, evidence=result.evidence)
    verification = verify_golden(result.job.candidate.path, tmp_path / "golden")
    assert verification.passed, verification.problems


def test_two_parts_of_one_module_have_separate_calls(folder: Path, tmp_path: Path) -> None:
    shutil.copy(copy_release(folder, tmp_path) / "head.onnx", tmp_path / "again.onnx")
    files = "encoder: {file: encoder.onnx}, head: {file: head.onnx}"
    again = "again: {file: again.onnx, reference: head}"
    result = check_release(write_release_file(tmp_path, "runs_head_twice", f"{files}, {again}"))
    assert result.decision.passed, result.decision.problems
    samples = result.evidence.dataset.samples
    assert {part.dataset.samples for part in result.evidence.parts.values()} == {samples}


@pytest.mark.parametrize("names", [("right", "left"), ("a", "b")])
def test_part_is_called_with_keyword_arguments(tmp_path: Path, names: tuple[str, str]) -> None:
    """Pass the arguments in either order, and return a number as one of the outputs."""
    fuse = tiny.split_and_fuse().get_submodule("fuse")
    module = ReversedInputs(fuse) if names == ("right", "left") else fuse
    rows = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    x = torch.from_numpy(rows)
    for part, arguments, inputs, outputs in (
        (tiny.Split(), (x,), ["x"], ["low", "high"]),
        (module, (x, x), list(names), ["fused"]),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                part, arguments, str(tmp_path / f"{outputs[-1]}.onnx"), dynamo=False,
                input_names=inputs, output_names=outputs,
                dynamic_axes={name: {0: "n"} for name in (*inputs, *outputs)},
            )  # fmt: skip
    path = write_release_file(
        tmp_path, "run_by_keyword", "split: {file: high.onnx}, fuse: {file: fused.onnx}"
    )
    result = check_release(path, model="split_and_fuse", batch_size=24)
    assert result.decision.passed, result.decision.problems


def test_part_without_a_sample_axis_has_separate_samples(tmp_path: Path) -> None:
    model, rng = tiny.masked(), np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(8, 4)).astype(np.float32))
    masked_inputs = {name: rng.normal(size=(8, 4)).astype(np.float32) for name in ("x", "mask")}
    np.savez(tmp_path / "own.npz", **masked_inputs)
    tiny.export(model.get_submodule("stem"), tmp_path / "stem.onnx", shape=(4,), name="features")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.get_submodule("masked"), (torch.zeros(2, 4), torch.zeros(4, 4)),
            str(tmp_path / "masked.onnx"), dynamo=False, input_names=["x", "mask"],
            output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip

    def check_with_inputs(more: str) -> EvaluationResult:
        parts = f"stem: {{file: stem.onnx}}, masked: {{file: masked.onnx{more}}}"
        return check_release(write_release_file(tmp_path, "run_masked", parts), model="masked")

    with pytest.raises(DataError, match="the part masked: they share no batch axis"):
        check_with_inputs("")
    result = check_with_inputs(f", inputs: {tmp_path / 'own.npz'}")
    assert result.decision.passed, result.decision.problems


def fix_batch(path: Path, batch: int) -> None:
    """Fix the batch size of all inputs and outputs of a file."""
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    del model.graph.value_info[:]
    onnx.save(model, path)


def test_fixed_batch_is_used(folder: Path, tmp_path: Path) -> None:
    fix_batch(copy_release(folder, tmp_path) / "head.onnx", 4)
    result = check_files(tmp_path, encoder="encoder.onnx", head="head.onnx")
    assert result.decision.passed, result.decision.problems
    assert result.evidence.subject.inputs[0].shape == (4, 2, 5, 5)
    assert write_golden_of(tmp_path / "golden", result.job, evidence=result.evidence).parts


def test_different_fixed_batches_are_refused(folder: Path, tmp_path: Path) -> None:
    fix_batch(copy_release(folder, tmp_path) / "encoder.onnx", 4)
    fix_batch(tmp_path / "head.onnx", 2)
    result = check_files(tmp_path, encoder="encoder.onnx", head="head.onnx")
    assert not result.decision.passed
    runtime = result.evidence.runtime("ort-cpu")
    assert runtime is not None
    assert "at the seam before the part encoder: the chain passes float32 8" in str(runtime.failure)


class ReversedInputs(nn.Module):
    """The wrapped module with its inputs in reverse order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, right: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        return self.inner(left, right)


def test_part_that_is_never_called_is_named(folder: Path, tmp_path: Path) -> None:
    np.save(copy_release(folder, tmp_path) / "own.npy", np.zeros((8, 4), np.float32))
    head = f"head: {{file: head.onnx, inputs: {tmp_path / 'own.npy'}}}"
    path = write_release_file(
        tmp_path, "never_calls_head", f"encoder: {{file: encoder.onnx}}, {head}"
    )
    with pytest.raises(ModelError, match="never calls the part head"):
        check_release(path)
