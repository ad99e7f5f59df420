"""The crew of a check: processes of this machine, as many as were asked for or as pay; or actors of
a cluster."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gate.errors import PolicyError
from gate.front_door import Reference, case_of
from gate.parity.case import Case
from gate.parity.runners.determinism import threads_set
from gate.parity.workload import Workload
from gate.policy.policy import Policy
from gate.scale.assignment import Assignment
from gate.scale.cluster.early import EarlyActors
from gate.scale.cluster.engine import RayActors
from gate.scale.early import EarlyProcess
from gate.scale.jobs import asked_for, chosen, worth_a_trial
from gate.scale.kept_parts import KeptParts, KeptPlan
from gate.scale.plan import MeasuringPlan
from gate.scale.processes import Processes
from gate.scale.workers import CrewEngine, Workers

_steps = logging.getLogger("gate.steps")


@dataclass(frozen=True)
class CheckedFile:
    """A check that is going to be made."""

    onnx: Path
    reference: Reference
    workload: Workload
    policy: Policy

    @contextlib.contextmanager
    def by_processes(
        self, jobs: int | None, *, early: deque[EarlyProcess] | None = None
    ) -> Iterator[Workload]:
        """The workload with its crew, if it has one. `jobs`: processes; None: as many as pay.
        `early`: processes that have started already.

        Inside, PyTorch has as many threads here as in each of them. Raises PolicyError where
        several are asked for and can't be, and what opening the files raises.
        """
        few = not worth_a_trial(self.workload.samples, self.workload.batch_size)
        if jobs == 1 or (jobs is None and few):
            yield self.workload
            return
        case = self._case()
        try:
            assignment = Assignment.of(case, self.reference, self.workload)
        except PolicyError:
            if jobs is not None:
                raise
            jobs = 1
        decided = chosen(case) if jobs is None else asked_for(jobs, case)
        if decided.count == 1:
            yield self.workload
            return
        _steps.debug("measure in %d processes: %s", decided.count, decided.reason)
        threads = decided.threads or 1
        engine = Processes(assignment, decided.count, threads, early or deque())
        with self._shared(engine, threads) as workload:
            yield workload

    @contextlib.contextmanager
    def by_cluster(self, early: EarlyActors) -> Iterator[Workload]:
        """The workload with actors of a Ray cluster for its crew.

        Inside, PyTorch has as many threads here as in each of them. Raises as `by_processes`.
        """
        engine = RayActors.of(Assignment.of(self._case(), self.reference, self.workload), early)
        _steps.debug("measure by %d actors of Ray", engine.count)
        with self._shared(engine, engine.threads) as workload:
            yield workload

    @contextlib.contextmanager
    def as_planned(self, plan: MeasuringPlan) -> Iterator[None]:
        """Inside, PyTorch has the plan's threads. Raises DigestMismatch where file or model are
        not those of the plan."""
        plan.assignment.verify(self.onnx, self.reference)
        with threads_set(plan.threads):
            yield

    @contextlib.contextmanager
    def _shared(self, engine: CrewEngine, threads: int) -> Iterator[Workload]:
        workload = self.workload
        with threads_set(threads), contextlib.ExitStack() as held:
            plan = KeptPlan.of(engine.assignment, workload)
            kept = held.enter_context(KeptParts.opened(plan))
            yield replace(workload, crew=held.enter_context(Workers(engine, kept)))

    def _case(self) -> Case:
        return case_of(
            self.onnx, reference=self.reference, workload=self.workload, policy=self.policy
        )
