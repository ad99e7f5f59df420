"""History: what the ledger says about one model in one registry, asked in one vocabulary.

A value: it says what was written when it was read. Whoever appends a line reads it anew.
Law: a line about one version changes nothing that is said of another (but which of them serves).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gate.registry.ledger import Action, LedgerEntry

_SERVING: tuple[Action, ...] = ("promoted", "unchanged", "rolled_back", "reverted")
"""Which version serves from then on."""
_VOUCHING: tuple[Action, ...] = ("passed", *_SERVING)
"""That the gate passed a version."""
_PASSING: tuple[Action, ...] = ("passed", "promoted")
"""That it was examined then: what was said of its number before is over."""
_STANDING: tuple[Action, ...] = (
    "passed", "promoted", "unchanged", "refused", "rejected", "rolled_back", "violation",
)  # fmt: skip
"""What became of a version that was handed in."""


@dataclass(frozen=True)
class History:
    """The lines about one model in one registry, oldest first."""

    entries: tuple[LedgerEntry, ...] = ()

    def vouching_for(self, version: str) -> LedgerEntry | None:
        """The last line that says that the gate passed a version, with digests; None: none does."""
        return _last(
            entry for entry in self._about(version) if entry.action in _VOUCHING and entry.sha256
        )

    def was_served(self, version: str) -> bool:
        """Whether a version ever was what `champion` rightly pointed at."""
        return any(entry.action in _SERVING for entry in self._about(version))

    def standing(self, version: str) -> LedgerEntry | None:
        """The last word on a version; None where none was said."""
        return _last(entry for entry in self._about(version) if entry.action in _STANDING)

    def since_passed(self, version: str) -> tuple[Action, ...]:
        """What was said of a version since it passed last: a registry that was made anew counts its
        versions from one again."""
        actions = [entry.action for entry in self._about(version)]
        passed = [place for place, action in enumerate(actions) if action in _PASSING]
        return tuple(actions[passed[-1] :] if passed else actions)

    def deployment_of(self, vouched: LedgerEntry) -> LedgerEntry | None:
        """The last word on deploying this very version: that it was refused, or that it is what
        was deployed last; None where it is neither."""
        tried = [e for e in self.entries if e.action in ("deployed", "not_deployed")]
        last, deployed = _last(tried), _last(e for e in tried if e.action == "deployed")
        very = (vouched.version, vouched.sha256)
        for entry in (last, deployed):
            if entry is not None and (entry.version, entry.sha256) == very:
                return entry
        return None

    def tells_of(self, operation: str) -> bool:
        """Whether a line tells of this move of `champion`."""
        return any(entry.operation == operation for entry in self.entries)

    @property
    def passed_any(self) -> bool:
        """Whether the gate ever passed anything of the model."""
        return any(entry.action in _VOUCHING for entry in self.entries)

    @property
    def change(self) -> LedgerEntry | None:
        """The line that says what serves; None before the first promotion."""
        return _last(entry for entry in self.entries if entry.action in _SERVING)

    @property
    def serving(self) -> str | None:
        """The version that serves by the ledger; None: nothing does."""
        return None if self.change is None else self.change.version

    @property
    def served(self) -> tuple[str, ...]:
        """All versions that ever served, each once, the last one first."""
        versions = (e.version for e in reversed(self.entries) if e.action in _SERVING)
        return tuple(dict.fromkeys(version for version in versions if version is not None))

    @property
    def waiting(self) -> tuple[LedgerEntry, ...]:
        """Lines of the versions that passed and wait for their review: it is the last word on
        them. The version that was handed in first comes first."""
        words = {e.version: e for e in self.entries if e.version and e.action in _STANDING}
        return tuple(word for word in words.values() if word.action == "passed")

    def _about(self, version: str) -> Iterator[LedgerEntry]:
        return (entry for entry in self.entries if entry.version == version)


def _last(entries: Iterable[LedgerEntry]) -> LedgerEntry | None:
    return next(reversed(list(entries)), None)
