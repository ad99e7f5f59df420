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
"""Called with the entries that are judged and their total."""


def run(
    entries: Sequence[Entry],
    *,
    gate: Gate = parity_gate,
    jobs: int = 1,
    advance: Advance | None = None,
    registry: str = REGISTRY,
) -> list[Outcome]:
    """Judge the entries; the outcomes are in their order.

    `jobs` processes share the work by architecture, because models and exports are kept within a
    process; `gate` must be a function of a module then, and `registry` is the module whose
    `ENTRIES` they are.
    """
    done: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        judged = _here(entries, Path(folder), gate) if jobs == 1 else None
        for outcome in judged or _in_processes(entries, Path(folder), gate, jobs, registry):
            done[outcome.name] = outcome
            if advance is not None:
                advance(len(done), len(entries))
    return [done[entry.name] for entry in entries]


def _here(entries: Iterable[Entry], folder: Path, gate: Gate) -> Iterator[Outcome]:
    bench = Bench(folder)
    for entry in entries:
        with _quietly_on_one_thread():
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
        futures = [pool.submit(_there, group, folder, gate, registry) for group in largest_first]
        for future in as_completed(futures):
            yield from future.result()


def _there(names: Sequence[str], folder: Path, gate: Gate, registry: str) -> list[Outcome]:
    entries = importlib.import_module(registry).ENTRIES  # which reads all faults
    by_name = {entry.name: entry for entry in entries}
    return list(_here([by_name[name] for name in names], _own(folder), gate))


@functools.cache
def _own(folder: Path) -> Path:
    """A folder of this process."""
    own = folder / str(os.getpid())
    own.mkdir()
    return own


@contextmanager
def _quietly_on_one_thread() -> Iterator[None]:
    """One thread, because threads wait for each other longer than layers as small as these
    compute: on a busy machine twenty times as long. No warnings: what libraries say while faults
    are made and judged would bury the table."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before)
