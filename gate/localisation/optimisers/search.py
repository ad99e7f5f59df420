"""The fewest of several switches that must be off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Heals = Callable[[frozenset[str]], bool]
"""Whether the answer is right with exactly these off."""


def fewest(names: Sequence[str], heals: Heals) -> tuple[str, ...]:
    """Those of `names` that must be off, in their order; `heals` holds for all of them.

    Where more that is off never spoils what fewer heal, the result heals and nothing can be left
    out of it. Asks about 2 log2(n) times for each that must be off (QuickXplain, Junker 2004).
    """
    return _fewest(frozenset(), names, heals, more=False)


def _fewest(
    off: frozenset[str], names: Sequence[str], heals: Heals, *, more: bool
) -> tuple[str, ...]:
    """Which of `names` are needed beside `off`. `more`: `off` grew since that was last known."""
    if more and heals(off):
        return ()
    if len(names) <= 1:
        return tuple(names)
    front, back = names[: len(names) // 2], names[len(names) // 2 :]
    of_back = _fewest(off.union(front), back, heals, more=True)
    of_front = _fewest(off.union(of_back), front, heals, more=bool(of_back))
    return (*of_front, *of_back)
