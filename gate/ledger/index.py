"""Where the answers of a history are, so that no question goes through all lines of a ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gate.ledger.entry import Action, LedgerEntry

SERVING: tuple[Action, ...] = ("promoted", "unchanged", "rolled_back", "reverted")
"""Which version serves from then on."""
MOVING: tuple[Action, ...] = ("promoted", "rolled_back", "reverted")
"""That another version serves from then on."""
VOUCHING: tuple[Action, ...] = ("passed", *SERVING)
"""That the gate passed a version."""
PASSING: tuple[Action, ...] = ("passed", "promoted")
"""That it was examined then: what was said of its number before is over."""
PROMOTED: tuple[Action, ...] = ("promoted",)
STANDING: tuple[Action, ...] = (
    "passed", "promoted", "unchanged", "refused", "rejected", "rolled_back", "violation",
)  # fmt: skip
"""What became of a version that was handed in."""


@dataclass(frozen=True)
class Index:
    """Of the lines about one model in one registry."""

    about: dict[str, tuple[LedgerEntry, ...]] = field(default_factory=dict)
    """By version: the lines that name it, as `version` or `previous_version`."""
    standing: dict[str, LedgerEntry] = field(default_factory=dict)
    """By version: the last word on it; in the order in which they were handed in."""
    tried: LedgerEntry | None = None
    """The last deployment, or refusal of one."""
    deployed: LedgerEntry | None = None
    rightful: str | None = None
    """The version that would serve, had nobody pointed `champion` elsewhere by hand."""

    def followed_by(self, entries: Iterable[LedgerEntry]) -> Index:
        """The same with what was written since; only that is looked through."""
        about, standing = dict(self.about), dict(self.standing)
        tried, deployed, rightful = self.tried, self.deployed, self.rightful
        added: dict[str, list[LedgerEntry]] = {}
        for entry in entries:
            for version in {entry.version, entry.previous_version} - {None}:
                added.setdefault(str(version), []).append(entry)
            if entry.version and entry.action in STANDING:
                standing[entry.version] = entry
            if entry.version and entry.action == "absolved":
                lines = [*about.get(entry.version, ()), *added[entry.version]]
                words = [e for e in effective(lines, entry.version) if e.action in STANDING]
                word = last_of(e for e in words if e.version == entry.version)
                standing |= {entry.version: word} if word else {}
            if entry.action in ("deployed", "not_deployed"):
                tried = entry
            if entry.action == "deployed":
                deployed = entry
            moved_by_hand = entry.action == "reverted" and entry.previous_version != rightful
            if entry.action in SERVING and not moved_by_hand:
                rightful = entry.version
        about |= {version: (*about.get(version, ()), *new) for version, new in added.items()}
        return Index(about, standing, tried, deployed, rightful)


def lines_since(
    lines: Sequence[LedgerEntry], version: str, actions: Collection[Action]
) -> Sequence[LedgerEntry]:
    """From the last line of these about the version on; all where there is none."""
    places = [
        place
        for place, entry in enumerate(lines)
        if entry.version == version and entry.action in actions
    ]
    return lines[places[-1] :] if places else lines


def effective(lines: Sequence[LedgerEntry], version: str) -> Sequence[LedgerEntry]:
    """All but the violations of the version that were lifted later."""
    lifted = [n for n, e in enumerate(lines) if (e.action, e.version) == ("absolved", version)]
    if not lifted:
        return lines
    before = [e for e in lines[: lifted[-1]] if (e.action, e.version) != ("violation", version)]
    return [*before, *lines[lifted[-1] :]]


def last_of(entries: Iterable[LedgerEntry]) -> LedgerEntry | None:
    """The last of these lines, if there are any."""
    return next(reversed(list(entries)), None)
