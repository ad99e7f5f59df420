"""Measure how well the gate judges: correct files and files with known faults, in one table.

.venv/bin/python -m benchmarks.corpus [--only GLOB] [--json FILE] [--distribution]
"""
