"""A snapshot of a folder and an MLflow database, restored for each test."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path


class FolderSnapshot:
    """Making it anew takes seconds. It stays where it is, because its database names its paths."""

    def __init__(self, folder: Path, database: Path | None = None) -> None:
        """`database`: in the folder, or elsewhere; None: `mlflow.db` in it."""
        self._folder, self._database = folder, database or folder / "mlflow.db"
        self._kept = folder.with_name(f"{folder.name}-kept")
        beside = shutil.ignore_patterns(self._database.name)
        shutil.copytree(folder, self._kept / "folder", symlinks=True, ignore=beside)
        _copy_database(self._database, self._kept / "database")

    def restore(self) -> Path:
        """The folder as it was, with its database."""
        for path in self._folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self._database:
                path.unlink()
        shutil.copytree(self._kept / "folder", self._folder, symlinks=True, dirs_exist_ok=True)
        _copy_database(self._kept / "database", self._database)
        return self._folder


def _copy_database(source: Path, target: Path) -> None:
    """By SQLite itself, so that connections that are open see it."""
    with closing(sqlite3.connect(source)) as first, closing(sqlite3.connect(target)) as second:
        first.backup(second)
