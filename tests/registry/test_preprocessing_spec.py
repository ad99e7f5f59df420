"""The preprocessing spec is stored in the version and deployed with the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import helper

from gate import PreprocessSpec
from gate.deploy.store import EXACT
from gate.errors import DigestMismatch, EvidenceError
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.preprocess.spec import spec_path
from gate.records.layout import SPEC
from gate.registry.interface import Tag
from gate.registry.promotion import rollback
from gate.registry.release import Release
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME, evidence, onnx_file, release
from tests.registry.servers import make_run
from tests.registry.simulator import Simulator
from tests.service.registry_setup import Service
from tests.storage.test_untrusted import YAML_BOMB

POLICY = builders.policy()
IMAGENET = PreprocessSpec.imagenet()


def with_image_input(path: Path, *sides: int) -> Path:
    """Change the input to images (default 224 x 224), which the file averages to three values."""
    model = onnx.load(str(path))
    (matrix,) = model.graph.node
    matrix.input[0] = "means"
    mean = helper.make_node("ReduceMean", ["input"], ["means"], axes=[2, 3], keepdims=0)
    model.graph.node.insert(0, mean)
    shape = ["batch", 3, *(sides or (224, 224))]
    arguments = helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, shape)
    model.graph.input[0].CopyFrom(arguments)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def make_release(folder: Path, seed: int = 0, *, spec: PreprocessSpec = IMAGENET) -> Release:
    path = with_image_input(onnx_file(folder / f"{seed}.onnx", seed=seed))
    spec.save(folder / f"{seed}.json")
    source = builders.evidence().source.model_copy(update={"preprocess_sha256": spec.digest()})
    measured = evidence(path, source=source)
    return release(path, evidence=measured, preprocessing=folder / f"{seed}.json")


def test_version_contains_its_preprocessing_spec(tmp_path: Path, ledger: Ledger) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    registry, run_id = MlflowRegistry(uri), make_run(uri, artifacts=tmp_path / "artifacts")
    new_release = replace(make_release(tmp_path), run_id=run_id)
    assert promote(registry, new_release, ledger=ledger).outcome == "promoted"
    path = registry.download(NAME, "1", tmp_path / "down")
    assert PreprocessSpec.load(spec_path(path)) == IMAGENET
    assert registry.version(NAME, "1").tags[Tag.PREPROCESS] == IMAGENET.digest().hex
    assert ledger.entries()[-1].preprocess_sha256 == IMAGENET.digest()
    assert promote(registry, new_release, ledger=ledger).outcome == "unchanged"


def test_spec_that_differs_from_the_evidence_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    new_release = make_release(tmp_path)
    IMAGENET.model_copy(update={"std": (0.5, 0.5, 0.5)}).save(tmp_path / "0.json")
    with pytest.raises(DigestMismatch, match="preprocessing spec"):
        promote(Simulator(), new_release, ledger=ledger)
    (tmp_path / "0.json").write_text("[]")
    with pytest.raises(DigestMismatch, match="not a valid preprocessing spec"):
        promote(Simulator(), new_release, ledger=ledger)


def test_spec_is_refused_when_measured_without_one(tmp_path: Path, ledger: Ledger) -> None:
    new_release = make_release(tmp_path)
    source_without_spec = new_release.evidence.source.model_copy(update={"preprocess_sha256": None})
    measured = evidence(new_release.onnx_path, source=source_without_spec)
    second = release(
        new_release.onnx_path, evidence=measured, preprocessing=new_release.preprocessing
    )
    with pytest.raises(EvidenceError, match="measured without preprocessing"):
        promote(Simulator(), second, ledger=ledger)


@pytest.mark.parametrize("sides", [None, (32, 224)])
def test_spec_that_does_not_fit_the_input_is_refused(
    tmp_path: Path, ledger: Ledger, sides: tuple[int, int] | None
) -> None:
    path = onnx_file(tmp_path / "other.onnx")
    measured = evidence(
        with_image_input(path, *sides) if sides else path,
        source=make_release(tmp_path).evidence.source,
    )
    second = release(path, evidence=measured, preprocessing=tmp_path / "0.json")
    with pytest.raises(EvidenceError, match=r"spec makes float32 \[batch, 3, 224, 224\], the file"):
        promote(Simulator(), second, ledger=ledger)


def test_rollback_refuses_a_version_whose_spec_was_replaced(tmp_path: Path, ledger: Ledger) -> None:
    registry = Simulator()
    for seed in (1, 2):
        promote(registry, make_release(tmp_path, seed), ledger=ledger)
    registry.versions[0].extra_files[f"preprocessing/{SPEC}"] = b"{}"
    with pytest.raises(DigestMismatch, match="spec"):
        rollback(registry, NAME, ledger=ledger, reason="slow")


def test_release_with_a_different_spec_becomes_a_new_version(tmp_path: Path, ledger) -> None:
    registry = Simulator()
    first = make_release(tmp_path)
    for new_release in (first, replace(first, preprocessing=None), first):
        assert promote(registry, new_release, ledger=ledger).outcome == "promoted"
    bgr = IMAGENET.model_copy(update={"std": (0.5, 0.5, 0.5)})
    assert promote(registry, make_release(tmp_path, spec=bgr), ledger=ledger).version == "3"
    assert {entry.action for entry in ledger.entries()} == {"promoted"}


def test_deployed_slot_contains_the_preprocessing_spec(tmp_path: Path) -> None:
    service = Service(tmp_path)
    setup = service.setup

    def serves_with_spec() -> bool:
        live = service.store.live(NAME)
        return live is not None and live.slots[EXACT].preprocessing == IMAGENET

    created = make_release(tmp_path, 1)
    for number, new_release in (("1", replace(created, preprocessing=None)), ("2", created)):
        promote(setup.registry, new_release, policy=setup.policy, ledger=setup.ledger)
        assert service.reconcile_once() == [("deploy", "deployed", number)]
        assert serves_with_spec() is (number == "2")
    assert service.reconcile_once() == []
    promote(setup.registry, make_release(tmp_path, 2), policy=setup.policy, ledger=setup.ledger)
    setup.registry.versions[2].extra_files[f"preprocessing/{SPEC}"] = YAML_BOMB
    assert ("guard", "reverted", "2") in service.reconcile_once()
    assert serves_with_spec()
