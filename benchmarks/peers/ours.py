"""The gate: as a library, on samples alone; and as it judges by default."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.case import Case
from gate.front_door import Reference, check
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.subject import read_subject
from gate.parity import case as judged
from gate.parity.arrays.samples import Samples
from gate.parity.measure import measure
from gate.parity.workload import Workload
from gate.policy.policy import Bounds, Instruments, Policy, RuntimePolicy
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
    """The default policy: both optimisation levels, every instrument."""
    verdicted = check(
        case.file,
        reference=Reference(case.model, Source(factory="benchmarks.peers"), export),
        workload=Workload(_samples(case), batch_size=case.batch_size),
    )
    return verdicted.decision.passed


def measured(case: Case) -> float:
    """The largest difference with ONNX Runtime unoptimised, and every metric, no instrument."""
    candidate = Candidate(case.file, read_subject(case.file))
    measurement = measure(
        judged.Case(
            case.model, candidate, _samples(case), policy=SAMPLES_ONLY, batch_size=case.batch_size
        )
    )
    (runtime,) = measurement.runtimes
    if runtime.failure is not None:
        raise RuntimeError(runtime.failure)
    return max(output.max_abs_diff for output in runtime.outputs)


def _samples(case: Case) -> Samples:
    return Samples.of({name: np.asarray(array) for name, array in case.samples.items()})
