"""Which half of the corpus an architecture belongs to: bounds are set on one and tried on the
other."""

from __future__ import annotations

import hashlib
from typing import Literal

Half = Literal["tune", "confirm"]


def half_of(architecture: str) -> Half:
    """By the name alone: the same on every machine, whatever else is in the corpus."""
    digest = hashlib.sha256(architecture.encode()).digest()
    return "tune" if digest[0] % 2 else "confirm"
