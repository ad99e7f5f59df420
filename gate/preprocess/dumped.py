"""What consumers of the user's own made of the pictures, from files: `NAME=FILE.npy`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.records.preprocessing import CONSUMER_NAME
from gate.storage.pointer import missing_content


def read_dumped(texts: Iterable[str]) -> dict[str, NDArray[Any]]:
    """The tensors by consumer, one for each picture on axis 0, mapped into memory.

    Raises DataError for a name that can't stand in a record or is given twice, and for a file
    that is no array of such tensors.
    """
    found: dict[str, NDArray[Any]] = {}
    for text in texts:
        name, _, file = text.partition("=")
        if not name or not file:
            raise DataError(f"--tensors {text}: expected NAME=FILE.npy.")
        if not re.fullmatch(CONSUMER_NAME, name):
            raise DataError(
                f"--tensors {text}: a consumer's name has small letters, digits, dots and hyphens "
                "only, and starts with a letter or digit. Take another name."
            )
        if name in found:
            raise DataError(f"--tensors {text}: {name} is given twice. Give each consumer once.")
        found[name] = _read(file)
    return found


def _read(file: str) -> NDArray[Any]:
    if (pointer := missing_content(Path(file))) is not None:
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
