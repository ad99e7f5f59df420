"""Import the default model and file fixtures for the tests of measurement."""

from tests.measure.exported import good, model

__all__ = ["good", "model"]
