"""The whole corpus: the correct pairs, then the faults."""

from __future__ import annotations

from benchmarks.corpus import faults
from benchmarks.corpus.correct import CORRECT_PAIRS
from benchmarks.corpus.entry import FAULTS, Entry, matching

assert faults.__all__  # Importing the modules fills FAULTS.

ENTRIES: list[Entry] = [*CORRECT_PAIRS, *FAULTS]


def select_entries(glob: str | None) -> list[Entry]:
    """Return the entries whose name matches, in order. None selects all."""
    return matching(ENTRIES, glob)
