"""The stages export, parity and promote, run in this process: their files, runs and errors."""

from __future__ import annotations

import errno
import importlib
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mlflow import MlflowClient
from onnx import numpy_helper

from gate import Decision, Digest, Evidence, PreprocessSpec, cli, verify_golden
from gate.errors import ExportRefused, RegistryUnavailable
from gate.golden.folder import read_golden
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.signing.local_keys import LocalKeys
from gate.signing.predicates import CodeVersion
from gate.signing.subjects import parse_resource_uri
from gate.signing.trust import Trust
from gate.signing.verification import StatementPair, summary_in
from gate.summary.render import render_check
from gate.summary.summary import Change
from pipelines import export, parity, paths, promote, train
from pipelines.export_report import ExportReport
from pipelines.override import override
from pipelines.params import load_policy
from pipelines.promotion_report import PromotionReport
from pipelines.run import recorded_run, tracking_uri
from pipelines.stage import Stopped, exit_code
from tests.pipelines.conftest import ONNX


def client() -> MlflowClient:
    return MlflowClient(tracking_uri(), tracking_uri())


def champion() -> Any:
    return client().get_model_version_by_alias("tiny", "champion")


def page(stage: str = "promote") -> Any:
    reference = recorded_run(stage)
    assert reference is not None
    return client().get_run(reference.run_id)


def change_weight() -> None:
    """Multiply one weight tensor of the exported file by 1.5. The file remains valid."""
    model = onnx.load(ONNX)
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4)
    changed = numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name)
    tensor.CopyFrom(changed)
    onnx.save(model, ONNX)


CI_FILES = (paths.SUMMARY, paths.JUNIT, paths.OPENMETRICS)


def leave_ci_files() -> None:
    """Write CI files as an earlier run would."""
    for path in CI_FILES:
        path.write_text("of the run before")


def test_all_stages_share_one_digest_and_one_run(promoted_project: Path) -> None:
    evidence, report = Evidence.load(paths.EVIDENCE), ExportReport.load(paths.EXPORT_REPORT)
    assert evidence.export == report.record
    assert evidence.source == report.source
    digest = Digest.from_file(ONNX)
    version, run = champion(), page()
    folder = client().download_artifacts(version.run_id, "")  # the run's artifacts are readable
    names = {path.name for path in Path(folder).rglob("*")}
    assert {
        "report.html", "decision.json", "evidence.json", "checks.json", "policy.json",
        "params.yaml", "export.json", "confidence.svg", "differences.svg", "samples.csv",
    } <= names  # fmt: skip
    rows = paths.SAMPLES.read_text().splitlines()[1:]
    runtimes = [runtime for runtime in evidence.runtimes if runtime.measured]
    assert len(rows) == evidence.dataset.samples * len(runtimes)
    worst = {item.sample for runtime in runtimes for item in runtime.outputs[0].worst}
    pictures = {path.name for path in paths.WORST_PICTURES.iterdir()}
    assert pictures == ({f"{sample}.png" for sample in worst} or {"none.txt"})
    assert ExportReport.load(paths.EXPORT_REPORT).subject.sha256 == digest
    assert Evidence.load(paths.EVIDENCE).subject.sha256 == digest
    assert version.tags["gate.sha256"] == run.data.tags["gate.sha256"] == digest.hex
    assert version.run_id == run.info.run_id == page("export").info.run_id
    assert run.info.status == "FINISHED"
    assert run.info.run_name == f"gate PASS {digest.hex[:6]}"
    assert run.data.tags["gate.verdict"] == "PASS"
    assert "None" not in {*run.data.tags.values(), *run.data.params.values()}
    assert run.data.tags["gate.promotion"] == "promoted"
    assert run.data.tags["gate.model_version"] == "tiny/1"
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("PASS: ")
    assert "#/models/tiny/versions/1" in note
    status, _, body = version.description.partition("\n\n")
    assert status.startswith("Status: champion since ")
    assert body.startswith("PASS: ")
    assert f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}" in version.description


