"""Results of the preprocessing comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field

from gate.storage.record import Measured, Record, Sha256, added_field

# A *consumer* makes the model's input from a picture: an implementation that the gate includes
# (`pillow`, `canvas`, ...), or one of the user's own, represented by the tensors that it dumped. A
# *step* is 1/255 of the value range before normalization: one gray level of the picture.


ImplementationName = Literal[
    "pillow",
    "torchvision",
    "torchvision-no-antialias",
    "opencv",
    "opencv-area",
    "onnx",
    "onnx-asymmetric",
    "canvas",
    "rust-image",
]

IMPLEMENTATIONS: tuple[ImplementationName, ...] = get_args(ImplementationName)

CONSUMER_NAME = r"^[a-z0-9][a-z0-9.-]{0,63}$"

ConsumerName = Annotated[str, Field(pattern=CONSUMER_NAME)]
"""Of an implementation, or the user's own name for a consumer whose tensors are given."""


_Count = Annotated[int, Field(ge=0)]


class PictureTensor(Record):
    """The tensor that a spec makes from one picture."""

    dtype: str
    shape: tuple[int | None, ...]
    """Without the batch axis; None: it follows the picture's size."""

    def fits(self, dtype: str, shape: Sequence[int | str]) -> bool:
        """True if an input of this dtype and shape takes it, with a batch axis in front.

        A text is a dynamic axis, as in a `TensorSpec`.
        """
        axes = (None, *self.shape)
        return (
            dtype == self.dtype
            and len(shape) == len(axes)
            and all(
                want is None or not isinstance(size, int) or size == want
                for size, want in zip(shape, axes, strict=True)
            )
        )

    def misfit(self, inputs: Iterable[tuple[str, Sequence[int | str]]]) -> str | None:
        """Return why none of a file's inputs, each of dtype and shape, takes it; None: one does."""
        offered = tuple(inputs)
        if any(self.fits(dtype, shape) for dtype, shape in offered):
            return None
        taken = " and ".join(f"{dtype} {_axes(shape)}" for dtype, shape in offered) or "nothing"
        made = _axes(("batch", *("any" if axis is None else axis for axis in self.shape)))
        return f"the spec makes {self.dtype} {made}, the file takes {taken}"


class ChannelDifference(Record):
    """abs(consumer - reference) of one channel over all pictures, in steps."""

    max: Measured
    mean: Measured


class TensorSummary(Record):
    """A side's tensors, in its own units."""

    min: Measured
    max: Measured
    mean: Measured
    first: tuple[Measured, ...] = ()
    """The first sixteen values of the first picture, in the order of memory."""


class Decisions(Record):
    """The effect of the difference on the answers of a model."""

    images: _Count
    flips: _Count
    """Pictures whose top-1 class differs."""
    flipped: tuple[str, ...] = ()
    """Names of the first hundred."""
    confidence_diff_max: Measured
    """abs(max softmax(consumer) - max softmax(reference)), largest and mean over the pictures."""
    confidence_diff_mean: Measured


class ConsumerParity(Record):
    """One consumer against the reference. Either numbers, or why there are none."""

    consumer: ConsumerName
    images: _Count = 0
    """Pictures whose tensor had the reference's shape and dtype, and was compared."""
    mismatched: tuple[str, ...] = ()
    """`picture: what differs` for the first hundred with another shape or dtype."""
    nonfinite: _Count = 0
    """Values that are NaN or infinite on either side."""
    shape: tuple[int, ...] = ()
    """Of the first picture's tensor."""
    values: TensorSummary | None = None
    max_diff: Measured | None = None
    """Largest abs(consumer - reference), in steps; None: nothing to compare."""
    mean_diff: Measured | None = None
    over_one_step: Measured | None = None
    """Share of values that are more than one step off."""
    max_diff_output: Measured | None = None
    """The same in the tensor's own units."""
    mean_diff_output: Measured | None = None
    channels: tuple[ChannelDifference, ...] = ()
    """In the order of the spec's channels."""
    worst: str | None = None
    """Name of the picture with the largest mean difference."""
    causes: tuple[str, ...] = ()
    """Known causes which explain the difference on that picture."""
    explained: Measured | None = None
    """Share of the mean difference that vanishes once the causes are applied to the reference."""
    decisions: Decisions | None = None
    """None: no model was given."""
    unavailable: str | None = None
    """What it needs and is not on this machine: on another one it runs."""
    failure: str | None = None
    """What broke while it ran."""
    incapable: str | None = added_field(None)
    """Why it can't do the spec, wherever it runs."""

    @property
    def not_measured(self) -> str | None:
        """Return why it never ran, or None if it did."""
        return self.incapable or self.unavailable

    def within(self, bound: float) -> bool:
        """True only if every picture was compared and no value is more than `bound` steps off."""
        whole = self.images > 0 and not (self.mismatched or self.nonfinite or self.failure)
        finite = self.max_diff is not None and math.isfinite(self.max_diff)
        return whole and finite and 0.0 <= (self.max_diff or 0.0) <= bound


class PreprocessingParity(Record):
    """The comparison of consumers with one reference, over the same pictures."""

    schema_version: Literal[1] = 1
    spec_sha256: Sha256
    reference: ConsumerName
    reference_values: TensorSummary
    images: _Count
    images_sha256: Sha256
    """Of names and decoded pixels."""
    tensor: PictureTensor | None = added_field(None)
    """What the spec makes, which the file must take."""
    distinct: _Count = added_field(0)
    """How many there are if copies, pixel by pixel, count once."""
    model_sha256: Sha256 | None = None
    """The model of `decisions`."""
    versions: dict[str, str] = Field(default_factory=dict)
    consumers: tuple[ConsumerParity, ...]

    def consumer(self, name: str) -> ConsumerParity | None:
        """Return the measurement of one consumer, or None."""
        return next((parity for parity in self.consumers if parity.consumer == name), None)


def _axes(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(str(axis) for axis in shape)}]"
