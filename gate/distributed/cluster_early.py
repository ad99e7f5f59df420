"""Actors that start before anybody knows what they are to measure: the cluster and PyTorch in them
come up while the process that will tell them imports and reads."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gate.errors import PolicyError

if TYPE_CHECKING:
    from gate.distributed.worker_pool import Cluster, RaySession


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
        from gate.distributed.worker_pool import RaySession

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

        from gate.distributed.worker import Measurer

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
