"""The folder of a report: what `gate check` writes for people, `gate promote` and consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gate.front_door import Verdicted
    from gate.preprocess.spec import PreprocessSpec
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


def write_for_others(report: Path, verdicted: Verdicted, *, compared: bool) -> None:
    """Write what `gate promote` and consumers read: the change, where the file was `compared` with
    the champion, and of what passed the golden vectors; nothing of an earlier report stays."""
    from gate.records.names import CHANGE, GOLDEN

    if compared:
        verdicted.change.save(report / CHANGE)
    else:
        (report / CHANGE).unlink(missing_ok=True)
    _write_golden(report / GOLDEN, verdicted)


@contextlib.contextmanager
def report_folder(report: Path | None) -> Iterator[Path]:
    """The folder that was asked for, else one that is gone afterwards."""
    from gate.storage.temporary import temporary_folder

    if report is not None:
        yield report
        return
    with temporary_folder() as folder:
        yield folder


def _write_golden(folder: Path, verdicted: Verdicted) -> None:
    """What a consumer of a file that passed will compare with; else nothing of an earlier one."""
    from gate.golden.folder import GOLDEN_JSON
    from gate.parity.golden import write_golden_of

    if verdicted.decision.passed:
        write_golden_of(folder, verdicted.case, evidence=verdicted.evidence)
    else:
        (folder / GOLDEN_JSON).unlink(missing_ok=True)
