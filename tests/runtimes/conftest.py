"""The default model and file of the runtime tests."""

from __future__ import annotations

from tests.measure.exported import good, model

__all__ = ["good", "model"]
