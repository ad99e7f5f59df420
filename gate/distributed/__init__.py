"""Measure in several processes, on a Ray cluster or on other machines."""
