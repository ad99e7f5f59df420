"""The implementations by name; each is imported when it is asked for."""

from __future__ import annotations

import importlib

from gate.preprocess.implementation import Implementation
from gate.records.preprocessing import ImplementationName

WHERE: dict[ImplementationName, tuple[str, str]] = {
    "pillow": ("pillow", "IMPLEMENTATION"),
    "torchvision": ("torchvision", "IMPLEMENTATION"),
    "torchvision-no-antialias": ("torchvision", "NO_ANTIALIAS"),
    "opencv": ("opencv", "IMPLEMENTATION"),
    "opencv-area": ("opencv", "AREA"),
    "onnx": ("onnx", "IMPLEMENTATION"),
    "onnx-asymmetric": ("onnx", "ASYMMETRIC"),
    "canvas": ("canvas", "IMPLEMENTATION"),
    "rust-image": ("rust_image", "IMPLEMENTATION"),
}
"""Module in `gate.preprocess.by` and name in it."""


def implementation(name: str) -> Implementation:
    """The implementation of this name, one of `WHERE`."""
    module, attribute = WHERE[name]  # type: ignore[index]
    found: Implementation = getattr(
        importlib.import_module(f"gate.preprocess.by.{module}"), attribute
    )
    return found
