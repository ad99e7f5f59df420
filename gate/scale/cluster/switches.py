"""Switches of Ray, which it reads when it is imported: apart, so that they are set before a model's
module imports it."""

from __future__ import annotations

import os

_SWITCHES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster of one machine listens on 127.0.0.1 alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as urgent as --jobs; Ray's 15 starves beside any other work
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without GPUs of their own use what is there
}


def set_switches() -> None:
    """Set those that nobody has set, for this process and those that it starts."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
