"""How well the gate judges: files that are right, files that are wrong in known ways, one table.

.venv/bin/python -m benchmarks.corpus [--only GLOB] [--json FILE] [--distribution]
"""
