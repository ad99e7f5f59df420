"""Actors that start before anybody knows what they are to measure: the cluster and PyTorch in them
come up while the process that will tell them imports and reads."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gate.errors import PolicyError, StorageError, first_line
from gate.installation import cores
from gate.model.factory import paused_gc
from gate.storage.files import temporary_folder

if TYPE_CHECKING:
    from gate.distributed.worker import Freight, JobSpec, WorkerFailure
    from gate.measure.run import SamplePass

_SWITCHES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster of one machine listens on 127.0.0.1 alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as urgent as --jobs; Ray's 15 starves beside any other work
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without GPUs of their own use what is there
}


def set_switches() -> None:
    """Set those that nobody has set, for this process and those that it starts."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)


_LISTEN_S = 10.0

_SOCKETS = 40
"""Characters of a folder in which Ray's sockets can be: their names are long, and have a limit."""


Value = TypeVar("Value")


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

    def room(self, machine: dict[str, float]) -> int:
        """Workers for which a machine has processors and GPUs."""
        count = machine.get("CPU", 0.0) // self.cpus
        return int(min(count, machine.get("GPU", 0.0) // self.gpus) if self.gpus else count)


class RaySession:
    """What the cluster is asked for goes through one thread, in the order of asking. That thread
    lives as long as the session: the servers that it started end with it."""

    def __init__(self, cluster: Cluster, thread: ThreadPoolExecutor, there: Future[None]) -> None:
        self._cluster, self._thread, self._there = cluster, thread, there
        self.of_this_machine = False
        """Whether the cluster is ours, and has this machine alone."""

    @classmethod
    @contextlib.contextmanager
    def joined(cls, cluster: Cluster) -> Iterator[RaySession]:
        """Raises PolicyError where Ray is not installed, StorageError where a cluster that is named
        can't be reached; whether one of this machine starts is heard of by `later`."""
        set_switches()
        try:
            import ray
        except ImportError as error:
            raise PolicyError(
                "gate check --engine ray needs Ray: pip install 'parity-gate[ray]'. Without it, "
                "--jobs N measures in N processes of this machine."
            ) from error
        address = cluster.address or os.environ.get("RAY_ADDRESS")
        theirs = ray.is_initialized()
        if address is not None and not theirs:
            _require_listener(address)
        with ThreadPoolExecutor(1, "ray") as thread, temporary_folder() as folder:
            if theirs:  # by whoever calls this as a library: it is theirs to end
                yield cls(cluster, thread, thread.submit(lambda: None))
                return
            own = _own(cluster, str(folder)) if address is None else {"address": address}
            there = thread.submit(_enter, address or "of this machine", own)
            try:
                session = cls(cluster, thread, there)
                session.of_this_machine = address is None
                if address is not None:
                    there.result()
                yield session
            finally:
                thread.submit(_leave, there).result()  # after all that was asked for before

    def machines(self) -> list[dict[str, float]]:
        """What each machine of the cluster has. One of this machine is waited for only where it is
        to say which GPUs there are. Raises as `later`."""
        if self.of_this_machine and not self._cluster.gpus:
            return [{"CPU": _cpus(self._cluster)}]
        return self.later(_machines).result()

    def later(self, call: Callable[[], Value]) -> Future[Value]:
        """What `call` gives in the cluster; StorageError where that could not be entered."""

        def inside() -> Value:
            self._there.result()
            return call()

        return self._thread.submit(inside)


def _require_listener(address: str) -> None:
    """Raise StorageError where nobody listens at HOST:PORT: Ray would wait for minutes, and then
    end this process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTEN_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(place: str, error: Exception) -> StorageError:
    return StorageError(
        f"cannot start or reach the Ray cluster {place}: {first_line(error)}. Look whether "
        "it runs, has the same versions of Python and Ray, and which token it asks for "
        "(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH); give HOST:PORT or auto from one of its "
        "machines."
    )


def _enter(place: str, options: dict[str, Any]) -> None:
    import ray

    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise _unreachable(place, error) from error


def _leave(there: Future[None]) -> None:
    import ray

    if there.exception() is None:
        ray.shutdown()


def _own(cluster: Cluster, folder: str) -> dict[str, Any]:
    """The options of a cluster of this machine alone."""
    own = {"address": "local", "include_dashboard": False, "num_cpus": _cpus(cluster)}
    return own | ({"_temp_dir": folder} if len(folder) <= _SOCKETS else {})


def _cpus(cluster: Cluster) -> int:
    return cluster.workers * cluster.cpus if cluster.workers else cores()


def _machines() -> list[dict[str, float]]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


@dataclass(frozen=True)
class EarlyActors:
    """Of one cluster. Whoever takes an actor ends it."""

    cluster: Cluster
    session: RaySession
    count: int
    waiting: deque[Future[Any]]
    """The handle of each, once the cluster was asked for it."""

    @classmethod
    @contextlib.contextmanager
    def started(cls, cluster: Cluster) -> Iterator[EarlyActors]:
        """Inside, the cluster is there, or starts.

        Raises PolicyError where Ray is not installed or the cluster has no room for a worker,
        StorageError where one that is named can't be reached.
        """
        with RaySession.joined(cluster) as session:
            machines = session.machines()
            require_room(cluster, machines)
            count = cluster.workers or sum(map(cluster.room, machines))
            early = cls(cluster, session, count, deque())
            early.waiting.extend(session.later(early._created) for _ in range(count))
            try:
                yield early
            finally:
                session.later(early._end_waiting)

    def take(self) -> Future[Any]:
        """The handle of one that starts, or has."""
        return self.waiting.popleft() if self.waiting else self.session.later(self._created)

    def _created(self) -> Any:
        import ray

        kind: Any = ray.remote(Measurer)
        return kind.options(num_cpus=self.cluster.cpus, num_gpus=self.cluster.gpus).remote()

    def _end_waiting(self) -> None:
        for handle in self.waiting:
            end_actor(handle.result())


def end_actor(handle: Any) -> None:
    """End it, whatever it does."""
    import ray

    with contextlib.suppress(Exception):
        ray.kill(handle)


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


class Measurer:
    """Its methods answer with bytes, as `gate.distributed.worker.read_answer` takes them."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._pass: SamplePass | None = None
        self._failure: WorkerFailure | None = None
        with contextlib.suppress(Exception), paused_gc():  # `open` says what is missing
            import gate.distributed.worker  # noqa: F401

    def open(self, assignment: JobSpec, freight: Freight, *, reader: Any, threads: int) -> None:
        """What is needed. What goes wrong is the answer to the first unit. `reader`: the actor that
        reads the samples; None: their address says where they are."""
        from gate.data.samples import SampleSet
        from gate.distributed.worker import FetchedRows, WorkerFailure, opened

        try:
            with paused_gc():
                folder = self._held.enter_context(temporary_folder())
                unpacked = freight.unpacked(assignment, folder)
                samples = None if reader is None else SampleSet(FetchedRows(reader))
                case = unpacked.to_job(samples)
                self._pass = self._held.enter_context(opened(case, threads=threads, noise=False))
        except Exception as error:
            self._failure = WorkerFailure.of(error)

    def begin(self, lead: bytes) -> None:
        """Take the lead by which units are judged."""
        from gate.distributed.worker import WorkerFailure
        from gate.measure.work_units import FirstUnitState

        try:
            if self._pass is not None:
                self._pass.judge_by(FirstUnitState.from_json(lead.decode()))
        except Exception as error:
            self._failure = WorkerFailure.of(error)

    def answer(self, index: int, start: int, stop: int, *, again: bool) -> bytes:
        """As `gate.distributed.worker.answer_to`."""
        from gate.distributed.worker import answer_to, written
        from gate.measure.work_units import WorkUnit

        if self._failure is not None:
            return written(self._failure)
        assert self._pass is not None
        return answer_to(self._pass, WorkUnit(index, start, stop), again=again)

    def close(self) -> None:
        """Give back sessions and files."""
        self._held.close()