def test_gate_promote_records_the_same_as_the_pipeline(promoted_project: Path) -> None:
    command = ["promote", str(ONNX), "--name", "other", "--report", str(paths.REPORTS)]
    command += ["--policy", str(paths.PARAMS), "--preprocessing", str(paths.PREPROCESSING)]
    assert cli.main(command) == 0
    ours, its = page(), client().get_run(client().get_model_version("other", "1").run_id)
    assert ours.info.run_id != its.info.run_id
    assert (its.info.run_name, its.info.status) == (ours.info.run_name, ours.info.status)
    assert its.data.params == ours.data.params
    custom = {"gate.train_run", *(tag for tag in ours.data.tags if tag.startswith("gate.stage."))}
    mlflows = {tag for tag in ours.data.tags if tag.startswith("mlflow.")}
    assert ours.data.tags.keys() - custom - mlflows <= its.data.tags.keys()
    self_check = {name for name in ours.data.metrics if name.startswith("self_check/")}
    assert its.data.metrics.keys() == ours.data.metrics.keys() - self_check
    own_files = {"export.json", "preprocessing.json", "params.yaml", "explanation.json"}
    own_files |= {"twin_checks.json", "twin_numbers.json"}  # tests of twins log into the same run
    drawn_for_the_page = {name for name in artifacts(ours) if name.startswith("plots/")}
    assert artifacts(its) >= artifacts(ours) - own_files - drawn_for_the_page


def artifacts(run: Any) -> set[str]:
    folder = Path(client().download_artifacts(run.info.run_id, ""))
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_promoting_again_changes_nothing(promoted_project: Path) -> None:
    assert promote.main() == 0
    assert PromotionReport.load(paths.PROMOTION).outcome == "unchanged"
    assert paths.SUMMARY.read_text().startswith("## ✅ parity-gate: PASS (tiny)")
    assert "Unchanged: champion is already version 1" in paths.SUMMARY.read_text()
    assert "<failure " not in paths.JUNIT.read_text()
    assert (
        'parity_gate_exit_code{command="promote",model="tiny"} 0.0' in paths.OPENMETRICS.read_text()
    )
    assert str(champion().version) == "1"
    assert page().info.run_id != page("parity").info.run_id  # the first run is unchanged


@pytest.mark.proof
def test_changed_weight_is_refused_and_the_champion_stays(promoted_project: Path) -> None:
    assert export.main() == 0
    change_weight()
    assert parity.main() == 0
    assert promote.main() == 1
    decision = Decision.load(paths.DECISION)
    failed = {check.name for check in decision.problems}
    assert "max_abs_diff" in failed
    assert all(render_check(check, "remedy") for check in decision.problems)
    assert Evidence.load(paths.EVIDENCE).export is None
    assert str(champion().version) == "1"
    assert len(client().search_model_versions("name = 'tiny'")) == 1
    run = page()
    assert run.info.status == "FAILED"
    assert run.info.run_name.startswith(f"gate FAIL {decision.subject_sha256.hex[:6]} ")
    assert run.data.tags["gate.verdict"] == "FAIL"
    assert run.data.tags["gate.headline"]
    assert run.data.tags["gate.promotion"] == "refused"
    assert "max_abs_diff" in run.data.tags["gate.failed_checks"]
    assert "Try:" in run.data.tags["mlflow.note.content"]
    assert Ledger(paths.database()).entries()[-1].action == "refused"


def test_file_changed_after_parity_is_an_error(measured: Path) -> None:
    change_weight()
    leave_ci_files()
    assert exit_code(promote.main) == 2
    assert client().search_registered_models() == []
    assert not paths.PROMOTION.exists()
    assert "could not judge" in paths.SUMMARY.read_text()
    assert "<error " in paths.JUNIT.read_text()
    assert 'parity_gate_verdict{model="",verdict="ERROR"} 1.0' in paths.OPENMETRICS.read_text()


def test_both_statements_are_signed_by_the_project_key(measured: Path, capsys) -> None:
    assert promote.main() == 0
    key = LocalKeys(Path(".gate"), print).signing_key().public
    pair = StatementPair.from_folder(paths.REPORTS)
    evidence, decision = Evidence.load(paths.EVIDENCE), Decision.load(paths.DECISION)
    trust = Trust.from_file(Path(".gate/trust.yaml"))
    assert (
        pair.verify(evidence, decision, trust=trust, now=datetime.now(UTC))[0].key_id == key.key_id
    )
    assert parse_resource_uri(summary_in(pair.decision).resource_uri) == (tracking_uri(), "tiny")
    measured_then, signed_now = (s.statement for s in (pair.evidence, pair.decision))
    golden = "golden/golden.json"
    assert measured_then.digest_of(golden) == Digest.from_file(paths.GOLDEN / "golden.json").hex
    assert signed_now.digest_of(golden) == Ledger(paths.database()).entries()[-1].golden_sha256.hex  # fmt: skip
    assert signed_now.digest_of("preprocessing") == PreprocessSpec.load(paths.PREPROCESSING).digest().hex  # fmt: skip
    code = CodeVersion.model_validate(measured_then.predicate["code"])
    assert (code.commit, code.dirty) == (None, None)  # the test project is not in Git
    assert f"Signed by the key of this folder, {key.short}. " in capsys.readouterr().out
    assert f"signed by local ({key.short})" in paths.PAGE.read_text()
    (line,) = Ledger(paths.database()).entries()
    assert line.signers == (key.key_id,)
    on_the_run = {name for name in artifacts(page()) if name.endswith(".dsse.json")}
    assert on_the_run == {"evidence.dsse.json", "decision.dsse.json"}


