"""A quantized twin is stored with its exact file, evaluated by its own policy and promoted with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from gate.errors import DigestMismatch, EvidenceError
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy
from gate.records.evidence import ModelCode
from gate.records.layout import QUANTIZED
from gate.registry.create_version import write_twin
from gate.registry.interface import CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.release import (
    EvaluatedFile,
    GoldenFolder,
    Release,
    VerificationRules,
    digests_of,
)
from gate.registry.verify_release import twin_in
from gate.registry.version_files import twin_file as twin_file_in
from gate.registry.version_files import verify_twin
from gate.storage.digest import Digest
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


def failing(path: Path):
    spoiled = builders.output_parity(
        classification=builders.class_parity(top1_agreement=0.9, top1_disagreements=45)
    )
    return evidence(path, runtimes=(builders.runtime_evidence(outputs=(spoiled,)),))


def made(folder: Path, seed: int = 1, *, twin_seed: int = 100, **overrides: Any) -> Release:
    exact = onnx_file(folder / f"{seed}.onnx", seed=seed)
    small = twin_file(
        folder / f"twin-{seed}-{twin_seed}" / "model.int8.onnx", of=exact, seed=twin_seed
    )
    twin = twin_of(small, policy=TWIN, **overrides)
    return release(exact, policy=POLICY, twin=twin)


def test_exact_file_and_twin_become_one_version(tmp_path: Path, ledger: Ledger) -> None:
    registry, of = Simulator(), made(tmp_path)
    assert promote(registry, of, policy=POLICY, ledger=ledger).outcome == "promoted"
    twin = of.twin
    assert twin is not None
    stored = registry.versions[0]
    assert stored.beside[f"{QUANTIZED}/model.int8.onnx"] == twin.onnx_path.read_bytes()
    assert stored.tags[Tag.TWIN] == Digest.from_file(twin.onnx_path).hex
    (line,) = ledger.entries()
    assert line.twin == digests_of(twin)
    assert promote(registry, of, policy=POLICY, ledger=ledger).outcome == "unchanged"


def test_release_with_a_different_twin_becomes_a_new_version(
    tmp_path: Path, ledger: Ledger
) -> None:
    registry = Simulator()
    promote(registry, made(tmp_path), policy=POLICY, ledger=ledger)
    promotion = promote(registry, made(tmp_path, twin_seed=7), policy=POLICY, ledger=ledger)
    assert (promotion.outcome, promotion.version) == ("promoted", "2")


@pytest.mark.parametrize("lacking", ["twin", "policy"])
def test_twin_in_only_one_of_policy_and_release_is_refused(tmp_path, ledger, lacking) -> None:
    of, policy = made(tmp_path), POLICY
    if lacking == "twin":
        of = replace(of, twin=None)
    else:
        policy = builders.policy()
        of = release(of.onnx_path, policy=policy, twin=of.twin)
    with pytest.raises(EvidenceError, match="both or neither"):
        promote(Simulator(), of, policy=policy, ledger=ledger)
    assert [entry.action for entry in ledger.entries()] == ["refused"]


def test_release_is_refused_when_the_twin_fails(tmp_path: Path, ledger: Ledger) -> None:
    registry, of = Simulator(), made(tmp_path)
    assert of.twin is not None
    bad = twin_of(of.twin.onnx_path, policy=TWIN, evidence=failing(of.twin.onnx_path))
    promotion = promote(registry, replace(of, twin=bad), policy=POLICY, ledger=ledger)
    assert promotion.outcome == "refused"
    assert promotion.reason.startswith("the quantized twin: FAIL")
    assert registry.versions == []


def test_twin_of_another_model_factory_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    of = made(tmp_path)
    assert of.twin is not None
    source = of.evidence.source.model_copy(update={"factory": "another:model"})
    measured = evidence(of.twin.onnx_path, source=source)
    second = twin_of(of.twin.onnx_path, policy=TWIN, evidence=measured)
    with pytest.raises(EvidenceError, match="another:model"):
        promote(Simulator(), replace(of, twin=second), policy=POLICY, ledger=ledger)


@pytest.mark.parametrize(("path", "file", "fits"), [
    ("old.onnx", "another", False), ("moved/old.onnx", "old", True),
])  # fmt: skip
def test_twin_must_have_the_same_reference_file(
    tmp_path: Path, ledger: Ledger, path: str, file: str, fits: bool
) -> None:
    of = made(tmp_path)
    assert of.twin is not None

    def source(path: str, file: str):
        update = {"factory": path, "onnx_sha256": builders.digest(file), "checkpoint_sha256": None}
        return of.evidence.source.model_copy(update=update)

    measured = evidence(of.onnx_path, source=source("old.onnx", "old"))
    twin = twin_of(
        of.twin.onnx_path, policy=TWIN,
        evidence=evidence(of.twin.onnx_path, source=source(path, file)),
    )  # fmt: skip
    pair = replace(release(of.onnx_path, policy=POLICY, evidence=measured), twin=twin)
    if fits:
        assert promote(Simulator(), pair, policy=POLICY, ledger=ledger).outcome == "promoted"
    else:
        with pytest.raises(EvidenceError, match=str(builders.digest(file))):
            promote(Simulator(), pair, policy=POLICY, ledger=ledger)


def test_twin_must_have_the_same_model_code(tmp_path: Path, ledger: Ledger) -> None:
    of = made(tmp_path)
    assert of.twin is not None

    def source(version: str):
        code = ModelCode(files={"nowhere.models": builders.digest(version)}, packages={})
        return of.evidence.source.model_copy(update={"code": code})

    exact = release(
        of.onnx_path, policy=POLICY, evidence=evidence(of.onnx_path, source=source("new"))
    )
    for version, outcome in (("old", None), ("new", "promoted")):
        measured = evidence(of.twin.onnx_path, source=source(version))
        pair = replace(exact, twin=twin_of(of.twin.onnx_path, policy=TWIN, evidence=measured))
        if outcome is None:
            with pytest.raises(EvidenceError, match=r"different model code: nowhere\.models\."):
                promote(Simulator(), pair, policy=POLICY, ledger=ledger)
        else:
            assert promote(Simulator(), pair, policy=POLICY, ledger=ledger).outcome == outcome


def test_twin_quantized_from_another_file_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    """The same factory, trained anew: the twin is that of the old file."""
    of, old = made(tmp_path, 1), made(tmp_path, 2)
    with pytest.raises(EvidenceError, match="was quantized from sha256:"):
        promote(Simulator(), replace(of, twin=old.twin), policy=POLICY, ledger=ledger)
    itself = twin_of(of.onnx_path, policy=TWIN)
    with pytest.raises(EvidenceError, match="from an unknown file"):
        promote(Simulator(), replace(of, twin=itself), policy=POLICY, ledger=ledger)


def by_permissive_policy(twin: EvaluatedFile) -> EvaluatedFile:
    """Judged by a policy that lets everything pass."""
    bounds = Bounds(top1_agreement=0.0, confidence_bands=ConfidenceBands(
        over_1_percent=1.0, over_5_percent=1.0, over_10_percent=1.0))  # fmt: skip
    loose = twin_policy(runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)})
    return twin_of(twin.onnx_path, policy=loose)


def with_edited_evidence(twin: EvaluatedFile) -> EvaluatedFile:
    """Evidence that was made better after the decision on it."""
    return replace(twin, evidence=twin.evidence.model_copy(update={"measured_at": "2027-01-01"}))


def with_changed_file(twin: EvaluatedFile) -> EvaluatedFile:
    """Another file with the same name and origin."""
    proto = onnx.load(str(twin.onnx_path))
    proto.producer_name = "somebody"
    twin.onnx_path.write_bytes(proto.SerializeToString())
    return twin


@pytest.mark.parametrize("tamper", [by_permissive_policy, with_edited_evidence, with_changed_file])
def test_twin_that_differs_from_the_evaluated_one_is_refused(tmp_path, ledger, tamper) -> None:
    of, registry = made(tmp_path), Simulator()
    assert of.twin is not None
    with pytest.raises((DigestMismatch, EvidenceError)):
        promote(registry, replace(of, twin=tamper(of.twin)), policy=POLICY, ledger=ledger)
    assert registry.versions == []
    assert [entry.action for entry in ledger.entries()] == ["refused"]


def test_twin_file_name_must_end_in_onnx(tmp_path: Path, ledger: Ledger) -> None:
    of = made(tmp_path)
    assert of.twin is not None
    path = of.twin.onnx_path.rename(of.twin.onnx_path.with_suffix(".int8"))
    with pytest.raises(EvidenceError, match=r"must end in .onnx"):
        promote(Simulator(), replace(of, twin=replace(of.twin, onnx_path=path)), policy=POLICY,
                ledger=ledger)  # fmt: skip


def with_vectors(of: Release, folder: Path) -> Release:
    """The same twin, now with golden vectors."""
    assert of.twin is not None
    origin = vectors.origin().model_copy(update={"policy_sha256": TWIN.digest()})
    vectors.golden_of(folder, of.twin.onnx_path, origin=origin)
    return replace(of, twin=replace(of.twin, golden=GoldenFolder.open(folder)))


def test_adding_golden_vectors_to_an_unchanged_twin_changes_nothing(tmp_path, ledger) -> None:
    registry, of = Simulator(), made(tmp_path)
    promote(registry, of, policy=POLICY, ledger=ledger)
    again = promote(registry, with_vectors(of, tmp_path / "golden"), policy=POLICY, ledger=ledger)
    assert (again.outcome, again.version) == ("unchanged", "1")
    first, second = ledger.entries()
    assert second.twin == first.twin


def test_twin_digests_are_computed_once_when_opened(tmp_path: Path) -> None:
    of = with_vectors(made(tmp_path), tmp_path / "golden")
    assert of.twin is not None
    before = of.twin_digests
    shutil.rmtree(tmp_path / "golden")
    of.twin.onnx_path.unlink()
    assert of.twin_digests == before


def test_quantized_file_alone_is_refused(tmp_path, ledger) -> None:
    path = onnx_file(tmp_path / "model.onnx")
    promotion = promote(Simulator(), release(path, policy=TWIN), policy=TWIN, ledger=ledger)
    assert promotion.outcome == "refused"
    assert "only as the twin of its exact file" in promotion.reason


def spoil(registry: Simulator, number: str, place: str) -> None:
    registry.versions[int(number) - 1].beside[f"{QUANTIZED}/{place}"] += b"x"


def test_rollback_refuses_a_version_whose_twin_was_replaced(tmp_path: Path, ledger: Ledger) -> None:
    registry = Simulator()
    for seed in (1, 2):
        promote(registry, made(tmp_path, seed), policy=POLICY, ledger=ledger)
    spoil(registry, "1", "model.int8.onnx")
    with pytest.raises(DigestMismatch, match="twin"):
        rollback(registry, NAME, ledger=ledger, reason="slow")
    assert registry.alias(NAME, CHAMPION) == "2"
    assert [entry.action for entry in ledger.entries()][-1] == "refused"


class CorruptingTwin(Simulator):
    def create_version(self, name, draft):
        number = super().create_version(name, draft)
        spoil(self, number, "model.int8.onnx")
        return number


def test_twin_that_reads_back_changed_is_not_promoted(tmp_path: Path, ledger: Ledger) -> None:
    registry = CorruptingTwin()
    with pytest.raises(DigestMismatch):
        promote(registry, made(tmp_path), policy=POLICY, ledger=ledger)
    assert registry.alias(NAME, CHAMPION) is None


def test_twin_and_its_golden_vectors_round_trip_through_mlflow(
    tmp_path: Path, ledger: Ledger
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    registry, run_id = MlflowRegistry(uri), make_run(uri, artifacts=tmp_path / "artifacts")
    exact = onnx_file(tmp_path / "0.onnx", seed=1)
    small = twin_file(tmp_path / "twin" / "model.onnx", of=exact, seed=3)
    origin = vectors.origin().model_copy(update={"policy_sha256": TWIN.digest()})
    vectors.golden_of(tmp_path / "golden", small, origin=origin)
    of = replace(made(tmp_path), run_id=run_id)
    twin = twin_of(small, policy=TWIN, golden=GoldenFolder.open(tmp_path / "golden"))
    of = replace(of, twin=twin)
    assert promote(registry, of, policy=POLICY, ledger=ledger).outcome == "promoted"
    path = registry.download(NAME, "1", tmp_path / "down")
    digests = digests_of(twin)
    assert digests.golden_sha256 is not None
    verify_twin(path.parent / QUANTIZED, digests, label="version 1")
    assert promote(registry, of, policy=POLICY, ledger=ledger).outcome == "unchanged"


def test_twin_written_to_a_folder_is_read_back(tmp_path: Path) -> None:
    of = made(tmp_path).twin
    assert of is not None
    write_twin(of, tmp_path / "laid")
    again = twin_in(tmp_path / "laid", digests_of(of))
    assert again.evidence == of.evidence
    assert again.decision == of.decision
    assert again.verified(TWIN, VerificationRules()) == again


@pytest.mark.parametrize(
    "files",
    [[], ["a.onnx", "b.onnx"], ["a.yaml", "b.yaml"]],
)
def test_twin_folder_must_hold_exactly_one_file(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        onnx_file(tmp_path / name)
    with pytest.raises(EvidenceError, match="expected only"):
        twin_in(tmp_path, digests_of(made(tmp_path / "made").twin))


def test_release_file_takes_precedence_over_its_parts(tmp_path: Path) -> None:
    path = parts.files(tmp_path)
    assert twin_file_in(tmp_path) == path
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(EvidenceError, match=r"encoder.onnx, head.onnx, expected only"):
        twin_file_in(tmp_path)


def test_twin_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.onnx").symlink_to(onnx_file(tmp_path / "out.onnx"))
    with pytest.raises(EvidenceError, match="expected only"):
        twin_in(tmp_path / "in", digests_of(made(tmp_path / "made").twin))


def multi_file_release(folder: Path, *, exact: tuple[str, ...] = ()) -> Release:
    return parts.with_twin(parts.release(parts.files(folder)), policy=POLICY, exact=exact)


@pytest.mark.parametrize("exact", [(), ("encoder",)])
def test_multi_file_release_and_its_twin_become_one_version(
    tmp_path: Path, ledger: Ledger, exact: tuple[str, ...]
) -> None:
    registry, of = Simulator(), multi_file_release(tmp_path, exact=exact)
    assert promote(registry, of, policy=POLICY, ledger=ledger).outcome == "promoted"
    assert of.twin is not None
    stored = registry.versions[0].beside
    for name in ("release.yaml", "encoder.onnx", "head.onnx"):
        there = of.twin.onnx_path.with_name(name).read_bytes()
        assert stored[f"{QUANTIZED}/{name}"] == there
    (line,) = ledger.entries()
    assert line.twin == digests_of(of.twin)
    assert promote(registry, of, policy=POLICY, ledger=ledger).outcome == "unchanged"


def _evaluated_again(of: Release, path: Path) -> Release:
    return replace(of, twin=parts.twin(path, policy=TWIN))


def _part_of_an_older_file(of: Release) -> Release:
    path = _path(of)
    old = onnx_file(of.onnx_path.parent / "yesterday" / "head.onnx", seed=77)
    twin_file(path.with_name("head.onnx"), of=old, seed=3)
    return _evaluated_again(of, path)


def _swapped_parts(of: Release) -> Release:
    path = _path(of)
    item, two = (path.with_name(f"{name}.onnx") for name in parts.NAMES)
    first, second = item.read_bytes(), two.read_bytes()
    item.write_bytes(second)
    two.write_bytes(first)
    return _evaluated_again(of, path)


def _edited_release_file(of: Release, old: str, new: str) -> Release:
    path = _path(of)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return _evaluated_again(of, path)


def _single_file_twin(of: Release) -> Release:
    small = twin_file(of.onnx_path.parent / "single" / "model.onnx", of=of.onnx_path, seed=3)
    return replace(of, twin=twin_of(small, policy=TWIN))


def _single_exact_file(of: Release) -> Release:
    exact = of.onnx_path.with_name("head.onnx")
    return release(exact, policy=POLICY, twin=of.twin)


def _part_of_unknown_origin(of: Release) -> Release:
    onnx_file(_path(of).with_name("encoder.onnx"), seed=4)
    return _evaluated_again(of, _path(of))


def _all_exact(of: Release) -> Release:
    folder = of.onnx_path.parent / "all-exact"
    return _evaluated_again(of, parts.twin_files(folder, of=of.onnx_path, exact=parts.NAMES))


def _replaced_after_evaluation(of: Release) -> Release:
    exact = of.onnx_path.with_name("head.onnx")
    twin_file(_path(of).with_name("head.onnx"), of=exact, seed=99)
    return of


def _path(of: Release) -> Path:
    assert of.twin is not None
    return of.twin.onnx_path


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (_part_of_an_older_file, "the part head of the twin .* was quantized from sha256"),
        (_swapped_parts, "the part encoder of the twin .* was quantized from sha256"),
        (_part_of_unknown_origin, "the part encoder of the twin .* was quantized from an unknown file"),
        (_all_exact, "no part of the twin .* is quantized"),
        (_replaced_after_evaluation, r"the part head \(.*head.onnx\) has digest"),
        (lambda of: _edited_release_file(of, "tiny:run", "tiny:other"), "the chain of the twin .* is .*other"),
        (
            lambda of: _edited_release_file(of, "  head: {file", "  neck: {file"),
            "the part head has the reference none in the twin",
        ),
        (
            lambda of: _edited_release_file(of, "head.onnx}", "head.onnx, reference: again}"),
            "the part head of the twin .* computes like again, .* like head",
        ),
        (_single_file_twin, "is a release of several files, its twin .* is one file"),
        (_single_exact_file, "is one file, its twin .* is a release of several files"),
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
    registry, of = Simulator(), multi_file_release(tmp_path)
    promote(registry, of, policy=POLICY, ledger=ledger)
    (tmp_path / "down").mkdir()
    folder = registry.download(NAME, "1", tmp_path / "down").parent / QUANTIZED
    assert of.twin is not None
    digests = digests_of(of.twin)
    verify_twin(folder, digests, label="version 1")
    for name in ("encoder.onnx", "head.onnx", "release.yaml"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept + b" ")
        with pytest.raises(DigestMismatch):
            verify_twin(folder, digests, label="version 1")
        (folder / name).write_bytes(kept)
