"""Where code stands, the same on every machine.

Apart, because the export's warnings, its refusals and the lint findings must name one place alike.
"""

from __future__ import annotations

import sys
from pathlib import Path


def source_place(file: str, line: int) -> str:
    """`torchvision/models/resnet.py:12`: the file below the import path."""
    return f"{below_import_path(file)}:{line}"


def below_import_path(filename: str) -> str:
    """The path of a source file below the folder that it is imported from; else its name."""
    file = Path(filename)
    for root in sorted(_roots(), key=lambda root: len(root.parts), reverse=True):
        if file.is_relative_to(root):
            return file.relative_to(root).as_posix()
    return file.name


def file_below(folder: Path, path: str) -> str:
    """The way from a folder to what is at `path` below the import path: `src/mypackage/models.py`.
    What is elsewhere, such as in an installed package, keeps its path below the import path."""
    folder = folder.resolve()
    for root in _roots():
        file = root.resolve() / path
        if file.is_file() and file.is_relative_to(folder) and "site-packages" not in file.parts:
            return file.relative_to(folder).as_posix()
    return path


def _roots() -> list[Path]:
    return [Path(entry).absolute() for entry in ("", *sys.path) if Path(entry).is_dir()]