def widen_tolerance() -> None:
    file = paths.GOLDEN / "golden.json"
    plain = json.loads(file.read_text())
    plain["outputs"][0]["max_abs_diff"] = 1e9
    file.write_text(json.dumps(plain))


def delete_key() -> None:
    shutil.rmtree(".gate")


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (paths.EVIDENCE_STATEMENT.unlink, "what was measured is not signed"),
        (widen_tolerance, "are not those that were signed when the file was measured"),
        (delete_key, "signed by 0 of the keys that are trusted as measurers"),
    ],
)
def test_unsigned_measurement_is_refused(
    measured: Path, tamper: Callable[[], None], reason: str
) -> None:
    tamper()
    assert promote.main() == 1
    report = PromotionReport.load(paths.PROMOTION)
    assert (report.outcome, report.signed_by) == ("refused", None)
    assert reason in report.reason
    assert Ledger(paths.database()).entries()[-1].reason == report.reason
    assert not paths.DECISION_STATEMENT.exists()
    assert 'id="signed"' not in paths.PAGE.read_text()
    assert client().search_registered_models() == []


def test_edited_evidence_with_nan_is_refused(measured: Path) -> None:
    """NaN in the evidence is rejected, and shown as text, never as a number."""
    plain = json.loads(paths.EVIDENCE.read_text())
    plain["runtimes"][0]["outputs"][0]["max_abs_diff"] = "NaN"
    paths.EVIDENCE.write_text(json.dumps(plain))
    client().delete_run(page("parity").info.run_id)  # so that promote writes all results again
    assert promote.main() == 1
    assert "The evidence was edited" in PromotionReport.load(paths.PROMOTION).reason
    run = page()
    assert run.data.tags["nonfinite.ort-cpu/max_abs_diff"] == "nan"
    assert "ort-cpu/max_abs_diff" not in run.data.metrics
    assert run.data.params["export.opset_version"] == "13"


def test_evidence_without_a_runtime_is_an_error(measured: Path) -> None:
    plain = json.loads(paths.EVIDENCE.read_text())
    plain["runtimes"] = [r for r in plain["runtimes"] if r["runtime"] != "ort-cpu"]
    paths.EVIDENCE.write_text(json.dumps(plain))
    assert promote.main() == 2
    assert PromotionReport.load(paths.PROMOTION).outcome == "refused"
    assert "<error " in paths.JUNIT.read_text()
    assert client().search_registered_models() == []


def test_changed_policy_decides_again_on_the_same_evidence(promoted_project: Path) -> None:
    text = paths.PARAMS.read_text()
    paths.PARAMS.write_text(text.replace("max_abs_diff: 1.0e-4", "max_abs_diff: 0.0"))
    assert promote.main() == 1
    assert str(champion().version) == "1"


