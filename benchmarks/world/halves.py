"""Assign architectures to two halves: bounds are set on one and tested on the other."""

from __future__ import annotations

import hashlib
from typing import Literal

Half = Literal["tune", "confirm"]


def half_of(architecture: str) -> Half:
    """Return the half of an architecture, which depends only on its name.

    The half is the same on every machine, whatever else is in the corpus. All seeds of an
    architecture, whose names differ only behind a point, are in one half.
    """
    digest = hashlib.sha256(architecture.partition(".")[0].encode()).digest()
    return "tune" if digest[0] % 2 else "confirm"
