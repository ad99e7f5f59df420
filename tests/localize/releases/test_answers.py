"""Every part is right, and the chain answers otherwise with the files: what of it is to blame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gate import cli
from gate.api import EvaluationResult
from gate.api import check as check_
from gate.localize.locate_part import explain_chain
from gate.measure.job import EvaluationData, Reference
from gate.multi_file.release import MultiFileRelease
from gate.policy.policy import Policy
from gate.summary.summarize import summarize
from tests.multi_file import tiny

QUICK = Policy.model_validate_json(
    '{"task": "tensors", "instruments": {"probes": false, "search_inputs": 0}, "runtimes": '
    '{"ort-cpu": {"required": "always", "bounds": {"max_abs_diff": 0.001}}}}'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parts")
    tiny.exported(place)
    rectified = tiny.build_rectified()
    tiny.export(rectified.get_submodule("head"), place / "rectified.onnx", shape=(4,), name="boxes")
    return place


def release(folder: Path, chain: str) -> Path:
    rectified = chain in ("run_and_keep", "run_on_a_copy")
    path = tiny.release(
        folder, encoder="encoder.onnx", head="rectified.onnx" if rectified else "head.onnx"
    )
    path.write_text(path.read_text().replace("tiny:run", f"tiny:{chain}"))
    return path


def judged(folder: Path, chain: str, factory: str) -> EvaluationResult:
    return check_(
        release(folder, chain),
        reference=Reference.from_factory(f"tests.multi_file.tiny:{factory}"),
        data=EvaluationData.open(folder / "x.npy", batch_size=8),
        policy=QUICK,
    )


def found(verdicted: EvaluationResult) -> dict[str, Any] | None:
    chained = verdicted.job.chained
    assert isinstance(chained, MultiFileRelease)
    return explain_chain(verdicted.job, chained, runtime="ort-cpu")


def test_a_part_that_overwrites_what_it_is_given_is_named(folder: Path) -> None:
    """As an activation in place does: its file leaves the features as they were."""
    verdicted = judged(folder, "run_and_keep", "build_rectified")
    assert not verdicted.decision.passed
    assert all(check.part is None for check in verdicted.decision.problems)
    headline = summarize(
        verdicted.decision, verdicted.evidence, explanation=verdicted.explanation
    ).headline
    assert "the part head (its x) writes into its input" in headline.sentence
    assert "x.clone()" in str(headline.remedy)


def test_on_a_copy_it_is_right(folder: Path) -> None:
    verdicted = judged(folder, "run_on_a_copy", "build_rectified")
    assert verdicted.decision.passed, verdicted.decision.problems
    assert found(verdicted) is None


def test_a_chain_that_tells_files_from_modules_is_to_blame(folder: Path) -> None:
    verdicted = judged(folder, "run_by_kind", "build")
    assert not verdicted.decision.passed
    blamed = found(verdicted)
    assert blamed is not None
    assert blamed["seam_code"] == "differs"
    assert (blamed["seam_params"]["output"], blamed["seam_params"]["error"]) == (
        "boxes", pytest.approx(0.1, rel=1e-3),
    )  # fmt: skip


def test_the_command_says_it_and_writes_no_marked_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "--reference",
        "tests.multi_file.tiny:build_rectified",
        "--inputs",
        str(folder / "x.npy"),
    ]
    marked = tmp_path / "marked.onnx"
    path = str(release(folder, "run_and_keep"))
    assert cli.main(["locate", path, *asked, "--save", str(marked)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Each part is right by itself. In PyTorch the part head" in printed
    assert "not written: no part diverges" in printed
    assert not marked.exists()
    assert cli.main(["locate", str(release(folder, "run_on_a_copy")), *asked]) == 0
