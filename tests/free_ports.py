"""Ports of 127.0.0.1 for servers that need their port number before they bind it."""

from __future__ import annotations

import random
import socket

_HOST = "127.0.0.1"
# These ports are below the ranges that Linux (32768 on) and macOS (49152 on) assign to clients and
# to `bind` with port 0. No other test gets such a port before the server binds it.
_RANGE = range(20_000, 30_000)
# Hypothesis seeds the module `random`, so that all workers would draw the same ports.
_RANDOM = random.SystemRandom()


def free_port() -> int:
    """Return a port that nothing is bound to."""
    while True:
        port = _RANDOM.choice(_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
