"""The worker of a Ray cluster: it holds model and sessions open, and measures unit by unit."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from gate.parity.arrays.samples import Samples
from gate.parity.sample_pass import SamplePass
from gate.parity.units.part import LeadState
from gate.parity.units.unit import Unit
from gate.scale.assignment import Assignment
from gate.scale.cluster.freight import Freight
from gate.scale.cluster.reader import FetchedRows
from gate.scale.worker import WorkerFailure, opened, written
from gate.storage.temporary import temporary_folder


class Measurer:
    """Its methods answer with bytes, as `gate.scale.worker.read_answer` takes them."""

    def __init__(
        self, assignment: Assignment, freight: Freight, *, reader: Any, threads: int
    ) -> None:
        """`reader`: the actor that reads the samples; None: their address says where they are."""
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._assignment, self._freight = assignment, freight
        self._reader, self._threads = reader, threads
        self._held = contextlib.ExitStack()
        self._pass: SamplePass | None = None
        self._failure: WorkerFailure | None = None

    def open(self) -> None:
        """What is needed. What goes wrong is the answer to the first unit."""
        try:
            folder = self._held.enter_context(temporary_folder())
            assignment = self._freight.unpacked(self._assignment, folder)
            samples = None if self._reader is None else Samples(FetchedRows(self._reader))
            case = assignment.case(samples)
            self._pass = self._held.enter_context(opened(case, threads=self._threads, noise=False))
        except Exception as error:
            self._failure = WorkerFailure.of(error)

    def begin(self, lead: bytes) -> None:
        """Take the lead by which units are judged."""
        try:
            if self._pass is not None:
                self._pass.judge_by(LeadState.from_json(lead.decode()))
        except Exception as error:
            self._failure = WorkerFailure.of(error)

    def part(self, index: int, start: int, stop: int) -> bytes:
        """Measure one unit."""
        if self._failure is not None:
            return written(self._failure)
        assert self._pass is not None
        try:
            return written(self._pass.part(Unit(index, start, stop)))
        except Exception as error:
            return written(WorkerFailure.of(error))

    def close(self) -> None:
        """Give back sessions and files."""
        self._held.close()
