"""Workers that are actors of a Ray cluster: one that runs, or one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gate.errors import EvidenceError, first_line
from gate.parity.sources.named import Named
from gate.parity.sources.opening import Opening
from gate.parity.units.unit import Unit
from gate.preprocess.spec import PreprocessSpec
from gate.scale.assignment import Assignment
from gate.scale.cluster.early import EarlyActors, end_actor
from gate.scale.work import Hand, HandLost
from gate.scale.worker import Answer, WorkerFailure, read_answer

if TYPE_CHECKING:
    from gate.scale.cluster.freight import Freight

_steps = logging.getLogger("gate.steps")
_CLOSE_S = 0.5
_RETRIES = 3
"""Of an actor that reads samples, where it or its machine fails."""


@dataclass(eq=False)
class _Actor:
    """As `gate.scale.work.Hand`."""

    start: Future[tuple[Any, Any]]
    """Its handle, and the reference of what it says when it is there."""
    unit: Unit | None = None
    answers: Any = None
    """The reference of what it will say."""
    opening: bool = True

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        self._handle.begin.remote(lead)

    def give(self, unit: Unit, *, again: bool) -> None:
        """As `Hand.give`."""
        answer = self._handle.answer
        self.answers = answer.remote(unit.index, unit.start, unit.stop, again=again)

    def await_start(self) -> None:
        """Until the cluster was asked for it. Raises as `RaySession.later`."""
        _, there = self.start.result()
        if self.opening:
            self.answers = there

    def answer(self) -> Answer | None:
        """As `Hand.answer`."""
        import ray

        answers, self.answers = self.answers, None
        opening, self.opening = self.opening, False
        try:
            found = ray.get(answers)
            return None if opening else read_answer(found)
        except ray.exceptions.RayTaskError as error:
            return WorkerFailure.of(EvidenceError(_unusable(error)))
        except ray.exceptions.RayError as error:
            raise HandLost(first_line(error)) from error

    def end(self) -> None:
        """As `Hand.end`. What it has in the temporary folder is removed by who comes next, if it
        does not leave in time."""
        import ray

        if self.start.cancel() or self.start.exception() is not None:
            return  # Ray ends an actor of which nobody has the handle
        if self.unit is None and not self.opening:
            with contextlib.suppress(Exception):
                ray.get(self._handle.close.remote(), timeout=_CLOSE_S)
        end_actor(self._handle)

    @property
    def _handle(self) -> Any:
        return self.start.result()[0]


@dataclass(frozen=True)
class RayActors:
    """As `gate.scale.workers.CrewEngine`."""

    assignment: Assignment
    early: EarlyActors
    freight: Future[Freight]
    """The files of the assignment in the object store."""
    reader: Any = None
    """The actor that reads local samples; None: each worker opens them itself."""
    name: Literal["processes", "ray"] = "ray"

    @property
    def count(self) -> int:
        """As `CrewEngine.count`."""
        return self.early.count

    @property
    def threads(self) -> int:
        """Of each worker: the policy's, else one for each of its processors."""
        return self.assignment.policy.determinism.threads or self.early.cluster.cpus

    @classmethod
    def of(cls, assignment: Assignment, early: EarlyActors) -> RayActors:
        """Of a cluster that is there, or starts."""
        freight = early.session.later(partial(_packed, assignment))
        reader = None if early.session.of_this_machine else _reader(assignment)
        return cls(assignment, early, freight, reader)

    def start(self) -> Hand:
        """As `CrewEngine.start`."""
        return _Actor(self.early.session.later(partial(self._opened, self.early.take())))

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        """As `CrewEngine.ready`."""
        import ray

        actors = [hand for hand in hands if isinstance(hand, _Actor)]
        if all(hand.opening for hand in actors):
            _steps.debug("wait for actors: the cluster starts them when it has room")
        for hand in actors:
            hand.await_start()
        of = {hand.answers: hand for hand in actors if hand.answers}
        done, _ = ray.wait(list(of), num_returns=1, timeout=seconds)
        return [of[reference] for reference in done]

    def _opened(self, handle: Future[Any]) -> tuple[Any, Any]:
        actor, freight = handle.result(), self.freight.result()
        there = actor.open.remote(
            self.assignment, freight, reader=self.reader, threads=self.threads
        )
        return actor, there

    def close(self) -> None:
        """End the reader; the cluster is left by whoever entered it."""
        if self.reader is not None:
            end_actor(self.reader)


def _packed(assignment: Assignment) -> Freight:
    from gate.scale.cluster.freight import Freight

    return Freight.of(assignment)


def _reader(assignment: Assignment) -> Any:
    """The actor on this machine that reads samples which lie here, for workers that may be
    elsewhere; None: samples have an address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from gate.scale.cluster.reader import SampleReader

    named = Named.parse(assignment.inputs)
    if named.is_url or named.is_factory:
        return None
    spec = assignment.preprocessing
    fields = assignment.inputs[len(named.place) :]
    opening = Opening(
        f"{Path(named.place).absolute()}{fields}",
        PreprocessSpec.of_file(Path(spec)) if spec else None,
    )
    here = ray.get_runtime_context().get_node_id()
    strategy = NodeAffinitySchedulingStrategy(here, soft=False)
    kind = ray.remote(SampleReader).options(
        num_cpus=0, scheduling_strategy=strategy, max_restarts=_RETRIES, max_task_retries=_RETRIES
    )
    return kind.remote(opening)


def _unusable(error: Exception) -> str:
    return (
        f"a worker of the cluster can't measure: {first_line(error)}. It needs parity-gate, the "
        "model's code and the same versions: submit from the folder of the code (ray job submit "
        "--working-dir .), or install them there."
    )
