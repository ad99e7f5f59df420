"""Golden vectors are stored with the version and verified there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gate import Digest, Policy, verify_golden
from gate.errors import DigestMismatch, EvidenceError
from gate.golden.folder import GOLDEN_JSON, read_golden
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.records.evidence import ModelCode
from gate.registry.interface import CHAMPION, Tag
from gate.registry.release import GoldenFolder, Release
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.promoting import promote
from tests.registry.releases import (
    evidence,
    onnx_file,
    onnx_file_with_data,
    policy_with_external_data,
    release,
)
from tests.registry.servers import make_run
from tests.registry.simulator import Simulator, Watched

POLICY = builders.policy()


@pytest.fixture
def registry(tmp_path: Path) -> tuple[MlflowRegistry, str]:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return MlflowRegistry(uri), make_run(uri, artifacts=tmp_path / "artifacts")


def with_golden(path: Path, folder: Path, *, policy: Policy = POLICY, **overrides: Any) -> Release:
    return release(
        path, golden=vectors.write_golden_of(path, folder, policy, **overrides), policy=policy
    )


def external_data_file(path: Path) -> tuple[Path, dict[str, Any]]:
    weights = vectors.weights(onnx_file(path.with_name("single.onnx")))
    outputs = {"logits": vectors.ExpectedOutput(vectors.inputs() @ weights, 1e-4, 1.0)}
    return onnx_file_with_data(path), {"outputs": outputs}


@pytest.mark.parametrize("kind", ["one file", "external data"])
def test_version_contains_its_golden_vectors(
    registry, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    mlflow, run_id = registry
    path, overrides, policy = onnx_file(tmp_path / "model.onnx"), {}, POLICY
    if kind == "external data":
        path, overrides = external_data_file(tmp_path / "model.onnx")
        policy = policy_with_external_data()
    new_release = with_golden(path, tmp_path / "golden", policy=policy, **overrides)
    new_release = dataclasses.replace(new_release, run_id=run_id)
    promotion = promote(mlflow, new_release, policy=policy, ledger=ledger)
    assert promotion.outcome == "promoted", promotion.reason
    downloaded = mlflow.download(new_release.model_name, "1", tmp_path / "down")
    tag = mlflow.version(new_release.model_name, "1").tags[Tag.GOLDEN]
    assert tag == Digest.from_file(tmp_path / "golden" / GOLDEN_JSON).hex
    assert verify_golden(downloaded, downloaded.parent / "golden").passed
    again = promote(mlflow, new_release, policy=policy, ledger=ledger)
    assert again.outcome == "unchanged"


def test_new_vectors_of_an_unchanged_file_do_not_replace_the_stored_ones(tmp_path, ledger) -> None:
    """Promote again without vectors, then with vectors of another PyTorch version."""
    path, registry = onnx_file(tmp_path / "model.onnx"), Simulator()
    new_release = with_golden(path, tmp_path / "golden")
    registry_without_vectors = Simulator("bare")
    assert promote(registry_without_vectors, release(path), ledger=ledger).outcome == "promoted"
    assert Tag.GOLDEN not in registry_without_vectors.versions[0].tags
    assert promote(registry_without_vectors, new_release, ledger=ledger).outcome == "unchanged"
    assert promote(registry, new_release, ledger=ledger).outcome == "promoted"
    origin = vectors.origin().model_copy(
        update={"policy_sha256": POLICY.digest(), "versions": {"torch": "99"}}
    )
    vectors.write_model_vectors(tmp_path / "other", path, origin=origin)
    again = release(path, golden=GoldenFolder.open(tmp_path / "other"), policy=POLICY)
    assert promote(registry, again, ledger=ledger).outcome == "unchanged"
    first, second = ledger.entries()[2:]
    assert again.golden_sha256 != first.golden_sha256
    assert second.golden_sha256 == first.golden_sha256


def test_vectors_of_another_file_or_policy_are_refused(ledger, tmp_path: Path, first) -> None:
    second = with_golden(onnx_file(tmp_path / "other.onnx", seed=9), tmp_path / "golden")
    with_foreign_vectors = dataclasses.replace(first, golden=second.golden)
    with pytest.raises(DigestMismatch, match="the file of the golden vectors"):
        promote(Simulator(), with_foreign_vectors, ledger=ledger)
    vectors.write_model_vectors(tmp_path / "loose", first.onnx_path)
    with_other_policy = dataclasses.replace(first, golden=GoldenFolder.open(tmp_path / "loose"))
    with pytest.raises(DigestMismatch, match="the policy of the golden vectors"):
        promote(Simulator(), with_other_policy, ledger=ledger)
    with pytest.raises(EvidenceError, match=r"golden\.json"):
        GoldenFolder.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("computed", "measured"), [("old", "new"), (None, "new"), ("old", None), ("new", "new")]
)
def test_vectors_of_other_model_code_are_refused(
    ledger, tmp_path: Path, computed: str | None, measured: str | None
) -> None:
    def model_code(version: str | None) -> ModelCode | None:
        files = {"nowhere.models": builders.digest(str(version))}
        return version and ModelCode(files=files, packages={})

    path, old = onnx_file(tmp_path / "model.onnx"), model_code(computed)
    origin = vectors.origin().model_copy(
        update={"policy_sha256": POLICY.digest(), "code_sha256": old and old.digest()}
    )
    vectors.write_model_vectors(tmp_path / "golden", path, origin=origin)
    source = builders.evidence().source.model_copy(update={"code": model_code(measured)})
    new_release = release(
        path, golden=GoldenFolder.open(tmp_path / "golden"), evidence=evidence(path, source=source)
    )
    if computed == measured:
        assert promote(Simulator(), new_release, ledger=ledger).outcome == "promoted"
        return
    with pytest.raises(EvidenceError, match="computed with the model code"):
        promote(Simulator(), new_release, ledger=ledger)


@pytest.mark.parametrize("how", ["exchange", "remove", "damage"])
def test_vectors_changed_in_the_registry_stop_the_promotion(
    registry, ledger: Ledger, tmp_path: Path, how: str
) -> None:
    mlflow, run_id = registry
    path = onnx_file(tmp_path / "model.onnx")
    new_release = dataclasses.replace(with_golden(path, tmp_path / "golden"), run_id=run_id)
    watched = Watched(mlflow)

    def tamper(call: str, index: int) -> None:
        if call != "create_version":
            return
        (stored,) = (tmp_path / "artifacts").rglob(GOLDEN_JSON)
        if how == "remove":
            stored.unlink()
        elif how == "damage":
            array = stored.parent / read_golden(stored.parent).golden.outputs[0].file
            array.write_bytes(bytes(array.stat().st_size))
        else:
            vectors.write_model_vectors(stored.parent, path, inputs={"input": vectors.inputs() + 1})

    watched.after = tamper
    with pytest.raises(DigestMismatch, match="golden|digest"):
        promote(watched, new_release, ledger=ledger)
    assert mlflow.alias(new_release.model_name, CHAMPION) is None
    assert ledger.entries() == ()
    # The next promotion creates a new version.
    assert promote(mlflow, new_release, ledger=ledger).version == "2"
