"""Submit tasks to processes or Ray; retry lost workers."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import psutil

from gate.data.location import SampleLocation
from gate.data.open_samples import Opening
from gate.data.samples import SampleSet
from gate.distributed.cluster_early import (
    EarlyActors,
    end_actor,
)
from gate.distributed.early import EarlyProcess
from gate.distributed.kept_parts import KeptParts, KeptPlan
from gate.distributed.plan import MeasurementPlan
from gate.distributed.worker import ONE_FILE, Answer, JobSpec, WorkerFailure, read_answer
from gate.errors import EvidenceError, GateError, PolicyError, first_line
from gate.installation import cores
from gate.measure.job import EvaluationData, MeasurementJob, Reference
from gate.measure.run import SamplePass
from gate.measure.work_units import FirstUnitState, ReferenceDigests, UnitResult, WorkUnit
from gate.onnx_file.release_file import is_release_file
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import CrewRecord
from gate.records.runtime import CPU_PROVIDER
from gate.reference.environment import threads_set
from gate.runtimes.selection import chosen_of

if TYPE_CHECKING:
    from gate.distributed.worker import Freight


_WORTH_S = 20.0
"""Of computing in one process: a process takes seconds to start."""

_LEAST_BATCHES = 100
"""From here on a trial of a few batches is no cost that anybody notices."""

_FASTER = 0.85
"""Of the time with all threads in one process: else it stays with that."""


@dataclass(frozen=True)
class Jobs:
    """Processes, and threads of each; None: as PyTorch has them."""

    count: int
    threads: int | None
    reason: str


def asked_for(count: int, case: MeasurementJob) -> Jobs:
    """What the user says, as far as the free memory holds processes as large as this one."""
    threads = case.policy.determinism.threads
    if count == 1:
        return Jobs(1, threads, "one process was asked for")
    reason, room = f"{count} processes were asked for", max(_room(), 1)
    if room < count:
        count, reason = room, f"{reason}, the free memory holds {room}"
    return Jobs(count, threads if count == 1 else threads or 1, reason)


def chosen(case: MeasurementJob) -> Jobs:
    """One process for each physical core, with one thread each, where that is faster than one with
    all threads; where the policy says how many threads, as many processes as leave them cores.

    Raises what opening a pass raises.
    """
    threads = case.policy.determinism.threads
    one = Jobs(1, threads, "one process is fast enough")
    count, batches = cores() // (threads or 1), _batches(case.samples, case.batch_size)
    if count < 2 or batches < _LEAST_BATCHES or not _on_the_cpu(case):
        return one
    trial = _trial(case, (cores(), 1) if threads is None else (threads, threads))
    together, alone = (seconds * batches for seconds in trial)
    count = min(count, _room())
    if count < 2 or together < _WORTH_S or alone / count > _FASTER * together:
        return one
    reason = (
        f"a batch of the reference takes {alone / batches:.3g} s with one thread, "
        f"{together / batches:.3g} s with {cores()}"
    )
    return Jobs(
        count, threads or 1, reason if threads is None else f"{count} times {threads} cores"
    )


def worth_a_trial(samples: SampleSet, batch_size: int) -> bool:
    """Whether there are so many batches, and cores for them."""
    return cores() > 1 and _batches(samples, batch_size) >= _LEAST_BATCHES


def _batches(samples: SampleSet, batch_size: int) -> int:
    return math.ceil(len(samples) / batch_size)


def _room() -> int:
    """Processes as large as this one that the free memory holds."""
    return int(psutil.virtual_memory().available // psutil.Process().memory_info().rss)


def _on_the_cpu(case: MeasurementJob) -> bool:
    """Whether all runtimes that are here compute on the CPU, within the processes."""
    if case.recordings:
        return False
    with contextlib.ExitStack() as opened:
        runtimes = chosen_of(case.policy, case.recordings)
        for runtime in runtimes:
            opened.callback(runtime.close)
        try:
            here = [runtime for runtime in runtimes if runtime.absent_reason() is None]
            return all(runtime.promises.provider == CPU_PROVIDER for runtime in here)
        except Exception:  # its own failure, when it is measured
            return False


def _trial(case: MeasurementJob, threads: tuple[int, int]) -> list[float]:
    """Seconds of a batch of the reference with either number of threads, once it is warm."""
    seconds = []
    with SamplePass.open(case, noise=False) as sample_pass:
        batch = next(sample_pass.samples.batches(sample_pass.binding.batch_size))
        for number in threads:
            with threads_set(number):
                sample_pass.reference.run(batch)
                start = time.perf_counter()
                sample_pass.reference.run(batch)
                seconds.append(time.perf_counter() - start)
    return seconds


_TRIES = 3
"""Workers that may end over one unit."""


class HandLost(Exception):
    """A worker ended without an answer; the text says what is to be heard of it."""


class Hand(Protocol):
    """One worker, wherever it is."""

    unit: WorkUnit | None
    """That it has now."""
    opening: bool
    """Nobody knows yet when it will be there: it gets no unit before it says so, by an answer of
    None."""

    def begin(self, lead: bytes) -> None:
        """Give it the lead, by which it judges. One that has ended says so by `answer`."""

    def give(self, unit: WorkUnit, *, again: bool) -> None:
        """Give it a unit to measure, as `begin`; `again`: only what the reference answers."""

    def answer(self) -> Answer | None:
        """What it said, once it has; None: it is there. Raises HandLost."""

    def end(self) -> None:
        """End it, whatever it does."""


@dataclass
class Work:
    """What is still to do."""

    lead: bytes
    waiting: deque[WorkUnit]
    left: int
    """Units that nobody has answered for."""
    kept: set[int] = field(default_factory=set)
    """Those of which an earlier check left the part: the reference is asked again."""
    failure: GateError | None = None
    """Of the first unit, by index, that can't be measured."""
    _failed: int | None = None
    _lost: dict[int, int] = field(default_factory=dict)

    def begin(self, hand: Hand) -> None:
        """Give a new worker the lead, and its first unit."""
        hand.begin(self.lead)
        self._give(hand)

    def go_on(self, hand: Hand) -> None:
        """It has answered."""
        if hand.unit is not None:
            hand.unit = None
            self.left -= 1
        self._give(hand)

    def repeat(self, hand: Hand) -> None:
        """What the reference answered is not what the kept part was measured on."""
        if hand.unit is not None:
            self.kept.discard(hand.unit.index)
            hand.give(hand.unit, again=False)

    def lose(self, hand: Hand, why: HandLost) -> None:
        """It ended: its unit goes to another one."""
        unit, hand.unit = hand.unit, None
        if unit is None:
            return
        self._lost[unit.index] = self._lost.get(unit.index, 0) + 1
        if self._lost[unit.index] < _TRIES:
            self.waiting.appendleft(unit)
            return
        self.left -= 1
        self._note(
            unit.index,
            EvidenceError(
                f"unit {unit.index} (samples {unit.start} to {unit.stop - 1}) ended {_TRIES} "
                f"workers, the last with {why}. Look at the memory and the logs of the machines "
                "where they run, or measure with one job."
            ),
        )

    def fail(self, hand: Hand, error: GateError) -> None:
        """It can't measure its unit; what it can't open, nobody can."""
        self._note(-1 if hand.unit is None else hand.unit.index, error)

    def _note(self, index: int, error: GateError) -> None:
        if self._failed is None or index < self._failed:
            self._failed, self.failure = index, error
        while self.waiting and self.waiting[-1].index > self._failed:
            self.waiting.pop()
            self.left -= 1

    def _give(self, hand: Hand) -> None:
        if self.waiting:
            hand.unit = self.waiting.popleft()
            hand.give(hand.unit, again=hand.unit.index in self.kept)


