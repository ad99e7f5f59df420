"""Specification of preprocessing a picture: resize, crop, scale, layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from gate.errors import DataError, DigestMismatch, EvidenceError
from gate.records.layout import PREPROCESSING, SPEC, SPEC_LIMIT
from gate.records.preprocessing import PictureTensor
from gate.storage.digest import Digest
from gate.storage.record import Record
from gate.storage.untrusted_files import read_untrusted
from gate.storage.yaml_section import has_section, load_section

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gate.storage.arrays import Pixels, Tensor

SECTION = "preprocessing"

Side = Annotated[int, Field(ge=1, le=1 << 14)]

Channels = tuple[float, float, float]

Spread = Annotated[float, Field(gt=0.0)]


class _SpecRecord(Record):
    model_config = ConfigDict(allow_inf_nan=False)


class Resize(_SpecRecord):
    """The target size and the filter of a resize."""

    size: tuple[Side, Side] | None = None
    """Height and width, independent of the picture's aspect ratio."""
    shortest_side: Side | None = None
    """The new length of the shorter side; the longer one becomes `side * longer // shorter`."""
    mode: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    """Half-pixel centers. `bilinear` is also called linear or triangle. `bicubic` is Keys' with a =
    -0.5 (Catmull-Rom) with `antialias`, otherwise with a = -0.75, as in PyTorch and OpenCV."""
    antialias: bool = True
    """Widen the filter when the picture shrinks, so that every pixel contributes."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.size is None) == (self.shortest_side is None):
            raise ValueError("set exactly one of size [height, width] and shortest_side")
        if self.mode == "nearest" and self.antialias:
            raise ValueError(
                "mode 'nearest' uses a single pixel and can't antialias; set antialias: false"
            )
        return self


class PreprocessSpec(_SpecRecord):
    """The steps from uint8 RGB (height, width, 3) to the model's input for one picture."""

    schema_version: Literal[1] = 1
    resize: Resize | None = None
    crop: tuple[Side, Side] | None = None
    """Height and width of the center crop, which starts at `round(rest / 2)`, half to even."""
    channels: Literal["rgb", "bgr"] = "rgb"
    value_range: tuple[Literal[0, -1], Literal[1, 255]] = (0, 1)
    """The range to which 0 to 255 is scaled: [0, 1], [0, 255] or [-1, 1]."""
    mean: Channels | None = None
    """Subtracted after scaling, in the order of `channels` and in units of `value_range`."""
    std: tuple[Spread, Spread, Spread] | None = None
    """Divisor after the mean is subtracted."""
    layout: Literal["nchw", "nhwc"] = "nchw"
    dtype: Literal["float32", "float16", "uint8"] = "float32"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self._check_crop()
        if self.value_range == (-1, 255):
            raise ValueError("value_range must be [0, 1], [0, 255] or [-1, 1]")
        if (self.mean is None) != (self.std is None):
            raise ValueError("set both mean and std, or neither")
        if self.dtype == "uint8" and (self.value_range != (0, 255) or self.mean is not None):
            raise ValueError("dtype 'uint8' needs value_range: [0, 255], and no mean and std")
        if self.dtype == "float16" and self._largest() > 65504.0:
            raise ValueError("with this mean and std, values exceed the range of float16")
        return self

    def _check_crop(self) -> None:
        if self.crop is None or self.resize is None:
            return
        height, width = self.resize.size or (self.resize.shortest_side,) * 2
        if self.crop[0] > (height or 0) or self.crop[1] > (width or 0):
            raise ValueError(
                f"crop {list(self.crop)} is larger than the resized picture, [{height}, {width}]; "
                "every picture must be at least as large as the crop"
            )

    def _largest(self) -> float:
        low, high = self.value_range
        if self.mean is None or self.std is None:
            return float(high)
        sides = ((abs(low - m), abs(high - m)) for m in self.mean)
        return max(max(side) / s for side, s in zip(sides, self.std, strict=True))

    @property
    def steps(self) -> Channels:
        """Return the number of steps (gray levels) in one unit of the tensor, by channel."""
        low, high = self.value_range
        red, green, blue = (255.0 / (high - low) * s for s in (self.std or (1.0, 1.0, 1.0)))
        return red, green, blue

    @property
    def size(self) -> tuple[int, int] | None:
        """Return height and width of the tensor; None if they depend on the picture."""
        if self.crop is not None:
            return self.crop
        return self.resize.size if self.resize else None

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """Return the shape of one picture's tensor; None for sizes that depend on the picture."""
        height, width = self.size or (None, None)
        return (3, height, width) if self.layout == "nchw" else (height, width, 3)

    @property
    def tensor(self) -> PictureTensor:
        """Return the input tensor for one picture."""
        return PictureTensor(dtype=self.dtype, shape=self.shape)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read YAML or JSON: a file that has a section `preprocessing:`, or is the spec.

        Raises PolicyError with file, line and what was expected for each wrong field.
        """
        return load_section(cls, path, SECTION if has_section(path, SECTION) else None)

    @classmethod
    def imagenet(cls) -> Self:
        """Return torchvision's ImageNet evaluation: shorter side 256, center crop 224."""
        return cls(
            resize=Resize(shortest_side=256),
            crop=(224, 224),
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        )


