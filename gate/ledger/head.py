"""The head of a ledger, kept elsewhere: a chain can't see that its end was cut off or edited.

A keeper keeps the longest head that it was shown, in another place than the ledger. Law: what a
keeper was shown once stays in the ledger. Whoever finds a shorter or another past refuses it,
until a person says that it is meant (`gate accept-ledger`). The first head is taken on trust.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

from filelock import Timeout
from pydantic import Field

from gate.errors import DigestMismatch, EvidenceError, PastChanged, StorageError
from gate.ledger.chain import Chain, Linked
from gate.storage.atomic import write_text
from gate.storage.foreign import read_foreign
from gate.storage.lock import private_lock
from gate.storage.record import Record, Sha256

_LIMIT = 1 << 16
_PATIENCE_S = 10.0
_WAY_OUT = (
    "Restore the newest copy. Only if the loss is meant, or another ledger belongs here from now "
    'on, say so: gate accept-ledger --reason "why".'
)
_log = logging.getLogger(__name__)


class Head(Record):
    """Where a ledger ended: so many lines, and the digest of the last one."""

    schema_version: Literal[1] = 1
    lines: Annotated[int, Field(ge=1)]
    sha256: Sha256
    """Of the last line; through the chain, of all lines."""
    at: str
    """When it was kept: UTC, ISO 8601."""

    @classmethod
    def of(cls, chain: Chain[Linked], *, at: str) -> Head | None:
        """As it was read; None for a ledger without a line."""
        digest = chain.digest(chain.lines)
        return None if digest is None else cls(lines=chain.lines, sha256=digest, at=at)


class Keeper(Protocol):
    """A place elsewhere that keeps the head of one ledger. Its methods raise StorageError
    where it can't be asked now, EvidenceError where what it kept is damaged."""

    @property
    def place(self) -> str:
        """What people call it."""
        ...

    def head(self) -> Head | None:
        """What was kept; None: nothing yet."""
        ...

    def keep(self, head: Head) -> None:
        """Keep it, unless a longer one is kept: several may do so at once. On disk afterwards."""
        ...

    def replace(self, head: Head | None) -> None:
        """Keep it whatever was kept before, or forget that; for people who say that it is meant."""
        ...


class HeadFile:
    """A keeper in a file."""

    def __init__(self, path: Path, *, place: str) -> None:
        self.path = path
        self._place = place

    @property
    def place(self) -> str:
        """What people call it."""
        return self._place

    def head(self) -> Head | None:
        """As `Keeper`."""
        if not self.path.exists() and not self.path.is_symlink():
            return None
        what = f"the head of the ledger in {self.path}"
        try:
            return Head.from_foreign(read_foreign(self.path, limit=_LIMIT), what=what)
        except (EvidenceError, DigestMismatch) as error:
            raise EvidenceError(
                f"{what} is damaged, nobody knows what it said: {error} Look what happened to it; "
                'then say that the ledger is right: gate accept-ledger --reason "why".'
            ) from error

    def keep(self, head: Head) -> None:
        """As `Keeper`."""
        self._write(head, only_longer=True)

    def replace(self, head: Head | None) -> None:
        """As `Keeper`."""
        self._write(head, only_longer=False)

    def _write(self, head: Head | None, *, only_longer: bool) -> None:
        lock = self.path.parent / "locks" / f"{self.path.stem}.lock"
        try:
            with private_lock(lock, timeout_s=_PATIENCE_S):
                kept = self.head() if only_longer else None
                if head is None:
                    self.path.unlink(missing_ok=True)
                elif kept is None or kept.lines < head.lines:
                    write_text(self.path, head.to_json(indent=1) + "\n")
        except Timeout as error:
            raise StorageError(
                f"{self.path} has been locked for {_PATIENCE_S:.0f} s by another process. "
                "Let it finish (or end it), then repeat."
            ) from error
        except OSError as error:
            raise StorageError(f"cannot remove {self.path}: {error.strerror}.") from error


class Keepers:
    """All keepers of one ledger. One that can't be asked now is weather, while another can be."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._all = tuple(keepers)

    def compare(self, chain: Chain[Linked], *, again: Callable[[], object]) -> None:
        """Raise PastChanged where the chain does not hold what was kept; else as `Keeper`.

        `again` reads the chain once more where another process may have added lines, and shown
        them, since it was read. They are asked once: all that they answer was in the ledger before
        it is read again, and whatever they are shown later proves nothing about this reading.
        """
        answers = self._answers()
        if any(kept is not None and kept.lines > chain.lines for _, kept in answers):
            again()
        for keeper, kept in answers:
            if kept is not None and chain.digest(kept.lines) != kept.sha256:
                raise PastChanged(_other_past(chain, keeper, kept))

    def keep(self, chain: Chain[Linked], *, at: str) -> None:
        """Have all keep the chain's head, after its lines are on disk. Raises as `Keeper`."""
        head = Head.of(chain, at=at)
        if head is None or not self._all:
            return
        troubles = []
        for keeper in self._all:
            try:
                keeper.keep(head)
            except StorageError as error:
                troubles.append(error)
        self._weather(troubles)

    def _answers(self) -> list[tuple[Keeper, Head | None]]:
        answers, troubles = [], []
        for keeper in self._all:
            try:
                answers.append((keeper, keeper.head()))
            except StorageError as error:
                troubles.append(error)
        self._weather(troubles)
        return answers

    def _weather(self, troubles: Sequence[StorageError]) -> None:
        if troubles and len(troubles) == len(self._all):
            raise troubles[0]
        for error in troubles:
            _log.warning("a place that keeps the ledger's head can't be asked now: %s", error)


def _other_past(chain: Chain[Linked], keeper: Keeper, kept: Head) -> str:
    ledger, was = chain.place, f"on {kept.at} {keeper.place} saw it with {kept.lines} lines"
    if chain.lines == 0:
        return f"there is no line in the ledger {ledger}; {was}. It was removed. {_WAY_OUT}"
    if chain.lines < kept.lines:
        return (
            f"the ledger {ledger} ends at line {chain.lines}; {was}. An older copy was put in its "
            f"place, or lines were cut off. {_WAY_OUT}"
        )
    return (
        f"{ledger}:{kept.lines}: this line has digest {chain.digest(kept.lines)}; {was}, the last "
        f"with digest {kept.sha256}. It was edited, or another ledger was put in its place. "
        f"{_WAY_OUT}"
    )
