"""Loading PyTorch and the model: apart from the spinner, because only a command whose process is
its own may let Python's collector rest."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from gate.commands.progress import spinner


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Say it, and let Python's collector rest meanwhile.

    The modules of PyTorch make a million objects that stay, and the collector would look at them
    again and again: a third of the time that the imports take. Afterwards all that is there counts
    as old.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        with spinner("loading PyTorch and the model"):
            yield
    finally:
        if collected:
            gc.freeze()  # to and fro: into the oldest generation, without a look
            gc.unfreeze()
            gc.enable()