def verify_spec(path: Path, expected: Digest, *, label: str) -> PreprocessSpec:
    """Read the preprocessing spec of a model, and verify its digest.

    Raises DigestMismatch, also if it is missing or not valid; StorageError.
    """
    try:
        data = read_untrusted(path, limit=SPEC_LIMIT)
        return PreprocessSpec.from_untrusted(
            data, label=f"the preprocessing spec of {label}", sha256=expected
        )
    except EvidenceError as error:
        raise DigestMismatch(f"the preprocessing spec of {label} is not valid: {error}") from error


def spec_path(onnx_path: Path) -> Path:
    """Return the path of the spec of a model."""
    return onnx_path.parent / PREPROCESSING / SPEC


_PIXEL_LIMIT = 1 << 28
"""Maximum size of a resized picture: `shortest_side` could enlarge a narrow one enormously."""


class Geometry(NamedTuple):
    """The size after the resize, and the box of the crop."""

    height: int
    width: int
    top: int
    left: int
    bottom: int
    right: int


def geometry(spec: PreprocessSpec, height: int, width: int) -> Geometry:
    """Return the geometry for a picture of this size.

    Raises DataError for a picture that is empty, smaller than the crop, or too large after the
    resize.
    """
    if height < 1 or width < 1:
        raise DataError(f"a picture of {height} x {width} pixels is empty. Use another one.")
    resized = _resized(spec, height, width)
    if resized[0] * resized[1] > _PIXEL_LIMIT:
        raise DataError(
            f"a picture of {height} x {width} pixels would become {resized[0]} x {resized[1]}. "
            "Remove it, or resize to a fixed size."
        )
    crop = spec.crop or resized
    if crop[0] > resized[0] or crop[1] > resized[1]:
        raise DataError(
            f"a picture of {resized[0]} x {resized[1]} pixels is smaller than the crop "
            f"{list(crop)}. Use larger pictures, or resize before the crop."
        )
    top, left = round((resized[0] - crop[0]) / 2), round((resized[1] - crop[1]) / 2)
    return Geometry(*resized, top, left, top + crop[0], left + crop[1])


def _resized(spec: PreprocessSpec, height: int, width: int) -> tuple[int, int]:
    if spec.resize is None:
        return height, width
    if spec.resize.size is not None:
        return spec.resize.size
    side, shorter = spec.resize.shortest_side or 0, min(height, width)
    return side * height // shorter, side * width // shorter


def cropped(pixels: Pixels, box: Geometry) -> Pixels:
    """Crop a resized picture."""
    return pixels[box.top : box.bottom, box.left : box.right]


def to_tensor(pixels: Pixels, spec: PreprocessSpec) -> Tensor:
    """Apply channel order, value range, mean, std, layout and dtype to resized, cropped pixels."""
    import numpy as np

    ordered = pixels[..., ::-1] if spec.channels == "bgr" else pixels
    values: Tensor = ordered if spec.dtype == "uint8" else _normalized(ordered, spec)
    if spec.layout == "nchw":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values, dtype=spec.dtype)


def channels_last(tensor: Tensor, spec: PreprocessSpec) -> NDArray[np.float64]:
    """Return the tensor in float64, shape (height, width, 3)."""
    import numpy as np

    values = np.asarray(tensor, dtype=np.float64)
    return values.transpose(1, 2, 0) if spec.layout == "nchw" else values


def to_pixels(tensor: Tensor, spec: PreprocessSpec) -> NDArray[np.float64]:
    """Invert `to_tensor`: return RGB (height, width, 3) in steps, 0 to 255, not rounded."""
    import numpy as np

    values = channels_last(tensor, spec)
    if spec.mean is not None and spec.std is not None:
        values = values * np.array(spec.std) + np.array(spec.mean)
    low, high = spec.value_range
    values = (values - low) * (255.0 / (high - low))
    return values[..., ::-1] if spec.channels == "bgr" else values


def _normalized(pixels: Pixels, spec: PreprocessSpec) -> NDArray[np.float32]:
    import numpy as np

    values = pixels.astype(np.float32)
    if spec.value_range != (0, 255):
        values = values / np.float32(255.0)
    if spec.value_range == (-1, 1):
        values = values * np.float32(2.0) - np.float32(1.0)
    if spec.mean is not None and spec.std is not None:
        mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
        values = ((values - mean) / std).astype(np.float32, copy=False)
    return values
