"""Pages: those of the versions that new lines of the ledger tell of are brought up to date.

Whoever wrote a line did so already; this finishes what a crash or the weather kept him from. While
nothing is written, it asks the registry nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gate.ledger.entry import Action, LedgerEntry
from gate.ledger.history import History
from gate.registry.page.version_page import refresh
from gate.registry.registered_model import RegisteredModel

_RECENT = 20
"""Lines that a first look, or a thorough one, goes back to."""
_SILENT: tuple[Action, ...] = ("deployed", "not_deployed", "conflict")
"""Of these the pages say nothing."""


class Pages:
    """What a service remembers of each model's pages."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        """By model: how many lines were followed."""
        self._left: dict[str, tuple[str, ...]] = {}
        """By model: versions whose pages are out of date, because the registry was away."""

    def follow(self, model: RegisteredModel, *, thoroughly: bool) -> None:
        """Bring up to date what the lines since the last look tell of; in a first look, and
        `thoroughly`, also what those before it told of last. The caller is alone.

        Raises EvidenceError and StorageError where the ledger can't be read.
        """
        history, followed = model.history(), self._lines.get(model.name)
        number = len(history.entries)
        if followed is None or thoroughly or followed > number:
            versions = _recent(history)
        else:
            versions = _named(history.entries[followed:])
        wanted = (*self._left.get(model.name, ()), *versions)
        self._left[model.name] = refresh(model, wanted)
        self._lines[model.name] = number


def _recent(history: History) -> Iterator[str]:
    yield from filter(None, (history.serving, *(line.version for line in history.waiting)))
    yield from _named(history.entries[-_RECENT:])


def _named(lines: Iterable[LedgerEntry]) -> Iterator[str]:
    for line in lines:
        if line.action not in _SILENT:
            yield from filter(None, (line.version, line.previous_version))
