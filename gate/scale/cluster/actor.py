"""The worker of a Ray cluster: it holds model and sessions open, and measures unit by unit.

Whoever creates it imports nothing heavy for it: it may start before the check has read anything.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from gate.model.collector import resting_collector

if TYPE_CHECKING:
    from gate.parity.sample_pass import SamplePass
    from gate.scale.assignment import Assignment
    from gate.scale.cluster.freight import Freight
    from gate.scale.worker import WorkerFailure


class Measurer:
    """Its methods answer with bytes, as `gate.scale.worker.read_answer` takes them."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._pass: SamplePass | None = None
        self._failure: WorkerFailure | None = None
        with contextlib.suppress(Exception), resting_collector():  # `open` says what is missing
            from gate.scale.cluster import reader  # noqa: F401 - which imports PyTorch

    def open(self, assignment: Assignment, freight: Freight, *, reader: Any, threads: int) -> None:
        """What is needed. What goes wrong is the answer to the first unit. `reader`: the actor that
        reads the samples; None: their address says where they are."""
        from gate.parity.arrays.samples import Samples
        from gate.scale.cluster.reader import FetchedRows
        from gate.scale.worker import WorkerFailure, opened
        from gate.storage.temporary import temporary_folder

        try:
            with resting_collector():
                folder = self._held.enter_context(temporary_folder())
                unpacked = freight.unpacked(assignment, folder)
                samples = None if reader is None else Samples(FetchedRows(reader))
                case = unpacked.case(samples)
                self._pass = self._held.enter_context(opened(case, threads=threads, noise=False))
        except Exception as error:
            self._failure = WorkerFailure.of(error)

    def begin(self, lead: bytes) -> None:
        """Take the lead by which units are judged."""
        from gate.parity.units.part import LeadState
        from gate.scale.worker import WorkerFailure

        try:
            if self._pass is not None:
                self._pass.judge_by(LeadState.from_json(lead.decode()))
        except Exception as error:
            self._failure = WorkerFailure.of(error)

    def answer(self, index: int, start: int, stop: int, *, again: bool) -> bytes:
        """As `gate.scale.worker.answer_to`."""
        from gate.parity.units.unit import Unit
        from gate.scale.worker import answer_to, written

        if self._failure is not None:
            return written(self._failure)
        assert self._pass is not None
        return answer_to(self._pass, Unit(index, start, stop), again=again)

    def close(self) -> None:
        """Give back sessions and files."""
        self._held.close()
