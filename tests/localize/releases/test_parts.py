"""Localization in multi-file releases identifies a part, a seam or the chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gate import EvaluationData, EvaluationResult, Policy, Reference, cli
from gate import check as check_
from gate.api import build_job
from gate.errors import PolicyError
from gate.localize.locate_part import explain_chain, locate_part
from gate.multi_file.release import MultiFileRelease
from gate.summary.summarize import summarize
from tests.multi_file import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts")
    tiny.export_files(path)
    return path


def locate_release(folder, *, chain="run", runtime="ort-cpu", **files):
    path = tiny.write_release(folder, **files)
    path.write_text(path.read_text().replace("tiny:run", f"tiny:{chain}"))
    case = build_job(
        path,
        reference=Reference.from_factory(
            f"tests.multi_file.tiny:build{'_scaled' if chain != 'run' else ''}"
        ),
        data=EvaluationData.open(folder / "x.npy", batch_size=8),
        policy=Policy.default(task="tensors"),
    )
    assert isinstance(case.chained, MultiFileRelease)
    return locate_part(case, case.chained, runtime=runtime, limit=4)


def test_correct_parts_have_no_divergence(folder):
    result = locate_release(folder, encoder="encoder.onnx", head="head.onnx")
    assert not result.diverges
    assert (result.part, result.seam, result.layers) == (None, None, ())
    assert [item["code"] for item in result.outcome] == ["no_part", "parts_fit"]


def test_outdated_part_is_localized(folder):
    result = locate_release(folder, encoder="encoder.onnx", head="yesterday.onnx")
    assert result.diverges
    assert (result.part, result.seam) == ("head", None)
    assert result.layers


def test_seam_is_named_when_each_part_is_correct(folder):
    """Name the seam before a part whose PyTorch module accepts any dtype and whose file accepts
    one.
    """
    result = locate_release(folder, chain="run_in_double", encoder="encoder.onnx", head="head.onnx")
    assert result.part is None
    assert result.diverges
    assert "at the seam before the part head: the chain passes float64" in str(result.seam)
    assert "The fault is between the parts: at the seam" in result.cause


def test_failing_chain_code_is_a_seam(folder):
    result = locate_release(
        folder, chain="run_with_attributes", encoder="encoder.onnx", head="head.onnx"
    )
    assert result.part is None
    assert "the chain fails on the outputs of the files: AttributeError" in str(result.seam)


def test_unknown_runtime_is_refused(folder):
    with pytest.raises(PolicyError, match="names no runtime tract"):
        locate_release(folder, runtime="tract", encoder="encoder.onnx", head="head.onnx")


def test_locate_command_names_part_and_layer(folder, tmp_path, capsys):
    path = tiny.write_release(folder, encoder="encoder.onnx", head="yesterday.onnx")
    arguments = ["locate", str(path), "--reference", "tests.multi_file.tiny:build"]
    arguments += ["--inputs", str(folder / "x.npy")]
    marked = tmp_path / "marked.onnx"
    assert cli.main([*arguments, "--save", str(marked)]) == 1
    assert "part head" in capsys.readouterr().out
    assert marked.is_file()
    assert cli.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["part"] == "head"


QUICK_POLICY = Policy.model_validate_json(
    '{"task": "tensors", "instruments": {"probes": false, "search_inputs": 0}, "runtimes": '
    '{"ort-cpu": {"required": "always", "bounds": {"max_abs_diff": 0.001}}}}'
)


@pytest.fixture(scope="module")
def rectified_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts")
    tiny.export_files(path)
    rectified = tiny.build_rectified()
    tiny.export(rectified.get_submodule("head"), path / "rectified.onnx", shape=(4,), name="boxes")
    return path


def release(rectified_folder: Path, chain: str) -> Path:
    rectified = chain in ("run_and_keep", "run_on_a_copy")
    path = tiny.write_release(
        rectified_folder,
        encoder="encoder.onnx",
        head="rectified.onnx" if rectified else "head.onnx",
    )
    path.write_text(path.read_text().replace("tiny:run", f"tiny:{chain}"))
    return path


def check_release(rectified_folder: Path, chain: str, factory: str) -> EvaluationResult:
    return check_(
        release(rectified_folder, chain),
        reference=Reference.from_factory(f"tests.multi_file.tiny:{factory}"),
        data=EvaluationData.open(rectified_folder / "x.npy", batch_size=8),
        policy=QUICK_POLICY,
    )


def find_chain_fault(verdicted: EvaluationResult) -> dict[str, Any] | None:
    chained = verdicted.job.chained
    assert isinstance(chained, MultiFileRelease)
    return explain_chain(verdicted.job, chained, runtime="ort-cpu")


def test_part_that_writes_into_its_input_is_named(rectified_folder):
    """Name a part that writes into its input, as an in-place activation does; its file does not."""
    verdicted = check_release(rectified_folder, "run_and_keep", "build_rectified")
    assert not verdicted.decision.passed
    assert all(check.part is None for check in verdicted.decision.problems)
    headline = summarize(
        verdicted.decision, verdicted.evidence, explanation=verdicted.explanation
    ).headline
    assert "the part head (its x) writes into its input" in headline.sentence
    assert "x.clone()" in str(headline.remedy)


def test_part_on_a_copy_passes(rectified_folder):
    verdicted = check_release(rectified_folder, "run_on_a_copy", "build_rectified")
    assert verdicted.decision.passed, verdicted.decision.problems
    assert find_chain_fault(verdicted) is None


def test_chain_with_file_dependent_code_is_named(rectified_folder):
    verdicted = check_release(rectified_folder, "run_by_kind", "build")
    assert not verdicted.decision.passed
    chain_fault = find_chain_fault(verdicted)
    assert chain_fault is not None
    assert chain_fault["seam_code"] == "differs"
    assert (chain_fault["seam_params"]["output"], chain_fault["seam_params"]["error"]) == (
        "boxes", pytest.approx(0.1, rel=1e-3),
    )  # fmt: skip


def test_locate_command_without_part_writes_no_marked_file(rectified_folder, tmp_path, capsys):
    reference_arguments = [
        "--reference",
        "tests.multi_file.tiny:build_rectified",
        "--inputs",
        str(rectified_folder / "x.npy"),
    ]
    marked = tmp_path / "marked.onnx"
    path = str(release(rectified_folder, "run_and_keep"))
    assert cli.main(["locate", path, *reference_arguments, "--save", str(marked)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Each part is right by itself. In PyTorch the part head" in printed
    assert "not written: no part diverges" in printed
    assert not marked.exists()
    assert (
        cli.main(["locate", str(release(rectified_folder, "run_on_a_copy")), *reference_arguments])
        == 0
    )
