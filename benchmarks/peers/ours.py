"""Run the gate as a library: on samples only, and with its defaults."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.case import Case
from gate.api import check, measure_job
from gate.data.samples import SampleSet
from gate.measure import job
from gate.measure.job import EvaluationData, Reference
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.records.evidence import ExportRecord, Source

SAMPLES_ONLY = Policy(
    instruments=Instruments.none(),
    runtimes={
        "ort-cpu": RuntimePolicy(
            required="always", bounds=Bounds(max_abs_diff=1e-4, top1_agreement=1.0)
        )
    },
)


def judge(case: Case, *, export: ExportRecord | None = None) -> bool:
    """Judge with the default policy: both optimization levels and every instrument."""
    result = check(
        case.file,
        reference=Reference(case.model, Source(factory="benchmarks.peers"), export),
        data=EvaluationData(_samples(case), batch_size=case.batch_size),
    )
    return result.decision.passed


def measure_difference(case: Case) -> float:
    """Return the largest difference in ONNX Runtime without optimizations, with all metrics."""
    candidate = TestedFile(case.file, read_subject(case.file))
    measurement = measure_job(
        job.MeasurementJob(
            case.model, candidate, _samples(case), policy=SAMPLES_ONLY, batch_size=case.batch_size
        )
    )
    (runtime,) = measurement.runtimes
    if runtime.failure is not None:
        raise RuntimeError(runtime.failure)
    return max(output.max_abs_diff for output in runtime.outputs)


def _samples(case: Case) -> SampleSet:
    return SampleSet.from_arrays({name: np.asarray(array) for name, array in case.samples.items()})
