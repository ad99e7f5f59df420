"""Loading PyTorch and the model: apart from the spinner, because only a command whose process is
its own may let Python's collector rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gate.commands.progress import spinner
from gate.model.collector import resting_collector


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Say it, and let Python's collector rest meanwhile."""
    with resting_collector(), spinner("loading PyTorch and the model"):
        yield
