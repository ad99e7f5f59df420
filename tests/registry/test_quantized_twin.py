"""A quantized twin is stored with its exact file, evaluated by its own policy and promoted with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from gate import Digest
from gate.errors import DigestMismatch, EvidenceError
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy
from gate.records.evidence import ModelCode
from gate.records.layout import QUANTIZED
from gate.registry.interface import CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.release import (
    EvaluatedFile,
    Release,
    digests_of,
)
from gate.registry.version_files import twin_file as twin_file_in
from gate.registry.version_files import verify_twin
from tests import builders
from tests.golden_vectors import vectors
from tests.registry import parts
from tests.registry.promoting import promote
from tests.registry.releases import (
    NAME,
    evidence,
    onnx_file,
    release,
    twin_file,
    twin_of,
    twin_policy,
)
from tests.registry.servers import make_run
from tests.registry.simulator import Simulator

TWIN = twin_policy()
POLICY = builders.policy(twin=TWIN)


def failing_evidence(path: Path):
    low_agreement = builders.output_parity(
        classification=builders.class_parity(top1_agreement=0.9, top1_disagreements=45)
    )
    return evidence(path, runtimes=(builders.runtime_evidence(outputs=(low_agreement,)),))


def make_release(folder: Path, seed: int = 1, *, twin_seed: int = 100, **overrides: Any) -> Release:
    exact = onnx_file(folder / f"{seed}.onnx", seed=seed)
    quantized = twin_file(
        folder / f"twin-{seed}-{twin_seed}" / "model.int8.onnx", of=exact, seed=twin_seed
    )
    twin = twin_of(quantized, policy=TWIN, **overrides)
    return release(exact, policy=POLICY, twin=twin)


def test_exact_file_and_twin_become_one_version(tmp_path: Path, ledger: Ledger) -> None:
    registry, new_release = Simulator(), make_release(tmp_path)
    assert promote(registry, new_release, policy=POLICY, ledger=ledger).outcome == "promoted"
    twin = new_release.twin
    assert twin is not None
    stored = registry.versions[0]
    assert stored.extra_files[f"{QUANTIZED}/model.int8.onnx"] == twin.onnx_path.read_bytes()
    assert stored.tags[Tag.TWIN] == Digest.from_file(twin.onnx_path).hex
    (line,) = ledger.entries()
    assert line.twin == digests_of(twin)
    assert promote(registry, new_release, policy=POLICY, ledger=ledger).outcome == "unchanged"


def test_release_with_a_different_twin_becomes_a_new_version(
    tmp_path: Path, ledger: Ledger
) -> None:
    registry = Simulator()
    promote(registry, make_release(tmp_path), policy=POLICY, ledger=ledger)
    promotion = promote(registry, make_release(tmp_path, twin_seed=7), policy=POLICY, ledger=ledger)
    assert (promotion.outcome, promotion.version) == ("promoted", "2")


@pytest.mark.parametrize("lacking", ["twin", "policy"])
def test_twin_in_only_one_of_policy_and_release_is_refused(tmp_path, ledger, lacking) -> None:
    new_release, policy = make_release(tmp_path), POLICY
    if lacking == "twin":
        new_release = replace(new_release, twin=None)
    else:
        policy = builders.policy()
        new_release = release(new_release.onnx_path, policy=policy, twin=new_release.twin)
    with pytest.raises(EvidenceError, match="both or neither"):
        promote(Simulator(), new_release, policy=policy, ledger=ledger)
    assert [entry.action for entry in ledger.entries()] == ["refused"]


def test_release_is_refused_when_the_twin_fails(tmp_path: Path, ledger: Ledger) -> None:
    registry, new_release = Simulator(), make_release(tmp_path)
    assert new_release.twin is not None
    bad = twin_of(
        new_release.twin.onnx_path,
        policy=TWIN,
        evidence=failing_evidence(new_release.twin.onnx_path),
    )
    promotion = promote(registry, replace(new_release, twin=bad), policy=POLICY, ledger=ledger)
    assert promotion.outcome == "refused"
    assert promotion.reason.startswith("the quantized twin: FAIL")
    assert registry.versions == []


def model_code(version: str) -> ModelCode:
    return ModelCode(files={"nowhere.models": builders.digest(version)}, packages={})


def onnx_reference(path: str, file: str) -> dict[str, Any]:
    return {"factory": path, "onnx_sha256": builders.digest(file), "checkpoint_sha256": None}


SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "another factory": ({}, {"factory": "another:model"}, "another:model"),
    "another ONNX file": (
        onnx_reference("old.onnx", "old"), onnx_reference("old.onnx", "another"),
        str(builders.digest("another"))),
    "moved ONNX file": (
        onnx_reference("old.onnx", "old"), onnx_reference("moved/old.onnx", "old"), None),
    "older code": (
        {"code": model_code("new")}, {"code": model_code("old")},
        r"different model code: nowhere\.models\."),
    "same code": ({"code": model_code("new")}, {"code": model_code("new")}, None),
}  # fmt: skip
"""The sources of the exact file and of its twin, and the reason of the refusal."""


@pytest.mark.parametrize(("exact", "twin", "reason"), SOURCES.values(), ids=SOURCES)
def test_twin_must_have_the_same_reference(
    tmp_path: Path, ledger: Ledger, exact: dict, twin: dict, reason: str | None
) -> None:
    made = make_release(tmp_path)
    assert made.twin is not None
    first, second = (
        evidence(path, source=made.evidence.source.model_copy(update=update))
        for path, update in ((made.onnx_path, exact), (made.twin.onnx_path, twin))
    )
    evaluated_twin = twin_of(made.twin.onnx_path, policy=TWIN, evidence=second)
    pair = release(made.onnx_path, policy=POLICY, evidence=first, twin=evaluated_twin)
    if reason is None:
        assert promote(Simulator(), pair, policy=POLICY, ledger=ledger).outcome == "promoted"
        return
    with pytest.raises(EvidenceError, match=reason):
        promote(Simulator(), pair, policy=POLICY, ledger=ledger)


def test_twin_quantized_from_another_file_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    """The same factory was trained again; the twin belongs to the older file."""
    new_release, old = make_release(tmp_path, 1), make_release(tmp_path, 2)
    with pytest.raises(EvidenceError, match="was quantized from sha256:"):
        promote(Simulator(), replace(new_release, twin=old.twin), policy=POLICY, ledger=ledger)
    exact_as_twin = twin_of(new_release.onnx_path, policy=TWIN)
    with pytest.raises(EvidenceError, match="from an unknown file"):
        promote(Simulator(), replace(new_release, twin=exact_as_twin), policy=POLICY, ledger=ledger)


def evaluate_permissively(twin: EvaluatedFile) -> EvaluatedFile:
    """Evaluate the twin by a policy that accepts every result."""
    bounds = Bounds(top1_agreement=0.0, confidence_bands=ConfidenceBands(
        over_1_percent=1.0, over_5_percent=1.0, over_10_percent=1.0))  # fmt: skip
    loose = twin_policy(runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)})
    return twin_of(twin.onnx_path, policy=loose)


def edit_evidence(twin: EvaluatedFile) -> EvaluatedFile:
    """Change the evidence after the decision."""
    return replace(twin, evidence=twin.evidence.model_copy(update={"measured_at": "2027-01-01"}))


def change_file(twin: EvaluatedFile) -> EvaluatedFile:
    """Write another file with the same name and origin."""
    proto = onnx.load(str(twin.onnx_path))
    proto.producer_name = "somebody"
    twin.onnx_path.write_bytes(proto.SerializeToString())
    return twin


@pytest.mark.parametrize("tamper", [evaluate_permissively, edit_evidence, change_file])
def test_twin_that_differs_from_the_evaluated_one_is_refused(tmp_path, ledger, tamper) -> None:
    new_release, registry = make_release(tmp_path), Simulator()
    assert new_release.twin is not None
    with pytest.raises((DigestMismatch, EvidenceError)):
        promote(
            registry,
            replace(new_release, twin=tamper(new_release.twin)),
            policy=POLICY,
            ledger=ledger,
        )
    assert registry.versions == []
    assert [entry.action for entry in ledger.entries()] == ["refused"]


def test_twin_file_name_must_end_in_onnx(tmp_path: Path, ledger: Ledger) -> None:
    new_release = make_release(tmp_path)
    assert new_release.twin is not None
    path = new_release.twin.onnx_path.rename(new_release.twin.onnx_path.with_suffix(".int8"))
    with pytest.raises(EvidenceError, match=r"must end in .onnx"):
        promote(Simulator(), replace(new_release, twin=replace(new_release.twin, onnx_path=path)), policy=POLICY,
                ledger=ledger)  # fmt: skip


def add_vectors(new_release: Release, folder: Path) -> Release:
    """Return the release whose twin has golden vectors."""
    assert new_release.twin is not None
    golden = vectors.write_golden_of(new_release.twin.onnx_path, folder, TWIN)
    return replace(new_release, twin=replace(new_release.twin, golden=golden))


def test_adding_golden_vectors_to_an_unchanged_twin_changes_nothing(tmp_path, ledger) -> None:
    registry, new_release = Simulator(), make_release(tmp_path)
    promote(registry, new_release, policy=POLICY, ledger=ledger)
    again = promote(
        registry, add_vectors(new_release, tmp_path / "golden"), policy=POLICY, ledger=ledger
    )
    assert (again.outcome, again.version) == ("unchanged", "1")
    first, second = ledger.entries()
    assert second.twin == first.twin


def test_quantized_file_alone_is_refused(tmp_path, ledger) -> None:
    path = onnx_file(tmp_path / "model.onnx")
    promotion = promote(Simulator(), release(path, policy=TWIN), policy=TWIN, ledger=ledger)
    assert promotion.outcome == "refused"
    assert "only as the twin of its exact file" in promotion.reason


def corrupt_twin_file(registry: Simulator, number: str, name: str) -> None:
    registry.versions[int(number) - 1].extra_files[f"{QUANTIZED}/{name}"] += b"x"


def test_rollback_refuses_a_version_whose_twin_was_replaced(tmp_path: Path, ledger: Ledger) -> None:
    registry = Simulator()
    for seed in (1, 2):
        promote(registry, make_release(tmp_path, seed), policy=POLICY, ledger=ledger)
    corrupt_twin_file(registry, "1", "model.int8.onnx")
    with pytest.raises(DigestMismatch, match="twin"):
        rollback(registry, NAME, ledger=ledger, reason="slow")
    assert registry.alias(NAME, CHAMPION) == "2"
    assert [entry.action for entry in ledger.entries()][-1] == "refused"


def test_twin_and_its_golden_vectors_round_trip_through_mlflow(
    tmp_path: Path, ledger: Ledger
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    registry, run_id = MlflowRegistry(uri), make_run(uri, artifacts=tmp_path / "artifacts")
    exact = onnx_file(tmp_path / "0.onnx", seed=1)
    quantized = twin_file(tmp_path / "twin" / "model.onnx", of=exact, seed=3)
    golden = vectors.write_golden_of(quantized, tmp_path / "golden", TWIN)
    new_release = replace(make_release(tmp_path), run_id=run_id)
    twin = twin_of(quantized, policy=TWIN, golden=golden)
    new_release = replace(new_release, twin=twin)
    assert promote(registry, new_release, policy=POLICY, ledger=ledger).outcome == "promoted"
    path = registry.download(NAME, "1", tmp_path / "down")
    digests = digests_of(twin)
    assert digests.golden_sha256 is not None
    verify_twin(path.parent / QUANTIZED, digests, label="version 1")
    assert promote(registry, new_release, policy=POLICY, ledger=ledger).outcome == "unchanged"


@pytest.mark.parametrize("files", [[], ["a.onnx", "b.onnx"], ["a.yaml", "b.yaml"], ["link.onnx"]])
def test_twin_folder_must_hold_exactly_one_file(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "twin").mkdir()
    for name in files:
        target = onnx_file(tmp_path / name)
        if name == "link.onnx":
            (tmp_path / "twin" / name).symlink_to(target)
        else:
            target.rename(tmp_path / "twin" / name)
    with pytest.raises(EvidenceError, match="expected only"):
        twin_file_in(tmp_path / "twin")


def test_release_file_takes_precedence_over_its_parts(tmp_path: Path) -> None:
    path = parts.write_release(tmp_path)
    assert twin_file_in(tmp_path) == path
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(EvidenceError, match=r"encoder.onnx, head.onnx, expected only"):
        twin_file_in(tmp_path)


def multi_file_release(folder: Path, *, exact: tuple[str, ...] = ()) -> Release:
    return parts.with_twin(parts.release(parts.write_release(folder)), policy=POLICY, exact=exact)


@pytest.mark.parametrize("exact", [(), ("encoder",)])
def test_multi_file_release_and_its_twin_become_one_version(
    tmp_path: Path, ledger: Ledger, exact: tuple[str, ...]
) -> None:
    registry, new_release = Simulator(), multi_file_release(tmp_path, exact=exact)
    assert promote(registry, new_release, policy=POLICY, ledger=ledger).outcome == "promoted"
    assert new_release.twin is not None
    stored = registry.versions[0].extra_files
    for name in ("release.yaml", "encoder.onnx", "head.onnx"):
        quantized_bytes = new_release.twin.onnx_path.with_name(name).read_bytes()
        assert stored[f"{QUANTIZED}/{name}"] == quantized_bytes
    (line,) = ledger.entries()
    assert line.twin == digests_of(new_release.twin)
    assert promote(registry, new_release, policy=POLICY, ledger=ledger).outcome == "unchanged"


def _evaluate_again(new_release: Release, path: Path) -> Release:
    return replace(new_release, twin=parts.twin(path, policy=TWIN))


def _quantize_part_of_an_older_file(new_release: Release) -> Release:
    path = _twin_path(new_release)
    old = onnx_file(new_release.onnx_path.parent / "yesterday" / "head.onnx", seed=77)
    twin_file(path.with_name("head.onnx"), of=old, seed=3)
    return _evaluate_again(new_release, path)


def _swap_parts(new_release: Release) -> Release:
    path = _twin_path(new_release)
    encoder, head = (path.with_name(f"{name}.onnx") for name in parts.NAMES)
    encoder_bytes, head_bytes = encoder.read_bytes(), head.read_bytes()
    encoder.write_bytes(head_bytes)
    head.write_bytes(encoder_bytes)
    return _evaluate_again(new_release, path)


def _edit_release_file(new_release: Release, old: str, new: str) -> Release:
    path = _twin_path(new_release)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return _evaluate_again(new_release, path)


def _replace_twin_by_single_file(new_release: Release) -> Release:
    quantized = twin_file(
        new_release.onnx_path.parent / "single" / "model.onnx", of=new_release.onnx_path, seed=3
    )
    return replace(new_release, twin=twin_of(quantized, policy=TWIN))


def _replace_exact_by_single_file(new_release: Release) -> Release:
    exact = new_release.onnx_path.with_name("head.onnx")
    return release(exact, policy=POLICY, twin=new_release.twin)


def _replace_part(new_release: Release) -> Release:
    onnx_file(_twin_path(new_release).with_name("encoder.onnx"), seed=4)
    return _evaluate_again(new_release, _twin_path(new_release))


def _copy_all_parts(new_release: Release) -> Release:
    folder = new_release.onnx_path.parent / "all-exact"
    return _evaluate_again(
        new_release, parts.write_twin(folder, of=new_release.onnx_path, exact=parts.NAMES)
    )


def _replace_after_evaluation(new_release: Release) -> Release:
    exact = new_release.onnx_path.with_name("head.onnx")
    twin_file(_twin_path(new_release).with_name("head.onnx"), of=exact, seed=99)
    return new_release


def _twin_path(new_release: Release) -> Path:
    assert new_release.twin is not None
    return new_release.twin.onnx_path


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (_quantize_part_of_an_older_file, "the part head of the twin .* was quantized from sha256"),
        (_swap_parts, "the part encoder of the twin .* was quantized from sha256"),
        (_replace_part, "the part encoder of the twin .* was quantized from an unknown file"),
        (_copy_all_parts, "no part of the twin .* is quantized"),
        (_replace_after_evaluation, r"the part head \(.*head.onnx\) has digest"),
        (lambda new_release: _edit_release_file(new_release, "tiny:run", "tiny:other"), "the chain of the twin .* is .*other"),
        (
            lambda new_release: _edit_release_file(new_release, "  head: {file", "  neck: {file"),
            "the part head has the reference none in the twin",
        ),
        (
            lambda new_release: _edit_release_file(new_release, "head.onnx}", "head.onnx, reference: again}"),
            "the part head of the twin .* computes like again, .* like head",
        ),
        (_replace_twin_by_single_file, "is a release of several files, its twin .* is one file"),
        (_replace_exact_by_single_file, "is one file, its twin .* is a release of several files"),
    ],
    ids=[
        "part of an older file", "swapped parts", "part of unknown origin", "nothing quantized",
        "replaced after evaluation", "chain", "part name", "reference", "single-file twin", "single exact file",
    ],
)  # fmt: skip
def test_twin_of_another_multi_file_release_is_refused(
    tmp_path: Path, ledger: Ledger, spoil: Callable[[Release], Release], wanted: str
) -> None:
    registry = Simulator()
    with pytest.raises((DigestMismatch, EvidenceError), match=wanted):
        promote(registry, spoil(multi_file_release(tmp_path)), policy=POLICY, ledger=ledger)
    assert registry.versions == []
    assert [entry.action for entry in ledger.entries()] == ["refused"]


def test_every_file_of_a_downloaded_twin_is_verified(tmp_path: Path, ledger: Ledger) -> None:
    registry, new_release = Simulator(), multi_file_release(tmp_path)
    promote(registry, new_release, policy=POLICY, ledger=ledger)
    (tmp_path / "down").mkdir()
    folder = registry.download(NAME, "1", tmp_path / "down").parent / QUANTIZED
    assert new_release.twin is not None
    digests = digests_of(new_release.twin)
    verify_twin(folder, digests, label="version 1")
    for name in ("encoder.onnx", "head.onnx", "release.yaml"):
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(original + b" ")
        with pytest.raises(DigestMismatch):
            verify_twin(folder, digests, label="version 1")
        (folder / name).write_bytes(original)
