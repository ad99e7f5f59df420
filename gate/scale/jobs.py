"""How many processes measure, with how many threads each: by a short trial, if nobody says."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass

import psutil

from gate.parity.arrays.samples import Samples
from gate.parity.case import Case
from gate.parity.runners.determinism import threads_set
from gate.parity.sample_pass import SamplePass
from gate.records.runtime import CPU_PROVIDER
from gate.runtimes.chosen import chosen_of
from gate.scale.cores import cores

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


def asked_for(count: int, case: Case) -> Jobs:
    """What the user says."""
    threads = case.policy.determinism.threads
    if count == 1:
        return Jobs(1, threads, "one process was asked for")
    return Jobs(count, threads or 1, f"{count} processes were asked for")


def chosen(case: Case) -> Jobs:
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


def worth_a_trial(samples: Samples, batch_size: int) -> bool:
    """Whether there are so many batches, and cores for them."""
    return cores() > 1 and _batches(samples, batch_size) >= _LEAST_BATCHES


def _batches(samples: Samples, batch_size: int) -> int:
    return math.ceil(len(samples) / batch_size)


def _room() -> int:
    """Processes as large as this one that the free memory holds."""
    return int(psutil.virtual_memory().available // psutil.Process().memory_info().rss)


def _on_the_cpu(case: Case) -> bool:
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


def _trial(case: Case, threads: tuple[int, int]) -> list[float]:
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
