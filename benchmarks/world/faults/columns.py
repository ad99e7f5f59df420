"""Section 1: a faulty column or channel next to others in larger units, or to masked values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.world.architectures.seeds import SEEDS
from benchmarks.world.fault import DIRECT_17, DYNAMO_18, AppliedAfter, fault_of

Change = Callable[[torch.Tensor], torch.Tensor]

_SMALLEST = {
    "own-money": -1,
    "own-weather": 3,
    "own-boxes-and-score": -1,
    "own-deep-ar": 2,
    "hf-patchtst": 2,
    "hf-patch-mixer": 2,
}
"""Index of the column of the first output that has the smallest unit."""


_ALL_TARGETS = tuple(
    (name, "", DYNAMO_18 if name.startswith("hf-patch") else DIRECT_17) for name in _SMALLEST
)


def _change_column(model: nn.Module, architecture: Architecture, change: Change) -> nn.Module:
    column_index = _SMALLEST[architecture.name.partition(".")[0]]

    def change_outputs(first: torch.Tensor, *others: torch.Tensor) -> object:
        columns = list(first.unbind(-1))
        columns[column_index] = change(columns[column_index])
        stacked = torch.stack(columns, dim=-1)
        return (stacked, *others) if others else stacked

    return AppliedAfter(model, change_outputs)


_SEEDED = tuple(f"{name}.{seed}" for name in ("own-money", "own-weather") for seed in SEEDS)


@fault_of("small column negated", *_ALL_TARGETS, *_SEEDED, ("own-money", "", DYNAMO_18))
def negated(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Negate the column in the smallest unit."""
    return _change_column(model, architecture, torch.neg)


@fault_of("small column scaled", *_ALL_TARGETS, *_SEEDED, ("own-weather", "", DYNAMO_18))
def scaled(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Scale the column in the smallest unit by 1.03."""
    return _change_column(model, architecture, lambda column: column * 1.03)


@fault_of("small column in fp16", *_ALL_TARGETS, ("own-boxes-and-score", "", DYNAMO_18))
def in_half(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Round the column in the smallest unit to float16."""
    return _change_column(model, architecture, lambda column: column.half().float())


@fault_of("small column shifted", *_ALL_TARGETS)
def shifted(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Shift the column in the smallest unit by a thousandth of its spread."""

    def change(column: torch.Tensor) -> torch.Tensor:
        return column + _SPREADS.get(architecture.name, 1e-4)

    return _change_column(model, architecture, change)


_SPREADS = {"own-weather": 2e-6, "hf-patchtst": 5e-5, "hf-patch-mixer": 5e-5, "own-deep-ar": 5e-5}


@fault_of(
    "one coordinate off",
    "own-boxes-and-score",
    "hf-detr",
    "hf-yolos",
    "tv-fcos",
    "tv-ssd",
    "tv-retina",
    "own-centre-net",
    ("hf-yolos", "", DYNAMO_18),
)
def one_coordinate(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Shift the third coordinate of every box by a thousandth of the image size."""
    step = {"own-boxes-and-score": 0.64, "own-centre-net": 0.032, "tv-fcos": 0.064}
    shift = step.get(architecture.name, 1e-3)
    channels = -3 if architecture.name == "own-centre-net" else -1

    def change_outputs(*outputs: torch.Tensor) -> object:
        boxes = outputs[-1]
        indices = torch.arange(boxes.shape[channels])
        selected = (indices == 2).to(boxes.dtype).reshape(-1, *[1] * (-1 - channels))
        moved = boxes + selected * shift
        return (*outputs[:-1], moved) if len(outputs) > 1 else moved

    return AppliedAfter(model, change_outputs)


@fault_of(
    "other words win", "own-masked-words", "own-least-words", "own-lost-words", "own-next-item"
)
def words_swapped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Swap the scores of neighboring tokens unless one of them is masked."""

    def change_outputs(scores: torch.Tensor) -> torch.Tensor:
        neighbors = scores.roll(1, dims=1)
        unmasked = (scores > -1e8) & (neighbors > -1e8)
        return torch.where(unmasked, neighbors, scores)

    return AppliedAfter(model, change_outputs)


@fault_of(
    "scores beside a mask",
    "own-masked-words",
    "own-least-words",
    "own-lost-words",
    "own-next-item",
    ("own-masked-words", "", DYNAMO_18),
)
def unmasked_in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Round the scores that are not masked to float16."""

    def change_outputs(scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores > -1e8, scores.clamp(-1e4, 1e4).half().to(scores.dtype), scores)

    return AppliedAfter(model, change_outputs)


@fault_of("another temperature", "own-masked-words", "own-least-words", "own-lost-words")
def warmer(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Scale the scores that are not masked by 1.01."""
    return AppliedAfter(model, lambda scores: torch.where(scores > -1e8, scores * 1.01, scores))


@fault_of("one word more is masked", "own-masked-words", "own-lost-words", "own-next-item")
def masked_more(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Mask one additional token in all samples."""

    def change_outputs(scores: torch.Tensor) -> torch.Tensor:
        is_masked = torch.arange(scores.shape[1]) == 7
        return torch.where(is_masked, torch.full((), -1e9, dtype=scores.dtype), scores)

    return AppliedAfter(model, change_outputs)


_CHANNELS = {
    "hf-segformer": 4,
    "tv-fcn": 1,
    "tv-deeplab": 3,
    "tv-lraspp": 2,
    "tv-keypoints": 1,
    "own-centre-net": 2,
    "own-separator": 1,
    "own-causal": 1,
    "own-running": 0,
}


@fault_of("one channel", *_CHANNELS, ("tv-fcn", "", DYNAMO_18))
def one_channel(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Scale one channel along axis 1 by 1.01."""
    channel = _CHANNELS[architecture.name]

    def change_outputs(first: torch.Tensor, *others: torch.Tensor) -> object:
        selected = (torch.arange(first.shape[1]) == channel).to(first.dtype)
        scaled_output = first * (1 + 0.01 * selected.reshape(-1, *[1] * (first.ndim - 2)))
        return (scaled_output, *others) if others else scaled_output

    return AppliedAfter(model, change_outputs)
