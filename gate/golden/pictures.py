"""Golden vectors that start from the picture: files beside the arrays, and the spec between them.

A consumer decodes the picture, preprocesses it in its own way, compares the tensor with the golden
input (`max_diff`), and feeds its own tensor to the model. The gate does the first part by Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gate.errors import DataError, EvidenceError
from gate.golden.folder import GOLDEN_JSON, Vectors, read_golden
from gate.golden.record import Golden, GoldenPicture, GoldenPictures
from gate.golden.writing import remove_stale
from gate.preprocess.by.pillow import lacking, preprocess
from gate.preprocess.geometry import geometry
from gate.preprocess.pictures import decoded, read_picture
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor, to_pixels
from gate.storage import atomic
from gate.storage.digest import Digest

MAX_DIFF = 1.0
"""Steps that a consumer may be off: rounding to one grey level or its neighbour."""
PIXEL_LIMIT = 1 << 25
"""Of one picture, as it is and resized: a photograph of 33 megapixels."""
_DIGITS = 3


def add_pictures(
    folder: Path,
    spec: PreprocessSpec,
    pictures: Sequence[Path],
    *,
    max_diff: float = MAX_DIFF,
    sha256: Digest | None = None,
) -> Golden:
    """Put the picture of each golden sample beside the vectors in `folder`, as PNG. `sha256`: of
    golden.json, where whoever wrote it knows.

    Among `pictures` those are found whose tensors by `spec` are the golden inputs, bit by bit.
    golden.json comes last, so a crash leaves vectors without pictures. Raises EvidenceError where
    Pillow can't do the spec, the file has several inputs, or a sample has no picture;
    DigestMismatch for another golden.json.
    """
    golden = read_golden(folder, sha256=sha256)
    why = lacking(spec)
    if why is not None:
        raise EvidenceError(f"golden pictures are proven by Pillow: {why}.")
    if len(golden.inputs) != 1:
        raise EvidenceError(f"{len(golden.inputs)} inputs: a picture becomes exactly one.")
    ((name, samples),) = golden.inputs.items()
    by_sample = {
        preprocess(pixels, spec).tobytes(): pixels for pixels in map(read_picture, pictures)
    }
    described = []
    for place, sample in enumerate(samples):
        pixels = by_sample.get(np.ascontiguousarray(sample).tobytes())
        if pixels is None:
            raise EvidenceError(
                f"no picture becomes the golden sample {place} by this spec. Give the pictures "
                "that the samples were made from."
            )
        described.append(_written(folder, place, pixels))
    with_pictures = golden.golden.model_copy(
        update={
            "pictures": GoldenPictures(
                input=name, spec=spec, max_diff=max_diff, files=tuple(described)
            )
        }
    )
    checked = Golden.from_json(with_pictures.to_json())
    checked.save(folder / GOLDEN_JSON)
    remove_stale(folder, checked)
    return checked


def wrong_pictures(vectors: Vectors) -> str | None:
    """Which picture does not become its golden input by Pillow, and why; None: all do."""
    recorded = vectors.golden.pictures
    if recorded is None:
        return None
    for picture, data, sample in zip(
        recorded.files, vectors.pictures, vectors.inputs[recorded.input], strict=True
    ):
        try:
            off = _off(_read(data, picture.file), sample, recorded.spec)
        except DataError as error:
            return str(error)
        if not off <= recorded.max_diff:
            return (
                f"{picture.file} becomes a tensor that is {off:.4g}/255 off its golden input, "
                f"allowed {recorded.max_diff:.4g}"
            )
    return None


def _read(data: bytes, name: str) -> Pixels:
    return decoded(data, name=name, formats=("PNG",), max_pixels=PIXEL_LIMIT)


def _off(pixels: Pixels, sample: Tensor, spec: PreprocessSpec) -> float:
    """Largest difference in steps; infinite for another shape or dtype, which the spec's geometry
    tells before a tensor is made that could fill all memory."""
    box = geometry(spec, *pixels.shape[:2])
    height, width = sample.shape[1:] if spec.layout == "nchw" else sample.shape[:2]
    if (box.bottom - box.top, box.right - box.left) != (height, width):
        return float("inf")
    if box.height * box.width > PIXEL_LIMIT:
        raise DataError(
            f"resizing to {box.height} x {box.width} pixels is too much for a golden picture, at "
            f"most {PIXEL_LIMIT} are made. Fetch the golden vectors again."
        )
    tensor = preprocess(pixels, spec)
    if (tensor.shape, tensor.dtype) != (sample.shape, sample.dtype):
        return float("inf")
    return round(float(np.abs(to_pixels(tensor, spec) - to_pixels(sample, spec)).max()), _DIGITS)


def _written(folder: Path, place: int, pixels: Pixels) -> GoldenPicture:
    from PIL import Image

    if pixels.shape[0] * pixels.shape[1] > PIXEL_LIMIT:
        raise EvidenceError(
            f"the picture of the golden sample {place} has {pixels.shape[0]} x {pixels.shape[1]} "
            f"pixels, at most {PIXEL_LIMIT} are read again. Give smaller pictures."
        )
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    data = stream.getvalue()
    digest = Digest.of_bytes(data)
    file = f"picture-{place}-{digest.short}.png"
    atomic.write_bytes(folder / file, data)
    return GoldenPicture(file=file, size_bytes=len(data), sha256=digest)
