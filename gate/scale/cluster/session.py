"""Being in a Ray cluster: in one that runs, or in one of this machine alone, which ends with the
check and starts while the check goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from gate.errors import PolicyError, StorageError, first_line
from gate.scale.cluster.switches import set_switches
from gate.scale.cores import cores
from gate.storage.temporary import temporary_folder

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
