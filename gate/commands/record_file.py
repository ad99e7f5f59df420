"""Where a record is written: never over a file that is another thing, such as the model itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gate.commands.given import Written

_HEAD = 400
"""Bytes in which a record says what it is."""
_BEGIN = b'{\n  "schema_version": '
"""Of every record that is saved."""
_TORN = len(_BEGIN) + 40
"""Bytes that end before the sign, of a plan or a part."""


class RecordFile(Written):
    """A file that is new, empty, or an older record of the same kind, whole or torn."""

    def __init__(self, sign: str, what: str) -> None:
        """`sign`: a field by which such a record begins. `what`: it, in words."""
        super().__init__("file")
        self._sign, self._what = sign, what

    def problem(self, path: Path) -> str | None:
        """That something else stands there."""
        return super().problem(path) or self._other(path)

    def _other(self, path: Path) -> str | None:
        head = head_of(path)
        if f'"{self._sign}"'.encode() in head or _is_torn(path, head):
            return None
        return f"{path} is there, and is not {self._what}. Name another file, or remove it."


def head_of(path: Path) -> bytes:
    """The first bytes; none of what is no file, as a device, or can't be read."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as stream:
            return stream.read(_HEAD)
    except OSError:
        return b""


def _is_torn(path: Path, head: bytes) -> bool:
    """True of nothing, and of a record that ends before it says what it is; zeros may follow, as a
    crash may leave them."""
    begin = head.rstrip(b"\0")
    begun = begin.startswith(_BEGIN) or _BEGIN.startswith(begin)
    if not begun or len(begin) > _TORN or begin.rstrip().endswith(b"}"):
        return False
    return head == begin or not _has_more(path)


def _has_more(path: Path) -> bool:
    """Whether something else than zeros follows the first bytes."""
    with path.open("rb") as stream:
        stream.seek(_HEAD)
        return any(chunk.strip(b"\0") for chunk in iter(partial(stream.read, 2**20), b""))


PLAN = RecordFile("parity_gate", "a plan")
PART = RecordFile("plan_sha256", "a part of a plan")
EVIDENCE = RecordFile("subject", "evidence")
