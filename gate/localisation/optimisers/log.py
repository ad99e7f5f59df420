"""Which optimisers changed the graph, as ONNX Runtime logs it while it opens a session.

There is no list of their names to ask for. In the most talkative log each one is named when it
begins and when it ends, and that log is the same for all providers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LEVEL = re.compile(r"graph transformer\(s\) for level (\d+)")
_BEGINS = re.compile(r"Applying graph transformer (\S+) on step")
_ENDS = re.compile(r"GraphTransformer (\S+) modified: (\d+) with status: (\S+)")
LEVELS = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")
"""As the log counts them, from 1."""


def changing(lines: Iterable[str], *, at: str | None = None) -> tuple[str, ...]:
    """Names of those that changed the graph, or broke while they did; none where the log names
    none. In the order in which they first ran, those that changed it at the level `at` first."""
    levels: dict[str, set[int]] = {}
    level, begun = 0, None
    for line in lines:
        if of := _LEVEL.search(line):
            level = int(of[1])
        elif begins := _BEGINS.search(line):
            begun = begins[1]
        elif ends := _ENDS.search(line):
            begun = None
            if ends[2] != "0" or ends[3] != "OK":
                levels.setdefault(ends[1], set()).add(level)
    if begun is not None:  # which nothing ended
        levels.setdefault(begun, set()).add(level)
    wanted = LEVELS.index(at) + 1 if at in LEVELS else 0
    return tuple(sorted(levels, key=lambda name: wanted not in levels[name]))
