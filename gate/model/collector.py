"""Python's collector, which rests while PyTorch and a model are loaded: apart, because commands and
workers load, and nobody else may let it rest."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def resting_collector() -> Iterator[None]:
    """For a process that is ours alone. Afterwards all that is there counts as old.

    The modules of PyTorch make a million objects that stay, and the collector would look at them
    again and again: a third of the time that the imports take.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.freeze()  # to and fro: into the oldest generation, without a look
            gc.unfreeze()
            gc.enable()
