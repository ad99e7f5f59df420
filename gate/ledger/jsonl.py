"""The ledger as a file of JSON lines: what is handed out, and what an older version kept.

An older version's ledger was such a file, with its journal (`.move.json`) and the addresses of one
registry (`.same.json`) beside it. Importing keeps its lines byte for byte and adds one that says
so, by which whoever imports vouches for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from filelock import Timeout

from gate.errors import EvidenceError, StorageError
from gate.ledger.addresses import NOTE
from gate.ledger.chain import Chain, Row
from gate.ledger.entry import LedgerEntry
from gate.ledger.journal import PREFIX
from gate.ledger.ledger import Ledger, insert, proven, rows_in
from gate.ledger.lock import PATIENCE_S, promotion_lock
from gate.ledger.notes import Notes
from gate.ledger.signature import check_writer
from gate.storage.lock import private_lock
from gate.storage.record import encodable


@dataclass(frozen=True)
class Imported:
    """What was found in an older ledger."""

    lines: int
    moves: int
    """That were begun, and not ended."""
    is_torn: bool
    """Whether the last line was cut off by a crash: it is left out."""
    was_there: bool
    """Whether it was imported before, and nothing was changed."""


def exported(ledger: Ledger) -> Iterator[bytes]:
    """All lines, each with its newline, as they are; proven before the first one comes. Raises as
    `Ledger.verify`."""
    ledger.verify()
    rows = ledger.rows()
    proven(rows, place=ledger.place)
    return (row.line + b"\n" for row in rows)


def import_jsonl(ledger: Ledger, path: Path) -> Imported:
    """Begin a ledger with the lines of an older one, and what was beside it. Nothing is lost, the
    file is left as it is, and a second time nothing is done.

    Raises EvidenceError where its chain is broken, or the ledger holds another past already;
    PastChanged where a keeper saw more than it holds; Untrusted and KeyUnusable for a key that
    nobody would believe; StorageError; PromotionConflict while a promotion is under way.
    """
    check_writer(ledger.key, ledger.trust, place=ledger.place)
    with _undisturbed(path), promotion_lock(ledger, patience_s=PATIENCE_S):
        *lines, tail = _read(path).split(b"\n")
        rows = [Row(number, line) for number, line in enumerate(lines, start=1)]
        chain, _ = proven(rows, place=str(path))
        notes = dict(_notes(path))
        moves = sum(name != NOTE for name in notes)
        with ledger.state.writing() as connection:
            ledger.prepare(connection)
            there = _is_there(connection, ledger, chain, path=path)
            if not there:
                ledger.compare(chain)
                head = chain.digest(chain.lines)
                reason = f"{len(rows)} lines of {path}, the last with digest {head}, were imported"
                imported = LedgerEntry(
                    action="ledger_imported", registry="", model="", sha256=head, parent=head,
                    reason=reason,
                )  # fmt: skip
                insert(connection, [*rows, ledger.signed(imported, number=len(rows) + 1)])
                for name, text in notes.items():
                    Notes(ledger).write_in(connection, name, text)
        ledger.entries()
    return Imported(len(rows), moves=moves, is_torn=bool(tail), was_there=there)


def _is_there(
    connection: sa.Connection, ledger: Ledger, chain: Chain[LedgerEntry], *, path: Path
) -> bool:
    """Whether the ledger begins with this one, and says that it was imported. Raises EvidenceError
    where it begins with anything else."""
    found = rows_in(connection)
    if not found:
        return False
    head, number = chain.digest(chain.lines), chain.lines
    if len(found) > number:
        entry = LedgerEntry.of_line(found[number].line, where=f"{ledger.place}:{number + 1}")
        if entry.action == "ledger_imported" and entry.sha256 == head == entry.parent:
            proven(found, place=ledger.place)
            return True
    raise EvidenceError(
        f"{ledger.place} has {len(found)} lines that are not those of {path}: one ledger has one "
        "past. Import it into a database that is empty, and use that from then on; or keep the "
        "file as it is, for people to read."
    )


def _notes(path: Path) -> Iterator[tuple[str, str]]:
    """What was beside it, by the names of today; what is damaged stays so."""
    same = path.with_name(f"{path.name}.same.json")
    if same.exists():
        yield NOTE, _text(same)
    for move in sorted(path.parent.glob(f"{path.name}.*.move.json")):
        short = move.name.removeprefix(f"{path.name}.").removesuffix(".move.json")
        yield f"{PREFIX}{short}", _text(move)


def _text(path: Path) -> str:
    return encodable(_read(path).decode(errors="backslashreplace"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}. Name the older ledger, and fix its permissions."
        ) from error


@contextlib.contextmanager
def _undisturbed(path: Path) -> Iterator[None]:
    """Hold the locks of an older version, where one of this machine ever made them."""
    with contextlib.ExitStack() as stack:
        folder = path.with_name(f"{path.name}.locks")
        for name in ("promotion.lock", "append.lock") if folder.is_dir() else ():
            try:
                stack.enter_context(private_lock(folder / name, timeout_s=PATIENCE_S))
            except Timeout as error:
                raise StorageError(
                    f"{path} has been locked for {PATIENCE_S:.0f} s by a process of an older "
                    "version. End it, then repeat."
                ) from error
        yield