_steps = logging.getLogger("gate.steps")

_CLOSE_S = 0.5

_RETRIES = 3
"""Of an actor that reads samples, where it or its machine fails."""


@dataclass(eq=False)
class _Actor:
    """As `gate.distributed.worker_pool.Hand`."""

    start: Future[tuple[Any, Any]]
    """Its handle, and the reference of what it says when it is there."""
    unit: WorkUnit | None = None
    answers: Any = None
    """The reference of what it will say."""
    opening: bool = True

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        self._handle.begin.remote(lead)

    def give(self, unit: WorkUnit, *, again: bool) -> None:
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
    """As `gate.distributed.worker_pool.CrewEngine`."""

    assignment: JobSpec
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
    def of(cls, assignment: JobSpec, early: EarlyActors) -> RayActors:
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


def _packed(assignment: JobSpec) -> Freight:
    from gate.distributed.worker import Freight

    return Freight.of(assignment)


def _reader(assignment: JobSpec) -> Any:
    """The actor on this machine that reads samples which lie here, for workers that may be
    elsewhere; None: samples have an address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from gate.distributed.worker import SampleActor

    named = SampleLocation.parse(assignment.inputs)
    if named.is_url or named.is_factory:
        return None
    spec = assignment.preprocessing
    fields = assignment.inputs[len(named.place) :]
    opening = Opening(
        f"{Path(named.place).absolute()}{fields}",
        PreprocessSpec.from_file(Path(spec)) if spec else None,
    )
    here = ray.get_runtime_context().get_node_id()
    strategy = NodeAffinitySchedulingStrategy(here, soft=False)
    kind = ray.remote(SampleActor).options(
        num_cpus=0, scheduling_strategy=strategy, max_restarts=_RETRIES, max_task_retries=_RETRIES
    )
    return kind.remote(opening)


def _unusable(error: Exception) -> str:
    return (
        f"a worker of the cluster can't measure: {first_line(error)}. It needs parity-gate, the "
        "model's code and the same versions: submit from the folder of the code (ray job submit "
        "--working-dir .), or install them there."
    )


@dataclass(eq=False)
class _Process:
    """As `gate.distributed.worker_pool.Hand`."""

    process: EarlyProcess
    unit: WorkUnit | None = None
    opening: bool = False

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        with contextlib.suppress(BrokenPipeError):  # it is heard of as one that died
            self.process.connection.send_bytes(lead)

    def give(self, unit: WorkUnit, *, again: bool) -> None:
        """As `Hand.give`."""
        with contextlib.suppress(BrokenPipeError):
            self.process.connection.send((unit.index, unit.start, unit.stop, again))

    def answer(self) -> Answer:
        """As `Hand.answer`."""
        try:
            return read_answer(self.process.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise HandLost(f"code {self.process.ended()}") from error

    def end(self) -> None:
        """As `Hand.end`."""
        self.process.end()


@dataclass(frozen=True)
class Processes:
    """As `CrewEngine`: so many processes, with so many threads each."""

    assignment: JobSpec
    count: int
    threads: int = 1
    early: deque[EarlyProcess] = field(default_factory=deque)
    """Those that have started already; whoever started them ends what is left."""
    name: Literal["processes", "ray"] = "processes"

    def start(self) -> Hand:
        """As `CrewEngine.start`."""
        process = self.early.popleft() if self.early else EarlyProcess.start()
        with contextlib.suppress(BrokenPipeError):  # it is heard of as one that died
            process.connection.send((self.assignment.to_json(), self.threads))
        return _Process(process)

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        """As `CrewEngine.ready`."""
        mine = [hand for hand in hands if isinstance(hand, _Process)]
        answered = wait([hand.process.connection for hand in mine], seconds)
        return [hand for hand in mine if hand.process.connection in answered]

    def close(self) -> None:
        """Nothing is held."""


_END_S = 10.0

_LEAVE_S = 1.0

_MOST_WAITING = 32
"""Parts that nobody has taken yet, before the crew waits."""


class CrewEngine(Protocol):
    """What starts workers: processes of this machine, or actors of a cluster."""

    @property
    def name(self) -> Literal["processes", "ray"]:
        """As the evidence calls it."""

    @property
    def count(self) -> int:
        """Workers that it starts."""

    @property
    def assignment(self) -> JobSpec:
        """What they measure."""

    def start(self) -> Hand:
        """Start one. It opens what it needs while the lead is measured."""

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        """Those that have answered or ended, waiting so long for the first of them."""

    def close(self) -> None:
        """Give back what it holds; its workers were ended."""


@dataclass
class Workers:
    """As `gate.measure.work_units.Crew`. A worker that ends is replaced, and its unit measured
    again. Parts that are done are kept until all are taken."""

    engine: CrewEngine
    kept: KeptParts | None = None
    _hands: list[Hand] = field(default_factory=list)
    _earlier: int = 0
    """Parts of an earlier check that were used."""
    _done: queue.Queue[UnitResult | GateError | None] = field(
        default_factory=lambda: queue.Queue(_MOST_WAITING)
    )
    _thread: threading.Thread | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _broke: GateError | None = None

    def __enter__(self) -> Workers:
        """Start them: they open model and file while the lead is measured. Raises what starting
        them raises."""
        try:
            for _ in range(self.engine.count):
                self._hands.append(self.engine.start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End them all, whatever they do. Kept parts are for whoever was interrupted, or lost a
        worker: of what was refused nothing is used again."""
        self._end()
        interrupted = error is not None and not isinstance(error, Exception)
        lost = error is not None and error is self._broke
        if self.kept is not None and not interrupted and not lost:
            self.kept.remove()

    @property
    def record(self) -> CrewRecord:
        """As `Crew.record`."""
        return CrewRecord(engine=self.engine.name, workers=self.engine.count, earlier=self._earlier)

    def begin(self, lead: FirstUnitState, units: Sequence[WorkUnit]) -> FirstUnitState:
        """As `Crew.begin`."""
        kept = set() if self.kept is None else self.kept.begin(lead, units)
        work = Work(lead.to_json().encode(), deque(units), len(units), kept)
        self._thread = threading.Thread(target=self._drive, args=(work,), daemon=True)
        self._thread.start()
        return lead

    def parts(self) -> Iterator[UnitResult]:
        """As `Crew.parts`. A part is kept when the next one is asked for, because by then this one
        was not refused."""
        while (came := self._done.get()) is not None:
            if isinstance(came, GateError):
                self._broke = came
                raise came
            yield came
            if self.kept is not None:
                self.kept.keep(came)

    def _end(self) -> None:
        self._is_over.set()  # none of them is replaced any more
        if self._thread is not None:
            self._thread.join(_END_S)
        for hand in self._hands:
            hand.end()
        self.engine.close()

    def _drive(self, work: Work) -> None:
        try:
            for hand in self._hands:
                _begin(hand, work)
            while work.left and self._hands and not self._is_over.is_set():
                for hand in self.engine.ready(self._hands, seconds=_LEAVE_S):
                    self._hear(hand, work)
            self._put(work.failure or (_nobody_left() if work.left else None))
        except GateError as error:  # of the engine: it can't start anybody
            self._put(error)
        except Exception as error:
            self._put(EvidenceError(f"the crew of {self.engine.name} broke: {error}. Repeat."))

    def _put(self, answer: UnitResult | GateError | None) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(queue.Full):
                self._done.put(answer, timeout=_LEAVE_S)
                return

    def _hear(self, hand: Hand, work: Work) -> None:
        try:
            answer = hand.answer()
        except HandLost as why:
            self._replace(hand, work, why)
            return
        if answer is None:
            work.begin(hand)
            return
        if isinstance(answer, UnitResult):  # which is its answers, too
            self._put(answer)
        elif isinstance(answer, ReferenceDigests):
            self._take_kept(answer, hand, work)
            return
        else:
            work.fail(hand, answer.error())
        work.go_on(hand)

    def _take_kept(self, answer: ReferenceDigests, hand: Hand, work: Work) -> None:
        """Use the part of an earlier check where the reference still answers the same."""
        part = None if self.kept is None else self.kept.part(answer)
        if part is None:
            work.repeat(hand)
            return
        self._earlier += 1
        self._put(part)
        work.go_on(hand)

    def _replace(self, hand: Hand, work: Work, why: HandLost) -> None:
        work.lose(hand, why)
        hand.end()
        if self._is_over.is_set():
            return
        self._hands.remove(hand)
        if work.waiting:
            self._hands.append(self.engine.start())
            _begin(self._hands[-1], work)


