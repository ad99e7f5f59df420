"""`gate report` renders the page of a check from its records."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from gate import decide
from gate.records.localization import Explanation
from gate.report.folder import write_report
from gate.summary.summarize import summarize
from tests.builders import incumbent, policy
from tests.commands.running import create_runner
from tests.report import report_records

_run, _json = create_runner("report")
STRICT = """gate:
  task: classification
  runtimes:
    ort-cpu:
      required: always
      bounds: {noise_ratio: 1.0e-3, top1_agreement: 1.0}
"""


@pytest.fixture(autouse=True)
def reused_charts() -> None:
    """Draw every chart anew, because the page must equal the original."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    for name, case in (("good", report_records.passed()), ("bad", report_records.rejected())):
        write_report(
            folder / name,
            case.decision,
            case.evidence,
            summary=summarize(case.decision, case.evidence, explanation=case.explanation),
            explanation=case.explanation,
        )
    return folder


@pytest.fixture
def reports(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize("place", ["bad", "bad/evidence.json"])
def test_report_renders_the_same_page_from_records(capsys, reports: Path, place: str) -> None:
    page = reports / "bad/report.html"
    before = page.read_text()
    page.unlink()
    (reports / "bad/pictures").mkdir()
    (reports / "bad/pictures/notes.txt").write_text("no picture")
    code, out, _ = _run(capsys, place)
    assert code == 0
    assert out.rstrip().endswith("report  bad/report.html")
    assert page.read_text() == before
    assert report_records.LAYER in before


@pytest.mark.further
def test_stored_thumbnails_are_shown(capsys, reports: Path) -> None:
    (reports / "bad/pictures").mkdir()
    (reports / "bad/pictures/45.png").write_bytes(report_records.pictures()[45])
    assert _run(capsys, "bad", "--output", "new/page.html")[0] == 0
    assert (reports / "new/page.html").read_text().count("data:image/png") == 1


def test_report_with_another_policy_decides_again(capsys, reports: Path) -> None:
    (reports / "strict.yaml").write_text(STRICT)
    (reports / "good/decision.json").unlink()
    code, plain = _json(capsys, "good", "--policy", "strict.yaml")
    assert (code, plain["verdict"], plain["output"]) == (0, "FAIL", "good/report.html")
    assert plain["story"]["headline"]["verdict"] == "FAIL"


@pytest.mark.further
def test_two_reports_are_compared(capsys, reports: Path) -> None:
    code, out, _ = _run(capsys, "good", "bad")
    assert code == 0
    changed = {line.strip().split("  ")[0] for line in out.splitlines()}
    assert {"verdict", "noise ratio"} <= changed
    assert re.search(r"noise ratio +0\.9997 +2\.878e\+04 +worse", out)
    assert "did not change" in out
    page = (reports / "bad/comparison.html").read_text()
    assert 0 < page.find("Comparison with the other report") < page.find("findings-title")
    assert "▼ worse" in page
    assert re.search(r"\d+ unchanged values</summary>", page)
    _, same, _ = _run(capsys, "good", "good")
    assert re.search(r"^(\d+) of \1 did not change$", same, flags=re.MULTILINE)


@pytest.mark.further
def test_report_with_another_policy_keeps_the_comparison(capsys, reports: Path) -> None:
    case = report_records.passed()
    evidence = case.evidence
    compared = incumbent(
        subject_sha256=evidence.subject.sha256,
        data_sha256=evidence.dataset.sha256,
        samples=evidence.dataset.samples,
    )
    asks = policy(incumbent={"min_agreement": 0.5})
    decide(asks, evidence, incumbent=compared, decided_at="now").save(
        reports / "good/decision.json"
    )
    (reports / "asks.json").write_text(asks.to_json())
    summary = _json(capsys, "good", "--policy", "asks.json")[1]["story"]
    (check,) = [w["check"] for w in summary["words"] if w["check"]["name"] == "incumbent"]
    assert check["verdict"] == "PASS"


class TestInconsistentRecords:
    def test_evidence_without_a_decision_is_refused(self, capsys, reports: Path) -> None:
        (reports / "good/decision.json").unlink()
        code, out, err = _run(capsys, "good")
        assert (code, out) == (2, "")
        assert "good/decision.json does not exist" in err
        assert "--policy" in err

    def test_decision_on_other_evidence_is_refused(self, capsys, reports: Path) -> None:
        shutil.copy(reports / "bad/decision.json", reports / "good/decision.json")
        code, _, err = _run(capsys, "good")
        assert code == 2
        assert "decides on the evidence sha256:" in err

    @pytest.mark.further
    def test_explanation_of_another_file_is_ignored(self, capsys, reports: Path) -> None:
        case = report_records.rejected()
        result = case.explanation.localisation
        assert result is not None
        second = result.model_copy(update={"subject_sha256": case.decision.policy_sha256})
        second.save(reports / "bad/localisation.json")
        # It is of an earlier file, and says nothing.
        assert _run(capsys, "bad")[0] == 0
        assert report_records.LAYER not in (reports / "bad/report.html").read_text()
        Explanation(localisation=result).save(reports / "bad/explanation.json")
        assert _run(capsys, "bad")[0] == 0
        assert report_records.LAYER in (reports / "bad/report.html").read_text()
