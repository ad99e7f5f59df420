"""One process that measures units for another: it opens everything once, then goes unit by unit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from gate.errors import EvidenceError, GateError, by_name
from gate.parity.case import Case
from gate.parity.sample_pass import SamplePass
from gate.parity.units.part import LeadState, UnitPart
from gate.parity.units.unit import Unit
from gate.scale.assignment import Assignment
from gate.storage.record import Prose, Record

_PART, _FAILURE = b"P", b"F"


class WorkerFailure(Record):
    """Why a unit can't be measured: for the measurement, as if it had happened there."""

    kind: str
    """Name of the error's class."""
    message: Prose

    @classmethod
    def of(cls, error: Exception) -> WorkerFailure:
        """What is no error of the gate is an EvidenceError."""
        if isinstance(error, GateError):
            return cls(kind=type(error).__name__, message=str(error))
        message = f"a worker failed unexpectedly: {type(error).__name__}: {error}"
        return cls(kind=EvidenceError.__name__, message=message)

    def error(self) -> GateError:
        """The error itself."""
        return (by_name(self.kind) or EvidenceError)(self.message)


@contextlib.contextmanager
def opened(case: Case, *, threads: int, noise: bool) -> Iterator[SamplePass]:
    """Inside, the model and all runtimes are open. `case`: opened before, as the model's module
    may set threads of its own. `noise`: with the float64 reference. Raises GateError."""
    torch.set_num_threads(threads)
    with SamplePass.open(case, noise=noise) as sample_pass:
        sample_pass.open_runtimes()
        yield sample_pass


def read_answer(data: bytes) -> UnitPart | WorkerFailure:
    """What a worker said. Raises EvidenceError."""
    kind = UnitPart if data[:1] == _PART else WorkerFailure
    return kind.from_json(data[1:])


def serve(connection: Connection, assignment: Assignment, threads: int) -> None:
    """Answer one message with another until there is none: first the lead, with nothing; then each
    unit, with its part or why there is none."""
    os.dup2(2, 1)  # what the model prints is no output of the command
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        try:
            _serve(connection, assignment, threads)
        except Exception as error:
            connection.send_bytes(written(WorkerFailure.of(error)))


def _serve(connection: Connection, assignment: Assignment, threads: int) -> None:
    with opened(assignment.case(), threads=threads, noise=False) as sample_pass:
        sample_pass.judge_by(LeadState.from_json(connection.recv_bytes().decode()))
        while True:
            unit = Unit(*connection.recv())
            answer: UnitPart | WorkerFailure
            try:
                answer = sample_pass.part(unit)
            except Exception as error:
                answer = WorkerFailure.of(error)
            connection.send_bytes(written(answer))


def written(answer: UnitPart | WorkerFailure) -> bytes:
    """An answer, as `read_answer` takes it."""
    return (_PART if isinstance(answer, UnitPart) else _FAILURE) + answer.to_json().encode()
