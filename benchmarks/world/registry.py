"""The whole second corpus: the correct pairs and the faults, and the selection of entries."""

from __future__ import annotations

from fnmatch import fnmatch

from benchmarks.corpus.entry import Entry
from benchmarks.world import faults
from benchmarks.world.correct_pairs import CORRECT_PAIRS
from benchmarks.world.fault import FAULTS
from benchmarks.world.halves import Half, half_of

assert faults.__all__  # Importing the modules fills FAULTS.

ENTRIES: list[Entry] = [*CORRECT_PAIRS, *FAULTS]


def select_entries(glob: str | None, half: Half | None) -> list[Entry]:
    """Return the entries of a half whose name matches, in order. None selects all."""
    return [
        entry
        for entry in ENTRIES
        if (glob is None or fnmatch(entry.name, glob))
        and (half is None or half_of(entry.architecture.name) == half)
    ]
