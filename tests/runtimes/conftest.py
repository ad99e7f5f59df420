"""What is judged, unless a module has its own."""

from __future__ import annotations

from tests.measure.exported import good, model

__all__ = ["good", "model"]
