"""Faulty outputs that are not class scores: embeddings, scores of pairs, boxes, one channel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.exporters import DYNAMO_18
from benchmarks.world.fault import Wrapped, fault_of

_EMBEDDINGS = ("hf-clip", "hf-mpnet", "hf-dinov2")
"""Models whose second output is an embedding."""


def _change_second_output(
    model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    return Wrapped(model, outputs=lambda first, second, *rest: (first, change(second), *rest))


@fault_of("embedding rotated", *_EMBEDDINGS)
def rotated(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Rotate the first two coordinates of the embedding by 0.01 rad, which preserves its length."""
    cosine, sine = math.cos(0.01), math.sin(0.01)

    def change(vectors: torch.Tensor) -> torch.Tensor:
        first, second = vectors[:, :1], vectors[:, 1:2]
        rotated_columns = [cosine * first - sine * second, sine * first + cosine * second]
        return torch.cat([*rotated_columns, vectors[:, 2:]], dim=1)

    return _change_second_output(model, change)


@fault_of("embedding rolled", "hf-mpnet")
def rolled(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Move the coordinates of the embedding by one index."""
    return _change_second_output(model, lambda vectors: vectors.roll(1, dims=1))


@fault_of("embedding longer", "hf-clip")
def longer(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Scale embeddings to a length of 1.001."""
    return _change_second_output(model, lambda vectors: vectors * 1.001)


@fault_of("towers swapped", "hf-siglip")
def towers_swapped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Swap the outputs of the two towers."""
    return Wrapped(model, outputs=lambda scores, text, image: (scores, image, text))


@fault_of("pairs transposed", "hf-clip", ("hf-siglip", "", DYNAMO_18))
def transposed(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Transpose the matrix of pair scores."""
    return Wrapped(model, outputs=lambda scores, text, image: (scores.T, text, image))


@fault_of("pairs off", "hf-clip", "hf-siglip")
def other_scale(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Scale the temperature of the pair scores by 1.001."""
    return Wrapped(model, outputs=lambda scores, text, image: (scores * 1.001, text, image))


@fault_of("one coordinate off", "hf-detr", "hf-yolos", ("hf-yolos", "", DYNAMO_18))
def one_coordinate(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Shift the third coordinate of every box by a thousandth of the image size."""

    def change(boxes: torch.Tensor) -> torch.Tensor:
        return boxes + (torch.arange(boxes.shape[-1]) == 2).to(boxes.dtype) * 1e-3

    return _change_second_output(model, change)


@fault_of("one channel", "hf-segformer")
def one_channel(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Scale the channel 4 of the scores by 1.01."""

    def change(scores: torch.Tensor) -> torch.Tensor:
        selected = (torch.arange(scores.shape[1]) == 4).to(scores.dtype)
        return scores * (1 + 0.01 * selected[:, None, None])

    return Wrapped(model, outputs=change)
