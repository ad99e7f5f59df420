"""Whether a file is still what it was when it was opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gate.errors import DataError


@dataclass(frozen=True)
class Stamp:
    """Size and time of the last write of a file.

    A file that was exchanged by another of its name is no change: what is open stays as it is.
    """

    path: Path
    inode: int
    size: int
    written_ns: int

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """As the file is now. Raises OSError."""
        status = path.stat()
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns)

    def fits(self, status: os.stat_result) -> bool:
        """Whether this is the file, as it was."""
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        return now == (self.inode, self.size, self.written_ns)

    def check(self, what: str) -> None:
        """Raise DataError if the file was written to. `what`: what is read of it."""
        try:
            status = self.path.stat()
        except OSError:  # deleted or away: what is open stays
            return
        if status.st_ino == self.inode and not self.fits(status):
            raise changed(f"{self.path} was written to while it was measured, at {what}")


def changed(how: str) -> DataError:
    """The error of samples that are no longer those that they were."""
    return DataError(
        f"{how}. What was computed belongs to no set of samples: measure again when nobody writes "
        "there, or on a copy."
    )
