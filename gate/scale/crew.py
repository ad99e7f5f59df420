"""The crew of a check: as many processes as were asked for, or as pay."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gate.errors import PolicyError
from gate.front_door import Reference, Workload, case_of
from gate.policy.policy import Policy
from gate.scale.assignment import Assignment
from gate.scale.jobs import Jobs, asked_for, chosen
from gate.scale.processes import Processes

_steps = logging.getLogger("gate.steps")


@dataclass(frozen=True)
class CheckedFile:
    """A check that is going to be made."""

    onnx: Path
    reference: Reference
    workload: Workload
    policy: Policy

    @contextlib.contextmanager
    def shared_out(self, jobs: int | None) -> Iterator[Workload]:
        """The workload with its crew, if it has one. `jobs`: processes; None: as many as pay.

        Inside, PyTorch has as many threads here as in each of them. Raises PolicyError where
        several are asked for and can't be, and what opening the files raises.
        """
        case = case_of(
            self.onnx, reference=self.reference, workload=self.workload, policy=self.policy
        )
        try:
            assignment = Assignment.of(case, self.reference, self.workload)
        except PolicyError:
            if jobs is not None and jobs > 1:
                raise
            jobs = 1
        decided = chosen(case) if jobs is None else asked_for(jobs, case)
        if decided.count == 1:
            yield self.workload
            return
        _steps.debug("measure in %d processes: %s", decided.count, decided.reason)
        with _threads(decided) as threads, Processes(assignment, decided.count, threads) as crew:
            yield replace(self.workload, crew=crew)


@contextlib.contextmanager
def _threads(jobs: Jobs) -> Iterator[int]:
    before, threads = torch.get_num_threads(), jobs.threads or 1
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)
