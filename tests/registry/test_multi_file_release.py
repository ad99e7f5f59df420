"""A multi-file release is one version: verified, promoted and rolled back as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from gate.decision.check_result import Verdict
from gate.decision.decide import decide
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
    return parts.with_golden(parts.release(parts.files(tmp_path)))


def run(of: Release, ledger: Ledger, registry: Simulator | None = None):
    return promote(registry or Simulator(), of, policy=POLICY, ledger=ledger)


def test_multi_file_release_becomes_one_version(
    release: Release, ledger: Ledger, tmp_path: Path
) -> None:
    registry = Simulator()
    result = run(release, ledger, registry)
    assert (result.outcome, result.version) == ("promoted", "1")
    (line,) = [entry for entry in ledger.entries() if entry.action == "promoted"]
    assert line.sha256 == release.evidence.subject.sha256
    assert line.golden_sha256 == release.golden_sha256
    (tmp_path / "back").mkdir()
    path = registry.download(releases.NAME, "1", tmp_path / "back")
    for name in ("release.yaml", "encoder.onnx", "head.onnx"):
        assert (path.parent / name).read_bytes() == (tmp_path / name).read_bytes()
    assert run(release, ledger, registry).outcome == "unchanged"
    second = parts.release(parts.files(tmp_path / "other", seed=1))
    assert run(second, ledger, registry).version == "2"
    result = rollback(registry, releases.NAME, ledger=ledger, reason="worse boxes")
    assert registry.aliases[CHAMPION] == result.version == "1"


def _swapped_parts(release: Release) -> Release:
    item, two = (release.onnx_path.with_name(f"{name}.onnx") for name in parts.NAMES)
    first, second = item.read_bytes(), two.read_bytes()
    item.write_bytes(second)
    two.write_bytes(first)
    return release


def _changed_after_evaluation(change: Callable[[Path], object]) -> Tamper:
    """The release file or one beside it was changed since it was judged."""

    def tamper(release: Release) -> Release:
        change(release.onnx_path)
        return release

    return tamper


def _with_evidence(release: Release, **update: object) -> Release:
    measured = release.evidence.model_copy(update=update)
    decision = decide(POLICY, measured, decided_at=releases.DECIDED_AT)
    return dataclasses.replace(release, evidence=measured, decision=decision)


def _unmeasured_part(release: Release) -> Release:
    kept = {name: of for name, of in release.evidence.parts.items() if name != "head"}
    return _with_evidence(release, parts=kept)


def _part_outside_the_folder(release: Release) -> Release:
    subject = release.evidence.subject
    head = subject.parts["head"].model_copy(update={"file": "../head.onnx"})
    named = subject.parts | {"head": head}
    return _with_evidence(release, subject=subject.model_copy(update={"parts": named}))


def _renamed_parts(release: Release) -> Release:
    subject = release.evidence.subject
    named = {f"{name}_2": part for name, part in subject.parts.items()}
    measured = {f"{name}_2": part for name, part in release.evidence.parts.items()}
    return _with_evidence(
        release, subject=subject.model_copy(update={"parts": named}), parts=measured
    )


def _changed_shapes(release: Release) -> Release:
    head = release.evidence.parts["head"]
    turned = head.subject.model_copy(update={"inputs": head.subject.outputs})
    measured = head.model_copy(update={"subject": turned})
    return _with_evidence(release, parts=release.evidence.parts | {"head": measured})


def _golden_vectors_of_one_part(release: Release) -> Release:
    assert release.golden is not None
    created = release.golden.golden
    kept = {name: part for name, part in created.parts.items() if name != "head"}
    created.model_copy(update={"parts": kept}).save(release.golden.path / GOLDEN_JSON)
    return dataclasses.replace(release, golden=GoldenFolder.open(release.golden.path))


INCONSISTENT: dict[str, tuple[Tamper, str]] = {
    "replaced part": (
        _changed_after_evaluation(lambda path: releases.onnx_file(path.with_name("head.onnx"), seed=9)),
        r"the part head \(.*head.onnx\) has digest"),
    "swapped": (_swapped_parts, r"the part encoder \(.*encoder.onnx\) has digest"),
    "missing": (
        _changed_after_evaluation(lambda path: path.with_name("head.onnx").unlink()), "the part head .*is missing"),
    "edited release file": (
        _changed_after_evaluation(lambda path: path.write_text(f"{path.read_text()}  neck: {{file: head.onnx}}\n")),
        "release.yaml has digest"),
    "unmeasured": (_unmeasured_part, "the evidence does not contain the part head"),
    "outside the folder": (_part_outside_the_folder, "does not describe .*: parts .*../head.onnx"),
    "renamed": (_renamed_parts, "parts .*encoder_2.*, not .*encoder"),
    "other shapes": (_changed_shapes, "does not describe .*head.onnx: inputs"),
    "vectors of one": (_golden_vectors_of_one_part, "were computed with other parts than the release has: head"),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "wanted"), INCONSISTENT.values(), ids=INCONSISTENT)
def test_inconsistent_multi_file_release_is_refused(
    release: Release, ledger: Ledger, tamper: Tamper, wanted: str
) -> None:
    registry = Simulator()
    with pytest.raises((DigestMismatch, EvidenceError), match=wanted):
        run(tamper(release), ledger, registry)
    assert registry.versions == []
    assert [entry.action for entry in ledger.entries()] == ["refused"]


def test_release_is_refused_when_one_part_fails(release: Release, ledger: Ledger) -> None:
    broken = releases.failing_release(release.onnx_path.with_name("head.onnx")).evidence
    failing = _with_evidence(release, parts=release.evidence.parts | {"head": broken})
    failing = dataclasses.replace(failing, golden=None)
    assert failing.decision.verdict is Verdict.FAIL
    registry = Simulator()
    result = run(failing, ledger, registry)
    assert result.outcome == "refused"
    assert "in the part head: " in result.reason
    assert registry.versions == []
