"""The policy's section on preprocessing: who must make the tensors that a model was trained on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gate.policy.sections import Bound, PolicyRecord, Share
from gate.records.preprocessing import ConsumerName, ImplementationName


class PreprocessingPolicy(PolicyRecord):
    """How near those who feed the model must come to the preprocessing that it was trained with."""

    consumers: Annotated[tuple[ConsumerName, ...], Field(min_length=1)]
    """Implementations of the gate (docs/preprocessing.md), or consumers whose tensors are given."""
    training_side: ImplementationName = "pillow"
    """Whom they are compared with."""
    required: Literal["always", "when_present"] = "always"
    """`when_present`: an implementation that is not installed on the measuring machine is waived;
    one that can't do the spec anywhere is not."""
    max_diff: Bound = 1.0
    """Of any value, in 1/255 of the value range before normalisation."""
    max_flips: Share | None = None
    """Largest share of pictures whose top-1 class differs; None: the model is not asked."""
    min_images: Annotated[int, Field(ge=1)] = 50
    """Copies of a picture, pixel by pixel, count once."""

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if len(set(self.consumers)) < len(self.consumers) or self.training_side in self.consumers:
            raise ValueError(
                f"consumers {list(self.consumers)}: name each once, and not the training side "
                f"'{self.training_side}', which is always the same as itself"
            )
        return self
