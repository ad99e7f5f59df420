"""Export the whole model as one file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from torch import nn

from gate.export.export import export_model, log_of, self_check
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.storage import files
from pipelines.export_report import ExportReport, WrittenExport
from pipelines.params import ReleaseParams


def export_file(
    model: nn.Module,
    example: Mapping[str, NDArray[Any]],
    params: ReleaseParams,
    *,
    settings: ExportSettings,
    source: Source,
) -> WrittenExport:
    """Export the model; replace the earlier file only if the new one matches the model.

    Raises the exceptions of `export_model`.
    """
    path = params.path
    staged = path.parent / "staging" / path.name
    exported = export_model(model, example, settings=settings, output=staged, source=source)
    report = ExportReport(
        subject=exported.subject,
        record=exported.record,
        source=source,
        self_check=self_check(model, exported, example),
        train_run=None,
    )
    with files.replacing(path) as temporary:
        staged.replace(temporary)
    kept = log_of(path)
    if settings.verbose:
        log_of(staged).replace(kept)
    else:
        kept.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # remove the log of an earlier failure
        staged.parent.rmdir()
    return WrittenExport(report, exported.log)
