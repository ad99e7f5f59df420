"""The settings of an export: the `export:` section of params.yaml."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from gate.record import Record

TensorName = Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=200)]
"""The name of an input or output: not empty, no white space."""

Names = Annotated[tuple[TensorName, ...], Field(min_length=1)]


class ExportSettings(Record):
    """Every choice of the traced export, none left to the exporter's defaults.

    Raises pydantic's ValidationError for an opset outside of what the TorchScript-based exporter
    writes (9 to 20), names that are empty or not unique, and a batch below 1.
    """

    strategy: Literal["traced"] = "traced"
    opset: Annotated[int, Field(ge=9, le=20)] = 13
    export_params: bool = True
    """False writes a file without weights: they become inputs."""
    do_constant_folding: bool = True
    training: Literal["eval"] = "eval"
    input_names: Names = ("input",)
    """In the order of `forward`'s positional arguments."""
    output_names: Names = ("logits",)
    """In the order of the returned tensors, nested tuples flattened."""
    dynamic_batch: bool = True
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 4
    """Batch of the traced example. At least 2 for a dynamic batch: an axis of size 1 is
    squeezed and broadcast in silence, so a trace with one sample bakes in more easily."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = Counter((*self.input_names, *self.output_names))
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            raise ValueError(
                f"the names of inputs and outputs must differ, repeated: {', '.join(repeated)}"
            )
        if self.dynamic_batch and self.batch_size < 2:
            raise ValueError(
                "batch_size 1 with dynamic_batch: true bakes the batch in too easily; "
                "set batch_size to 2 or more, or dynamic_batch: false"
            )
        return self
