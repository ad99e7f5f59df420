"""The tests marked `gpu`, by pytest in a process of its own: how many passed, and why not all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.cuda.cell import TESTS
from benchmarks.cuda.store import Kept

_MARKED = re.compile(r"\bpytest\.mark\.gpu\b")
_REASONS = 20
"""Of tests that did not pass; more are counted only."""


def files_with_gpu_tests(root: Path) -> list[Path]:
    """Only these are collected: others import what a machine with a device may not have."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [path for path in found if _MARKED.search(path.read_text(encoding="utf-8"))]


def run_gpu_tests(root: Path, *, limit_s: float) -> Kept:
    """Run them. Skipped tests are counted as skipped, with their reasons, and never as passed."""
    start = time.perf_counter()
    files = files_with_gpu_tests(root)
    if not files:  # without any, pytest would run all others
        return Kept(TESTS, "failed", f"no test below {root / 'tests'} is marked gpu")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider",
            # Not the project's own: a machine with a device may have none of the plug-ins.
            "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default",
            f"--junitxml={report}", *map(str, files),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=environment,
                check=False,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return Kept(TESTS, "failed", f"they took longer than {limit_s:.0f} s")
        counts = counts_of(report) if report.exists() else {}
    seconds = time.perf_counter() - start
    if not sum(counts.get(name, 0) for name in ("passed", "failed", "skipped")):
        last = [*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines()][-1:]
        reason = f"pytest ran no test (exit status {done.returncode}): {''.join(last)}"
        return Kept(TESTS, "failed", reason, seconds)
    if counts["failed"]:
        return Kept(TESTS, "failed", f"{counts['failed']} failed", seconds, tests=counts)
    return Kept(TESTS, "measured", seconds=seconds, tests=counts)


def counts_of(report: Path) -> dict[str, Any]:
    """Of a JUnit report: `passed`, `failed`, `skipped`, and `reasons` by the test's name."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "reasons": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcome, reason = "passed", ""
        for tag, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            child = case.find(tag)
            if child is not None:
                outcome, reason = word, child.get("message") or ""
        counts[outcome] += 1
        if outcome != "passed" and len(counts["reasons"]) < _REASONS:
            counts["reasons"][name] = f"{outcome}: {reason.partition(chr(10))[0]}"
    return counts
