"""A folder with an MLflow database and all beside it, made once and put back for each test."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

DATABASE = "mlflow.db"


class KeptFolder:
    """Making it anew takes seconds. It stays where it is, because its database names its paths."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._kept = folder, folder.with_name(f"{folder.name}-kept")
        shutil.copytree(folder, self._kept, symlinks=True)

    def again(self) -> Path:
        """The folder as it was."""
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != DATABASE:
                path.unlink()
        beside = shutil.ignore_patterns(DATABASE)
        shutil.copytree(self._kept, self._folder, symlinks=True, dirs_exist_ok=True, ignore=beside)
        copy_database(self._kept / DATABASE, self._folder / DATABASE)
        return self._folder


def copy_database(source: Path, target: Path) -> None:
    """By SQLite itself, so that connections that are open see it."""
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)
