"""The history of one model, derived from the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gate.ledger.entry import Action, LedgerEntry, plain
from gate.signing.trust import MAX_CLOCK_SKEW, parse_time
from gate.storage.digest import Digest

SERVING: tuple[Action, ...] = ("promoted", "unchanged", "rolled_back", "reverted")
"""Actions after which the entry's version serves."""

MOVING: tuple[Action, ...] = ("promoted", "rolled_back", "reverted")
"""Actions after which another version serves than before."""

APPROVING: tuple[Action, ...] = ("passed", *SERVING)
"""Actions that imply that the gate passed the version."""

PASSING: tuple[Action, ...] = ("passed", "promoted")
"""Actions that follow a check of the version. They supersede earlier entries with its number."""

PROMOTED: tuple[Action, ...] = ("promoted",)

DEPLOYMENTS: tuple[Action, ...] = ("deployed", "not_deployed", "replay_failed")

STANDING: tuple[Action, ...] = (
    "passed", "promoted", "unchanged", "refused", "rejected", "rolled_back",
)  # fmt: skip
"""Actions that state the outcome of a submitted version."""


def entries_since(
    entries: Sequence[LedgerEntry], version: str, actions: Collection[Action]
) -> Sequence[LedgerEntry]:
    """Return the entries from the version's last entry with such an action on, or all entries."""
    indices = [
        index
        for index, entry in enumerate(entries)
        if entry.version == version and entry.action in actions
    ]
    return entries[indices[-1] :] if indices else entries


def last_of(entries: Iterable[LedgerEntry]) -> LedgerEntry | None:
    """Return the last entry, or None if there is none."""
    return next(reversed(list(entries)), None)


