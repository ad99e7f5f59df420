"""From a model to a verified ONNX file that says how it was made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from gate.errors import ExportError, OnnxFileError, StorageError
from gate.export.capture import captured
from gate.export.example import Example
from gate.export.ladder import Carried, Ladder, NoRung
from gate.export.output_axes import notices
from gate.export.request import Request
from gate.export.safety import Safety
from gate.export.strategies.exporter import export_copy, neutral
from gate.export.switches import Switches
from gate.export.telltale import hazards, tracer_warnings
from gate.export.verify import unplain
from gate.onnxfile.gathered import data_files
from gate.onnxfile.metadata import described, stamp_file
from gate.onnxfile.subject import read_subject
from gate.records.evidence import ExportRecord, Source, Subject
from gate.records.strategy import ExportSettings
from gate.storage import atomic


@dataclass(frozen=True)
class Exported:
    """A file that was exported and verified, and how. `log` is what the exporters printed."""

    path: Path
    subject: Subject
    record: ExportRecord
    log: str
    settings: ExportSettings


def export_model(
    model: nn.Module,
    example: Mapping[str, NDArray[Any]],
    *,
    settings: ExportSettings,
    output: Path,
    source: Source | None = None,
) -> Exported:
    """Export `model` to `output`, atomically; the model itself is not touched.

    `example` maps input names (or anything, then by position) to arrays of shape (samples, ...).
    Works on a deep copy on the CPU in eval mode. The same model, settings and `source` give the
    same bytes; the file's metadata says the strategy, the opset that was asked for, why earlier
    rungs did not carry, and from `source` the factory, the checkpoint's digest and that of the
    preprocessing. One file; weights of more than 2 GB go into one data file beside it, whose name
    holds its digest.

    Raises ExportRefused where its own source forbids every strategy (`settings.lint`), ExportError
    if the model can't be copied or run, or if no strategy writes the file that
    was asked for (names, opset, dynamic axes); what the exporters printed is then kept as
    `<output>.export.log`. Raises StorageError if the file can't be written. In both cases an older
    `output` stays as it was. With `settings.verbose` the log is kept after a success, too.
    """
    with staged(model, example, settings=settings, output=output, source=source) as exported:
        pass
    return replace(exported, path=output)


@contextlib.contextmanager
def staged(
    model: nn.Module,
    example: Mapping[str, NDArray[Any]],
    *,
    settings: ExportSettings,
    output: Path,
    source: Source | None = None,
) -> Iterator[Exported]:
    """The same, with a look at the file before it becomes `output`.

    Yields the export with the path of the finished file in a folder of its own. It takes its place
    when the `with` block ends well; else an older `output` stays.
    """
    bound = Example.bind(example, settings.input_names)
    copied = export_copy(model)
    Switches(settings).check(copied)
    with atomic.replacing(output) as temporary, atomic.scratch(output) as room:
        log_path = log_of(output)
        with neutral(copied):
            with captured():  # what the model itself says in Python is not the export's
                request = Request.of(copied, bound, settings)
            safety = Safety(model, settings)
            ladder = Ladder(request, room, name=output.name, safety=safety)
            try:
                carried = ladder.climb()
            except NoRung as failed:
                raise _with_log(failed, log_path, ladder.log) from failed.__cause__
        wanted_opset = settings.opset
        metadata = described(
            strategy=carried.strategy, opset_asked=wanted_opset, rungs=ladder.rungs, source=source
        )
        stamp_file(carried.path, metadata)
        subject = _read(carried.path)
        read = safety.report(carried.strategy)
        record = _record(request, carried, ladder.rungs).model_copy(
            update={
                "lint": read.findings,
                "lint_unread": tuple(f"{code.name}: {code.reason}" for code in read.unread),
                "code": source.code if source else None,
                "notices": notices(subject, request.axes, settings),
            }
        )
        yield Exported(carried.path, subject, record, ladder.log, settings)
        for name in subject.external_data:  # first, so that no model is there without its weights
            atomic.sync(carried.path.with_name(name))
            carried.path.with_name(name).replace(output.with_name(name))
        carried.path.replace(temporary)
    if settings.verbose:
        atomic.write_text(log_path, ladder.log)
    else:
        log_path.unlink(missing_ok=True)
    for older in data_files(output):
        if older.name not in subject.external_data:
            older.unlink(missing_ok=True)


def log_of(output: Path) -> Path:
    """Where what the exporters printed is kept: after a failure, and with `verbose`."""
    return output.with_name(f"{output.name}.export.log")


def _read(path: Path) -> Subject:
    try:
        return read_subject(path)
    except OnnxFileError as error:
        raise ExportError(f"the exporter wrote a file that is not valid: {error}") from error


def _record(request: Request, carried: Carried, rungs: tuple[str, ...]) -> ExportRecord:
    settings = request.settings
    doubts = () if carried.doubt is None else (f"the file {carried.doubt}",)
    return ExportRecord(
        strategy=carried.strategy,
        settings={
            "strategy_asked": settings.strategy,
            "ladder": ",".join(settings.rungs),
            "opset_asked": settings.opset,
            "dynamic_batch": settings.dynamic_batch,
            "batch_size": settings.batch_size,
            "custom_symbolics": settings.custom_symbolics,
            "lint": settings.lint,
            **carried.options,
        },
        tracer_warnings=tracer_warnings(carried.output.warnings),
        hazards=(
            *request.hazards,
            *doubts,
            *unplain(carried.path, settings),
            *hazards(carried.output.warnings),
        ),
        rungs=rungs,
    )


def _with_log(failed: NoRung, path: Path, text: str) -> ExportError:
    """Write the log beside the output; a full disk must not hide the error that is told."""
    log: Path | None = None
    if text.strip():
        with contextlib.suppress(StorageError):
            atomic.write_text(path, text)
            log = path
    return ExportError(failed.refusal.text(notes=failed.rungs, log=log))
