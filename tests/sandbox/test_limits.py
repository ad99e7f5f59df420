"""Formats and defaults of sandbox limits."""

from __future__ import annotations

import psutil
import pytest

from gate.sandbox import limits
from gate.sandbox.limits import SandboxLimits, memory_text, parse_duration, parse_size, time_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), (" 2 h ", 7200), ("0.5", 0.5)],
)
def test_time_limits(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9), ("8 gb", 8 * 10**9), ("4G", 4 * 10**9), ("512MiB", 2**29),
        ("1.5GiB", 3 * 2**29), ("1048576", 2**20), ("100b", 100), ("1T", 10**12),
    ],
)  # fmt: skip
def test_memory_limits(text, size):
    assert parse_size(text) == size


INVALID_LIMITS = [
    "",
    "0",
    "0s",
    "-1",
    "-5m",
    "nan",
    "inf",
    "1e9",
    "5 days",
    "h",
    "3x",
    "1m30s",
    "\u0661",
]


@pytest.mark.parametrize("text", INVALID_LIMITS)
def test_invalid_limit_is_refused(text):
    with pytest.raises(ValueError, match="Use 90s"):
        parse_duration(text)
    with pytest.raises(ValueError, match="Use 8GB"):
        parse_size(text)


def test_limits_are_formatted():
    assert [time_text(s) for s in (3, 90, 600, 3600, 14400)] == [
        "3 s", "90 s", "10 min", "60 min", "4 h",
    ]  # fmt: skip
    assert [memory_text(size) for size in (300_000_000, 4 * 2**30)] == ["300 MB", "4.3 GB"]


def test_default_limits_of_commands_and_service(monkeypatch):
    monkeypatch.setattr(limits, "usual_memory", lambda: 10**9)
    assert SandboxLimits.for_command(None, None, usual_s=60.0) == SandboxLimits(60.0, 10**9)
    assert SandboxLimits.for_command(5.0, 7, usual_s=60.0) == SandboxLimits(5.0, 7)
    assert SandboxLimits.for_service() == SandboxLimits(600.0, 10**9)  # for a small machine
    monkeypatch.setattr(limits, "usual_memory", lambda: 10**12)
    assert SandboxLimits.for_service() == SandboxLimits(600.0, 4 * 2**30)
    assert SandboxLimits.for_service(5.0, 7) == SandboxLimits(5.0, 7)


@pytest.mark.parametrize(
    ("place", "text", "of_group"),
    [
        ("memory.max", "1000000", True), ("memory/memory.limit_in_bytes", "1000000", True),
        ("memory.max", "max", False), ("memory.max", "", False),
    ],
)  # fmt: skip
def test_memory_limit_of_a_container(monkeypatch, tmp_path, place, text, of_group):
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    complete = limits.usual_memory()
    assert complete == int(psutil.virtual_memory().total * 0.8)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(text)
    assert limits.usual_memory() == (800_000 if of_group else complete)
