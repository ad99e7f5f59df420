"""Files that only their owner may read: they hold a secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gate.errors import StorageError

MODE = 0o600


def read_private(path: Path, *, what: str, missing: str) -> str:
    """The text of a file that nobody else may read. Raises StorageError.

    `what`: how messages call it; `missing`: what to do where it can't be read.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            text = stream.read()
    except OSError as error:
        raise StorageError(f"cannot read the {what} {path}: {error.strerror}. {missing}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"the {what} {path} is not UTF-8 text. Write it anew.") from error
    if mode & ~MODE:
        raise StorageError(
            f"the {what} {path} has mode {mode:04o}, others may use it. Expected 0600: "
            f"chmod 600 {path}, and exchange the secret if somebody may have read it."
        )
    return text
