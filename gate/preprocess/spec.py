"""The spec: how a picture becomes the model's input. One text beside the model, for all consumers.

The steps, always in this order: resize, crop, order of channels, value range, mean and std, layout,
dtype. Between resize and value range the picture is uint8, as it is for all who will implement it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from gate.records.preprocessing import PictureTensor
from gate.storage.record import Record
from gate.storage.yaml_section import has_section, load_section

SECTION = "preprocessing"

Side = Annotated[int, Field(ge=1, le=1 << 14)]
Channels = tuple[float, float, float]
Spread = Annotated[float, Field(gt=0.0)]


class _SpecRecord(Record):
    model_config = ConfigDict(allow_inf_nan=False)


class Resize(_SpecRecord):
    """To which size, and by which filter."""

    size: tuple[Side, Side] | None = None
    """Height and width, whatever the picture's own proportions."""
    shortest_side: Side | None = None
    """The shorter side becomes this; the longer one `side * longer // shorter`."""
    mode: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    """Half-pixel centres. `bilinear` is what others call linear or triangle; `bicubic` is Keys'
    with a = -0.5 (Catmull-Rom) where `antialias`, else with a = -0.75, as PyTorch and OpenCV."""
    antialias: bool = True
    """Widen the filter when the picture shrinks, so that every pixel counts."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.size is None) == (self.shortest_side is None):
            raise ValueError("set exactly one of size [height, width] and shortest_side")
        if self.mode == "nearest" and self.antialias:
            raise ValueError(
                "mode 'nearest' takes one pixel and can't antialias; set antialias: false"
            )
        return self


class PreprocessSpec(_SpecRecord):
    """From uint8 RGB (height, width, 3) to the model's input for one picture.

    Law: `PreprocessSpec.from_json(spec.to_json()) == spec`; `digest()` is that of canonical JSON.
    """

    schema_version: Literal[1] = 1
    resize: Resize | None = None
    crop: tuple[Side, Side] | None = None
    """Height and width from the centre; starts at `round(rest / 2)`, half going to even."""
    channels: Literal["rgb", "bgr"] = "rgb"
    value_range: tuple[Literal[0, -1], Literal[1, 255]] = (0, 1)
    """0 to 255 becomes [0, 1], [0, 255] or [-1, 1]."""
    mean: Channels | None = None
    """Subtracted after that, in the order of `channels` and in units of `value_range`."""
    std: tuple[Spread, Spread, Spread] | None = None
    """Divided by at last."""
    layout: Literal["nchw", "nhwc"] = "nchw"
    dtype: Literal["float32", "float16", "uint8"] = "float32"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self._check_crop()
        if self.value_range == (-1, 255):
            raise ValueError("value_range is [0, 1], [0, 255] or [-1, 1]")
        if (self.mean is None) != (self.std is None):
            raise ValueError("set both mean and std, or neither")
        if self.dtype == "uint8" and (self.value_range != (0, 255) or self.mean is not None):
            raise ValueError(
                "dtype 'uint8' holds 0 to 255 only: set value_range: [0, 255], without mean and std"
            )
        if self.dtype == "float16" and self._largest() > 65504.0:
            raise ValueError("these mean and std leave the range of float16")
        return self

    def _check_crop(self) -> None:
        if self.crop is None or self.resize is None:
            return
        height, width = self.resize.size or (self.resize.shortest_side,) * 2
        if self.crop[0] > (height or 0) or self.crop[1] > (width or 0):
            raise ValueError(
                f"crop {list(self.crop)} is larger than what resize leaves, [{height}, {width}]; "
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
        """How many steps (grey levels) one unit of the tensor is, by channel."""
        low, high = self.value_range
        red, green, blue = (255.0 / (high - low) * s for s in (self.std or (1.0, 1.0, 1.0)))
        return red, green, blue

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the tensor; None: they follow the picture's."""
        if self.crop is not None:
            return self.crop
        return self.resize.size if self.resize else None

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """Shape of one picture's tensor; None: it follows the picture's."""
        height, width = self.size or (None, None)
        return (3, height, width) if self.layout == "nchw" else (height, width, 3)

    @property
    def tensor(self) -> PictureTensor:
        """What it makes of one picture."""
        return PictureTensor(dtype=self.dtype, shape=self.shape)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Read YAML or JSON: a file with a section `preprocessing:`, or with the spec itself.

        Raises PolicyError with file, line and what was expected for each wrong field.
        """
        return load_section(cls, path, SECTION if has_section(path, SECTION) else None)

    @classmethod
    def imagenet(cls) -> Self:
        """As torchvision evaluates on ImageNet: 256 on the short side, 224 from the centre."""
        return cls(
            resize=Resize(shortest_side=256),
            crop=(224, 224),
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        )
