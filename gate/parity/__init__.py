"""Measuring how far a runtime is from the PyTorch model."""
