"""Workers that are actors of a Ray cluster: one that runs, or one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gate.errors import EvidenceError, PolicyError, StorageError, first_line
from gate.parity.sources.named import Named
from gate.parity.sources.opening import Opening
from gate.parity.units.unit import Unit
from gate.preprocess.spec import PreprocessSpec
from gate.scale.assignment import Assignment
from gate.scale.cluster.switches import set_switches
from gate.scale.work import Hand, HandLost
from gate.scale.worker import Answer, WorkerFailure, read_answer
from gate.storage.temporary import temporary_folder

_steps = logging.getLogger("gate.steps")
_SOCKETS = 40
"""Characters of a folder in which Ray's sockets can be: their names are long, and have a limit."""
_CLOSE_S = 0.5
_RETRIES = 3
"""Of an actor that reads samples, where it or its machine fails."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where workers run, and what each takes."""

    address: str | None = None
    """`auto` or HOST:PORT of a cluster that runs; None: RAY_ADDRESS, else one of this machine."""
    workers: int | None = None
    """None: as many as there are processors for."""
    cpus: int = 1
    """Of a worker, and its threads."""
    gpus: float = 0.0


@dataclass(eq=False)
class _Actor:
    """As `gate.scale.work.Hand`."""

    handle: Any
    unit: Unit | None = None
    answers: Any = None
    """The reference of what it will say."""
    opening: bool = True

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        self.handle.begin.remote(lead)

    def give(self, unit: Unit, *, again: bool) -> None:
        """As `Hand.give`."""
        self.answers = self.handle.answer.remote(unit.index, unit.start, unit.stop, again=again)

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

        if self.unit is None and not self.opening:
            with contextlib.suppress(Exception):
                ray.get(self.handle.close.remote(), timeout=_CLOSE_S)
        with contextlib.suppress(Exception):
            ray.kill(self.handle)


@dataclass(frozen=True)
class RayActors:
    """As `gate.scale.workers.CrewEngine`."""

    assignment: Assignment
    cluster: Cluster
    count: int
    freight: Any
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
        """Inside, the cluster is there, with the files of the assignment in its object store.

        Raises PolicyError where Ray is not installed or the cluster has no room for a worker,
        StorageError where it can't be reached.
        """
        with _session(cluster) as of_this_machine:
            from gate.scale.cluster.freight import Freight

            count = cluster.workers or _room(cluster)
            require_room(cluster)
            reader = None if of_this_machine else _reader(assignment)
            yield cls(assignment, cluster, count, Freight.of(assignment), reader)

    def start(self) -> Hand:
        """As `CrewEngine.start`."""
        import ray

        from gate.scale.cluster.actor import Measurer

        kind: Any = ray.remote(Measurer)
        handle = kind.options(num_cpus=self.cluster.cpus, num_gpus=self.cluster.gpus).remote(
            self.assignment, self.freight, reader=self.reader, threads=self.threads
        )
        return _Actor(handle, answers=handle.open.remote())

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        """As `CrewEngine.ready`."""
        import ray

        of = {hand.answers: hand for hand in hands if isinstance(hand, _Actor) and hand.answers}
        if all(hand.opening for hand in hands):
            _steps.debug("wait for actors: the cluster starts them when it has room")
        done, _ = ray.wait(list(of), num_returns=1, timeout=seconds)
        return [of[reference] for reference in done]

    def close(self) -> None:
        """End the reader; the cluster is left by `connected`."""
        import ray

        if self.reader is not None:
            with contextlib.suppress(Exception):
                ray.kill(self.reader)


@contextlib.contextmanager
def _session(cluster: Cluster) -> Iterator[bool]:
    """Be in a cluster: in the one that is named, or one that ends with this process, which has
    this machine alone. Says whether it is that."""
    set_switches()
    try:
        import ray
    except ImportError as error:
        raise PolicyError(
            "gate check --engine ray needs Ray: pip install 'parity-gate[ray]'. Without it, "
            "--jobs N measures in N processes of this machine."
        ) from error
    if ray.is_initialized():  # by whoever calls this as a library: it is theirs to end
        yield False
        return
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as held:
        own: dict[str, Any] = {"address": address}
        if address is None:
            folder = str(held.enter_context(temporary_folder()))
            own = {"address": "local", "include_dashboard": False}
            own |= {"num_cpus": cluster.workers and cluster.workers * cluster.cpus}
            own |= {"_temp_dir": folder} if len(folder) <= _SOCKETS else {}
        try:
            ray.init(**own, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            place = address or "of this machine"
            raise StorageError(
                f"cannot start or reach the Ray cluster {place}: {first_line(error)}. Look whether "
                "it runs, has the same versions of Python and Ray, and which token it asks for "
                "(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH); give HOST:PORT or auto from one of its "
                "machines."
            ) from error
        held.callback(ray.shutdown)
        yield address is None


def _room(cluster: Cluster) -> int:
    """Workers for which the cluster's machines have processors and GPUs."""
    return max(sum(_room_of(machine, cluster) for machine in _machines()), 1)


def _room_of(machine: dict[str, float], cluster: Cluster) -> int:
    room = machine.get("CPU", 0.0) // cluster.cpus
    return int(min(room, machine.get("GPU", 0.0) // cluster.gpus) if cluster.gpus else room)


def _machines() -> list[dict[str, float]]:
    """What each machine of the cluster has."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


def require_room(cluster: Cluster) -> None:
    """Raise PolicyError for a worker that fits on no machine: it would be waited for in vain."""
    machines = _machines()
    if not any(_room_of(machine, cluster) for machine in machines):
        largest = max((of.get("CPU", 0), of.get("GPU", 0)) for of in machines)
        raise PolicyError(
            f"no machine of the cluster has {cluster.cpus} CPUs and {cluster.gpus:g} GPUs for a "
            f"worker, the largest has {largest[0]:g} and {largest[1]:g}. Give fewer: "
            "--cpus-per-worker, --gpus-per-worker."
        )


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
