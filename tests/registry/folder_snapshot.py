"""A snapshot of a folder and an MLflow database, restored for each test."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path


class FolderSnapshot:
    """A copy that is faster to restore than to create. The database contains the path."""

    def __init__(self, folder: Path, database: Path | None = None) -> None:
        """Copy the folder and its database (None: `mlflow.db` in the folder)."""
        self._folder, self._database = folder, database or folder / "mlflow.db"
        self._copy = folder.with_name(f"{folder.name}-kept")
        ignored = shutil.ignore_patterns(self._database.name)
        shutil.copytree(folder, self._copy / "folder", symlinks=True, ignore=ignored)
        _copy_database(self._database, self._copy / "database")

    def restore(self) -> Path:
        """Restore the folder and its database to the state of the snapshot, and return the folder."""
        for path in self._folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self._database:
                path.unlink()
        shutil.copytree(self._copy / "folder", self._folder, symlinks=True, dirs_exist_ok=True)
        _copy_database(self._copy / "database", self._database)
        return self._folder


def _copy_database(source: Path, target: Path) -> None:
    """Copy with the SQLite backup API, so that open connections see the new content."""
    with closing(sqlite3.connect(source)) as first, closing(sqlite3.connect(target)) as second:
        first.backup(second)
