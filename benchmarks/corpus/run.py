"""Run the selected entries one by one, or in several processes."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.corpus.bench import Bench
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.judge import Gate, judge, parity_gate
from benchmarks.corpus.outcome import Outcome

REGISTRY = "benchmarks.corpus.registry"
Advance = Callable[[int, int], None]
"""Called with the number of judged entries and their total."""


def run(
    entries: Sequence[Entry],
    *,
    gate: Gate = parity_gate,
    jobs: int = 1,
    advance: Advance | None = None,
    registry: str = REGISTRY,
) -> list[Outcome]:
    """Judge the entries and return the outcomes in the same order.

    `jobs` processes share the work by architecture, because models and exports are cached within a
    process. With several processes, `gate` must be a module-level function and `registry` the
    module whose `ENTRIES` contains the entries.
    """
    outcomes_by_name: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        local_outcomes = _run_here(entries, Path(folder), gate) if jobs == 1 else None
        for outcome in local_outcomes or _in_processes(entries, Path(folder), gate, jobs, registry):
            outcomes_by_name[outcome.name] = outcome
            if advance is not None:
                advance(len(outcomes_by_name), len(entries))
    return [outcomes_by_name[entry.name] for entry in entries]


def _run_here(entries: Iterable[Entry], folder: Path, gate: Gate) -> Iterator[Outcome]:
    bench = Bench(folder)
    for entry in entries:
        with _single_thread():
            outcome = judge(entry, bench, gate=gate)
        yield outcome


def _in_processes(
    entries: Iterable[Entry], folder: Path, gate: Gate, jobs: int, registry: str
) -> Iterator[Outcome]:
    names: dict[str, list[str]] = {}
    for entry in entries:
        names.setdefault(entry.architecture.name, []).append(entry.name)
    largest_first = sorted(names.values(), key=len, reverse=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(_run_in_worker, group, folder, gate, registry) for group in largest_first
        ]
        for future in as_completed(futures):
            yield from future.result()


def _run_in_worker(names: Sequence[str], folder: Path, gate: Gate, registry: str) -> list[Outcome]:
    entries = importlib.import_module(registry).ENTRIES  # Importing it registers all faults.
    by_name = {entry.name: entry for entry in entries}
    return list(_run_here([by_name[name] for name in names], _process_folder(folder), gate))


@functools.cache
def _process_folder(folder: Path) -> Path:
    """Create a folder for this process."""
    process_folder = folder / str(os.getpid())
    process_folder.mkdir()
    return process_folder


@contextmanager
def _single_thread() -> Iterator[None]:
    """Use one thread and suppress warnings.

    With several threads, small layers spend most of the time in synchronization: up to twenty times
    as long on a busy machine. Warnings of libraries would bury the table.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before)
