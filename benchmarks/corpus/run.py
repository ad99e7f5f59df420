"""All chosen entries, one after the other, on one bench."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.corpus.bench import Bench
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.judge import Gate, judge, parity_gate
from benchmarks.corpus.outcome import Outcome


def run(
    entries: Sequence[Entry],
    *,
    gate: Gate = parity_gate,
    advance: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Judge the entries in order. `advance` is called with (judged, all).

    What libraries warn of while faults are made and judged would bury the table.
    """
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bench = Bench(Path(folder))
        for entry in entries:
            outcomes.append(judge(entry, bench, gate=gate))
            if advance is not None:
                advance(len(outcomes), len(entries))
    return outcomes
