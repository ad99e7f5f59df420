"""The folder of a report: what `gate check` writes for people, `gate promote` and consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gate.commands.signing import Signing
    from gate.front_door import Verdicted
    from gate.preprocess.spec import PreprocessSpec
    from gate.storage.digest import Digest
    from gate.story.story import Story


def write_report(
    report: Path, verdicted: Verdicted, *, story: Story, spec: PreprocessSpec | None
) -> None:
    """Write the records, the page, the table of samples, and the worst of them as pictures.

    Raises StorageError.
    """
    from gate.parity import thumbnails
    from gate.records.names import PICTURES, SAMPLES
    from gate.report import folder

    verdicted.samples.save(report / SAMPLES)
    worst = thumbnails.thumbnails(verdicted.case.samples, verdicted.evidence, spec)
    thumbnails.save(report / PICTURES, worst)
    # Last, because the page shows the pictures that are there.
    folder.write(
        report,
        verdicted.decision,
        verdicted.evidence,
        story=story,
        explanation=verdicted.explanation,
    )


def write_for_others(
    report: Path, verdicted: Verdicted, *, compared: bool, signing: Signing
) -> None:
    """Sign what was measured and decided, as it is in memory, before any of it is written; then
    write what `gate promote` and consumers read: both statements, the policy as it was applied, the
    change, where the file was `compared` with the champion, and of what passed the golden vectors.
    Nothing of an earlier report stays.

    Raises KeyUnusable; DigestMismatch where the file is another by now; StorageError.
    """
    from gate.attestation.subjects import subjects_of
    from gate.records.names import CHANGE, GOLDEN, POLICY

    golden = _write_golden(report / GOLDEN, verdicted)
    evidence, onnx_path = verdicted.evidence, verdicted.case.candidate.path
    signing.statements(
        evidence,
        verdicted.decision,
        policy=verdicted.policy,
        subjects=subjects_of(onnx_path, evidence, golden=golden),
    ).write(report)
    verdicted.policy.save(report / POLICY)
    if compared:
        verdicted.change.save(report / CHANGE)
    else:
        (report / CHANGE).unlink(missing_ok=True)


@contextlib.contextmanager
def report_folder(report: Path | None) -> Iterator[Path]:
    """The folder that was asked for, else one that is gone afterwards."""
    from gate.storage.temporary import temporary_folder

    if report is not None:
        yield report
        return
    with temporary_folder() as folder:
        yield folder


def _write_golden(folder: Path, verdicted: Verdicted) -> Digest | None:
    """What a consumer of a file that passed will compare with; else nothing of an earlier one.
    Gives the digest of golden.json, from memory."""
    from gate.golden.folder import GOLDEN_JSON
    from gate.parity.golden import write_golden_of
    from gate.storage.digest import Digest

    if not verdicted.decision.passed:
        (folder / GOLDEN_JSON).unlink(missing_ok=True)
        return None
    golden = write_golden_of(folder, verdicted.case, evidence=verdicted.evidence)
    return Digest.of_bytes(golden.file_bytes())
