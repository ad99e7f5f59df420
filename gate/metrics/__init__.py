"""Metrics of the task: values per sample, confidence bounds and slices."""
