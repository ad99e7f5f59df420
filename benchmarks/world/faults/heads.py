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
    """The constant temperature is off by thirty millionths of itself."""
    # dynamo's optimiser takes a factor of 1 + 1e-6 for none, and then nothing is wrong.
    return AppliedAfter(model, lambda scores, scale, *others: (scores, scale * (1 + 3e-5), *others))


@fault_of("temperature", _CONSTANTS)
def of_another_checkpoint(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The constant temperature is that of the beginning of training."""
    return AppliedAfter(
        model, lambda scores, scale, *others: (scores, scale * 0 + 1 / 0.07, *others)
    )


@fault_of("anchors", _CONSTANTS)
def anchors_moved(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Anchors are half a cell too far."""
    return AppliedAfter(
        model, lambda scores, scale, anchors, *others: (scores, scale, anchors + 0.04, *others)
    )


@fault_of("anchors", _CONSTANTS)
def anchors_turned(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Anchors have x and y swapped."""
    return AppliedAfter(
        model, lambda scores, scale, anchors, *others: (scores, scale, anchors.flip(-1), *others)
    )


@fault_of("positions", _CONSTANTS)
def from_one(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Positions count from one."""
    return AppliedAfter(
        model,
        lambda scores, scale, anchors, places, kept: (scores, scale, anchors, places + 1, kept),
    )


@fault_of("constant mask", _CONSTANTS)
def one_false(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The last place of the mask is false."""
    return AppliedAfter(
        model,
        lambda scores, scale, anchors, places, _: (scores, scale, anchors, places, places < 7),
    )


_EMBEDDINGS = {"own-embedded": 0, "own-two-towers": 1, "hf-clip": 1, "hf-mpnet": 1, "hf-dinov2": 1}


def _changed(model: nn.Module, place: int, change: object) -> nn.Module:
    def changed(*outputs: torch.Tensor) -> object:
        made = [change(one) if at == place else one for at, one in enumerate(outputs)]  # type: ignore[operator]
        return tuple(made) if len(made) > 1 else made[0]

    return AppliedAfter(model, changed)


@fault_of("embedding rotated", *_EMBEDDINGS, ("own-embedded", "", DYNAMO_18))
def rotated(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The first two coordinates of the embedding are turned by a hundredth of a radian: its length
    and nearly all distances stay."""
    cosine, sine = math.cos(0.01), math.sin(0.01)

    def change(vectors: torch.Tensor) -> torch.Tensor:
        first, second = vectors[:, :1], vectors[:, 1:2]
        turned = [cosine * first - sine * second, sine * first + cosine * second]
        return torch.cat([*turned, vectors[:, 2:]], dim=1)

    return _changed(model, _EMBEDDINGS[architecture.name], change)


@fault_of("embedding rolled", "own-embedded", "own-two-towers", "hf-mpnet")
def rolled(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The coordinates of the embedding stand one place further."""
    return _changed(model, _EMBEDDINGS[architecture.name], lambda vectors: vectors.roll(1, dims=1))


@fault_of("embedding longer", "own-embedded", "own-two-towers", "hf-clip")
def longer(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Embeddings have a length of 1.001."""
    return _changed(model, _EMBEDDINGS[architecture.name], lambda vectors: vectors * 1.001)


@fault_of("towers swapped", "own-two-towers", "hf-siglip")
def towers_swapped(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The outputs of the two towers are swapped."""
    if architecture.name == "hf-siglip":
        return AppliedAfter(model, lambda scores, text, image: (scores, image, text))
    return AppliedAfter(model, lambda user, item, cosine: (item, user, cosine))


@fault_of("pairs transposed", "hf-clip", ("hf-siglip", "", DYNAMO_18))
def transposed(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Rows and columns of the matrix of pairs are swapped."""
    return AppliedAfter(model, lambda scores, text, image: (scores.T, text, image))


@fault_of("pairs off", "hf-clip", "hf-siglip")
def other_scale(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The temperature of the pairs is off by a thousandth."""
    return AppliedAfter(model, lambda scores, text, image: (scores * 1.001, text, image))


@fault_of("states swapped", "own-sequences")
def states_swapped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The cell stands where the hidden state should."""
    return AppliedAfter(model, lambda written, hidden, cell: (written, cell, hidden))


@fault_of("order", "own-sorted-scores", ("own-sorted-scores", "", DYNAMO_18))
def ascending(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The scores rise instead of falling."""
    return AppliedAfter(model, lambda scores: scores.flip(1))


@fault_of("order", "own-sorted-scores")
def first_twice(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The second score repeats the first."""
    return AppliedAfter(
        model, lambda scores: torch.cat([scores[:, :1], scores[:, :1], scores[:, 2:]], 1)
    )


@fault_of("place", "own-place")
def in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Latitude and longitude go through fp16: streets are kilometres away."""
    return AppliedAfter(model, lambda place: place.half().to(place.dtype))


@fault_of("place", "own-place", ("own-place", "", DYNAMO_18))
def a_metre(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The longitude is off by two hundred metres."""
    return AppliedAfter(model, lambda place: place + torch.tensor([0.0, 3e-3], dtype=place.dtype))


@fault_of("place", "own-place")
def turned(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Latitude and longitude are swapped."""
    return AppliedAfter(model, lambda place: place.flip(1))


@fault_of("gaps elsewhere", "own-gaps", ("own-gaps", "", DYNAMO_18))
def moved_gaps(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """NaN stands one column further."""

    def changed(answers: torch.Tensor) -> torch.Tensor:
        missing = torch.isnan(answers).roll(1, dims=1)
        return torch.where(
            missing, torch.full((), math.nan, dtype=answers.dtype), answers.nan_to_num(0.5)
        )

    return AppliedAfter(model, changed)


@fault_of("gaps filled", "own-gaps")
def filled_gaps(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Where NaN should stand is zero."""
    return AppliedAfter(model, lambda answers: answers.nan_to_num(0.0))


@fault_of("beside gaps", "own-gaps")
def beside_gaps(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """What is there goes through fp16."""
    return AppliedAfter(model, lambda answers: answers.half().to(answers.dtype))
