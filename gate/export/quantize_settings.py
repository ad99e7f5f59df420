"""The settings of the quantizer: the `quantize:` section of params.yaml.

Apart from the quantizer, so that params.yaml is read without onnx.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gate.storage.record import Record


class QuantizeSettings(Record):
    """Every choice of the quantizer."""

    samples: Annotated[int, Field(ge=1)] = 128
    """Calibration samples: the ranges of the activations are taken from them."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    method: Literal["minmax", "entropy", "percentile"] = "minmax"
    """How a range is taken from the values that were seen."""
    per_channel: bool = True
    """A scale for each output channel of a weight, instead of one for the tensor."""
    reduce_range: bool = True
    """Seven bits for weights: processors without VNNI saturate products of eight, so that the same
    file would answer otherwise there."""
    activation: Literal["uint8", "int8"] = "uint8"
    weight: Literal["uint8", "int8"] = "int8"
