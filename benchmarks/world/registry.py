"""The whole second corpus: the correct pairs, the faults, and its two halves."""

from __future__ import annotations

from fnmatch import fnmatch

from benchmarks.corpus.entry import Entry
from benchmarks.world import faults
from benchmarks.world.correct_pairs import CORRECT_PAIRS
from benchmarks.world.fault import FAULTS
from benchmarks.world.halves import Half, half_of

assert faults.__all__  # reading them fills FAULTS

ENTRIES: list[Entry] = [*CORRECT_PAIRS, *FAULTS]


def chosen(glob: str | None, half: Half | None) -> list[Entry]:
    """The entries of a half whose name matches, in order; None: all."""
    return [
        entry
        for entry in ENTRIES
        if (glob is None or fnmatch(entry.name, glob))
        and (half is None or half_of(entry.architecture.name) == half)
    ]
