"""One subject under one setting: measured as a user's file is, once for all of the roles."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.exporters import ExportRefused
from benchmarks.corpus.registry import ENTRIES
from benchmarks.cuda.cell import Cell, Job, setting_of
from benchmarks.cuda.device import BASELINE, Device
from benchmarks.cuda.store import Kept, Status, Store
from benchmarks.cuda.subjects import pair_of
from gate.api import collect_evidence
from gate.data.samples import SampleSet
from gate.errors import GateError, first_line
from gate.measure.job import EvaluationData, Reference
from gate.policy.policy import Policy
from gate.records.evidence import Evidence, RuntimeEvidence, Source

_ENTRIES = {entry.name: entry for entry in ENTRIES}


class Measurer:
    """Keeps models and exports as long as it lives."""

    def __init__(self, device: Device, store: Store, folder: Path) -> None:
        """`folder`: for files that are removed after they were measured."""
        self._device = device
        self._store = store
        self._bench = Bench(folder)

    def run(self, job: Job) -> Iterator[str]:
        """Measure each subject, keep its cells, then yield its name. Nothing that a subject does
        in Python stops the next."""
        for subject in job.subjects:
            start = time.perf_counter()
            cells = job.cells(subject)
            status: Status
            try:
                kept = self._measured(job, subject, cells)
            except ExportRefused as refused:
                # Of the corpus that is one file less; of the matrix it is a model.
                status = "not exported" if job.part == "corpus" else "failed"
                kept = [Kept(cell.name, status, str(refused)) for cell in cells]
            except Exception as error:
                status = "refused" if self._judges(job, error) else "failed"
                reason = f"{type(error).__name__}: {first_line(error)}"
                kept = [Kept(cell.name, status, reason) for cell in cells]
            seconds = time.perf_counter() - start
            for cell, one in zip(cells, kept, strict=True):
                timed = Kept(one.name, one.status, one.reason, seconds, one.evidence)
                self._store.keep(timed, cell)
            yield subject

    @staticmethod
    def _judges(job: Job, error: Exception) -> bool:
        """A broken file of the corpus is refused by an error of the gate; of the matrix none is."""
        return job.part == "corpus" and isinstance(error, GateError)

    def _measured(self, job: Job, subject: str, cells: Sequence[Cell]) -> list[Kept]:
        setting = setting_of(job.part, job.setting)
        folder = self._bench.folder / "subject"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if job.part == "corpus":
                pair = _ENTRIES[subject].make(self._bench, folder / "model.onnx")
            else:
                pair = pair_of(self._bench, subject, self._bench.folder / f"{subject}.onnx")
            policy = setting.policy(self._device, job.roles, gaps=pair.gaps)
            evidence = evidence_of(pair, policy)
        broken = job.part == "corpus" and _ENTRIES[subject].faulty and _breaks_the_cpu(evidence)
        return [self._kept(cell, evidence, broken=broken) for cell in cells]

    def _kept(self, cell: Cell, evidence: Evidence, *, broken: bool) -> Kept:
        name = self._device.name(cell.role)
        runtime = evidence.runtime(name)
        own = evidence.model_copy(update={"runtimes": (runtime,) if runtime else ()})
        reason = _reason(runtime)
        failed = bool(reason) and not broken
        return Kept(cell.name, "failed" if failed else "measured", reason, evidence=own)


def evidence_of(pair: Pair, policy: Policy) -> Evidence:
    """By the front door, without the decision. Raises GateError."""
    first = [pair.during] if pair.during else []

    def progress(_done: int, _total: int) -> None:
        while first:
            first.pop()()

    return collect_evidence(
        pair.path,
        reference=Reference(pair.model, Source(factory="benchmarks.cuda"), export=pair.record),
        data=EvaluationData(SampleSet.from_arrays(pair.samples), batch_size=pair.batch_size),
        policy=policy,
        progress=progress,
    )


def _reason(runtime: RuntimeEvidence | None) -> str:
    """Why there are no numbers of it; empty: there are."""
    if runtime is None:
        return "the measurement has no record of it"
    return runtime.failure or runtime.absent_reason or ""


def _breaks_the_cpu(evidence: Evidence) -> bool:
    """Whether the file itself is broken, so that a runtime that fails too says nothing new."""
    on_cpu = evidence.runtime(BASELINE)
    return on_cpu is not None and on_cpu.failure is not None
