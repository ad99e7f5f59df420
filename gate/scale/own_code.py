"""The gate's own source files: who measures units for another must have the same, and a version
does not tell, because it stays as it is while somebody mends a copy."""

from __future__ import annotations

import functools
from pathlib import Path

import gate
from gate.storage.digest import Digest

_ROOT = Path(gate.__file__).parent


@functools.cache
def own_digest() -> Digest:
    """SHA-256 over the names and contents of all of them."""
    names = sorted(str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*.py"))
    return Digest.of_manifest(_ROOT, names)
