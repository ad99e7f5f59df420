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
    roots = [Path(entry).absolute() for entry in ("", *sys.path) if Path(entry).is_dir()]
    for root in sorted(roots, key=lambda root: len(root.parts), reverse=True):
        if file.is_relative_to(root):
            return file.relative_to(root).as_posix()
    return file.name
