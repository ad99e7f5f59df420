"""The pipeline creates and measures the quantized twin, and promotes it with its exact file."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from ruamel.yaml import YAML

from gate import Digest, Evidence
from gate.errors import EvidenceError
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.records.layout import QUANTIZED
from gate.registry.version_files import verify_twin
from gate.signing.statement import SignedStatement
from pipelines import paths, promote, signing, twin, twin_files
from pipelines.promotion_report import PromotionReport
from pipelines.run import tracking_uri
from tests.pipelines.conftest import ONNX

pytestmark = pytest.mark.proof
POLICY = {
    "precision": "quantized",
    "instruments": {
        "noise_samples": 0, "stability_samples": 0, "search_inputs": 0, "probe_relative_diff": 0.5,
    },
    "runtimes": {
        "ort-cpu-optimized": {
            "required": "always",
            "bounds": {
                "top1_agreement": 0.9,
                "confidence_bands": {
                    "over_1_percent": 1.0, "over_5_percent": 0.3, "over_10_percent": 0.1,
                },
                "accuracy_drop": 0.05,
            },
        }
    },
}  # fmt: skip


def set_twin_policy(agreement: float = 0.9) -> None:
    """Write a twin policy into params.yaml."""
    yaml = YAML()
    settings = yaml.load(paths.PARAMS)
    settings["gate"]["twin"] = POLICY
    bounds = settings["gate"]["twin"]["runtimes"]["ort-cpu-optimized"]["bounds"]
    bounds["top1_agreement"] = agreement
    yaml.dump(settings, paths.PARAMS)


def test_pipeline_without_a_twin_promotes(measured: Path) -> None:
    assert twin.main() == 0
    assert [path.name for path in paths.TWIN.iterdir()] == ["none.txt"]
    assert promote.main() == 0
    (line,) = Ledger(paths.database()).entries()
    assert line.twin is None


def test_twin_is_promoted_with_its_exact_file(measured: Path, tmp_path: Path, capsys) -> None:
    set_twin_policy()
    assert twin.main() == 0
    file = paths.TWIN / "model.onnx"
    evidence = Evidence.load(paths.TWIN / "gate" / "evidence.json")
    assert evidence.subject.sha256 == Digest.from_file(file)
    assert evidence.export is not None
    assert evidence.export.settings["of_sha256"] == str(Digest.from_file(ONNX))
    assert promote.main() == 0
    assert f"Quantized twin: PASS, {Digest.from_file(file)}" in capsys.readouterr().out
    (line,) = Ledger(paths.database()).entries()
    assert line.twin is not None
    registry = MlflowRegistry(tracking_uri())
    path = registry.download("tiny", "1", tmp_path)
    verify_twin(path.parent / QUANTIZED, line.twin, label="version 1")
    version = MlflowClient(tracking_uri()).get_model_version("tiny", "1")
    assert version.tags["gate.twin_sha256"] == Digest.from_file(file).hex
    assert "**Quantized twin.** PASS: " in version.description
    tags = MlflowClient(tracking_uri()).get_run(version.run_id).data.tags
    assert tags["gate.twin_verdict"] == "PASS"


def test_release_is_refused_when_the_twin_fails(measured: Path) -> None:
    set_twin_policy(agreement=1.0)
    assert twin.main() == 0
    evidence = Evidence.load(paths.TWIN / "gate" / "evidence.json")
    (runtime,) = evidence.runtimes
    observed = runtime.outputs[0].classification
    assert observed is not None
    tampered_file = observed.model_copy(update={"top1_agreement": 0.99, "top1_disagreements": 4})
    outputs = (runtime.outputs[0].model_copy(update={"classification": tampered_file}),)
    runtimes = (runtime.model_copy(update={"outputs": outputs}),)
    edited = evidence.model_copy(update={"runtimes": runtimes})
    edited.save(paths.TWIN / "gate" / "evidence.json")
    assert promote.main() == 1
    reason = PromotionReport.load(paths.PROMOTION).reason
    assert reason.startswith("the quantized twin: the statement on the evidence is about evidence")
    assert not paths.DECISION_STATEMENT.exists()

    vectors = Digest.from_file(twin_files.VECTORS / "golden.json")
    file = paths.TWIN / twin_files.NAME
    signing.write_measured(twin_files.STATEMENT, signing.signatory(), file, edited, golden=vectors)
    assert promote.main() == 1
    report = PromotionReport.load(paths.PROMOTION)
    assert report.outcome == "refused"
    assert "the quantized twin: FAIL" in report.reason
    assert SignedStatement.from_bytes(paths.DECISION_STATEMENT.read_bytes())
    run = MlflowClient(tracking_uri()).get_run(report.run_id)
    assert run.info.status == "FAILED"
    assert run.info.run_name == f"gate FAIL {report.sha256.hex[:6]} twin"
    assert run.data.tags["gate.verdict"] == "FAIL"


def test_policy_with_a_twin_requires_one(measured: Path) -> None:
    assert twin.main() == 0
    set_twin_policy()
    with pytest.raises(EvidenceError):
        promote.main()
