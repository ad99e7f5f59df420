"""The release file of `--part` and `--chain`, written beside the parts."""

from __future__ import annotations

import os
from pathlib import Path

import click

NAME = "release.yaml"


def release_file(
    model: Path | None, parts: tuple[tuple[str, Path], ...], chain: str | None
) -> Path:
    """The file that is judged: the one that was named, else the release file of the parts, which is
    written into the folder that holds all of them.

    Raises UsageError for options that do not go together, StorageError where another release file
    is there.
    """
    if not parts and chain is None:
        if model is None:
            raise click.UsageError("Missing argument 'MODEL', or --part NAME=FILE with --chain.")
        return model
    if model is not None:
        raise click.UsageError(f"say either {model}, or --part with --chain.")
    if not parts or chain is None:
        raise click.UsageError("--part and --chain go together: which function runs the parts?")
    named = dict(parts)
    if len(named) < len(parts):
        raise click.BadParameter("--part: a name is there twice. Give each part its own.")
    # `resolve` would follow links, and a cache of a hub is full of them.
    whole = {name: Path(os.path.abspath(file)) for name, file in named.items()}  # noqa: PTH100
    folder = Path(os.path.commonpath([file.parent for file in whole.values()]))
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    files = {name: file.relative_to(folder.absolute()) for name, file in whole.items()}
    return _written(folder / NAME, files, chain)


def _written(path: Path, files: dict[str, Path], chain: str) -> Path:
    from gate.errors import StorageError
    from gate.onnxfile.release_file import PartEntry, ReleaseFile, release_text
    from gate.storage import atomic

    text = release_text(chain, {name: PartEntry(file=str(file)) for name, file in files.items()})
    if path.exists() and path.read_text(errors="replace") != text:
        raise StorageError(
            f"{path} is there, and says something else than --part and --chain. Judge it (gate "
            f"check {path}), or remove it."
        )
    atomic.write_text(path, text)
    ReleaseFile.load(path)
    return path
