"""Measure how many faulty files the gate refuses and how many correct files it accepts.

.venv/bin/python -m benchmarks.corpus [--only GLOB] [--json FILE] [--distribution]
"""
