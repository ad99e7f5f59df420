"""Stage `twin`: create and measure the quantized twin of the file or release, if the policy has
one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gate.commands.result import ExitCode
from gate.policy.policy import Policy
from gate.records.layout import EVIDENCE, EVIDENCE_STATEMENT, RECORDS
from gate.storage import files
from pipelines import ci_files, paths, stage
from pipelines.params import (
    ModelParams,
    ParityParams,
    ReleaseParams,
    load_policy,
    load_quantize,
)
from pipelines.twin_files import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gate.export.quantize import QuantizeSettings
    from gate.records.evidence import ExportRecord, Subject
    from pipelines.export_report import ExportReport


@ci_files.record_failure("twin")
def main() -> int:
    """Write models/twin/: the file or release, its evidence and golden vectors, or why there are
    none."""
    policy = load_policy().twin
    staged = paths.TWIN.with_name("twin.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    if policy is None:
        files.write_text(staged / "none.txt", "the policy has no twin (gate.twin)\n")
        print("twin: the policy has none (gate.twin)")
    else:
        _create_twin(policy, staged)
    shutil.rmtree(paths.TWIN, ignore_errors=True)
    staged.rename(paths.TWIN)
    return ExitCode.DONE


class _Twin(NamedTuple):
    """The quantized file or release, and its settings."""

    path: Path
    subject: Subject
    record: ExportRecord | None
    parts: Mapping[str, ExportRecord]
    """For a release: how each part was quantized or exported."""


def _create_twin(policy: Policy, folder: Path) -> None:
    from gate.records.layout import GOLDEN
    from pipelines import signing
    from pipelines.export_report import ExportReport
    from pipelines.measuring import add_export_records, measure, write_golden

    signatory = signing.signatory()
    settings, release = load_quantize(), ReleaseParams.load()
    report = ExportReport.load(paths.EXPORT_REPORT)
    size = min(settings.batch_size, ParityParams.load().batch_size)
    if release.parts:
        settings = settings.model_copy(update={"batch_size": size})
        twin = _quantize_release(release.path, folder / release.path.name, settings, report)
    else:
        twin = _quantize_file(release.path, folder / NAME, settings, batch_size=size)
    evidence, case, _ = measure(twin.path, policy, source=report.source, title="twin")
    evidence = add_export_records(evidence, twin.record, twin.parts)
    golden = write_golden(folder / GOLDEN, case, evidence)
    statement = folder / RECORDS / EVIDENCE_STATEMENT
    signing.write_measured(statement, signatory, twin.path, evidence, golden=golden)
    evidence.save(folder / RECORDS / EVIDENCE)
    print(
        f"{paths.TWIN / twin.path.name}: {twin.subject.sha256}, {twin.subject.size_bytes} bytes, "
        f"{evidence.dataset.samples} samples measured"
    )


def _quantize_file(
    onnx: Path, output: Path, settings: QuantizeSettings, *, batch_size: int
) -> _Twin:
    from gate.export.quantize import quantize

    quantized = quantize(onnx, _calibration(onnx, batch_size), output, settings=settings)
    return _Twin(quantized.path, quantized.subject, quantized.record, {})


def _quantize_release(
    path: Path, output: Path, settings: QuantizeSettings, report: ExportReport
) -> _Twin:
    from gate.data.samples import SampleSet
    from gate.multi_file.quantize import ReleaseQuantization
    from pipelines.model import load_trained_model

    model, _ = load_trained_model(ModelParams.load())
    samples = SampleSet.open(paths.TRAIN_IMAGES)
    quantization = ReleaseQuantization(model=model, samples=samples, settings=settings)
    quantized = quantization.write(path, output)
    is_same_file = quantized.of.sha256 == report.subject.sha256
    records = {**(report.records if is_same_file else {}), **quantized.records}
    return _Twin(quantized.path, quantized.subject, None, records)


def _calibration(onnx: Path, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield training images, because the evaluation images must not set the quantization ranges."""
    from gate.data.input_binding import bind_inputs
    from gate.data.samples import SampleSet
    from gate.onnx_file.reading import read_subject

    samples = SampleSet.open(paths.TRAIN_IMAGES)
    subject = read_subject(onnx)
    binding = bind_inputs(subject.inputs, samples.specs, count=len(samples), batch_size=batch_size)
    for batch in samples.batches(binding.batch_size):
        yield binding.by_input(batch)


if __name__ == "__main__":
    stage.run(main)
