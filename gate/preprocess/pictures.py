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
    """The tensors by consumer, one for each picture on axis 0, mapped into memory.

    Raises DataError for a name that can't stand in a record or is given twice, and for a file
    that is no array of such tensors.
    """
    found: dict[str, NDArray[Any]] = {}
    for name, file in named:
        if not re.fullmatch(CONSUMER_NAME, name):
            raise DataError(
                f"--tensors {name}={file}: a consumer's name has small letters, digits, dots and "
                "hyphens only, and starts with a letter or digit. Take another name."
            )
        if name in found:
            raise DataError(
                f"--tensors {name}={file}: {name} is given twice. Give each consumer once."
            )
        found[name] = _read(file)
    return found


def _read(file: Path) -> NDArray[Any]:
    if (pointer := detect_pointer_file(file)) is not None:
        raise DataError(pointer)
    try:
        tensors = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # a damaged header: tokenize's errors too
        raise DataError(
            f"cannot read {file}: {error}. Expected an .npy file with one tensor for each picture."
        ) from error
    if tensors.ndim == 0 or tensors.dtype.kind not in "fiu":
        raise DataError(
            f"{file} holds {tensors.dtype} of shape {list(tensors.shape)}, expected numbers, one "
            "tensor for each picture on axis 0."
        )
    return tensors


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif"})

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF")
"""What these files hold, as Pillow names it."""


@dataclass(frozen=True)
class Picture:
    """A picture that is decoded when it is needed."""

    name: str
    read: Callable[[], Pixels]
    """uint8 RGB (height, width, 3). Raises DataError."""

    @classmethod
    def from_file(cls, path: Path) -> Picture:
        """The picture in a file."""
        return cls(path.as_posix(), partial(read_picture, path))


def read_picture(path: Path) -> Pixels:
    """The first frame as uint8 RGB (height, width, 3), stored orientation, alpha left out.

    Raises DataError for what is not a whole picture.
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
    """The picture in the bytes of a file, as `read_picture` gives it.

    Whatever the name says, only these of Pillow's `formats` are tried: some start other programs.
    A picture of more than `max_pixels` is refused by its header, before memory is taken for it.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise DataError(
                    f"{name} has {image.width} x {image.height} pixels, at most {max_pixels} are "
                    "read. Take a smaller picture."
                )
            return np.array(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError,
            Image.DecompressionBombError) as error:  # fmt: skip
        # Pillow tells of broken PNG chunks by SyntaxError.
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> DataError:
    return DataError(f"{name} is not a whole picture ({error}). Replace the file or take it away.")


def pictures_in(paths: Sequence[Path]) -> tuple[Picture, ...]:
    """The files themselves, and all pictures below each folder, by name.

    Raises DataError for a folder without pictures, and where a file is named twice.
    """
    found: list[Path] = []
    for path in paths:
        below = _below(path) if path.is_dir() else [path]
        if not below:
            raise DataError(f"{path} has no pictures. Formats: {', '.join(sorted(SUFFIXES))}.")
        found += below
    twice = sorted({str(path) for path in found if found.count(path) > 1})
    if twice:
        raise DataError(f"{twice[0]} is named twice. Name every picture once.")
    return tuple(Picture.from_file(path) for path in found)


def _below(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix.lower() in SUFFIXES)
