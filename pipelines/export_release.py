"""Export the parts of a release: each module as a file, with inputs from the chain."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from torch import nn

from gate.errors import GateError
from gate.export.export import export_model, self_check
from gate.multi_file.chain_model import CallRecorder, ChainModel
from gate.onnx_file.release_file import PartEntry, release_text
from gate.onnx_file.sandboxed_reading import release_within
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.storage import files
from pipelines.export_report import ExportReport, PartReport, WrittenExport
from pipelines.params import ReleaseParams


def export_release(
    model: nn.Module,
    example: Mapping[str, NDArray[Any]],
    params: ReleaseParams,
    *,
    settings: ExportSettings,
    source: Source,
) -> WrittenExport:
    """Export all parts; replace the earlier folder only if all succeed.

    example: a batch for the chain. settings: settings that all parts share.

    Raises the exceptions of the chain, and of `export_model` prefixed with the part's name.
    """
    folder = params.path.parent
    staged = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    chain = ChainModel.from_model(
        model,
        chain=str(params.chain),
        references={name: part.reference or name for name, part in params.parts.items()},
        inputs=tuple(example),
    )
    calls = CallRecorder()
    calls.record(chain, example)
    parts, logs = {}, []
    for name, part in params.parts.items():
        try:
            exported = export_model(
                chain.parts[name],
                calls.for_part(name).named_example,
                settings=part.settings(settings),
                output=staged / _file(name),
                source=source,
            )
            checked = self_check(chain.parts[name], exported, calls.for_part(name).named_example)
        except GateError as error:
            raise type(error)(f"the part {name}: {error}") from error
        parts[name] = PartReport.from_export(exported, checked)
        logs.append(exported.log)
    file = staged / params.path.name
    entries = {
        name: PartEntry(file=_file(name), reference=part.reference)
        for name, part in params.parts.items()
    }
    files.write_text(file, release_text(str(params.chain), entries))
    subject = release_within(file, None).subject()
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)
    report = ExportReport(
        subject=subject,
        record=None,
        source=source,
        self_check={
            f"{name}/{title}": value
            for name, part in parts.items()
            for title, value in part.self_check.items()
        },
        parts=parts,
        train_run=None,
    )
    return WrittenExport(report, "".join(logs))


def _file(name: str) -> str:
    return f"{name}.onnx"
