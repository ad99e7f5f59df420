"""Golden vectors are stored with the version and verified there."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from gate.errors import DigestMismatch, EvidenceError
from gate.golden.folder import GOLDEN_JSON, read_golden
from gate.golden.verify import verify_golden
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.policy import Policy
from gate.records.evidence import ModelCode
from gate.registry.interface import CHAMPION, Tag
from gate.registry.release import GoldenFolder, Release
from gate.storage.digest import Digest
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.promoting import promote
from tests.registry.releases import evidence, onnx_file, onnx_file_with_data, release
from tests.registry.servers import make_run
from tests.registry.simulator import Simulator, Watched

POLICY = builders.policy()


@pytest.fixture
def registry(tmp_path: Path) -> tuple[MlflowRegistry, str]:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return MlflowRegistry(uri), make_run(uri, artifacts=tmp_path / "artifacts")


def with_golden(path: Path, folder: Path, *, policy: Policy = POLICY, **overrides: Any) -> Release:
    origin = vectors.origin().model_copy(update={"policy_sha256": policy.digest()})
    vectors.golden_of(folder, path, **{"origin": origin, **overrides})
    return release(path, golden=GoldenFolder.open(folder), policy=policy)


def external(path: Path) -> tuple[Path, dict[str, Any]]:
    weights = vectors.weights(onnx_file(path.with_name("single.onnx")))
    outputs = {"logits": vectors.ExpectedOutput(vectors.inputs() @ weights, 1e-4, 1.0)}
    return onnx_file_with_data(path), {"outputs": outputs}


@pytest.mark.parametrize("kind", ["one file", "external data"])
def test_version_contains_its_golden_vectors(
    registry, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    mlflow, run_id = registry
    path, overrides, policy = onnx_file(tmp_path / "model.onnx"), {}, POLICY
    if kind == "external data":  # which the policy forbids by default
        path, overrides = external(tmp_path / "model.onnx")
        instruments = POLICY.instruments.model_copy(update={"graph_forbid": ()})
        policy = POLICY.model_copy(update={"instruments": instruments})
    of = with_golden(path, tmp_path / "golden", policy=policy, **overrides)
    of = dataclasses.replace(of, run_id=run_id)
    promotion = promote(mlflow, of, policy=policy, ledger=ledger)
    assert promotion.outcome == "promoted", promotion.reason
    downloaded = mlflow.download(of.model_name, "1", tmp_path / "down")
    tag = mlflow.version(of.model_name, "1").tags[Tag.GOLDEN]
    assert tag == Digest.from_file(tmp_path / "golden" / GOLDEN_JSON).hex
    assert verify_golden(downloaded, downloaded.parent / "golden").passed
    again = promote(mlflow, of, policy=policy, ledger=ledger)
    assert again.outcome == "unchanged"


def test_new_vectors_of_an_unchanged_file_do_not_replace_the_stored_ones(tmp_path, ledger) -> None:
    """None, or those of another version of PyTorch."""
    path, registry = onnx_file(tmp_path / "model.onnx"), Simulator()
    of = with_golden(path, tmp_path / "golden")
    bare = Simulator("bare")
    assert promote(bare, release(path), policy=POLICY, ledger=ledger).outcome == "promoted"
    assert Tag.GOLDEN not in bare.versions[0].tags
    assert promote(bare, of, policy=POLICY, ledger=ledger).outcome == "unchanged"
    assert promote(registry, of, policy=POLICY, ledger=ledger).outcome == "promoted"
    origin = vectors.origin().model_copy(
        update={"policy_sha256": POLICY.digest(), "versions": {"torch": "99"}}
    )
    vectors.golden_of(tmp_path / "other", path, origin=origin)
    again = release(path, golden=GoldenFolder.open(tmp_path / "other"), policy=POLICY)
    assert promote(registry, again, policy=POLICY, ledger=ledger).outcome == "unchanged"
    first, second = ledger.entries()[2:]
    assert again.golden_sha256 != first.golden_sha256
    assert second.golden_sha256 == first.golden_sha256


def test_vectors_of_another_file_or_policy_are_refused(ledger, tmp_path: Path, first) -> None:
    second = with_golden(onnx_file(tmp_path / "other.onnx", seed=9), tmp_path / "golden")
    wrong = dataclasses.replace(first, golden=second.golden)
    with pytest.raises(DigestMismatch, match="the file of the golden vectors"):
        promote(Simulator(), wrong, policy=POLICY, ledger=ledger)
    vectors.golden_of(tmp_path / "loose", first.onnx_path)
    loose = dataclasses.replace(first, golden=GoldenFolder.open(tmp_path / "loose"))
    with pytest.raises(DigestMismatch, match="the policy of the golden vectors"):
        promote(Simulator(), loose, policy=POLICY, ledger=ledger)
    with pytest.raises(EvidenceError, match=r"golden\.json"):
        GoldenFolder.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("computed", "measured"), [("old", "new"), (None, "new"), ("old", None), ("new", "new")]
)
def test_vectors_of_other_model_code_are_refused(
    ledger, tmp_path: Path, computed: str | None, measured: str | None
) -> None:
    def code(version: str | None) -> ModelCode | None:
        files = {"nowhere.models": builders.digest(str(version))}
        return version and ModelCode(files=files, packages={})

    path, old = onnx_file(tmp_path / "model.onnx"), code(computed)
    origin = vectors.origin().model_copy(
        update={"policy_sha256": POLICY.digest(), "code_sha256": old and old.digest()}
    )
    vectors.golden_of(tmp_path / "golden", path, origin=origin)
    source = builders.evidence().source.model_copy(update={"code": code(measured)})
    of = release(
        path, golden=GoldenFolder.open(tmp_path / "golden"), evidence=evidence(path, source=source)
    )
    if computed == measured:
        assert promote(Simulator(), of, policy=POLICY, ledger=ledger).outcome == "promoted"
        return
    with pytest.raises(EvidenceError, match="computed with the model code"):
        promote(Simulator(), of, policy=POLICY, ledger=ledger)


def test_release_digests_are_computed_once_when_opened(tmp_path: Path) -> None:
    of = with_golden(onnx_file(tmp_path / "model.onnx"), tmp_path / "golden")
    before = (of.golden_sha256, of.draft())
    shutil.rmtree(tmp_path / "golden")
    of.onnx_path.unlink()
    assert (of.golden_sha256, of.draft()) == before


def test_vectors_replaced_during_upload_are_refused(ledger, tmp_path: Path) -> None:
    """They were verified, and then exchanged for others that are whole, too."""
    path, registry = onnx_file(tmp_path / "model.onnx"), Watched(Simulator())
    of = with_golden(path, tmp_path / "golden")

    def exchange(call: str, _: int) -> None:
        if call == "create_version":
            vectors.golden_of(tmp_path / "golden", path, inputs={"input": vectors.inputs() + 1})

    registry.before = exchange
    with pytest.raises(DigestMismatch, match=r"wrong golden vectors: .* has digest"):
        promote(registry, of, policy=POLICY, ledger=ledger)
    assert registry.inner.aliases == {}
    assert ledger.entries() == ()


@pytest.mark.parametrize("how", ["exchange", "remove", "damage"])
def test_vectors_changed_in_the_registry_stop_the_promotion(
    registry, ledger: Ledger, tmp_path: Path, how: str
) -> None:
    mlflow, run_id = registry
    path = onnx_file(tmp_path / "model.onnx")
    of = dataclasses.replace(with_golden(path, tmp_path / "golden"), run_id=run_id)
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
            vectors.golden_of(stored.parent, path, inputs={"input": vectors.inputs() + 1})

    watched.after = tamper
    with pytest.raises(DigestMismatch, match="golden|digest"):
        promote(watched, of, policy=POLICY, ledger=ledger)
    assert mlflow.alias(of.model_name, CHAMPION) is None
    assert ledger.entries() == ()
    # The next call finishes the job with a version of its own.
    assert promote(mlflow, of, policy=POLICY, ledger=ledger).version == "2"
