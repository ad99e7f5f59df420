"""A multi-file release is verified, promoted and rolled back as one version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from gate import Verdict, decide
from gate.errors import DigestMismatch, EvidenceError
from gate.golden.folder import GOLDEN_JSON
from gate.ledger.ledger import Ledger
from gate.registry.interface import CHAMPION
from gate.registry.promotion import rollback
from gate.registry.release import GoldenFolder, Release
from tests import builders
from tests.registry import parts, releases
from tests.registry.promoting import promote
from tests.registry.simulator import Simulator

POLICY = builders.policy()
Tamper = Callable[[Release], Release]


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return parts.with_golden(parts.release(parts.write_release(tmp_path)))


def promote_release(new_release: Release, ledger: Ledger, registry: Simulator | None = None):
    return promote(registry or Simulator(), new_release, policy=POLICY, ledger=ledger)


def test_multi_file_release_becomes_one_version(
    release: Release, ledger: Ledger, tmp_path: Path
) -> None:
    registry = Simulator()
    result = promote_release(release, ledger, registry)
    assert (result.outcome, result.version) == ("promoted", "1")
    (line,) = [entry for entry in ledger.entries() if entry.action == "promoted"]
    assert line.sha256 == release.evidence.subject.sha256
    assert line.golden_sha256 == release.golden_sha256
    (tmp_path / "back").mkdir()
    path = registry.download(releases.NAME, "1", tmp_path / "back")
    for name in ("release.yaml", "encoder.onnx", "head.onnx"):
        assert (path.parent / name).read_bytes() == (tmp_path / name).read_bytes()
    assert promote_release(release, ledger, registry).outcome == "unchanged"
    second = parts.release(parts.write_release(tmp_path / "other", seed=1))
    assert promote_release(second, ledger, registry).version == "2"
    result = rollback(registry, releases.NAME, ledger=ledger, reason="worse boxes")
    assert registry.aliases[CHAMPION] == result.version == "1"


def _swap_parts(release: Release) -> Release:
    encoder, head = (release.onnx_path.with_name(f"{name}.onnx") for name in parts.NAMES)
    encoder_bytes, head_bytes = encoder.read_bytes(), head.read_bytes()
    encoder.write_bytes(head_bytes)
    head.write_bytes(encoder_bytes)
    return release


def _change_after_evaluation(change: Callable[[Path], object]) -> Tamper:
    """Return a `Tamper` that changes the release file or a part after the evaluation."""

    def tamper(release: Release) -> Release:
        change(release.onnx_path)
        return release

    return tamper


def _with_evidence(release: Release, **update: object) -> Release:
    measured = release.evidence.model_copy(update=update)
    decision = decide(POLICY, measured, decided_at=releases.DECIDED_AT)
    return dataclasses.replace(release, evidence=measured, decision=decision)


def _remove_part_evidence(release: Release) -> Release:
    remaining = {
        name: new_release for name, new_release in release.evidence.parts.items() if name != "head"
    }
    return _with_evidence(release, parts=remaining)


def _move_part_outside_the_folder(release: Release) -> Release:
    subject = release.evidence.subject
    head = subject.parts["head"].model_copy(update={"file": "../head.onnx"})
    named = subject.parts | {"head": head}
    return _with_evidence(release, subject=subject.model_copy(update={"parts": named}))


def _rename_parts(release: Release) -> Release:
    subject = release.evidence.subject
    named = {f"{name}_2": part for name, part in subject.parts.items()}
    measured = {f"{name}_2": part for name, part in release.evidence.parts.items()}
    return _with_evidence(
        release, subject=subject.model_copy(update={"parts": named}), parts=measured
    )


def _change_shapes(release: Release) -> Release:
    head = release.evidence.parts["head"]
    changed_subject = head.subject.model_copy(update={"inputs": head.subject.outputs})
    measured = head.model_copy(update={"subject": changed_subject})
    return _with_evidence(release, parts=release.evidence.parts | {"head": measured})


def _keep_vectors_of_one_part(release: Release) -> Release:
    assert release.golden is not None
    created = release.golden.golden
    remaining = {name: part for name, part in created.parts.items() if name != "head"}
    created.model_copy(update={"parts": remaining}).save(release.golden.path / GOLDEN_JSON)
    return dataclasses.replace(release, golden=GoldenFolder.open(release.golden.path))


INCONSISTENT: dict[str, tuple[Tamper, str]] = {
    "replaced part": (
        _change_after_evaluation(lambda path: releases.onnx_file(path.with_name("head.onnx"), seed=9)),
        r"the part head \(.*head.onnx\) has digest"),
    "swapped": (_swap_parts, r"the part encoder \(.*encoder.onnx\) has digest"),
    "missing": (
        _change_after_evaluation(lambda path: path.with_name("head.onnx").unlink()), "the part head .*is missing"),
    "edited release file": (
        _change_after_evaluation(lambda path: path.write_text(f"{path.read_text()}  neck: {{file: head.onnx}}\n")),
        "release.yaml has digest"),
    "unmeasured": (_remove_part_evidence, "the evidence does not contain the part head"),
    "outside the folder": (_move_part_outside_the_folder, "does not describe .*: parts .*../head.onnx"),
    "renamed": (_rename_parts, "parts .*encoder_2.*, not .*encoder"),
    "other shapes": (_change_shapes, "does not describe .*head.onnx: inputs"),
    "vectors of one": (_keep_vectors_of_one_part, "were computed with other parts than the release has: head"),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "wanted"), INCONSISTENT.values(), ids=INCONSISTENT)
def test_inconsistent_multi_file_release_is_refused(
    release: Release, ledger: Ledger, tamper: Tamper, wanted: str
) -> None:
    registry = Simulator()
    with pytest.raises((DigestMismatch, EvidenceError), match=wanted):
        promote_release(tamper(release), ledger, registry)
    assert registry.versions == []
    assert [entry.action for entry in ledger.entries()] == ["refused"]


def test_release_is_refused_when_one_part_fails(release: Release, ledger: Ledger) -> None:
    broken = releases.failing_release(release.onnx_path.with_name("head.onnx")).evidence
    failing = _with_evidence(release, parts=release.evidence.parts | {"head": broken})
    failing = dataclasses.replace(failing, golden=None)
    assert failing.decision.verdict is Verdict.FAIL
    registry = Simulator()
    result = promote_release(failing, ledger, registry)
    assert result.outcome == "refused"
    assert "in the part head: " in result.reason
    assert registry.versions == []
