"""Data sources (digits, folder, npz), and the conversion of images to tensors.

A source has all labels and loads one sample at a time, so that a folder never has to fit into
memory.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.pictures import SUFFIXES, read_picture
from gate.preprocess.spec import PreprocessSpec
from gate.storage.arrays import Pixels
from gate.storage.untrusted_files import detect_pointer_file
from pipelines.params import PrepareParams


@dataclass(frozen=True)
class Source:
    """Labels int64 (samples,), class names, and `sample(i)`: float32 (channels, height, width).

    `picture(i)` is the original image, uint8 RGB (height, width, 3). None: the source has tensors.
    """

    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    sample: Callable[[int], NDArray[np.float32]]
    description: str
    picture: Callable[[int], Pixels] | None = None


def open_source(params: PrepareParams) -> Source:
    """Open the source in params.yaml. Raises DataError."""
    if params.source == "digits":
        return _digits(params)
    path = Path(params.path)
    return _folder(path, params) if params.source == "folder" else _npz(path, params)


def to_tensor(pixels: Pixels, spec: PreprocessSpec) -> NDArray[np.float32]:
    """Convert uint8 RGB (height, width, 3) with Pillow to the spec's float32 (3, height, width)."""
    return pillow_preprocess(pixels, spec).astype(np.float32, copy=False)


def _digits(params: PrepareParams) -> Source:
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255.0 / 16.0)).astype(np.uint8)  # stored as 0 to 16
    return _source_from_images(
        params.preprocessing,
        lambda i: _rgb(grey[i]),
        labels=digits.target.astype(np.int64),
        classes=tuple(str(name) for name in digits.target_names),
        description="scikit-learn load_digits",
    )


def _folder(path: Path, params: PrepareParams) -> Source:
    """Open `path/class/picture`: folders sorted by name are classes, files are samples."""
    if not path.is_dir():
        raise DataError(
            f"prepare.path {path} is not a folder. Expected {path}/<class>/<picture>.png."
        )
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    labelled = [(f, label) for label, folder in enumerate(folders) for f in _pictures(folder)]
    if not labelled:
        raise DataError(
            f"{path} has no pictures. Expected {path}/<class>/<picture>.png with two or more "
            f"classes; formats: {', '.join(sorted(SUFFIXES))}."
        )
    files = [file for file, _ in labelled]
    return _source_from_images(
        params.preprocessing,
        lambda i: read_picture(files[i]),
        labels=np.array([label for _, label in labelled], dtype=np.int64),
        classes=tuple(folder.name for folder in folders),
        description=f"folder {params.path}",
    )


def _pictures(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix.lower() in SUFFIXES)


def _npz(path: Path, params: PrepareParams) -> Source:
    """Open an .npz file. Preprocess uint8 images (n, h, w[, 3]); use float32 (n, c, h, w)
    unchanged."""
    images, labels, names = _read_npz(path)
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise DataError(
            f"{path}: 'labels' is {labels.dtype} of shape {labels.shape}; expected integers (n,)."
        )
    if len(labels) != len(images) or len(labels) == 0:
        raise DataError(
            f"{path} has {len(labels)} labels for {len(images)} images; expected one for each."
        )
    if labels.min() < 0 or (names is not None and labels.max() >= len(names)):
        raise DataError(
            f"{path}: labels reach from {labels.min()} to {labels.max()}; expected 0 and up, "
            f"below the number of classes{'' if names is None else f' ({len(names)})'}."
        )
    classes = names or tuple(str(i) for i in range(int(labels.max()) + 1))
    description = f"npz {params.path}"
    if images.dtype == np.uint8:
        return _source_from_images(
            params.preprocessing,
            lambda i: _rgb(images[i]),
            labels=labels.astype(np.int64),
            classes=classes,
            description=description,
        )
    return Source(
        labels.astype(np.int64),
        classes,
        lambda i: np.ascontiguousarray(images[i], dtype=np.float32),
        description,
    )


def _source_from_images(
    spec: PreprocessSpec,
    picture: Callable[[int], Pixels],
    *,
    labels: NDArray[np.int64],
    classes: tuple[str, ...],
    description: str,
) -> Source:
    return Source(
        labels, classes, lambda i: to_tensor(picture(i), spec), description, picture=picture
    )


def _rgb(pixels: Pixels) -> Pixels:
    """Return grayscale (height, width) as RGB; RGB is unchanged."""
    return np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels


def _read_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any], tuple[str, ...] | None]:
    expected = "expected a .npz file with the arrays 'images' and 'labels'"
    if (pointer := detect_pointer_file(path)) is not None:
        raise DataError(pointer)
    try:
        # Open the file here, because numpy does not close its handle if the archive is damaged.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            missing = sorted({"images", "labels"} - set(archive.files))
            if missing:
                raise DataError(f"{path} lacks {', '.join(missing)}; {expected}.")
            images, labels = archive["images"], archive["labels"]
            names = tuple(map(str, archive["classes"])) if "classes" in archive.files else None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path}: {error}; {expected}.") from error
    grey_or_rgb = images.ndim == 3 or (images.ndim == 4 and images.shape[-1] == 3)
    pictures = images.dtype == np.uint8 and grey_or_rgb
    tensors = images.dtype == np.float32 and images.ndim == 4
    if not (pictures or tensors):
        raise DataError(
            f"{path}: 'images' is {images.dtype} of shape {images.shape}; expected uint8 "
            "(n, height, width) or (n, height, width, 3), or float32 (n, channels, height, width)."
        )
    return images, labels, names
