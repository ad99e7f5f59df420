"""Submit tasks to processes or Ray; retry lost workers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as sentinels_ready
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import psutil

from gate.errors import EvidenceError, GateError, PolicyError, StorageError, first_line
from gate.installation import cores, logical_cores
from gate.model.factory import paused_gc
from gate.sandbox.child import kill_with_parent
from gate.storage.files import temporary_folder

if TYPE_CHECKING:
    from gate.data.samples import SampleSet
    from gate.distributed.worker import Delivery, JobSpec
    from gate.measure.job import EvaluationData, MeasurementJob, Reference
    from gate.measure.work_units import FirstUnitState, UnitResult, WorkUnit
    from gate.policy.policy import Policy
    from gate.records.evidence import WorkerPoolRecord

# Importing this module must not load torch, numpy or ray: workers start and import torch before the
# command does.


_steps = logging.getLogger("gate.steps")

_EXIT_S = 1.0
"""Time for an idle process to exit by itself."""

_END_S = 10.0

_MIN_BYTES = 2**29
"""Memory of a process with PyTorch and ONNX Runtime but without a model (measured: 0.45 GiB)."""


class WorkerLost(Exception):
    """A worker ended without a result. The message has the reason."""


class WorkerPool(ABC):
    """A pool of workers, used as a context manager that ends them.

    There is one thread per worker, which submits one call at a time. Calls wait in the pool, not in
    a worker, so that a lost worker loses at most one call.
    """

    name: Literal["processes", "ray"]

    def __init__(self, count: int) -> None:
        self.count = count
        self._is_over = threading.Event()
        self._callers = ThreadPoolExecutor(count, "gate-worker")

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a module-level function in a worker. The future raises WorkerLost if the worker ends
        without a result; the pool replaces the worker."""
        return self._callers.submit(self._call, function, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers, even while they measure a unit."""
        self._is_over.set()
        self._callers.shutdown(wait=False, cancel_futures=True)
        self._end_workers()
        self._callers.shutdown()

    @abstractmethod
    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a free worker. Raises WorkerLost."""

    @abstractmethod
    def _end_workers(self) -> None:
        """End all workers. Waiting calls raise WorkerLost."""


class _Context(SpawnContext):
    """A context that stores the process it started, which an executor does not expose."""

    process: SpawnProcess

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        self.process = SpawnProcess(*args, **options)
        return self.process


class _Process:
    """An executor with a single process, so that a crash affects only one call."""

    def __init__(self) -> None:
        """Raises OSError if the process can't be started."""
        context = _Context()
        self.executor = ProcessPoolExecutor(
            1, context, initializer=start_worker, initargs=(os.getpid(),)
        )
        with _blocked_interrupts():
            self.executor.submit(import_libraries)
        self._process = context.process

    def end(self, *, leave_s: float = 0.0) -> int | None:
        """End the process, after `leave_s` seconds to exit by itself. Return its exit code."""
        process = self._process
        if not self._has_exited(leave_s):
            for end in (process.terminate, process.kill):
                end()
                if self._has_exited(_END_S):
                    break
        return process.exitcode

    def _has_exited(self, timeout_s: float) -> bool:
        process = self._process
        process.join(timeout_s)
        # The executor's thread also waits for the process. If that thread receives the exit code,
        # this one sees None until the other has stored it.
        deadline = time.monotonic() + _END_S
        while process.exitcode is None and sentinels_ready([process.sentinel], timeout=0):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        return process.exitcode is not None


class ProcessPool(WorkerPool):
    """A pool of local processes, which start immediately and import PyTorch."""

    name = "processes"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._all: list[_Process] = []
        try:
            for _ in range(count):
                self._all.append(_Process())
                self._idle.put(self._all[-1])
        except BaseException as error:
            _end(self._all)
            if isinstance(error, OSError):
                raise StorageError(
                    f"cannot start process {len(self._all) + 1} of {count}: "
                    f"{error.strerror or error}. Free memory or processes, or use fewer: --jobs."
                ) from error
            raise

    def limit(self, count: int) -> None:
        """End the processes beyond `count`, before anything is submitted."""
        if count < self.count:
            self.count, surplus = count, self._all[count:]
            self._callers = ThreadPoolExecutor(count, "gate-worker")
            self._all = self._all[:count]
            self._idle = queue.SimpleQueue()
            for process in self._all:
                self._idle.put(process)
            _end(surplus)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        process = self._idle.get()
        if process is None:
            raise WorkerLost("the pool is closed")
        try:
            return process.executor.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            code = process.end(leave_s=_END_S)
            if not self._is_over.is_set():
                with contextlib.suppress(OSError):  # the next call retries
                    process = self._replace(process)
                    if self._is_over.is_set():  # the pool closed meanwhile and did not end this one
                        process.end()
            raise WorkerLost(f"code {code}") from error
        finally:
            self._idle.put(process)

    def _replace(self, lost: _Process) -> _Process:
        self._all.append(_Process())
        self._all.remove(lost)
        return self._all[-1]

    def _end_workers(self) -> None:
        _end(self._all)
        for _ in range(self.count):
            self._idle.put(None)


def _end(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.executor.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + _EXIT_S
    for process in processes:
        process.end(leave_s=max(deadline - time.monotonic(), 0.0))


def start_worker(parent: int) -> None:
    """Prepare a process of a pool: it ends with its parent and prints only to stderr."""
    kill_with_parent(parent)
    os.dup2(2, 1)  # output of the model must not mix with that of the command


def import_libraries() -> None:
    """Import the libraries for measuring. The first call reports import errors."""
    with contextlib.suppress(Exception), paused_gc():
        import gate.distributed.worker  # noqa: F401


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block SIGINT in processes that are started in this context; only `end` ends them.

    A process inherits the signal mask of the thread that starts it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it with the first process would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def most_processes(count: int) -> tuple[int, str]:
    """Return how many of `count` processes fit the cores and the free memory, at least one, and a
    text with the limiting resource."""
    logical = logical_cores()
    room = max(psutil.virtual_memory().available // _MIN_BYTES, 1)
    if room < logical:
        return min(count, room), f"the free memory is enough for {room} of at least 512 MiB"
    return min(count, logical), f"this machine has {logical} cores"


_SWITCHES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a local cluster listens only on 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # same priority as --jobs; Ray's default of 15 starves the workers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # tasks without assigned GPUs can use existing ones
}

_LISTEN_S = 10.0

_SOCKETS = 40
"""Maximum length of the folder of Ray's sockets, whose paths are limited."""


def set_switches() -> None:
    """Set Ray's environment variables that are not set yet."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster, and the resources of each task."""

    address: str | None = None
    """`auto` or HOST:PORT of a running cluster; None: RAY_ADDRESS, else start a local one."""
    workers: int | None = None
    """Number of workers; None: as many as the CPUs allow."""
    cpus: int = 1
    """Cores and threads per task."""
    gpus: float = 0.0

    def room(self, machine: dict[str, float]) -> int:
        """Return the number of tasks that fit the CPUs and GPUs of a machine."""
        count = machine.get("CPU", 0.0) // self.cpus
        return int(min(count, machine.get("GPU", 0.0) // self.gpus) if self.gpus else count)


class RayPool(WorkerPool):
    """A pool of Ray tasks. Ray reuses the process of a task, including the open job."""

    name = "ray"

    def __init__(self, cluster: Cluster, count: int, *, is_local: bool) -> None:
        super().__init__(count)
        self.cluster, self.is_local = cluster, is_local
        """True if this process started the cluster, which then has only this machine."""
        self._running: set[Any] = set()
        self._tasks: dict[Callable[..., Any], Any] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, cluster: Cluster) -> Iterator[RayPool]:
        """Join the cluster, or start a local one that ends with the pool.

        Raises PolicyError if Ray is not installed or no machine has room for a task, StorageError
        if the cluster can't be reached or started.
        """
        set_switches()
        try:
            import ray
        except ImportError as error:
            raise PolicyError(
                "gate check --engine ray needs Ray: pip install 'parity-gate[ray]'. Without it, "
                "--jobs N measures in N processes of this machine."
            ) from error
        address = cluster.address or os.environ.get("RAY_ADDRESS")
        is_joined = ray.is_initialized()  # by the calling program, which also ends it
        is_local = address is None and not is_joined
        if is_local:
            require_room(cluster, [{"CPU": _cpus(cluster)}] if not cluster.gpus else [])
        with contextlib.nullcontext() if is_joined else _joined(address, cluster):
            machines = _machines()
            require_room(cluster, machines)
            count = cluster.workers or sum(map(cluster.room, machines))
            with cls(cluster, count, is_local=is_local) as pool:
                for _ in range(count):
                    pool.submit(import_libraries)
                yield pool

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        import ray

        reference = self._task(function).remote(*arguments)
        self._running.add(reference)
        try:
            if self._is_over.is_set():
                raise WorkerLost("the pool is closed")
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise EvidenceError(
                f"a worker of the cluster can't measure: {first_line(error)}. It needs "
                "parity-gate, the model's code and the same versions: submit from the folder of "
                "the code (ray job submit --working-dir .), or install them there."
            ) from error
        except ray.exceptions.RayError as error:
            raise WorkerLost(first_line(error)) from error
        finally:
            self._running.discard(reference)

    def _task(self, function: Callable[..., Any]) -> Any:
        import ray

        if function not in self._tasks:
            needs = {"num_cpus": self.cluster.cpus, "num_gpus": self.cluster.gpus}
            # max_calls=0: by default Ray ends the process after each task with a GPU.
            remote: Any = ray.remote
            self._tasks[function] = remote(**needs, max_retries=0, max_calls=0)(function)
        return self._tasks[function]

    def _end_workers(self) -> None:
        import ray

        for reference in tuple(self._running):
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)


def require_room(cluster: Cluster, machines: Sequence[dict[str, float]]) -> None:
    """Raise PolicyError if a task fits on no machine, because it would never start. `machines`: the
    resources of each machine."""
    if machines and not any(map(cluster.room, machines)):
        largest = max((machine.get("CPU", 0), machine.get("GPU", 0)) for machine in machines)
        raise PolicyError(
            f"no machine of the cluster has {cluster.cpus} CPUs and {cluster.gpus:g} GPUs for a "
            f"worker, the largest has {largest[0]:g} and {largest[1]:g}. Reduce "
            "--cpus-per-worker or --gpus-per-worker."
        )


@contextlib.contextmanager
def _joined(address: str | None, cluster: Cluster) -> Iterator[None]:
    """Connect this process to the cluster for the duration of the context.

    Ray is called in a separate thread, because in the main thread it would replace the signal
    handlers of this process. The servers that it starts end with that thread.
    """
    import ray

    if address is not None:
        _require_listener(address)
    with ThreadPoolExecutor(1, "ray") as thread, temporary_folder() as folder:
        options: dict[str, Any] = {"address": address}
        if address is None:
            options = {
                "address": "local", "include_dashboard": False, "num_cpus": _cpus(cluster),
            }  # fmt: skip
            if len(str(folder)) <= _SOCKETS:
                options["_temp_dir"] = str(folder)
        try:
            thread.submit(
                ray.init, **options, log_to_driver=False, logging_level=logging.ERROR
            ).result()
        except Exception as error:
            raise _unreachable(address or "of this machine", error) from error
        try:
            yield
        finally:
            thread.submit(ray.shutdown).result()


def _require_listener(address: str) -> None:
    """Raise StorageError if nothing listens at HOST:PORT. Ray would wait for minutes and then end
    this process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTEN_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> StorageError:
    return StorageError(
        f"cannot start or reach the Ray cluster {address}: {first_line(error)}. Check that it "
        "runs, has the same versions of Python and Ray, and which token it requires "
        "(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH). Use HOST:PORT, or auto on one of its machines."
    )


def _cpus(cluster: Cluster) -> int:
    return cluster.workers * cluster.cpus if cluster.workers else cores()


def _machines() -> list[dict[str, float]]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


_TRIES = 3
"""Number of lost workers after which a unit is given up."""


@dataclass
class Workers:
    """A `gate.measure.work_units.UnitWorkers` that measures the units of one check in a pool."""

    pool: WorkerPool
    spec: JobSpec
    threads: int
    """Threads of each worker."""
    delivery: Delivery | None = None
    """Files and samples for workers that can't read those of this machine."""
    _running: dict[Future[bytes], WorkUnit | None] = field(default_factory=dict)
    _lead: str = ""

    def __enter__(self) -> Self:
        """Make all workers open model and file, while this process measures the first unit."""
        from gate.distributed.worker import open_job

        self._text = self.spec.to_json()
        for _ in range(self.pool.count):
            opening = self.pool.submit(open_job, self._text, self.threads, self.delivery)
            self._running[opening] = None
        return self

    def __exit__(self, *_: object) -> None:
        """Submit nothing more; the pool ends its workers."""
        for future in self._running:
            future.cancel()

    @property
    def record(self) -> WorkerPoolRecord:
        """The value of `UnitWorkers.record`: the kind of the pool and the number of workers."""
        from gate.records.evidence import WorkerPoolRecord

        return WorkerPoolRecord(engine=self.pool.name, workers=self.pool.count)

    def begin(self, lead: FirstUnitState, units: Sequence[WorkUnit]) -> FirstUnitState:
        """Submit all units, and return the lead unchanged."""
        self._lead = lead.to_json()
        for unit in units:
            self._submit(unit)
        return lead

    def _submit(self, unit: WorkUnit) -> None:
        from gate.distributed.worker import measure

        arguments = (self._text, self.threads, self.delivery, self._lead, unit)
        self._running[self.pool.submit(measure, *arguments)] = unit

    def parts(self) -> Iterator[UnitResult]:
        """Yield the results of the units as they are completed."""
        losses: Counter[WorkUnit] = Counter()
        failed: tuple[int, GateError] | None = None
        while self._running:
            completed, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in completed:
                unit = self._running.pop(future)
                try:
                    result = self._read_result(future, unit, losses)
                except GateError as error:
                    # An error of opening the job affects all workers, so it comes first.
                    index = -1 if unit is None else unit.index
                    if failed is None or index < failed[0]:
                        failed = index, error
                    continue
                if result is not None:
                    yield result
            if failed is not None:  # earlier units may also fail, and the first error is raised
                self._drop_after(failed[0])
        if failed is not None:
            raise failed[1]

    def _read_result(
        self, future: Future[bytes], unit: WorkUnit | None, losses: Counter[WorkUnit]
    ) -> UnitResult | None:
        """Return the result of a worker; None if it only opened the job, or the unit is retried.

        Raises the GateError of the worker.
        """
        from gate.distributed.worker import read_answer

        try:
            return read_answer(future.result())
        except WorkerLost as loss:
            if unit is None:  # the replacement opens the job with its first unit
                return None
            losses[unit] += 1
            if losses[unit] < _TRIES:
                self._submit(unit)
                return None
            raise EvidenceError(
                f"unit {unit.index} (samples {unit.start} to {unit.stop - 1}) ended {_TRIES} "
                f"workers, the last with {loss}. Check the memory and the logs of their machines, "
                "or measure with one job."
            ) from loss

    def _drop_after(self, index: int) -> None:
        for future, unit in list(self._running.items()):
            if unit is None or unit.index > index:
                future.cancel()
                del self._running[future]


_WORTH_S = 20.0
"""Minimum time in one process for which more processes, which take seconds to start, pay off."""

_MIN_BATCHES = 100
"""Minimum number of batches for which a trial of a few batches is cheap."""

_TENSORS = 9
"""Number of tensors of the largest size in a process: about three each in PyTorch and two ONNX
Runtime sessions."""

_FASTER = 0.85
"""More processes are used only below this fraction of the time in one process."""


@dataclass(frozen=True)
class Jobs:
    """The number of processes, and the threads of each; None: PyTorch's default."""

    count: int
    threads: int | None
    reason: str


def requested_jobs(count: int, job: MeasurementJob) -> Jobs:
    """Return the requested processes, limited by the free memory."""
    threads = job.policy.determinism.threads
    if count == 1:
        return Jobs(1, threads, "one process was asked for")
    reason, room = f"{count} processes were asked for", max(_room(job), 1)
    if room < count:
        count, reason = room, f"{reason}, the free memory holds {room}"
    return Jobs(count, threads if count == 1 else threads or 1, reason)


def chosen(job: MeasurementJob) -> Jobs:
    """Return the fastest number of processes.

    It is one process per physical core with one thread each, if this is faster than one process
    with all threads. If the policy sets the number of threads, there are as many processes as the
    cores allow. Raises the exceptions of `MeasurementRun.open`.
    """
    threads = job.policy.determinism.threads
    single = Jobs(1, threads, "one process is fast enough")
    count, batches = cores() // (threads or 1), _batches(job.samples, job.batch_size)
    if count < 2 or batches < _MIN_BATCHES or not _on_the_cpu(job):
        return single
    trial = _trial(job, (cores(), 1) if threads is None else (threads, threads))
    together, alone = (seconds * batches for seconds in trial)
    if together < _WORTH_S or alone / count > _FASTER * together:
        return single
    count = min(count, _room(job))
    if count < 2 or alone / count > _FASTER * together:
        return single
    reason = (
        f"a batch of the reference takes {alone / batches:.3g} s with one thread, "
        f"{together / batches:.3g} s with {cores()}"
    )
    return Jobs(
        count, threads or 1, reason if threads is None else f"{count} times {threads} cores"
    )


def worth_a_trial(samples: SampleSet, batch_size: int) -> bool:
    """Return whether there are enough batches and cores for several processes."""
    return cores() > 1 and _batches(samples, batch_size) >= _MIN_BATCHES


def _batches(samples: SampleSet, batch_size: int) -> int:
    return math.ceil(len(samples) / batch_size)


def _room(job: MeasurementJob) -> int:
    """Return how many processes with the activations of a batch fit into the free memory."""
    from gate.measure.run import MeasurementRun

    activations = 0
    with contextlib.suppress(GateError), MeasurementRun.open(job, noise=False) as run:
        context = run.context
        context.measure_sample_bytes()
        activations = _TENSORS * context.sample_bytes * context.binding.batch_size
    each = psutil.Process().memory_info().rss + activations
    return int(psutil.virtual_memory().available // each)


def _on_the_cpu(job: MeasurementJob) -> bool:
    """Return whether all available runtimes compute on the CPU, in these processes."""
    from gate.records.runtime import CPU_PROVIDER
    from gate.runtimes.selection import selected_runtimes

    if job.recordings:
        return False
    with contextlib.ExitStack() as opened:
        runtimes = selected_runtimes(job.policy, job.recordings)
        for runtime in runtimes:
            opened.callback(runtime.close)
        try:
            here = [runtime for runtime in runtimes if runtime.absent_reason() is None]
            return all(runtime.promises.provider == CPU_PROVIDER for runtime in here)
        except Exception:  # the measurement reports the failure
            return False


def _trial(job: MeasurementJob, threads: tuple[int, int]) -> list[float]:
    """Return the seconds of a warm batch of the reference, for each number of threads."""
    from gate.measure.run import MeasurementRun
    from gate.reference.environment import threads_set

    seconds = []
    with MeasurementRun.open(job, noise=False) as run:
        batch = next(run.samples.batches(run.binding.batch_size))
        for number in threads:
            with threads_set(number):
                run.reference.run(batch)
                start = time.perf_counter()
                run.reference.run(batch)
                seconds.append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class CheckedFile:
    """The arguments of a check."""

    onnx: Path
    reference: Reference
    data: EvaluationData
    policy: Policy

    @contextlib.contextmanager
    def by_processes(
        self, jobs: int | None, *, pool: ProcessPool | None = None
    ) -> Iterator[EvaluationData]:
        """Yield the data, with worker processes if there are any.

        `jobs`: number of processes; None: choose. `pool`: already started processes. In the
        context, PyTorch uses as many threads in this process as in each worker. Raises PolicyError
        if several processes are requested but not possible, and the exceptions of opening the
        files.
        """
        samples = self.data.samples if self.data.samples.count else self._job().samples
        few = not samples.count or not worth_a_trial(samples, self.data.batch_size)
        if jobs == 1 or (jobs is None and few):
            yield self.data
            return
        job = self._job()
        try:
            spec = self._spec(job)
        except PolicyError:
            if jobs is not None:
                raise
            jobs = 1
        chosen_jobs = chosen(job) if jobs is None else requested_jobs(jobs, job)
        if chosen_jobs.count == 1:
            yield self.data
            return
        _steps.debug("measure in %d processes: %s", chosen_jobs.count, chosen_jobs.reason)
        with contextlib.ExitStack() as stack:
            if pool is None:
                pool = stack.enter_context(ProcessPool(chosen_jobs.count))
            pool.limit(chosen_jobs.count)
            workers = Workers(pool, spec, chosen_jobs.threads or 1)
            yield stack.enter_context(self._shared(workers, job))

    @contextlib.contextmanager
    def by_cluster(self, pool: RayPool) -> Iterator[EvaluationData]:
        """Yield the data with the workers of a Ray cluster.

        In the context, PyTorch uses as many threads in this process as in each task. Raises the
        exceptions of `by_processes`.
        """
        from gate.distributed.worker import Delivery

        job = self._job()
        spec = self._spec(job)
        _steps.debug("measure by %d tasks of Ray", pool.count)
        threads = self.policy.determinism.threads or pool.cluster.cpus
        delivery = None if pool.is_local else Delivery.from_spec(spec)
        with self._shared(Workers(pool, spec, threads, delivery), job) as data:
            yield data

    @contextlib.contextmanager
    def _shared(self, workers: Workers, job: MeasurementJob) -> Iterator[EvaluationData]:
        from gate.reference.environment import threads_set

        with threads_set(workers.threads), workers as shared:
            yield replace(self.data, samples=job.samples, workers=shared)

    def _spec(self, job: MeasurementJob) -> JobSpec:
        from gate.distributed.worker import JobSpec

        return JobSpec.from_job(job, self.reference, self.data)

    def _job(self) -> MeasurementJob:
        from gate.distributed.worker import SINGLE_FILE_ONLY
        from gate.measure.job import MeasurementJob
        from gate.onnx_file.release_file import is_release_file

        if is_release_file(self.onnx):
            raise PolicyError(SINGLE_FILE_ONLY)
        return MeasurementJob.from_files(
            self.onnx, model=self.reference.model, data=self.data, policy=self.policy
        )
