"""The cores of this machine: apart, so that whoever counts them imports no PyTorch."""

from __future__ import annotations

import os

import psutil


def cores() -> int:
    """Physical ones that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(min(psutil.cpu_count(logical=False) or 1, allowed or 1), 1)
