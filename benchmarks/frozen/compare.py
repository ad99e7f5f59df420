"""Compares two JSON values to the last bit."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

NOT_COMPARED: dict[str, str] = {
    "measured_at": "the time of the run",
    "median_ms": "a time",
    "p95_ms": "a time",
    "open_ms": "a time",
    "first_ms": "a time",
    "batches": "how often a time was taken, as many as fit into a time limit",
    "memory_bytes": "memory, which depends on the allocator",
    "peak_bytes": "memory, which depends on the allocator",
    "cuda_bytes": "memory of a device that other processes use too",
}
"""Fields of evidence that differ between two runs of one commit, and why. Both sides must have the
field, with a value of the same type."""


class Difference(NamedTuple):
    """One field that differs, with both values as text."""

    path: str
    base: str
    current: str


def differences(
    base: Any, current: Any, *, not_compared: Container[str] = (), path: str = ""
) -> Iterator[Difference]:
    """Yield every field of two JSON values that differs.

    Floats are compared by their shortest exact text, so the last bit, the sign of a zero and 1 for
    1.0 count. `not_compared`: names of fields of which only the type is compared.
    """
    if isinstance(base, dict) and isinstance(current, dict):
        for name in base | current:
            inner = f"{path}.{name}" if path else name
            if name not in base or name not in current:
                yield Difference(inner, _text(base, name), _text(current, name))
            elif name not in not_compared:
                yield from differences(
                    base[name], current[name], not_compared=not_compared, path=inner
                )
            elif type(base[name]) is not type(current[name]):
                yield Difference(inner, repr(base[name]), repr(current[name]))
    elif isinstance(base, list) and isinstance(current, list):
        if len(base) != len(current):
            yield Difference(f"{path}.length", str(len(base)), str(len(current)))
        for index, pair in enumerate(zip(base, current, strict=False)):
            yield from differences(*pair, not_compared=not_compared, path=f"{path}[{index}]")
    elif repr(base) != repr(current):
        yield Difference(path, repr(base), repr(current))


def _text(values: dict[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "missing"
