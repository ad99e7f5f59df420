"""Results of the preprocessing comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field

from gate.storage.record import Measured, Record, Sha256, added_field

# A *consumer* computes the model's input from a picture: an implementation in the gate (`pillow`,
# `canvas`, ...), or the user's own, represented by the tensors that it dumped. A *step* is 1/255 of
# the value range before normalization: one gray level of the picture.


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
"""Name of an implementation, or the user's name for a consumer with dumped tensors."""

_Count = Annotated[int, Field(ge=0)]


class PictureTensor(Record):
    """The tensor that a spec computes from one picture."""

    dtype: str
    shape: tuple[int | None, ...]
    """Shape without the batch axis; None for sizes that depend on the picture."""

    def misfit(self, inputs: Iterable[tuple[str, Sequence[int | str]]]) -> str | None:
        """Return why none of a file's inputs (dtype, shape) accepts a batch of the tensor, or None.

        A string in a shape is a dynamic axis, as in a `TensorSpec`.
        """
        accepted, axes = tuple(inputs), (None, *self.shape)
        for dtype, shape in accepted:
            if dtype == self.dtype and len(shape) == len(axes):
                pairs = zip(shape, axes, strict=True)
                if all(n is None or not isinstance(size, int) or size == n for size, n in pairs):
                    return None
        specs = " and ".join(f"{dtype} {_axes(shape)}" for dtype, shape in accepted) or "nothing"
        shape = _axes(("batch", *("any" if axis is None else axis for axis in self.shape)))
        return f"the spec makes {self.dtype} {shape}, the file takes {specs}"


class ChannelDifference(Record):
    """abs(consumer - reference) of one channel over all pictures, in steps."""

    max: Measured
    mean: Measured


class TensorSummary(Record):
    """Statistics of one side's tensors, in the tensors' own units."""

    min: Measured
    max: Measured
    mean: Measured
    first: tuple[Measured, ...] = ()
    """The first 16 values of the first picture, in memory order."""


class Decisions(Record):
    """The effect of the difference on the answers of a model."""

    images: _Count
    flips: _Count
    """Number of pictures whose top-1 class differs."""
    flipped: tuple[str, ...] = ()
    """Names of the first 100 of these pictures."""
    confidence_diff_max: Measured
    """abs(max softmax(consumer) - max softmax(reference)), largest and mean over the pictures."""
    confidence_diff_mean: Measured


class ConsumerParity(Record):
    """The comparison of one consumer with the reference: numbers, or why there are none."""

    consumer: ConsumerName
    images: _Count = 0
    """Number of compared pictures, whose tensors had the reference's shape and dtype."""
    mismatched: tuple[str, ...] = ()
    """`picture: difference` for the first 100 pictures with another shape or dtype."""
    nonfinite: _Count = 0
    """Number of values that are NaN or infinite on either side."""
    shape: tuple[int, ...] = ()
    """Shape of the first picture's tensor."""
    values: TensorSummary | None = None
    max_diff: Measured | None = None
    """Largest abs(consumer - reference) in steps; None if nothing was compared."""
    mean_diff: Measured | None = None
    over_one_step: Measured | None = None
    """Share of values that differ by more than one step."""
    max_diff_output: Measured | None = None
    """`max_diff` in the tensor's own units."""
    mean_diff_output: Measured | None = None
    channels: tuple[ChannelDifference, ...] = ()
    """Differences in the order of the spec's channels."""
    worst: str | None = None
    """Name of the picture with the largest mean difference."""
    causes: tuple[str, ...] = ()
    """Known causes that explain the difference on that picture."""
    explained: Measured | None = None
    """Share of the mean difference that disappears if the causes are applied to the reference."""
    decisions: Decisions | None = None
    """None without a model."""
    unavailable: str | None = None
    """Requirement of the consumer that is missing on this machine."""
    failure: str | None = None
    """Error while the consumer ran."""
    incapable: str | None = added_field(None)
    """Why the consumer can't implement the spec on any machine."""

    @property
    def not_measured(self) -> str | None:
        """Return why the consumer did not run, or None if it did."""
        return self.incapable or self.unavailable

    def within(self, bound: float) -> bool:
        """Return whether all pictures were compared and all values differ by `bound` at most."""
        complete = self.images > 0 and not (self.mismatched or self.nonfinite or self.failure)
        finite = self.max_diff is not None and math.isfinite(self.max_diff)
        return complete and finite and 0.0 <= (self.max_diff or 0.0) <= bound


class PreprocessingParity(Record):
    """The comparison of consumers with one reference, over the same pictures."""

    schema_version: Literal[1] = 1
    spec_sha256: Sha256
    reference: ConsumerName
    reference_values: TensorSummary
    images: _Count
    images_sha256: Sha256
    """Digest of names and decoded pixels."""
    tensor: PictureTensor | None = added_field(None)
    """The tensor that the spec computes and the file must accept."""
    distinct: _Count = added_field(0)
    """Number of pictures with different pixels."""
    model_sha256: Sha256 | None = None
    """Digest of the model of `decisions`."""
    versions: dict[str, str] = Field(default_factory=dict)
    consumers: tuple[ConsumerParity, ...]

    def consumer(self, name: str) -> ConsumerParity | None:
        """Return the measurement of one consumer, or None."""
        return next((parity for parity in self.consumers if parity.consumer == name), None)


def _axes(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(str(axis) for axis in shape)}]"
