"""One process that measures units for another: it opens everything once, then goes unit by unit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from gate.errors import EvidenceError, GateError, by_name
from gate.model.collector import resting_collector
from gate.parity.case import Case
from gate.parity.sample_pass import SamplePass
from gate.parity.units.part import LeadState, UnitAnswers, UnitPart
from gate.parity.units.unit import Unit
from gate.scale.assignment import Assignment
from gate.storage.record import Prose, Record

_KINDS: dict[bytes, type[UnitPart | UnitAnswers]] = {b"P": UnitPart, b"A": UnitAnswers}


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


Answer = UnitPart | UnitAnswers | WorkerFailure
"""What a worker says."""


@contextlib.contextmanager
def opened(case: Case, *, threads: int, noise: bool) -> Iterator[SamplePass]:
    """Inside, the model and all runtimes are open. `case`: opened before, as the model's module
    may set threads of its own. `noise`: with the float64 reference. Raises GateError."""
    torch.set_num_threads(threads)
    with SamplePass.open(case, noise=noise) as sample_pass:
        sample_pass.open_runtimes()
        yield sample_pass


def read_answer(data: bytes) -> Answer:
    """What a worker said. Raises EvidenceError."""
    kind = _KINDS.get(data[:1])
    return WorkerFailure.from_json(data[1:]) if kind is None else kind.from_json(data[1:])


def answer_to(sample_pass: SamplePass, unit: Unit, *, again: bool) -> bytes:
    """Measure a unit; `again`: it was measured before, and only what the reference answers is asked
    for. What goes wrong is an answer, too."""
    try:
        return written(sample_pass.answers(unit) if again else sample_pass.part(unit))
    except Exception as error:
        return written(WorkerFailure.of(error))


def serve(connection: Connection) -> None:
    """Take an assignment and a number of threads, then answer one message with another until there
    is none: first the lead, with nothing; then each unit, with its part or why there is none."""
    os.dup2(2, 1)  # what the model prints is no output of the command
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        try:
            _serve(connection)
        except Exception as error:
            connection.send_bytes(written(WorkerFailure.of(error)))


def _serve(connection: Connection) -> None:
    with contextlib.ExitStack() as held:
        with resting_collector():
            text, threads = connection.recv()
            case = Assignment.from_json(text).case()
            sample_pass = held.enter_context(opened(case, threads=threads, noise=False))
        sample_pass.judge_by(LeadState.from_json(connection.recv_bytes().decode()))
        while True:
            *unit, again = connection.recv()
            connection.send_bytes(answer_to(sample_pass, Unit(*unit), again=again))


def written(answer: Answer) -> bytes:
    """An answer, as `read_answer` takes it."""
    mark = next((mark for mark, kind in _KINDS.items() if type(answer) is kind), b"F")
    return mark + answer.to_json().encode()
