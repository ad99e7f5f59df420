"""Decode pictures once; read tensors dumped by consumers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.records.preprocessing import CONSUMER_NAME
from gate.storage.arrays import Pixels
from gate.storage.untrusted_files import detect_pointer_file


def read_dumped_tensors(named: Iterable[tuple[str, Path]]) -> dict[str, NDArray[Any]]:
    """Memory-map the tensors of each consumer, one for each picture on axis 0.

    Raises DataError for a name that is not valid or occurs twice, and for a file that is not such
    an array.
    """
    by_name: dict[str, NDArray[Any]] = {}
    for name, file in named:
        if not re.fullmatch(CONSUMER_NAME, name):
            raise DataError(
                f"--tensors {name}={file}: a consumer's name has lowercase letters, digits, dots "
                "and hyphens only, and starts with a letter or digit. Choose another name."
            )
        if name in by_name:
            raise DataError(
                f"--tensors {name}={file}: {name} occurs twice. Name each consumer once."
            )
        by_name[name] = _read(file)
    return by_name


def _read(file: Path) -> NDArray[Any]:
    if (pointer := detect_pointer_file(file)) is not None:
        raise DataError(pointer)
    try:
        tensors = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # A damaged header raises errors of tokenize, too.
        raise DataError(
            f"cannot read {file}: {error}. Expected an .npy file with one tensor for each picture."
        ) from error
    if tensors.ndim == 0 or tensors.dtype.kind not in "fiu":
        raise DataError(
            f"{file} has dtype {tensors.dtype} and shape {list(tensors.shape)}, expected numbers, "
            "one tensor for each picture on axis 0."
        )
    return tensors


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif"})

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF")
"""The formats of these files, by Pillow's names."""


@dataclass(frozen=True)
class Picture:
    """A picture that is decoded on demand."""

    name: str
    read: Callable[[], Pixels]
    """uint8 RGB (height, width, 3). Raises DataError."""

    @classmethod
    def from_file(cls, path: Path) -> Picture:
        """Create the picture from a file, without reading it."""
        return cls(path.as_posix(), partial(read_picture, path))


def read_picture(path: Path) -> Pixels:
    """Return the first frame as uint8 RGB (height, width, 3), as stored, without alpha.

    Ignores the EXIF orientation. Raises DataError if the file is not a complete picture.
    """
    if (pointer := detect_pointer_file(path)) is not None:
        raise DataError(pointer)
    try:
        return decoded(path.read_bytes(), name=str(path))
    except OSError as error:
        raise _broken(str(path), error) from error


def decoded(
    data: bytes, *, name: str, formats: tuple[str, ...] = FORMATS, max_pixels: int | None = None
) -> Pixels:
    """Decode a picture as `read_picture` does.

    formats: the only formats of Pillow to try, because others start external programs. max_pixels:
    larger pictures are refused by their header, before memory is allocated.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise DataError(
                    f"{name} has {image.width} x {image.height} pixels, the maximum is "
                    f"{max_pixels}. Use a smaller picture."
                )
            return np.array(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError,
            Image.DecompressionBombError) as error:  # fmt: skip
        # Pillow raises SyntaxError for broken PNG chunks.
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> DataError:
    return DataError(f"{name} is not a complete picture ({error}). Replace or remove the file.")


def pictures_in(paths: Sequence[Path]) -> tuple[Picture, ...]:
    """Return the pictures of all files, and of each folder in the order of their names.

    Raises DataError for a folder without pictures, and if a file is named twice.
    """
    files: list[Path] = []
    for path in paths:
        below = [path]
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
            below = sorted(file for file in inside if file.is_file())
        if not below:
            raise DataError(f"{path} has no pictures. Formats: {', '.join(sorted(SUFFIXES))}.")
        files += below
    twice = sorted({str(path) for path in files if files.count(path) > 1})
    if twice:
        raise DataError(f"{twice[0]} is named twice. Name every picture once.")
    return tuple(Picture.from_file(path) for path in files)
