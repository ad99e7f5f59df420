"""What is judged, unless a module has its own."""

from tests.measure.exported import good, model

__all__ = ["good", "model"]
