"""Assign architectures to the two halves of the corpus: bounds are set on one and tested on the
other."""

from __future__ import annotations

import hashlib
from typing import Literal

Half = Literal["tune", "confirm"]


def half_of(architecture: str) -> Half:
    """By the name alone: the same on every machine, whatever else is in the corpus, and for all
    seeds of an architecture, which stand behind a point."""
    digest = hashlib.sha256(architecture.partition(".")[0].encode()).digest()
    return "tune" if digest[0] % 2 else "confirm"
