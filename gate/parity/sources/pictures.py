"""Pictures as samples: decoded, and preprocessed by the spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gate.errors import DataError, first_line
from gate.parity.arrays.rows import Array
from gate.preprocess.spec import PreprocessSpec

MAX_PIXELS = 89_478_485
"""Of one picture: where Pillow begins to warn of bombs."""
MAX_BYTES = 1 << 28
"""Of one picture's file."""
_BYTES, _PATH = "bytes", "path"


class Pictures:
    """Makes the model's input of one picture."""

    def __init__(self, spec: PreprocessSpec | None) -> None:
        """Without a spec nothing is a picture."""
        self._spec = spec

    def tensor(self, picture: Any, *, what: str) -> Array:
        """Of a PIL image, encoded bytes, a path, or {"bytes": ..., "path": ...}.

        Raises DataError for what is no whole picture of at most MAX_PIXELS, and without a spec.
        """
        from gate.preprocess.by.pillow import preprocess

        if self._spec is None:
            raise DataError(
                f"{what} is a picture, or a text; arrays are expected. Say by which spec pictures "
                "become inputs (--preprocessing SPEC), or which fields are inputs "
                "(#inputs=FIELD behind the source)."
            )
        return preprocess(_pixels(picture, what=what), self._spec)


def is_picture(value: Any) -> bool:
    """Whether it is what `Pictures.tensor` takes. A text is a path."""
    if isinstance(value, bytes | bytearray | memoryview | str | Path):
        return True
    if isinstance(value, Mapping):
        return set(value) == {_BYTES, _PATH}
    return _is_image(value)


def _pixels(picture: Any, *, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from gate.preprocess.pictures import decoded

    if _is_image(picture):
        return _of_image(picture, what=what)
    if isinstance(picture, Mapping):
        picture = picture[_PATH] if picture[_BYTES] is None else picture[_BYTES]
    if isinstance(picture, str | Path):
        what = f"{what}, {picture},"
        data = _read(Path(picture), what=what)
    else:
        data = bytes(picture)
    return decoded(data, name=what, max_pixels=MAX_PIXELS)


def _read(path: Path, *, what: str) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{what} can't be read: {getattr(error, 'strerror', None) or error}. Paths are taken "
            "from the current folder."
        ) from error
    if len(data) > MAX_BYTES:
        raise DataError(f"{what} has more than {MAX_BYTES} bytes. Take a smaller picture.")
    return data


def _is_image(value: Any) -> bool:
    from PIL import Image

    return isinstance(value, Image.Image)


def _of_image(image: Any, *, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"{what} has {image.width} x {image.height} pixels, at most {MAX_PIXELS} are read. "
            "Take a smaller picture."
        )
    try:
        return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # it is read from its file only now
        raise DataError(
            f"{what} is not a whole picture ({first_line(error)}). Replace it or leave it out."
        ) from error