@pytest.mark.further
def test_failed_comparison_is_ignored_when_not_required(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RegistryUnavailable("the store is away")

    monkeypatch.setattr("pipelines.champion.load_champion", fail)
    assert promote.main() == 0
    assert "the store is away" in str(Change.load(paths.CHANGE).absent)
    assert "incumbent" not in Decision.load(paths.DECISION).to_plain()
    section = "incumbent: {min_agreement: 0.99}"
    paths.PARAMS.write_text(paths.PARAMS.read_text().replace("incumbent: null", section))
    assert exit_code(promote.main) == 2


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("main", "target"),
    [
        (train.main, "gate.model.checkpoint.files.write_bytes"),
        (export.main, "pathlib.Path.replace"),
        (parity.main, "pipelines.parity.atomic.write_bytes"),
        (promote.main, "gate.storage.record.files.write_text"),
    ],
)
def test_full_disk_loses_nothing(
    measured: Path,
    main: Any,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old_bytes = {path: path.read_bytes() for path in (paths.CHECKPOINT, ONNX, paths.EVIDENCE)}
    with monkeypatch.context() as patch:
        patch.setattr(target, disk_full)
        assert exit_code(main) == 2
    assert "No space left" in capsys.readouterr().err
    for path, content in old_bytes.items():
        assert path == paths.EVIDENCE or path.read_bytes() == content
    runs = client().search_runs([client().get_experiment_by_name("parity-gate").experiment_id])
    assert all(run.info.status in ("FINISHED", "FAILED") for run in runs)
    assert main() == 0


@pytest.mark.parametrize("main", [export.main, promote.main])
def test_unreachable_server_is_reported_by_each_stage(
    measured: Path,
    main: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert exit_code(main) == 2
    error = capsys.readouterr().err
    assert "127.0.0.1:1" in error
    assert "Traceback" not in error


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    ("tamper", "main", "says"),
    [
        (lambda: truncate(ONNX), parity.main, "model.onnx"),
        (ONNX.unlink, parity.main, "model.onnx"),
        (lambda: truncate(paths.CHECKPOINT), export.main, "model.safetensors"),
        (paths.CHECKPOINT.unlink, export.main, "model.safetensors"),
        (lambda: truncate(paths.PREPROCESSING), export.main, "preprocessing.json"),
        (lambda: truncate(paths.EVAL_IMAGES), parity.main, "eval_images.npy"),
        (lambda: truncate(paths.EVIDENCE), promote.main, "not a valid Evidence record"),
        (paths.EVIDENCE.unlink, promote.main, "evidence.json"),
        (lambda: truncate(paths.EXPORT_REPORT), parity.main, "not a valid ExportReport record"),
        (lambda: truncate(paths.run_reference("parity")), promote.main, "RunReference record"),
        (lambda: np.save(paths.EVAL_LABELS, np.zeros(7, np.int64)), parity.main, "labels"),
        (lambda: override(["export.output_names=[a, b]"]), export.main, "output_names"),
        (lambda: override(["model.factory=none.such:model"]), export.main, "none"),
        (lambda: override(["model.factory=torch.nn:Identity"]), export.main, "model.safetensors"),
    ],
)
def test_truncated_or_missing_file_is_named(
    measured: Path, tamper: Any, main: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper()
    leave_ci_files()
    assert exit_code(main) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    name = main.__module__.rpartition(".")[2]
    assert f'<testcase name="stage {name}"' in paths.JUNIT.read_text()
    assert "<error " in paths.JUNIT.read_text()
    assert "could not judge" in paths.SUMMARY.read_text()
    assert f'exit_code{{command="{name}",model=""}} 2.0' in paths.OPENMETRICS.read_text()


@pytest.mark.parametrize("name", ["prepare", "code", "train", "plan", "twin"])
def test_other_stages_report_failures_in_ci_files(
    measured: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    leave_ci_files()
    paths.PARAMS.unlink()
    main = importlib.import_module(f"pipelines.{name}").main
    assert exit_code(main) == 2
    assert f'<testcase name="stage {name}"' in paths.JUNIT.read_text()


def test_refused_export_is_a_failure_in_ci_files(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ExportRefused("every strategy is forbidden by TRC005")

    leave_ci_files()
    monkeypatch.setattr(export, "export_file", refuse)
    assert export.main() == 1
    assert "<failure " in paths.JUNIT.read_text()
    assert "TRC005" in paths.SUMMARY.read_text()
    assert 'exit_code{command="export",model=""} 1.0' in paths.OPENMETRICS.read_text()


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, Stopped])
def test_interrupted_stage_removes_stale_ci_files(
    measured: Path, monkeypatch: pytest.MonkeyPatch, stopped: type[BaseException]
) -> None:
    def stop() -> None:
        raise stopped

    leave_ci_files()
    monkeypatch.setattr(parity, "load_policy", stop)
    assert exit_code(parity.main) not in (0, 1)
    assert not any(path.exists() for path in CI_FILES)


def test_version_contains_golden_vectors(promoted_project: Path, tmp_path: Path) -> None:
    registry = MlflowRegistry(tracking_uri())
    downloaded = registry.download("tiny", "1", tmp_path)
    golden = downloaded.parent / "golden"
    assert champion().tags["gate.golden_sha256"] == Digest.from_file(golden / "golden.json").hex
    assert read_golden(golden).golden.origin.policy_sha256 == load_policy().digest()
    result = verify_golden(downloaded, golden)
    assert result.passed, result.problems
    assert {path.name for path in golden.iterdir()} == {p.name for p in paths.GOLDEN.iterdir()}


def test_promotion_requires_golden_vectors(measured: Path) -> None:
    (paths.GOLDEN / "golden.json").unlink()
    assert exit_code(promote.main) == 2
    assert client().search_registered_models() == []
    assert parity.main() == 0
    assert promote.main() == 0
