"""The worst samples as small pictures, where the model's input is pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gate.parity.arrays.samples import Samples
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import to_pixels
from gate.records.evidence import Evidence, TensorSpec
from gate.storage import atomic

SIDE = 96
"""Pixels of the longer side at most."""
MOST = 24
"""Pictures of a report, those with the largest differences of each output first."""
_SMALLEST = 4
"""Pixels of a side: a signal of one row is no picture."""
_CHANNELS = (1, 3)


def thumbnails(
    samples: Samples, evidence: Evidence, spec: PreprocessSpec | None = None
) -> dict[int, bytes]:
    """PNG of the worst samples, by sample; empty where the input is no picture.

    A picture is the only input, floats of shape (N, C, H, W) or uint8 of shape (N, H, W, C) with
    one or three channels. What `spec`, by which the samples were made, did to the values is undone;
    without it, or where it makes another tensor, each picture is stretched to its own range.
    Raises DataError for samples that can't be read.
    """
    layout = _layout(samples.specs)
    if layout is None:
        return {}
    (input_spec,) = samples.specs
    fits = spec is not None and _makes(spec, input_spec)
    pictures = {}
    for place in _worst(evidence, count=len(samples)):
        tensor = samples.at([place])[input_spec.name][0]
        pixels = (
            np.clip(np.round(np.nan_to_num(to_pixels(tensor, spec))), 0, 255).astype(np.uint8)
            if spec is not None and fits
            else _stretched(tensor, layout)
        )
        pictures[place] = _png(pixels)
    return pictures


def save(folder: Path, pictures: Mapping[int, bytes]) -> None:
    """Write `<sample>.png` for each, and remove those of another report. Raises StorageError."""
    for stale in folder.glob("*.png"):
        if stale.stem.isdecimal() and int(stale.stem) not in pictures:
            stale.unlink()
    for place, png in pictures.items():
        atomic.write_bytes(folder / f"{place}.png", png)


def _worst(evidence: Evidence, *, count: int) -> list[int]:
    """The worst samples of each output of each runtime, in turns, each once."""
    lists = [
        [worst.sample for worst in output.worst]
        for runtime in evidence.runtimes
        for output in runtime.outputs
    ]
    turns = chain.from_iterable(zip_longest(*lists))
    places = dict.fromkeys(place for place in turns if place is not None and place < count)
    return list(places)[:MOST]


def _layout(specs: tuple[TensorSpec, ...]) -> str | None:
    """How the only input holds pictures; None: it holds none."""
    if len(specs) != 1 or len(specs[0].shape) != 4:
        return None
    _, first, middle, last = specs[0].shape
    if specs[0].dtype.startswith("float") and first in _CHANNELS:
        layout, sides = "nchw", (middle, last)
    elif specs[0].dtype == "uint8" and last in _CHANNELS:
        layout, sides = "nhwc", (first, middle)
    else:
        return None
    return layout if all(isinstance(n, int) and n >= _SMALLEST for n in sides) else None


def _makes(spec: PreprocessSpec, given: TensorSpec) -> bool:
    """Whether the spec's tensors have this dtype and shape."""
    if spec.dtype != given.dtype:
        return False
    shape = given.shape[1:]
    return all(want in (None, got) for want, got in zip(spec.shape, shape, strict=True))


def _stretched(tensor: NDArray[np.generic], layout: str) -> NDArray[np.uint8]:
    """Shape (height, width, channels); bytes as they are, of floats the range of the picture."""
    values = tensor.transpose(1, 2, 0) if layout == "nchw" else tensor
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values, np.uint8)
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.any():
        return np.zeros(numbers.shape, np.uint8)
    low, high = numbers[finite].min(), numbers[finite].max()
    with np.errstate(all="ignore"):
        shares = np.where(finite, numbers, low) / 2.0 - low / 2.0
        scaled = 255.0 * shares / max(high / 2.0 - low / 2.0, np.finfo(np.float64).tiny)
    pixels: NDArray[np.uint8] = np.round(scaled).astype(np.uint8)
    return pixels


def _png(pixels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    picture.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()
