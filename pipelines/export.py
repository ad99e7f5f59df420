"""Stage `export`: the trained model to models/model.onnx, and the run that the gate shares."""

from __future__ import annotations

import contextlib
import math
import warnings

import numpy as np

from gate.commands.status import Status
from gate.errors import DataError, EvidenceError, ExportRefused
from gate.export.export import export_model, log_of
from gate.export.self_check import self_check
from gate.model.code import code_of
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import Source
from gate.storage import atomic
from gate.storage.digest import Digest
from pipelines import pages, paths, stage
from pipelines.export_report import ExportReport
from pipelines.model import trained
from pipelines.params import ModelParams, RegistryParams, load_export
from pipelines.run import Tracker, known_run

_INPUT = "input"
"""The input's name in the file where the settings give none."""


def main() -> int:
    """Write models/model.onnx and reports/export.json; a failure leaves the old file in place."""
    model_params = ModelParams.load()
    settings = load_export()
    tracker = Tracker(RegistryParams.load().experiment)
    with tracker.new_run("export") as page:
        model, checkpoint = trained(model_params)
        images = np.load(paths.EVAL_IMAGES, mmap_mode="r")
        name = settings.input_names[0] if settings.input_names else _INPUT
        example = {name: np.array(images[: settings.batch_size + 2])}
        code = code_of(model, factory=model_params.name)
        source = _source(model_params, checkpoint).model_copy(update={"code": code})
        staged = paths.ONNX.parent / "staging" / paths.ONNX.name
        with warnings.catch_warnings():
            # Deprecations of the exporter that this stage uses on purpose; what it says about
            # the model is in the record.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            try:
                exported = export_model(
                    model, example, settings=settings, output=staged, source=source
                )
            except ExportRefused as refused:
                pages.write_refused_export(page, str(refused))
                print(f"refused: {refused}")
                return Status.REJECTED
        checked = self_check(model, exported, example)
        training = known_run("train")
        report = ExportReport(
            subject=exported.subject,
            record=exported.record,
            source=source,
            self_check=checked,
            train_run=training.run_id if training else None,
        )
        with atomic.replacing(paths.ONNX) as temporary:
            staged.replace(temporary)
        kept = log_of(paths.ONNX)
        if settings.verbose:
            log_of(staged).replace(kept)
        else:
            kept.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # holds the log of an earlier failure
            staged.parent.rmdir()
        report.save(paths.EXPORT_REPORT)
        pages.write_export(page, report)
        if exported.log.strip():
            page.text(exported.log, "export.log")
    _tell(report)
    return Status.DONE


def _source(params: ModelParams, checkpoint: Digest) -> Source:
    return Source(
        factory=params.name,
        checkpoint_sha256=checkpoint,
        preprocess_sha256=_preprocessing_digest(),
        labels_sha256=Digest.of_file(paths.EVAL_LABELS),
    )


def _preprocessing_digest() -> Digest:
    try:
        return PreprocessSpec.load(paths.PREPROCESSING).digest()
    except EvidenceError as error:
        raise DataError(f"{paths.PREPROCESSING}: {error} Run dvc repro -f prepare.") from error


def _tell(report: ExportReport) -> None:
    subject = report.subject
    print(
        f"{paths.ONNX}: {subject.sha256}, {subject.size_bytes} bytes, opset {subject.opset}, "
        f"self-check max_abs_diff {max(report.self_check.values(), default=math.nan):.3g}"
    )
    record = report.record
    for line in (*record.tracer_warnings, *record.hazards, *record.notices):
        print(f"  look at this: {line}")


if __name__ == "__main__":
    stage.run(main)