# Invariant: an entry about one version does not affect the results for another version, except
# which of them serves and which was deployed last. A rollback is about two versions.
@dataclass(frozen=True)
class ModelHistory:
    """The entries about one model in one registry, oldest first.

    A snapshot: read the ledger again after appending to it.
    """

    entries: tuple[LedgerEntry, ...] = ()

    def naming(self, version: str) -> Sequence[LedgerEntry]:
        """Return the entries with this `version` or `previous_version`, oldest first."""
        return self._by_version.get(version, ())

    def approving_entry(self, version: str) -> LedgerEntry | None:
        """Return the last entry, with digests, that implies that the gate passed a version."""
        entries = self._entries_of(version)
        return last_of(e for e in entries if e.action in APPROVING and e.sha256)

    def was_served(self, version: str) -> bool:
        """Return whether a version ever served, by the ledger."""
        return any(entry.action in SERVING for entry in self._entries_of(version))

    def standing(self, version: str) -> LedgerEntry | None:
        """Return the last entry that states the outcome of a version, or None."""
        return self._standing.get(version)

    def since_passed(self, version: str) -> tuple[Action, ...]:
        """Return the actions on a version since it last passed.

        Earlier entries may be about another version: a recreated registry restarts its version
        numbers at one.
        """
        since = entries_since(self.naming(version), version, PASSING)
        return tuple(entry.action for entry in since if entry.version == version)

    def promotion_of(self, version: str) -> LedgerEntry | None:
        """Return the entry of a version's last promotion, or None."""
        return last_of(entry for entry in self._entries_of(version) if entry.action == "promoted")

    def rollback_of(self, version: str) -> LedgerEntry | None:
        """Return the entry of the rollback that took a version out of service.

        None if there is none, or if the version passed or was restored since.
        """
        rollback = None
        for entry in self.naming(version):
            if entry.version == version and entry.action in (*PASSING, "rolled_back"):
                rollback = None
            elif entry.previous_version == version and entry.action == "rolled_back":
                rollback = entry
        return rollback

    def last_decision_before(self, waiting: LedgerEntry) -> LedgerEntry | None:
        """Return the last entry before `waiting` that refused, rejected, promoted or replaced its
        version, or None."""
        closing = None
        for entry in self.naming(waiting.version or ""):
            if entry == waiting:
                break
            refused = entry.version == waiting.version and entry.action in ("refused", "rejected")
            closing = entry if refused or entry.action in MOVING else closing
        return closing

    def without(self, excluded: LedgerEntry) -> ModelHistory:
        """Return a history without this entry."""
        return ModelHistory(tuple(entry for entry in self.entries if entry is not excluded))

    def versions_with_bytes(self, sha256: Digest) -> tuple[str, ...]:
        """Return the versions with these bytes, each once."""
        versions = dict.fromkeys(entry.version for entry in self.entries if entry.version)
        entries = {version: self.approving_entry(version) for version in versions}
        return tuple(v for v, entry in entries.items() if entry and entry.sha256 == sha256)

    def was_deployed(self, version: str) -> bool:
        """Return whether the service deployed the version since its last promotion."""
        approval = self.approving_entry(version)
        since = entries_since(self.naming(version), version, PROMOTED)
        deployed = (entry for entry in since if entry.action == "deployed")
        return approval is not None and any(_is_same_version(e, approval) for e in deployed)

    def deployment_of(self, approving_entry: LedgerEntry) -> LedgerEntry | None:
        """Return the model's last deployment, or else its last successful one, if it is about this
        version since its promotion; None otherwise."""
        assert approving_entry.version is not None
        naming = self.naming(approving_entry.version)
        since = {id(entry) for entry in entries_since(naming, approving_entry.version, PROMOTED)}
        tried = [entry for entry in self.entries if entry.action in DEPLOYMENTS]
        lasts = (last_of(tried), last_of(e for e in tried if e.action == "deployed"))
        recent = (entry for entry in lasts if entry and id(entry) in since)
        return next((entry for entry in recent if _is_same_version(entry, approving_entry)), None)

    def has_outcome(self, version: str, *, created_at: str | None) -> bool:
        """Return whether an entry states the outcome of a version since the registry created it.

        A recreated registry restarts its version numbers at one. `created_at`: the creation time in
        the registry, None if unknown.
        """
        return any(
            entry.action in (*STANDING, "reverted") and not _is_older(entry, created_at)
            for entry in self._entries_of(version)
        )

    def passed_before_signing(self, version: str) -> bool:
        """Return whether a version passed before the first version with signed statements did."""
        approving_entry = self.approving_entry(version)
        for entry in self.entries:
            if entry.signers:
                return False
            if entry is approving_entry:
                return True
        return False

    @property
    def passed_any(self) -> bool:
        """Return whether the gate ever passed a version of the model."""
        return any(entry.action in APPROVING for entry in self.entries)

    @property
    def change(self) -> LedgerEntry | None:
        """Return the last entry that states which version serves; None before the first one."""
        return next((e for e in reversed(self.entries) if e.action in SERVING), None)

    @property
    def serving(self) -> str | None:
        """Return the version that serves, by the ledger, or None."""
        return None if self.change is None else self.change.version

    @property
    def served(self) -> tuple[str, ...]:
        """Return all versions that ever served, each once, the last one first."""
        versions = (e.version for e in reversed(self.entries) if e.action in SERVING)
        return tuple(dict.fromkeys(version for version in versions if version is not None))

    @property
    def sound(self) -> tuple[str, ...]:
        """Return the versions that passed, the one with the newest entry first."""
        versions = dict.fromkeys(e.version for e in reversed(self.entries) if e.version)
        return tuple(version for version in versions if self.approving_entry(version))

    @property
    def expected_champion(self) -> str | None:
        """Return the version that would serve if `champion` had not been moved by hand, or None.

        While the guard can't verify that version, another one may serve.
        """
        champion = None
        for entry in self.entries:
            moved_by_hand = entry.action == "reverted" and entry.previous_version != champion
            if entry.action in SERVING and not moved_by_hand:
                champion = entry.version
        return champion

    @property
    def last_move(self) -> LedgerEntry | None:
        """Return the entry of the last change of the version that serves; None before the first."""
        moves = (e for e in reversed(self.entries) if e.action in MOVING)
        return next(moves, None)

    def served_before(self, version: str, later: str) -> bool:
        """Return whether a version served at some time before another served last."""
        versions = [entry.version for entry in self.entries if entry.action in SERVING]
        if later not in versions:
            return False
        return version in versions[: len(versions) - 1 - versions[::-1].index(later)]

    @property
    def waiting(self) -> tuple[LedgerEntry, ...]:
        """Return the entries of the versions that passed and wait for review, oldest first."""
        return tuple(entry for entry in self._standing.values() if entry.action == "passed")

    def _entries_of(self, version: str) -> Iterator[LedgerEntry]:
        return (entry for entry in self.naming(version) if entry.version == version)

    @cached_property
    def _by_version(self) -> dict[str | None, list[LedgerEntry]]:
        """The entries that name each version, as `version` or `previous_version`."""
        by_version: dict[str | None, list[LedgerEntry]] = {}
        for entry in self.entries:
            for version in {entry.version, entry.previous_version}:
                by_version.setdefault(version, []).append(entry)
        return by_version

    @cached_property
    def _standing(self) -> dict[str | None, LedgerEntry]:
        """The last entry that states the outcome of each version, in the order of submission."""
        return {e.version: e for e in self.entries if e.version and e.action in STANDING}


class HistoryCache:
    """The last history of each model, for callers that read an unchanged ledger repeatedly."""

    def __init__(self) -> None:
        self._cached: dict[object, tuple[Sequence[LedgerEntry], ModelHistory]] = {}

    def history(
        self, entries: Sequence[LedgerEntry], model: str, *, registries: frozenset[str]
    ) -> ModelHistory:
        """Return the history of one model in the registry with these names.

        `registries`: names as `gate.ledger.entry.plain` writes them.
        """
        cached = self._cached.get((model, registries))
        if cached is not None and cached[0] is entries:
            return cached[1]
        history = ModelHistory(
            tuple(e for e in entries if e.model == model and plain(e.registry) in registries)
        )
        self._cached[model, registries] = entries, history
        return history


def _is_older(entry: LedgerEntry, created_at: str | None) -> bool:
    """Return whether an entry is about an earlier version that had the same number."""
    if created_at is None:
        return False
    if entry.made_at is not None:
        return entry.made_at != created_at
    written, created = parse_time(entry.at), parse_time(created_at)
    return written is not None and created is not None and written < created - MAX_CLOCK_SKEW


def _is_same_version(entry: LedgerEntry, approving_entry: LedgerEntry) -> bool:
    return (entry.version, entry.sha256) == (approving_entry.version, approving_entry.sha256)
