"""Workers that are actors of a Ray cluster: one that runs, or one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gate.errors import EvidenceError, PolicyError, first_line
from gate.parity.sources.named import Named
from gate.parity.sources.opening import Opening
from gate.parity.units.unit import Unit
from gate.preprocess.spec import PreprocessSpec
from gate.scale.assignment import Assignment
from gate.scale.cluster.session import Cluster, RaySession
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

    start: Future[Any]
    """Its handle, once the cluster was asked for it."""
    unit: Unit | None = None
    answers: Any = None
    """The reference of what it will say."""
    opening: bool = True

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        self.start.result().begin.remote(lead)

    def give(self, unit: Unit, *, again: bool) -> None:
        """As `Hand.give`."""
        handle = self.start.result()
        self.answers = handle.answer.remote(unit.index, unit.start, unit.stop, again=again)

    def await_start(self) -> None:
        """Until the cluster was asked for it. Raises as `RaySession.later`."""
        handle = self.start.result()
        if self.opening and self.answers is None:
            self.answers = handle.open.remote()

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
            return
        handle = self.start.result()
        if self.unit is None and not self.opening:
            with contextlib.suppress(Exception):
                ray.get(handle.close.remote(), timeout=_CLOSE_S)
        with contextlib.suppress(Exception):
            ray.kill(handle)


@dataclass(frozen=True)
class RayActors:
    """As `gate.scale.workers.CrewEngine`."""

    assignment: Assignment
    cluster: Cluster
    count: int
    session: RaySession
    freight: Future[Freight]
    """The files of the assignment in the object store."""
    reader: Any = None
    """The actor that reads local samples; None: each worker opens them itself."""
    name: Literal["processes", "ray"] = "ray"

    @property
    def threads(self) -> int:
        """Of each worker: the policy's, else one for each of its processors."""
        return self.assignment.policy.determinism.threads or self.cluster.cpus

    @classmethod
    @contextlib.contextmanager
    def connected(cls, assignment: Assignment, cluster: Cluster) -> Iterator[RayActors]:
        """Inside, the cluster is there, or starts.

        Raises PolicyError where Ray is not installed or the cluster has no room for a worker,
        StorageError where one that is named can't be reached.
        """
        with RaySession.joined(cluster) as session:
            machines = session.machines()
            require_room(cluster, machines)
            count = cluster.workers or sum(map(cluster.room, machines))
            freight = session.later(partial(_packed, assignment))
            reader = None if session.of_this_machine else _reader(assignment)
            yield cls(assignment, cluster, count, session, freight, reader)

    def start(self) -> Hand:
        """As `CrewEngine.start`."""
        return _Actor(self.session.later(self._actor))

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

    def _actor(self) -> Any:
        import ray

        from gate.scale.cluster.actor import Measurer

        kind: Any = ray.remote(Measurer)
        return kind.options(num_cpus=self.cluster.cpus, num_gpus=self.cluster.gpus).remote(
            self.assignment, self.freight.result(), reader=self.reader, threads=self.threads
        )

    def close(self) -> None:
        """End the reader; the cluster is left by `connected`."""
        import ray

        if self.reader is not None:
            with contextlib.suppress(Exception):
                ray.kill(self.reader)


def require_room(cluster: Cluster, machines: Sequence[dict[str, float]]) -> None:
    """Raise PolicyError for a worker that fits on no machine: it would be waited for in vain.
    `machines`: what each has."""
    if not any(map(cluster.room, machines)):
        largest = max((of.get("CPU", 0), of.get("GPU", 0)) for of in machines)
        raise PolicyError(
            f"no machine of the cluster has {cluster.cpus} CPUs and {cluster.gpus:g} GPUs for a "
            f"worker, the largest has {largest[0]:g} and {largest[1]:g}. Give fewer: "
            "--cpus-per-worker, --gpus-per-worker."
        )


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
