"""Workers in processes of their own: what dies or hangs takes nothing else with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from benchmarks.cuda.cell import Job, setting_of
from benchmarks.cuda.device import Device
from benchmarks.cuda.store import Kept, Store


class WorkerLost(Exception):
    """It died, or took too long; the message says which."""


class Worker:
    """One process that measures."""

    def __init__(
        self, start: Mapping[str, Any], environment: Mapping[str, str], *, log: Path
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.cuda.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                bufsize=0,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._send(start)

    def begin(self, job: Job) -> None:
        """Hand it a job."""
        self._send(job.plain())

    def answer(self, *, limit_s: float) -> str | None:
        """The subject that is done; None: the job is. Raises WorkerLost."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, limit_s))[0]:
            raise WorkerLost(f"it took longer than {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise WorkerLost(f"its process ended with status {status} ({self._log.name} has more)")
        subject: str | None = json.loads(line).get("subject")
        return subject

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(f"{json.dumps(message)}\n".encode())


class Crew:
    """Measures jobs until a deadline. Its workers live until the end of the `with` block."""

    def __init__(
        self,
        device: Device,
        store: Store,
        *,
        deadline: float,
        each: Callable[[Job, str], None],
    ) -> None:
        """`deadline`: of `time.monotonic`; `each` is called with each subject that is done, by one
        thread at a time."""
        self.device, self.store, self.deadline = device, store, deadline
        self._each = each
        self._lock = threading.Lock()
        self._seats: list[_Seat] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for seat in self._seats:
            seat.stop()

    def run(self, jobs: Iterable[Job], *, workers: int = 1) -> None:
        """All of them, as far as time allows."""
        queue = deque(jobs)
        count = min(workers, len(queue))
        while len(self._seats) < count:
            self._seats.append(_Seat(self, len(self._seats)))
        with ThreadPoolExecutor(max(1, count)) as pool:
            working = [pool.submit(self._work, queue, seat) for seat in self._seats[:count]]
            try:
                for one in working:
                    one.result()
            except BaseException:  # Ctrl-C too: nothing begins any more
                self.deadline = time.monotonic()
                raise

    def report(self, job: Job, subject: str) -> None:
        """A subject is done."""
        with self._lock:
            self._each(job, subject)

    @staticmethod
    def _work(queue: deque[Job], seat: _Seat) -> None:
        while queue:  # past the deadline a seat does nothing
            try:
                job = queue.popleft()
            except IndexError:  # somebody else was quicker
                return
            seat.do(job)


class _Seat:
    """Workers that take turns: one for each environment that jobs need."""

    def __init__(self, crew: Crew, number: int) -> None:
        self._crew, self._number = crew, number
        self._workers: dict[frozenset[tuple[str, str]], Worker] = {}

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._crew.deadline - time.monotonic()

    def do(self, job: Job) -> None:
        """The job; whom a subject kills is found out by measuring its roles one by one."""
        environment = setting_of(job.part, job.setting).environment(self._crew.device)
        slowest = self._crew.device.slowest_s
        pending = list(job.subjects)
        while pending and self.left_s > 0:
            before = len(pending)
            try:
                worker = self._ready(environment)
                worker.begin(replace(job, subjects=tuple(pending)))
                while (subject := worker.answer(limit_s=min(slowest, self.left_s))) is not None:
                    pending.remove(subject)
                    self._crew.report(job, subject)
                return
            except WorkerLost as lost:
                self._drop(environment)
                if len(pending) < before or self.left_s <= 0:
                    continue
                self._blame(replace(job, subjects=(pending.pop(0),)), lost)

    def stop(self) -> None:
        """End all of them."""
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def _blame(self, job: Job, lost: WorkerLost) -> None:
        if len(job.roles) > 1:
            for role in job.roles:
                self.do(replace(job, roles=(role,)))
            return
        (cell,) = job.cells()
        self._crew.store.keep(Kept(cell.name, "failed", str(lost)), cell)
        self._crew.report(job, job.subjects[0])

    def _ready(self, environment: Mapping[str, str]) -> Worker:
        key = frozenset(environment.items())
        if key not in self._workers:
            store = self._crew.store
            start = {
                "dry": self._crew.device.dry,
                "folder": str(store.folder),
                "identity": store.identity,
            }
            log = store.folder / f"worker-{self._number}.log"
            self._workers[key] = Worker(start, environment, log=log)
        return self._workers[key]

    def _drop(self, environment: Mapping[str, str]) -> None:
        self._workers.pop(frozenset(environment.items())).stop()
