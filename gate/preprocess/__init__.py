"""Preprocessing: one specification, its implementations, their comparison."""
