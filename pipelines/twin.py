"""Stage `twin`: the quantized twin of the exported file and what is measured on it, if the policy
names one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gate.commands.status import Status
from gate.policy.policy import Policy
from gate.records.names import EVIDENCE, EVIDENCE_STATEMENT
from gate.registry.records import RECORDS
from gate.storage import atomic
from pipelines import paths, stage
from pipelines.params import (
    ParityParams,
    ReleaseParams,
    check_release,
    load_export,
    load_policy,
    load_quantize,
)
from pipelines.twin_files import NAME


def main() -> int:
    """Write models/twin/: the file, its evidence and golden vectors; or why there are none."""
    exact = load_policy()
    policy = exact.twin
    staged = paths.TWIN.with_name("twin.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    if policy is None:
        atomic.write_text(staged / "none.txt", "the policy names no twin (gate.twin)\n")
        print("twin: the policy names none (gate.twin)")
    else:
        release = ReleaseParams.load()
        check_release(release, load_export(), exact)
        _make(policy, release.path, staged)
    shutil.rmtree(paths.TWIN, ignore_errors=True)
    staged.rename(paths.TWIN)
    return Status.DONE


def _make(policy: Policy, onnx: Path, folder: Path) -> None:
    from gate.export.quantized import quantize
    from gate.registry.port import GOLDEN
    from pipelines import signing
    from pipelines.export_report import ExportReport
    from pipelines.measuring import measured, with_records, write_golden

    who = signing.signatory()

    settings = load_quantize()
    calibration = _calibration(onnx, settings.batch_size)
    made = quantize(onnx, calibration, folder / NAME, settings=settings)
    report = ExportReport.load(paths.EXPORT_REPORT)
    evidence, case, _ = measured(folder / NAME, policy, source=report.source, title="twin")
    evidence = with_records(evidence, made.record, {})
    golden = write_golden(folder / GOLDEN, case, evidence)
    statement = folder / RECORDS / EVIDENCE_STATEMENT
    signing.write_measured(statement, who, folder / NAME, evidence, golden=golden)
    evidence.save(folder / RECORDS / EVIDENCE)
    print(
        f"{paths.TWIN / NAME}: {made.subject.sha256}, {made.subject.size_bytes} bytes, "
        f"{evidence.dataset.samples} samples measured"
    )


def _calibration(onnx: Path, batch_size: int) -> Iterator[dict[str, Any]]:
    """Training images: those that it is judged on must not set its ranges."""
    from gate.onnxfile.subject import read_subject
    from gate.parity.arrays.binding import bind
    from gate.parity.arrays.samples import Samples

    samples = Samples.open(paths.TRAIN_IMAGES)
    subject = read_subject(onnx)
    size = min(batch_size, ParityParams.load().batch_size)
    binding = bind(subject.inputs, samples.specs, count=len(samples), batch_size=size)
    for batch in samples.batches(binding.batch_size):
        yield binding.by_input(batch)


if __name__ == "__main__":
    stage.run(main)
