"""Stage `export`: export the trained model to a file or the parts of a release.

It starts the MLflow run that the gate's stages share.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from gate.commands.result import ExitCode
from gate.errors import DataError, EvidenceError, ExportRefused
from gate.model.loading import collect_code
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import Source
from gate.storage.digest import Digest
from pipelines import ci_files, pages, paths, stage
from pipelines.export_file import export_file
from pipelines.export_release import export_release
from pipelines.export_report import ExportReport
from pipelines.model import load_trained_model
from pipelines.params import (
    ModelParams,
    RegistryParams,
    ReleaseParams,
    check_release,
    load_export,
)
from pipelines.run import Tracker, recorded_run

_INPUT = "input"
"""Name of the input if the settings contain none."""


@ci_files.record_failure("export")
def main() -> int:
    """Write the file or the folder of a release, and reports/export.json.

    After a failure, earlier files remain.
    """
    model_params, release, settings = ModelParams.load(), ReleaseParams.load(), load_export()
    check_release(release, settings)
    tracker = Tracker(RegistryParams.load().experiment)
    with tracker.new_run("export") as page:
        model, checkpoint = load_trained_model(model_params)
        images = np.load(paths.EVAL_IMAGES, mmap_mode="r")
        name = settings.input_names[0] if settings.input_names else _INPUT
        example = {name: np.array(images[: settings.batch_size + 2])}
        code = collect_code(model, factory=model_params.name, chain=release.chain or "")
        source = _source(model_params, checkpoint).model_copy(update={"code": code})
        training = recorded_run("train")
        write = export_release if release.parts else export_file
        with warnings.catch_warnings():
            # This stage uses deprecated exporters on purpose. Warnings about the model are in the
            # record.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            try:
                written = write(model, example, release, settings=settings, source=source)
            except ExportRefused as refused:
                pages.write_refused_export(page, str(refused))
                ci_files.write_rejection("export", str(refused))
                print(f"refused: {refused}")
                return ExitCode.REJECTED
        started = {"train_run": training.run_id if training else None}
        report = written.report.model_copy(update=started)
        report.save(paths.EXPORT_REPORT)
        pages.write_export(page, report)
        if written.log.strip():
            page.text(written.log, "export.log")
    _print_result(release.path, report)
    return ExitCode.DONE


def _source(params: ModelParams, checkpoint: Digest) -> Source:
    return Source(
        factory=params.name,
        checkpoint_sha256=checkpoint,
        preprocess_sha256=_preprocessing_digest(),
        labels_sha256=Digest.from_file(paths.EVAL_LABELS),
    )


def _preprocessing_digest() -> Digest:
    try:
        return PreprocessSpec.load(paths.PREPROCESSING).digest()
    except EvidenceError as error:
        raise DataError(f"{paths.PREPROCESSING}: {error} Run dvc repro -f prepare.") from error


def _print_result(path: Path, report: ExportReport) -> None:
    subject = report.subject
    print(
        f"{path}: {subject.sha256}, {subject.size_bytes} bytes, opset {subject.opset}, "
        f"self-check max_abs_diff {max(report.self_check.values(), default=math.nan):.3g}"
    )
    for line in report.remarks:
        print(f"  note: {line}")


if __name__ == "__main__":
    stage.run(main)
