"""The whole second corpus: architectures of two libraries, correct pairs and faults, in halves.

Float64 and ONNX Runtime alone decided which exported files are right, on the samples and on other
batch sizes.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from benchmarks.corpus.entry import Entry, correct_entry, matching
from benchmarks.corpus.exporters import DIRECT_17, DYNAMO_18
from benchmarks.world import faults
from benchmarks.world.fault import ARCHITECTURES, FAULTS

assert faults.__all__  # Importing the modules fills FAULTS.

Half = Literal["tune", "confirm"]

REFUSED = ("timm-eva02-tiny-patch14-224",)
"""Architectures that the TorchScript-based exporter refuses; leaving them out saves time."""

ENTRIES: list[Entry] = [
    *(
        correct_entry(architecture, recipe)
        for architecture in ARCHITECTURES.values()
        for recipe in (DIRECT_17, DYNAMO_18)
        if recipe is DYNAMO_18 or architecture.name not in REFUSED
    ),
    *FAULTS,
]


def half_of(architecture: str) -> Half:
    """Return the half of an architecture: bounds are set on one and tested on the other.

    It depends only on the name, so it stays the same whatever else is in the corpus.
    """
    return "tune" if hashlib.sha256(architecture.encode()).digest()[0] % 2 else "confirm"


def select_entries(glob: str | None, half: Half | None) -> list[Entry]:
    """Return the entries of a half whose name matches, in order. None selects all."""
    return [
        entry
        for entry in matching(ENTRIES, glob)
        if half is None or half_of(entry.architecture.name) == half
    ]