def _begin(hand: Hand, work: Work) -> None:
    """One that is still opening says when it is there."""
    if not hand.opening:
        work.begin(hand)


def _nobody_left() -> EvidenceError:
    return EvidenceError("no worker is left to measure. Repeat, or measure with one job.")


@dataclass(frozen=True)
class CheckedFile:
    """A check that is going to be made."""

    onnx: Path
    reference: Reference
    data: EvaluationData
    policy: Policy

    @contextlib.contextmanager
    def by_processes(
        self, jobs: int | None, *, early: deque[EarlyProcess] | None = None
    ) -> Iterator[EvaluationData]:
        """The data with its crew, if it has one. `jobs`: processes; None: as many as pay.
        `early`: processes that have started already.

        Inside, PyTorch has as many threads here as in each of them. Raises PolicyError where
        several are asked for and can't be, and what opening the files raises.
        """
        samples = self.data.samples if self.data.samples.count else self._case().samples
        few = not samples.count or not worth_a_trial(samples, self.data.batch_size)
        if jobs == 1 or (jobs is None and few):
            yield self.data
            return
        case = self._case()
        try:
            assignment = JobSpec.from_job(case, self.reference, self.data)
        except PolicyError:
            if jobs is not None:
                raise
            jobs = 1
        decided = chosen(case) if jobs is None else asked_for(jobs, case)
        if decided.count == 1:
            yield self.data
            return
        _steps.debug("measure in %d processes: %s", decided.count, decided.reason)
        threads = decided.threads or 1
        engine = Processes(assignment, decided.count, threads, early or deque())
        with self._shared(engine, threads) as workload:
            yield workload

    @contextlib.contextmanager
    def by_cluster(self, early: EarlyActors) -> Iterator[EvaluationData]:
        """The data with actors of a Ray cluster for its crew.

        Inside, PyTorch has as many threads here as in each of them. Raises as `by_processes`.
        """
        engine = RayActors.of(JobSpec.from_job(self._case(), self.reference, self.data), early)
        _steps.debug("measure by %d actors of Ray", engine.count)
        with self._shared(engine, engine.threads) as workload:
            yield workload

    @contextlib.contextmanager
    def as_planned(self, plan: MeasurementPlan) -> Iterator[None]:
        """Inside, PyTorch has the plan's threads. Raises DigestMismatch where file or model are
        not those of the plan."""
        plan.assignment.verify(self.onnx, self.reference)
        with threads_set(plan.threads):
            yield

    @contextlib.contextmanager
    def _shared(self, engine: CrewEngine, threads: int) -> Iterator[EvaluationData]:
        workload = replace(self.data, samples=self._case().samples)
        with threads_set(threads), contextlib.ExitStack() as held:
            plan = KeptPlan.of(engine.assignment, workload)
            kept = held.enter_context(KeptParts.opened(plan))
            yield replace(workload, crew=held.enter_context(Workers(engine, kept)))

    def _case(self) -> MeasurementJob:
        if is_release_file(self.onnx):
            raise PolicyError(ONE_FILE)
        return MeasurementJob.from_files(
            self.onnx, model=self.reference.model, data=self.data, policy=self.policy
        )
