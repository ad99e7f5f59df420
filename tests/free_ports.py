"""Ports of 127.0.0.1 for servers that must know theirs before they bind it."""

from __future__ import annotations

import random
import socket

_HOST = "127.0.0.1"
# Below the ports that Linux (32768 on) and macOS (49152 on) give to clients and to `bind` with port 0:
# no other test gets one of these between this function and the server's own `bind`.
_RANGE = range(20_000, 30_000)
# Hypothesis seeds the generator of the module `random`: all workers would draw the same ports.
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
