"""Draw each chart once per process, for tests of other parts of a report.

Drawing the charts of one report takes longer than the rest of a promotion. Other tests cover the
charts' content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from gate.report import chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_paint = chart._figure_document


@pytest.fixture(autouse=True)
def reused_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the first chart of each name for all charts of that name."""
    monkeypatch.setattr(chart, "_figure_document", _paint_once)


_PAINTED_CHARTS: dict[str, str] = {}


def _paint_once(name: str, paint: Callable[[Axes], None], **options: Any) -> str:
    if name not in _PAINTED_CHARTS:
        _PAINTED_CHARTS[name] = _paint(name, paint, **options)
    return _PAINTED_CHARTS[name]
