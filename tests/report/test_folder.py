import pytest

from gate import Decision, Evidence
from gate.errors import StorageError
from gate.records.layout import CheckArguments
from gate.report.folder import read_report, write_report
from gate.summary.summarize import summarize
from tests.report.samples import failed, passed
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]


def test_records_of_a_report_are_read_back(tmp_path):
    decision, evidence = failed()
    write_report(tmp_path / "report", decision, evidence, summary=summarize(decision, evidence))
    assert Evidence.load(tmp_path / "report/evidence.json").digest() == decision.evidence_sha256
    assert Decision.load(tmp_path / "report/decision.json").digest() == decision.digest()
    names = {path.name for path in (tmp_path / "report").rglob("*") if path.is_file()}
    assert names >= {"report.md", "report.html", "bound_usage.svg"}


def test_report_commands_have_the_file_names_of_the_check(tmp_path):
    decision, evidence = failed()
    write_report(tmp_path, decision, evidence, summary=summarize(decision, evidence))
    CheckArguments(model="my model.onnx", inputs="x.npz").save(tmp_path / "arguments.json")
    command = str(read_report(tmp_path).summary.steps[-1].command)
    assert command.startswith("gate check 'my model.onnx' ")
    assert f"--inputs x.npz --report {tmp_path}" in command


def test_old_figures_are_removed_and_other_files_kept(tmp_path):
    decision, evidence = passed()
    write_report(tmp_path, decision, evidence, summary=summarize(decision, evidence))
    (tmp_path / "plots/mine.svg").write_bytes(b"mine")
    bare = evidence.model_copy(update={"runtimes": ()})
    empty = decision.model_copy(update={"checks": ()})
    write_report(tmp_path, empty, bare, summary=summarize(empty, bare))
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["mine.svg"]


def test_unwritable_folder_is_a_storage_error(tmp_path):
    (tmp_path / "report").write_text("a file is in the way")
    with pytest.raises(StorageError, match="cannot write"):
        write_report(tmp_path / "report", *passed(), summary=summarize(*passed()))
