"""Charts that are painted once in a process, for tests of what is around them: painting those of one
report takes longer than all the rest of a promotion. What they show has tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from gate.report import chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_paint = chart._figure_document


@pytest.fixture(autouse=True)
def reused_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chart of each name stands for all of that name."""
    monkeypatch.setattr(chart, "_figure_document", _reused)


_PAINTED: dict[str, str] = {}


def _reused(name: str, paint: Callable[[Figure], None], *, height: float) -> str:
    if name not in _PAINTED:
        _PAINTED[name] = _paint(name, paint, height=height)
    return _PAINTED[name]
