"""Section 3: outputs that are not class scores: constants, embeddings, states, pairs, gaps."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.world.fault import DYNAMO_18, AppliedAfter, fault_of

_CONSTANTS = "own-with-constants"


@fault_of("temperature", _CONSTANTS, (_CONSTANTS, "", DYNAMO_18))
def few_ulp(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Scale the constant temperature by 1 + 3e-5."""
    # The optimizer of the dynamo exporter removes a factor of 1 + 1e-6, so there would be no fault.
    return AppliedAfter(model, lambda scores, scale, *others: (scores, scale * (1 + 3e-5), *others))


@fault_of("temperature", _CONSTANTS)
def of_another_checkpoint(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Replace the constant temperature with its value at the beginning of training."""
    return AppliedAfter(
        model, lambda scores, scale, *others: (scores, scale * 0 + 1 / 0.07, *others)
    )


@fault_of("anchors", _CONSTANTS)
def anchors_moved(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Move the anchors by half a cell."""
    return AppliedAfter(
        model, lambda scores, scale, anchors, *others: (scores, scale, anchors + 0.04, *others)
    )


@fault_of("anchors", _CONSTANTS)
def anchors_turned(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Swap x and y of the anchors."""
    return AppliedAfter(
        model, lambda scores, scale, anchors, *others: (scores, scale, anchors.flip(-1), *others)
    )


@fault_of("positions", _CONSTANTS)
def from_one(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Count positions from one instead of zero."""
    return AppliedAfter(
        model,
        lambda scores, scale, anchors, positions, mask: (
            scores,
            scale,
            anchors,
            positions + 1,
            mask,
        ),
    )


@fault_of("constant mask", _CONSTANTS)
def one_false(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Set the last element of the constant mask to False."""
    return AppliedAfter(
        model,
        lambda scores, scale, anchors, positions, _: (
            scores,
            scale,
            anchors,
            positions,
            positions < 7,
        ),
    )


_EMBEDDINGS = {"own-embedded": 0, "own-two-towers": 1, "hf-clip": 1, "hf-mpnet": 1, "hf-dinov2": 1}


def _change_output(model: nn.Module, output_index: int, change: object) -> nn.Module:
    def change_outputs(*outputs: torch.Tensor) -> object:
        changed_outputs = [
            change(output) if index == output_index else output
            for index, output in enumerate(outputs)
        ]  # type: ignore[operator]
        return tuple(changed_outputs) if len(changed_outputs) > 1 else changed_outputs[0]

    return AppliedAfter(model, change_outputs)


@fault_of("embedding rotated", *_EMBEDDINGS, ("own-embedded", "", DYNAMO_18))
def rotated(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Rotate the first two coordinates of the embedding by 0.01 rad, which preserves its length."""
    cosine, sine = math.cos(0.01), math.sin(0.01)

    def change(vectors: torch.Tensor) -> torch.Tensor:
        first, second = vectors[:, :1], vectors[:, 1:2]
        rotated_columns = [cosine * first - sine * second, sine * first + cosine * second]
        return torch.cat([*rotated_columns, vectors[:, 2:]], dim=1)

    return _change_output(model, _EMBEDDINGS[architecture.name], change)


@fault_of("embedding rolled", "own-embedded", "own-two-towers", "hf-mpnet")
def rolled(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Move the coordinates of the embedding by one index."""
    return _change_output(
        model, _EMBEDDINGS[architecture.name], lambda vectors: vectors.roll(1, dims=1)
    )


@fault_of("embedding longer", "own-embedded", "own-two-towers", "hf-clip")
def longer(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Scale embeddings to a length of 1.001."""
    return _change_output(model, _EMBEDDINGS[architecture.name], lambda vectors: vectors * 1.001)


@fault_of("towers swapped", "own-two-towers", "hf-siglip")
def towers_swapped(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Swap the outputs of the two towers."""
    if architecture.name == "hf-siglip":
        return AppliedAfter(model, lambda scores, text, image: (scores, image, text))
    return AppliedAfter(model, lambda user, item, cosine: (item, user, cosine))


@fault_of("pairs transposed", "hf-clip", ("hf-siglip", "", DYNAMO_18))
def transposed(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Transpose the matrix of pair scores."""
    return AppliedAfter(model, lambda scores, text, image: (scores.T, text, image))


@fault_of("pairs off", "hf-clip", "hf-siglip")
def other_scale(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Scale the temperature of the pair scores by 1.001."""
    return AppliedAfter(model, lambda scores, text, image: (scores * 1.001, text, image))


@fault_of("states swapped", "own-sequences")
def states_swapped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Swap the hidden state and the cell state."""
    return AppliedAfter(model, lambda written, hidden, cell: (written, cell, hidden))


@fault_of("order", "own-sorted-scores", ("own-sorted-scores", "", DYNAMO_18))
def ascending(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Sort the scores in ascending instead of descending order."""
    return AppliedAfter(model, lambda scores: scores.flip(1))


@fault_of("order", "own-sorted-scores")
def first_twice(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Repeat the first score in the second column."""
    return AppliedAfter(
        model, lambda scores: torch.cat([scores[:, :1], scores[:, :1], scores[:, 2:]], 1)
    )


@fault_of("place", "own-place")
def in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Round latitude and longitude to float16, an error of kilometers."""
    return AppliedAfter(model, lambda coordinates: coordinates.half().to(coordinates.dtype))


@fault_of("place", "own-place", ("own-place", "", DYNAMO_18))
def a_metre(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Shift the longitude by two hundred meters."""
    return AppliedAfter(
        model, lambda coordinates: coordinates + torch.tensor([0.0, 3e-3], dtype=coordinates.dtype)
    )


@fault_of("place", "own-place")
def turned(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Swap latitude and longitude."""
    return AppliedAfter(model, lambda coordinates: coordinates.flip(1))


@fault_of("gaps elsewhere", "own-gaps", ("own-gaps", "", DYNAMO_18))
def moved_gaps(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Move NaN by one column."""

    def change_outputs(outputs: torch.Tensor) -> torch.Tensor:
        missing = torch.isnan(outputs).roll(1, dims=1)
        return torch.where(
            missing, torch.full((), math.nan, dtype=outputs.dtype), outputs.nan_to_num(0.5)
        )

    return AppliedAfter(model, change_outputs)


@fault_of("gaps filled", "own-gaps")
def filled_gaps(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Replace NaN with zero."""
    return AppliedAfter(model, lambda outputs: outputs.nan_to_num(0.0))


@fault_of("beside gaps", "own-gaps")
def beside_gaps(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Round the values that are not NaN to float16."""
    return AppliedAfter(model, lambda outputs: outputs.half().to(outputs.dtype))
