"""How the threads of PyTorch wait for their next piece of work.

Apart, so that it can be set before torch is loaded, when OpenMP reads it. By default its threads
spin for milliseconds: on cores that others use too, ONNX Runtime's threads among them (they sleep,
`gate.onnxfile.session`), two threads are then several times slower than one. Asleep at once, they
have to be woken for every operator: a network of many small ones takes several times as long as
with one thread. So they spin for the few microseconds between two operators. The numbers are the
same.
"""

from __future__ import annotations

import os

_SPINS = 300
"""Measured, two threads on two cores, in units of such that sleep at once: mobilenet_v3_small in
float64 takes 0.24 times the time, with another process beside it up to 1.6 times, and with 1 000
it would be 3 times."""


def wait_asleep() -> None:
    """Let threads of OpenMP spin shortly and then sleep, in this process, if torch is not loaded
    yet, and in those that it starts; nothing if the environment says how they wait."""
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)  # GNU's, which PyTorch brings, reads it first
